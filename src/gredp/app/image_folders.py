"""Where the images of a folder lie: train/CLASS and test/CLASS, or CLASS alone. No torch."""

from pathlib import Path

from gredp.errors import GredpError

SPLITS = ("train", "test")
ENDINGS = (".png", ".jpg", ".jpeg")
EXPECTED = "images lie in CLASS/*.png, or in train/CLASS/*.png and test/CLASS/*.png"


def is_image(file: Path) -> bool:
    return file.suffix.lower() in ENDINGS and not file.name.startswith(".")


def is_classed(path: Path) -> bool:
    """Whether it is a folder for images rather than for arrays."""
    return path.is_dir() and not any(path.glob("*.npy"))


def image_splits(path: Path) -> list[Path]:
    """The folders of the training and of the test images, or the one with all; each holds classes."""
    inside = sorted(p for p in path.iterdir() if not p.name.startswith("."))
    folders = [p.name for p in inside if p.is_dir()]
    files = [p.name for p in inside if not p.is_dir()]
    if not folders:
        images = sum(map(is_image, inside))
        what = f"{images} images and no class folder" if images else f"{len(files)} files and no folder"
        raise GredpError(f"{path} holds {what if inside else 'nothing'}: {EXPECTED}")
    if files:
        raise GredpError(
            f"{path} holds {len(folders)} folders and {len(files)} files, such as {files[0]}: {EXPECTED}; "
            "move the files elsewhere"
        )
    if not set(SPLITS) & set(folders):
        return [path]
    others = sorted(set(folders) - set(SPLITS))
    if "train" not in folders:
        raise GredpError(f"{path / 'train'} is not there: {EXPECTED}")
    if others:
        raise GredpError(
            f"{path} holds {others[0]} beside {', '.join(sorted(set(SPLITS) & set(folders)))}: {EXPECTED}"
        )
    return [path / split for split in SPLITS if split in folders]
