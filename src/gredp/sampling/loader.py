"""Loaders of Poisson batches, whole or in parts that fit into memory."""

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from gredp.errors import GredpError
from gredp.randomness import Secret, Split
from gredp.sampling.draws import HandedOut, Part
from gredp.sampling.persons import PersonIds, Persons
from gredp.sampling.samplers import PoissonBatchSampler, ShuffledBatchSampler

if TYPE_CHECKING:
    from gredp.optimizer import PrivateOptimizer


def poisson_loader(
    loader: DataLoader[Any],
    sample_rate: float | None = None,
    secret: Secret | None = None,
    views: int = 1,
    split: Split | None = None,
    persons: PersonIds | None = None,
    records_per_person: int | None = None,
    weights: Any = None,
    fixed: bool = False,
) -> "PrivateLoader":
    """The same loader with Poisson batches at `sample_rate`, by default batch_size/records.

    With `weights` records are drawn in proportion to them. With `fixed` batches are shuffled, all of a size.

    With `persons` those are drawn in place of records, and `batch_size` counts them.

    With a `split` its parts take turns, and every batch must be stepped before the next one is taken.
    """
    if not isinstance(loader, DataLoader):
        raise GredpError(f"Poisson batches need a torch DataLoader, not a {type(loader).__name__}")
    if isinstance(loader.batch_sampler, PoissonBatchSampler):
        whose = persons, records_per_person
        return _drawn_again(loader, loader.batch_sampler, sample_rate, views, split, whose, weights, fixed)
    if isinstance(loader.dataset, IterableDataset):
        raise GredpError("Poisson sampling needs a dataset with an index, not an IterableDataset")
    if loader.batch_size is None:
        raise GredpError("the data loader needs a batch_size: its own batch sampler cannot be accounted for")
    batch_size, records = loader.batch_size, len(cast(Sized, loader.dataset))
    _reject_own_order(loader, records)
    if records == 0:
        raise GredpError("the dataset is empty: there is nothing to train on")
    if persons is None and records_per_person is not None:
        raise GredpError("records_per_person goes with persons, which say whose records are whose")
    others = (split, sample_rate, persons)
    if (weights is not None or fixed) and any(other is not None for other in others):
        what = "weights" if weights is not None else "poisson_sampling=False"
        raise GredpError(f"nothing is proven for {what} with sample_rate, persons or correlation bands")
    if weights is not None and fixed:
        raise GredpError(
            "weights change how often Poisson batches draw a record: fixed batches hold each once"
        )
    people = None if persons is None else Persons(persons, records, records_per_person)
    drawn_from, what = (records, "records") if people is None else (len(people), "persons")
    if drawn_from < batch_size:
        raise GredpError(
            f"the batch size {batch_size} is larger than the dataset of {drawn_from} {what}: "
            f"take at most {drawn_from}"
        )
    if sample_rate is not None and not 0 < sample_rate <= 1:
        raise GredpError(f"the sampling rate must be above 0 and at most 1, not {sample_rate}")
    rate = batch_size / drawn_from if sample_rate is None else sample_rate
    # With a stated rate nothing here may depend on the number of records, the number of steps included.
    steps = math.ceil(1 / rate)
    if sample_rate is None:
        steps = drawn_from // batch_size if loader.drop_last else math.ceil(drawn_from / batch_size)
    drawing = loader.generator, secret, views, split, people, weights
    sampler = PoissonBatchSampler(drawn_from, rate, steps, *drawing)
    if fixed:
        sampler = ShuffledBatchSampler(records, batch_size, steps, secret or Secret(), views)
    if sampler.views > 1:
        reject_own_collate(loader)
    sampler.expected = batch_size
    collate = EmptyBatches(loader.dataset, loader.collate_fn or default_collate)
    private = PrivateLoader.like(loader, sampler, collate)
    private.in_parts = sampler.split is not None
    return private


def _drawn_again(
    loader: DataLoader[Any],
    known: PoissonBatchSampler,
    sample_rate: float | None,
    views: int,
    split: Split | None,
    whose: tuple[PersonIds | None, int | None],
    weights: Any,
    fixed: bool,
) -> "PrivateLoader":
    """A loader that was made private before, if it draws as is asked now."""
    if split is not None or known.split is not None:
        raise GredpError("correlation bands need a data loader that was not made private before")
    if weights is not None or fixed != isinstance(known, ShuffledBatchSampler):
        raise GredpError("weights and fixed batches need a data loader that was not made private before")
    if any(given is not None for given in whose):
        raise GredpError("persons need a data loader that was not made private before")
    if known.views_of_a_record != views:
        raise GredpError(f"the data loader gives {known.views_of_a_record} views of a record, not {views}")
    if sample_rate not in (None, known.sample_rate):
        raise GredpError(f"the data loader draws at rate {known.sample_rate:g}, not {sample_rate}")
    return loader if isinstance(loader, PrivateLoader) else PrivateLoader.like(loader, known)


def _reject_own_order(loader: DataLoader[Any], records: int) -> None:
    """Of a sampler that private batches would replace, unless it gives every record once."""
    order = cast(Sized, loader.sampler)
    kind = type(order)
    if issubclass(kind, DistributedSampler):
        raise GredpError("give all records without a DistributedSampler: processes share batches themselves")
    if issubclass(kind, WeightedRandomSampler):
        raise GredpError("WeightedRandomSampler: give make_private its weights=…, which must be public")
    if not issubclass(kind, SequentialSampler | RandomSampler) or len(order) != records:
        what = f"Poisson batches from all {records} records would replace the {kind.__name__}"
        raise GredpError(f"{what}: to train on some, use torch.utils.data.Subset")


def reject_own_collate(loader: DataLoader[Any]) -> None:
    """Views of a record, and records of a person, are known by their place."""
    if loader.collate_fn is not default_collate:
        raise GredpError(
            "with views or persons, remove collate_fn, which may not keep views of a record, or records of a "
            "person, side by side"
        )


class EmptyBatches:
    """A collate function that can also collate nothing: tensors of the usual shapes with no records."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        #: dimension of the records in tensors that have more than one
        self.axis = 0
        #: whether the loader that calls this counts batches as it hands them out
        self.counted = False

    def __call__(self, batch: list[Any]) -> Any:
        if get_worker_info() is not None and not self.counted:
            raise GredpError("workers would prefetch batches uncounted: use make_private's own loader")
        if batch:
            return self.collate(batch)
        return part_of(self.collate([self.dataset[0]]), slice(0), self.axis)  # for its shapes and types only


def part_of(batch: Any, rows: slice, axis: int = 0) -> Any:
    """The same structure with these records only; what could hide others is rejected."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch[:, rows] if axis and batch.ndim > 1 else batch[rows] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: part_of(value, rows, axis) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        if all(isinstance(item, str | int | float) for item in batch):
            return batch[rows]
        items = [part_of(item, rows, axis) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if batch is None or isinstance(batch, str | int | float):
        return batch
    raise GredpError(f"a {type(batch).__name__} in a batch cannot be cut into records: collate into tensors")


class PrivateLoader(DataLoader[Any]):
    """Hands out Poisson batches, or parts of them, and notes each where optimizers look for it.

    What counts is what reaches the loop: worker processes prefetch. With `in_parts` every part must
    be stepped before the next one is taken.
    """

    in_parts: bool = False
    max_physical_batch_size: int = sys.maxsize
    #: parts that were drawn in this pass and not handed out yet
    queue: deque[Part]

    @property
    def sample_rate(self) -> float:
        """The probability of each record, or person, to be in a batch."""
        return float(self.poisson.sample_rate)

    @classmethod
    def like(
        cls, loader: DataLoader[Any], sampler: PoissonBatchSampler, collate: EmptyBatches | None = None
    ) -> "PrivateLoader":
        """A loader over the same data, with the same workers and memory."""
        names = "num_workers pin_memory timeout worker_init_fn multiprocessing_context generator"
        names += " prefetch_factor persistent_workers"
        kept = {name: getattr(loader, name) for name in names.split()}
        return cls(loader.dataset, batch_sampler=sampler, collate_fn=collate or loader.collate_fn, **kept)

    @property
    def _index_sampler(self) -> "_Parts":  # where torch's iterators take the records of a batch from
        return _Parts(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch annotates its own iterator class
        handed, collate = self.poisson.handed, self.collate_fn
        assert isinstance(collate, EmptyBatches)
        collate.counted = True  # worker processes that start here have their batches counted by us
        try:
            batches = super().__iter__()
        finally:
            collate.counted = False
        return self._hand_out(batches, self.queue, handed, handed.begin(self.in_parts))

    def _hand_out(
        self, batches: Iterator[Any], queue: deque[Part], handed: HandedOut, begun: int
    ) -> Iterator[Any]:
        for batch in batches:
            if self.in_parts and handed.passes != begun:
                raise GredpError("another loop over parts of batches began: finish one before the next")
            handed.add(queue.popleft(), batch)
            yield batch

    @property
    def poisson(self) -> PoissonBatchSampler:
        """What draws the batches."""
        assert isinstance(self.batch_sampler, PoissonBatchSampler)
        return self.batch_sampler

    def one_record(self) -> Any:
        """The model's input for a batch of one; its shape is wanted, not its values."""
        assert isinstance(self.collate_fn, EmptyBatches)
        batch = self.collate_fn.collate([self.dataset[0]])
        return batch[0] if isinstance(batch, tuple | list) else batch

    @property
    def largest_part(self) -> int:
        """Records or persons; the inputs of one stay together."""
        return max(1, self.max_physical_batch_size // self.poisson.views)

    def __len__(self) -> int:
        sampler = self.poisson
        parts = math.ceil(sampler.records * sampler.sample_rate / self.largest_part)
        return len(sampler) * max(1, parts)


class _Parts(Sampler[list[int]]):
    """The inputs of each part of each draw; a new pass begins a new queue of its loader's."""

    def __init__(self, loader: PrivateLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:  # not a generator: the queue is there before the first draw
        self.loader.queue = deque()
        return self._drawn(self.loader.poisson, self.loader.queue)

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

    | argument | default | meaning |
    |---|---|---|
    | `data_loader` | | the loader that `make_private` returned |
    | `max_physical_batch_size` | | inputs in memory at once; those of a record or person stay together |
    | `optimizer` | | the optimizer that `make_private` returned |

    >>> import torch
    >>> from gredp import PrivacyEngine
    >>> model, data = torch.nn.Linear(3, 1), torch.utils.data.TensorDataset(torch.ones(40, 3))
    >>> model, optimizer, loader = PrivacyEngine().make_private(
    ...     module=model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data_loader=DataLoader(data, batch_size=40),
    ...     noise_multiplier=1.0,
    ...     max_grad_norm=1.0,
    ... )
    >>> with BatchMemoryManager(
    ...     data_loader=loader, max_physical_batch_size=16, optimizer=optimizer
    ... ) as parts:
    ...     for (x,) in parts:
    ...         model(x).mean().backward()
    ...         optimizer.step()
    ...         print(len(x), optimizer.ledger.steps)
    16 0
    16 0
    8 1
    """

    def __init__(
        self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: "PrivateOptimizer"
    ) -> None:
        if not (max_physical_batch_size >= 1 and float(max_physical_batch_size).is_integer()):
            size = max_physical_batch_size
            raise GredpError(f"max_physical_batch_size must be a positive whole number, not {size}")
        if not isinstance(data_loader.batch_sampler, PoissonBatchSampler):
            raise GredpError("BatchMemoryManager takes the loader that make_private returned")
        self.optimizer, self.parts = optimizer, PrivateLoader.like(data_loader, data_loader.batch_sampler)
        self.parts.in_parts, self.parts.max_physical_batch_size = True, int(max_physical_batch_size)

    def __enter__(self) -> PrivateLoader:
        return self.parts

    def __exit__(self, *exception: object) -> None:
        if self.optimizer.forget() and exception[0] is None:
            warnings.warn("a logical batch was left unfinished; it was not released", stacklevel=2)
