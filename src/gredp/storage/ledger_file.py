"""A ledger on the disk: one sealed line for each step, each seal over the one before it.

Formal guarantee. When `append` returns, the charge is on the disk. So whatever happens to the process later,
the ε read from the file is at least the ε spent. A last line cut off by a crash counts as one more step.
Lines removed from the end are missed: other files show how far the ledger had come (`evidence`).

| line | says |
|---|---|
| open | format, the entries spent before (a fork inherits its parent's), and that there is a mark |
| start | a process begins that draws fresh noise |
| cost | multiplier, rate and claim of each step that follows |
| step | one step, charged before its noise was drawn |
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gredp.errors import GredpError
from gredp.privacy.ledger import Entry, Ledger, merged, one_kind
from gredp.storage.evidence import MARK, SLOT, Place, create_mark, evidence
from gredp.storage.files import CorruptFile, cannot, one_line, read, seal, unseal, write

FORMAT, VERSION = "gredp-ledger", 1
#: of contents only: the size of a mark never changes
_sync = getattr(os, "fdatasync", os.fsync)


@dataclass
class LedgerState:
    """What the file of a ledger says."""

    entries: list[Entry] = field(default_factory=list)
    inherited: int = 0
    incarnations: int = 0
    cost: Entry | None = None
    seals: list[str] = field(default_factory=list)
    torn: bool = False
    #: ledgers from before there were marks have none
    marked: bool = False

    @property
    def steps(self) -> int:
        return sum(entry.steps for entry in self.entries)

    @property
    def place(self) -> Place:
        return Place(self.steps, len(self.seals), self.seals[-1])

    def take(self, line: dict[str, Any], last: str) -> None:
        """One more line, sealed by `last`; ValueError if it cannot follow those before it."""
        kind = line.get("line")
        if (kind == "open") != (not self.seals):
            raise ValueError("lines are out of order")
        if kind == "open":
            if (line["format"], line["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {line['format']} {line['version']}, not {FORMAT} {VERSION}")
            self.entries = list(Ledger.from_json(line["inherited"]).entries)
            self.inherited, self.marked = self.steps, line.get("mark") is True
        elif kind == "start":
            self.incarnations += 1
        elif kind == "cost":
            cost = Entry(**line["entry"])
            one_kind(self.entries, cost)
            self.cost = cost
        elif kind == "step" and self.cost is not None and line["step"] == self.steps + 1:
            self.charge()
        else:
            raise ValueError(f"a line {kind!r} that cannot be here")
        self.seals.append(last)

    def charge(self) -> None:
        if self.cost is not None:
            self.entries = merged(self.entries, self.cost)


def ledger_of(folder: Path) -> Path:
    if not (folder / "ledger").exists():
        raise GredpError(f"{folder} is not a run folder: it has no ledger")
    return folder / "ledger"


def read_ledger(path: Path) -> LedgerState:
    """Every seal verified, and compared with all that the folder shows; only a last line may be cut off."""
    return _read(path)[0]


def _read(path: Path) -> tuple[LedgerState, bytes]:
    shown = evidence(path)  # first: a run that is under way charges before it writes anything else
    content = read(path)
    state = parse(path, content)
    reject_shorter(path, state, shown)
    return state, content


def reject_shorter(path: Path, state: LedgerState, shown: dict[str, Place]) -> None:
    if state.marked and MARK not in shown:
        raise CorruptFile(f"{path.with_name(MARK)} is damaged or missing: what was spent is unknown")
    for name, place in shown.items():
        if (name != MARK or state.marked) and place.is_missing(state.steps, state.seals):
            lost = f"lacks lines that were there at {place.steps} steps, by {name}"
            raise GredpError(f"{path} {lost}: what was spent is unknown")


def parse(path: Path, content: bytes) -> LedgerState:
    *lines, rest = content.split(b"\n")
    state, last = LedgerState(torn=bool(rest)), ""
    for number, line in enumerate(lines, 1):
        try:
            value, last = unseal(line.decode(), last)
            state.take(value, last)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFile(
                f"{path} is damaged at line {number}: {one_line(error)}; what was spent is unknown"
            ) from None
    if not lines:
        raise CorruptFile(f"{path} is damaged: it has no whole line")
    if state.torn:  # cut off before it was synced, hence before its noise was drawn; it stays charged
        state.charge()
    return state


class LedgerFile:
    """The file and its mark, open for writing by one process."""

    def __init__(self, path: Path, state: LedgerState) -> None:
        self.path, self.written = path, state
        self._ledger: int | None = _open(path, os.O_APPEND)
        self._mark = _open(path.with_name(MARK)) if state.marked else None

    @classmethod
    def create(cls, path: Path, inherited: Iterable[Entry] = ()) -> "LedgerFile":
        before = [asdict(entry) for entry in inherited]
        first = {"line": "open", "format": FORMAT, "version": VERSION, "inherited": before, "mark": True}
        line, last = seal(json.dumps(first))
        create_mark(path, Place(sum(row["steps"] for row in before), 1, last))
        write(path, line.encode())
        return cls(path, read_ledger(path))

    @classmethod
    def open(cls, path: Path) -> "LedgerFile":
        """Verified; a line cut off by a crash is replaced by a whole line that charges its step."""
        state, content = _read(path)
        if state.torn:
            whole = content.rpartition(b"\n")[0] + b"\n"
            if state.cost is not None:
                line = {"line": "step", "step": state.steps, "torn": True}
                whole += seal(json.dumps(line), state.seals[-1])[0].encode()
            write(path, whole)
            state = read_ledger(path)
        return cls(path, state)

    def start(self) -> int:
        """Note that a process begins; its number."""
        self._write({"line": "start", "incarnation": self.written.incarnations + 1})
        return self.written.incarnations

    def append(self, entry: Entry) -> None:
        """Charge one step; on the disk when this returns."""
        cost = replace(entry, steps=1)
        one_kind(self.written.entries, cost)
        if cost != self.written.cost:
            self._write({"line": "cost", "entry": asdict(cost)})
        self._write({"line": "step", "step": self.written.steps + 1})

    def _write(self, line: dict[str, Any]) -> None:
        if self._ledger is None:
            raise GredpError(f"{self.path} is closed: nothing more can be charged to it")
        text, last = seal(json.dumps(line), self.written.seals[-1])
        try:
            content = text.encode()
            while content:  # a disk that is nearly full takes a part, and says why with the next
                content = content[os.write(self._ledger, content) :]
            os.fsync(self._ledger)
            self.written.take(line, last)
            self._move_mark()
        except BaseException as error:  # the line may be there in part, or unknown: only a new start can tell
            self.close()
            if isinstance(error, OSError):
                raise cannot(self.path, "written", error) from None
            raise

    def _move_mark(self) -> None:
        """On the disk when this returns."""
        if self._mark is not None:
            if os.pwrite(self._mark, self.written.place.slot(), len(self.written.seals) % 2 * SLOT) != SLOT:
                raise OSError(f"a part of {SLOT} bytes was taken")
            _sync(self._mark)

    def close(self) -> None:
        for descriptor in (self._ledger, self._mark):
            if descriptor is not None:
                os.close(descriptor)
        self._ledger = self._mark = None


def _open(path: Path, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags)
    except OSError as error:
        raise cannot(path, "written", error) from None
