"""Known data sets: fetched once through Hugging Face `datasets`, kept as NAME.npz, verified by checksums.

Checksums are verified when a file is fetched and by `gredp data list`, not at every start of a training:
hashing would take longer than some trainings do, and a wrong pixel is no danger to privacy.
"""

import hashlib
import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gredp.app.data.datasets import ARRAYS, EMBEDDED, KNOWN, data_folder, read_archive
from gredp.errors import GredpError
from gredp.storage.files import make_folder, one_line, write


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and what it must be: `sums` are the SHA-256 of the raw arrays.

    They were computed from byte-exact copies of the original files. `parts` are those of runs of 10,000
    training images, to put them in their original order: a mirror may keep the order of an archive.
    """

    repository: str
    image: str
    label: str
    shape: tuple[int, ...]
    train: int
    sums: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n, m = self.train, 10_000
        return dict(zip(ARRAYS, ((n, *self.shape), (n,), (m, *self.shape), (m,))))


SOURCES = {
    "mnist": Source(
        "ylecun/mnist", "image", "label", (28, 28), 60_000,
        (
            "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
            "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        ),
    ),
    # Its publishers give checksums of compressed files only, from which those of the arrays do not follow.
    "fashion-mnist": Source("zalando-datasets/fashion_mnist", "image", "label", (28, 28), 60_000),
    "cifar10": Source(
        "uoft-cs/cifar10", "img", "label", (32, 32, 3), 50_000,
        (
            "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        ),
        (
            "fc115a3de050d667b88cbd5b0b9612ebf996c54230fe7758f3a14bb5af9a1c27",
            "89e609b642f687bc796fa3bfa4211005582a0e8131d463d996d11ddb297d312e",
            "93a365823e61729490a8801d80864ccd0ab1e8c98f19d71af65644d1c5f1486e",
            "809eb95ecd057a36516318f5023ea619009dd70dd38193db9da43125a928e6fa",
            "d05b7d66d216d6df882cc760cdc0ff2f1f0437abf699ed16005c021ef0add9cb",
        ),
    ),
    "cifar100": Source(
        "uoft-cs/cifar100", "img", "fine_label", (32, 32, 3), 50_000,
        (
            "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
            "9f11b9f97aad759ba6df0a33e3218b01d8deaf4ed3a14aa1185d69b9ad7ebcb3",
            "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
            "4dad7d09c7c97d33f6cb928d705cf4196221316fd6e31bdd978a08ed9103ee0b",
        ),
    ),
}  # fmt: skip


def get(name: str, folder: str | None = None) -> tuple[Path, str]:
    """Fetch a data set and write its cache file, whole or not at all; a file that is whole is left alone.

    Gives the file and what `state` says of it.
    """
    if name == EMBEDDED:
        raise GredpError(f"{EMBEDDED} is embedded: there is nothing to get")
    if name not in SOURCES:
        raise GredpError(f"unknown data set {name!r}: one of {', '.join(SOURCES)}")
    path = data_folder(folder) / f"{name}.npz"
    if path.exists() and state(name, folder)[0]:
        return path, state(name, folder)[1]
    arrays = in_order(SOURCES[name], _download(name, path))
    found = difference(name, arrays)
    if found:
        raise GredpError(f"what {SOURCES[name].repository} gave is not {name}: {found}; nothing was written")
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    make_folder(path.parent)
    write(path, content.getvalue())
    return path, _whole(name)


def state(name: str, folder: str | None = None) -> tuple[bool, str]:
    """(is it whole?, in words); reads and hashes the file."""
    if name == EMBEDDED:
        return True, "embedded"
    path = data_folder(folder) / f"{name}.npz"
    if not path.exists():
        return False, "not there"
    try:
        found = difference(name, read_archive(path))
    except GredpError as error:
        return False, f"damaged: {error}"
    return not found, f"damaged: {found}" if found else _whole(name)


def listing(folder: str | None = None) -> list[dict[str, Any]]:
    """A row for every known data set."""
    rows = []
    for name in KNOWN:
        whole, words = state(name, folder)
        path = None if name == EMBEDDED else str(data_folder(folder) / f"{name}.npz")
        rows.append({"name": name, "whole": whole, "state": words, "path": path})
    return rows


def difference(name: str, arrays: dict[str, np.ndarray]) -> str:
    """What is not as it must be, or nothing."""
    source = SOURCES[name]
    for key, shape in source.shapes().items():
        array = arrays[key]
        if array.shape != shape or array.dtype != np.uint8:
            return f"{key} is {array.dtype} of shape {array.shape}, not uint8 of shape {shape}"
    for key, expected in zip(ARRAYS, source.sums):
        if digest(arrays[key]) != expected:
            return f"{key} has another SHA-256 than the original"
    for key in ("y_train", "y_test"):
        counts = np.bincount(arrays[key], minlength=KNOWN[name])
        if not source.sums and set(counts) != {len(arrays[key]) // KNOWN[name]}:
            return f"{key} does not hold every class equally often"
    return ""


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def in_order(source: Source, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The training records with their parts in the original order, if those are the parts."""
    if not source.parts or len(arrays["x_train"]) != source.train:
        return arrays
    size = source.train // len(source.parts)
    found = [digest(arrays["x_train"][i : i + size]) for i in range(0, source.train, size)]
    if sorted(found) != sorted(source.parts):
        return arrays
    order = [found.index(part) for part in source.parts]
    moved = {
        key: np.concatenate([arrays[key][i * size : (i + 1) * size] for i in order])
        for key in ("x_train", "y_train")
    }
    return arrays | moved


def _whole(name: str) -> str:
    return "whole" if SOURCES[name].sums else "whole by its shapes and labels; no checksum is known"


def _download(name: str, path: Path) -> dict[str, np.ndarray]:
    source = SOURCES[name]
    shapes = ", ".join(f"{key} {list(shape)}" for key, shape in source.shapes().items())
    by_hand = f"or put a NumPy archive with uint8 {shapes} at {path}"
    try:
        from datasets import load_dataset
    except ImportError:
        raise GredpError(f"install the package that fetches: pip install 'gredp[data]'; {by_hand}") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would log each of its attempts
    arrays = {}
    try:
        for split in ("train", "test"):
            rows = load_dataset(source.repository, split=split)
            arrays[f"x_{split}"] = np.stack([np.asarray(row, np.uint8) for row in rows[source.image]])
            arrays[f"y_{split}"] = np.asarray(list(rows[source.label]), np.uint8)
    except Exception as error:  # no network, no such repository, no such column: whatever a download can meet
        raise GredpError(
            f"{name} cannot be fetched from {source.repository} ({one_line(error)}): "
            f"try again with a network, {by_hand}"
        ) from None
    return arrays
