"""Known datasets: fetched once through Hugging Face `datasets`, kept as NAME.npz, verified by checksums.

Checksums are verified when a file is fetched and by `gredp data list`, not at every start of a training:
hashing would take longer than some trainings do, and a wrong pixel is no danger to privacy.
"""

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import numpy as np

from gredp.app.data.datasets import data_folder, read_archive
from gredp.app.known_data import ARRAYS, EMBEDDED, KNOWN, KnownData, fetchable
from gredp.errors import GredpError
from gredp.storage.files import make_folder, one_line, write


def get(name: str, folder: str | None = None) -> tuple[Path, str]:
    """Fetch a dataset and write its cache file, whole or not at all; a file that is whole is left alone.

    Gives the file and what `state` says of it.
    """
    if name == EMBEDDED:
        raise GredpError(f"{EMBEDDED} is embedded: there is nothing to get")
    if name not in KNOWN:
        raise GredpError(f"unknown dataset {name!r}: one of {', '.join(fetchable())}")
    path = data_folder(folder) / f"{name}.npz"
    whole, words = state(name, folder)
    if whole:
        return path, words
    arrays = in_order(KNOWN[name], _download(name, path))
    found = difference(name, arrays)
    if found:
        raise GredpError(f"what {KNOWN[name].repository} gave is not {name}: {found}; nothing was written")
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
    """A row for every known dataset."""
    rows = []
    for name in KNOWN:
        whole, words = state(name, folder)
        path = None if name == EMBEDDED else str(data_folder(folder) / f"{name}.npz")
        rows.append({"name": name, "whole": whole, "state": words, "path": path})
    return rows


def difference(name: str, arrays: dict[str, np.ndarray]) -> str:
    """What is not as it must be, or nothing."""
    source = KNOWN[name]
    for key, shape in source.shapes().items():
        array = arrays[key]
        if array.shape != shape or array.dtype != np.uint8:
            return f"{key} is {array.dtype} of shape {array.shape}, not uint8 of shape {shape}"
    for key, expected in zip(ARRAYS, source.sums):
        if digest(arrays[key]) != expected:
            return f"{key} has another SHA-256 than the original"
    for key in ("y_train", "y_test"):
        counts = np.bincount(arrays[key], minlength=source.classes)
        if not source.sums and set(counts) != {len(arrays[key]) // source.classes}:
            return f"{key} does not hold every class equally often"
    return ""


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def in_order(source: KnownData, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The training records with their parts in the original order, if those are the parts."""
    if not source.parts or len(arrays["x_train"]) != source.train:
        return arrays
    size = source.train // len(source.parts)
    found = [digest(arrays["x_train"][i : i + size]) for i in range(0, source.train, size)]
    if sorted(found) != sorted(source.parts):
        return arrays
    order = np.concatenate([np.arange(size) + size * found.index(part) for part in source.parts])
    return arrays | {key: arrays[key][order] for key in ("x_train", "y_train")}


def _whole(name: str) -> str:
    return "whole" if KNOWN[name].sums else "whole by its shapes and labels; no checksum is known"


def _download(name: str, path: Path) -> dict[str, np.ndarray]:
    source = KNOWN[name]
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
