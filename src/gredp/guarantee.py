"""What holds for a run: one type for engine, command line, record and page."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gredp.privacy.accountant import AccountantName, epsilon, in_turns, round_up
from gredp.privacy.ledger import Entry, Unit
from gredp.privacy.paper_claims import claimed_epsilon

#: what neighboring datasets differ by, for each unit of privacy
NEIGHBORS: dict[Unit, str] = {
    "record": "add or remove one record",
    "person": "add or remove one person, with all of their records",
    "blanked record": "blank one record, their number being public",
}


@dataclass(frozen=True)
class Guarantee(Mapping[str, Any]):
    """A proven (ε, δ), what it rests on, and the ε that the paper would claim for the same noise.

    The claimed ε is a field of the proven one's type: it cannot be shown or stored alone. It is a mapping of
    its fields too, as in a record.

    >>> spent = (Entry(noise_multiplier=1.0, sample_rate=0.01, steps=1000, claimed_multiplier=1.4),)
    >>> print(Guarantee.of(spent, 1e-5, step=spent[0], sigma=1.4))
    proven (ε = 1.8283, δ = 1e-05)-DP, add or remove one record; the paper would claim ε = 1.1222
    """

    proven_epsilon: float
    claimed_epsilon: float | None
    noise_multiplier: float
    sigma: float
    delta: float
    accountant: AccountantName
    steps: int
    #: with correlation bands, that of the part whose turn it is
    sample_rate: float
    correlation_bands: int = 1
    neighbors: str = NEIGHBORS["record"]

    @classmethod
    def of(
        cls,
        entries: tuple[Entry, ...],
        delta: float,
        *,
        step: Entry,
        sigma: float,
        accountant: AccountantName = "pld",
    ) -> "Guarantee":
        """Of all that is charged in `entries`; `step` is one of the steps that they are made of."""
        return cls(
            proven_epsilon=epsilon(entries, delta, accountant),
            claimed_epsilon=claimed_epsilon(entries, delta),
            noise_multiplier=step.noise_multiplier,
            sigma=sigma,
            delta=delta,
            accountant=accountant,
            steps=sum(entry.steps for entry in entries),
            sample_rate=step.sample_rate,
            correlation_bands=step.bands,
            neighbors=NEIGHBORS[step.unit],
        )

    def __getitem__(self, key: str) -> Any:
        return self.to_json()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_json())

    def __len__(self) -> int:
        return len(fields(self))

    @property
    def _contested(self) -> float | None:
        """The claimed ε, where it says more than is proven."""
        claimed = self.claimed_epsilon
        return None if claimed is None or claimed >= self.proven_epsilon else claimed

    def rows(self) -> list[tuple[str, str]]:
        """For a table, the proven ε first."""
        claimed, turns = (
            self._contested,
            in_turns(self.correlation_bands, self.neighbors == NEIGHBORS["blanked record"]),
        )
        return [
            ("proven ε", f"{round_up(self.proven_epsilon)} at δ = {self.delta:g}, {self.neighbors}"),
            *([] if claimed is None else [("claimed ε (paper)", f"{round_up(claimed)} for the same noise")]),
            ("accountant", self.accountant),
            ("noise multiplier z", f"{self.noise_multiplier:.4f}"),
            ("noise scale σ", f"{self.sigma:.4f}"),
            ("steps", f"{self.steps} at sampling rate {self.sample_rate:.6g}{turns}"),
        ]

    def __str__(self) -> str:
        claimed = self._contested
        paper = "" if claimed is None else f"; the paper would claim ε = {round_up(claimed)}"
        return f"proven (ε = {round_up(self.proven_epsilon)}, δ = {self.delta:g})-DP, {self.neighbors}{paper}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Guarantee":
        """Of a record of any version: infinities are strings there, and unknown keys are skipped."""
        found = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        for key in ("proven_epsilon", "claimed_epsilon", "noise_multiplier", "sigma"):
            found[key] = None if found[key] is None else float(found[key])
        return cls(**found)
