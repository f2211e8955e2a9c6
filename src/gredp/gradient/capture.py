"""Stage 1, forward: hooks that note each layer's input and output gradient.

While a layer runs, its parameters do not ask autograd for a gradient: the sum over records that
autograd would compute is never needed, and a parameter that receives one all the same has been used
outside its layer, where no clip would see it. That is rejected.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from gredp.errors import GredpError
from gredp.gradient.batch_dimension import RowsOnZeros
from gredp.gradient.graph import frees_graph, in_backward, in_graph, moments, reaches_weights
from gredp.gradient.received import Forward, Received
from gredp.gradient.rules import embedding_bag, group_norm, weighted_bags
from gredp.gradient.shared import Shared, is_shared
from gredp.gradient.state import UntrainedState
from gredp.gradient.units import blocks, find_units
from gredp.mechanisms.plan import Needs
from gredp.sampling.draws import memory_of


class Capture(Received):
    """Hooks on one model."""

    def __init__(
        self,
        module: nn.Module,
        loss_reduction: str = "mean",
        needs: Needs = "norms",
        views: int = 1,
        rounded: bool = False,
        batch_first: bool = True,
    ) -> None:
        self.module, self.units = module, find_units(module)
        grid_axes = {block.name: len(block.grid) for block in blocks(module, self.units)}
        super().__init__(loss_reduction, needs, views, grid_axes, rounded)
        self._by_layer = {unit.layer: unit for unit in self.units}
        self._on_zeros = RowsOnZeros(module, set(self._by_layer), int(not batch_first))
        self._within: nn.Module | None = None  # a layer whose generic rule covers those below it
        self._root_batch: int | None = None
        #: what may not change but by releases
        self.state = UntrainedState(module, grid_axes)
        self._handles: list[Any] = []
        self._attach()

    def _attach(self) -> None:
        handles, hook = self._handles, _Hook
        handles += self.state.attach(hook)
        handles.append(self.module.register_forward_pre_hook(hook(self._begin_pass), with_kwargs=True))
        handles.append(self.module.register_forward_hook(hook(self._end_pass)))
        for part in self._on_zeros.parts:
            handles.append(part.register_forward_pre_hook(hook(self._probe), with_kwargs=True))
        for unit in self.units:
            handles.append(unit.layer.register_forward_pre_hook(hook(self._before)))
            # First in line: a hook of the user's may change the output, and that is not the layer's doing.
            first = {"with_kwargs": True, "always_call": True, "prepend": True}
            handles.append(unit.layer.register_forward_hook(hook(self._after), **first))
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                handles.append(layer.register_forward_pre_hook(hook(_keep_in_eval_mode)))
        for name, parameter in self.module.named_parameters():
            if name in self.state.trained:
                handles.append(parameter.register_hook(_reject_raw_gradient(name)))
            else:
                parameter.grad = None  # what an earlier backward left there was never clipped

    def detach(self) -> None:
        """Give the model back as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def one_pass(self, batch: Any) -> Iterator[None]:
        """For programs that call the model's parts and not its own forward: sizes and buffers are checked."""
        self._begin_pass(self.module, (batch,), {})
        yield
        self._end_pass(self.module)

    def _begin_pass(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self.module or self._paused:
            return
        tensors = _tensors((args, kwargs))
        bags = any(unit.rule is embedding_bag for unit in self.units)
        if bags and [t.dim() for t in tensors[:2]] == [1, 1] and not tensors[1].is_floating_point():
            tensors = tensors[1:]  # ids, and the offset of each record
        self._root_batch = self._rows(tensors[0]) if tensors else None
        if torch.is_grad_enabled():
            self._forward = Forward(self.handed_out(), memory_of(_tensors((args, kwargs))))
        if module.training:
            self.state.begin_forward()

    def _end_pass(self, module: nn.Module, *_: Any) -> None:
        if module is not self.module or self._paused:
            return
        self._root_batch = None
        if module.training:
            self.state.end_forward()

    def _active(self) -> bool:
        return self.module.training and torch.is_grad_enabled() and not self._paused

    def _records(self, inputs: Any) -> int:
        """How many the model was called with, or else this part of it."""
        tensors = _tensors(inputs)
        return self._root_batch if self._root_batch is not None else self._rows(tensors[0]) if tensors else 0

    def _rows(self, tensor: Tensor) -> int:
        axis = self._on_zeros.axis
        return tensor.shape[axis if tensor.dim() > axis else 0]

    def _probe(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Before its first records: is the batch the first dimension of every layer in this part?

        The model itself comes first, and covers all; its parts where that fails, or is not called.
        """
        records = self._records((args, kwargs))
        if part in self._on_zeros.parts and self._active() and (records or self._on_zeros.axis):
            with self._pause():
                self._on_zeros.run(part, args, kwargs, records)

    def _watches(self, layer: nn.Module) -> bool:
        return layer in self._by_layer and self._active() and self._within in (None, layer)

    def _before(self, layer: nn.Module, args: Any) -> None:
        if self._watches(layer):
            unit = self._by_layer[layer]
            unit.silenced = [p for p in map(layer.get_parameter, unit.parameters) if p.requires_grad]
            for parameter in unit.silenced:
                parameter.requires_grad_(False)
            if unit.rule is None:
                self._within = layer

    def _after(self, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if not self._watches(layer):
            return None
        self._within = None
        for parameter in self._by_layer[layer].silenced:
            parameter.requires_grad_(True)
        # Without an output the layer's forward raised; that error is on its way.
        return None if out is None else self._watch(layer, args, kwargs, out)

    def _running(self) -> Forward:
        """That of the model, also where a backward runs parts of it again.

        Where parts of the model are called without it, those up to a backward are one.
        """
        handed_out, alone = self.handed_out(), self._root_batch is None and not in_backward()
        if alone and (self.forwards or self._forward.handed_out != handed_out):
            self._forward = Forward(handed_out)
        return self._forward

    def _watch(self, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        unit = self._by_layer[layer]
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[i] for i in places]
        if unit.rule is embedding_bag:
            inputs = [weighted_bags(layer, *args, **kwargs)]  # type: ignore[arg-type]
        elif isinstance(layer, nn.EmbeddingBag) and inputs[0].dim() == 1:
            raise GredpError(
                f"{unit.name} (EmbeddingBag) takes the maximum of ids with offsets, which are no rows of "
                "records: give it ids [batch, length], padded with a padding_idx, or use mode='mean'"
            )
        alike = unit.rule is None and len({t.shape[:1] for t in inputs}) == 1
        if not (len(inputs) == 1 or alike) or not isinstance(out, Tensor):
            raise GredpError(
                f"{unit.name} ({type(layer).__name__}) takes {len(places)} tensors and returns "
                f"{type(out).__name__}: per-sample gradients need one tensor out, and a row per record in "
                "every tensor that goes in; see gredp.fix, or build it from smaller layers"
            )
        x, axis = inputs[0].detach(), self._on_zeros.axis_of(layer)
        expected = self._records(x)
        x = x.transpose(0, axis) if axis else x
        constant = x.dim() > 0 and self._on_zeros.constant(layer, x.shape[0], axis)
        shared = constant and not self._on_zeros.axis and is_shared(layer, x)
        if shared:
            x, out, constant = x.expand(expected, *x.shape), out.expand(expected, *out.shape), False
        if x.dim() == 0 or out.dim() <= axis or not x.shape[0] == out.shape[axis] == expected:
            raise GredpError(
                f"{unit.name} ({type(layer).__name__}) turns {tuple(inputs[0].shape)} into "
                f"{tuple(out.shape)}: the first dimension of every layer's input and output must be the "
                f"batch, here {expected} records"
            )
        if constant:
            raise GredpError(
                f"{unit.name} ({type(layer).__name__}) has {expected} rows whatever the batch: they are no "
                "records, though as many here, and would be clipped in their place; give it [batch, ...] as "
                "input (position ids by ids.expand(len(x), -1)), or freeze it"
            )
        forward, versions = self._running(), [t._version for t in inputs]
        # The hook lives as long as the loss; what it keeps must not, or no input would be freed before.
        found = moments(out) if unit.rule is group_norm and not (axis or shared) else None
        known = {} if found is None else {"moments": found}
        kept: list[Any] = [(x, inputs, (leaves, spec, places, axis))]

        def receive(grad: Tensor) -> None:
            if not reaches_weights():
                return
            if not kept:
                raise GredpError(
                    f"{unit.name}: a second backward needs backward(retain_graph=True) before it"
                )
            x, inputs, call = kept[0]
            if versions != [t._version for t in inputs]:
                raise GredpError(f"{unit.name}: its input was overwritten in place before the backward")
            grad = grad.detach().transpose(0, axis) if axis else grad.detach()
            self._receive(unit, forward, x, grad, call, known)
            if frees_graph():
                kept.clear()

        out = in_graph(out, reads_output=unit.rule is None)
        self.reduction.mark(out)
        out.register_hook(receive)
        return Shared.of(out, self._on_zeros.beside) if shared else out


class _Hook(partial[Any]):
    """A method of ours on a part of the model. In a copy of the model, or a pickle, it does nothing."""

    def __new__(cls, call: Callable[..., Any]) -> "_Hook":
        # as it is: torch.compile compiles what lies between two of them
        return super().__new__(cls, torch.compiler.disable(call))

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # of the standard library: takes anything, returns None


def _tensors(batch: Any) -> list[Tensor]:
    """Those that have a first dimension."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]


def _reject_raw_gradient(name: str) -> Callable[[Tensor], None]:
    def reject(grad: Tensor) -> None:
        raise GredpError(
            f"parameter {name} received a gradient outside its layer's forward, where no clip would see it: "
            "call model.train() before training, and use the parameter only through its layer"
        )

    return reject


def _keep_in_eval_mode(layer: nn.Module, args: Any) -> None:
    """A frozen normalization stays as it is, also when a loop calls model.train() in every epoch."""
    layer.eval()
