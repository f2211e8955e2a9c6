"""What `gredp train` chooses for a user's own data, and from which facts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import gredp.app.defaults as defaults
from gredp.app.data import Splits
from gredp.app.merge_settings import resolved
from gredp.app.session import batch_size
from gredp.app.settings import TrainSettings


def tree(root, size=(40, 40), mode="L", count=10, splits=("",)):
    for split in splits:
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new(mode, size).save(root / split / name / f"{i}.png")
    return root


def chosen(path, *options):
    return resolved(TrainSettings, "train", ["--data", str(path), *options])


def test_images_get_features_and_a_classifier_by_size_color_and_number(tmp_path):
    settings = chosen(tree(tmp_path / "pets", (64, 48), "RGB"))
    assert (settings.features, settings.model, settings.method) == ("patches", "linear", "dpsgd")
    assert (settings.image_size, settings.holdout, settings.normalize) == (32, 0.2, 0.0)
    assert (settings.batch_size, settings.epochs, settings.clipping) == (16, 30, "automatic")
    assert settings.lr == pytest.approx(9 / (1024 * 10 + 81 * 3 * 4 * 4) ** 0.5, abs=1e-4)


def test_networks_for_scattering_get_it(tmp_path):
    settings = chosen(tree(tmp_path / "pets"), "--model", "orders-linear")
    assert (settings.features, settings.normalize) == ("scattering", 0.02)


def test_a_test_split_is_used_and_small_images_are_scaled_up(tmp_path):
    settings = chosen(tree(tmp_path / "pets", (5, 6), splits=("train", "test")))
    assert settings.holdout is None
    assert (settings.image_size, settings.batch_size) == (8, 20)


def test_arrays_are_known_by_their_header(tmp_path):
    x, y = np.zeros((10_000, 28, 28), np.uint8), np.zeros(10_000, int)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    settings = chosen(tmp_path / "mine.npz")
    assert (settings.features, settings.batch_size, settings.image_size) == ("patches", 8192, None)
    (tmp_path / "arrays").mkdir()
    for name in ("x_train", "y_train", "x_test", "y_test"):
        np.save(tmp_path / "arrays" / f"{name}.npy", np.zeros((50, 64, 64, 3), np.uint8))
    assert chosen(tmp_path / "arrays").image_size == 32


@pytest.mark.parametrize("options", [["--model", "model3"], ["--features", "none"], ["--augment", "2"]])
def test_another_network_gets_none_of_the_features(tmp_path, options):
    settings = chosen(tree(tmp_path / "pets"), *options)
    assert (settings.features, settings.normalize, settings.batch_size) == ("none", 0.0, 192)
    assert (settings.image_size, settings.holdout) == (32, 0.2)


def test_a_batch_of_all_is_one_of_those_that_are_not_held_out():
    """Hashes decide which are: about, not exactly, the share that was chosen."""
    settings = TrainSettings(holdout=0.2, batch_size=16)
    for left, batch in ((15, 15), (16, 16), (17, 17)):
        y = torch.zeros(20, dtype=torch.long)
        data = Splits("pets", 2, y[:left], y[:left], y[left:], y[left:])
        assert batch_size(settings, data) == batch
        assert batch_size(replace(settings, batch_size=8), data) == 8
        assert batch_size(replace(settings, batch_size=21), data) == 21
        assert batch_size(replace(settings, holdout=None), data) == 16


def test_options_override_what_is_chosen(tmp_path):
    settings = chosen(tree(tmp_path / "pets"), "--epochs", "3", "--method", "plain", "--image-size", "16")
    assert (settings.epochs, settings.method, settings.image_size) == (3, "plain", 16)
    assert chosen(tree(tmp_path / "more"), "--claim", "paper").normalize == 0


def test_known_datasets_keep_their_own(tmp_path):
    assert resolved(TrainSettings, "train", []) == TrainSettings()
    assert resolved(TrainSettings, "train", ["--data", "mnist"]) == TrainSettings(dataset="mnist")


def test_no_record_is_read(tmp_path, monkeypatch):
    root = tree(tmp_path / "pets")
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("an image was decoded"))
    assert defaults.own_defaults(TrainSettings(dataset=str(root)), set())["batch_size"] == 16
