"""Recipes: files of settings, checked whole, with the command line on top."""

from dataclasses import replace

import pytest

from gredp import GredpError
from gredp.app.cli import main
from gredp.app.merge_settings import named, resolved, with_current_names
from gredp.app.recipe import Recipe, names
from gredp.app.settings import TrainSettings, saved_settings
from gredp.storage.files import write_document

MINE = """
dataset = "digits"
batch_size = 300
epsilon = 4
normalise = 0.1
front = "scattering"

[[at]]
epsilon = 1
epochs = 7
lr = 0.5

[[at]]
epsilon = 4.0
epochs = 9
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return str(path)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0, 8.0])
def test_recipes_of_the_package_hold_settings_that_can_be_run(name, epsilon):
    weights = ["--pretrained", "file"] if "transfer" in name else []
    settings = resolved(TrainSettings, "train", ["--recipe", name, "--epsilon", str(epsilon), *weights])
    settings.check()
    assert settings.recipe == name
    assert settings.claim == "proven"
    assert settings.dataset == name.removesuffix("-transfer")


def test_the_recipes_of_the_package_are_there():
    assert names() == [
        "cifar10",
        "cifar10-transfer",
        "cifar100",
        "cifar100-transfer",
        "fashion-mnist",
        "mnist",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"epsilon": 4, "epochs": 9, "lr": 0.1, "batch_size": 300}),
        (["--epsilon", "1"], {"epsilon": 1, "epochs": 7, "lr": 0.5}),
        (["--epsilon", "1.9"], {"epsilon": 1.9, "epochs": 7, "lr": 0.5}),  # nearer to 1 than to 4, as a ratio
        (["--epsilon", "2.1"], {"epsilon": 2.1, "epochs": 9}),
        (["--epochs", "3", "--batch-size", "50"], {"epsilon": 4, "epochs": 3, "batch_size": 50}),
    ],
)
def test_the_nearest_epsilon_decides_and_the_command_line_has_the_last_word(mine, options, expected):
    settings = resolved(TrainSettings, "train", ["--recipe", mine, *options])
    assert {key: getattr(settings, key) for key in expected} == expected
    assert settings.recipe == mine


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs = ", "cannot be read"),
        ("speed = 3", "speed is not a setting"),
        ('epochs = "many"', "epochs cannot be 'many'"),
        ("epochs = 2.5", r"epochs cannot be 2.5"),
        ('method = "magic"', "method cannot be 'magic'"),
        ("insecure_seed = 1", "insecure_seed is not a setting"),
        ('out = "x"', "out is not a setting"),
        ("[[at]]\nepochs = 3", "every .*at.* is a table with an epsilon"),
        ("at = 3", "every .*at.* is a table with an epsilon"),
        ("[[at]]\nepsilon = 0", "every .*at.* is a table with an epsilon"),
        ('[[at]]\nepsilon = "x"', "epsilon cannot be 'x'"),
    ],
)
def test_mistakes_in_a_file_are_one_line(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(GredpError, match=words) as error:
        Recipe(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nope", "nowhere/mine.toml"])
def test_a_recipe_that_is_not_there_is_one_line(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--recipe", name])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1


def test_what_is_named_is_known_however_it_is_written():
    assert named(["--data=x.csv", "--batch_size", "3", "--lr", "-1"]) == {"dataset", "batch_size", "lr"}


@pytest.mark.parametrize("command", [["tune"], ["train", "--fork", "runs/a"]])
def test_a_recipe_that_would_not_be_followed_is_refused(capsys, mine, command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--recipe", mine])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "no --recipe" in error
    assert error.count("\n") == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_names_of_earlier_versions_are_understood(tmp_path, capsys):
    old = tmp_path / "old.toml"
    old.write_text(MINE)
    new = tmp_path / "new.toml"
    new.write_text(MINE.replace("normalise", "normalize").replace("front", "features"))
    assert Recipe(str(old)).at(1.0) == replace(Recipe(str(new)).at(1.0), recipe=str(old))
    words = with_current_names(["train", "--front", "scattering", "--normalise=0.1"])
    assert words == ["train", "--features", "scattering", "--normalize=0.1"]
    main(["account", "--sigma", "1", "--bands", "4", "--json"])
    first = capsys.readouterr().out
    main(["account", "--sigma", "1", "--correlation-bands", "4", "--json"])
    assert capsys.readouterr().out == first


def test_a_run_of_an_earlier_version_is_understood(tmp_path):
    kept = TrainSettings(features="scattering", normalize=0.1).kept()
    old = {{"features": "front", "normalize": "normalise"}.get(name, name): kept[name] for name in kept}
    write_document(tmp_path / "settings.json", {"settings": old})
    saved = saved_settings(str(tmp_path))
    assert (saved.features, saved.normalize) == ("scattering", 0.1)
