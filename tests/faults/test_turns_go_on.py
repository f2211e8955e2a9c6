"""Runs with correlated noise that are killed and resumed: every record keeps its part, every turn is paid."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from children import (
    STEPS,
    TARGET,
    assert_nothing_was_forgotten,
    error,
    kill_at,
    run,
    small_data,
    train_arguments,
)

from gredp.privacy.accountant import epsilon
from gredp.sampling import PoissonBatchSampler
from gredp.storage.ledger_file import read_ledger

BANDS = 3


def note_turns(path: Path) -> None:
    """Write down which records are drawn for which turn, in every process that draws."""
    honest = PoissonBatchSampler.draw

    def noting(self, turn=0):
        drawn = honest(self, turn)
        with open(path, "a") as file:
            file.write(json.dumps([turn, drawn]) + "\n")
        return drawn

    PoissonBatchSampler.draw = noting


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before update 8", "after noise 4", "within write 9"])
def test_a_killed_run_goes_on_with_the_parts_it_began_with(tmp_path, where):
    small_data(tmp_path)
    notes = tmp_path / "turns"

    def prepare(kill: str = "") -> None:
        note_turns(notes)
        if kill:
            kill_at(kill)

    arguments = train_arguments(tmp_path, "--correlation-bands", str(BANDS))
    assert run(tmp_path, arguments, lambda: prepare(where)) < 0
    assert_nothing_was_forgotten(tmp_path)
    again = ["train", "--resume", str(tmp_path / "run"), "--json"]
    assert run(tmp_path, again, prepare) == 0, error(tmp_path)
    assert_nothing_was_forgotten(tmp_path)
    part: dict[int, int] = {}
    for line in notes.read_text().splitlines():
        turn, drawn = json.loads(line)
        assert all(part.setdefault(record, turn % BANDS) == turn % BANDS for record in drawn)
    assert set(part.values()) == set(range(BANDS))
    written = read_ledger(tmp_path / "run" / "ledger")
    assert (written.steps, [e.bands for e in written.entries]) == (STEPS, [BANDS])
    assert epsilon(written.entries, 1e-5, "rdp") <= TARGET
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["guarantee"]["correlation_bands"] == BANDS
    secret = json.loads((tmp_path / "run" / "split").read_text().partition(" ")[2])["key"]
    shown = [p for p in (tmp_path / "run").iterdir() if p.name != "split"]
    assert not any(secret.encode() in p.read_bytes() for p in shown)
    assert os.stat(tmp_path / "run" / "split").st_mode & 0o777 == 0o600
