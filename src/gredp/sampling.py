"""Poisson batches, and the physical batches they are split into.

Formal guarantee. Every record enters every logical batch independently with probability `sample_rate`.
The draw comes from the engine's secret unless the caller brings a generator, because amplification by
sampling is lost to whoever can repeat the draw.

With noise correlated over b steps the records are split into b parts that take turns, each drawn from with
probability b·sample_rate: the steps that a record takes part in lie b apart, or more.
"""

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from gredp.distributed import rank, world_size
from gredp.errors import GredpError
from gredp.mechanisms.banded import check_bands
from gredp.randomness import Secret, Split

if TYPE_CHECKING:
    from gredp.optimizer import PrivateOptimizer


class Draws:
    """Batches that were drawn and that no step has used: each pays for one step at the sampler's rate.

    Which of them a step is on shows by its size alone: batches may be fetched ahead, moved, changed and left
    out on their way to it. A second step on one is known where none is left, or none of that size.
    """

    def __init__(self) -> None:
        #: their sizes; None before the first one: then the caller brings batches of his own
        self.unused: deque[int] | None = None
        #: inputs of the last step that used one
        self.last: int | None = None
        self._alike = True  # whether all steps were on as many inputs as a batch had records

    def begin(self) -> None:
        """A new pass. Of an older one, only the last may still be on its way, fetched ahead."""
        self.unused = deque([*(self.unused or ())][-1:])

    def add(self, size: int) -> None:
        assert self.unused is not None
        self.unused.append(size)

    @property
    def largest(self) -> float:
        """The most records that one draw can have brought to the step that comes next."""
        if self.unused:
            return max(self.unused)
        return math.inf if self.last is None else self.last

    def size(self, inputs: int) -> int | None:
        """Of the batch that a step on so many inputs is on; None where there may be others."""
        if self.unused and inputs not in self.unused:
            return self.unused[0] if len(self.unused) == 1 else None
        return inputs if self.unused else self.last

    def fresh(self, inputs: int) -> bool:
        """Whether a step on so many inputs is the first on its batch."""
        if self.unused is None or inputs in self.unused:
            return True
        again = self._alike and inputs == self.last
        return bool(self.unused) and not again

    def spend(self, inputs: int) -> None:
        """Use the batch, if it was not used before."""
        if not self.unused or not self.fresh(inputs):
            return
        self._alike &= inputs in self.unused
        size = inputs if inputs in self.unused else self.unused[0]
        while self.unused.popleft() != size:  # those before it were left out
            pass
        self.last = inputs


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
    ) -> None:
        """`views` repeats each drawn record so often, side by side: a data set that draws its transforms
        anew each time it is asked gives as many views of it."""
        if not (views >= 1 and float(views).is_integer()):
            raise GredpError(f"the number of views must be a whole number of at least 1, not {views}")
        if records < 1:
            raise GredpError("the data set is empty: there is nothing to train on")
        if not 0 < sample_rate <= 1:
            raise GredpError(f"the sampling rate must be above 0 and at most 1, not {sample_rate}")
        self.records, self.sample_rate, self.steps = records, sample_rate, steps
        self.generator, self.secret, self.views = generator, secret or Secret(), int(views)
        #: gives the number of the step that comes next
        self.next_turn: Callable[[], int] = lambda: 0
        #: what optimisers know of the batches; those that share this sampler share it
        self.draws = Draws()
        #: records of a batch on average, as it was asked for
        self.expected = records * sample_rate

    def __iter__(self) -> Iterator[list[int]]:
        first = self.next_turn()
        self.draws.begin()
        for turn in range(first, first + self.steps):
            drawn = self.draw_turn(turn)
            self.draws.add(len(drawn))
            yield [record for record in drawn for _ in range(self.views)]

    def draw_turn(self, turn: int) -> list[int]:
        """The records of the step with this number; here all steps are alike."""
        return self.draw()

    def draw(self) -> list[int]:
        """One batch, or this process' part of it, in the order of the records."""
        return self.draw_at(self.sample_rate).tolist()

    def draw_at(self, rate: float) -> Tensor:
        """Every record of this process with probability `rate`, by the gaps between those that are drawn.

        A gap is ⌊log U / log(1 − q)⌋: it is at least g where U ≤ (1 − q)^g, so the records are independent.
        """
        if rate == 1:
            return torch.arange(self.records)[rank() :: world_size()]
        scale, found, last = 1 / math.log1p(-rate), [], -1
        while last < self.records:
            expected = (self.records - last) * rate
            # Double precision: 24 random bits would miss a rate of 1e-6 by more than a percent.
            gaps = (self._uniform(int(expected + 4 * math.sqrt(expected)) + 8).log() * scale).floor()
            places = last + (gaps.clamp(max=float(self.records)).long() + 1).cumsum(0)
            found.append(places)
            last = int(places[-1])
        drawn = torch.cat(found)
        return drawn[(drawn < self.records) & (drawn % world_size() == rank())]

    def _uniform(self, count: int) -> Tensor:
        """`[count]` in (0, 1]; never the same twice."""
        if self.generator is not None:
            return 1 - torch.rand(count, dtype=torch.float64, generator=self.generator)
        # A count of this sampler's own would repeat the batches of another model of the same engine.
        return self.secret.uniform(count, "batches", self.secret.fresh())

    def __len__(self) -> int:
        return self.steps


class CyclicBatchSampler(PoissonBatchSampler):
    """Step t draws each record of part t mod b with probability b·sample_rate, and no other record.

    It begins with the step that `next_turn` says comes next, and yields the steps that follow in their order:
    batches that were drawn but not stepped with do not shift the turns of the parts.
    """

    def __init__(
        self,
        records: int,
        sample_rate: float,
        steps: int,
        split: Split,
        generator: torch.Generator | None = None,
        secret: Secret | None = None,
        views: int = 1,
    ) -> None:
        super().__init__(records, sample_rate, steps, generator, secret, views)
        self.split, self.turn_rate = split, check_bands(split.parts, sample_rate)

    def draw_turn(self, turn: int) -> list[int]:
        """The batch of step `turn`, by drawing from all records and leaving out those of other parts."""
        drawn = self.draw_at(self.turn_rate)
        return drawn[self.split.part_of(drawn) == turn % self.split.parts].tolist()


def poisson_loader(
    loader: DataLoader[Any],
    sample_rate: float | None = None,
    secret: Secret | None = None,
    views: int = 1,
    split: Split | None = None,
) -> DataLoader[Any]:
    """The same loader with Poisson batches at `sample_rate`, by default batch_size/records.

    With a `split` its parts take turns, and the loader tells the optimiser whose turn it is.
    """
    if not isinstance(loader, DataLoader):
        raise GredpError(f"Poisson batches need a torch DataLoader, not a {type(loader).__name__}")
    if isinstance(loader.batch_sampler, CyclicBatchSampler) or (
        split is not None and isinstance(loader.batch_sampler, PoissonBatchSampler)
    ):
        raise GredpError("correlation bands need a data loader that was not made private before")
    if isinstance(loader.batch_sampler, PoissonBatchSampler):
        if loader.batch_sampler.views != views:
            raise GredpError(
                f"the data loader gives {loader.batch_sampler.views} views of a record, not {views}"
            )
        if sample_rate not in (None, loader.batch_sampler.sample_rate):
            raise GredpError(
                f"the data loader draws at rate {loader.batch_sampler.sample_rate:g}, not {sample_rate}"
            )
        return loader
    if isinstance(loader.dataset, IterableDataset):
        raise GredpError(
            "Poisson sampling needs a data set with a length and an index, not an IterableDataset"
        )
    batch_size = loader.batch_size
    if batch_size is None:
        raise GredpError(
            "the data loader must state a batch_size: a batch sampler of its own cannot be accounted for"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise GredpError(
            "the data loader has a DistributedSampler: give one of all records with the whole batch_size; "
            "the processes share each batch by themselves"
        )
    records = len(loader.dataset)  # type: ignore[arg-type]
    if not isinstance(loader.sampler, SequentialSampler | RandomSampler) or len(loader.sampler) != records:
        raise GredpError(
            f"the data loader has a {type(loader.sampler).__name__}, which Poisson batches from all of its "
            f"{records} records would replace: give it torch.utils.data.Subset of the records to train on"
        )
    if records == 0:
        raise GredpError("the data set is empty: there is nothing to train on")
    if records < batch_size:
        raise GredpError(f"the batch size {batch_size} is larger than the data set of {records} records")
    if sample_rate is not None and not 0 < sample_rate <= 1:
        raise GredpError(f"the sampling rate must be above 0 and at most 1, not {sample_rate}")
    rate = batch_size / records if sample_rate is None else sample_rate
    # With a stated rate nothing here may depend on the number of records, the number of steps included.
    steps = len(loader) if sample_rate is None else math.ceil(1 / rate)
    collate = EmptyBatches(loader.dataset, loader.collate_fn or default_collate)
    sampler: PoissonBatchSampler
    if split is not None:
        sampler = CyclicBatchSampler(records, rate, steps, split, loader.generator, secret, views)
    else:
        sampler = PoissonBatchSampler(records, rate, steps, loader.generator, secret, views)
    sampler.expected = batch_size
    return rebuild(loader, DataLoader if split is None else _PhysicalLoader, sampler, collate)


def rebuild(
    loader: DataLoader[Any],
    kind: Callable[..., Any],
    sampler: Sampler[list[int]],
    collate: Callable[..., Any],
) -> Any:
    """A loader over the same data with another batch sampler."""
    return kind(
        loader.dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class EmptyBatches:
    """A collate function that can also collate nothing: tensors of the usual shapes with no records."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __call__(self, batch: list[Any]) -> Any:
        if batch:
            return self.collate(batch)
        return part_of(self.collate([self.dataset[0]]), slice(0))  # for its shapes and types only


def part_of(batch: Any, rows: slice) -> Any:
    """The same structure with these records only; what could hide others is refused, not passed on."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch[rows] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: part_of(value, rows) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        if all(isinstance(item, str | int | float) for item in batch):
            return batch[rows]
        items = [part_of(item, rows) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if batch is None or isinstance(batch, str | int | float):
        return batch
    raise GredpError(
        f"the data loader's batches hold a {type(batch).__name__}, which cannot be cut into records: "
        "collate into tensors, in tuples, lists or dicts"
    )


class _PhysicalLoader(DataLoader[Any]):
    """Yields parts of logical batches; tells the optimiser, with each, whether it is the last, and its turn.

    The word travels with the part itself rather than in a queue of the optimiser's, so that a loop which
    is left early cannot shift the borders of later batches. A part that was not stepped when the next one is
    taken, because it was passed over or fetched ahead, would shift them too: refused.
    """

    optimizer: "PrivateOptimizer"
    max_physical_batch_size: int = sys.maxsize

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.optimizer.begin_logical_batches(in_parts=True)
        words: deque[tuple[bool, int]] = deque()
        sampler = self.batch_sampler
        assert isinstance(sampler, PoissonBatchSampler)
        views = sampler.views
        whole = max(1, self.max_physical_batch_size // views) * views  # the views of a record stay together
        split = _Split(sampler, whole, words)
        begun = self.optimizer.passes
        for batch in rebuild(self, DataLoader, split, self.collate_fn):
            if self.optimizer.passes != begun and self.optimizer.split is None:  # turns tell by themselves
                raise GredpError("another loop over parts of batches began: finish one before the next")
            self.optimizer.expect_part(*words.popleft())
            yield batch

    def __len__(self) -> int:
        sampler = self.batch_sampler
        assert isinstance(sampler, PoissonBatchSampler)
        records = max(1, self.max_physical_batch_size // sampler.views)
        parts = max(1, math.ceil(sampler.records * sampler.sample_rate / records))
        return len(sampler) * parts


class _Split(Sampler[list[int]]):
    def __init__(self, sampler: PoissonBatchSampler, size: int, words: deque[tuple[bool, int]]) -> None:
        self.sampler, self.size, self.words = sampler, size, words

    def __iter__(self) -> Iterator[list[int]]:
        for turn, batch in enumerate(self.sampler, self.sampler.next_turn()):
            parts = [batch[i : i + self.size] for i in range(0, max(len(batch), 1), self.size)]
            for i, part in enumerate(parts):
                self.words.append((i == len(parts) - 1, turn))
                yield part


class BatchMemoryManager:
    """Bounds the inputs of a physical batch: `with BatchMemoryManager(...) as loader:`, then as before.

    Logical batches, their noise and their price stay as they are; `optimizer.step()` only adds up until
    the last part of a logical batch has arrived.
    """

    def __init__(
        self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: "PrivateOptimizer"
    ) -> None:
        if not (max_physical_batch_size >= 1 and float(max_physical_batch_size).is_integer()):
            raise GredpError(
                f"max_physical_batch_size must be a whole number of at least 1, not {max_physical_batch_size}"
            )
        if not isinstance(data_loader.batch_sampler, PoissonBatchSampler):
            raise GredpError("BatchMemoryManager takes the loader that make_private returned")
        self.data_loader = data_loader
        self.max_physical_batch_size = int(max_physical_batch_size)
        self.optimizer = optimizer

    def __enter__(self) -> DataLoader[Any]:
        source = self.data_loader
        loader = rebuild(source, _PhysicalLoader, source.batch_sampler, source.collate_fn)  # type: ignore[arg-type]
        loader.optimizer = self.optimizer
        loader.max_physical_batch_size = self.max_physical_batch_size
        return loader

    def __exit__(self, *exception: object) -> None:
        if self.optimizer.begin_logical_batches() and exception[0] is None:
            warnings.warn("a logical batch was left unfinished; it was not released", stacklevel=2)
