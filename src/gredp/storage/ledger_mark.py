"""How far a ledger has come, in a small file beside it: what was cut off its end is missed.

Formal guarantee. The mark of a line is written once the line is on the disk, and before its noise is drawn.
So a ledger may be ahead of its mark, by the line at which a crash came between the two, and is never behind
it: one that is has lost lines.

Two slots are overwritten in turn, each under a seal of its own. A crash while one is written leaves the other
whole; of two whole ones the one with more lines counts.
"""

import json
import os
from pathlib import Path
from typing import Any

from gredp.errors import GredpError
from gredp.storage.files import Damaged, cannot, read, seal, unseal, write

SLOT = 256
#: contents only: the size of the file never changes
_sync = getattr(os, "fdatasync", os.fsync)


def beside(ledger: Path) -> Path:
    return ledger.with_name(ledger.name + ".mark")


def _slot(lines: int, steps: int, last: str) -> bytes:
    text = seal(json.dumps({"lines": lines, "steps": steps, "seal": last}))[0]
    return text.removesuffix("\n").encode().ljust(SLOT - 1) + b"\n"


def create_mark(ledger: Path, lines: int, steps: int, last: str) -> None:
    """Before the ledger itself: one that says that it has a mark has it."""
    slots = [b"\n".rjust(SLOT), b"\n".rjust(SLOT)]
    slots[lines % 2] = _slot(lines, steps, last)
    write(beside(ledger), b"".join(slots))


def read_mark(ledger: Path) -> dict[str, Any]:
    """The newer whole slot; Damaged if there is none."""
    path, found = beside(ledger), []
    content = read(path, 2 * SLOT)
    for start in (0, SLOT):
        try:
            noted = unseal(content[start : start + SLOT].decode().strip())[0]
            found.append(place(noted))
        except (ValueError, RecursionError):
            continue
    if not found:
        raise Damaged(f"{path} is damaged: it has no whole slot; what was spent is not known any more")
    return max(found, key=lambda noted: noted["lines"])


def place(noted: Any) -> dict[str, Any]:
    """A note of how far a ledger had come, in a mark or a checkpoint; ValueError if it is none."""
    match noted:
        case {"lines": int(lines), "steps": int(steps), "seal": str(last)}:
            return {"lines": lines, "steps": steps, "seal": last}
    raise ValueError("it notes no place in a ledger")


def refuse_missing(ledger: Path, seals: list[str], noted: dict[str, Any]) -> None:
    """Refuse a ledger with these seals if `noted`, a place in it, is not there."""
    lines, steps = noted["lines"], noted["steps"]
    if lines < 1 or seals[lines - 1 : lines] != [noted["seal"]]:
        raise GredpError(
            f"{ledger} lacks lines that were there at {steps} steps: what was spent is not known any more"
        )


class LedgerMark:
    """The file, open for overwriting by the process that appends to the ledger."""

    def __init__(self, ledger: Path) -> None:
        self.path = beside(ledger)
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise cannot(self.path, "written", error) from None

    def move(self, lines: int, steps: int, last: str) -> None:
        """On the disk when this returns."""
        slot = _slot(lines, steps, last)
        if os.pwrite(self._descriptor, slot, lines % 2 * SLOT) != SLOT:
            raise OSError(f"a part of {SLOT} bytes was taken")
        _sync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
