"""Features on the disk: computed once, whole or not at all, and never for other data or another extractor."""

import multiprocessing
import os
import stat

import numpy as np
import pytest
import torch
from PIL import Image

from gredp import GredpError
from gredp.app.data import hold_out, load
from gredp.app.features.cache import extract_cached


class Doubled:
    """A extractor that counts the records it has seen, in a file, across processes."""

    def __init__(self, log, factor=2.0, die_after=None):
        self.log, self.factor, self.die_after = log, factor, die_after

    def identity(self):
        return {"name": "doubled", "factor": self.factor}

    def __call__(self, x):
        with open(self.log, "a") as log:
            log.write("." * len(x))
        if self.die_after is not None and self.seen() > self.die_after:
            os._exit(9)
        return x * self.factor

    def equip(self, model):
        pass

    def seen(self):
        return os.path.getsize(self.log) if os.path.exists(self.log) else 0


@pytest.fixture
def archive(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 300), ("test", 50)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, 6, 5, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 7
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays)
    return path


def run(extractor, archive, tmp_path):
    return extract_cached(extractor, load(str(archive)), str(archive), str(tmp_path / "data"))


def test_features_are_those_of_the_front_and_are_computed_once(archive, tmp_path):
    extractor, data = Doubled(tmp_path / "log"), load(str(archive))
    got = run(extractor, archive, tmp_path)
    assert extractor.seen() == 350
    assert (got.features, data.features) == (True, False)
    assert got.input_shape == (3, 6, 5)
    for part, want in ((got.x_train, data.x_train), (got.x_test, data.x_test)):
        indices = [0, 49, 7, 7]
        torch.testing.assert_close(part[indices], 2 * want[indices], rtol=2**-11, atol=0)
        assert part[indices].dtype == torch.float32
    assert got.x_train[[]].shape == (0, 3, 6, 5)
    run(extractor, archive, tmp_path)
    assert extractor.seen() == 350
    folder = next((tmp_path / "data" / "features").glob("mine-doubled-*[0-9a-f]"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_parts_of_them_are_held_out_without_being_read(archive, tmp_path):
    whole = run(Doubled(tmp_path / "log"), archive, tmp_path)
    part = hold_out(whole, 100)
    assert (len(part.x_train), len(part.x_test), len(part.y_test)) == (200, 100, 100)
    assert torch.equal(part.x_test[[3]], whole.x_train[[203]])
    assert torch.equal(part.y_test, whole.y_train[200:])


def test_other_data_or_another_front_get_features_of_their_own(archive, tmp_path):
    extractor = Doubled(tmp_path / "log")
    run(extractor, archive, tmp_path)
    run(Doubled(tmp_path / "log", factor=3.0), archive, tmp_path)
    assert extractor.seen() == 700
    os.utime(archive, (1, 1))
    run(extractor, archive, tmp_path)
    assert extractor.seen() == 1050


def test_images_in_class_folders_are_known_by_every_file(tmp_path):
    """Same names, sizes and numbers of images: another folder, another picture, another share held out."""
    extractor, rng = Doubled(tmp_path / "log"), np.random.default_rng(0)

    def seen(root, **options):
        before = extractor.seen()
        loaded = options.get("holdout"), options.get("image_size")
        extract_cached(extractor, load(str(root), **options), str(root), str(tmp_path / "data"), *loaded)
        return extractor.seen() - before

    def picture(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 5), dtype=np.uint8)).save(file)

    for place, splits in (("one", ("train", "test")), ("two", ("train", "test")), ("three", ("train",))):
        for split in splits:
            for i in range(20):
                picture(tmp_path / place / "pets" / split / ("cat", "dog")[i % 2] / f"{i}.png")
    root, other, whole = (tmp_path / place / "pets" for place in ("one", "two", "three"))
    assert (seen(root), seen(root), seen(other)) == (40, 0, 40)
    os.utime(root / "train" / "dog" / "1.png", (1, 1))
    assert seen(root) == 40
    assert (seen(whole, holdout=0.5), seen(whole, holdout=0.5)) == (20, 0)
    assert seen(whole, holdout=0.5001) == 20


def test_what_a_front_refuses_is_not_called_damage(archive, tmp_path):
    class Picky(Doubled):
        def __call__(self, x):
            raise GredpError("images are too small")

    with pytest.raises(GredpError, match=r"^images are too small$"):
        run(Picky(tmp_path / "log"), archive, tmp_path)


def test_values_beyond_half_precision_stay_finite(archive, tmp_path):
    got = run(Doubled(tmp_path / "log", factor=1e9), archive, tmp_path)
    assert got.x_train[[0]].max() == 65504


def _child(log, archive, tmp_path, die_after=None):
    run(Doubled(log, die_after=die_after), archive, tmp_path)


def test_several_processes_compute_them_once(archive, tmp_path):
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(tmp_path / "log", archive, tmp_path)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 4
    assert Doubled(tmp_path / "log").seen() == 350


def test_a_kill_leaves_nothing_that_would_be_read(archive, tmp_path):
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_child, args=(tmp_path / "log", archive, tmp_path, 200))
    child.start()
    child.join(30)
    assert child.exitcode == 9
    got = run(Doubled(tmp_path / "log"), archive, tmp_path)
    torch.testing.assert_close(got.x_train[[299]], 2 * load(str(archive)).x_train[[299]], rtol=2**-11, atol=0)
    assert not list((tmp_path / "data" / "features").glob("*.part"))


def test_a_damaged_file_and_a_place_that_cannot_be_written_are_one_line(archive, tmp_path):
    extractor = Doubled(tmp_path / "log")
    run(extractor, archive, tmp_path)
    file = next((tmp_path / "data" / "features").glob("*/x_train.npy"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(GredpError, match=r"is damaged .*remove it"):
        run(extractor, archive, tmp_path)
    (tmp_path / "blocked").write_text("a file, not a folder")
    with pytest.raises(GredpError, match="cannot be used for features"):
        extract_cached(extractor, load(str(archive)), str(archive), str(tmp_path / "blocked"))
