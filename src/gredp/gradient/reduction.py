"""Whether a loss is the mean or the sum over records that `loss_reduction` says it is.

Under "mean" the gradients are multiplied by the number of records that were drawn, so that each is that of
its record's own loss. Of a summed loss, or of a mean that is said to be a sum, they would grow or shrink with
every record that comes or goes: the sum then moves by nearly twice the clipping norm for one of them.

Two looks, neither of which takes a loss for wrong that is right:
- At the graph from the loss down to the layers, in the backward itself. A loss that is one plain mean or
  sum over the batch is known by it at once. Where anything else is multiplied in, nothing is concluded.
- At the sizes of the gradients over steps, for any loss. A batch's size says nothing of what is in it, so
  the records' mean log gradient norm falls by the log of the size for a mean, and stays for a sum. What is
  left of that over pairs of draws has mean zero where the loss is as it was said, and a self-normalized sum
  of symmetric differences passes SURE with probability below 2·exp(−SURE²/2) = 5e-11. It takes some hundred
  steps, on batches of the loader that are not split into parts: in data that are sorted, parts differ.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from gredp.errors import GredpError
from gredp.gradient.graph import runs

#: standard errors
SURE = 7.0
#: nodes of a graph that are looked at, at most
PATIENCE = 10_000
#: what does to each record's loss the same, however many there are
EACH = re.compile(
    "Abs|Add|Alias|Clamp|ClampMin|Clone|Exp|Gather|Log|LogSigmoid|LogSoftmax|Neg|Pow|Relu|Reshape|"
    "ReshapeAlias|Rsub|Select|Sigmoid|Slice|Softmax|Softplus|Sqrt|Squeeze|Sub|Tanh|ToCopy|Transpose|"
    "UnsafeView|Unsqueeze|View"
)


class LossReduction:
    """What is known of the loss of one model, from one step to the next."""

    def __init__(self, declared: str) -> None:
        self.declared = declared
        self._other = "sum" if declared == "mean" else "mean"
        self._passes = 0
        self._now: tuple[str, int, float] | None = None
        self._last: tuple[str, int, float] | None = None
        self._left = self._squares = self._sizes = 0.0

    def mark(self, out: Tensor) -> None:
        """A layer's output: where the loss ends and the model begins."""
        node: Any = out.grad_fn
        node.metadata[self] = True

    def look(self, layer: str, gradient: Tensor) -> None:
        """At the first output gradient of a backward, within it."""
        records = len(gradient)
        self._now = None
        if records == 0:
            return
        if (self._passes + 1) & self._passes == 0:  # 1st, 2nd, 4th, 8th, … pass
            self.reject_other(_losses(), records)
        self._passes += 1
        norms = gradient.detach().flatten(1)[:, :1024].double().norm(dim=1)
        norms = norms[(norms > 0) & norms.isfinite()]
        if len(norms):
            self._now = (layer, records, float(norms.log().mean()))

    def reject_other(self, losses: Iterable[Tensor], records: int) -> None:
        """Losses of so many records that are plainly not what they were said to be."""
        if records > 1 and self._other in self._in_graph(losses, records):
            raise GredpError(
                f"the loss is a {self._other} over records, but loss_reduction is {self.declared!r}: one "
                f"record would change the weight of all others; give make_private loss_reduction="
                f"{self._other!r}, or take the {self.declared} of the records' losses"
            )

    def _in_graph(self, losses: Iterable[Tensor], records: int) -> set[str]:
        """Which of "mean" and "sum" plainly leads from a loss to a layer."""
        found: set[str] = set()
        paths: list[tuple[Any, frozenset[str], bool]]
        paths = [(loss.grad_fn, frozenset(), True) for loss in losses]
        seen = set(paths)
        while paths and len(seen) < PATIENCE:
            node, kinds, plain = paths.pop()
            if node is None:
                continue
            if self in node.metadata:
                found |= kinds if plain and len(kinds) == 1 else set()
                continue
            kind = _reduction(node, records)
            kinds, plain = kinds | {kind} if kind else kinds, plain and kind is not None
            further = {(child, kinds, plain) for child, _ in node.next_functions} - seen
            seen |= further
            paths += further
        return found

    def compare(self) -> None:
        """The last backward was on a whole draw: compare its gradients with those of another one."""
        last, now = self._last, self._now
        self._last, self._now = (now, None) if last is None or now is None else (None, None)
        if last is None or now is None or last[0] != now[0] or last[1] == now[1]:
            return
        size = math.log(now[1] / last[1])
        left = now[2] - last[2] + (size if self.declared == "mean" else 0.0)
        self._left += math.copysign(left, size * left)
        self._squares += left**2
        self._sizes += abs(size)
        if abs(self._left) > max(SURE * math.sqrt(self._squares), self._sizes / 2):
            raise GredpError(
                f"gradients follow the size of the batch as those of a {self._other} over records do, but "
                f"loss_reduction is {self.declared!r}: the ε of the steps so far does not hold; begin again "
                f"with loss_reduction={self._other!r}, or take the {self.declared} of the records' losses"
            )


def _losses() -> Iterator[Tensor]:
    for run in runs():
        yield from (t for t in run.get("t_outputs", ()) if isinstance(t, Tensor))


def _reduction(node: Any, records: int) -> str | None:
    """What this node does over the batch: "mean", "sum", "" for nothing, None where it is not known."""
    name = re.sub(r"Backward\d*$", "", node.name())
    if name in ("Mean", "Sum"):
        sizes = node._saved_self_sym_sizes
        over = {_signed(d) % len(sizes) for d in getattr(node, "_saved_dim", None) or range(len(sizes))}
        return name.lower() if 0 in over and sizes[0] % records == 0 else ""
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        return ("", "mean", "sum")[reduction]
    moved = [_signed(getattr(node, f"_saved_dim{i}")) for i in "01"] if name == "Transpose" else [1]
    cut = name in ("Select", "Slice", "Gather") and node._saved_dim == 0
    if not EACH.fullmatch(name) or cut or min(moved) < 1 or getattr(node, "_saved_alpha", 1) != 1:
        return None
    return ""


def _signed(dimension: int) -> int:
    """The engine keeps those from the end as numbers below 2⁶⁴."""
    return dimension - 2**64 if dimension >= 2**63 else dimension
