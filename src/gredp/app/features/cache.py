"""Features on disk: computed once for a dataset, read by every later run.

They lie in `<data folder>/features/<key>/` as `x_train.npy` and `x_test.npy`. The key covers the extractor,
its options and weights, and the data files' names, sizes and times of change: anything else gets a folder
of its own. Features are as private as the records. The folder is for its owner alone, and no run copies it.

Half precision: a network in single precision does not see the difference (a relative 2⁻¹¹), and the features
of 50,000 color images take 0.5 to 1.6 GB instead of twice that.
"""

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from torch import Tensor, nn

from gredp.app.data import Splits
from gredp.app.data.datasets import OnDiskArray, data_folder, location
from gredp.app.image_folders import is_classed
from gredp.errors import GredpError
from gredp.storage.files import cannot, one_line, sync_folder

#: raise it when an extractor's or this file's arithmetic changes: old folders are then ignored
VERSION = 1
#: records in one batch
BATCH = 64
HALF, LARGEST_HALF = np.dtype("<f2"), 65504.0


class FeatureExtractor(Protocol):
    """A fixed function of one record: no trained parameter, no other record."""

    def identity(self) -> dict[str, Any]:
        """All that its output depends on, as JSON; public, and kept in the record of a run."""

    def __call__(self, x: Tensor) -> Tensor:
        """Images `[b, channels, height, width]` as they are loaded → features `[b, C, H, W]`."""

    def load_into(self, model: nn.Module) -> None:
        """Give the network on the features what it has from the extractor, if anything."""


def extract_cached(
    extractor: FeatureExtractor,
    data: Splits,
    dataset: str,
    folder: str | None = None,
    *options: float | str | None,
) -> Splits:
    """`data` with features in place of images; `dataset`, `folder` and `options` are what it was loaded with.

    | case | what happens |
    |---|---|
    | computed before | read from the disk |
    | several processes at once | one computes, the others wait for it |
    | killed while computing | the next one starts over; a folder with the final name is whole |
    | a disk that is full or read-only | rejected |
    """
    root = data_folder(folder) / "features"
    try:
        target = root / _key(extractor, data, location(dataset, folder), *options)
    except OSError as error:
        raise cannot(Path(dataset), "read", error) from None
    try:
        if not target.exists():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (root / f"{target.name}.lock").open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the system frees it however the process ends
                if not target.exists():
                    _compute(extractor, data, target)
        x_train, x_test = (np.load(target / f"{name}.npy", "r", allow_pickle=False) for name in _images(data))
    except GredpError:  # a ValueError as well: what the extractor rejects is not damage
        raise
    except OSError as error:
        raise cannot(target, "used for features", error) from None
    except ValueError as error:
        raise GredpError(f"{target} is damaged ({one_line(error)}): remove it to compute it anew") from None
    train, test = (OnDiskArray(features, _floats) for features in (x_train, x_test))
    return replace(data, x_train=train, x_test=test, pixels=data.input_shape)


def _floats(features: np.ndarray) -> Tensor:
    return torch.from_numpy(features).float()


def _key(extractor: FeatureExtractor, data: Splits, path: Path | None, *options: float | str | None) -> str:
    """A readable name and a hash. No content of a record enters: reading them all would take as long."""
    files = [] if path is None else sorted(path.glob("*.npy")) if path.is_dir() else [path]
    stamps = [_stamp(file, file.name) for file in files]
    shapes = [list(images.shape) for images in _images(data).values()]
    facts = [VERSION, extractor.identity(), data.name, stamps, shapes]
    if path is not None and is_classed(path):
        found = sorted(file for file in path.rglob("[!.]*") if file.is_file())
        stamps += [_stamp(file, str(file.relative_to(path))) for file in found]
        facts += [str(path.resolve()), *options]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{data.name}-{extractor.identity()['name']}-{digest[:16]}"


def _stamp(file: Path, name: str) -> list[str | int]:
    status = file.stat()
    return [name, status.st_size, status.st_mtime_ns]


def _images(data: Splits) -> dict[str, "Tensor | OnDiskArray"]:
    return {"x_train": data.x_train, "x_test": data.x_test}


def _compute(extractor: FeatureExtractor, data: Splits, target: Path) -> None:
    """All under another name first, and on the disk before it gets the final one."""
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700)
    try:
        for name, images in _images(data).items():
            _write(extractor, images, part / f"{name}.npy", f"features of {data.name}, {name}")
        sync_folder(part)
        os.rename(part, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # a full disk needs the room
        raise


def _write(extractor: FeatureExtractor, images: "Tensor | OnDiskArray", path: Path, what: str) -> None:
    """By plain writes: a full disk under a mapped file would end the process."""
    count, console = len(images), Console(stderr=True)
    shown: Any = {"console": console, "transient": True, "disable": not console.is_terminal}
    with path.open("xb") as file:
        for start in track(range(0, count, BATCH), escape(what), **shown):
            values = extractor(images[list(range(start, min(start + BATCH, count)))])
            # A value beyond the range would become infinite, and its record would not count.
            half = values.clamp(-LARGEST_HALF, LARGEST_HALF).numpy().astype(HALF)
            if start == 0:
                head = {"descr": HALF.str, "fortran_order": False, "shape": (count, *half.shape[1:])}
                np.lib.format.write_array_header_1_0(file, head)
            file.write(np.ascontiguousarray(half).data)
        file.flush()
        os.fsync(file.fileno())
