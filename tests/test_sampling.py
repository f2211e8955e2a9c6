"""Poisson draws, and that splitting them changes nothing."""

import math
from collections import UserDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gredp import BatchMemoryManager, GredpError
from gredp.sampling import EmptyBatches, PoissonBatchSampler, poisson_loader
from worlds import flat, make_private, one_step, records, small_model


def draws(records: int, rate: float, steps: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return list(PoissonBatchSampler(records, rate, steps, generator))


def test_batch_sizes_vary_as_independent_draws_do():
    """A shuffled epoch, accounted as Poisson, would have batches of one size."""
    n, q = 1000, 0.05
    sizes = torch.tensor([len(batch) for batch in draws(n, q, 1000)], dtype=torch.float64)
    assert abs(float(sizes.mean()) - n * q) <= 6 * math.sqrt(n * q * (1 - q) / 1000)
    assert abs(float(sizes.var()) / (n * q * (1 - q)) - 1) <= 0.27


def test_records_come_back_within_an_epoch():
    """Within 1/q steps a share of 1 − 2/e ≈ 0.26 is drawn twice or more; shuffling never does that."""
    n, q = 1000, 0.05
    counts = torch.zeros(n)
    for batch in draws(n, q, 20):
        counts[batch] += 1
    share = float((counts >= 2).float().mean())
    p = 1 - (1 - q) ** 20 - 20 * q * (1 - q) ** 19
    assert abs(share - p) <= 6 * math.sqrt(p * (1 - p) / n)


def test_small_rates_are_met_exactly():
    """Uniforms of 24 bits cannot be below 2⁻⁵⁰ but by being 0, once in 2²⁴ draws; those of 53 bits can."""
    assert not any(draws(2**22, 2.0**-50, 16))  # 24 bits would draw four on average
    count = sum(len(batch) for batch in draws(1_000_000, 1e-4, 20))
    assert abs(count - 2000) <= 6 * math.sqrt(2000)


def test_draws_do_not_follow_the_global_seed():
    def once() -> list[list[int]]:
        torch.manual_seed(0)
        return list(PoissonBatchSampler(100, 0.5, 3))

    assert once() != once()


@pytest.mark.fault("small data")
def test_empty_draws_are_executed_charged_and_noised():
    """q = 1e-6: every batch is empty, and every step still happens."""
    x, y = records(20)
    model, optimizer, loader, engine = make_private(
        small_model(), (x, y), noise_multiplier=1.0, batch_size=4, sample_rate=1e-6
    )
    seen = []
    for _, (data, label) in zip(range(10), loader):
        assert data.shape == (0, 1, 5, 5)
        seen.append(flat(one_step(model, optimizer, data, label)))
    assert engine.ledger.steps == 10
    assert all(float(s.std()) > 0.5 for s in seen)
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.fault("small data")
def test_batches_of_one_train():
    """One record an epoch's step, and at times none or two."""
    model, optimizer, loader, engine = make_private(
        small_model(), records(5), noise_multiplier=1.0, batch_size=1, sample_rate=None, lr=0.1
    )
    for x, y in loader:
        one_step(model, optimizer, x, y)
    assert engine.ledger.steps == 5
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_loader_keeps_length_batch_and_dataset():
    data = TensorDataset(*records(50))
    loader = poisson_loader(DataLoader(data, batch_size=8))
    assert len(loader) == 7
    assert loader.dataset is data
    assert loader.batch_sampler.sample_rate == 8 / 50
    assert poisson_loader(loader) is loader


def test_loader_of_workers_yields_the_same_draws():
    data = TensorDataset(*records(40))
    sizes = []
    for workers in (0, 1):
        generator = torch.Generator().manual_seed(3)
        loader = poisson_loader(DataLoader(data, batch_size=8, generator=generator, num_workers=workers))
        loader.batch_sampler.generator = torch.Generator().manual_seed(11)
        sizes.append([len(x) for x, _ in loader])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 100])
def test_result_does_not_depend_on_the_physical_batch(size):
    """Gradient accumulation neither clips micro-batches nor adds noise to each of them."""
    x, y = records(16)

    def run(physical: int | None) -> tuple[torch.Tensor, int]:
        model, optimizer, loader, engine = make_private(small_model(), (x, y), noise_multiplier=0.7, lr=0.5)
        if physical is None:
            one_step(model, optimizer, x, y)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            ) as parts:
                for a, b in parts:
                    assert len(a) <= physical
                    one_step_part(model, optimizer, a, b)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), engine.ledger.steps

    expected, steps = run(None)
    got, got_steps = run(size)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert steps == got_steps == 1


def one_step_part(model, optimizer, x, y) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_loop_left_early_does_not_shift_later_batches():
    """The unfinished logical batch is dropped with a warning; the next one is whole and charged once."""
    x, y = records(16)
    model, optimizer, loader, engine = make_private(small_model(), (x, y), noise_multiplier=1.0)
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer)

    def leave_early() -> None:
        with manager as parts:
            for a, b in parts:
                one_step_part(model, optimizer, a, b)
                break

    with pytest.warns(UserWarning, match="left unfinished"):
        leave_early()
    assert engine.ledger.steps == 0
    with manager as parts:
        assert len(parts) == 4
        for a, b in parts:
            one_step_part(model, optimizer, a, b)
    assert engine.ledger.steps == 1


@pytest.mark.fault("small data")
def test_manager_passes_empty_logical_batches_on():
    x, y = records(20)
    model, optimizer, loader, engine = make_private(
        small_model(), (x, y), noise_multiplier=1.0, batch_size=4, sample_rate=1e-9
    )
    loader.batch_sampler.steps = 3
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
        for a, b in parts:
            one_step_part(model, optimizer, a, b)
    assert engine.ledger.steps == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.fault("small data")
@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), "IterableDataset"),
        (lambda: DataLoader(TensorDataset(torch.zeros(3)), batch_size=4), "batch size 4 .* 3 records"),
        (lambda: DataLoader(TensorDataset(torch.zeros(0)), batch_size=4), "empty"),
        (lambda: DataLoader(TensorDataset(torch.zeros(3)), batch_size=None), "batch_size"),
    ],
)
def test_loaders_that_cannot_be_accounted_for_are_refused(loader, words):
    with pytest.raises(GredpError, match=words):
        poisson_loader(loader())


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan])
def test_wrong_rates_are_refused(rate):
    with pytest.raises(GredpError, match="sampling rate"):
        poisson_loader(DataLoader(TensorDataset(torch.zeros(9)), batch_size=4), rate)
    with pytest.raises(GredpError, match="sampling rate"):
        PoissonBatchSampler(10, rate, 1)


def test_manager_refuses_a_loader_of_its_own_making():
    x, y = records(8)
    _, optimizer, loader, _ = make_private(small_model(), (x, y))
    with pytest.raises(GredpError, match="make_private returned"):
        BatchMemoryManager(
            data_loader=DataLoader(TensorDataset(x, y), batch_size=2),
            max_physical_batch_size=2,
            optimizer=optimizer,
        )
    with pytest.raises(GredpError, match="positive whole number, not 0"):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=0, optimizer=optimizer)


def test_an_empty_batch_holds_no_record_whatever_it_is_collated_into():
    """A container that torch does not look into, as those of tokenisers, must not bring record 0 along."""
    pair = namedtuple("pair", "x, y")
    one = torch.ones(1, 3)

    def empty(batch):
        return EmptyBatches([None], lambda rows: batch)([])

    assert empty(UserDict(ids=one, more=UserDict(mask=one)))["more"]["mask"].shape == (0, 3)
    assert empty(pair(one, [one, np.ones((1, 2))])).y[1].shape == (0, 2)
    assert empty((one, ["name of record 0"], [7], 3))[1:] == ([], [], 3)
    with pytest.raises(GredpError, match="a SimpleNamespace in a batch"):
        empty({"x": SimpleNamespace(x=one)})


def test_parts_that_are_passed_over_or_read_ahead_are_refused():
    """Two logical batches would be noised as one, in which a record can count twice."""
    x, y = records(12)
    model, optimizer, loader, _ = make_private(small_model(), (x, y))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as parts:
        ahead = iter(parts)
        next(ahead)
        with pytest.raises(GredpError, match=r"taken before optimizer.step\(\) was called"):
            next(ahead)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as parts:
        for a, b in parts:  # left behind by the refusal: nothing
            one_step(model, optimizer, a, b)
