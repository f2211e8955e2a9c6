"""Reading data: the embedded digits, the cache files of known datasets, and a user's own.

A file is a NumPy archive `NAME.npz` with uint8 images `x_train`, `x_test` ([n, height, width] or [n,
height, width, channels]) and labels `y_train`, `y_test`. A folder with the same four arrays as `.npy` files
is for data larger than memory: its training images stay on the disk and are read as they are drawn. Images in
class folders are read by `images.py`, tables by `tables.py`. Nothing that could run code is ever loaded.
"""

import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gredp.app.data.tables import Schema, to_unit
from gredp.app.image_folders import is_classed
from gredp.app.known_data import ARRAYS, EMBEDDED, KNOWN
from gredp.errors import GredpError
from gredp.storage.files import one_line

LARGEST_FILE = 8 << 30
#: floats are meant to lie in [0, 1] or to be standardized; beyond this they are bytes that nobody scaled
LARGEST_FLOAT = 64
#: of so many records for each class held out, in no order, all but e⁻²⁰ of the classes are seen
ENOUGH_FOR_ALL = 20


@dataclass(frozen=True)
class Splits:
    """Images `[n, channels, height, width]` of float32 (from uint8: in [0, 1]), labels `[n]` of int64.

    Of a table, features `[n, d]` that are scaled already.
    """

    name: str
    classes: int
    x_train: "Tensor | OnDiskArray"
    y_train: Tensor
    x_test: "Tensor | OnDiskArray"
    y_test: Tensor
    #: names of the classes, by number
    labels: tuple[str, ...] = ()
    #: what the columns of a table may hold
    schema: Schema | None = None
    #: shape of an image, if the images are features rather than pixels
    pixels: tuple[int, ...] | None = None
    #: range of a number to predict in place of a class; labels are then float32, scaled to [−1, 1]
    target: tuple[float, float] | None = None
    #: for each training record the id of its person, if persons are the unit of privacy
    persons: tuple[str, ...] | None = None

    @property
    def features(self) -> bool:
        return self.pixels is not None

    @property
    def outputs(self) -> int:
        """Of a network."""
        return self.classes if self.target is None else 1

    @property
    def units(self) -> int:
        """How many there are to train on of what is drawn and protected: persons, or else records."""
        return len(self.y_train) if self.persons is None else len(set(self.persons))

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.labels or tuple(map(str, range(self.classes)))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])


class OnDiskArray:
    """Records in a file, not in memory: those indexed by a list become a tensor, and are not kept."""

    def __init__(self, array: np.ndarray, tensor: Callable[[np.ndarray], Tensor]) -> None:
        self._array, self._tensor = array, tensor
        self.shape = (len(array), *tensor(array[[0]]).shape[1:])

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, indices: list[int]) -> Tensor:
        return self._tensor(self._array[np.asarray(indices, dtype=np.int64)])

    def then(self, change: Callable[[Tensor], Tensor]) -> "OnDiskArray":
        """The same records, each changed as it is read."""
        return OnDiskArray(self._array, lambda part: change(self._tensor(part)))

    def part(self, start: int, stop: int) -> "OnDiskArray":
        """Records `start` to `stop`, still not in memory."""
        return OnDiskArray(self._array[start:stop], self._tensor)


def data_folder(given: str | None = None) -> Path:
    """`--data-dir`, else GREDP_DATA, else ~/.cache/gredp/data."""
    return Path(given or os.environ.get("GREDP_DATA") or Path.home() / ".cache" / "gredp" / "data")


def location(name: str, folder: str | None = None) -> Path | None:
    """The file or folder that a dataset is read from; none for the embedded one."""
    if name == EMBEDDED:
        return None
    return data_folder(folder) / f"{name}.npz" if name in KNOWN else Path(name)


def load(
    name: str,
    folder: str | None = None,
    holdout: float | None = None,
    image_size: int | None = None,
    target: tuple[float, float] | None = None,
    person: str | None = None,
) -> Splits:
    """A dataset by name, or from the path of a user's own: an archive, a folder, or a table.

    `target` is the range of the labels of arrays, if they are numbers to predict rather than classes.
    `person` says whose records they are: a column, or how to find it in the names of files (`persons.py`).
    """
    path = location(name, folder)
    if name in KNOWN and Path(name).exists():
        warnings.warn(
            f"{name} is the known dataset; for the files in this folder give ./{name}", stacklevel=2
        )
    own = path is not None and name not in KNOWN
    classed = own and is_classed(Path(name))
    table = own and Path(name).suffix == ".csv"
    if image_size is not None and table:
        raise GredpError("--image-size is for images, not for tables")
    if holdout is not None and not (classed or table):
        raise GredpError("--holdout is for class folders and tables without a test split of their own")
    if target is not None and (not own or classed or table):
        raise GredpError(
            "--target-range is for your own arrays: a table has target = [low, high] in its schema, and "
            "class folders and known datasets have classes"
        )
    if person is not None and not (classed or table):
        raise GredpError("--person is for tables and images in class folders: arrays do not tell persons")
    if path is None:
        return _scaled(_digits(), image_size)
    if classed or table:
        from gredp.app.data.own import read_own

        return read_own(path, table, holdout, image_size, person)
    mapped = path.is_dir()
    if name not in KNOWN and not mapped and path.suffix != ".npz":
        raise GredpError(
            f"unknown dataset {name!r}: one of {', '.join(KNOWN)}, "
            "or the path of a .npz or .csv file or of a folder"
        )
    if not mapped and not path.is_file():
        how = f"fetch it with `gredp data get {name}`, or " if name in KNOWN else ""
        raise GredpError(
            f"{path} is not there: {how}put a NumPy archive with uint8 x_train, y_train, x_test, y_test there"
        )
    arrays = map_folder(path) if mapped else read_archive(path)
    # From the test labels alone: the largest private label would be a release of its own.
    labels = arrays["y_test"]
    whole = labels.size > 0 and labels.dtype.kind in "iu"
    classes = KNOWN[name].classes if name in KNOWN else int(labels.max()) + 1 if whole else 1
    if target is None and labels.dtype.kind == "f":
        raise GredpError(
            f"{path}: labels are of type {labels.dtype}: --target-range LOW HIGH learns to predict a number, "
            "whole numbers from 0 are classes"
        )
    classes = 0 if target is not None else classes
    x_test, y_test = check_split(f"{path}: test", arrays["x_test"], arrays["y_test"], classes, target)
    x, y_train = check_split(f"{path}: training", arrays["x_train"], arrays["y_train"], classes, target)
    if x.shape[1:] != x_test.shape[1:]:
        shapes = " and ".join(str(tuple(s[i] for i in (3, 1, 2))) for s in (x.shape, x_test.shape))
        raise GredpError(f"{path}: training and test images differ in shape: {shapes}")
    x_train = OnDiskArray(x, pixels) if mapped else pixels(x)
    found = Splits(path.stem, classes, x_train, y_train, pixels(x_test), y_test, target=target)
    return _scaled(found, image_size)


def _scaled(data: Splits, size: int | None) -> Splits:
    """Images of arrays, scaled to size×size; those of class folders are scaled as they are read."""
    if size is None:
        return data
    shape = size, size
    x_train, x_test = (
        scaled(x, shape) if isinstance(x, Tensor) else x.then(lambda part: scaled(part, shape))
        for x in (data.x_train, data.x_test)
    )
    return replace(data, x_train=x_train, x_test=x_test)


def scaled(x: Tensor, size: tuple[int, int]) -> Tensor:
    """`[n, channels, height, width]` to another height and width, by weighted means of pixels."""
    if tuple(x.shape[2:]) == size:
        return x
    return F.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)


def hold_out(data: Splits, count: int) -> Splits:
    """The last `count` training records in place of the test set, the others to train on.

    Settings are found this way. The records held out are not covered by ε: what is measured on them is
    released as it is. The test set is not touched.
    """
    if not 0 < count < len(data.y_train):
        raise GredpError(f"cannot hold out {count} of {len(data.y_train)} training records")
    x, y, border = data.x_train, data.y_train, len(data.y_train) - count
    if isinstance(x, Tensor):
        rest: Tensor | OnDiskArray = x[:border]
        held: Tensor | OnDiskArray = x[border:]
    else:
        rest, held = x.part(0, border), x.part(border, len(y))
    seen = len(y[border:].unique()) if data.target is None else data.classes
    if seen < data.classes and count >= ENOUGH_FOR_ALL * data.classes:
        warnings.warn(
            f"the last {count} training records are of {seen} of {data.classes} classes only: if the records "
            "are sorted by class, shuffle the file, or accuracy on them says little",
            stacklevel=2,
        )
    return replace(data, x_train=rest, y_train=y[:border], x_test=held, y_test=y[border:])


def map_folder(path: Path) -> dict[str, np.ndarray]:
    """The four arrays of a folder, on the disk until they are indexed."""
    arrays = {}
    for name in ARRAYS:
        file = path / f"{name}.npy"
        if not file.is_file():
            raise GredpError(f"{file} is not there: a folder of data holds {', '.join(ARRAYS)} as .npy")
        try:
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # as below
            raise GredpError(f"{file} cannot be read: {one_line(error)}") from None
    return arrays


def read_archive(path: Path) -> dict[str, np.ndarray]:
    """The four arrays of an archive; anything else in it, objects, or an enormous size is rejected."""
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


def check_split(
    what: str, x: np.ndarray, y: np.ndarray, classes: int, target: tuple[float, float] | None = None
) -> tuple[np.ndarray, Tensor]:
    """Images `[n, height, width, channels]` as they are and labels, or one line that says what is wrong.

    It names the first record that is, and none of its values: lines end up in logs.
    """
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
    if y.dtype.kind not in ("iu" if target is None else "iuf"):
        raise GredpError(f"{what} labels are of type {y.dtype}, not whole numbers")
    outside = (y < 0) | (y >= classes) if target is None else ~np.isfinite(y)
    if outside.any() and target is not None:
        raise GredpError(
            f"{what} labels must be finite, and that of record {int(outside.argmax()) + 1} is not"
        )
    if outside.any():
        where = f"that of record {int(outside.argmax()) + 1} does not"
        raise GredpError(f"{what} labels must lie in 0 to {classes - 1}, and {where}")
    if x.dtype.kind == "f":
        _check_floats(what, x)
    elif x.dtype != np.uint8:
        raise GredpError(f"{what} images are of type {x.dtype}, not uint8 or float")
    return x, torch.from_numpy(y.astype(np.int64) if target is None else to_unit(y, target))


def _check_floats(what: str, x: np.ndarray) -> None:
    """As `pixels` makes them, in single precision; bytes as floats would be learned from at a wrong scale."""
    for start in range(0, len(x), 4096):  # a mapped array need not fit in memory
        with np.errstate(over="ignore", invalid="ignore"):
            part = x[start : start + 4096].astype(np.float32).reshape(min(4096, len(x) - start), -1)
            finite, small = np.isfinite(part).all(1), (part <= LARGEST_FLOAT).all(1)
        for right, wrong in (
            (finite, "values that are not finite"),
            (small, f"floats above {LARGEST_FLOAT}, as if they were bytes: give uint8, or divide by 255"),
        ):
            if not right.all():
                raise GredpError(f"{what} images: record {start + int(right.argmin()) + 1} holds {wrong}")


def pixels(x: np.ndarray) -> Tensor:
    """`[n, height, width, channels]` → `[n, channels, height, width]` of float32; uint8 to [0, 1]."""
    images = np.ascontiguousarray(x.transpose(0, 3, 1, 2), dtype=np.float32)
    return torch.from_numpy(images / 255 if x.dtype == np.uint8 else images)


def _digits() -> Splits:
    """The 1,797 handwritten digits inside scikit-learn, 8×8; every fifth is kept for the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images.astype(np.float32) / 16).unsqueeze(1)
    y = torch.from_numpy(digits.target.astype(np.int64))
    test = torch.arange(len(x)) % 5 == 4
    return Splits(EMBEDDED, 10, x[~test], y[~test], x[test], y[test])
