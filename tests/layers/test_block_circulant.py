"""BlockCirculantLinear against the dense matrix that it stands for."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gredp import BlockCirculantLinear
from gredp.errors import GredpError
from gredp.gradient.rules import circulant
from oracles import dft

SIZES = [(8, 8, 4), (6, 4, 2), (5, 7, 3), (7, 3, 5), (3, 4, 1), (2, 3, 8), (1, 1, 1), (9, 16, 8)]
sizes = pytest.mark.parametrize(("inputs", "outputs", "block"), SIZES)


def layer_of(inputs: int, outputs: int, block: int, bias: bool = True) -> BlockCirculantLinear:
    torch.manual_seed(1)
    return BlockCirculantLinear(inputs, outputs, block, bias, dtype=torch.float64)


@sizes
@pytest.mark.parametrize("lead", [(3,), (2, 4), (2, 3, 1), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_forward_equals_the_dense_product(inputs, outputs, block, lead, bias):
    layer = layer_of(inputs, outputs, block, bias)
    x = torch.randn(*lead, inputs).double()
    torch.testing.assert_close(layer(x), F.linear(x, layer.to_dense(), layer.bias), rtol=1e-12, atol=1e-12)


@sizes
def test_backward_equals_the_dense_backward(inputs, outputs, block):
    layer, g = layer_of(inputs, outputs, block), torch.randn(4, outputs).double()
    x = torch.randn(4, inputs).double().requires_grad_()
    spectral = torch.autograd.grad((layer(x) * g).sum(), [x, layer.weight, layer.bias])
    dense = torch.autograd.grad(
        (F.linear(x, layer.to_dense(), layer.bias) * g).sum(), [x, layer.weight, layer.bias]
    )
    for found, truth in zip(spectral, dense):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


@sizes
def test_an_empty_batch_passes(inputs, outputs, block):
    assert layer_of(inputs, outputs, block)(torch.zeros(0, inputs).double()).shape == (0, outputs)


@sizes
def test_shapes_of_weight_and_dense_matrix(inputs, outputs, block):
    layer = layer_of(inputs, outputs, block)
    assert layer.weight.shape == (math.ceil(outputs / block), math.ceil(inputs / block), block)
    assert layer.to_dense().shape == (outputs, inputs)


@sizes
def test_dense_blocks_are_circulant_with_the_weight_as_first_column(inputs, outputs, block):
    layer = layer_of(inputs, outputs, block)
    dense = layer.to_dense()
    for row in range(outputs):
        for column in range(inputs):
            o, j = row // block, column // block
            assert dense[row, column] == layer.weight[o, j, (row - column) % block]


def test_block_of_one_is_an_ordinary_linear_layer():
    layer = layer_of(5, 3, 1)
    assert torch.equal(layer.to_dense(), layer.weight[:, :, 0])


@sizes
def test_spectrum_of_the_weight_gradient_is_root_d_times_the_product(inputs, outputs, block):
    # THEORY, section 4: G_oj[k] = √d·ô_o[k]·conj(x̂_j[k]); the √d is the price of a unitary transform
    layer = layer_of(inputs, outputs, block)
    x, g = torch.randn(1, inputs).double(), torch.randn(1, outputs).double()
    truth = torch.autograd.grad((F.linear(x, layer.to_dense()) * g).sum(), layer.weight)[0]
    p, q, d = layer.weight.shape
    left = dft(F.pad(g[0], (0, p * d - outputs)).view(p, d), 1)
    right = dft(F.pad(x[0], (0, q * d - inputs)).view(q, d), 1)
    formula = math.sqrt(d) * left[:, None] * right[None].conj()
    torch.testing.assert_close(dft(truth, 1), formula, rtol=1e-10, atol=1e-10)
    norm = d * (left.abs().square().sum(0) * right.abs().square().sum(0)).sum()
    rule = circulant(layer, x, g)["weight"]
    torch.testing.assert_close(rule.dense()[0], truth, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rule.squared_norm()[0], norm, rtol=1e-10, atol=1e-10)


@sizes
def test_from_linear_keeps_a_circulant_weight(inputs, outputs, block):
    layer = layer_of(inputs, outputs, block)
    linear = nn.Linear(inputs, outputs).double()
    with torch.no_grad():
        linear.weight.copy_(layer.to_dense())
        linear.bias.copy_(layer.bias)
    back = BlockCirculantLinear.from_linear(linear, block)
    torch.testing.assert_close(back.to_dense(), layer.to_dense(), rtol=1e-14, atol=0)
    assert torch.equal(back.bias, layer.bias)


@sizes
def test_from_linear_keeps_the_norm_and_takes_the_nearest_direction(inputs, outputs, block):
    torch.manual_seed(2)
    linear = nn.Linear(inputs, outputs).double()
    layer = BlockCirculantLinear.from_linear(linear, block)
    dense = layer.to_dense().detach()
    torch.testing.assert_close(dense.norm(), linear.weight.norm().detach())
    # Least squares: what is left over is orthogonal to every circulant matrix, the nearest one included.
    scale = (linear.weight * dense).sum() / dense.square().sum()
    left_over = linear.weight.detach() - scale.detach() * dense
    for o, j, k in [(0, 0, 0), (-1, -1, 0), (-1, 0, block - 1), (0, -1, block // 2)]:
        probe = layer_of(inputs, outputs, block)
        with torch.no_grad():
            probe.weight.zero_()
            probe.weight[o, j, k] = 1
        assert abs((left_over * probe.to_dense()).sum()) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_from_linear_keeps_type_and_bias(bias, dtype):
    layer = BlockCirculantLinear.from_linear(nn.Linear(5, 4, bias=bias, dtype=dtype), 2)
    assert (layer.bias is not None) is bias
    assert {p.dtype for p in layer.parameters()} == {dtype}


def test_from_linear_of_zeros_is_zero():
    linear = nn.Linear(4, 4)
    nn.init.zeros_(linear.weight)
    assert BlockCirculantLinear.from_linear(linear, 2).weight.eq(0).all()


def test_fresh_layers_have_the_scale_of_nn_linear():
    torch.manual_seed(3)
    spread = BlockCirculantLinear(256, 256, 8).to_dense().std().item()
    assert abs(spread / nn.Linear(256, 256).weight.std().item() - 1) < 0.05


@pytest.mark.parametrize("wrong", [(0, 3, 2), (3, 0, 2), (3, 3, 0), (3, 3, -1)])
def test_sizes_that_make_no_layer_are_refused_with_their_numbers(wrong):
    with pytest.raises(
        GredpError, match=rf"in_features={wrong[0]}, out_features={wrong[1]}, block={wrong[2]}$"
    ):
        BlockCirculantLinear(*wrong)


def test_repr_names_the_block():
    assert repr(BlockCirculantLinear(6, 4, 2)) == (
        "BlockCirculantLinear(in_features=6, out_features=4, block=2, bias=True)"
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_forward_of_any_size_equals_the_dense_product(inputs, outputs, block, batch):
    layer = layer_of(inputs, outputs, block)
    x = torch.linspace(-1, 2, batch * inputs, dtype=torch.float64).view(batch, inputs).sin()
    torch.testing.assert_close(layer(x), F.linear(x, layer.to_dense(), layer.bias), rtol=1e-12, atol=1e-12)
