"""Secrets: every draw has a key of its own, and no secret leaves its process."""

import base64
import copy
import hashlib
import hmac
import json
import math
import pickle

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from gredp import GredpError, PrivacyEngine
from gredp.app.cli import main
from gredp.chacha import chacha20
from gredp.gradient.noise import SecretSource
from gredp.randomness import Secret
from gredp.sampling import PoissonBatchSampler

ONE = torch.zeros(1)


def test_keys_differ_in_every_part_of_their_label():
    secret, streams = Secret(), []
    for incarnation in (0, 1, 11):
        secret.incarnation = incarnation
        for purpose in ("noise", "batches"):
            streams += [bytes(secret.keystream(32, purpose, *n)) for n in [(1, 1), (1, 11), (11, 1), (2, 1)]]
    assert len(set(streams)) == len(streams) == 24
    assert Secret().keystream(32, "noise", 1) != Secret().keystream(32, "noise", 1)
    assert Secret(7).keystream(32, "noise", 1) == Secret(7).keystream(32, "noise", 1)


def test_the_keystream_is_aes_in_counter_mode():
    """NIST SP 800-38A, F.5.5, through the same calls: the cipher is the one that is named."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")
    cipher = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    assert cipher.update(plain).hex() == "601ec313775789a5b7a7f504bbf3d228"
    stream = bytes(Secret(1).keystream(1 << 16, "noise"))[: 1 << 16]
    ones = sum(byte.bit_count() for byte in stream)
    assert abs(ones - (1 << 18)) <= 6 * math.sqrt(1 << 17)


@pytest.mark.parametrize("blocks", [1, 2, 1000])
def test_chacha20_on_tensors_is_the_cipher_of_that_name(blocks):
    """Bit for bit, against OpenSSL's: the operations are the same on every device."""
    key = bytes(Secret(blocks).keystream(32, "key")[:32])
    truth = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(64 * blocks))
    assert chacha20(key, blocks, torch.device("cpu")).numpy().tobytes() == truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_a_device_is_normal_and_never_the_same(dtype):
    """The CPU in the place of another device, whose words are ChaCha20's and whose numbers are torch's."""
    secret, draws = Secret(2), []
    of_pair = 4 if dtype == torch.float64 else 2
    for block in (1, 2):
        words = chacha20(secret._key_for("noise", 1, block, 0), -(-of_pair * 20_001 // 16), ONE.device)
        draws.append(torch.empty(40_001, dtype=dtype))
        SecretSource(secret)._transform(
            torch, torch.Tensor.to, draws[-1], words[: of_pair * 20_001], 1, block, 0
        )
    first, second = (draw.double() for draw in draws)
    assert stats.kstest(first, "norm").pvalue > 1e-6
    assert abs(float((first * second).mean())) <= 6 / math.sqrt(len(first))


def test_words_in_turn_are_those_of_one_keystream():
    counts, secret = (3, 1000, 0, 17, 1000), Secret(1)
    parts = [words.tobytes() for words in secret.words_in_turn(counts, "noise", 1)]
    assert [len(part) // 4 for part in parts] == list(counts)
    assert b"".join(parts) == bytes(secret.keystream(4 * sum(counts), "noise", 1)[: 4 * sum(counts)])
    assert not list(secret.words_in_turn((), "noise", 1))


def test_threads_draw_what_one_draws_and_no_part_is_another(monkeypatch):
    monkeypatch.setattr("gredp.gradient.noise.AT_ONCE", 1000)
    monkeypatch.setattr("gredp.gradient.noise.IN_CACHE", 300)
    draws = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        source = SecretSource(Secret(2))
        source.begin(1)
        draws.append(source.normal((9, 1111), ONE).flatten())
    assert torch.equal(*draws)
    assert len({part.numpy().tobytes() for part in draws[0].split(1000)}) == 10
    assert stats.kstest(draws[0], "norm").pvalue > 1e-6


def test_uniform_numbers_lie_above_zero_and_have_53_bits():
    u = Secret(3).uniform(200_000, "x")
    assert float(u.min()) > 0
    assert float(u.max()) <= 1
    assert abs(float(u.mean()) - 0.5) <= 6 / math.sqrt(12 * len(u))
    scaled = u * 2.0**53
    assert torch.equal(scaled, scaled.floor())
    assert len(u.unique()) == len(u)
    assert len(Secret(3).uniform(0, "x")) == 0


@pytest.mark.fault("noise reuse")
def test_digests_of_all_draws_are_unique_over_steps_blocks_and_incarnations():
    """Under one and the same seed, so that nothing but the labels can keep them apart."""
    digests, draws = set(), 0
    for incarnation in range(1, 5):
        secret = Secret(0)
        secret.incarnation = incarnation
        source = SecretSource(secret)
        sampler = PoissonBatchSampler(1000, 0.5, 1, secret=secret)
        for step in range(1, 26):
            source.begin(step)
            for shape in ((64,), (64,), (8, 8)):
                digests.add(hashlib.sha256(source.normal(shape, ONE).numpy().tobytes()).digest())
            digests.add(str(sampler.draw()))
            draws += 4
    assert len(digests) == draws == 400


def test_a_step_is_noised_once():
    source = SecretSource(Secret())
    source.begin(3)
    for again in (3, 2):
        with pytest.raises(GredpError, match=f"noise of step {again} was drawn already"):
            source.begin(again)
    assert source.normal((0,), ONE).shape == (0,)
    assert source.normal((), ONE).shape == ()
    assert source.normal((3,), ONE.bfloat16()).dtype == torch.bfloat16


def test_a_secret_is_neither_copied_nor_stored():
    """A copy would draw the same noise for other inputs; a stored one could be found."""
    engine = PrivacyEngine()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(GredpError, match="cannot be copied or stored"):
            attempt(engine.secret)
    process = engine.secret._process
    engine.secret._process = process + 1
    with pytest.raises(GredpError, match="stays in its process"):
        engine.secret.keystream(1, "noise")
    assert repr(engine.secret) == "Secret()"


@pytest.mark.fault("secret")
def test_no_file_of_a_run_holds_the_secret(capsys, tmp_path, monkeypatch):
    """Raw, in hex, in base64 or as a number; nor any key that was derived from it."""
    secrets, derive = [], hmac.digest

    def noting(key, message, kind):
        secrets.extend([key, derive(key, message, kind)])
        return secrets[-1]

    monkeypatch.setattr("gredp.randomness.hmac.digest", noting)
    main(["train", "--epochs", "1", "--accountant", "rdp", "--json", "--out", str(tmp_path / "run")])
    assert len(set(secrets)) > 10
    files = [p.read_bytes() for p in (tmp_path / "run").iterdir()]
    assert len(files) >= 9
    for secret in set(secrets):
        texts = [secret.hex(), secret.hex().upper(), str(int.from_bytes(secret)), json.dumps(list(secret))]
        forms = [secret, base64.b64encode(secret), *(text.encode() for text in texts)]
        assert not any(form in content for form in forms for content in files)


def test_an_insecure_seed_repeats_a_run_and_is_marked(capsys, tmp_path):
    quick = ["train", "--epochs", "1", "--accountant", "rdp", "--insecure-seed", "5", "--out"]
    weights = []
    for name in "ab":
        main([*quick, str(tmp_path / name)])
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
        assert "INSECURE" in capsys.readouterr().out
        assert json.loads((tmp_path / name / "record.json").read_text())["insecure"] is True
    assert weights[0] == weights[1]
