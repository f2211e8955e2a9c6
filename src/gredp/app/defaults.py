"""Settings that `gredp train` chooses for a user's own data, where no option says otherwise. No torch.

They depend on public facts alone: the kind of data, the size of the images, how many records there are (how
many persons, with --person: batches are of persons then). No record is looked at, except for the size and
color of one image.
"""

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gredp.app.image_folders import image_splits, is_classed, is_image
from gredp.app.known_data import KNOWN
from gredp.app.settings import FOR_FEATURES, FOR_SOME_FEATURES, TrainSettings
from gredp.errors import GredpError

if TYPE_CHECKING:
    from gredp.app.data.tables import Schema

#: share of the records that is held out where there is no test split
HOLDOUT = 0.2
#: larger images are scaled down to this height and width, smaller ones than the second up
LARGEST, SMALLEST = 32, 8
#: of a table whose classes have no weights
PLAIN_DESCENT: dict[str, Any] = {"lr": 0.3, "clipping": "automatic"}
#: records in a batch: all of them, up to this many
FULL_BATCH = 8192
#: learning rate times √features, for features of deviation 1 and gradients of norm 1: at least and at most;
#: in between it grows as the root of ε·records, from the third number on
REACH, LARGEST_REACH, SIGNAL = 9.0, 54.0, 2500.0
#: options that choose another network or other features than the defaults are for
OTHER_NETWORKS = {"augment", "noise_schedule"}


def own_defaults(settings: TrainSettings, named: Collection[str]) -> dict[str, Any]:
    """The defaults for the user's own data at `settings.dataset`; `named` are the options on the command line.

    | data | what is chosen |
    |---|---|
    | a table | a small network on the columns; batches of a fifth of the rows, 10 epochs, automatic clipping; flat for a number to predict, and for declared shares with a larger learning rate |
    | images | scaled to at most 32×32; patches, which need no statistics of records; with `--pretrained` its features, and with other networks for features scattering, normalized with 2 % of the budget; a linear classifier; 30 steps on all records, or 30 epochs of batches of 8,192; automatic clipping |
    | no test split | a fifth of the records is held out |
    """  # noqa: E501
    path = Path(settings.dataset)
    if settings.dataset in KNOWN or (settings.holdout is not None and not 0 < settings.holdout < 1):
        return {}
    try:
        if path.suffix == ".csv":
            return _table(path, settings)
        if is_classed(path) or path.suffix == ".npz" or path.is_dir():
            return _images(path, settings, named)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        pass  # reading the data gives the better message
    return {}


def _table(path: Path, settings: TrainSettings) -> dict[str, Any]:
    from gredp.app.data.holdout import trained_on
    from gredp.app.data.tables import read_columns, read_schema

    holdout, schema = settings.holdout, read_schema(path)
    share = {} if holdout is not None or schema.test is not None else {"holdout": HOLDOUT}
    apart = share.get("holdout", holdout or 0.0)
    if settings.person is not None:
        training: float = trained_on(read_columns(path, [settings.person])[settings.person], apart)
    else:
        with path.open("rb") as file:
            training = (sum(1 for line in file if line.strip()) - 1) * (1 - apart)
    return share | for_table(training) | _descent(schema)


def for_table(records: float) -> dict[str, Any]:
    """With so many records to train on; the label has classes without weights."""
    return {"batch_size": max(1, int(records / 5)), "epochs": 10} | PLAIN_DESCENT


def _descent(schema: "Schema") -> dict[str, Any]:
    """Gradients that get shorter, by weights of classes or as a number is met, must not be made longer."""
    if schema.target is not None:
        return {"lr": 0.1, "clipping": "flat"}
    if schema.shares is None or schema.weights is None:
        return PLAIN_DESCENT
    mean = sum(schema.shares[name] * weight for name, weight in zip(schema.classes, schema.weights))
    return {"lr": round(0.2 / mean, 4), "clipping": "flat"}


def _images(path: Path, settings: TrainSettings, named: Collection[str]) -> dict[str, Any]:
    from gredp.app.data.holdout import trained_on
    from gredp.app.data.persons import FOLDER, of_files

    chosen: dict[str, Any] = {}
    if is_classed(path):
        splits = image_splits(path)
        files, shape = _of_folders(splits, "*/*/*" if settings.person == FOLDER else "*/*")
        if len(splits) == 1:
            chosen["holdout"] = settings.holdout or HOLDOUT
        apart = chosen.get("holdout", 0.0)
        if settings.person is not None:
            records = trained_on(of_files(files, settings.person), apart)
        else:
            records = int(len(files) * (1 - apart))
    else:
        records, shape = _of_arrays(path)
    channels, *sides = shape
    size = settings.image_size or scaled_size(sides)
    if is_classed(path) or sides != [size, size]:
        chosen["image_size"] = size
    other = settings.model not in (None, *FOR_FEATURES, *FOR_SOME_FEATURES) or bool(
        OTHER_NETWORKS & set(named)
    )
    if other or ("features" in named and settings.features == "none"):
        return chosen
    pretrained = settings.pretrained is not None
    own = for_images(records, (channels, size, size), settings.epsilon, settings.model, pretrained)
    if settings.claim != "proven":
        own["normalize"] = 0.0
    if settings.target_range is not None:
        own["clipping"] = "flat"
    return chosen | own


def scaled_size(sides: Collection[int]) -> int:
    """Height and width that images of these sides are scaled to."""
    return max(SMALLEST, min(LARGEST, max(sides)))


def for_images(
    records: int,
    shape: tuple[int, int, int],
    epsilon: float,
    model: str | None = None,
    pretrained: bool = False,
) -> dict[str, Any]:
    """With so many records to train on, of channels, height and width as they are scaled."""
    channels, height, width = shape
    own: dict[str, Any] = {"normalize": 0.02}
    if pretrained:
        features = 1280 * 2 * 2
    elif model not in (None, "linear"):
        own, features = own | {"features": "scattering"}, 81 * channels * (height // 4) * (width // 4)
    else:
        wavelets = 81 * (height // 4) * (width // 4) if channels == 1 else 1024 + 81 * channels * 4 * 4
        own, features = {"features": "patches"}, 1024 * 3 * 3 + wavelets
    signal = max(1.0, epsilon * records / SIGNAL) if epsilon > 0 else 1.0
    reach = min(LARGEST_REACH, REACH * math.sqrt(signal))
    return own | {
        "model": "linear",
        "method": "dpsgd",
        "batch_size": max(1, min(FULL_BATCH, records)),
        "epochs": 30,
        "clipping": "automatic",
        "lr": round(reach / math.sqrt(features), 4),
    }


def _of_folders(splits: list[Path], within: str) -> tuple[list[Path], tuple[int, int, int]]:
    """The training images; channels, height and width of one, a test image if possible."""
    from PIL import Image

    files = [file for file in splits[0].glob(within) if is_image(file)]
    first = min(file for file in splits[-1].glob(within) if is_image(file))
    with Image.open(first) as image:
        width, height = image.size
        return files, (1 if image.mode in ("1", "L", "LA") else 3, height, width)


def _of_arrays(path: Path) -> tuple[int, tuple[int, int, int]]:
    """The same of an archive or a folder of arrays, from the header of the file alone."""
    if path.is_dir():
        shape = np.load(path / "x_train.npy", mmap_mode="r", allow_pickle=False).shape
    else:
        with zipfile.ZipFile(path) as archive, archive.open("x_train.npy") as file:
            version = np.lib.format.read_magic(file)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape = read(file)[0]
    if len(shape) not in (3, 4):
        raise GredpError(f"{path}: images have shape {shape}")
    return shape[0], (shape[3] if len(shape) == 4 else 1, shape[1], shape[2])
