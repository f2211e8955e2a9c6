"""A ledger on the disk: one sealed line for each step, each seal over the one before it.

Formal guarantee. When `append` returns, the charge is on the disk; so whatever happens to the process later,
the ε read from the file is at least the ε spent. A last line that a crash cut off counts as one step more.
Lines removed from its end are missed: a mark beside it says how far it has come (`ledger_mark`).

| line | says |
|---|---|
| open | format, the entries that were spent before (a fork inherits its parent's), and that there is a mark |
| start | a new incarnation: a process that draws fresh noise |
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
from gredp.storage.files import Damaged, cannot, one_line, read, seal, unseal, write
from gredp.storage.ledger_mark import LedgerMark, create_mark, read_mark, refuse_missing

FORMAT, VERSION = "gredp-ledger", 1


@dataclass
class Written:
    """What a ledger's file says."""

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

    def take(self, line: dict[str, Any], mark: str) -> None:
        """One more line; ValueError if it cannot follow those before it."""
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
        self.seals.append(mark)

    def charge(self) -> None:
        if self.cost is not None:
            self.entries = merged(self.entries, self.cost)


def read_ledger(path: Path) -> Written:
    """Verify every seal and the mark; anything but a last line cut off is refused."""
    return _read(path)[0]


def _read(path: Path) -> tuple[Written, bytes]:
    """The mark comes first: a run that is under way moves both, and the ledger is never behind."""
    noted: dict[str, Any] | Damaged
    try:
        noted = read_mark(path)
    except Damaged as error:
        noted = error
    content = read(path)
    written = parse(path, content)
    if written.marked:
        if isinstance(noted, Damaged):
            raise noted
        refuse_missing(path, written.seals, noted)
    return written, content


def parse(path: Path, content: bytes) -> Written:
    *lines, rest = content.split(b"\n")
    written = Written(torn=bool(rest))
    mark = ""
    for number, line in enumerate(lines, 1):
        try:
            value, mark = unseal(line.decode(), mark)
            written.take(value, mark)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(
                f"{path} is damaged at line {number}: {one_line(error)}; what was spent is not known any more"
            ) from None
    if not lines:
        raise Damaged(f"{path} is damaged: it has no whole line")
    if written.torn:  # cut off before it was synced, hence before its noise was drawn; it stays charged
        written.charge()
    return written


class LedgerFile:
    """The file, open for appending by one process."""

    def __init__(self, path: Path, written: Written) -> None:
        self.path, self.written = path, written
        self._mark: LedgerMark | None = None
        try:
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        except OSError as error:
            raise cannot(path, "written", error) from None
        if written.marked:
            self._mark = LedgerMark(path)

    @classmethod
    def create(cls, path: Path, inherited: Iterable[Entry] = ()) -> "LedgerFile":
        before = [asdict(entry) for entry in inherited]
        first = {"line": "open", "format": FORMAT, "version": VERSION, "inherited": before, "mark": True}
        line, last = seal(json.dumps(first))
        create_mark(path, 1, sum(row["steps"] for row in before), last)
        write(path, line.encode())
        return cls(path, read_ledger(path))

    @classmethod
    def open(cls, path: Path) -> "LedgerFile":
        """Verified; a line that a crash cut off is replaced by the whole line that charges its step."""
        written, content = _read(path)
        if written.torn:
            whole = content.rpartition(b"\n")[0] + b"\n"
            if written.cost is not None:
                line = {"line": "step", "step": written.steps, "torn": True}
                whole += seal(json.dumps(line), written.seals[-1])[0].encode()
            write(path, whole)
            written = read_ledger(path)
        return cls(path, written)

    def start(self) -> int:
        """Begin a new incarnation; its number."""
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
        if self._descriptor is None:
            raise GredpError(f"{self.path} is closed: nothing more can be charged to it")
        text, mark = seal(json.dumps(line), self.written.seals[-1])
        try:
            content = text.encode()
            while content:  # a disk that is nearly full takes a part, and says why with the next
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)
            self.written.take(line, mark)
            if self._mark is not None:
                self._mark.move(len(self.written.seals), self.written.steps, mark)
        except OSError as error:
            self.close()  # the line may be there in part; only a new start may put it right
            raise cannot(self.path, "written", error) from None
        except BaseException:  # an interrupt: the line may be there and not be known
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._mark is not None:
            self._mark.close()
            self._mark = None
