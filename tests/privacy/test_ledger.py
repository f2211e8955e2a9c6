"""The ledger keeps what was charged: all of it, in order, and nothing that is not valid."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gredp.errors import GredpError
from gredp.privacy.certificate import Certificate, Release
from gredp.privacy.ledger import Entry, Ledger


def certificate(z: float) -> Certificate:
    """One unit ball under noise z, whose multiplier is exactly z for the powers of two used here."""
    return Certificate((Release("r", 1.0, z),))


charge = st.tuples(
    st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.01, 0.5, 1.0]), st.sampled_from([None, 1.0, 4.0])
)


def charged(charges) -> Ledger:
    ledger = Ledger()
    for z, rate, claimed in charges:
        ledger.charge(certificate(z), rate, claimed)
    return ledger


def test_a_new_ledger_is_empty():
    assert Ledger().entries == ()
    assert Ledger().steps == 0
    assert Ledger().to_json() == []


def test_equal_charges_in_a_row_become_one_entry():
    assert charged([(2.0, 0.5, 4.0)] * 7).entries == (Entry(2.0, 0.5, 7, 4.0),)


@pytest.mark.parametrize("other", [(1.0, 0.5, 4.0), (2.0, 0.25, 4.0), (2.0, 0.5, 1.0), (2.0, 0.5, None)])
def test_a_charge_that_differs_in_anything_begins_a_new_entry_and_order_is_kept(other):
    same = (2.0, 0.5, 4.0)
    entries = charged([same, same, other, same]).entries
    assert entries == (
        Entry(*same[:2], 2, same[2]),
        Entry(*other[:2], 1, other[2]),
        Entry(*same[:2], 1, same[2]),
    )


@given(st.lists(charge, max_size=40))
def test_the_entries_unrolled_are_the_charges_in_their_order(charges):
    ledger = charged(charges)
    unrolled = [
        (e.noise_multiplier, e.sample_rate, e.claimed_multiplier)
        for e in ledger.entries
        for _ in range(e.steps)
    ]
    assert unrolled == charges
    assert ledger.steps == len(charges)
    # Run-length: neighbors always differ, so a long run cannot grow the ledger.
    kinds = [(e.noise_multiplier, e.sample_rate, e.claimed_multiplier) for e in ledger.entries]
    assert all(x != y for x, y in pairwise(kinds))


@given(st.lists(charge, max_size=20))
def test_json_round_trip_gives_the_same_ledger_and_it_goes_on_merging(charges):
    ledger = charged(charges)
    back = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert back.entries == ledger.entries
    for z, rate, claimed in charges[-1:]:
        before = len(back.entries)
        back.charge(certificate(z), rate, claimed)
        assert len(back.entries) == before
        assert back.steps == ledger.steps + 1


@pytest.mark.parametrize("z", [0.0, math.inf, 0.1 + 0.2, 1 / 3])
def test_json_keeps_every_bit_of_a_multiplier(z):
    ledger = Ledger((Entry(z, 1 / 3, 3),))
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))).entries == ledger.entries


def test_the_multiplier_charged_is_the_certificates():
    ledger = Ledger()
    ledger.charge(Certificate((Release("a", 1.0, 1.0), Release("b", 1.0, 1.0))), 0.5)
    assert ledger.entries[0].noise_multiplier == pytest.approx(math.sqrt(0.5))


def test_a_step_without_noise_is_charged_as_such():
    ledger = Ledger()
    ledger.charge(certificate(0.0), 0.5)
    assert ledger.entries == (Entry(0.0, 0.5, 1),)


def test_entries_handed_out_are_a_copy():
    ledger = charged([(1.0, 0.5, None)])
    before = ledger.entries
    ledger.charge(certificate(1.0), 0.5)
    assert before == (Entry(1.0, 0.5, 1),)
    assert ledger.steps == 2


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_a_bad_rate_is_refused_before_the_state_changes(rate):
    ledger = charged([(1.0, 0.5, None), (2.0, 0.5, None)])
    before = ledger.to_json()
    with pytest.raises(GredpError, match=f"sampling rate.*not {rate}$"):
        ledger.charge(certificate(2.0), rate)
    assert ledger.to_json() == before


def test_a_multiplier_that_is_not_a_number_is_refused_before_the_state_changes():
    ledger = charged([(1.0, 0.5, None)])
    unknown = Certificate((Release("r", math.inf, math.inf),))  # ∞/∞ deviations
    with pytest.raises(GredpError, match=r"noise multiplier.*not nan"):
        ledger.charge(unknown, 0.5)
    assert ledger.entries == (Entry(1.0, 0.5, 1),)


@pytest.mark.parametrize("claimed", [-1.0, math.nan])
def test_a_bad_claim_is_refused_before_the_state_changes(claimed):
    # Otherwise it is found only when a report is asked for, and nan, unequal to itself, never merges.
    ledger = charged([(1.0, 0.5, None)])
    with pytest.raises(GredpError, match=f"not {claimed}$"):
        ledger.charge(certificate(2.0), 0.5, claimed)
    assert ledger.entries == (Entry(1.0, 0.5, 1),)


@pytest.mark.parametrize("z", [-1.0, -1e-12, math.nan, -math.inf])
def test_an_entry_with_a_bad_multiplier_is_refused(z):
    with pytest.raises(GredpError, match=f"noise multiplier.*not {z}$"):
        Entry(z, 0.5, 1)


@pytest.mark.parametrize("steps", [-1, 1.5, math.nan, math.inf])
def test_an_entry_with_a_bad_count_is_refused(steps):
    with pytest.raises(GredpError, match=f"whole number, not {steps}$"):
        Entry(1.0, 0.5, steps)


@pytest.mark.parametrize("row", [{"sample_rate": 0.0}, {"noise_multiplier": -1.0}, {"steps": -3}])
def test_a_bad_row_of_a_file_is_refused(row):
    rows = [{"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 1, "claimed_multiplier": None}]
    assert Ledger.from_json(rows).steps == 1
    with pytest.raises(GredpError):
        Ledger.from_json([*rows, {**rows[0], **row}])


@pytest.mark.parametrize(
    "rows", [[{"sigma": 1.0}], [{"noise_multiplier": "1", "sample_rate": 1, "steps": 1}]]
)
def test_what_is_no_ledger_is_refused(rows):
    with pytest.raises(GredpError, match="not a ledger"):
        Ledger.from_json(rows)
