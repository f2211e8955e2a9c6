"""What a run folder shows of its ledger, beside the ledger itself. No torch.

| file | what it shows |
|---|---|
| ledger.mark | the last line for which noise was drawn |
| checkpoint-N.json | the last line when it was written, and its seal |
| record.json | all steps of the run |
| metrics.json | the steps charged when it was written |

A ledger that has less than any of them lost lines and is rejected. Files that cannot be read show nothing; a
ledger that says it has a mark is rejected without one.

Formal guarantee of the mark. It moves once a line is on the disk, and before its noise is drawn. So a ledger
may be ahead of its mark, by the line at which a crash came between the two, and is never behind it. Two slots
are overwritten in turn, each under its own seal: a crash within one leaves the other whole.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gredp.storage.files import CorruptFile, read, read_document, read_json, seal, unseal, write

MARK = "ledger.mark"
#: bytes of each half of a mark
SLOT = 256


class Place(NamedTuple):
    """How far a ledger had come: steps, and where known its lines and the seal of the last one."""

    steps: int
    lines: int | None = None
    seal: str = ""

    @classmethod
    def of(cls, noted: Any) -> "Place":
        """Of a mark or a checkpoint; ValueError if it is none."""
        match noted:
            case {"lines": int(lines), "steps": int(steps), "seal": str(last)}:
                return cls(steps, lines, last)
        raise ValueError("it notes no place in a ledger")

    def is_missing(self, steps: int, seals: list[str]) -> bool:
        """Whether a ledger with so many steps, and these seals of its lines, never came here."""
        if self.lines is None:
            return self.steps > steps
        return self.lines < 1 or seals[self.lines - 1 : self.lines] != [self.seal]

    def slot(self) -> bytes:
        """The half of a mark that notes this place; its parity alternates with the lines."""
        text = seal(json.dumps(self._asdict()))[0]
        return text.removesuffix("\n").encode().ljust(SLOT - 1) + b"\n"


def create_mark(ledger: Path, place: Place) -> None:
    """Before the ledger itself: one that says it has a mark has it."""
    slots = [b"\n".rjust(SLOT), b"\n".rjust(SLOT)]
    slots[(place.lines or 0) % 2] = place.slot()
    write(ledger.with_name(MARK), b"".join(slots))


def read_mark(ledger: Path) -> Place:
    """The newer whole slot; CorruptFile if there is none."""
    content, found = read(ledger.with_name(MARK), 2 * SLOT), []
    for half in (content[:SLOT], content[SLOT:]):
        with suppress(ValueError, RecursionError):
            found.append(Place.of(unseal(half.decode().strip())[0]))
    if not found:
        raise CorruptFile(f"{ledger.with_name(MARK)} is damaged: it has no whole slot")
    return max(found, key=lambda place: place.lines or 0)


def evidence(ledger: Path) -> dict[str, Place]:
    """Each place that a file in the ledger's folder shows, by the file's name."""
    shown: dict[str, Place] = {}
    for path in sorted(ledger.parent.glob("checkpoint-*.json")):
        with suppress(ValueError, KeyError, TypeError):  # a resume skips damaged ones, too
            shown[path.name] = Place.of(read_document(path)["ledger"])
    with suppress(ValueError, KeyError, TypeError):
        rows = read_json(ledger.with_name("record.json"))["ledger"]
        shown["record.json"] = Place(sum(row["steps"] for row in rows))
    with suppress(ValueError, KeyError, TypeError):
        shown["metrics.json"] = Place(0 + read_json(ledger.with_name("metrics.json"))["steps"])
    with suppress(CorruptFile):
        shown[MARK] = read_mark(ledger)
    return shown
