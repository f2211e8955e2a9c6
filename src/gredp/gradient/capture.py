"""Where the gradient path begins: hooks that note each layer's input and output gradient.

While a layer runs, its parameters do not ask autograd for a gradient: the sum over records that
autograd would compute is never needed, and a parameter that receives one all the same has been used
outside its layer, where no clip would see it. That is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves

from gredp.errors import GredpError
from gredp.gradient.batch_dimension import RowsOnZeros
from gredp.gradient.graph import in_graph
from gredp.gradient.per_sample import Buffer, PerSampleGradient, PerSampleSpectra, add
from gredp.gradient.reduction import LossReduction
from gredp.gradient.rules import Call, exact, full_precision, generic
from gredp.gradient.state import HeldState
from gredp.gradient.units import Unit, blocks, find_units
from gredp.mechanisms.plan import Needs
from gredp.sampling.draws import memory_of
from gredp.storage.files import one_line


class Capture:
    """Hooks on one model. `take` hands over what the last backward brought, once."""

    def __init__(
        self,
        module: nn.Module,
        loss_reduction: str = "mean",
        needs: Needs = "norms",
        views: int = 1,
    ) -> None:
        """`needs` is what the step will ask of a layer, by which it chooses what to keep until then.

        `views` is the number of inputs that belong to each record, side by side in every batch. A
        record's gradient is that of its mean loss over them: one vector, which is clipped once.
        """
        self.module = module
        self.loss_reduction = loss_reduction
        self.reduction = LossReduction(loss_reduction)
        self.needs = needs
        self.views = views
        self.units = find_units(module)
        self._by_layer = {unit.layer: unit for unit in self.units}
        self._pending: dict[str, PerSampleGradient] = {}
        self._memory: dict[str, Buffer] = {}
        self._pending_pass: int | None = None
        self._batch: int | None = None
        self._pass = 0
        self._paused = False
        self._on_zeros = RowsOnZeros(module, set(self._by_layer))
        self._within: nn.Module | None = None  # a layer whose generic rule covers those below it
        self._root_batch: int | None = None
        #: what may not change but by releases
        self.state = HeldState(module, {full for unit in self.units for full in unit.parameters.values()})
        #: where the inputs of the passes since the last step lie
        self._places: dict[int, list[StorageWeakRef]] = {}
        self._handles: list[Any] = []
        self._grid_axes = {block.name: len(block.grid) for block in blocks(module, self.units)}
        self._attach()

    # ---------------------------------------------------------------- hooks

    def _attach(self) -> None:
        # Plain functions, not bound methods: a deep copy of the model must not copy this object.
        capture = self

        def begin_pass(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is capture.module and not capture._paused:
                capture._begin_pass(args, kwargs)

        def end_pass(module: nn.Module, args: Any, out: Any) -> None:
            if module is capture.module and not capture._paused:
                capture._end_pass()

        def probe(part: nn.Module, args: Any, kwargs: Any) -> None:
            if part in capture._on_zeros.parts and capture.module.training and torch.is_grad_enabled():
                capture._probe(part, args, kwargs)

        def before(layer: nn.Module, args: Any) -> None:
            if capture._active(layer):
                capture._silence(layer)
                if capture._by_layer[layer].rule is None:
                    capture._within = layer

        def after(layer: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            if capture._active(layer):
                capture._within = None
                capture._restore(layer)
                return capture._watch(layer, args, kwargs, out)
            return None

        handles = self._handles
        handles += self.state.attach()
        handles.append(self.module.register_forward_pre_hook(begin_pass, with_kwargs=True))
        handles.append(self.module.register_forward_hook(end_pass))
        for part in self._on_zeros.parts:
            handles.append(part.register_forward_pre_hook(probe, with_kwargs=True))
        for unit in self.units:
            handles.append(unit.layer.register_forward_pre_hook(before))
            # First in line: a hook of the user's may change the output, and that is not the layer's doing.
            handles.append(
                unit.layer.register_forward_hook(after, with_kwargs=True, always_call=True, prepend=True)
            )
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                handles.append(layer.register_forward_pre_hook(_keep_in_eval_mode))
        names = {full for unit in self.units for full in unit.parameters.values()}
        for name, parameter in self.module.named_parameters():
            if name in names:
                handles.append(parameter.register_hook(_refuse_raw_gradient(name)))
            else:
                parameter.grad = None  # what an earlier backward left there was never clipped

    def detach(self) -> None:
        """Give the model back as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _active(self, layer: nn.Module) -> bool:
        return (
            layer in self._by_layer
            and self.module.training
            and torch.is_grad_enabled()
            and not self._paused
            and self._within in (None, layer)
        )

    @contextmanager
    def one_pass(self, batch: Any) -> Iterator[None]:
        """For programs that call the model's parts and not its own forward: sizes and buffers are checked."""
        self._begin_pass((batch,), {})
        yield
        self._end_pass()

    def _begin_pass(self, args: Any, kwargs: Any) -> None:
        self._pass += 1
        tensors = _tensors((args, kwargs))
        self._root_batch = tensors[0].shape[0] if tensors else None
        if torch.is_grad_enabled() and not self._paused:
            self._places[self._pass] = memory_of(tensors)
        if self.module.training:
            self.state.begin_forward()

    def _probe(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Before its first records: is the batch the first dimension of every layer in this part?

        The model itself comes first, and covers all; its parts where that fails, or is not called.
        """
        tensors = _tensors((args, kwargs))
        batch = self._root_batch if self._root_batch is not None else tensors and tensors[0].shape[0]
        if self._paused or not batch:
            return
        self._paused = True
        try:
            self._on_zeros.run(part, args, kwargs, batch)
        finally:
            self._paused = False

    def _end_pass(self) -> None:
        self._root_batch = None
        if self.module.training:
            self.state.end_forward()

    def _silence(self, layer: nn.Module) -> None:
        unit = self._by_layer[layer]
        unit.silenced = [p for p in map(layer.get_parameter, unit.parameters) if p.requires_grad]
        for parameter in unit.silenced:
            parameter.requires_grad_(False)

    def _restore(self, layer: nn.Module) -> None:
        for parameter in self._by_layer[layer].silenced:
            parameter.requires_grad_(True)

    def _watch(self, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if out is None:  # the layer's forward raised; that error is on its way
            return None
        unit = self._by_layer[layer]
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != 1 or not isinstance(out, Tensor):
            raise GredpError(
                f"{unit.name} ({type(layer).__name__}) takes {len(places)} tensors and returns "
                f"{type(out).__name__}: per-sample gradients need one tensor in and one out; "
                "see gredp.fix, or build it from smaller layers"
            )
        x = leaves[places[0]].detach()
        expected = self._root_batch if self._root_batch is not None else (x.shape[0] if x.dim() else 0)
        if x.dim() == 0 or out.dim() == 0 or not x.shape[0] == out.shape[0] == expected:
            raise GredpError(
                f"{unit.name} ({type(layer).__name__}) turns {tuple(x.shape)} into {tuple(out.shape)}: "
                "the first dimension of every layer's input and output must be the batch, "
                f"here {expected} records"
            )
        if self._on_zeros.fixed.get(layer) == expected:
            raise GredpError(
                f"{unit.name} ({type(layer).__name__}) has {expected} rows whatever the batch: they are no "
                "records, though as many here, and would be clipped in their place; give it [batch, ...] as "
                "input, position ids by ids.expand(len(x), -1)"
            )
        if self._pending_pass is not None:  # parts of the model are called without its own forward
            self._pass += 1
        spent, number, version = [False], self._pass, x._version

        def receive(grad: Tensor) -> None:
            if spent[0]:
                raise GredpError(
                    f"{unit.name} was differentiated twice: add the losses and call backward once per batch"
                )
            if x._version != version:
                raise GredpError(f"{unit.name}: its input was overwritten in place before the backward")
            spent[0] = True
            self._receive(unit, number, x, grad.detach(), (leaves, spec, places[0]))

        out = in_graph(out, reads_output=unit.rule is None)
        self.reduction.mark(out)
        out.register_hook(receive)
        return out

    def _receive(self, unit: Unit, number: int, x: Tensor, g: Tensor, call: Call) -> None:
        if self._pending_pass is None:
            self.reduction.look(unit.name, g)
            self._pending_pass = number
        if number != self._pending_pass:
            raise GredpError(
                "a second backward before optimizer.step(): a step covers one draw of records; for batches "
                "too large for memory use BatchMemoryManager, for several inputs of a record one module"
            )
        if self._batch is None:
            self._batch = g.shape[0]
        if g.shape[0] != self._batch:
            raise GredpError(
                f"{unit.name} saw {g.shape[0]} records, another layer {self._batch}: "
                "the first dimension of every layer's input must be the batch"
            )
        if g.shape[0] % self.views:
            raise GredpError(
                f"{g.shape[0]} inputs are no whole number of records with {self.views} views each: "
                "train on the batches of the loader that make_private returned"
            )
        if self.loss_reduction == "mean" and full_precision(g) is not g:
            raise GredpError(
                f"{unit.name}: gradients of a mean loss in {str(g.dtype).removeprefix('torch.')} are rounded "
                "after the division by the batch, which couples its records: use loss_reduction='sum' and "
                "the sum of the records' losses, or single precision"
            )
        with exact(g.device):
            gradients = self._gradients(unit, full_precision(x), full_precision(g), call)
        unit.refuse_left_out(gradients)
        for name, gradient in gradients.items():
            full = unit.parameters.get(name)
            if full is None or not unit.layer.get_parameter(name).requires_grad:
                continue  # absent (no bias), or frozen by now
            held = self._pending.get(full)
            self._pending[full] = gradient if held is None else add(held, gradient, self._grid_axes[full])

    def _gradients(self, unit: Unit, x: Tensor, g: Tensor, call: Call) -> dict[str, PerSampleGradient]:
        """By the unit's rule, or the generic one; what these refuse is refused by the layer's name."""
        try:
            return self._by_rule(unit, x, g, call)
        except GredpError as error:
            raise GredpError(f"{unit.name}: {error}") from None
        except (RuntimeError, TypeError) as error:
            if unit.rule is not None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise GredpError(
                f"{unit.name} ({type(unit.layer).__name__}) has no rule of its own, and torch.func cannot "
                f"differentiate it record by record ({one_line(error)}): build it from torch's own layers"
            ) from error

    def _by_rule(self, unit: Unit, x: Tensor, g: Tensor, call: Call) -> dict[str, PerSampleGradient]:
        if unit.rule is not None:
            with torch.no_grad():
                gradients = self._of_records(unit.rule(unit.layer, x, g))
                if self.needs == "inputs":
                    return gradients
                return {
                    n: v.compact(self.needs == "spectra", self._buffer(unit.parameters.get(n)))
                    for n, v in gradients.items()
                }
        self._paused = True  # the generic rule runs the layer again; these runs are not the user's
        try:
            return self._of_records(generic(unit.layer, list(unit.parameters), x, g, call))
        finally:
            self._paused = False

    def _of_records(self, gradients: dict[str, PerSampleGradient]) -> dict[str, PerSampleGradient]:
        """Inputs' gradients added up to records': before any norm is taken, or each view would be clipped."""
        if self.views == 1:
            return gradients
        return {name: gradient.merge_views(self.views) for name, gradient in gradients.items()}

    def _buffer(self, name: str | None) -> Buffer | None:
        """The parameter's own, unless an earlier use of it in this pass still lives there."""
        if name is None or name in self._pending:
            return None
        return self._memory.setdefault(name, Buffer())

    # ---------------------------------------------------------------- what the step asks for

    def take(self) -> PerSampleSpectra | None:
        """What the last backward brought, valid until the next; None if there was none."""
        if self._pending_pass is None or self._batch is None:
            return None
        records = self._batch // self.views
        scale = float(records) if self.loss_reduction == "mean" else 1.0 / self.views
        spectra = PerSampleSpectra(self._pending, records, scale)
        self.drop()
        self._places.clear()
        return spectra

    @property
    def inputs(self) -> list[StorageWeakRef]:
        """Where the model's inputs of the backward that `take` hands over lie, as far as they were seen."""
        return self._places.get(self._pending_pass or 0, [])

    def take_nothing(self) -> None:
        """The next step is on no records, for models that cannot run on an empty batch."""
        self.drop()
        self._pending_pass, self._batch = self._pass, 0

    def drop(self) -> None:
        self._pending, self._pending_pass, self._batch = {}, None, None


def _tensors(batch: Any) -> list[Tensor]:
    """Those that have a first dimension."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]


def _refuse_raw_gradient(name: str) -> Callable[[Tensor], None]:
    def refuse(grad: Tensor) -> None:
        raise GredpError(
            f"parameter {name} received a gradient outside its layer's forward, where no clip would see it: "
            "call model.train() before training, and use the parameter only through its layer"
        )

    return refuse


def _keep_in_eval_mode(layer: nn.Module, args: Any) -> None:
    """A frozen normalization stays as it is, also when a loop calls model.train() in every epoch."""
    layer.eval()
