"""SpectralConv2d: the forward of nn.Conv2d, and the weight gradient as a spectrum on either grid."""

import math

import pytest
import torch
from torch import nn

from gredp import SpectralConv2d
from oracles import crop, dft, inverse_dft, padded_correlation

OPTIONS = {  # arguments of nn.Conv2d up to groups, and the size of the input
    "plain": ((2, 3, 3), (5, 6)),
    "stride": ((2, 3, (3, 2), (2, 1)), (5, 4)),
    "padding": ((2, 2, 3, 1, (1, 2)), (3, 4)),
    "dilation": ((1, 2, 2, 1, 0, (2, 3)), (4, 5)),
    "groups": ((4, 2, 2, 1, 0, 1, 2), (3, 4)),
    "depthwise": ((2, 4, 3, 1, 1, 1, 2), (3, 3)),
    "all": ((2, 4, 2, 2, 1, 2, 2), (5, 4)),
    "no bias": ((1, 1, 1, 1, 0, 1, 1, False), (2, 1)),
    "kernel as large as the padded input": ((1, 2, 3), (3, 3)),
}
every_option = pytest.mark.parametrize(("options", "size"), OPTIONS.values(), ids=OPTIONS.keys())


def layer_and_data(options, size, batch=2):
    torch.manual_seed(1)
    layer = SpectralConv2d(*options).double()
    x = torch.randn(batch, options[0], *size).double()
    return layer, x, torch.randn_like(layer(x).detach())


@every_option
def test_forward_and_backward_equal_those_of_conv2d(options, size):
    layer, x, g = layer_and_data(options, size)
    stock = nn.Conv2d(*options).double()
    stock.load_state_dict(layer.state_dict())
    for conv in (layer, stock):
        (conv(x) * g).sum().backward()
    assert torch.equal(layer(x), stock(x))
    assert torch.equal(layer.weight.grad, stock.weight.grad)
    assert torch.equal(layer.to_dense(), stock.weight)


@every_option
def test_kernel_spectrum_is_the_transform_of_each_records_gradient(options, size):
    layer, x, g = layer_and_data(options, size)
    spectrum = layer.per_sample_spectrum(x, g)
    for i in range(len(x)):
        truth = torch.autograd.grad((layer(x[i : i + 1]) * g[i : i + 1]).sum(), layer.weight)[0]
        torch.testing.assert_close(spectrum[i], dft(truth, 2), rtol=1e-10, atol=1e-10)


@every_option
def test_padded_spectrum_is_that_of_the_full_correlation(options, size):
    layer, x, g = layer_and_data(options, size)
    spectrum = layer.per_sample_spectrum(x, g, grid="padded")
    for i in range(len(x)):
        correlation = padded_correlation(layer, x[i], g[i])
        torch.testing.assert_close(spectrum[i], dft(correlation, 2), rtol=1e-10, atol=1e-10)
        # Parseval: a unitary transform keeps the norm that is clipped
        assert math.isclose(spectrum[i].abs().square().sum(), correlation.square().sum(), rel_tol=1e-10)


@every_option
def test_inverse_and_crop_of_the_padded_spectrum_give_the_kernel_gradient(options, size):
    layer, x, g = layer_and_data(options, size)
    values = inverse_dft(layer.per_sample_spectrum(x, g, grid="padded"), 2)
    assert values.imag.abs().max() < 1e-12
    for i in range(len(x)):
        truth = torch.autograd.grad((layer(x[i : i + 1]) * g[i : i + 1]).sum(), layer.weight)[0]
        torch.testing.assert_close(crop(layer, values[i].real), truth, rtol=1e-10, atol=1e-10)


@every_option
def test_the_oracle_agrees_with_autograd(options, size):
    # the truth of the tests above is itself held against autograd
    layer, x, g = layer_and_data(options, size, batch=1)
    truth = torch.autograd.grad((layer(x) * g).sum(), layer.weight)[0]
    torch.testing.assert_close(crop(layer, padded_correlation(layer, x[0], g[0])), truth)


def test_the_crop_never_exceeds_the_padded_norm():
    # why clipping the padded spectrum is valid: cropping only shrinks
    layer, x, g = layer_and_data(*OPTIONS["all"], batch=4)
    padded = layer.per_sample_spectrum(x, g, grid="padded").flatten(1).norm(dim=1)
    kernel = layer.per_sample_spectrum(x, g).flatten(1).norm(dim=1)
    assert (kernel <= padded * (1 + 1e-12)).all()
    assert (kernel < 0.99 * padded).any()


@pytest.mark.parametrize("grid", ["kernel", "padded"])
def test_spectrum_of_an_empty_batch_is_empty(grid):
    layer, x, g = layer_and_data(*OPTIONS["plain"])
    shape = (3, 3) if grid == "kernel" else (5, 6)
    assert layer.per_sample_spectrum(x[:0], g[:0], grid=grid).shape == (0, 3, 2, *shape)


@every_option
def test_from_conv_shares_parameters(options, size):
    stock = nn.Conv2d(*options)
    layer = SpectralConv2d.from_conv(stock)
    x = torch.randn(2, options[0], *size)
    assert isinstance(layer, SpectralConv2d)
    assert layer.weight is stock.weight
    assert layer.bias is stock.bias
    assert torch.equal(layer(x), stock(x))
    with torch.no_grad():
        stock.weight.mul_(2)
    assert torch.equal(layer(x), stock(x))


def test_from_conv_keeps_hooks_and_modes_apart():
    stock = nn.Conv2d(1, 1, 2)
    layer = SpectralConv2d.from_conv(stock)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    layer.eval()
    stock(torch.zeros(1, 1, 3, 3))
    assert not calls
    assert stock.training
    layer.weight = nn.Parameter(torch.zeros(1, 1, 2, 2))
    assert layer.weight is not stock.weight
