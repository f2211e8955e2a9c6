"""Our layers for Opacus' `GradSampleModule`: our rules under the names that Opacus asks for."""

from opacus.grad_sample import register_grad_sampler, register_norm_sampler
from torch import Tensor, nn

from gredp.gradient.norms import full_precision
from gredp.gradient.rules import rule_for
from gredp.layers import BlockCirculantLinear, SpectralConv2d

Samples = dict[nn.Parameter, Tensor]


def register_with_opacus() -> None:
    """From now on Opacus takes per-sample gradients and norms of our layers by our rules.

    `PrivateMultiheadAttention` is made of `nn.Linear` and needs no rule. What Opacus then clips, noises and
    accounts for is Opacus' own doing: no certificate of ours covers it.
    """
    layers = [BlockCirculantLinear, SpectralConv2d]
    register_grad_sampler(layers)(gradients)
    register_norm_sampler(layers)(norms)


def gradients(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> Samples:
    """Each trainable parameter → `[b, *shape]`, for the "hooks" mode."""
    return _by_rule(layer, activations, backprops, norm=False)


def norms(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> Samples:
    """Each trainable parameter → `[b]`, for the "ghost" mode: no gradient is materialized for it."""
    return _by_rule(layer, activations, backprops, norm=True)


def _by_rule(layer: nn.Module, activations: list[Tensor], backprops: Tensor, norm: bool) -> Samples:
    rule = rule_for(layer)
    assert rule is not None
    found = rule(layer, full_precision(activations[0]), full_precision(backprops))
    return {
        p: (found[n].squared_norm().sqrt() if norm else found[n].dense()).to(backprops.dtype)
        for n, p in layer.named_parameters(recurse=False)
        if p.requires_grad
    }
