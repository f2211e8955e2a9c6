"""The layers that own trainable parameters, and the geometry of those parameters as blocks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from gredp.errors import GredpError
from gredp.gradient.rules import Gradients, Rule, convolution, convolution_with_bias, grid_axes, rule_for
from gredp.privacy.certificate import Block


@dataclass(eq=False)
class Unit:
    """A layer that is hooked: its own parameters, or a whole subtree under the generic rule."""

    name: str
    layer: nn.Module
    rule: Rule | None
    #: name within the layer → name within the model
    parameters: dict[str, str]
    #: parameters that do not ask for a gradient while the layer runs
    silenced: list[Tensor] = field(default_factory=list)

    def check(self, gradients: Gradients, records: int) -> None:
        """A rule gives every parameter one row per record: without any it is noised and never trained."""
        for name, gradient in gradients.items():
            if gradient.batch != records:
                raise GredpError(
                    f"{self.name}: the rule of {type(self.layer).__name__} gives {gradient.batch} rows of "
                    f"{name} for {records} records: return the gradient of each record in a row of its own"
                )
        for name in self.parameters:
            if name not in gradients and self.layer.get_parameter(name).requires_grad:
                raise GredpError(
                    f"{self.name}: the rule of {type(self.layer).__name__} gives no gradient for {name}: it "
                    "would be noised and never trained; return one for each parameter, or freeze it"
                )


def find_units(module: nn.Module) -> list[Unit]:
    """The layers that own trainable parameters, outermost first, each once however often it appears."""
    full_names = {id(p): n for n, p in module.named_parameters()}
    units: dict[nn.Module, Unit] = {}

    def visit(name: str, layer: nn.Module) -> None:
        # What a parametrized weight is computed from lies in a module of its own.
        below = is_parametrized(layer)
        own = {n: p for n, p in layer.named_parameters(recurse=below) if p.requires_grad}
        if not own:
            for child, sub in layer.named_children():
                visit(f"{name}.{child}" if name else child, sub)
        elif layer not in units:
            rule = rule_for(layer)
            # Without a rule, the parameters below come along: the generic rule differentiates all of it.
            inside = own if rule else {n: p for n, p in layer.named_parameters() if p.requires_grad}
            names = {n: full_names[id(p)] for n, p in inside.items()}
            units[layer] = Unit(name or type(layer).__name__, layer, rule, names)

    visit("", module)
    return list(units.values())


def blocks(module: nn.Module, units: Sequence[Unit]) -> list[Block]:
    """The geometry of every private parameter on its own grid, in the model's order."""
    found: dict[str, Block] = {}
    for unit in units:
        for name, full in unit.parameters.items():
            shape = tuple(unit.layer.get_parameter(name).shape)
            axes = grid_axes(unit.layer, name) if unit.rule else min(1, len(shape))
            found.setdefault(full, Block.whole(full, unit.name, shape, axes))
    return [found[n] for n, _ in module.named_parameters() if n in found]


def padded_blocks(module: nn.Module, units: Sequence[Unit], run_model: Callable[[], Any]) -> list[Block]:
    """The same with convolution kernels as crops of their padded input's grid.

    The sizes come from one forward of zeros, which `run_model` performs.
    """
    found = {block.name: block for block in blocks(module, units)}
    kernels = {
        unit.layer: found[unit.parameters["weight"]]
        for unit in units
        if unit.rule is convolution_with_bias and "weight" in unit.parameters
    }

    def note(layer: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        (x,) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        grid = convolution(layer, x.detach(), torch.zeros_like(out))["weight"].padded_grid
        released = tuple(tuple(range(0, k * d, d)) for k, d in zip(layer.kernel_size, layer.dilation))
        block = kernels[layer]
        found[block.name] = replace(block, grid=grid, released=released)

    with noting(kernels, note), torch.no_grad():
        run_model()
    return list(found.values())


@contextmanager
def noting(layers: Iterable[nn.Module], note: Callable[..., None]) -> Iterator[None]:
    """Call `note` with the layer, its arguments and its output in every forward of these layers."""
    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
