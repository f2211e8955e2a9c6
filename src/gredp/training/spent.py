"""What a run has spent: every line of its ledger verified, ε recomputed. No torch."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gredp.privacy.accountant import AccountantName, epsilon
from gredp.privacy.ledger_file import Written
from gredp.privacy.paper_claims import claimed_epsilon
from gredp.training.evidence import read_spent
from gredp.training.settings import FILE, TrainSettings, saved_settings


@dataclass(frozen=True)
class Spent:
    """`proven_epsilon` at `delta` covers every line of the ledger, one that a crash cut off included."""

    written: Written
    delta: float
    accountant: AccountantName
    proven_epsilon: float

    @property
    def claimed_epsilon(self) -> float | None:
        """What the paper would report for the same steps; None where it makes no claim."""
        return claimed_epsilon(tuple(self.written.entries), self.delta)

    def to_json(self) -> dict[str, Any]:
        return {
            "proven_epsilon": self.proven_epsilon,
            "delta": self.delta,
            "steps": self.written.steps,
            "inherited_steps": self.written.inherited,
            "starts": self.written.incarnations,
            "torn_last_line": self.written.torn,
            "entries": [asdict(entry) for entry in self.written.entries],
            "seal": self.written.seals[-1],
        }


def spent(run: str | Path, delta: float | None = None, accountant: AccountantName | None = None) -> Spent:
    """By default at the run's own δ and with its accountant; 1e-5 and pld where it has no settings.

    A folder without a ledger, with one that is not what was written, or with one that has less than anything
    else in the folder shows, is refused.
    """
    written = read_spent(Path(run))
    own = saved_settings(str(run)) if (Path(run) / FILE).exists() else TrainSettings()
    delta, name = own.delta if delta is None else delta, accountant or own.accountant
    return Spent(written, delta, name, epsilon(written.entries, delta, name))
