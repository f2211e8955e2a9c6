"""The ledger on the disk: what is in it was there before the noise, and what was changed in it is found."""

import json
import math
import os
import random

import pytest

from gredp.errors import GredpError
from gredp.privacy.certificate import Certificate, Release
from gredp.privacy.ledger import Entry, Ledger
from gredp.storage.evidence import MARK, SLOT, Place, create_mark, read_mark
from gredp.storage.files import seal
from gredp.storage.ledger_file import LedgerFile, parse, read_ledger


def beside(ledger):
    return ledger.with_name(MARK)


def certificate(z: float) -> Certificate:
    return Certificate((Release("r", 1.0, z),))


def written(path, charges=((1.0, 0.5), (1.0, 0.5), (2.0, 0.25), (1.0, 0.5))) -> Ledger:
    file = LedgerFile.create(path)
    file.start()
    ledger = Ledger()
    ledger.keep_in(file)
    for z, rate in charges:
        ledger.charge(certificate(z), rate, 4.0)
    file.close()
    return ledger


def test_what_was_charged_is_read_back_entry_for_entry(tmp_path):
    ledger = written(tmp_path / "ledger")
    found = read_ledger(tmp_path / "ledger")
    assert tuple(found.entries) == ledger.entries
    assert found.entries == [Entry(1.0, 0.5, 2, 4.0), Entry(2.0, 0.25, 1, 4.0), Entry(1.0, 0.5, 1, 4.0)]
    assert (found.steps, found.incarnations, found.torn) == (4, 1, False)


@pytest.mark.parametrize("z", [0.0, math.inf, 1 / 3])
def test_every_bit_of_a_multiplier_is_kept(tmp_path, z):
    file = LedgerFile.create(tmp_path / "ledger", [Entry(z, 1 / 3, 5)])
    file.append(Entry(z, 1 / 3, 1))
    file.close()
    assert read_ledger(tmp_path / "ledger").entries == [Entry(z, 1 / 3, 6)]


def test_a_charge_is_in_the_file_before_it_is_in_memory(tmp_path, monkeypatch):
    ledger = written(tmp_path / "ledger")
    file = LedgerFile.open(tmp_path / "ledger")
    ledger.keep_in(file)
    synced = []

    def failing(descriptor):
        synced.append(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", failing)
    with pytest.raises(GredpError, match="cannot be written: No space left on device"):
        ledger.charge(certificate(1.0), 0.5, 4.0)
    assert synced
    assert ledger.steps == 4
    with pytest.raises(
        GredpError, match="is closed"
    ):  # a line may be there in part: only a new start mends it
        ledger.charge(certificate(1.0), 0.5, 4.0)


@pytest.mark.fault("damaged ledger")
def test_every_cut_is_found_or_stays_charged(tmp_path, record_property):
    """A cut within a line is a crash, and the step counts. A cut at a line end is seen by the mark alone."""
    path = tmp_path / "ledger"
    written(path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    ends = {sum(map(len, lines[:n])) for n in range(len(lines) + 1)}
    record_property("injected", len(whole) - 1)
    for size in range(1, len(whole)):
        if size < len(lines[0]):
            with pytest.raises(GredpError, match="no whole line"):
                parse(path, whole[:size])
            continue
        found = parse(path, whole[:size])
        done = whole[: max(end for end in ends if end <= size)].count(b'"line": "step"')
        assert found.torn == (size not in ends)
        assert found.steps >= done
        if size % 40:  # syncing takes its time
            continue
        path.write_bytes(whole[:size])
        create_mark(path, Place(done, len(found.seals), found.seals[-1]))
        file = LedgerFile.open(path)  # mended: the same figure, in whole lines
        assert (file.written.steps, file.written.torn) == (found.steps, False)
        file.append(Entry(1.0, 0.5, 1))
        file.close()
        assert read_ledger(path).steps == found.steps + 1


@pytest.mark.fault("damaged ledger")
def test_a_last_step_cut_anywhere_still_counts(tmp_path):
    path = tmp_path / "ledger"
    written(path)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for size in range(len(whole) - last + 1, len(whole)):
        assert parse(path, whole[:size]).steps == 4


@pytest.mark.fault("damaged ledger")
def test_every_flipped_bit_is_found_or_costs_nothing(tmp_path, record_property):
    path = tmp_path / "ledger"
    written(path)
    whole = path.read_bytes()
    generator = random.Random(0)
    record_property("injected", len(whole))
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << generator.randrange(8)
        if place == len(whole) - 1:  # the last newline: a torn line, and its step counts
            assert parse(path, bytes(changed)).steps == 4
            continue
        with pytest.raises(GredpError, match=r"damaged|no whole line"):
            parse(path, bytes(changed))


@pytest.mark.fault("damaged ledger")
def test_lines_removed_repeated_or_moved_are_found(tmp_path):
    path = tmp_path / "ledger"
    written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for n in range(len(lines) - 1):
        for changed in (
            lines[:n] + lines[n + 1 :],
            [*lines[: n + 1], *lines[n:]],
            [*lines[:n], lines[n + 1], lines[n], *lines[n + 2 :]],
        ):
            path.write_bytes(b"".join(changed))
            with pytest.raises(GredpError, match=r"damaged at line \d+"):
                read_ledger(path)


@pytest.mark.fault("damaged ledger")
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\x80\x02}q\x00.", b"x" * 100, b"[" * 100_000 + b"\n", b"\0" * 5000]
)
def test_what_is_no_ledger_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "ledger").write_bytes(content)
    with pytest.raises(GredpError) as error:
        read_ledger(tmp_path / "ledger")
    assert "\n" not in str(error.value)


@pytest.mark.fault("damaged ledger")
def test_links_and_pipes_are_not_read(tmp_path):
    written(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "none"):
        with pytest.raises(GredpError):
            read_ledger(tmp_path / name)


def test_an_interrupt_while_a_charge_is_written_ends_the_file_and_loses_nothing(tmp_path, monkeypatch):
    """The line may be on the disk and not be known here: the next one would not fit behind it."""
    file = LedgerFile.create(tmp_path / "ledger")
    file.start()
    ledger = Ledger()
    ledger.keep_in(file)
    ledger.charge(certificate(1.0), 0.5)

    def interrupted(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.charge(certificate(1.0), 0.5)
    with pytest.raises(GredpError, match="is closed"):
        ledger.charge(certificate(1.0), 0.5)
    assert read_ledger(tmp_path / "ledger").steps == 2


# ------------------------------------------------------------------ the mark


def cut(path, lines: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


@pytest.mark.fault("damaged ledger")
def test_lines_cut_off_the_end_are_missed(tmp_path):
    """At every line end, also behind the last checkpoint."""
    path = tmp_path / "ledger"
    written(path)
    whole = path.read_bytes()
    for lines in range(1, whole.count(b"\n")):
        cut(path, lines)
        for read in (read_ledger, LedgerFile.open):
            with pytest.raises(GredpError, match="lacks lines that were there at 4 steps"):
                read(path)
        path.write_bytes(whole)
    assert read_ledger(path).steps == 4


@pytest.mark.fault("damaged ledger")
def test_a_crash_between_a_line_and_its_mark_is_no_loss(tmp_path):
    """The ledger may be ahead of its mark, and goes on."""
    path = tmp_path / "ledger"
    written(path)
    before = beside(path).read_bytes()
    file = LedgerFile.open(path)
    file.append(Entry(1.0, 0.5, 1, 4.0))
    file.close()
    beside(path).write_bytes(before)
    assert read_ledger(path).steps == 5
    file = LedgerFile.open(path)
    file.append(Entry(1.0, 0.5, 1, 4.0))
    file.close()
    assert (read_ledger(path).steps, read_mark(path).steps) == (6, 6)


@pytest.mark.fault("damaged ledger")
def test_a_mark_torn_anywhere_is_the_one_before_it(tmp_path, record_property):
    """A crash within the write of either slot: the run goes on, and what is cut behind it is missed."""
    path = tmp_path / "ledger"
    for charges in (3, 4):
        written(path, [(1.0, 0.5)] * charges)
        old = beside(path).read_bytes()
        file = LedgerFile.open(path)
        file.append(Entry(1.0, 0.5, 1, 4.0))
        file.close()
        new, lines = beside(path).read_bytes(), path.read_bytes().count(b"\n")
        start = lines % 2 * SLOT
        for size in range(SLOT):
            beside(path).write_bytes(new[: start + size] + old[start + size :])
            assert read_ledger(path).steps == charges + 1
            assert read_mark(path).lines >= lines - 1
        whole = path.read_bytes()
        cut(path, lines - 2)
        with pytest.raises(GredpError, match="lacks lines"):
            read_ledger(path)
        path.write_bytes(whole)
    record_property("injected", 2 * SLOT)


@pytest.mark.fault("damaged ledger")
def test_a_mark_that_is_gone_is_refused_and_an_old_ledger_has_none(tmp_path):
    path = tmp_path / "ledger"
    written(path)
    for content in (b"", b"x" * 2 * SLOT, b"\0" * 2 * SLOT):
        beside(path).write_bytes(content)
        with pytest.raises(GredpError, match=r"ledger.mark is damaged or missing"):
            read_ledger(path)
    beside(path).unlink()
    for read in (read_ledger, LedgerFile.open):
        with pytest.raises(GredpError, match=r"ledger.mark is damaged or missing"):
            read(path)
    old, _ = seal(json.dumps({"line": "open", "format": "gredp-ledger", "version": 1, "inherited": []}))
    path.write_text(old)
    file = LedgerFile.open(path)
    file.append(Entry(1.0, 0.5, 1))
    file.close()
    assert read_ledger(path).steps == 1
    assert not beside(path).exists()


def test_noise_is_drawn_for_a_line_with_a_mark_only(tmp_path, monkeypatch):
    """A mark that cannot be written is a charge that cannot be."""
    ledger = written(tmp_path / "ledger")
    ledger.keep_in(LedgerFile.open(tmp_path / "ledger"))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(GredpError, match="cannot be written: No space left on device"):
            ledger.charge(certificate(1.0), 0.5, 4.0)
    with pytest.raises(GredpError, match="is closed"):
        ledger.charge(certificate(1.0), 0.5, 4.0)
    assert read_ledger(tmp_path / "ledger").steps == 5  # on the disk, and so charged
