"""What has been spent: a run-length list of the steps that were charged, in their order."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from gredp.errors import GredpError
from gredp.privacy.certificate import Certificate

if TYPE_CHECKING:
    from gredp.storage.ledger_file import LedgerFile

#: whose presence ε hides: one record, or one person with all of their records. Of a blanked record it hides
#: the contents: there are as many records without it, in its place one whose gradient is 0
Unit = Literal["record", "person", "blanked record"]


@dataclass(frozen=True)
class Entry:
    """`steps` Poisson-subsampled Gaussian mechanisms with one multiplier and one rate.

    `claimed_multiplier` is the σ that the paper would hand to the accountant in place of the proven
    multiplier; None where the paper makes no claim.

    With noise correlated over `bands` steps the records are split into as many parts that take turns, and
    `sample_rate` is that of the part whose turn it is. `split` is the name of the split: each has turns of
    its own. The steps are then ⌈steps/bands⌉ such mechanisms (`mechanisms`), all of them alike (`one_kind`).
    So are those of shuffled batches of a fixed size, `bands` of them an epoch, at rate 1.

    `unit` is what was drawn and clipped: all entries of a ledger have the same.

    With `trials`, it is part of one trial of a private choice named `choice`: a random number of such trials
    was run, `trials` on average, and the best one released (`selection`).
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    claimed_multiplier: float | None = None
    bands: int = 1
    split: str = ""
    unit: Unit = "record"
    trials: float = 0.0
    choice: str = ""

    def __post_init__(self) -> None:
        if math.isnan(self.noise_multiplier) or self.noise_multiplier < 0:
            raise GredpError(f"the noise multiplier must be 0 or more, not {self.noise_multiplier}")
        if not 0 < self.sample_rate <= 1:
            raise GredpError(f"the sampling rate must be above 0 and at most 1, not {self.sample_rate}")
        claim = self.claimed_multiplier
        if claim is not None and not claim >= 0:
            raise GredpError(f"the claimed multiplier must be 0 or more, not {claim}")
        if not (self.steps >= 0 and math.isfinite(self.steps) and self.steps == int(self.steps)):
            raise GredpError(f"the number of steps must be a whole number, not {self.steps}")
        if not (self.bands >= 1 and self.bands == int(self.bands)) or (self.bands > 1) != bool(self.split):
            raise GredpError(f"{self.bands} bands go with a split by name, not with {self.split!r}")
        if self.unit not in get_args(Unit):
            raise GredpError(f"the unit of privacy is {' or '.join(get_args(Unit))}, not {self.unit!r}")
        if bool(self.trials) != bool(self.choice) or (self.choice and (self.trials < 1 or self.split)):
            raise GredpError(f"{self.trials:g} trials go with a choice by name, not with {self.choice!r}")


def one_unit(entries: Iterable[Entry], unit: Unit) -> None:
    """Reject another unit than the charged one: an ε for records and one for persons add up to neither."""
    for entry in entries:
        if entry.unit != unit:
            raise GredpError(
                f"{entry.steps} steps are charged with one {entry.unit} as the unit of privacy, and no ε "
                f"holds for them and one {unit}: go on as before, or begin with a new engine and new weights"
            )


def one_kind(entries: Iterable[Entry], step: Entry) -> None:
    """Reject `step` if its split was charged with anything else before: multiplier, rate, bands or claim.

    And if anything at all was charged for another unit (`one_unit`).

    `mechanisms` counts ⌈t/b⌉ turns of t steps, which is true of all steps of a split together and of no kind
    among them: whichever steps cost more may all fall to one part. And a multiplier cannot change at all,
    since the noise of a step is taken back in the b − 1 steps behind it. So a split has one kind of step,
    and another kind needs another split.
    """
    entries = tuple(entries)
    one_unit(entries, step.unit)
    for entry in entries:
        if entry.split and entry.split == step.split and replace(entry, steps=step.steps) != step:
            was, now = (
                f"z = {e.noise_multiplier:.6g} at rate {e.sample_rate:.6g} with {e.bands} bands"
                for e in (entry, step)
            )
            raise GredpError(
                f"a split of the records has one multiplier, rate and number of bands: {was} is charged to "
                f"it, {now} cannot be; fork the run, which splits the records anew"
            )


def mechanisms(entries: Iterable[Entry]) -> list[Entry]:
    """The same spending in entries without bands: as many mechanisms as one record can take part in.

    Steps of one split are counted together wherever they stand, and rounded up: after t steps the part that
    came first has had ⌈t/b⌉ turns. Steps of two splits are not, since a record may come first in both. Two
    kinds of steps in one split are rejected (`one_kind`), wherever the entries come from.
    """
    steps: dict[Entry, int] = {}
    for entry in entries:
        kind = replace(entry, steps=0)
        if entry.split and kind not in steps:
            one_kind(steps, kind)
        steps[kind] = steps.get(kind, 0) + entry.steps
    return [replace(kind, steps=-(-n // kind.bands), bands=1, split="") for kind, n in steps.items()]


def merged(entries: list[Entry], step: Entry) -> list[Entry]:
    """`entries` with one more step at the end, run-length coded."""
    if entries and replace(entries[-1], steps=1) == step:
        return [*entries[:-1], replace(step, steps=entries[-1].steps + 1)]
    return [*entries, step]


class Ledger:
    """Append-only. A step is charged before its noisy update is applied, never after.

    With a `file`, the charge is on the disk before `charge` returns, and so before noise is drawn. With a
    `ceiling`, a step beyond the end that was promised is rejected, and not charged.

    >>> from gredp.privacy.certificate import Release
    >>> ledger = Ledger()
    >>> for _ in range(3):
    ...     ledger.charge(Certificate((Release("all", 1.0, 1.5),)), sample_rate=0.01)
    >>> [(e.noise_multiplier, e.sample_rate, e.steps) for e in ledger.entries]
    [(1.5, 0.01, 3)]
    """

    def __init__(self, entries: tuple[Entry, ...] = ()) -> None:
        mechanisms(entries)  # rejects what cannot be composed
        for entry in entries[:1]:
            one_unit(entries, entry.unit)
        self._entries: list[Entry] = list(entries)
        self.file: LedgerFile | None = None
        #: asked before each charge; raises to reject it
        self.ceiling: Callable[[Entry], None] | None = None
        #: steps that were spent before this run
        self.inherited = 0

    def begin_with(self, entries: Iterable[Entry], inherited: int | None = None) -> None:
        """Take over what was spent, by default all of it before this run; an empty ledger only."""
        if self._entries:
            raise GredpError(
                f"{self.steps} steps are charged already: only an empty ledger can take over others"
            )
        self._entries = list(Ledger(tuple(entries)).entries)
        self.inherited = self.steps if inherited is None else inherited

    def keep_in(self, file: "LedgerFile") -> None:
        """From now on this ledger is what the file says."""
        self.file, self._entries = file, list(file.written.entries)
        self.inherited = file.written.inherited

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    @property
    def steps(self) -> int:
        return sum(entry.steps for entry in self._entries)

    def steps_of(self, split: str) -> int:
        """Steps charged to the split of this name: the number of the turn that comes next."""
        return sum(entry.steps for entry in self._entries if entry.split == split)

    def charge(
        self,
        certificate: Certificate,
        sample_rate: float,
        claimed_multiplier: float | None = None,
        bands: int = 1,
        split: str = "",
        unit: Unit = "record",
    ) -> None:
        """Record one step. Checked whole before anything changes."""
        entry = Entry(certificate.noise_multiplier, sample_rate, 1, claimed_multiplier, bands, split, unit)
        one_kind(self._entries, entry)
        if self.ceiling is not None:
            self.ceiling(entry)
        if self.file is not None:
            self.file.append(entry)
        self._entries = merged(self._entries, entry)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self._entries]

    @classmethod
    def from_json(cls, rows: list[dict[str, Any]]) -> "Ledger":
        try:
            return cls(tuple(Entry(**row) for row in rows))
        except TypeError as error:
            raise GredpError(f"this is not a ledger: {error}") from None
