"""Loaders of Poisson batches, whole or in parts that fit into memory."""

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from gredp.errors import GredpError
from gredp.randomness import Secret, Split
from gredp.sampling.draws import HandedOut, Part
from gredp.sampling.samplers import CyclicBatchSampler, PoissonBatchSampler

if TYPE_CHECKING:
    from gredp.optimizer import PrivateOptimizer


def poisson_loader(
    loader: DataLoader[Any],
    sample_rate: float | None = None,
    secret: Secret | None = None,
    views: int = 1,
    split: Split | None = None,
) -> DataLoader[Any]:
    """The same loader with Poisson batches at `sample_rate`, by default batch_size/records.

    With a `split` its parts take turns, and the loader tells the optimizer whose turn it is.
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
    if views > 1:
        refuse_own_collate(loader)
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
    private: PrivateLoader = rebuild(loader, PrivateLoader, sampler, collate)
    private.in_parts = split is not None
    return private


def refuse_own_collate(loader: DataLoader[Any]) -> None:
    """Views of a record are known by their place."""
    if loader.collate_fn is not default_collate:
        raise GredpError(
            "views of a record must stay side by side, and a collate_fn of your own may reorder rows: with "
            "views leave collate_fn to torch, and do its work in the data set or in the model"
        )


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
        #: whether the loader that calls this counts batches as it hands them out
        self.counted = False

    def __call__(self, batch: list[Any]) -> Any:
        if get_worker_info() is not None and not self.counted:
            raise GredpError(
                "another program rebuilt the private data loader with worker processes, which draw ahead "
                "uncounted: use num_workers=0 there, or the loader that make_private returned"
            )
        if batch:
            return self.collate(batch)
        return part_of(self.collate([self.dataset[0]]), slice(0))  # for its shapes and types only


def one_record(loader: DataLoader[Any]) -> Any:
    """The model's input for a batch of one; its shape is wanted, not its values."""
    assert isinstance(loader.collate_fn, EmptyBatches)
    batch = loader.collate_fn.collate([loader.dataset[0]])
    return batch[0] if isinstance(batch, tuple | list) else batch


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


class PrivateLoader(DataLoader[Any]):
    """Hands out Poisson batches, or parts of them, and notes each where optimizers look for it.

    What counts is what reaches the loop: worker processes fetch ahead of it. With `in_parts` every part must
    be stepped before the next one is taken.
    """

    in_parts: bool = False
    max_physical_batch_size: int = sys.maxsize
    #: parts that were drawn in this pass and not handed out yet
    queue: deque[Part]

    @property
    def _index_sampler(self) -> "_Parts":  # where torch's iterators take the records of a batch from
        return _Parts(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        handed = self.sampler_of_records.handed
        with self._by_us():
            batches = super().__iter__()
        return self._hand_out(batches, self.queue, handed, handed.begin(self.in_parts))

    def _hand_out(
        self, batches: Iterator[Any], queue: deque[Part], handed: HandedOut, begun: int
    ) -> Iterator[Any]:
        for batch in batches:
            if self.in_parts and handed.passes != begun:
                raise GredpError("another loop over parts of batches began: finish one before the next")
            handed.add(queue.popleft(), batch)
            yield batch

    @contextmanager
    def _by_us(self) -> Iterator[None]:
        """Worker processes that start within know that their batches are counted as they are handed out."""
        collate = self.collate_fn
        assert isinstance(collate, EmptyBatches)
        collate.counted = True
        try:
            yield
        finally:
            collate.counted = False

    @property
    def sampler_of_records(self) -> PoissonBatchSampler:
        assert isinstance(self.batch_sampler, PoissonBatchSampler)
        return self.batch_sampler

    @property
    def largest_part(self) -> int:
        """Records; the views of one stay together."""
        return max(1, self.max_physical_batch_size // self.sampler_of_records.views)

    def __len__(self) -> int:
        sampler = self.sampler_of_records
        parts = math.ceil(sampler.records * sampler.sample_rate / self.largest_part)
        return len(sampler) * max(1, parts)


class _Parts(Sampler[list[int]]):
    """The inputs of each part of each draw; a new pass begins a new queue of its loader's."""

    def __init__(self, loader: PrivateLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:  # not a generator: the queue is there before the first draw
        self.loader.queue = deque()
        return self._drawn(self.loader.sampler_of_records, self.loader.queue)

    def _drawn(self, sampler: PoissonBatchSampler, queue: deque[Part]) -> Iterator[list[int]]:
        size = self.loader.largest_part
        for draw, drawn in sampler.draws():
            for start in range(0, max(draw.records, 1), size):
                rows = drawn[start : start + size]
                queue.append(Part(draw, len(rows), start + size >= draw.records))
                yield sampler.inputs(rows)

    def __len__(self) -> int:
        return len(self.loader)


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
        parts: PrivateLoader = rebuild(source, PrivateLoader, source.batch_sampler, source.collate_fn)  # type: ignore[arg-type]
        parts.in_parts, parts.max_physical_batch_size = True, self.max_physical_batch_size
        return parts

    def __exit__(self, *exception: object) -> None:
        if self.optimizer.forget() and exception[0] is None:
            warnings.warn("a logical batch was left unfinished; it was not released", stacklevel=2)
