"""A trained run in use: `gredp.load(RUN).predict(...)`."""

import csv
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gredp.app.blueprint import MODEL, Blueprint, read_model
from gredp.app.data.datasets import pixels, scaled
from gredp.app.data.images import read_scaled
from gredp.app.data.tables import Schema, column_parts, encode_inputs
from gredp.app.dataset import centered
from gredp.app.evaluate import Regression
from gredp.app.image_folders import ENDINGS
from gredp.errors import GredpError
from gredp.guarantee import Guarantee
from gredp.storage.files import one_line

#: records that go through the network at once
BATCH = 256
#: names of a batch of records, and what the network takes of them
Batch = tuple[list[str], Tensor]


class Predictor:
    """A private model with everything it needs to classify new records.

    `inputs` are, for a model of images: a folder (all images below it), an image, a list of paths, a .txt
    file of paths, a .npy file or an array `[n, height, width]` or `[n, height, width, channels]` of uint8 or
    floats in [0, 1]. For a model of a table: a .csv file, a mapping of columns, or a sequence of rows as
    mappings; the label's column is not needed. Images are scaled to the size that the model was trained on.

    Using a released model costs no privacy; `guarantee` is what its training spent.
    """

    def __init__(self, run: str | Path) -> None:
        path = Path(run)
        file = path / MODEL if path.is_dir() or path.suffix != ".safetensors" else path
        self.blueprint, self.network, self.sha256 = read_model(file)
        self.guarantee = Guarantee.from_json(self.blueprint.guarantee or {})
        if self.blueprint.insecure:
            warnings.warn(
                f"{file}: ε gives no protection against anyone who knows --insecure-seed", stacklevel=2
            )
        target = self.blueprint.target
        self.target = None if target is None else Regression(*target)
        self.extract = self.blueprint.extractor(file.parent)

    @property
    def classes_(self) -> NDArray[Any]:
        """The names of the classes, in the order of the columns of `predict_proba`."""
        return np.array(self.blueprint.classes)

    def predict_proba(self, inputs: Any) -> NDArray[np.float64]:
        """`[n, classes]`."""
        if self.target is not None:
            raise GredpError("the model predicts a number and has no probabilities: use predict")
        return np.concatenate([p for _, p in self.stream(inputs)])

    def predict(self, inputs: Any) -> NDArray[Any]:
        """`[n]` of `classes_`, or of numbers in the target's range."""
        if self.target is not None:
            return np.concatenate([p[:, 0] for _, p in self.stream(inputs)])
        return np.asarray(self.classes_[self.predict_proba(inputs).argmax(1)])

    def stream(self, inputs: Any) -> Iterator[tuple[list[str], NDArray[np.float64]]]:
        """Names and probabilities, or predicted numbers `[n, 1]`, of a batch of records at a time."""
        for names, x in batches(inputs, self.blueprint):
            with torch.no_grad():
                logits = self.network(centered(x) if self.extract is None else self.extract(x))
            found = logits.double().softmax(1) if self.target is None else self.target.units(logits)[:, None]
            yield names, found.numpy()

    def __repr__(self) -> str:
        what = f"{len(self.classes_)} classes" if self.target is None else "a number"
        return f"Predictor({self.blueprint.network}, {what}, {self.guarantee})"


def load(run: str | Path) -> Predictor:
    """The model of a finished run, ready to use; `run` is its folder, or its model.safetensors alone."""
    return Predictor(run)


def count(inputs: Any, blueprint: Blueprint) -> int | None:
    """How many records there are, for a progress bar; None if that takes reading them."""
    if isinstance(inputs, str | Path):
        path = Path(inputs)
        if path.suffix == ".npy":
            return len(_array(path))
        return None if path.suffix == ".csv" else len(_files(path))
    return len(inputs)


def batches(inputs: Any, blueprint: Blueprint) -> Iterator[Batch]:
    """Records as the network takes them, before features are computed; never all of them at once."""
    if blueprint.schema is not None:
        return _rows(inputs, blueprint.schema)
    assert blueprint.image is not None
    if isinstance(inputs, str | Path) and Path(inputs).suffix == ".npy":
        return _arrays(_array(Path(inputs)), blueprint.image)
    if isinstance(inputs, str | Path):
        return _images(_files(Path(inputs)), blueprint.image)
    if isinstance(inputs, Sequence) and all(isinstance(item, str | Path) for item in inputs):
        return _images([(str(item), Path(item)) for item in inputs], blueprint.image)
    return _arrays(np.asarray(inputs), blueprint.image)


def _files(path: Path) -> list[tuple[str, Path]]:
    """Images by the names they are listed under."""
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
        if not found:
            raise GredpError(f"{path} holds no image: names must end in {', '.join(ENDINGS)}")
        return [(str(p.relative_to(path)), p) for p in found]
    if not path.is_file():
        raise GredpError(f"{path} is not there")
    if path.suffix == ".txt":
        lines = path.read_text(encoding="utf-8").splitlines()
        return [(line, path.parent / line) for line in map(str.strip, lines) if line]
    if path.suffix.lower() in ENDINGS:
        return [(str(path), path)]
    raise GredpError(
        f"{path} is not an input of a model of images: give a folder, an image, a .txt list or a .npy array"
    )


def _images(files: list[tuple[str, Path]], shape: tuple[int, int, int]) -> Iterator[Batch]:
    channels, *size = shape
    for start in range(0, len(files), BATCH):
        part = files[start : start + BATCH]
        x = np.stack([read_scaled(file, (size[0], size[1]), channels == 1) for _, file in part])
        yield [name for name, _ in part], pixels(x)


def _array(path: Path) -> NDArray[Any]:
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # whatever a crafted file makes the reader raise
        raise GredpError(f"{path} cannot be read: {one_line(error)}") from None


def _arrays(x: NDArray[Any], shape: tuple[int, int, int]) -> Iterator[Batch]:
    x = x[..., None] if x.ndim == 3 else x
    channels, height, width = shape
    if x.ndim != 4 or x.shape[3] != channels or not (x.dtype == np.uint8 or x.dtype.kind == "f"):
        wanted = f"[n, height, width, {channels}]"
        raise GredpError(f"the array has shape {x.shape} of {x.dtype}, not {wanted} of uint8 or floats")
    for start in range(0, len(x), BATCH):
        part = np.array(x[start : start + BATCH])  # a copy: a mapped file is not writable
        if part.dtype.kind == "f" and not (np.isfinite(part).all() and part.max(initial=0) <= 64):
            raise GredpError("the array's floats must be finite and in [0, 1]: divide bytes by 255")
        yield [str(start + i + 1) for i in range(len(part))], scaled(pixels(part), (height, width))


def _rows(inputs: Any, schema: Schema) -> Iterator[Batch]:
    names = schema.inputs
    if isinstance(inputs, str | Path):
        parts: Iterable[dict[str, list[str]]] = column_parts(Path(inputs), names, BATCH)
        where = str(inputs)
    else:
        parts, where = [_columns(inputs, names)], "the input"
    seen = 0
    for columns in parts:
        x = encode_inputs(columns, schema, where, seen)
        yield [str(seen + i + 1) for i in range(len(x))], torch.from_numpy(x)
        seen += len(x)


def _columns(inputs: Any, names: list[str]) -> dict[str, list[str]]:
    """Of a mapping of columns (a DataFrame is one), or of rows as mappings."""
    table = inputs if isinstance(inputs, Mapping) or hasattr(inputs, "columns") else None
    try:
        return {
            name: [_text(v) for v in (table[name] if table is not None else [r[name] for r in inputs])]
            for name in names
        }
    except (KeyError, TypeError) as error:
        raise GredpError(f"the rows lack a column that the model was trained on: {one_line(error)}") from None


def _text(value: Any) -> str:
    """None is a value that is missing, whatever categories there are."""
    return "" if value is None else str(value).strip()


def write_predictions(predictor: Predictor, inputs: Any, file: Any, progress: Any = None) -> int:
    """CSV: the record's name, its class, the probability of each class; or the number. How many records."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["record", "prediction", *predictor.classes_])
    done = 0
    for names, probabilities in predictor.stream(inputs):
        for name, best, row in zip(names, probabilities.argmax(1), probabilities):
            if predictor.target is not None:
                writer.writerow([name, f"{row[0]:.8g}"])
            else:
                writer.writerow([name, predictor.classes_[best], *(f"{p:.6f}" for p in row)])
        done += len(names)
        if progress is not None:
            progress(len(names))
    return done
