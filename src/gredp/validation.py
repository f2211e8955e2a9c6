"""Which layers can be trained record by record, which cannot, and what to put in their place."""

import copy
import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from gredp.errors import GredpError
from gredp.gradient.rules import convolution_with_bias, rule_for
from gredp.layers import BlockCirculantLinear, PrivateMultiheadAttention, SpectralConv2d
from gredp.layers.recurrent import recurrent_for

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class UnsupportedModuleError(GredpError):
    """A layer that mixes records or whose gradients cannot be had record by record."""


def problem(layer: nn.Module) -> str | None:
    """Why this layer cannot be trained privately, or None."""
    kind = type(layer).__name__
    trainable = any(p.requires_grad for p in layer.parameters(recurse=False))
    if any(p.requires_grad and p.is_complex() for p in layer.parameters(recurse=False)):
        return f"{kind} has complex parameters, which have no rule: keep real and imaginary parts as two"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        if trainable or layer.training or not layer.track_running_stats:
            return (
                f"{kind} mixes the records of a batch: gredp.fix(model) puts GroupNorm in its place, "
                "or freeze it and keep it in eval mode"
            )
    elif isinstance(layer, INSTANCE_NORMS) and layer.track_running_stats:
        return (
            f"{kind} with track_running_stats keeps statistics of the data: gredp.fix(model) turns them off"
        )
    elif isinstance(layer, nn.MultiheadAttention) and any(p.requires_grad for p in layer.parameters()):
        return f"{kind} hides its weights in a fused call: gredp.fix(model) puts a private one in its place"
    elif isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) and not (
        layer.self_attn.batch_first
    ):
        return f"{kind} with batch_first=False puts positions before records: build it with batch_first=True"
    elif recurrent_for(layer) is not None and any(p.requires_grad for p in layer.parameters()):
        return (
            f"{kind} hides its weights in its own loop: gredp.fix(model) puts a layer of gredp in its place"
        )
    elif isinstance(layer, nn.RNNCellBase) and trainable:
        return f"{kind} has no rule: use the layer (nn.LSTM, nn.GRU, nn.RNN) and gredp.fix(model)"
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if layer.max_norm is not None:  # also where they are frozen
            return f"{kind} with max_norm rewrites its weights from the batch: set max_norm=None"
        if trainable and layer.scale_grad_by_freq:
            return f"{kind} with scale_grad_by_freq counts ids over the batch: set it to False"
    elif isinstance(layer, ParametrizationList) and trainable and list(layer.buffers()):
        return f"{kind} keeps numbers of its own (as spectral_norm does): remove the parametrization first"
    elif isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        return f"{kind} has no shapes yet: run one forward before make_private"
    return None


def validate(model: nn.Module) -> list[UnsupportedModuleError]:
    """One error for each layer of `model` that cannot be trained privately, by its name; empty if all can.

    >>> [error] = validate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    >>> str(error)[:43]
    '1: BatchNorm1d mixes the records of a batch'
    """
    found = ((name or "the model", problem(layer)) for name, layer in model.named_modules())
    return [UnsupportedModuleError(f"{name}: {why}") for name, why in found if why is not None]


def groups_of_16(norm: nn.modules.batchnorm._BatchNorm) -> int:
    """16 channels a group, or the largest number of groups that divides the channels."""
    return math.gcd(norm.num_features, max(1, norm.num_features // 16))


def groups_of_opacus(norm: nn.modules.batchnorm._BatchNorm) -> int:
    """32, or a group for each of fewer channels; without places to average over that would leave nothing."""
    if isinstance(norm, nn.BatchNorm1d):
        return groups_of_16(norm)
    return norm.num_features if norm.num_features < 32 else math.gcd(norm.num_features, 32)


def replacement(
    layer: nn.Module,
    groups_of: Callable[[nn.modules.batchnorm._BatchNorm], int] = groups_of_16,
    replace_bn_with_in: bool = False,
) -> nn.Module | None:
    """What `fix` puts in place of this layer, or None where it has nothing to offer."""
    norm: dict[str, Any] = {"eps": getattr(layer, "eps", None), "affine": getattr(layer, "affine", None)}
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        if replace_bn_with_in:
            for old, new in zip((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), INSTANCE_NORMS):
                if isinstance(layer, old):
                    return _with_weights(new(layer.num_features, **norm), layer)
            raise GredpError(f"{type(layer).__name__} has no InstanceNorm: remove replace_bn_with_in")
        groups = groups_of(layer)
        if layer.num_features % groups:
            raise GredpError(f"{groups} groups do not divide the {layer.num_features} channels of a layer")
        return _with_weights(nn.GroupNorm(groups, layer.num_features, **norm), layer)
    if isinstance(layer, INSTANCE_NORMS):
        return _with_weights(type(layer)(layer.num_features, **norm), layer)
    recurrent = recurrent_for(layer)
    if recurrent is not None:
        return recurrent.from_stock(layer)
    if isinstance(layer, nn.MultiheadAttention):
        return PrivateMultiheadAttention.from_stock(layer)
    return None


def _with_weights(new: nn.Module, old: nn.Module) -> nn.Module:
    """`new` with the parameters of `old`, frozen where those are."""
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    return new


def _replace(model: nn.Module, choose: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """A copy of the model with the chosen layers exchanged; devices, modes and sharing kept."""
    model = copy.deepcopy(model)
    chosen = {layer: choose(name, layer) for name, layer in model.named_modules()}
    for old, new in chosen.items():
        if new is not None:
            reference = next((t for t in (*old.parameters(), *old.buffers()) if t.is_floating_point()), None)
            new.train(old.training)
            if reference is not None:
                new.to(reference.device, reference.dtype)
    root = chosen[model]
    if root is not None:
        return root
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = chosen.get(child)
            if new is not None:
                setattr(parent, name, new)
    return model


def fix(model: nn.Module, *, num_groups: int | None = None, replace_bn_with_in: bool = False) -> nn.Module:
    """A copy in which every layer that `validate` rejects and that has a replacement is replaced.

    | argument | default | meaning |
    |---|---|---|
    | `model` | | any module; it is not changed |
    | `num_groups` | `None` | of each GroupNorm that replaces a BatchNorm; default: about 16 channels each |
    | `replace_bn_with_in` | `False` | replace BatchNorm by InstanceNorm instead |

    >>> fixed = fix(nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)))
    >>> type(fixed[1]).__name__, fixed[1].num_groups
    ('GroupNorm', 2)
    """
    if num_groups is not None and (replace_bn_with_in or num_groups < 1):
        raise GredpError(f"num_groups is a positive number, for GroupNorm alone; not {num_groups} here")
    return _fixed(model, (lambda _: num_groups) if num_groups else groups_of_16, replace_bn_with_in)


def _fixed(
    model: nn.Module, groups_of: Callable[[nn.modules.batchnorm._BatchNorm], int], replace_bn_with_in: bool
) -> nn.Module:
    def choose(_: str, layer: nn.Module) -> nn.Module | None:
        return replacement(layer, groups_of, replace_bn_with_in) if problem(layer) else None

    model = _replace(model, choose)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoder):  # its shortcut reaches into the stock attention
            layer.enable_nested_tensor = layer.use_nested_tensor = False
    return model


def to_spectral(model: nn.Module, block: int = 8) -> nn.Module:
    """A copy with block-circulant fully connected layers and spectral convolutions.

    Linear layers keep the direction of their weights that a circulant can express, and their norm. The last
    one, whose sizes are rarely multiples of `block` (default 8), takes the largest block that divides both.

    >>> [type(layer).__name__ for layer in to_spectral(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 10)))]
    ['SpectralConv2d', 'BlockCirculantLinear']
    """
    stock = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    last = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m not in stock][-1:]
    hidden = {n for n, m in model.named_modules() if m in stock}  # its module reads the weight itself

    def choose(name: str, layer: nn.Module) -> nn.Module | None:
        if name in hidden:
            return None
        if isinstance(layer, nn.Conv2d) and not isinstance(layer, SpectralConv2d):
            return SpectralConv2d.from_conv(layer) if rule_for(layer) is convolution_with_bias else None
        if isinstance(layer, nn.Linear) and rule_for(layer):
            size = block
            if name in last:
                common = math.gcd(layer.in_features, layer.out_features)
                size = max(d for d in range(1, block + 1) if common % d == 0)
            return BlockCirculantLinear.from_linear(layer, size)
        return None

    return _replace(model, choose)


class ModuleValidator:
    """The names an Opacus user knows, over `validate` and `fix`.

    `fix` has the options of `gredp.fix`, and Opacus' groups for BatchNorm2d and BatchNorm3d: 32 by default,
    or one for each of fewer channels. After a linear layer these would leave nothing but the bias, so
    BatchNorm1d has those of `gredp.fix`.

    >>> ModuleValidator.is_valid(nn.BatchNorm1d(4))
    False
    >>> ModuleValidator.is_valid(ModuleValidator.fix(nn.BatchNorm1d(4)))
    True
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        errors = validate(module)
        if not module.training:
            errors.append(UnsupportedModuleError("the model is in eval mode: call model.train() first"))
        if strict and errors:
            raise errors[0] if len(errors) == 1 else UnsupportedModuleError("; ".join(map(str, errors)))
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **options: Any) -> nn.Module:
        given = {name: value for name, value in options.items() if value is not None and value is not False}
        return fix(module, **given) if given else _fixed(module, groups_of_opacus, False)

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        fixed = cls.fix(module, **options)
        cls.validate(fixed, strict=True)
        return fixed
