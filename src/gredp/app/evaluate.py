"""How good a model is, on records that it was not trained on. ε does not cover these figures.

A task owns all that classification and regression do differently: outputs, loss, figures, and what a record
keeps under `evaluation`. Figures of every epoch are cheap; those of `evaluation` are taken once, at the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.app.blueprint import MODEL, read_model
from gredp.app.data import Splits
from gredp.app.data.datasets import OnDiskArray
from gredp.app.dataset import centered, unchanged

if TYPE_CHECKING:
    from gredp.app.train import Run

#: a confusion matrix of more classes than this is in no record
MOST_CLASSES = 25
#: a class with fewer evaluated records may be missed altogether by chance
ENOUGH = 10


class Task(Protocol):
    """`name` is what a run is measured by: "accuracy" or "r2"."""

    @property
    def name(self) -> str: ...

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """`[b]`: the loss of each record alone."""

    def figures(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Of an epoch: `name`, "loss" and others."""

    def evaluation(self, outputs: Tensor, y: Tensor) -> dict[str, Any]:
        """Of a finished run; "warning" says that the model is no better than a constant, or is None."""

    def right(self, outputs: Tensor, y: Tensor) -> float:
        """A score to choose by: a sum over the records of numbers in [0, 1], so one record moves it by 1."""


@dataclass(frozen=True)
class Classification:
    """`weights` of the classes are public and at most 1: each record's loss is multiplied by its own."""

    classes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    name: str = "accuracy"

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, y, reduction="none")
        # Not torch's weighted mean: that divides by the weights of the batch, which join its records.
        return losses if self.weights is None else torch.tensor(self.weights)[y] * losses

    def figures(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        confusion = self._confusion(outputs, y)
        share, balanced = np.trace(confusion) / len(y), np.nanmean(_recall(confusion))
        loss = float(F.cross_entropy(outputs, y))
        return {"accuracy": float(share), "balanced_accuracy": float(balanced), "loss": loss}

    def evaluation(self, outputs: Tensor, y: Tensor) -> dict[str, Any]:
        confusion = self._confusion(outputs, y)
        recall, counts = _recall(confusion), confusion.sum(1)
        most = int(counts.argmax())
        return {
            "records": len(y),
            "majority": {"class": self.classes[most], "share": float(counts[most] / len(y))},
            "balanced_accuracy": float(np.nanmean(recall)),
            "auc": auc(outputs.softmax(1).numpy(), y.numpy()),
            "classes": [
                {"class": name, "records": int(n), "recall": None if math.isnan(r) else float(r)}
                for name, n, r in zip(self.classes, counts, recall)
            ],
            "confusion": confusion.tolist() if len(self.classes) <= MOST_CLASSES else None,
            "warning": self._warning(confusion, most),
        }

    def right(self, outputs: Tensor, y: Tensor) -> float:
        return float((outputs.argmax(1) == y).sum())

    def _confusion(self, outputs: Tensor, y: Tensor) -> np.ndarray:
        """`[true, predicted]`."""
        k = len(self.classes)
        return torch.bincount(y * k + outputs.argmax(1), minlength=k * k).view(k, k).numpy()

    def _warning(self, confusion: np.ndarray, most: int) -> str | None:
        counts, found, all_found = confusion.sum(1), np.diag(confusion), np.trace(confusion)
        chance = np.nanmean(_recall(confusion)) <= 1 / (counts > 0).sum()
        missed = [
            f"0 of {n} of class {name}"
            for name, n, f in zip(self.classes, counts, found)
            if n >= ENOUGH and not f
        ]
        said = []
        if all_found <= counts[most] if self.weights is None else chance:
            share = f"{100 * counts[most] / counts.sum():.2f} %"
            said.append(f"does not beat the majority: class {self.classes[most]} is {share} of the records")
        if missed:
            more = f" and {len(missed) - 3} classes more" if len(missed) > 3 else ""
            said.append(f"finds {', '.join(missed[:3])}{more}")
        return "; ".join(said) or None


@dataclass(frozen=True)
class Regression:
    """Of targets in a declared range, scaled to [−1, 1]; figures are in the target's own units."""

    low: float
    high: float
    name: str = "r2"

    def units(self, outputs: Tensor) -> Tensor:
        """`[n]` predictions, clipped to the range."""
        scaled = outputs.reshape(len(outputs)).double().clamp(-1, 1)
        return self.low + (self.high - self.low) * (scaled + 1) / 2

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(outputs[:, 0], y, reduction="none")

    def figures(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        wanted = self.units(y)
        error = self.units(outputs) - wanted
        around = float((wanted - wanted.mean()).square().sum())
        r2 = 1 - float(error.square().sum()) / around if around > 0 else math.nan
        loss = float(self.losses(outputs, y.double()).mean())
        return {"r2": r2, "mae": float(error.abs().mean()), "loss": loss}

    def evaluation(self, outputs: Tensor, y: Tensor) -> dict[str, Any]:
        figures, wanted = self.figures(outputs, y), self.units(y)
        flat = float((wanted - wanted.median()).abs().mean())
        warning = f"does not beat a constant: R² is {figures['r2']:.4f}" if not figures["r2"] > 0 else None
        return {
            "records": len(y),
            "target": [self.low, self.high],
            "r2": figures["r2"],
            "mae": figures["mae"],
            "mae_of_the_median": flat,
            "warning": warning,
        }

    def right(self, outputs: Tensor, y: Tensor) -> float:
        return float((1 - (self.units(outputs) - self.units(y)).abs() / (self.high - self.low)).sum())


def _recall(confusion: np.ndarray) -> np.ndarray:
    """Of each class the share that is found; not a number for a class without records."""
    counts = confusion.sum(1)
    return np.where(counts > 0, np.diag(confusion) / np.maximum(counts, 1), np.nan)


def auc(probabilities: np.ndarray, y: np.ndarray) -> float | None:
    """The area under the ROC curve; of several classes the mean, each against the rest.

    It is the chance that a record of the class has the higher probability than one that is not of it; ties
    count one half. None where no class has records both in and out of it, or the model has diverged.
    """
    from scipy.stats import rankdata

    areas: list[float] = []
    if not np.isfinite(probabilities).all():
        return None
    for place in range(probabilities.shape[1]) if probabilities.shape[1] > 2 else (1,):
        inside = y == place
        n, m = int(inside.sum()), int((~inside).sum())
        if n and m:
            ranks = rankdata(probabilities[:, place])
            areas.append((ranks[inside].sum() - n * (n + 1) / 2) / (n * m))
    return float(np.mean(areas)) if areas else None


def task_of(data: Splits) -> Task:
    if data.target is not None:
        return Regression(*data.target)
    return Classification(data.class_names, data.schema.weights if data.schema is not None else None)


def all_outputs(
    model: nn.Module,
    x: "Tensor | OnDiskArray",
    records: int,
    prepare: Callable[[Tensor], Tensor] = unchanged,
) -> Tensor:
    """`[n, outputs]` of float64."""
    training = model.training
    model.eval()
    with torch.no_grad():
        parts: Sequence[Tensor] = [
            model(prepare(x[list(range(start, min(start + 1024, records)))])).double()
            for start in range(0, records, 1024)
        ]
    model.train(training)
    return torch.cat(list(parts))


def evaluate(
    model: nn.Module, x: "Tensor | OnDiskArray", y: Tensor, prepare: Callable[[Tensor], Tensor] = unchanged
) -> tuple[float, float]:
    """Share of records that a classifier gets right, and its mean cross-entropy."""
    outputs = all_outputs(model, x, len(y), prepare)
    return float((outputs.argmax(1) == y).double().mean()), float(F.cross_entropy(outputs, y))


def outputs_on_test(model: nn.Module, data: Splits) -> Tensor:
    """What the model says of the test records."""
    return all_outputs(model, data.x_test, len(data.y_test), unchanged if data.features else centered)


def score(run: "Run", data: Splits) -> float:
    """How many of the test records of `data` the run's model gets right; one record moves it by at most 1."""
    _, network, _ = read_model(run.folder / MODEL)
    return task_of(data).right(outputs_on_test(network, data), data.y_test)
