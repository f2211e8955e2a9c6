"""What steps with correlated noise cost: as many mechanisms as one record can take part in, never fewer."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gredp import GredpError
from gredp.budget import quote
from gredp.privacy import ledger as ledger_
from gredp.privacy.accountant import epsilon
from gredp.privacy.certificate import Certificate, Release
from gredp.privacy.ledger import Entry, Ledger
from gredp.storage.files import seal
from gredp.storage.ledger_file import LedgerFile, read_ledger

DELTA = 1e-5
ONE = Certificate((Release("r", 1.0, 1.0),))


def turns(steps: int, bands: int = 4, split: str = "a", z: float = 1.0, rate: float = 0.2) -> Entry:
    return Entry(z, rate, steps, None, bands, split)


@pytest.mark.parametrize("bands", [2, 3, 4, 7])
def test_after_every_step_no_record_has_had_more_turns_than_are_charged(bands):
    """Against a count of every part's turns, step by step; and for the part that came first it is exact."""
    ledger, had = Ledger(), [0] * bands
    for t in range(23):
        ledger.charge(ONE, 0.2, None, bands, "a")
        had[t % bands] += 1
        (paid,) = ledger_.mechanisms(ledger.entries)
        assert paid == Entry(1.0, 0.2, max(had))


def test_epsilon_is_that_of_the_rounds_at_the_rate_of_a_turn():
    for accountant in ("rdp", "pld"):
        assert epsilon([turns(9)], DELTA, accountant) == epsilon([Entry(1.0, 0.2, 3)], DELTA, accountant)
    assert epsilon([turns(9)], DELTA, "rdp") < epsilon([turns(13)], DELTA, "rdp")


def test_steps_of_one_split_are_counted_together_and_those_of_two_apart():
    """A fork has a split of its own: a record may come first in its parent's and in its own."""
    once = [turns(1), Entry(1.0, 0.1, 5), turns(2)]
    assert [e.steps for e in ledger_.mechanisms(once)] == [1, 5]
    assert [e.steps for e in ledger_.mechanisms([turns(1), turns(1, split="b")])] == [1, 1]
    ledger = Ledger()
    for name in "abab":
        ledger.charge(ONE, 0.2, None, 4, name)
    assert ledger.steps_of("a") == 2
    assert [e.steps for e in ledger_.mechanisms(ledger.entries)] == [1, 1]
    assert ledger.steps == 4


#: what may not follow `turns(1)` in its split
OTHERS = {
    "rate": turns(1, rate=0.1),
    "multiplier": turns(1, z=2.0),
    "bands": turns(1, bands=2),
    "claim": replace(turns(1), claimed_multiplier=4.0),
}


def sealed_ledger(path: Path, lines: list[dict]) -> Path:
    """With every seal made right, as someone would who knows the format."""
    text = mark = ""
    for line in lines:
        sealed, mark = seal(json.dumps(line), mark)
        text += sealed
    path.write_text(text)
    return path


@pytest.mark.parametrize("other", OTHERS)
def test_a_split_has_one_kind_of_step(tmp_path, other):
    """Steps of another kind may all fall to one part, so that ⌈n/b⌉ of them are too few."""
    step, another = turns(1), OTHERS[other]
    words = "a split of the records has one multiplier, rate and number of bands"
    ledger = Ledger()
    file = LedgerFile.create(tmp_path / "ledger")
    ledger.keep_in(file)
    ledger.charge(ONE, 0.2, None, 4, "a")
    before = (tmp_path / "ledger").read_bytes()
    certificate = Certificate((Release("r", 1.0, another.noise_multiplier),))
    charge = (certificate, another.sample_rate, another.claimed_multiplier, another.bands, "a")
    for refused in (
        lambda: ledger.charge(*charge),
        lambda: file.append(another),
        lambda: Ledger((step, another)),
        lambda: Ledger().begin_with([step, another]),
        lambda: ledger_.mechanisms([step, Entry(1.0, 0.5, 3), another]),
        lambda: epsilon([step, another], DELTA),
    ):
        with pytest.raises(GredpError, match=words):
            refused()
    assert ledger.entries == (step,)
    assert (tmp_path / "ledger").read_bytes() == before
    ledger.charge(ONE, 0.2, None, 4, "a")  # and the file was not closed by any of it
    file.close()

    first = {"line": "open", "format": "gredp-ledger", "version": 1}
    rows = [{**asdict(entry), "steps": 1} for entry in (step, another)]
    inherited = [{**first, "inherited": rows}]
    later = [
        {**first, "inherited": []},
        *(line for n, row in enumerate(rows, 1) for line in ({"line": "cost", "entry": row}, _step(n))),
    ]
    for lines in (inherited, later):
        with pytest.raises(GredpError, match=f"is damaged at line .: {words}"):
            read_ledger(sealed_ledger(tmp_path / "crafted", lines))


def _step(number: int) -> dict:
    return {"line": "step", "step": number}


def test_the_rates_of_one_split_cannot_be_dealt_to_one_part():
    """Part 0 at rate 1, the others at 0.01: counted kind by kind 20.2, and 52.8 is what part 0 pays."""
    dealt = [turns(1, rate=1.0, z=0.5), turns(3, rate=0.01, z=0.5)] * 12
    with pytest.raises(GredpError, match="one multiplier, rate and number of bands"):
        epsilon(dealt, DELTA)


def test_entries_without_bands_are_what_they_were():
    entries = [Entry(1.0, 0.5, 2, 4.0), Entry(2.0, 0.25, 1, 4.0), Entry(1.0, 0.5, 1, 4.0)]
    assert ledger_.mechanisms(entries) == [replace(entries[0], steps=3), entries[1]]


@pytest.mark.parametrize(("bands", "split"), [(0, ""), (2, ""), (1, "a"), (2.5, "a"), (-1, "a")])
def test_bands_and_split_go_together(bands, split):
    with pytest.raises(GredpError, match="bands go with a split"):
        Entry(1.0, 0.5, 1, None, bands, split)


def test_the_file_keeps_bands_and_reads_lines_from_before_there_were_any(tmp_path):
    file = LedgerFile.create(tmp_path / "ledger", [turns(3, split="parent")])
    file.start()
    ledger = Ledger()
    ledger.keep_in(file)
    for _ in range(5):
        ledger.charge(ONE, 0.2, None, 4, "a")
    file.close()
    found = read_ledger(tmp_path / "ledger")
    assert found.entries == [turns(3, split="parent"), turns(5)]
    assert [e.steps for e in ledger_.mechanisms(found.entries)] == [1, 2]

    old = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 2, "claimed_multiplier": 4.0}
    assert Ledger.from_json(json.loads(json.dumps([old]))).entries == (Entry(1.0, 0.5, 2, 4.0),)


def test_a_line_cut_off_counts_as_a_turn(tmp_path):
    path = tmp_path / "ledger"
    file = LedgerFile.create(path)
    file.start()
    for _ in range(4):
        file.append(turns(1))
    file.close()
    path.write_bytes(path.read_bytes() + b"abc")
    assert [e.steps for e in ledger_.mechanisms(LedgerFile.open(path).written.entries)] == [2]


@pytest.mark.slow
def test_a_quote_costs_what_the_run_would():
    settings = {"method": "dpsgd", "batch_size": 10, "records": 100, "epochs": 2, "accountant": "rdp"}
    told = quote(target_epsilon=2.0, bands=4, **settings)
    assert (told["correlation_bands"], told["steps"], told["claimed_epsilon"]) == (4, 20, None)
    assert told["sample_rate"] == 0.4
    assert 1.99 < told["proven_epsilon"] <= 2.0
    rounds = [Entry(told["noise_multiplier"], 0.4, 5)]
    assert told["proven_epsilon"] == epsilon(rounds, DELTA, "rdp")
    for wrong, words in (({"bands": 11}, "at most 10 bands"),):
        with pytest.raises(GredpError, match=words):
            quote(sigma=1.0, **settings, **wrong)
