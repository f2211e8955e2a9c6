"""How good a model is, on records that it was not trained on."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.app.blueprint import MODEL, read_model
from gredp.app.data import Splits
from gredp.app.data.datasets import OnDiskArray
from gredp.app.dataset import centered, unchanged

if TYPE_CHECKING:
    from gredp.app.train import Run


def evaluate(
    model: nn.Module, x: "Tensor | OnDiskArray", y: Tensor, prepare: Callable[[Tensor], Tensor] = unchanged
) -> tuple[float, float]:
    """Share of records that it gets right, and its mean cross-entropy."""
    model.eval()
    hits, loss = 0, 0.0
    with torch.no_grad():
        for start in range(0, len(y), 1024):
            part = list(range(start, min(start + 1024, len(y))))
            logits = model(prepare(x[part]))
            hits += int((logits.argmax(1) == y[part]).sum())
            loss += float(F.cross_entropy(logits.double(), y[part], reduction="sum"))
    model.train()
    return hits / len(y), loss / len(y)


def score(run: "Run", data: Splits) -> int:
    """How many of the test records of `data` the run's model gets right."""
    _, network, _ = read_model(run.folder / MODEL)
    share, _ = evaluate(network, data.x_test, data.y_test, centered)
    return round(share * len(data.y_test))
