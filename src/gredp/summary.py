"""What an engine and a model look like to a person: in a console, and in a notebook. Nothing here costs ε."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torch.utils._pytree import tree_leaves, tree_map

from gredp.gradient.norms import full_precision
from gredp.gradient.per_sample import PerSampleGradient, add
from gredp.gradient.units import Unit, find_units, noting
from gredp.mechanisms.plan import Needs


@dataclass(frozen=True)
class Row:
    """One layer: how its per-sample gradients come about, and what one record keeps until the step."""

    layer: str
    kind: str
    rule: str
    parameters: int
    bytes: int | None


@dataclass(frozen=True)
class Summary:
    """The layers that are trained privately. `str` is a table, a notebook shows it as one.

    `bytes` of a row are what one record of a batch of `batch` keeps from the backward to the step: factors,
    or gradients where those are quicker. Tensors that two layers share are counted twice, so it is never too
    little; None without an example to run. Activations that torch keeps for the backward are not in it.
    """

    rows: tuple[Row, ...]
    frozen: int
    batch: int

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def bytes(self) -> int | None:
        known = [row.bytes for row in self.rows if row.bytes is not None]
        return sum(known) if len(known) == len(self.rows) else None

    def _cells(self) -> list[tuple[str, ...]]:
        head = ("layer", "type", "rule", "parameters", "memory per record")
        body = [(r.layer, r.kind, r.rule, f"{r.parameters:,}", size(r.bytes)) for r in self.rows]
        total = ("all", "", "", f"{self.parameters:,}", size(self.bytes))
        return [head, *body, total]

    def _note(self) -> str:
        frozen = f"{self.frozen:,} parameters are frozen. " if self.frozen else ""
        return f"{frozen}Memory is what a record keeps until the step, in a physical batch of {self.batch:,}."

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = [
            "  ".join(
                cell.rjust(width) if place >= 3 else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in cells
        ]
        rule = "─" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], self._note()])

    def _repr_html_(self) -> str:
        head, *body = self._cells()
        return f"{html_table(body, head)}<p>{html.escape(self._note())}</p>"


def summarize(
    model: nn.Module, run: Callable[[], Any] | None, batch: int = 1, needs: Needs = "norms"
) -> Summary:
    """`run` calls the model on one record; without it memory is not known. `needs` is the method's."""
    units = find_units(model)
    seen = _shapes(units, run) if run is not None else {}
    rows = []
    for unit in units:
        numbers = [unit.layer.get_parameter(name).numel() for name in unit.parameters]
        rule = "torch.func, record by record" if unit.rule is None else unit.rule.__name__.replace("_", " ")
        held = None if run is None else _held(unit, seen.get(unit.layer, []), batch, needs)
        rows.append(Row(unit.name, type(unit.layer).__name__, rule, sum(numbers), held))
    private = sum(row.parameters for row in rows)
    everything = sum(p.numel() for p in model.parameters())
    return Summary(tuple(rows), everything - private, batch)


def run_on_zeros(module: nn.Module, example: Any) -> None:
    """`example` is the model's input; its shapes are wanted, not its values."""
    device = next(module.parameters()).device
    zeros = tree_map(
        lambda leaf: torch.zeros_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf, example
    )
    module(**zeros) if isinstance(zeros, dict) else module(zeros)


Seen = dict[nn.Module, list[tuple[Tensor, Tensor]]]


def _shapes(units: Sequence[Unit], run: Callable[[], Any]) -> Seen:
    """For each call of a layer its input and output, as tensors without memory."""
    seen: Seen = {}

    def note(layer: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        (x,) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        seen.setdefault(layer, []).append((full_precision(x.to("meta")), full_precision(out.to("meta"))))

    # A dropout on the way may draw; nobody shall notice.
    with noting([unit.layer for unit in units], note), fork_rng([]), torch.no_grad():
        run()
    return seen


def _held(unit: Unit, calls: Sequence[tuple[Tensor, Tensor]], batch: int, needs: Needs) -> int:
    """Bytes a record, by the very code that will run, on tensors that have shapes and no memory."""
    own = [p for name in unit.parameters if (p := unit.layer.get_parameter(name)).requires_grad]
    dense = sum(p.numel() * max(p.element_size(), 4) for p in own)
    if not calls:
        return 0
    if unit.rule is None:  # materialized
        return dense
    kept: dict[str, PerSampleGradient] = {}
    for call in calls:
        x, g = (t.new_empty(batch, *t.shape[1:]) for t in call)
        for name, gradient in unit.rule(unit.layer, x, g).items():
            if name in unit.parameters:
                now = gradient if needs == "inputs" else gradient.compact(needs == "spectra")
                kept[name] = add(kept[name], now, now.grid_axes) if name in kept else now
    return math.ceil(held_bytes(list(kept.values())) / batch)


def held_bytes(gradients: Sequence[PerSampleGradient]) -> int:
    """Bytes of these gradients' tensors, what they share counted once; not of larger ones they may view."""
    held: dict[int, int] = {}
    for gradient in gradients:
        for tensor in gradient.tensors().values():
            place = tensor.untyped_storage()._cdata
            held[place] = max(held.get(place, 0), tensor.nbytes)
    return sum(held.values())


def html_table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Every cell is text."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + (line(head, "th") if head else "") + "".join(line(r, "td") for r in rows) + "</table>"


def size(count: int | None) -> str:
    """Bytes as people read them."""
    if count is None:
        return "?"
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count} B" if power < 1 else f"{count / 1024**power:.1f} {' KMG'[power]}iB"
