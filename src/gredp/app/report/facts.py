"""What a run's folder says of it, read with distrust: ε comes from the ledger, whatever the record says."""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gredp.app.evaluation_rows import evaluation_rows
from gredp.app.not_covered import not_covered
from gredp.app.settings import FILE, TrainSettings
from gredp.errors import GredpError
from gredp.privacy.ledger import Ledger, mechanisms
from gredp.storage.files import read_document, read_json
from gredp.storage.record import accuracy, load, shown_accuracy
from gredp.storage.spent import Spent, spent

#: relative difference at which two versions of an accountant may still mean the same ε
SAME = 1e-6


@dataclass(frozen=True)
class Facts:
    """One run. `record` is empty until the run has finished.

    `known` is everything in its folder: the record, before that the settings and released metrics.
    """

    folder: Path
    spent: Spent
    record: dict[str, Any]
    known: dict[str, Any]

    @property
    def name(self) -> str:
        return printable(self.folder.name or str(self.folder))

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.known.get("settings", {}))

    @property
    def data(self) -> dict[str, Any]:
        return dict(self.known.get("data", {}))

    @property
    def model(self) -> str | None:
        return self.settings.get("model") or self.known.get("model")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return list(self.known.get("metrics", []))

    @property
    def insecure(self) -> bool:
        return bool(self.record.get("insecure")) or self.settings.get("insecure_seed") is not None

    @property
    def bands(self) -> int:
        """Steps over which noise was correlated, by the ledger."""
        return max((entry.bands for entry in self.spent.written.entries), default=1)

    @property
    def trials(self) -> float:
        """On average, if the ledger charges a private choice; otherwise 0."""
        return max((entry.trials for entry in self.spent.written.entries), default=0.0)

    @property
    def composed(self) -> int:
        """Mechanisms that are composed: with correlated noise, those that one record can take part in."""
        return sum(entry.steps for entry in mechanisms(self.spent.written.entries))

    @property
    def units(self) -> int | None:
        """Records to train on, or persons if those are the unit of privacy; None where it is not known."""
        return self.data.get(f"{self.spent.unit}s")

    @property
    def private(self) -> bool:
        return math.isfinite(self.spent.proven_epsilon)

    @cached_property
    def claimed_epsilon(self) -> float | None:
        """What the paper would say of the same steps; None where it says nothing, or nothing was charged."""
        return self.spent.claimed_epsilon if self.spent.written.entries else None

    @property
    def accuracy_name(self) -> str:
        """What a run is measured by, such as "test_accuracy" or "validation_r2"."""
        return accuracy(self.metrics[-1])[0] if self.metrics else "test_accuracy"

    @property
    def held_out(self) -> str | None:
        """Which training records the run was evaluated on, if any: they are not private in it."""
        count = self.settings.get("validation")
        return (self.record.get("judged_on") or TrainSettings(validation=count).judged_on) if count else None

    @property
    def accuracy(self) -> float | None:
        """Of the last epoch: no epoch is chosen by its accuracy."""
        return accuracy(self.metrics[-1])[1] if self.metrics else None

    @property
    def measure(self) -> str:
        """At the beginning of a sentence."""
        return "R²" if self.accuracy_name.endswith("r2") else "Accuracy"

    @property
    def shown_accuracy(self) -> tuple[str, str] | None:
        """Its name and value, as a person reads them."""
        return None if self.accuracy is None else shown_accuracy(self.accuracy_name, self.accuracy)

    @property
    def evaluation_rows(self) -> list[tuple[str, str]]:
        return evaluation_rows(self.evaluation)

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from the defaults of `gredp train`."""
        usual = asdict(TrainSettings())
        return {name: v for name, v in self.settings.items() if name not in usual or v != usual[name]}

    @property
    def model_sha256(self) -> str | None:
        """Of the model's file, if there is one: what is signed off is this file and no other."""
        file = self.folder / "model.safetensors"
        return hashlib.sha256(file.read_bytes()).hexdigest() if self.record and file.is_file() else None

    @property
    def attacker(self) -> float:
        """The most that a guess, right half of the time without the model, can be right with it.

        By (ε, δ)-DP a test for membership has TPR ≤ e^ε FPR + δ and TNR ≤ e^ε FNR + δ; (TPR + TNR) / 2 is
        largest where both hold with equality: (e^ε + δ) / (1 + e^ε).
        """
        return 1 - (1 - self.spent.delta) / (1 + math.exp(min(700.0, self.spent.proven_epsilon)))

    @property
    def not_covered(self) -> list[str]:
        return list(not_covered(self.settings, self.data, self.spent.unit, bool(self.trials)))

    @property
    def evaluation(self) -> dict[str, Any]:
        """Of the finished run, on the same records; empty in records from before there was one."""
        return dict(self.record.get("evaluation", {}))

    @cached_property
    def disagreements(self) -> list[str]:
        """Where the record differs from the ledger, which alone counts for ε."""
        if not self.record:
            return []
        found = []
        noted, counted = float(self.record["guarantee"]["proven_epsilon"]), self.spent.proven_epsilon
        if noted != counted and not math.isclose(noted, counted, rel_tol=SAME):
            found.append(f"the record says ε = {noted:.6g}, the ledger gives {counted:.6g}")
        entries = [asdict(entry) for entry in self.spent.written.entries]
        noted_entries = Ledger.from_json(self.record["ledger"]).to_json()
        if noted_entries != entries:
            found.append("the record lists other steps than the ledger")
        return found


def read_run(folder: str | Path) -> Facts:
    """A run that has finished, is under way, or was interrupted; anything else is rejected in one line."""
    folder = Path(folder)
    counted = spent(folder)
    settings = read_document(folder / FILE) if (folder / FILE).exists() else {}
    record = load(folder)
    return Facts(folder, counted, record, read_json(folder / "metrics.json") | settings | record)


def reject_different_data(runs: Sequence[Facts]) -> None:
    """Accuracies on different data do not compare, and their ε does not add up."""
    known = [run for run in runs if run.data]
    for run in known[1:]:
        first, other = (
            [each.data.get(key) for key in ("name", "classes", "target")] for each in (known[0], run)
        )
        if first != other:
            raise GredpError(
                f"{known[0].folder} is a run on {known[0].data['name']} and {run.folder} one on "
                f"{run.data['name']}: compare runs on the same dataset"
            )


def printable(text: str) -> str:
    """The same with control characters, and bytes that are no text, as question marks in a box."""
    whole = text.encode(errors="surrogateescape").decode(errors="replace")
    return re.sub(
        r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\ufffe\uffff\u202a-\u202e\u2066-\u2069]", "\ufffd", whole
    )
