"""Transfer: the frozen part computed once, and the rest trained on it, are the whole network."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from gredp import GredpError
from gredp.app.cli import main
from gredp.app.data import Splits
from gredp.app.features.backbone import Backbone
from gredp.app.models import build
from gredp.app.models.resnet import ResNet18, Tail
from gredp.app.settings import TrainSettings, saved_settings
from gredp.app.train import train


@pytest.fixture(scope="module")
def weights():
    """As in common files: half precision, no classifier, statistics unlike those of a fresh network."""
    torch.manual_seed(0)
    state = {n: t for n, t in ResNet18().state_dict().items() if not n.startswith("fc.")}
    for name, tensor in state.items():
        if name.endswith("running_mean"):
            tensor.normal_(0, 0.1)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
        elif ".bn" in name or name.startswith("bn"):
            tensor.copy_(tensor + 0.1 * torch.randn(tensor.shape) if tensor.dim() else tensor)
    return {n: t.half() if t.is_floating_point() else t for n, t in state.items()}


@pytest.fixture(scope="module")
def file(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "backbone.safetensors"
    save_file(weights, path)
    return str(path)


def oracle(weights, x, fc, size=96):
    """A ResNet-18 from its definition and a dictionary of weights."""

    def norm(name, x):
        w = {
            k: weights[f"{name}.{k}"][:, None, None]
            for k in ("weight", "bias", "running_mean", "running_var")
        }
        return (x - w["running_mean"]) / torch.sqrt(w["running_var"] + 1e-5) * w["weight"] + w["bias"]

    def block(name, x, stride):
        out = torch.relu(norm(f"{name}.bn1", F.conv2d(x, weights[f"{name}.conv1.weight"], None, stride, 1)))
        out = norm(f"{name}.bn2", F.conv2d(out, weights[f"{name}.conv2.weight"], None, 1, 1))
        if f"{name}.downsample.0.weight" in weights:
            down = F.conv2d(x, weights[f"{name}.downsample.0.weight"], None, stride)
            x = norm(f"{name}.downsample.1", down)
        return torch.relu(out + x)

    x = F.interpolate(x, size=(size, size), mode="bilinear")
    x = torch.relu(norm("bn1", F.conv2d(x, weights["conv1.weight"], None, 2, 3)))
    x = F.max_pool2d(x, 3, 2, 1)
    for stage in range(1, 5):
        x = block(f"layer{stage}.0", x, 1 if stage == 1 else 2)
        x = block(f"layer{stage}.1", x, 1)
    return x.mean((2, 3)) @ fc.weight.double().T + fc.bias.double()


@pytest.mark.parametrize("name", ["resnet18-1conv", "resnet18-2conv"])
def test_front_and_tail_are_the_whole_network(file, weights, name):
    """Outputs and gradients, against a float64 network that is written down from the weights' file alone."""
    x, y = torch.rand(4, 3, 32, 32), torch.tensor([0, 3, 3, 9])
    front = Backbone(file)
    features = front(x)
    assert features.shape == (4, 512, 3, 3)
    tail = build(name, tuple(features.shape[1:]), 10)
    assert isinstance(tail, Tail)
    front.load_into(tail)
    F.cross_entropy(tail(features), y).backward()

    exact = {n: t.double() for n, t in weights.items()}
    trained = {n for n, p in tail.named_parameters() if p.requires_grad and not n.startswith("fc.")}
    assert trained == {"layer4.1.conv2.weight", *(["layer4.1.conv1.weight"] if "2conv" in name else [])}
    for parameter in trained:
        exact[parameter].requires_grad_()
    out = oracle(exact, x.double(), tail.fc)
    F.cross_entropy(out, y).backward()
    torch.testing.assert_close(tail(features).double(), out, rtol=1e-4, atol=1e-5)
    for parameter in trained:
        want = exact[parameter].grad
        torch.testing.assert_close(
            tail.get_parameter(parameter).grad.double(), want, rtol=1e-3, atol=1e-4 * want.abs().max().item()
        )


def test_stages_of_an_image_and_its_mirror_image(file):
    x, seen = torch.rand(2, 3, 8, 8), []
    stages, plain = Backbone(file, 64, stages=True), Backbone(file, 64)
    assert stages.identity() != plain.identity()
    for layer in (plain.network.layer3, plain.network.layer4[0], plain.network.layer4[1]):
        layer.register_forward_hook(
            lambda layer, given, out: seen.append(F.interpolate(out, (2, 2), mode="area"))
        )
    for view in (x, x.flip(3)):
        plain.network(view)
    want = torch.cat([(seen[i] + seen[i + 3].flip(3)) / 2 for i in range(3)], 1)
    torch.testing.assert_close(stages.network.features(x), want)
    assert (stages(x) - want).norm() < 0.03 * want.norm()  # bfloat16 on some processors
    torch.testing.assert_close(stages(x.flip(3)), stages(x).flip(3))


def test_features_of_a_record_do_not_depend_on_the_others(file):
    x, front = torch.rand(3, 3, 16, 16), Backbone(file)
    alone = torch.cat([front(record[None]) for record in x])
    torch.testing.assert_close(front(x), alone, rtol=1e-4, atol=1e-5)


def test_a_classifier_in_the_file_is_passed_over(weights, tmp_path):
    save_file(weights | {"fc.weight": torch.zeros(1000, 512)}, tmp_path / "w.safetensors")
    tail = build("resnet18-1conv", (512, 3, 3), 10)
    drawn = tail.fc.weight.detach().clone()
    Backbone(str(tmp_path / "w.safetensors")).load_into(tail)
    assert torch.equal(tail.fc.weight, drawn)
    assert torch.equal(tail.get_parameter("layer4.1.conv1.weight"), weights["layer4.1.conv1.weight"].float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("layer3.0.conv1.weight"), "lacks layer3.0.conv1.weight"),
        (lambda w: w.update({"layer1.2.conv1.weight": torch.zeros(1)}), "holds layer1.2.conv1.weight"),
        (
            lambda w: w.update({"conv1.weight": torch.zeros(64, 1, 7, 7)}),
            r"\(64, 1, 7, 7\), not \(64, 3, 7, 7\)",
        ),
        (
            lambda w: w.update({"bn1.bias": torch.full((64,), torch.nan)}),
            "bn1.bias holds values that are not",
        ),
    ],
)
def test_weights_of_another_network_are_refused(weights, tmp_path, change, words):
    other = dict(weights)
    change(other)
    save_file(other, tmp_path / "w.safetensors")
    with pytest.raises(GredpError, match=words) as error:
        Backbone(str(tmp_path / "w.safetensors"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "resnet18-1conv"], "needs --pretrained"),
        (["--model", "lenet5", "--pretrained", "w.safetensors"], "is for resnet18-1conv"),
        (["--model", "resnet18-1conv", "--pretrained", "nowhere.safetensors"], "is not there"),
        (["--model", "resnet18-2conv", "--pretrained", __file__], "is not a safetensors file"),
    ],
)
def test_mistakes_are_one_line(capsys, options, words):
    with pytest.raises(SystemExit) as stop:
        main(["train", *options])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in error
    assert error.count("\n") == 1


def test_images_without_color_are_refused(file, tmp_path):
    with pytest.raises(GredpError, match="3 channels, not 1"):
        train(TrainSettings(model="resnet18-1conv", pretrained=file, data_dir=str(tmp_path)))


@pytest.fixture
def few(monkeypatch):
    """A handful of coloured records under the name of a data set that needs no file."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(24, 3, 8, 8, generator=generator), torch.arange(24) % 10
    data = Splits("few", 10, x[:20], y[:20], x[20:], y[20:])
    monkeypatch.setattr("gredp.app.dataset.load", lambda *names: data)
    return data


def test_a_run_names_its_weights_and_goes_on_with_the_same_only(file, weights, few, tmp_path, monkeypatch):
    settings = TrainSettings(
        model="resnet18-1conv",
        pretrained=file,
        data_dir=str(tmp_path),
        epochs=1,
        batch_size=10,
        accountant="rdp",
    )
    whole = train(TrainSettings(**vars(settings) | {"out": str(tmp_path / "run")}))
    front = whole.record["data"]["front"]
    assert front == Backbone(file).identity()
    assert len(front["sha256"]) == 64
    assert whole.record["data"]["input_shape"] == [512, 3, 3]
    names = {p.name for p in (tmp_path / "run").rglob("*")}
    assert not any(name.endswith(".npy") for name in names), "features stay out of the run"

    (tmp_path / "run" / "record.json").unlink()  # as if it had been cut off before its record
    save_file(weights | {"bn1.bias": torch.ones(64)}, tmp_path / "other.safetensors")
    saved = vars(saved_settings(str(tmp_path / "run")))
    with pytest.raises(GredpError, match="the data have changed: front"):
        train(TrainSettings(**saved | {"pretrained": str(tmp_path / "other.safetensors")}))
    again = train(TrainSettings(**saved))
    assert again.record["data"] == whole.record["data"]


@pytest.mark.filterwarnings("ignore:15 training records are too few")
def test_held_out_records_take_the_place_of_the_test_set(few, tmp_path):
    x_test = few.x_test.clone()
    few.x_test.fill_(torch.nan)  # to look at it would show
    out = tmp_path / "run"
    settings = TrainSettings(
        model="lenet-small", epochs=1, batch_size=10, validation=5, out=str(out), accountant="rdp"
    )
    record = train(settings).record
    few.x_test.copy_(x_test)
    assert (record["data"]["records"], record["data"]["test_records"]) == (15, 5)
    assert "test_accuracy" not in json.dumps(record)
    assert 5 * record["validation_accuracy"] in range(6)
    assert record["judged_on"].startswith("the last 5 training records")
    with pytest.raises(GredpError, match="cannot hold out 20 of 20"):
        train(TrainSettings(model="lenet-small", validation=20))
