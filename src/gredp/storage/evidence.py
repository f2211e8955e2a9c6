"""What a run has spent, from everything that its folder holds: the one place where it is read. No torch.

| file | what it shows |
|---|---|
| ledger.mark | the last line for which noise was drawn |
| checkpoint-N.json | the line that was the last one when it was written, and its seal |
| record.json | all entries of the run |
| metrics.json | the steps that were charged when it was written |

A ledger that has less than any of them is refused. What cannot be read shows nothing, except for the mark: a
ledger that says that it has one is refused without it.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from gredp.errors import GredpError
from gredp.storage.files import Damaged, one_line, read, read_document
from gredp.storage.ledger_file import LedgerFile, Written, read_ledger
from gredp.storage.ledger_mark import place, refuse_missing


def read_spent(folder: Path) -> Written:
    """What the ledger of `folder` says, if nothing else there shows more."""
    evidence = Evidence(folder)  # first: a run that is under way charges before it writes anything else
    written = read_ledger(_ledger(folder))
    evidence.refuse_less(written)
    return written


def open_spent(folder: Path) -> LedgerFile:
    """The same, open for appending."""
    evidence = Evidence(folder)
    file = LedgerFile.open(_ledger(folder))
    try:
        evidence.refuse_less(file.written)
    except BaseException:
        file.close()
        raise
    return file


def _ledger(folder: Path) -> Path:
    if not (folder / "ledger").exists():
        raise GredpError(f"{folder} is not the folder of a run: it has no ledger")
    return folder / "ledger"


class Evidence:
    """What a folder shows beside its ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: places in the ledger; steps, by the file that tells them
        self.places: list[dict[str, Any]] = []
        self.steps: dict[str, int] = {}
        for path in sorted(folder.glob("checkpoint-*.json")):
            with suppress(ValueError, KeyError, TypeError):  # damaged ones are passed over by a resume, too
                self.places.append(place(read_document(path)["ledger"]))
        with suppress(ValueError, KeyError, TypeError):
            entries = read_json(folder / "record.json")["ledger"]
            self.steps["record.json"] = sum(row["steps"] for row in entries)
        with suppress(ValueError, KeyError, TypeError):
            self.steps["metrics.json"] = 0 + read_json(folder / "metrics.json")["steps"]

    def refuse_less(self, written: Written) -> None:
        for noted in self.places:
            refuse_missing(self.folder / "ledger", written.seals, noted)
        for name, steps in self.steps.items():
            if steps > written.steps:
                raise GredpError(
                    f"{self.folder / 'ledger'} has {written.steps} steps, {name} tells of {steps}: "
                    "what was spent is not known any more"
                )


def read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path} is damaged: it holds no object")
    return value
