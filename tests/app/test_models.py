"""The networks: parameter counts from their tables, shapes, and that each can be trained privately."""

import pytest
import torch
import torch.nn.functional as F

from gredp import GredpError
from gredp.app.models import MODELS, build
from gredp.app.models.precision import outputs_in
from gredp.app.models.resnet import ResNet18, transfer
from worlds import make_private

#: name → input, parameters counted by hand from the layer tables
COUNTS = {
    "mlp": ((20,), 20 * 32 + 32 + 330),
    "lenet-small": ((1, 8, 8), 80 + 1168 + (64 * 64 + 64) + 650),
    "lenet5": ((1, 28, 28), 61_706),  # the customary count for 16 channels in the second convolution
    "lenet5-tanh": ((1, 28, 28), 61_706),
    "model3": ((3, 32, 32), 896 + 9248 + 18496 + 36928 + 73856 + 147584 + 2048 * 120 + 120 + 1210),
    "resnet20": (
        (3, 32, 32),
        432 + 6 * 2304 + 4608 + 5 * 9216 + 18432 + 5 * 36864 + 2 * (7 * 16 + 6 * 32 + 6 * 64) + 650,
    ),
    "alexnet": (
        (3, 32, 32),
        1792 + 110784 + 663936 + 884992 + 590080 + 256 * 120 + 120 + 120 * 84 + 84 + 850,
    ),
    # as Tramèr and Boneh count it; 26,010 for gray images, below
    "cnn-tanh": ((3, 32, 32), 550_570),
    "wrn16-4": (
        (3, 32, 32),
        (27 + 1) * 16  # stem
        + 2 * 16
        + (9 * 16 + 1) * 64
        + 2 * 64
        + (9 * 64 + 1) * 64
        + (16 + 1) * 64
        + 2 * 64
        + (9 * 64 + 1) * 64
        + 2 * 64
        + (9 * 64 + 1) * 64
        + 2 * 64
        + (9 * 64 + 1) * 128
        + 2 * 128
        + (9 * 128 + 1) * 128
        + (64 + 1) * 128
        + 2 * 128
        + (9 * 128 + 1) * 128
        + 2 * 128
        + (9 * 128 + 1) * 128
        + 2 * 128
        + (9 * 128 + 1) * 256
        + 2 * 256
        + (9 * 256 + 1) * 256
        + (128 + 1) * 256
        + 2 * 256
        + (9 * 256 + 1) * 256
        + 2 * 256
        + (9 * 256 + 1) * 256
        + 2 * 256
        + 2570,
    ),
    "resnet18-1conv": ((3, 32, 32), 11_181_642),  # the customary 11,689,512 with 10 instead of 1000 classes
    "resnet18-2conv": ((3, 32, 32), 11_181_642),
    "linear": ((81, 7, 7), 39_700),
    "mirror-linear": ((81, 7, 7), 39_700),
    "orders-linear": ((81, 7, 7), 39_700),
    "scatter-cnn": ((81, 7, 7), 81 * 576 + 64 + 64 * 576 + 64 + 5770),
}


def test_every_network_is_counted():
    assert set(COUNTS) == set(MODELS)


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_follow_the_tables(name):
    shape, count = COUNTS[name]
    model = build(name, shape, 10)
    assert sum(p.numel() for p in model.parameters()) == count
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", COUNTS)
def test_every_network_takes_a_private_step(name):
    shape, _ = COUNTS[name]
    x, y = torch.randn(3, *shape), torch.tensor([0, 1, 2])
    model = build(name, shape, 10, block=8)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    model, optimizer, _, _ = make_private(model, (x, y), noise_multiplier=1.0, lr=0.1, method="gredp")
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    for name_, value in frozen.items():
        assert torch.equal(model.get_parameter(name_), value)


def test_transfer_trains_the_last_convolutions_and_the_classifier():
    names = {n for n, p in transfer(ResNet18(), 2).named_parameters() if p.requires_grad}
    assert names == {"layer4.1.conv1.weight", "layer4.1.conv2.weight", "fc.weight", "fc.bias"}
    names = {n for n, p in transfer(ResNet18(), 1).named_parameters() if p.requires_grad}
    assert names == {"layer4.1.conv2.weight", "fc.weight", "fc.bias"}
    with pytest.raises(GredpError, match="not 3"):
        transfer(ResNet18(), 3)


def test_the_network_for_gray_images_is_the_one_of_the_table():
    model = build("cnn-tanh", (1, 28, 28), 10)
    assert sum(p.numel() for p in model.parameters()) == 26_010
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert build("cnn-tanh", (1, 16, 19), 10)(torch.zeros(2, 1, 16, 19)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lenet5", (1, 8, 8)),
        ("cnn-tanh", (1, 15, 28)),
        ("cnn-tanh", (3, 7, 8)),
        ("alexnet", (3, 28, 28)),
        ("lenet-small", (1, 3, 3)),
        ("model3", (3, 7, 8)),
        ("resnet20", (3, 8, 7)),
    ],
)
def test_images_too_small_are_refused(name, shape):
    with pytest.raises(GredpError, match="needs images of at least"):
        build(name, shape, 10)


@pytest.mark.parametrize(
    ("network", "by_pixel"), [("lenet5", ("single", "bf16")), ("resnet20", ("single",)), ("linear", ())]
)
def test_a_forward_pass_takes_its_images_in_the_quicker_order(network, by_pixel):
    torch.manual_seed(0)
    shape = (3, 32, 32)
    model, seen = build(network, shape, 10), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for parameter in model.parameters():  # `linear` starts at 0
            parameter.add_(0.01 * torch.randn_like(parameter))
        x = torch.rand(4, *shape)
        expected = model(x)
        for precision, rounding in ("single", 1e-5), ("bf16", 0.05):
            outputs = outputs_in(precision, model, x)
            assert outputs.dtype == torch.float32
            assert (outputs - expected).norm() <= rounding * expected.norm()
            assert seen[-1].is_contiguous(memory_format=torch.channels_last) == (precision in by_pixel)
    assert (outputs - expected).norm() > 0
