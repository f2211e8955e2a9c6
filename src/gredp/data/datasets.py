"""Reading data: the embedded digits, the cache files of known data sets, and a user's own file.

A file is a NumPy archive `NAME.npz` with uint8 images `x_train`, `x_test` ([n, height, width] or [n,
height, width, channels]) and labels `y_train`, `y_test`. Nothing that could run code is ever loaded.
"""

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gredp.errors import GredpError
from gredp.sealed import one_line

EMBEDDED = "digits"
#: number of classes of the data sets that are known by name
KNOWN = {"digits": 10, "mnist": 10, "fashion-mnist": 10, "cifar10": 10, "cifar100": 100}
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
LARGEST_FILE = 8 << 30


@dataclass(frozen=True)
class Splits:
    """Images `[n, channels, height, width]` of float32 in [0, 1], labels `[n]` of int64."""

    name: str
    classes: int
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def input_shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.x_train.shape
        return channels, height, width


def data_folder(given: str | None = None) -> Path:
    """`--data-dir`, else GREDP_DATA, else ~/.cache/gredp/data."""
    return Path(given or os.environ.get("GREDP_DATA") or Path.home() / ".cache" / "gredp" / "data")


def load(name: str, folder: str | None = None) -> Splits:
    """A data set by name, or from the path of a user's own `.npz`."""
    if name == EMBEDDED:
        return _digits()
    own = name.endswith(".npz")
    if not own and name not in KNOWN:
        raise GredpError(f"unknown data set {name!r}: one of {', '.join(KNOWN)}, or the path of a .npz file")
    path = Path(name) if own else data_folder(folder) / f"{name}.npz"
    if not path.is_file():
        raise GredpError(
            f"{path} is not there: put a NumPy archive with uint8 x_train, y_train, x_test, y_test there"
        )
    arrays = read_archive(path)
    # From the test labels alone: the largest private label would be a release of its own.
    labels = arrays["y_test"]
    whole = labels.size > 0 and labels.dtype.kind in "iu"
    classes = KNOWN.get(name) or (int(labels.max()) + 1 if whole else 1)
    test = check_split(f"{path}: test", arrays["x_test"], arrays["y_test"], classes)
    checked = [*check_split(f"{path}: training", arrays["x_train"], arrays["y_train"], classes), *test]
    if checked[0].shape[1:] != checked[2].shape[1:]:
        shapes = " and ".join(str(tuple(checked[i].shape[1:])) for i in (0, 2))
        raise GredpError(f"{path}: training and test images differ in shape: {shapes}")
    return Splits(path.stem, classes, *checked)


def read_archive(path: Path) -> dict[str, np.ndarray]:
    """The four arrays of an archive; anything else in it, objects, or an enormous size is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {item.filename.removesuffix(".npy"): item.file_size for item in archive.infolist()}
        if set(sizes) != set(ARRAYS):
            raise GredpError(f"{path} holds {sorted(sizes)}, not {list(ARRAYS)}")
        if sum(sizes.values()) > LARGEST_FILE:
            raise GredpError(f"{path} unpacks to {sum(sizes.values())} bytes, more than {LARGEST_FILE}")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ARRAYS}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise GredpError(f"{path} holds a member that is not a NumPy array")
        return arrays
    except GredpError:
        raise
    except Exception as error:  # whatever a crafted archive makes the readers raise, memory errors included
        raise GredpError(f"{path} cannot be read: {one_line(error)}") from None


def check_split(what: str, x: np.ndarray, y: np.ndarray, classes: int) -> tuple[Tensor, Tensor]:
    """Images and labels as tensors, or one line that says what is wrong with them."""
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or x.shape[3] not in (1, 3):
        raise GredpError(
            f"{what} images have shape {x.shape}, not [n, height, width] or [n, height, width, 1 or 3]"
        )
    if len(x) == 0:
        raise GredpError(f"{what} set is empty")
    if y.shape != (len(x),):
        raise GredpError(f"{what} labels have shape {y.shape}, but there are {len(x)} images")
    if y.dtype.kind not in "iu":
        raise GredpError(f"{what} labels are of type {y.dtype}, not whole numbers")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise GredpError(f"{what} labels run from {low} to {high}, but must lie in 0 to {classes - 1}")
    if x.dtype == np.uint8:
        images = torch.from_numpy(x.transpose(0, 3, 1, 2).astype(np.float32) / 255)
    elif x.dtype.kind == "f":
        if not np.isfinite(x).all():
            raise GredpError(f"{what} images hold {int((~np.isfinite(x)).sum())} values that are not finite")
        images = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2), dtype=np.float32))
    else:
        raise GredpError(f"{what} images are of type {x.dtype}, not uint8 or float")
    return images, torch.from_numpy(y.astype(np.int64))


def _digits() -> Splits:
    """The 1,797 handwritten digits inside scikit-learn, 8×8; every fifth is kept for the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images.astype(np.float32) / 16).unsqueeze(1)
    y = torch.from_numpy(digits.target.astype(np.int64))
    test = torch.arange(len(x)) % 5 == 4
    return Splits(EMBEDDED, 10, x[~test], y[~test], x[test], y[test])
