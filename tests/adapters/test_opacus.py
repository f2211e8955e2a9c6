"""Opacus' own machinery over our layers: its per-sample gradients are ours, and both are the oracle's."""

import inspect
import math
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import opacus
import opacus.utils.batch_memory_manager
import pytest
import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn

import oracles
from gredp import BlockCirculantLinear, PrivateMultiheadAttention, SpectralConv2d, opacus_modules
from gredp.adapters import register_with_opacus
from gredp.adapters.opacus import gradients
from gredp.gradient.capture import Capture


class Attends(nn.Module):
    """Attention as a layer with one tensor in and one out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PrivateMultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


LAYERS = {
    "circulant": (lambda: BlockCirculantLinear(11, 7, block=4), (11,)),
    "circulant over positions": (lambda: BlockCirculantLinear(8, 6, block=3, bias=False), (5, 8)),
    "convolution": (lambda: SpectralConv2d(2, 3, 3, padding=1), (2, 6, 5)),
    "strided convolution": (lambda: SpectralConv2d(4, 4, 3, stride=2, dilation=2, groups=2), (4, 9, 8)),
    "attention": (Attends, (5, 8)),
}


def tail(name: str) -> str:
    return name.removeprefix("_module.")


@pytest.fixture(autouse=True)
def registered():
    register_with_opacus()


@pytest.mark.parametrize("kind", LAYERS)
def test_opacus_gradients_equal_ours_and_the_oracles(kind):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    model = make().double()
    x = torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
    truth = oracles.per_sample_gradients(model, x.detach())

    capture = Capture(model, loss_reduction="sum")
    oracles.wavy(model(x)).sum().backward()
    ours = capture.take()
    capture.detach()

    theirs = GradSampleModule(model, loss_reduction="sum")
    oracles.wavy(theirs(x)).sum().backward()
    assert {tail(n) for n, _ in theirs.named_parameters()} == set(truth)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter.grad_sample, truth[tail(name)], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            ours.gradients[tail(name)].dense(), parameter.grad_sample, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("kind", ["circulant", "circulant over positions", "convolution"])
def test_ghost_norms_equal_the_oracles(kind):
    torch.manual_seed(1)
    make, shape = LAYERS[kind]
    model = make().double()
    x = torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
    truth = oracles.per_sample_gradients(model, x.detach())
    ghost = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=1.0)
    oracles.wavy(ghost(x)).sum().backward()
    expected = torch.stack([g.flatten(1).square().sum(1) for g in truth.values()]).sum(0).sqrt()
    torch.testing.assert_close(ghost.get_norm_sample(), expected, rtol=1e-9, atol=0)


def test_our_rules_are_the_ones_that_run():
    """Without the rule Opacus would fall back to functorch; frozen parameters are left out."""
    assert GradSampleHooks.GRAD_SAMPLERS[BlockCirculantLinear] is gradients
    assert GradSampleHooks.GRAD_SAMPLERS[SpectralConv2d] is gradients
    layer = BlockCirculantLinear(8, 8, block=4)
    layer.bias.requires_grad_(False)
    found = gradients(layer, [torch.ones(2, 8)], torch.ones(2, 8))
    assert list(found) == [layer.weight]
    assert found[layer.weight].abs().sum() == pytest.approx(2 * math.prod(layer.weight.shape) * 4)


def public_names():
    """Module path and name of all that Opacus offers: `__all__`, or else what a module defines."""
    listed = "opacus.accountants.utils", "opacus.validators.errors"
    for info in pkgutil.walk_packages(opacus.__path__, "opacus."):
        above = info.name.rpartition(".")[0]
        inner = above != "opacus" and hasattr(import_module(above), "__all__")
        slow = info.name.startswith(("opacus.tests", "opacus.lightning"))
        if slow or (inner and info.name not in listed):
            continue
        module = import_module(info.name)
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == info.name]
        for name in getattr(module, "__all__", own):
            if not name.startswith("_"):
                yield info.name.partition(".")[2], name


def test_every_name_of_opacus_is_there_or_says_why():
    unknown = []
    for path, name in public_names():
        try:
            opacus_modules.find(path, name)
        except AttributeError:
            if not hasattr(import_module(f"gredp.{path}"), name):
                unknown.append((path, name))
    assert not unknown


def test_every_argument_and_method_of_opacus_is_in_the_migration_page():
    codes = re.findall(r"`([^`\n]+)`", PAGE.read_text(encoding="utf-8"))
    quoted = set(re.findall(r"\w+", " ".join(codes)))
    missing = set()
    for thing in CALLED:
        methods = [thing]
        if inspect.isclass(thing):
            bases = [base for base in thing.__mro__ if base.__module__ != thing.__module__]
            stock = {name for base in bases for name in vars(base)}
            own = {n: v for n, v in vars(thing).items() if not n.startswith("_") and n not in stock}
            missing |= set(own) - quoted
            methods += [v for v in own.values() if callable(v) or isinstance(v, classmethod | staticmethod)]
        for method in methods:
            names = set(inspect.signature(getattr(method, "__func__", method)).parameters)
            missing |= names - quoted - {"self", "cls", "args", "kwargs"} - UNNAMED
    assert not missing


#: arguments that users do not give by name
UNNAMED = {"fn", "do_skip", "closure", "destination", "state_dict", "m"}
PAGE = Path(__file__).parents[2] / "docs" / "opacus.md"
CALLED = [
    opacus.PrivacyEngine,
    opacus.optimizers.DPOptimizer,
    opacus.optimizers.AdaClipDPOptimizer,
    opacus.accountants.RDPAccountant,
    opacus.accountants.PRVAccountant,
    opacus.accountants.utils.get_noise_multiplier,
    opacus.data_loader.DPDataLoader,
    opacus.utils.batch_memory_manager.BatchMemoryManager,
    opacus.validators.ModuleValidator,
    *(getattr(opacus.layers, name).__init__ for name in ("DPLSTM", "DPGRU", "DPRNN", "DPMultiheadAttention")),
    *(getattr(opacus.schedulers, name) for name in opacus.schedulers.__all__ if not name.startswith("_")),
]
