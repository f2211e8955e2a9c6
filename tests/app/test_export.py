"""Exported files say what the model says, under other programs; the card says what the record says."""

import hashlib
import io
import json
import zipfile
from datetime import date

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from safetensors.torch import save_file

import gredp
from gredp.app import cli
from gredp.app.blueprint import Blueprint
from gredp.app.data.tables import encode_inputs, encoding, parse_schema
from gredp.app.export import ExportSettings, run_export
from gredp.app.exported import Whole, stock, to_onnx, to_pt2
from gredp.app.features.patches import FILTERS, Patches
from gredp.app.features.real_scattering import RealScattering
from gredp.app.features.scattering import Scattering
from gredp.app.features.writing import Writing
from gredp.app.models.resnet import ResNet18
from gredp.app.predictor import Predictor
from gredp.app.settings import TrainSettings
from gredp.app.train import train
from gredp.budget import quote

TOLERANCE = 1e-5
ABC = ("a", "b", "c")
#: name → a network with everything that the files must hold
MODELS = {
    "table": Blueprint("mlp", (7,), ABC),
    "lenet": Blueprint("lenet-small", (1, 12, 12), ABC, image=(1, 12, 12)),
    "block-circulant": Blueprint("lenet5", (1, 16, 16), ABC, block=8, image=(1, 16, 16)),
    "standardized": Blueprint("wrn16-4", (3, 8, 8), ABC, image=(3, 8, 8)),
    "number": Blueprint("mlp", (7,), (), target=(100.0, 300.0)),
    "scattering": Blueprint(
        "linear",
        (81, 3, 3),
        ABC,
        normalized=True,
        image=(1, 12, 13),
        features=Scattering().identity(),
    ),
    "patches": Blueprint(
        "linear",
        (2 * FILTERS * 3 * 3 + 81 * 3 * 3, 1, 1),
        ABC,
        image=(1, 12, 13),
        features=Patches().identity(),
    ),
    "writing": Blueprint(
        "linear",
        (81 * (3 * 3 + 2 * 2 + 1), 1, 1),
        ABC,
        image=(1, 12, 13),
        features=Writing().identity(),
    ),
}


def numbers(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


#: graphs that the exporters take seconds for; what they are given is tested for all
LARGE = ("standardized", "scattering", "patches", "writing")
EXPORTED = [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in MODELS]


@pytest.fixture(scope="module", params=EXPORTED)
def model(request, tmp_path_factory):
    """A predictor with random weights, and its files."""
    model = of_blueprint(MODELS[request.param], tmp_path_factory.mktemp("model"))
    model.shape = Whole(model).shape
    model.onnx, model.pt2 = to_onnx(Whole(model), "{}"), to_pt2(Whole(model), '{"a": 1}')
    return model


def of_blueprint(blueprint, folder):
    torch.manual_seed(0)
    network = blueprint.build()
    for weight in network.parameters():
        if not weight.any():  # a classifier that starts at 0 would say nothing of its features
            weight.data.copy_(numbers(*weight.shape) - 0.5)
    if blueprint.normalized:
        network[0].mean.copy_(numbers(*blueprint.input_shape) / 2)
        network[0].scale.copy_(numbers(blueprint.input_shape[0]) + 0.1)
    guarantee = quote(method="dpsgd", target_epsilon=2.0, accountant="rdp").to_json()
    told = Blueprint(**(vars(blueprint) | {"guarantee": guarantee}))
    save_file(network.state_dict(), folder / "model.safetensors", told.metadata())
    return Predictor(folder)


def wanted(model, x):
    """By the network and the features as they were trained."""
    with torch.no_grad():
        if x.dim() == 4:
            x = 2 * x - 1 if model.extract is None else model.extract(x)
        found = model.network(x).double()
    if model.target is not None:
        return model.target.units(found)[:, None].numpy()
    return found.softmax(1).numpy()


def size(model):
    """Of what it says: probabilities, or numbers of a range."""
    return 1 if model.target is None else model.target.high - model.target.low


def test_onnxruntime_says_what_the_model_says(model):
    session = onnxruntime.InferenceSession(model.onnx)
    for n in (1, 5):
        x = numbers(n, *model.shape)
        (found,) = session.run(None, {"input": x.numpy()})
        assert found.shape == (n, len(model.classes_) or 1)
        assert np.abs(found - wanted(model, x)).max() < TOLERANCE * size(model)


def test_a_program_of_torch_says_what_the_model_says(model):
    note = {"gredp.json": ""}
    program = torch.export.load(io.BytesIO(model.pt2), extra_files=note).module()
    assert note == {"gredp.json": '{"a": 1}'}
    for n in (1, 5):
        x = numbers(n, *model.shape)
        assert np.abs(program(x).numpy() - wanted(model, x)).max() < TOLERANCE * size(model)


def test_nothing_is_pickled_and_no_path_is_told(model):
    files = [model.onnx]
    with zipfile.ZipFile(io.BytesIO(model.pt2)) as archive:
        files += [archive.read(name) for name in archive.namelist()]
        assert not [name for name in archive.namelist() if name.endswith(".pkl")]
        pickled = [name for name in archive.namelist() if name.endswith(".pt") and archive.read(name)]
        assert not pickled
        for name in archive.namelist():
            if name.endswith("_config.json"):
                assert b'"use_pickle": true' not in archive.read(name)
    for content in files:
        assert b"site-packages" not in content
        assert b"gredp/app" not in content


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("patches", "writing"))) for name in MODELS],
)
def test_stock_layers_say_what_the_model_says(name, tmp_path):
    """What the exporters are given."""
    model = of_blueprint(MODELS[name], tmp_path)
    whole = Whole(model)
    x = numbers(5, *whole.shape)
    assert np.abs(whole(x).numpy() - wanted(model, x)).max() < TOLERANCE * size(model)
    before = {name: p.numel() for name, p in model.network.named_parameters()}
    for layer in stock(model.network).modules():
        assert type(layer).__name__ not in ("BlockCirculantLinear", "SpectralConv2d", "WSConv2d")
    assert {name: p.numel() for name, p in model.network.named_parameters()} == before


@pytest.mark.parametrize("shape", [(1, 6, 6), (1, 12, 13), (3, 17, 10), (3, 32, 32)])
def test_real_arithmetic_gives_the_scattering_transform(shape):
    x = numbers(3, *shape)
    x[0, :, : shape[1] // 2] = 0
    assert torch.allclose(RealScattering(*shape)(x), Scattering()(x), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("written", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pretrained_features_are_in_the_file(tmp_path, written):
    torch.manual_seed(0)
    weights = {name: value for name, value in ResNet18().state_dict().items() if not name.startswith("fc.")}
    for name in weights:
        if name.endswith("running_mean"):
            weights[name] = 0.1 * numbers(*weights[name].shape)
    save_file(weights, tmp_path / "features.safetensors")
    digest = hashlib.sha256((tmp_path / "features.safetensors").read_bytes()).hexdigest()
    features = {"name": "resnet18", "until": "layer4.0", "size": 96, "sha256": digest}
    model = of_blueprint(
        Blueprint("linear", (512, 3, 3), ABC, image=(3, 16, 16), features=features), tmp_path
    )
    x = numbers(2, 3, 16, 16)
    found = Whole(model)(x).numpy()
    if written:
        (found,) = onnxruntime.InferenceSession(to_onnx(Whole(model), "{}")).run(None, {"input": x.numpy()})
    assert np.abs(found - wanted(model, x)).max() < TOLERANCE


def test_the_encoding_says_what_the_columns_hold():
    """Followed by hand, it gives the numbers that the network takes."""
    schema = parse_schema(
        {
            "label": "l",
            "classes": ["0", "1"],
            "missing": ["a", "c"],
            "numeric": {"b": [-2, 2], "a": [0, 10]},
            "dates": {"t": ["2020-01-01", "2020-03-01"]},
            "categorical": {"c": ["x", "none", "y"], "d": ["0", "1"]},
        }
    )
    rows = [
        {"b": "1", "a": "", "c": "none", "d": "0", "t": "2020-02-02"},
        {"b": "-7", "a": "4", "c": "?", "d": "1", "t": "2021-01-01"},
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    made = []
    for row in rows:
        line = []
        for step in encoding(schema):
            value = row[step["column"]]
            known = value not in ("", "?")
            if step["is"] in ("scaled", "date"):
                read = float if step["is"] == "scaled" else lambda text: date.fromisoformat(text).toordinal()
                low, high = map(read, (step["low"], step["high"]))
                clipped = min(max(read(value), low), high) if known else 0.0
                line.append(2 * (clipped - low) / (high - low) - 1 if known else 0.0)
            else:
                line.append(float(not known if step["is"] == "missing" else value == step["value"]))
        made.append(line)
    assert np.allclose(made, encode_inputs(columns, schema, "rows"))


# ------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of a table whose classes would be markup, if they could."""
    folder = tmp_path_factory.mktemp("secret-place")
    draw = np.random.default_rng(0)
    with (folder / "rows.csv").open("w") as file:
        print("size,color,kind", file=file)
        for i in range(200):
            size = draw.uniform(0, 10)
            print(f"{size:.2f},{('red', 'green')[i % 2]},{'# <b>' if size > 5 else '```'}", file=file)
    schema = 'label = "kind"\nclasses = ["```", "# <b>"]\n[numeric]\nsize = [0, 10]\n'
    (folder / "rows.toml").write_text(schema + '[categorical]\ncolor = ["red", "green"]\n')
    told = {"dataset": str(folder / "rows.csv"), "holdout": 0.2, "batch_size": 50, "accountant": "rdp"}
    settings = TrainSettings(epochs=1, out=str(folder / "run"), **told)
    return train(settings).folder


def test_the_folder_is_complete_and_its_card_true(run, capsys):
    for form in ("onnx", "pt2"):
        cli.main(["export", str(run), "--format", form])
    out, record = run / "export", json.loads((run / "record.json").read_text())
    assert "with README.md and config.json; the model: proven (ε = " in capsys.readouterr().out
    text = (out / "README.md").read_text()
    front, body = text.split("---\n")[1:3]
    head = yaml.safe_load(front)
    assert head["library_name"] == "gredp"
    assert head["pipeline_tag"] == "tabular-classification"
    assert {"differential-privacy", "onnx"} <= set(head["tags"])
    assert "license" not in head
    guarantee = gredp.load(run).guarantee
    assert f"Training is **{guarantee}**" in body
    assert f"Test accuracy: {100 * record['test_accuracy']:.2f} % on" in body
    assert "held out of the private ones" in body
    for name in ("model.onnx", "model.pt2", "model.safetensors", "config.json"):
        assert f"| `{name}` | `{hashlib.sha256((out / name).read_bytes()).hexdigest()}` |" in body
    assert '\n    "# <b>"\n' in body
    for file in out.iterdir():
        assert b"secret-place" not in file.read_bytes()


def test_files_of_the_folder_agree_with_gredp_load(run):
    run_export(ExportSettings(str(run)))
    out = run / "export"
    config = json.loads((out / "config.json").read_text())
    rows = [{"size": "2.5", "color": "red"}, {"size": "9", "color": "green"}]
    x = np.array([[-0.5, 1, 0], [0.8, 0, 1]], np.float32)
    assert [step["column"] for step in config["encoding"]] == ["size", "color", "color"]
    (found,) = onnxruntime.InferenceSession(out / "model.onnx").run(None, {"input": x})
    assert np.abs(found - gredp.load(out).predict_proba(rows)).max() < TOLERANCE
    assert config["classes"] == list(gredp.load(out).classes_)


def test_what_cannot_be_exported_is_said_in_a_line(run, tmp_path, monkeypatch):
    with pytest.raises(gredp.GredpError, match=r"has no record\.json"):
        run_export(ExportSettings(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"another")
    with pytest.raises(gredp.GredpError, match="holds another model"):
        run_export(ExportSettings(str(run), out=str(tmp_path)))
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(
        gredp.GredpError, match=r"--format onnx needs onnxscript: pip install 'gredp\[onnx\]'"
    ):
        run_export(ExportSettings(str(run), out=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()


def test_a_number_is_exported_in_its_units(tmp_path):
    draw = np.random.default_rng(0)
    rows = "".join(f"{x:.3f},{500 + 300 * x:.2f}\n" for x in draw.uniform(-1, 1, 300))
    (tmp_path / "rents.csv").write_text("size,rent\n" + rows)
    (tmp_path / "rents.toml").write_text('label = "rent"\ntarget = [0, 1000]\n[numeric]\nsize = [-1, 1]\n')
    options = ["--accountant", "rdp", "--epochs", "2", "--out", str(tmp_path / "run"), "--json"]
    cli.main(["train", "--data", str(tmp_path / "rents.csv"), *options])
    run_export(ExportSettings(str(tmp_path / "run")))
    out, x = tmp_path / "run" / "export", np.array([[0.5], [-0.25]], np.float32)
    (found,) = onnxruntime.InferenceSession(out / "model.onnx").run(["prediction"], {"input": x})
    wanted = gredp.load(out).predict([{"size": 0.5}, {"size": -0.25}])
    assert np.abs(found[:, 0] - wanted).max() < 1000 * TOLERANCE
    text = (out / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["pipeline_tag"] == "tabular-regression"
    assert "It predicts a number from 0 to 1000" in text
    assert "Test R²: " in text


@pytest.mark.filterwarnings("ignore:.*insecure-seed")
def test_the_card_of_a_run_with_a_known_seed_says_so(tmp_path):
    seeded = {"insecure_seed": 1, "accountant": "rdp"}
    settings = TrainSettings(epochs=1, batch_size=700, out=str(tmp_path / "run"), **seeded)
    folder = train(settings).folder
    run_export(ExportSettings(str(folder), "pt2"))
    assert "**The guarantee below does not hold.**" in (folder / "export" / "README.md").read_text()
