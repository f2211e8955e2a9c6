"""Stage 2, rules: how each kind of layer gives its per-sample gradients, a few lines each, chosen by type.

A rule takes the layer, its input and the gradient at its output, both with the batch first, and
returns one `PerSampleGradient` for each of its parameters.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_unflatten

from gredp.errors import GredpError
from gredp.gradient.convolution import Correlation
from gredp.gradient.factored import Circulant, Lookup, Outer
from gredp.gradient.norms import full_precision
from gredp.gradient.per_sample import Dense, PerSampleGradient
from gredp.gradient.standardized import Standardized
from gredp.layers import BlockCirculantLinear, WSConv2d
from gredp.layers.block_circulant import to_blocks

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Gradients = dict[str, PerSampleGradient]
#: of a layer of the type it is registered for
Rule = Callable[..., Gradients]
#: the flattened arguments of a layer's call, their structure, which are its inputs, and their batch dimension
Call = tuple[list[Any], TreeSpec, list[int], int]

RULES: dict[type[nn.Module], Rule] = {}


def register_rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """A decorator: the function below gives the per-sample gradients of layers of these types.

    It takes the layer, its input and the gradient at its output, both `[b, ...]` and in single precision at
    least, and returns the gradient of each record for each parameter by name: as `Dense`, or as factors that
    need less memory (`gredp.gradient.per_sample`). Types without a rule of their own are served by
    `torch.func`, which is slower. A rule also serves subclasses that do not override `forward`; the rule of
    the nearest type counts, and a later registration replaces an earlier one.

    Formal guarantee. None without a right rule: ε holds if row i of what it returns is the gradient of record
    i and of no other. Compare a new rule with a loop over batches of one before you rely on it.

    >>> import torch
    >>> from torch import nn
    >>> import gredp
    >>> from gredp.gradient.per_sample import Dense
    >>> class Scale(nn.Module):
    ...     def __init__(self, features):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(features))
    ...     def forward(self, x):
    ...         return x * self.weight
    >>> @gredp.register_rule(Scale)
    ... def scale(layer, x, g):
    ...     return {"weight": Dense(x * g)}
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


@register_rule(nn.Linear)
def linear(layer: nn.Linear, x: Tensor, g: Tensor) -> Gradients:
    g, x = _positions(g), _positions(x)
    return {"weight": Outer(g, x), "bias": Dense(g.sum(1) if g.shape[1] != 1 else g[:, 0])}


@register_rule(BlockCirculantLinear)
def circulant(layer: BlockCirculantLinear, x: Tensor, g: Tensor) -> Gradients:
    p, q, d = layer.weight.shape
    g, x = _positions(g), _positions(x)
    return {"weight": Circulant(to_blocks(g, p, d), to_blocks(x, q, d)), "bias": Dense(g.sum(1))}


def convolution(layer: Convolution, x: Tensor, g: Tensor) -> dict[str, Correlation]:
    if x.dim() != len(layer.kernel_size) + 2:
        raise GredpError(f"{type(layer).__name__} got a record without a batch dimension: {tuple(x.shape)}")
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    pads = tuple(layer._reversed_padding_repeated_twice)
    geometry = (layer.kernel_size, layer.stride, layer.dilation, layer.groups)
    return {"weight": Correlation(x, g, *geometry, pads, mode)}


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution_with_bias(layer: Convolution, x: Tensor, g: Tensor) -> Gradients:
    return {**convolution(layer, x, g), "bias": Dense(_over_positions(g))}


@register_rule(WSConv2d)
def standardized_convolution(layer: WSConv2d, x: Tensor, g: Tensor) -> Gradients:
    kernels = convolution(layer, x, g)["weight"]
    units, scales = (full_precision(t) for t in layer.standardized())
    return {"weight": Standardized(kernels, units, scales), "bias": Dense(_over_positions(g))}


def _over_positions(g: Tensor) -> Tensor:
    """`[b, o, *]` → `[b, o]`."""
    return g.flatten(2).sum(2, dtype=torch.promote_types(g.dtype, torch.float32))


@register_rule(nn.Embedding)
def embedding(layer: nn.Embedding, x: Tensor, g: Tensor) -> Gradients:
    ids = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    g = g.reshape(*ids.shape, g.shape[-1])
    if layer.padding_idx is not None:
        g = g.masked_fill((ids == layer.padding_idx)[..., None], 0)
    return {"weight": Lookup(ids, g, layer.num_embeddings)}


@register_rule(nn.EmbeddingBag)
def embedding_bag(layer: nn.EmbeddingBag, x: Tensor, g: Tensor) -> Gradients:
    """`x` is that of `weighted_bags`."""
    ids, weights = x[..., 0].long(), x[..., 1:].to(g)
    return {"weight": Lookup(ids, g[:, None] * weights, layer.num_embeddings)}


def weighted_bags(
    layer: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """The arguments of its call as `[b, t, 2]`: ids of each record, and their weights in its sum or mean."""
    weights = torch.ones_like(input, dtype=torch.float64)
    if per_sample_weights is not None:
        weights = per_sample_weights.detach().double()
    if layer.padding_idx is not None:
        weights = weights.masked_fill(input == layer.padding_idx, 0)
    bags = torch.stack([input.double(), weights], -1)
    if offsets is not None:
        last = [] if layer.include_last_offset else [len(input)]
        ends = torch.cat([offsets, offsets.new_tensor(last)])[1:]
        starts = offsets[: len(ends)]
        places = torch.arange(int((ends - starts).max()) if len(ends) else 0, device=input.device)
        within = places < (ends - starts)[:, None]
        rows = bags.new_zeros(*within.shape, 2)
        rows[within] = bags[(starts[:, None] + places)[within]]
        bags = rows
    if layer.mode == "mean":
        bags[..., 1] /= bags[..., 1].sum(1, keepdim=True).clamp(min=1)
    return bags


@register_rule(nn.GroupNorm)
def group_norm(
    layer: nn.GroupNorm, x: Tensor, g: Tensor, moments: tuple[Tensor, Tensor] | None = None
) -> Gradients:
    """`moments` are those of the forward (`graph.moments`); without them they are taken again."""
    return _grouped(layer.num_groups, layer.eps, x, g, moments)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: nn.InstanceNorm2d, x: Tensor, g: Tensor) -> Gradients:
    return _grouped(x.shape[1], layer.eps, x, g)


def _grouped(
    groups: int, eps: float, x: Tensor, g: Tensor, moments: tuple[Tensor, Tensor] | None = None
) -> Gradients:
    """All records as the channels of one: torch's own kernels then keep their sums apart."""
    b, c, t = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    if b == 0:
        return {name: Dense(g.new_zeros(0, c)) for name in ("weight", "bias")}
    x, g = x.reshape(1, b * c, t), g.reshape(1, b * c, t)
    sizes = (1, b * c, t, b * groups)
    if moments is None or g.dtype != x.dtype:
        x, g = full_precision(x), full_precision(g)
    if moments is None:
        moments = torch.ops.aten.native_group_norm(x, None, None, *sizes, eps)[1:]
    mean, scale = (m.view(1, b * groups) for m in moments)
    # With means in single precision the sums are too, of inputs in half precision as well.
    _, weight, bias = torch.ops.aten.native_group_norm_backward(
        g, x, mean, scale, mean.new_ones(b * c), *sizes, [False, True, True]
    )
    return {"weight": Dense(weight.view(b, c)), "bias": Dense(bias.view(b, c))}


@register_rule(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, x: Tensor, g: Tensor) -> Gradients:
    return _elementwise(F.layer_norm(x, layer.normalized_shape, eps=layer.eps), g, layer.normalized_shape)


@register_rule(nn.RMSNorm)
def rms_norm(layer: nn.RMSNorm, x: Tensor, g: Tensor) -> Gradients:
    shape = tuple(layer.normalized_shape)
    return {"weight": _elementwise(F.rms_norm(x, list(shape), eps=layer.eps), g, shape)["weight"]}


def _elementwise(normal: Tensor, g: Tensor, shape: tuple[int, ...]) -> Gradients:
    axes = len(shape)
    positions = (g.shape[0], math.prod(g.shape[1 : g.dim() - axes]), *shape)
    weight, bias = ((m.reshape(positions).sum(1)) for m in (normal * g, g))
    return {"weight": Dense(weight, axes), "bias": Dense(bias, axes)}


def _positions(x: Tensor) -> Tensor:
    """`[b, *, n]` → `[b, t, n]`."""
    if x.dim() < 2:
        raise GredpError(f"a linear layer got a record without a batch dimension: {tuple(x.shape)}")
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


#: rules that take bfloat16 as it is; those of convolutions where products of it are rounded to it anyway
TAKE_HALF = frozenset({group_norm})
TAKE_HALF_FOR_PRODUCTS = frozenset({convolution_with_bias})


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of this type, or of the type it inherits its forward from unchanged."""
    if is_parametrized(layer):  # its weights are computed from others
        return None
    if isinstance(layer, nn.EmbeddingBag) and layer.mode == "max":
        return None
    for kind in type(layer).__mro__:
        if issubclass(kind, nn.Module) and kind in RULES and type(layer).forward is kind.forward:
            return RULES[kind]
    return None


def grid_axes(layer: nn.Module, parameter: str) -> int:
    """How many trailing axes of this parameter are its Fourier grid."""
    value = layer.get_parameter(parameter)
    if value.dim() <= 1 or isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return value.dim()
    return value.dim() - 2 if isinstance(layer, Convolution) else 1


class _Vectorized(TorchFunctionMode):
    """Weight normalization from operations that `torch.func` need not loop over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            weight, scale, dim = args
            return weight * (scale / torch.norm_except_dim(weight, 2, dim))
        return func(*args, **(kwargs or {}))


def generic(layer: nn.Module, names: list[str], g: Tensor, call: Call) -> Gradients:
    """Any module with one tensor out, and a row per record in each that goes in: by `torch.func`.

    `call` holds the arguments of the user's call, so that those that are not tensors come along.
    """
    shapes = {n: layer.get_parameter(n).shape for n in names}
    if g.shape[0] == 0:
        return {n: Dense(g.new_zeros(0, *shape), min(1, len(shape))) for n, shape in shapes.items()}
    leaves, spec, places, axis = call
    inputs = {place: full_precision(leaves[place].detach()) for place in places}
    state = {n: full_precision(t.detach()) for n, t in (*layer.named_parameters(), *layer.named_buffers())}
    values = {n: state[n] for n in names}

    def one_record(record: dict[int, Tensor], out: Tensor) -> dict[str, Tensor]:
        rows = {place: tensor.unsqueeze(axis) for place, tensor in record.items()}
        args, kwargs = tree_unflatten([rows.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

        def forward(parameters: dict[str, Tensor]) -> Tensor:
            with _Vectorized():
                return torch.func.functional_call(layer, {**state, **parameters}, args, kwargs).squeeze(axis)

        return torch.func.vjp(forward, values)[1](out)[0]

    try:
        dense = torch.func.vmap(one_record, (axis, 0))(inputs, g)
    except RuntimeError as error:
        if "randomness" in str(error):
            raise GredpError(
                f"{type(layer).__name__} draws random numbers in its forward (dropout), so the gradients of "
                "its own parameters cannot be recomputed: move these into a module without random numbers"
            ) from None
        raise
    return {n: Dense(v, min(1, v.dim() - 1)) for n, v in dense.items()}


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """Norms and sums as they are allowed for: a user's autocast would round them to half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
