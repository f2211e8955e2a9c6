"""The records of a run as its network sees them: read, turned into features, held out, augmented."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from gredp.app.data import Splits, hold_out, load
from gredp.app.data.augment import DRAWS, augmented
from gredp.app.features.backbone import SIZE, Backbone
from gredp.app.features.cache import FeatureExtractor, extract_cached
from gredp.app.features.fronts import FRONTS
from gredp.app.known_data import KNOWN
from gredp.app.settings import FILE, TrainSettings
from gredp.errors import GredpError
from gredp.randomness import Secret
from gredp.storage.files import read_document


def centered(x: Tensor) -> Tensor:
    """Pixels to [−1, 1] by fixed numbers: a mean of the data would be a release of its own. Tables stay."""
    return 2 * x - 1 if x.dim() == 4 else x


def unchanged(x: Tensor) -> Tensor:
    """Features stay unchanged."""
    return x


class Records(Dataset[tuple[Tensor, Tensor]]):
    """Training records, pixels centered as they are read; a batch is read at once. `views` draws one anew."""

    def __init__(self, data: Splits, views: Secret | None = None) -> None:
        self.x, self.y = data.x_train, data.y_train
        self.prepare = unchanged if data.features else centered
        self.views = views

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        x = self.prepare(self.x[indices])
        if self.views is not None:
            draws = self.views.uniform(DRAWS * len(indices), "views", self.views.fresh())
            x = augmented(x, draws.view(-1, DRAWS))
        return list(zip(x, self.y[indices]))


def start_of(folder: Path) -> str | None:
    """The working directory as seen from a run folder below it: dots alone; None if it is elsewhere."""
    try:
        depth = len(folder.resolve().relative_to(Path.cwd()).parts)
    except ValueError:
        return None
    return "/".join([".."] * depth)


def source_of(settings: TrainSettings) -> str:
    """The dataset, or where it is now: a relative path leads from the folder that its run was started in.

    A run notes that folder as seen from its own (`start_of`), so no file tells where either of them is.
    """
    dataset, run = settings.dataset, settings.resume or settings.fork
    if run is None or dataset in KNOWN or not (Path(run) / FILE).exists():
        return dataset
    start = read_document(Path(run) / FILE).get("started_in")
    there = None if start is None else Path(run) / start / dataset
    given_anew = settings.resume is None and Path(dataset).exists()  # a fork may have data of its own
    return dataset if there is None or given_anew or not there.exists() else str(there.resolve())


def read_data(settings: TrainSettings, given: Splits | None = None) -> tuple[Splits, FeatureExtractor | None]:
    """The records as the network sees them, and what has extracted their features."""
    extractor: FeatureExtractor | None = None
    if settings.pretrained is not None:
        rest = (settings.model or "").startswith("resnet18-")  # its own last block is trained
        extractor = (
            Backbone(settings.pretrained) if rest else Backbone(settings.pretrained, SIZE, stages=True)
        )
    elif settings.features != "none":
        extractor = FRONTS[settings.features]()
    if given is not None and extractor is not None:
        raise GredpError("features are cached by dataset: data in memory cannot be used with them")
    source = source_of(settings), settings.data_dir, settings.holdout, settings.image_size
    data = given or load(*source, settings.target_range, settings.person)
    if extractor is not None:
        persons = () if settings.person is None else (settings.person,)
        data = extract_cached(extractor, data, *source, *persons)
    if data.schema is not None and data.schema.shares is not None and settings.clipping == "automatic":
        raise GredpError(
            "automatic clipping makes all gradients equally long, whatever the weight of their class: with "
            "shares in the schema use --clipping flat"
        )
    if settings.augment and len(data.input_shape) != 3:
        raise GredpError(f"--augment draws views of images, not of rows of {data.input_shape[0]} features")
    return (hold_out(data, settings.validation) if settings.validation else data), extractor


def describe_data(data: Splits, extractor: FeatureExtractor | None = None) -> dict[str, Any]:
    """What a run notes of its data and features, and checks when it is resumed.

    Of the data counts and shapes, but no hash, keyed or not: together with the run folder it would confirm
    a guessed dataset. Of the features all that they depend on, public weights by their hash.
    """
    return {
        "name": data.name,
        "records": len(data.x_train),
        "persons": None if data.persons is None else data.units,
        "test_records": len(data.x_test),
        "classes": data.classes,
        **({} if data.target is None else {"target": list(data.target)}),
        "input_shape": list(data.input_shape),
        "front": None if extractor is None else extractor.identity(),
    }
