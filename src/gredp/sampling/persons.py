"""Whose records are whose: persons are drawn, and a bounded number of each one's records takes part.

Formal guarantee. A drawn person gives exactly k rows, whatever they hold, and which of their records these
are depends on fresh random numbers and on nothing else. The gradients of the k rows are averaged and clipped
once, so a person with all of their records moves a sum by what one record may move it: the certificate of a
record is that of a person.

| records of a person | rows of a draw |
|---|---|
| m > k | a random k of them, each subset as likely as any other |
| m ≤ k | each ⌊k/m⌋ times, and k mod m random ones once more |

So each record is as likely as any other of its person, and the mean over the rows is unbiased for the mean
over all their records.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gredp.errors import GredpError

#: rows of a drawn person where the caller names no number: half the spread of one row, at four times the work
RECORDS_PER_PERSON = 4
#: for each record the id of its person, or for each person the numbers of their records
PersonIds = Sequence[Any] | Mapping[Any, Iterable[int]]


class Persons:
    """Persons numbered by their first record; `most` of their records take part in a draw, k of the above."""

    def __init__(self, ids: PersonIds, records: int, most: int | None = None) -> None:
        """`ids` are those of `records` records. What leaves a record without its one person is rejected."""
        self.most = RECORDS_PER_PERSON if most is None else most
        if not (self.most >= 1 and float(self.most).is_integer()):
            raise GredpError(f"records_per_person must be a whole number of at least 1, not {most}")
        self.most = int(self.most)
        owners = _owners(ids, records) if isinstance(ids, Mapping) else _ids(ids, records)
        numbers: dict[Any, int] = {}
        person = torch.tensor([numbers.setdefault(owner, len(numbers)) for owner in owners])
        #: `[persons]`: how many records each one has
        self.counts = torch.bincount(person, minlength=len(numbers))
        self._records = torch.argsort(person, stable=True)  # those of the first person, of the second, …
        self._first = self.counts.cumsum(0) - self.counts

    def __len__(self) -> int:
        return len(self.counts)

    def of(self, person: int) -> list[int]:
        """The numbers of a person's records."""
        first = int(self._first[person])
        return self._records[first : first + int(self.counts[person])].tolist()

    def rows(self, drawn: list[int], uniform: Tensor) -> list[int]:
        """Records of the drawn persons, k for each, side by side; `uniform` are as many, in (0, 1].

        Random subsets by Floyd's algorithm: the j-th of r is a random one of the first m − r + j + 1, or the
        last of them if that one was taken.
        """
        count, k = self.counts[drawn], self.most
        uniform, extra = uniform.view(-1, k), k % count  # m > k: all k are random
        places = (torch.arange(k) - extra[:, None]) % count[:, None]  # each as often, behind the random ones
        for j in range(int(extra.max()) if drawn else 0):
            last = count - extra + j
            place = ((uniform[:, j] * (last + 1)).ceil().long() - 1).clamp(min=0)
            taken = (places[:, :j] == place[:, None]).any(1)
            places[:, j] = torch.where(j < extra, torch.where(taken, last, place), places[:, j])
        return self._records[self._first[drawn][:, None] + places].flatten().tolist()

    def shares(self) -> Tensor:
        """`[records]` of float64: one over the number of records of its person, for sums over persons."""
        shares = torch.empty(len(self._records), dtype=torch.float64)
        shares[self._records] = (1 / self.counts.double()).repeat_interleave(self.counts)
        return shares

    def tobytes(self) -> bytes:
        """Whose records are whose, to compare processes."""
        return self.counts.numpy().tobytes() + self._records.numpy().tobytes()


def _ids(ids: Iterable[Any], records: int) -> list[Any]:
    """One for each record, as plain strings and numbers: what compares by identity would part a person."""
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(listed, list) or len(listed) != records:
        given = len(listed) if isinstance(listed, list) else 1
        raise GredpError(f"persons has {given} ids, but the dataset has {records} records: give one for each")
    plain = [each.item() if hasattr(each, "item") else each for each in listed]
    for place, each in enumerate(plain):
        if each is None or each == "" or each != each:
            raise GredpError(f"record {place} has no person: give every record an id")
        if not isinstance(each, str | bytes | int | float):
            kind = type(each).__name__
            raise GredpError(f"the person of record {place} is a {kind}: ids are strings or numbers")
    return plain


def _owners(groups: Mapping[Any, Iterable[int]], records: int) -> list[int]:
    """For each record the number of its person."""
    owners = [-1] * records
    for number, group in enumerate(groups.values()):
        held = _indices(group)
        if not held:
            raise GredpError(
                f"person {number} in the order of persons has no record: leave such a person out"
            )
        for place in held:
            if not 0 <= place < records:
                raise GredpError(
                    f"persons names record {place}, but the dataset has records 0 to {records - 1}"
                )
            if owners[place] == number:
                raise GredpError(f"persons lists record {place} twice under one person: list it once")
            if owners[place] >= 0:
                raise GredpError(f"persons lists record {place} under two persons: a record has one")
            owners[place] = number
    if -1 in owners:
        raise GredpError(f"record {owners.index(-1)} has no person: give every record one")
    return owners


def _indices(group: Any) -> list[int]:
    try:
        found = [int(place) for place in group]
        if all(number == place for number, place in zip(found, group)):
            return found
    except (TypeError, ValueError):
        pass
    raise GredpError("persons must map each person to the numbers of their records")
