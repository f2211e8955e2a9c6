"""What a run has spent: every line of its ledger verified, ε recomputed. No torch."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gredp.guarantee import NEIGHBORS
from gredp.privacy.accountant import AccountantName, epsilon
from gredp.privacy.ledger import Unit
from gredp.privacy.paper_claims import claimed_epsilon
from gredp.storage.files import read_document
from gredp.storage.ledger_file import LedgerState, ledger_of, read_ledger

#: the settings of a run, in its folder
SETTINGS = "settings.json"


@dataclass(frozen=True)
class Spent:
    """`proven_epsilon` at `delta` covers every line of the ledger, one that a crash cut off included."""

    written: LedgerState
    delta: float
    accountant: AccountantName
    proven_epsilon: float

    @property
    def unit(self) -> Unit:
        """Whose presence ε hides."""
        return next((entry.unit for entry in self.written.entries), "record")

    @property
    def neighbors(self) -> str:
        """What the datasets differ by that ε compares."""
        return NEIGHBORS[self.unit]

    @property
    def claimed_epsilon(self) -> float | None:
        """What the paper would report for the same steps; None where it makes no claim."""
        return claimed_epsilon(tuple(self.written.entries), self.delta)

    def to_json(self) -> dict[str, Any]:
        return {
            "proven_epsilon": self.proven_epsilon,
            "delta": self.delta,
            "neighbors": self.neighbors,
            "steps": self.written.steps,
            "inherited_steps": self.written.inherited,
            "starts": self.written.incarnations,
            "torn_last_line": self.written.torn,
            "entries": [asdict(entry) for entry in self.written.entries],
            "seal": self.written.seals[-1],
        }


def spent(run: str | Path, delta: float | None = None, accountant: AccountantName | None = None) -> Spent:
    """By default at the run's own δ and with its accountant; 1e-5 and pld where it has no settings.

    A folder is rejected without a ledger, with a damaged one, or with one that lost lines.
    """
    written = read_ledger(ledger_of(Path(run)))
    own = read_document(Path(run) / SETTINGS)["settings"] if (Path(run) / SETTINGS).exists() else {}
    delta = own.get("delta", 1e-5) if delta is None else delta
    name = accountant or own.get("accountant", "pld")
    return Spent(written, delta, name, epsilon(written.entries, delta, name))
