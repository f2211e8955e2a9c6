"""Poisson draws.

Formal guarantee. Every record enters every logical batch independently with probability `sample_rate`.
The draw comes from the engine's secret unless the caller brings a generator, because amplification by
sampling is lost to anyone who can repeat the draw.

With noise correlated over b steps the records are split into b parts that take turns, each drawn from with
probability b·sample_rate: the steps that a record takes part in lie b apart, or more.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from gredp.distributed import rank, world_size
from gredp.errors import GredpError
from gredp.mechanisms.banded import check_bands
from gredp.privacy.ledger import Unit
from gredp.randomness import Secret, Split
from gredp.sampling.draws import Draw, HandedOut, Part
from gredp.sampling.persons import Persons


class PoissonBatchSampler(Sampler[list[int]]):
    """`steps` independent draws an epoch. An empty draw is yielded, executed and charged like any other.

    Time and memory go with the records that are drawn, not with those there are. Of N processes each keeps
    the records that are its own, i mod N: the draws of all together are one Poisson draw from all records,
    whether the processes draw from one seed or each from its own secret.
    """

    def __init__(
        self,
        records: int,
        sample_rate: float,
        steps: int,
        generator: torch.Generator | None = None,
        secret: Secret | None = None,
        views: int = 1,
        split: Split | None = None,
        persons: Persons | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """`views` repeats each drawn record so often, side by side: a dataset that draws its transforms anew
        each time it is asked gives as many views of it. With `persons`, those are drawn in place of records,
        and some records of each are given, `views` times.

        With a `split`, step t draws each record of part t mod b with probability b·sample_rate, and no other.
        The first step is the one that `handed.next_turn` gives: batches that were drawn and not stepped do
        not shift the turns of the parts.

        With `weights`, record i is drawn with probability sample_rate·w_i/mean(w), and `turn_rate` is the
        largest of those: a record that is drawn less often is hidden at least as well.
        """
        if not (views >= 1 and float(views).is_integer()):
            raise GredpError(f"the number of views must be a whole number of at least 1, not {views}")
        if records < 1:
            raise GredpError("the dataset is empty: there is nothing to train on")
        if not 0 < sample_rate <= 1:
            raise GredpError(f"the sampling rate must be above 0 and at most 1, not {sample_rate}")
        self.records, self.sample_rate, self.steps = records, sample_rate, steps
        self.generator, self.secret, self.split = generator, secret or Secret(), split
        self.persons, self.views_of_a_record = persons, int(views)
        #: inputs of each that is drawn, side by side
        self.views = self.views_of_a_record * (1 if persons is None else persons.most)
        #: the rate at which the part is drawn whose turn it is
        self.turn_rate = sample_rate if split is None else check_bands(split.parts, sample_rate)
        #: probability of each record over the largest one, where they differ
        self.shares: Tensor | None = None
        if weights is not None:
            self.shares, self.turn_rate = _weighted(weights, records, sample_rate)
        #: the batches that were handed out; optimizers that share this sampler share them
        self.handed = HandedOut()
        #: records of a batch on average, as requested
        self.expected = records * sample_rate

    def __iter__(self) -> Iterator[list[int]]:
        """For loaders that other programs build around this sampler: what is drawn counts as handed out."""
        self.handed.begin()
        for draw, drawn in self.draws():
            self.handed.add(Part(draw, draw.records))
            yield self.inputs(drawn)

    def draws(self) -> Iterator[tuple[Draw, list[int]]]:
        """The draws of one pass, with their records."""
        first = self.handed.next_turn()
        for turn in range(first, first + self.steps):
            drawn = self.draw(turn)
            yield Draw(len(drawn), turn), drawn

    def inputs(self, drawn: list[int]) -> list[int]:
        """Each record as often as there are views of it, side by side; of persons, records drawn anew."""
        if self.persons is not None:
            drawn = self.persons.rows(drawn, self._uniform(self.persons.most * len(drawn)))
        return [record for record in drawn for _ in range(self.views_of_a_record)]

    @property
    def unit(self) -> Unit:
        """Of privacy: what is drawn, clipped and protected."""
        return "record" if self.persons is None else "person"

    def draw(self, turn: int = 0) -> list[int]:
        """The batch of step `turn`, or this process' part of it, in the order of the records."""
        drawn = self.draw_at(self.turn_rate)
        if self.split is not None:
            drawn = drawn[self.split.part_of(drawn) == turn % self.split.parts]
        return drawn.tolist()

    def draw_at(self, rate: float) -> Tensor:
        """Every record of this process with probability `rate`, by the gaps between those that are drawn.

        A gap is ⌊log U / log(1 − q)⌋: it is at least g where U ≤ (1 − q)^g, so the records are independent.
        """
        if rate == 1:
            return self._own(torch.arange(self.records))
        scale, found, last = 1 / math.log1p(-rate), [], -1
        while last < self.records:
            expected = (self.records - last) * rate
            # Double precision: 24 random bits would miss a rate of 1e-6 by more than a percent.
            gaps = (self._uniform(int(expected + 4 * math.sqrt(expected)) + 8).log() * scale).floor()
            places = last + (gaps.clamp(max=float(self.records)).long() + 1).cumsum(0)
            found.append(places)
            last = int(places[-1])
        drawn = torch.cat(found)
        return self._own(drawn[drawn < self.records])

    def _own(self, drawn: Tensor) -> Tensor:
        """Of those that are drawn, thinned by weights, the ones of this process."""
        if self.shares is not None:
            drawn = drawn[self._uniform(len(drawn)) <= self.shares[drawn]]
        return drawn[drawn % world_size() == rank()]

    def _uniform(self, count: int) -> Tensor:
        """`[count]` in (0, 1]; never the same twice."""
        if self.generator is not None:
            return 1 - torch.rand(count, dtype=torch.float64, generator=self.generator)
        # A count of this sampler's own would repeat the batches of another model of the same engine.
        return self.secret.uniform(count, "batches", self.secret.fresh())

    def __len__(self) -> int:
        return self.steps


class ShuffledBatchSampler(PoissonBatchSampler):
    """Batches of a fixed size, every record in at most one of an epoch, in an order drawn anew for each.

    Formal guarantee. With one record blanked, the orders and the batches are the same, and one batch of each
    epoch differs, in that record: an epoch is one Gaussian mechanism without amplification. Turns go on where
    the ledger says, so that a pass that was left early does not begin another epoch.
    """

    def __init__(self, records: int, batch_size: int, steps: int, secret: Secret, views: int = 1) -> None:
        super().__init__(records, 1 / steps, steps, None, secret, views, secret.split(steps))
        self.expected = batch_size
        self.turn_rate = 1.0

    @property
    def unit(self) -> Unit:
        return "blanked record"

    def draw(self, turn: int = 0) -> list[int]:
        assert self.split is not None
        epoch, part = divmod(turn, self.steps)
        size = int(self.expected)
        drawn = self.split.shuffled(self.records, epoch)[part * size : (part + 1) * size]
        return drawn[drawn % world_size() == rank()].sort().values.tolist()


def _weighted(weights: Tensor, records: int, sample_rate: float) -> tuple[Tensor, float]:
    """Probabilities over the largest one, and that one."""
    try:
        weights = torch.as_tensor(weights, dtype=torch.float64).flatten()
    except (TypeError, ValueError, RuntimeError):
        raise GredpError(f"weights are one number for each record, not a {type(weights).__name__}") from None
    if len(weights) != records:
        raise GredpError(f"{len(weights)} weights given for {records} records: give one for each")
    if not (weights.isfinite() & (weights >= 0)).all() or not weights.any():
        raise GredpError("weights must be 0 or more, finite, and not all 0")
    largest = sample_rate * float(weights.max() / weights.mean())
    if largest > 1:
        raise GredpError(
            f"with these weights a record is drawn with probability {largest:.3g}: lower the batch size "
            f"to {int(records * sample_rate / largest)}, or the largest weight"
        )
    return weights / weights.max(), largest
