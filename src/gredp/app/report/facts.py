"""What a run's folder says of it, read with distrust: ε comes from the ledger, whatever the record says."""

import json
import math
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gredp.app.settings import FILE, TrainSettings
from gredp.errors import GredpError
from gredp.storage.evidence import read_json
from gredp.storage.files import read_document
from gredp.storage.record import FORMAT, VERSION
from gredp.storage.spent import Spent, spent

#: relative difference at which two versions of an accountant may still mean the same ε
SAME = 1e-6


@dataclass(frozen=True)
class Facts:
    """One run. `record` is empty until it has finished, `told` without `gredp train`."""

    folder: Path
    spent: Spent
    record: dict[str, Any]
    told: dict[str, Any]
    released: dict[str, Any]

    @property
    def name(self) -> str:
        return printable(self.folder.name or str(self.folder))

    @property
    def finished(self) -> bool:
        return bool(self.record)

    @property
    def settings(self) -> dict[str, Any]:
        return self.record.get("settings") or self.told.get("settings", {})

    @property
    def data(self) -> dict[str, Any]:
        return self.record.get("data") or self.told.get("data", {})

    @property
    def model(self) -> str | None:
        return self.settings.get("model") or self.told.get("model")

    @property
    def parameters(self) -> int | None:
        return self.record.get("parameters") or self.told.get("parameters")

    @property
    def certificate(self) -> list[dict[str, Any]]:
        return self.record.get("certificate") or self.told.get("certificate", [])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.record.get("metrics") or self.released.get("metrics", [])

    @property
    def spectrum(self) -> list[dict[str, Any]]:
        return self.record.get("spectrum") or self.released.get("spectrum", [])

    @property
    def audit(self) -> dict[str, Any] | None:
        return self.record.get("audit")

    @property
    def insecure(self) -> bool:
        return bool(self.record.get("insecure")) or self.settings.get("insecure_seed") is not None

    @property
    def bands(self) -> int:
        """Steps over which noise was correlated, by the ledger."""
        return max((entry.bands for entry in self.spent.written.entries), default=1)

    @property
    def private(self) -> bool:
        return math.isfinite(self.spent.proven_epsilon)

    @cached_property
    def claimed_epsilon(self) -> float | None:
        """What the paper would say of the same steps; None where it says nothing, or nothing was charged."""
        return self.spent.claimed_epsilon if self.spent.written.entries else None

    @property
    def planned_steps(self) -> int | None:
        return self.told.get("steps")

    @property
    def judged_by(self) -> str:
        """What accuracies are called: those on held-out training records are not the test's."""
        known = self.metrics and "validation_accuracy" in self.metrics[-1]
        return "validation_accuracy" if known else "test_accuracy"

    @property
    def held_out(self) -> str | None:
        """Which training records the run was judged on, if it was: they are not private in it."""
        count = self.settings.get("validation")
        return (self.record.get("judged_on") or TrainSettings(validation=count).judged_on) if count else None

    @property
    def loss_name(self) -> str:
        return self.judged_by.replace("accuracy", "loss")

    @property
    def accuracy(self) -> float | None:
        """Of the last epoch: no epoch is chosen by its accuracy."""
        return float(self.metrics[-1][self.judged_by]) if self.metrics else None

    @cached_property
    def disagreements(self) -> list[str]:
        """Where the record says something else than the ledger, by which alone ε is counted."""
        if not self.finished:
            return []
        found = []
        noted, counted = float(self.record["guarantee"]["proven_epsilon"]), self.spent.proven_epsilon
        if noted != counted and not math.isclose(noted, counted, rel_tol=SAME):
            found.append(f"the record says ε = {noted:.6g}, the ledger gives {counted:.6g}")
        entries = [asdict(entry) for entry in self.spent.written.entries]
        noted_entries = [{"bands": 1, "split": "", **row} for row in self.record["ledger"]]
        if noted_entries != json.loads(json.dumps(entries)):
            found.append("the record lists other steps than the ledger")
        return found


def read_run(folder: str | Path) -> Facts:
    """A run that has finished, is under way, or was interrupted; anything else is refused in one line."""
    folder = Path(folder)
    counted = spent(folder)
    told = read_document(folder / FILE) if (folder / FILE).exists() else {}
    facts = Facts(
        folder, counted, read_json(folder / "record.json"), told, read_json(folder / "metrics.json")
    )
    if facts.record and (facts.record.get("format"), facts.record.get("version")) != (FORMAT, VERSION):
        raise GredpError(f"{folder / 'record.json'} is not a record of this version of gredp")
    return facts


def printable(text: str) -> str:
    """The same with control characters, and bytes that are no text, as question marks in a box."""
    whole = text.encode(errors="surrogateescape").decode(errors="replace")
    return re.sub(
        r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\ufffe\uffff\u202a-\u202e\u2066-\u2069]", "\ufffd", whole
    )
