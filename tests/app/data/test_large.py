"""Data larger than memory: mapped, drawn in time and memory that go with the batch."""

import math
import os
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gredp.app.cli import main
from gredp.app.data import load
from gredp.app.dataset import Records
from gredp.errors import GredpError
from gredp.randomness import Secret
from gredp.sampling import PoissonBatchSampler, poisson_loader

LARGE = 10_000_000


def sparse(path: Path, shape: tuple[int, ...]) -> None:
    """A .npy file of zeros that takes no room on the disk."""
    with open(path, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + math.prod(shape))


def folder_of(path: Path, **arrays: np.ndarray) -> str:
    path.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    small = {
        "x_train": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        "y_train": (np.arange(40) % 3).astype(np.uint8),
        "x_test": rng.integers(0, 256, (10, 8, 8), dtype=np.uint8),
        "y_test": (np.arange(10) % 3).astype(np.uint8),
    }
    for name, array in (small | arrays).items():
        np.save(path / f"{name}.npy", array)
    return str(path)


@pytest.mark.parametrize("kind", ["uint8", "float", "color"])
def test_mapped_records_equal_those_in_memory(tmp_path, kind):
    rng = np.random.default_rng(1)
    shape = (40, 8, 9, 3) if kind == "color" else (40, 8, 9)
    x = rng.random(size=shape) if kind == "float" else rng.integers(0, 256, shape, dtype=np.uint8)
    folder = folder_of(tmp_path / "mine", x_train=x, x_test=x[:10])
    np.savez(tmp_path / "mine.npz", **{p.stem: np.load(p) for p in Path(folder).iterdir()})
    mapped, whole = load(folder), load(str(tmp_path / "mine.npz"))
    assert mapped.input_shape == whole.input_shape
    assert len(mapped.x_train) == 40
    assert torch.equal(mapped.x_train[list(range(40))], whole.x_train)
    for name in ("y_train", "x_test", "y_test"):
        assert torch.equal(getattr(mapped, name), getattr(whole, name))
    for indices in ([], [3], [0, 7, 39]):
        pairs = zip(Records(mapped).__getitems__(indices), Records(whole).__getitems__(indices))
        assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other))


@pytest.mark.slow
def test_a_run_on_a_folder_equals_one_on_an_archive(tmp_path, capsys):
    folder = folder_of(tmp_path / "mine")
    np.savez(tmp_path / "mine.npz", **{p.stem: np.load(p) for p in Path(folder).iterdir()})
    weights = []
    for number, data in enumerate([folder, str(tmp_path / "mine.npz")]):
        out = tmp_path / f"run{number}"
        settings = ["--model", "lenet-small", "--batch-size", "8", "--epochs", "1", "--accountant", "rdp"]
        main(["train", "--dataset", data, *settings, "--insecure-seed", "1", "--json", "--out", str(out)])
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.fault("bad data")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y_train": np.full(40, 3)}, "must lie in 0 to 2, and that of record 1 does not"),
        ({"y_train": np.zeros(39, np.int64)}, r"shape \(39,\), but there are 40 images"),
        ({"x_train": np.full((40, 8, 8), np.nan)}, "record 1 holds values that are not finite"),
        ({"x_train": np.zeros((40, 64))}, r"shape \(40, 64\)"),
        ({"x_train": np.zeros((40, 9, 8), np.uint8)}, "differ in shape"),
        ({"x_train": np.zeros((40, 8, 8), np.int32)}, "int32, not uint8 or float"),
    ],
)
def test_bad_folders_are_refused_at_load(tmp_path, change, words):
    with pytest.raises(GredpError, match=words):
        load(folder_of(tmp_path / "mine", **change))


@pytest.mark.fault("crafted data")
@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", b"\x93NUMPY\x01\x00\xff\xff{", "objects", "too short", "none"]
)
def test_files_that_are_no_arrays_are_refused(tmp_path, content):
    folder = folder_of(tmp_path / "mine")
    path = tmp_path / "mine" / "x_train.npy"
    if content == "objects":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif content == "too short":
        path.write_bytes(path.read_bytes()[:-1])
    elif content == "none":
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(GredpError, match=r"x_train\.npy (cannot be read|is not there)") as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("large")
    folder_of(path)
    sparse(path / "x_train.npy", (LARGE, 8, 8))
    sparse(path / "y_train.npy", (LARGE,))
    return str(path)


def limit_memory(megabytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + (megabytes << 20), resource.RLIM_INFINITY))


def test_ten_million_records_are_drawn_and_read_in_little_memory(large):
    """In a process with room for 40 MB while it draws (no number for each record), then 200 MB (no image)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            limit_memory(40)
            PoissonBatchSampler(LARGE, 1e-5, 1).draw()
            limit_memory(200)  # 76 MB of them are labels
            loader = poisson_loader(DataLoader(Records(load(large)), batch_size=100))
            sizes = [len(x) for x, _ in (batch for _, batch in zip(range(20), loader))]
            status = 0 if abs(sum(sizes) - 2000) <= 6 * math.sqrt(2000) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_draws_from_ten_million_have_the_right_rate_and_lie_evenly():
    rate, draws = 1e-5, 400
    sampler = PoissonBatchSampler(LARGE, rate, draws)
    drawn = torch.tensor([i for batch in sampler for i in batch])
    expected = LARGE * rate * draws
    assert abs(len(drawn) - expected) <= 6 * math.sqrt(expected)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < LARGE
    counts = torch.bincount(drawn * 100 // LARGE, minlength=100).double()
    chi2 = float(((counts - len(drawn) / 100) ** 2 / (len(drawn) / 100)).sum())
    assert abs(chi2 - 99) <= 6 * math.sqrt(2 * 99)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_every_subset_has_the_probability_of_independent_records(rate):
    """All 16 subsets of four records, against the product law."""
    draws = 6_000
    sampler = PoissonBatchSampler(4, rate, draws, secret=Secret(11))
    found = Counter(tuple(batch) for batch in sampler)
    assert sum(found.values()) == draws
    for number in range(16):
        subset = tuple(i for i in range(4) if number >> i & 1)
        p = rate ** len(subset) * (1 - rate) ** (4 - len(subset))
        assert abs(found[subset] - draws * p) <= 6 * math.sqrt(draws * p * (1 - p)) + 3


def test_rates_near_their_ends():
    assert PoissonBatchSampler(5, 1.0, 1).draw() == [0, 1, 2, 3, 4]
    assert PoissonBatchSampler(5, 1e-300, 1).draw() == []
    assert PoissonBatchSampler(5, 1 - 2**-53, 1).draw() == [0, 1, 2, 3, 4]
    sizes = [len(PoissonBatchSampler(1, 0.5, 1).draw()) for _ in range(64)]
    assert set(sizes) == {0, 1}
