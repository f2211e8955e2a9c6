"""Batches of a fixed size, and records drawn by weights: what is drawn, what it costs, what is refused."""

import math
import warnings
from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from gredp import BatchMemoryManager, GredpError, PrivacyEngine
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry, Ledger
from gredp.sampling import PoissonBatchSampler
from ranks import in_world

DELTA = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False")


def private(count=23, batch=5, engine=None, drop_last=False, z=1.0, quiet=True, **options):
    engine, model = engine or PrivacyEngine(), nn.Linear(1, 1, bias=False)
    data = TensorDataset(torch.arange(float(count))[:, None])
    with warnings.catch_warnings():
        if quiet:
            warnings.filterwarnings("ignore", "poisson_sampling=False")
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(data, batch_size=batch, drop_last=drop_last),
            noise_multiplier=z,
            max_grad_norm=1.0,
            **options,
        )
    return engine, *made


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    return sorted(x.flatten().long().tolist())


def epoch(model, optimizer, loader, stop=None):
    seen = []
    for (x,) in loader:
        seen.append(step(model, optimizer, x))
        if len(seen) == stop:
            break
    return seen


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_record_is_in_one_batch_of_an_epoch_and_orders_differ(drop_last):
    _, *made = private(drop_last=drop_last, poisson_sampling=False)
    passes = [epoch(*made) for _ in range(3)]
    for seen in passes:
        assert [len(batch) for batch in seen] == [5] * 4 + ([] if drop_last else [3])
        whole = sorted(chain(*seen))
        assert whole == list(range(23)) or (drop_last and len(set(whole)) == 20)
    assert passes[0] != passes[1] != passes[2]


def test_an_epoch_costs_one_mechanism_without_amplification():
    """Never less: after each step the record that was drawn most often has as many turns as are counted."""
    engine, model, optimizer, loader = private(poisson_sampling=False, z=2.0)
    drawn = torch.zeros(23, dtype=torch.long)
    for stop in (2, 5, 3, 1, 4, 5):  # passes that are left early
        for batch in epoch(model, optimizer, loader, stop):
            drawn[batch] += 1
        turns = -(-engine.ledger.steps // 5)
        assert int(drawn.max()) == turns
        assert engine.get_epsilon(DELTA) == pytest.approx(epsilon([Entry(2.0, 1.0, turns)], DELTA))
    assert engine.ledger.steps == 20
    assert "blank one record" in str(engine)
    assert "of 5 shuffled batches in turn" in str(engine)


def test_one_record_blanked_moves_one_batch_of_an_epoch_by_the_norm():
    """N: the same orders with and without it, noise off."""
    sums = []
    for length in (0.0, 1e6):
        model = nn.Linear(2, 1, bias=False)
        x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
        x[7] *= length
        engine = PrivacyEngine()
        engine.secret._key = b"k" * 32
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(x), batch_size=4),
            noise_multiplier=0.0,
            max_grad_norm=0.7,
            poisson_sampling=False,
        )
        released = []
        for (batch,) in loader:
            step(model, optimizer, batch)
            released.append(model.weight.grad.clone() * 4)
        sums.append(torch.stack(released))
    moved = (sums[0] - sums[1]).flatten(1).norm(dim=1).sort().values
    assert moved[-1] == pytest.approx(0.7, rel=1e-5)
    assert not moved[:-1].any()


def test_a_resumed_run_goes_on_within_its_epoch(tmp_path):
    engine, *made = private(poisson_sampling=False)
    first = epoch(*made, stop=2)
    engine.save(tmp_path / "run")
    engine.detach()
    again, *made = private(poisson_sampling=False)
    again.load(tmp_path / "run")
    assert sorted(chain(*first, *epoch(*made, stop=3))) == list(range(23))
    assert again.ledger.steps == 5
    again.detach()
    poisson, *_ = private()
    with pytest.raises(GredpError, match="another"):
        poisson.load(tmp_path / "run")


def test_processes_share_a_fixed_batch():
    def seen():
        _, *made = private(poisson_sampling=False)
        return epoch(*made)

    found = in_world(2, seen)
    assert [len(a) + len(b) for a, b in zip(*found)] == [5, 5, 5, 5, 3]
    assert sorted(chain(*found[0], *found[1])) == list(range(23))


def test_parts_of_a_fixed_batch_and_a_batch_out_of_turn():
    engine, model, optimizer, loader = private(poisson_sampling=False)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
        assert sorted(chain(*epoch(model, optimizer, parts))) == list(range(23))
    assert engine.ledger.steps == 5
    with pytest.raises(GredpError, match="fixed batches, step on each batch once"):
        step(model, optimizer, torch.ones(5, 1))
    assert engine.ledger.steps == 5


def test_the_price_is_named_and_a_target_is_met():
    with pytest.warns(UserWarning, match=r"an epoch costs ε = .*, not .* as with Poisson batches"):
        private(poisson_sampling=False, quiet=False)
    engine, model = PrivacyEngine(), nn.Linear(1, 1, bias=False)
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.ones(23, 1)), batch_size=5),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=3,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for _ in range(3):
        epoch(model, optimizer, loader)
    assert 1.99 < engine.get_epsilon(DELTA) <= 2.0
    with pytest.raises(GredpError, match="unit of privacy"):
        private(engine=engine)


WEIGHTS = torch.tensor([4.0] * 10 + [1.0] * 80 + [0.0] * 10)


def test_records_are_drawn_in_proportion_to_their_weights_and_independently():
    sampler = PoissonBatchSampler(100, 0.1, 4000, torch.Generator().manual_seed(0), weights=WEIGHTS)
    assert sampler.turn_rate == pytest.approx(0.1 * 4 / 1.2)
    drawn = torch.zeros(4000, 100, dtype=torch.float64)
    for i, batch in enumerate(sampler):
        drawn[i, batch] = 1
    expected = 0.1 * WEIGHTS.double() / 1.2
    error = (expected * (1 - expected) / 4000).sqrt()
    assert ((drawn.mean(0) - expected).abs() <= 6 * error).all()
    sizes = drawn.sum(1)
    assert float(sizes.var()) == pytest.approx(
        float((expected * (1 - expected)).sum()), rel=6 * math.sqrt(2 / 4000)
    )


def test_weights_are_charged_at_the_largest_probability():
    engine, model, optimizer, loader = private(100, 10, weights=WEIGHTS.tolist())
    epoch(model, optimizer, loader)
    (entry,) = engine.ledger.entries
    assert (entry.sample_rate, entry.steps) == (pytest.approx(1 / 3), 10)
    engine, model = PrivacyEngine(accountant="rdp"), nn.Linear(1, 1)
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.ones(100, 1)), batch_size=10),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=1,
        max_grad_norm=1.0,
        weights=WEIGHTS,
    )
    epoch(model, optimizer, loader)
    assert 1.99 < engine.get_epsilon(DELTA) <= 2.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": [1.0, 2.0]}, "2 weights given for 23 records"),
        ({"weights": [-1.0] + [1.0] * 22}, "0 or more"),
        ({"weights": [math.nan] * 23}, "0 or more"),
        ({"weights": [0.0] * 23}, "not all 0"),
        ({"weights": "heavy"}, "one number for each record"),
        ({"weights": [100.0] + [1.0] * 22}, "probability 4.1: lower the batch size to 1"),
        ({"weights": [1.0] * 23, "sample_rate": 0.1}, "nothing is proven for weights"),
        ({"weights": [1.0] * 23, "poisson_sampling": False}, "hold each once"),
        ({"poisson_sampling": False, "correlation_bands": 2}, "nothing is proven for poisson_sampling=False"),
        ({"poisson_sampling": False, "persons": list(range(23))}, "nothing is proven"),
        ({"poisson_sampling": False, "noise_schedule": [(2, 0.5)]}, "a schedule needs Poisson batches"),
    ],
)
def test_what_is_not_proven_is_refused(options, words):
    with pytest.raises(GredpError, match=words) as error:
        private(**options)
    assert "\n" not in str(error.value)


def test_a_weighted_sampler_is_named():
    data = TensorDataset(torch.ones(8, 1))
    loader = DataLoader(data, batch_size=2, sampler=WeightedRandomSampler(torch.ones(8), 8))
    model = nn.Linear(1, 1)
    with pytest.raises(GredpError, match=r"give make_private its weights=…, which must be public"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_ledger_of_fixed_batches_is_read_again():
    row = Entry(1.0, 1.0, 7, None, 5, "s", "blanked record")
    assert Ledger.from_json(Ledger((row,)).to_json()).entries == (row,)
    assert epsilon([row], DELTA) == epsilon([Entry(1.0, 1.0, 2)], DELTA)
