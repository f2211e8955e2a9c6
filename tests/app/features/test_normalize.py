"""Private normalization: certified, charged once, within the target, and fixed for a resumed run."""

import math

import pytest
import torch
from safetensors.torch import load_file

from gredp import GredpError, PrivacyEngine
from gredp.app import session
from gredp.app import train as loop
from gredp.app.cli import main
from gredp.app.features import normalize
from gredp.app.features.normalize import ChannelNorm, certificate, clip_norm, contributions, release
from gredp.app.settings import TrainSettings, saved_settings
from gredp.privacy.accountant import epsilon
from gredp.storage.ledger_file import read_ledger
from ranks import in_world

Z = 1.7
#: as for the laws of mechanisms: six standard errors of a variance from 10⁵ draws
V_TOLERANCE, V_DRAWS = 0.027, 100_000


def slowly(x):
    """The sum of clipped contributions by its definition, in Python's numbers."""
    records, channels = x.shape[:2]
    total = [0.0] * (x[0].numel() + channels)
    for i in range(records):
        cells = [[math.copysign(math.sqrt(abs(a)), a) for a in x[i, c].flatten()] for c in range(channels)]
        v = [a / math.sqrt(len(c)) for c in cells for a in c]
        v += [sum(a * a for a in c) / len(c) for c in cells]
        length = math.sqrt(sum(a * a for a in v))
        factor = min(1.0, math.sqrt(2 * channels) / length)
        total = [t + factor * a for t, a in zip(total, v)]
    return torch.tensor(total, dtype=torch.float64)


def test_sums_are_those_of_the_definition():
    x = torch.randn(7, 5, 3, 2) * torch.tensor([0.1, 0.5, 1, 2, 3, 5, 9]).view(7, 1, 1, 1)
    got = release(PrivacyEngine(), x, certificate(5, 0.0))
    torch.testing.assert_close(got, slowly(x), rtol=1e-9, atol=1e-12)


def test_noise_has_the_variance_of_the_certificate():
    """V: no energy at all, so that the noise alone is released."""
    channels, x = 1000, torch.zeros(2, 1000, 1, 1)
    query = certificate(channels, Z)
    assert query.noise_multiplier == pytest.approx(Z)
    draws = torch.cat([release(PrivacyEngine(), x, query) for _ in range(V_DRAWS // (2 * channels))])
    assert abs(float(draws.square().mean()) / (Z * math.sqrt(2 * channels)) ** 2 - 1) <= V_TOLERANCE


def test_one_record_moves_the_sum_by_at_most_the_clip_norm():
    """N: without noise, random and adversarial records among others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 9, 2, 2, generator=generator)
    before = contributions(x).sum(0)
    extremes = [
        torch.full((1, 9, 2, 2), value) for value in (1e38, -1e38, 3.0, math.nan, math.inf, -math.inf)
    ]
    others = [torch.randn(1, 9, 2, 2, generator=generator) * 10**k for k in range(-3, 8) for _ in range(15)]
    for record in (*extremes, *others):
        moved = contributions(torch.cat([x, record])).sum(0) - before
        assert moved.norm() <= clip_norm(9) * (1 + 1e-5)
        if not record.isfinite().all():
            assert moved.norm() == 0


def test_noise_is_never_drawn_twice():
    engine = PrivacyEngine()
    x = torch.zeros(2, 9, 1, 1)
    first, second = (release(engine, x, certificate(9, Z)) for _ in range(2))
    assert not torch.equal(first, second)
    assert engine.ledger.steps == engine.ledger.inherited == 2


def test_features_are_centered_and_channels_scaled():
    deviations = torch.tensor([0.2, 0.3, 0.5])[:, None, None]
    roots = torch.tensor([[0.2, 0.4], [0.6, 0.8]]) + deviations * torch.randn(2000, 3, 2, 2)
    x = roots * roots.abs()
    norm = ChannelNorm(3, 2, 2)
    norm.take(contributions(x).sum(0), 0.0, len(x))
    out = norm(x)
    assert out.mean(0).abs().max() < 0.1
    torch.testing.assert_close(out.std((0, 2, 3)), torch.ones(3), rtol=0.1, atol=0)
    assert not any(p.requires_grad for p in norm.parameters())
    norm.take(torch.full((15,), -5.0), 1.0, 10)  # what noise alone could give
    assert norm.scale.min() == pytest.approx(normalize.SMALLEST)


def test_means_that_differ_by_no_more_than_noise_are_those_of_the_channel():
    places, noise = 400, 0.3
    true = torch.linspace(-1, 1, places).repeat(2, 1) * torch.tensor([[0.0], [1.0]])
    sums = (true + noise * torch.randn(2, places)) / math.sqrt(places)
    norm = ChannelNorm(2, 20, 20)
    norm.take(torch.cat([sums.flatten(), torch.ones(2)]) * 50, noise * 50 / math.sqrt(places), 50)
    error = (norm.mean.flatten(1) - true).square().mean(1).sqrt()
    assert error[0] < 0.5 * noise
    assert error[1] < noise


@pytest.mark.parametrize("world", [2, 3])
def test_processes_release_together_what_one_does(world):
    x = torch.randn(7, 5, 3, 2)
    for got in in_world(world, lambda: release(PrivacyEngine(), x, certificate(5, 0.0))):
        torch.testing.assert_close(got, slowly(x), rtol=1e-9, atol=1e-12)


def test_of_several_processes_one_draws_the_noise_and_all_charge_it():
    channels = V_DRAWS // 2

    def action():
        engine = PrivacyEngine()
        got = release(engine, torch.zeros(3, channels, 1, 1), certificate(channels, Z))
        return got, engine.ledger.steps, engine.ledger.inherited

    (first, *charged), (second, *too) = in_world(2, action)
    assert torch.equal(first, second)
    assert charged == too == [1, 1]
    assert abs(float(first.square().mean()) / (Z * math.sqrt(2 * channels)) ** 2 - 1) <= V_TOLERANCE


def settings(tmp_path, name="run", **options):
    base = {
        "features": "scattering",
        "normalize": 0.1,
        "data_dir": str(tmp_path / "data"),
        "out": str(tmp_path / name),
        "epochs": 1,
        "batch_size": 300,
        "accountant": "rdp",
    }
    return TrainSettings(**base | options)


def test_the_query_is_charged_and_the_target_remains_the_ceiling(tmp_path):
    record = loop.train(settings(tmp_path, epsilon=1.0)).record
    query, *steps = record["ledger"]
    assert (query["sample_rate"], query["steps"]) == (1.0, 1)
    (released,) = record["normalisation"]
    assert released["noise_std"] / released["clip_norm"] == pytest.approx(query["noise_multiplier"])
    assert released["clip_norm"] == math.sqrt(2 * 81)
    spent = record["guarantee"]["proven_epsilon"]
    written = read_ledger(tmp_path / "run" / "ledger")
    assert spent == epsilon(written.entries, 1e-5, "rdp")
    assert 0.98 <= spent <= 1.0
    # And training has less than all of it: a run without the query takes less noise.
    assert epsilon(written.entries[1:], 1e-5, "rdp") < 0.99 * spent
    assert [row["steps"] for row in steps] == [5]
    assert (record["data"]["front"]["name"], record["settings"]["model"]) == ("scattering", "linear")


def test_a_run_that_goes_on_keeps_what_was_released(tmp_path, monkeypatch):
    record = loop.train(settings(tmp_path)).record
    first = load_file(tmp_path / "run" / "model.safetensors")
    assert first["normalise.scale"].std() > 0
    (tmp_path / "run" / "record.json").unlink()
    monkeypatch.setattr(session, "release", lambda *_: pytest.fail("released again"))
    again = loop.train(saved_settings(str(tmp_path / "run"))).record
    assert again["ledger"] == record["ledger"]
    assert again["normalisation"] == record["normalisation"]
    second = load_file(tmp_path / "run" / "model.safetensors")
    for name in ("normalise.mean", "normalise.scale"):
        assert torch.equal(first[name], second[name])

    fork = loop.train(settings(tmp_path, "fork", fork=str(tmp_path / "run"), epsilon=3.0)).record
    assert fork["ledger"][:2] == record["ledger"][:2]
    third = load_file(tmp_path / "fork" / "model.safetensors")
    assert torch.equal(first["normalise.scale"], third["normalise.scale"])


def test_without_privacy_nothing_is_claimed(tmp_path):
    record = loop.train(settings(tmp_path, method="plain")).record
    assert record["guarantee"]["proven_epsilon"] == math.inf
    assert record["ledger"][0]["noise_multiplier"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--normalize", "1"], r"must lie in \[0, 1\), not 1"),
        (["--normalize", "0.1"], "needs --features or --pretrained"),
        (
            ["--model", "resnet18-1conv", "--pretrained", "x", "--normalize", "0.1"],
            "as its frozen part gives them",
        ),
        (["--features", "scattering", "--normalize", "0.1", "--claim", "paper"], "no part in the paper"),
        (
            ["--features", "scattering", "--model", "resnet18-1conv", "--pretrained", "x"],
            "cannot be combined",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, options, words):
    with pytest.raises(SystemExit) as stop:
        main(["train", *options])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    with pytest.raises(GredpError, match=words):
        raise GredpError(error)
