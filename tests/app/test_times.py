"""How long a run took follows the batches that it drew, or the trials of a choice: no file may tell."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gredp.app import tune as tuning
from gredp.app.cli import main
from gredp.app.tune import TuneSettings, tune

QUICK = ["--epochs", "1", "--accountant", "rdp"]
DAY, CLOCK = re.compile(r"\d{4}-\d\d-\d\d"), re.compile(r"\d\d:\d\d")


def silent(folder: Path) -> None:
    """Neither contents nor times of the files say more than the day."""
    created = json.loads((folder / "record.json").read_text())["created"]
    assert DAY.fullmatch(created)
    midnight = datetime.fromisoformat(created).replace(tzinfo=UTC).timestamp()
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mtime == midnight, f"{path.name} tells when it was written"
        if path.suffix in (".json", ".html"):
            text = path.read_text()
            assert '"seconds"' not in text
            assert not CLOCK.search(text), f"{path.name} tells a time"


@pytest.mark.pages
def test_nothing_that_a_run_leaves_tells_how_long_it_took(tmp_path):
    main(["train", *QUICK, "--json", "--out", str(tmp_path / "run")])
    silent(tmp_path / "run")


def test_the_name_of_a_run_tells_the_day_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        main(["train", *QUICK, "--json"])
    names = [folder.name for folder in (tmp_path / "runs").iterdir()]
    assert len(names) == 2
    assert all(re.fullmatch(r"digits-gredp-\d{8}-[0-9a-f]{8}", name) for name in names)


def test_a_run_is_of_the_day_on_which_it_began(tmp_path, monkeypatch):
    import gredp.app.train as loop

    honest = loop.read_data

    def long_ago(*given):
        monkeypatch.setattr(loop, "header", lambda: {"created": "2001-01-01"})
        return honest(*given)

    monkeypatch.setattr(loop, "read_data", long_ago)
    main(["train", *QUICK, "--json", "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run" / "record.json").read_text())["created"] != "2001-01-01"


def test_a_choice_does_not_tell_when_its_trials_were(tmp_path, monkeypatch):
    import gredp.app.train as loop

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "draw_trials", lambda *_: 2)
    monkeypatch.setattr(loop, "header", lambda: {"format": "gredp-record", "created": "2001-01-01"})
    quick = {"epochs": 1, "batch_size": 300, "trials": 2.0, "lrs": (0.3,), "epsilon": 8.0}
    run = tune(TuneSettings(**quick))
    silent(run.folder)
    assert run.record["created"] != "2001-01-01"
    assert re.fullmatch(r"digits-tuned-\d{8}-[0-9a-f]{8}", run.folder.name)
