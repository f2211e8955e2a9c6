"""A user's images in class folders, see `image_folders`; all of one size, or scaled to one."""

import hashlib
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from gredp.app.data.datasets import LARGEST_FILE
from gredp.app.data.persons import FOLDER, of_files, reject_shared
from gredp.app.image_folders import ENDINGS, image_splits
from gredp.errors import GredpError

#: modes of Pillow with 8 bits or fewer for each channel; the first three are gray
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
LARGEST_IMAGE = 1 << 26

Files = list[list[Path]]


def load_folders(
    path: Path, size: int | None = None, person: str | None = None
) -> tuple[list[str], list[tuple[np.ndarray, np.ndarray]], list[str] | None]:
    """Class names, and one or two splits, training first: uint8 `[n, height, width, channels]` and labels.

    And the persons of the training images, where `person` says how to find them.

    Names, size and color are those of the test images where there are any. With `size` every image is scaled
    to size×size. An image is turned into numbers by itself; nothing is taken from the others. Images come in
    an order by the hashes of their names, not class by class: the last ones may be held out.
    """
    splits = image_splits(path)
    names = _classes(splits[-1])
    files = {split: [_of_class(path, split / name, person) for name in names] for split in splits}
    extra = sorted(set(_classes(splits[0])) - set(names))
    if extra:
        raise GredpError(f"{splits[0] / extra[0]}: there is no such class in {splits[-1]}")
    first = files[splits[-1]]
    gray = all(_read(file).mode in MODES[:3] for group in first for file in group)
    shape = (size, size) if size is not None else _read(first[0][0]).size[::-1]
    count = sum(len(group) for groups in files.values() for group in groups)
    room = count * shape[0] * shape[1] * (1 if gray else 3)
    if room > LARGEST_FILE:
        raise GredpError(
            f"{count} images of {shape[0]}×{shape[1]} take {room} bytes: use a folder of .npy files"
        )
    ordered = {split: _ordered(files[split], 2 if person != FOLDER else 3) for split in splits}
    read = [_split(ordered[split], shape, gray, size is not None) for split in splits]
    if person is None:
        return names, read, None
    listed = [file for _, file in ordered[splits[0]]]
    persons = of_files(listed, person)
    records = ((x.tobytes(), int(y)) for x, y in zip(*read[0]))
    reject_shared(records, persons, listed, "remove one of the two files")
    return names, read, persons


def _classes(folder: Path) -> list[str]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(names) < 2:
        raise GredpError(f"{folder} holds {len(names)} class folders; there must be at least 2")
    return names


def _of_class(root: Path, folder: Path, person: str | None) -> list[Path]:
    """The images of a class, in the folders of its persons if `person` says so."""
    if person != FOLDER or not folder.is_dir():
        return _images(root, folder)
    inside = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    for each in inside:
        if not each.is_dir():
            raise GredpError(f"{each} is in no person's folder: --person folder is for CLASS/PERSON/*.png")
    if not inside:
        raise GredpError(f"{folder} holds no image")
    return [file for each in inside for file in _images(root, each)]


def _images(root: Path, folder: Path) -> list[Path]:
    """The images of a class, in the order of their names; hidden files are skipped, others rejected."""
    if not folder.is_dir():
        raise GredpError(f"{folder} is not there: every class needs training and test images")
    files = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    inside = root.resolve()
    for file in files:
        if file.suffix.lower() not in ENDINGS:
            raise GredpError(f"{file} is not an image: its name must end in {', '.join(ENDINGS)}")
        if not file.resolve().is_relative_to(inside):
            raise GredpError(f"{file} is a link that leaves {root}")
        if not file.is_file():
            raise GredpError(f"{file} is not a plain file")
    if not files:
        raise GredpError(f"{folder} holds no image")
    return files


def _read(file: Path) -> Image.Image:
    """Decoded, and turned as its camera was; no decoder but those of PNG and JPEG is tried."""
    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            if image.width * image.height > LARGEST_IMAGE:
                raise GredpError(f"{file} has {image.width}×{image.height} pixels, more than {LARGEST_IMAGE}")
            if image.mode not in MODES:
                raise GredpError(f"{file} has pixels of mode {image.mode}, not of 8 bits for each channel")
            return ImageOps.exif_transpose(image)
    except GredpError:
        raise
    except Exception:  # whatever a crafted file makes the decoder raise, which may quote it
        raise GredpError(f"{file} cannot be read as an image of PNG or JPEG") from None


def _ordered(groups: Files, depth: int) -> list[tuple[int, Path]]:
    """Labels and files, in an order by the hashes of the files' names from the class on."""

    def place(item: tuple[int, Path]) -> bytes:
        return hashlib.sha256(os.fsencode(Path(*item[1].parts[-depth:]))).digest()

    return sorted(((y, file) for y, group in enumerate(groups) for file in group), key=place)


def read_scaled(file: Path, shape: tuple[int, int], gray: bool) -> np.ndarray:
    """uint8 `[height, width, channels]` of one image, scaled to `shape` if it is not of that size."""
    image = _read(file).convert("L" if gray else "RGB")
    if image.size[::-1] != shape:
        image = image.resize(shape[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(*shape, 1 if gray else 3)


def _split(
    named: list[tuple[int, Path]], shape: tuple[int, int], gray: bool, scale: bool
) -> tuple[np.ndarray, np.ndarray]:
    x = np.empty((len(named), *shape, 1 if gray else 3), dtype=np.uint8)
    for place, (_, file) in enumerate(named):
        if not scale and _read(file).size[::-1] != shape:
            raise GredpError(
                f"{file} is not of {shape[0]}×{shape[1]} pixels as others are: scale all with --image-size"
            )
        x[place] = read_scaled(file, shape, gray)
    return x, np.array([label for label, _ in named])
