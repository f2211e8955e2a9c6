"""Every step has a draw of its own, no record is in a sum twice, and no two draws of an engine are alike."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from gredp import BatchMemoryManager, PrivacyEngine
from gredp.errors import GredpError
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry
from gredp.randomness import Secret

RECORDS = TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
RATE, Z, SEED = 0.2, 1.0, 3


def private(engine=None, noise_multiplier=Z, batch_size=8, **options):
    """By default from a seed: batches that follow one another have different sizes then."""
    engine, model = engine or PrivacyEngine(secret=Secret(SEED)), nn.Linear(5, 3)
    loader = {k: options.pop(k) for k in ("sampler", "generator", "num_workers", "dataset") if k in options}
    settings = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(loader.pop("dataset", RECORDS), batch_size=batch_size, **loader),
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": 1.0,
    }
    return engine, *engine.make_private(**settings | options)


def backward(model, x, y):
    F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_step_for_each_batch_is_charged_at_the_loaders_rate(workers):
    engine, model, optimizer, loader = private(num_workers=workers)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()
    assert engine.ledger.entries == (Entry(Z, RATE, 10, Z),)


def test_batches_may_be_fetched_ahead_or_left_out():
    engine, model, optimizer, loader = private()
    fetched = list(loader)
    for x, y in fetched[1:]:
        backward(model, x, y)
        optimizer.step()
    assert engine.ledger.entries == (Entry(Z, RATE, 4, Z),)


def test_a_second_step_on_a_batch_is_charged_without_sampling_and_says_so():
    engine, model, optimizer, loader = private()
    x, y = next(iter(loader))
    for again in (False, True, True):
        backward(model, x, y)
        if again:
            with pytest.warns(UserWarning, match="charged without amplification by sampling, at rate 1"):
                optimizer.step()
        else:
            optimizer.step()
    assert engine.ledger.entries == (Entry(Z, RATE, 1, Z), Entry(Z, 1.0, 2, Z))
    # all three saw the same draw: at least as much as one release of it at z/√3 spends
    assert engine.get_epsilon(1e-5) >= epsilon([Entry(Z / 3**0.5, RATE, 1)], 1e-5)


def rates(engine) -> list[float]:
    return [entry.sample_rate for entry in engine.ledger.entries for _ in range(entry.steps)]


@pytest.mark.filterwarnings("ignore:a second step on a batch")
def test_batches_left_out_or_fetched_ahead_do_not_pay_for_second_steps():
    engine, model, optimizer, loader = private()
    for number, (x, y) in enumerate(loader):
        for _ in range(2 * (number % 2)):
            backward(model, x, y)
            optimizer.step()
    assert rates(engine) == [RATE, 1.0] * 2
    engine, model, optimizer, loader = private(noise_multiplier=2.0)
    fetched = list(loader)
    for _ in range(5):
        backward(model, *fetched[0])
        optimizer.step()
    others = {len(x) for x, _ in fetched[1:]}
    assert rates(engine)[0] == RATE
    assert set(rates(engine)[1:]) == {1.0} or len(fetched[0][0]) in others


@pytest.mark.filterwarnings("ignore:a second step on a batch")
def test_two_models_on_one_draw_pay_for_it_as_two_steps_on_it():
    engine, first, first_optimizer, loader = private()
    _, second, second_optimizer, loader = private(engine, data_loader=loader)
    for x, y in loader:
        for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
            backward(model, x, y)
            optimizer.step()
    assert rates(engine) == [RATE, 1.0] * 5


def test_an_endless_loop_that_fetches_one_ahead_is_charged_as_any_other():
    engine, model, optimizer, loader = private()

    def endless():
        while True:
            yield from loader

    batches = endless()
    batch = next(batches)
    for _ in range(13):
        ahead = next(batches)
        backward(model, *batch)
        optimizer.step()
        batch = ahead
    assert rates(engine) == [RATE] * 13


def test_loaders_that_others_build_around_the_sampler_are_known_too():
    """As Accelerate does: it keeps the sampler, and neither the loader nor its iterator."""
    engine, model, optimizer, loader = private()
    rebuilt = DataLoader(RECORDS, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    next(iter(loader))
    for x, y in rebuilt:
        backward(model, x, y)
        optimizer.step()
    backward(model, x, y)
    with pytest.warns(UserWarning, match="at rate 1"):
        optimizer.step()
    assert rates(engine) == [RATE] * 5 + [1.0]


@pytest.mark.parametrize("rows", [slice(0, -1), slice(None), slice(0, 3)])
def test_inputs_that_are_not_the_drawn_records_are_refused_whatever_their_number(rows):
    """Windows of a record, public records, a filter: no number but the records' own."""
    engine, model, optimizer, loader = private(batch_size=20)
    x, y = next(iter(loader))
    more = torch.randn(4, 5)[rows]
    for inputs in (torch.cat([x, more]), x[:-1]):
        backward(model, inputs, torch.zeros(len(inputs), dtype=torch.long))
        with pytest.raises(GredpError, match=f"run on {len(inputs)} inputs, but {len(x)} records"):
            optimizer.step()
    assert engine.ledger.steps == 0
    backward(model, x, y)
    optimizer.step()
    assert rates(engine) == [0.5]


def test_a_private_optimizer_is_not_copied():
    _, model, optimizer, loader = private()
    with pytest.raises(GredpError, match="neither copied nor pickled"):
        copy.deepcopy(optimizer)
    backward(model, *next(iter(loader)))
    optimizer.step()


def test_loops_over_parts_do_not_run_side_by_side():
    _, model, optimizer, loader = private(batch_size=40, noise_multiplier=0.0)
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=15, optimizer=optimizer)
    parts = manager.__enter__()
    older = iter(parts)
    backward(model, *next(older))
    optimizer.step()
    next(iter(parts))
    with pytest.raises(GredpError, match="another loop over parts of batches began"):
        next(older)
    with pytest.warns(UserWarning, match="left unfinished"):
        manager.__exit__(None, None, None)


def test_the_divisor_of_a_stated_rate_stays_what_it_was():
    loader = private(sample_rate=0.21)[3]
    assert private(data_loader=loader)[2].expected_batch_size == 8


def test_a_seeded_loader_does_not_go_on(tmp_path):
    engine = private(generator=torch.Generator().manual_seed(1))[0]
    engine.save(tmp_path / "run")
    engine.detach()
    with pytest.raises(GredpError, match="without a generator"):
        private(generator=torch.Generator().manual_seed(1))[0].load(tmp_path / "run")


def test_a_wrong_norm_leaves_the_model_as_it_was():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GredpError, match="positive number, not -1"):
        private(module=model, optimizer=optimizer, max_grad_norm=-1.0)
    private(module=model, optimizer=optimizer)


def test_the_steps_of_an_earlier_pass_leave_none_over():
    engine, model, optimizer, loader = private()
    for _ in loader:
        pass  # looked at, not trained on
    x, y = next(iter(loader))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backward(model, x, y)
            optimizer.step()
    assert [entry.sample_rate for entry in engine.ledger.entries] == [RATE, 1.0]


def test_batches_of_the_loader_are_not_added_up():
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    optimizer.signal_skip_step()
    backward(model, *next(batches))
    optimizer.step()
    backward(model, *next(batches))
    with pytest.raises(GredpError, match=r"more than one draw.* larger batch_size"):
        optimizer.step()
    assert engine.ledger.steps == 0
    backward(model, *next(batches))  # the sum is forgotten, and training can go on
    optimizer.signal_skip_step(False)
    optimizer.step()
    assert engine.ledger.entries == (Entry(Z, RATE, 1, Z),)


def test_nor_are_they_when_they_were_fetched_together():
    _, model, optimizer, loader = private()
    for number, batch in enumerate(list(loader)[:3]):
        optimizer.signal_skip_step(number < 2)
        backward(model, *batch)
        if number:
            with pytest.raises(GredpError, match="inputs are of more than one draw"):
                optimizer.step()
            break
        optimizer.step()


def test_parts_of_one_batch_are_added_up_by_hand():
    engine, model, optimizer, loader = private(noise_multiplier=0.0, batch_size=20)
    x, y = next(iter(loader))
    for last, rows in ((False, slice(0, 4)), (True, slice(4, None))):
        optimizer.signal_skip_step(not last)
        backward(model, x[rows], y[rows])
        optimizer.step()
    assert engine.ledger.steps == 1


def test_a_part_is_not_stepped_with_twice():
    engine, model, optimizer, loader = private(batch_size=40, noise_multiplier=0.0)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=15, optimizer=optimizer) as parts:
        for x, y in parts:
            backward(model, x, y)
            optimizer.step()
            if not engine.ledger.steps:
                backward(model, x, y)
                with pytest.raises(GredpError, match="part of a batch was stepped on already"):
                    optimizer.step()
                optimizer.zero_grad()
    assert engine.ledger.steps == 1


@pytest.mark.parametrize("in_parts", [False, True])
def test_more_inputs_than_records_are_refused(in_parts):
    engine, model, optimizer, loader = private(batch_size=40)
    if in_parts:
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=40, optimizer=optimizer)
        loader = manager.__enter__()
    x, y = next(iter(loader))
    backward(model, torch.cat([x, x]), torch.cat([y, y]))
    with pytest.raises(GredpError, match=f"run on {2 * len(x)} inputs, but {len(x)} records were drawn"):
        optimizer.step()
    assert engine.ledger.steps == 0


@pytest.mark.parametrize("where", ["accumulate", "charge", "release"])
def test_an_interrupted_step_leaves_nothing_in_the_sum(monkeypatch, where):
    engine, model, optimizer, loader = private(batch_size=40, noise_multiplier=0.0)
    owner = engine.ledger if where == "charge" else optimizer.private_step

    def interrupted(*arguments, **settings):
        if where == "accumulate":
            right(*arguments, **settings)
        raise KeyboardInterrupt

    right = getattr(owner, where)
    for _ in range(3):
        x, y = next(iter(loader))
        backward(model, x, y)
        with monkeypatch.context() as patch:
            patch.setattr(owner, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
    assert not optimizer.private_step.accumulated
    x, y = next(iter(loader))
    backward(model, 1e6 * x, y)
    optimizer.step()
    moved = torch.cat([p.grad.flatten() for p in model.parameters()]).norm() * 40
    assert moved <= 40 * (1 + 1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_workers_fetched_ahead_do_not_pay_for_second_steps(workers):
    """Whether inputs are known by memory or not; all draws are of one size, so that any could pay for any."""
    data, rate = TensorDataset(torch.randn(8, 5), torch.randint(0, 3, (8,))), 0.999999
    for prepared in (lambda x: x, lambda x: x * 2):
        model = nn.Linear(5, 3)
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(
                data, batch_size=8, num_workers=workers, prefetch_factor=4 if workers else None
            ),
            noise_multiplier=3.0,
            max_grad_norm=1.0,
            sample_rate=rate,
        )
        for x, y in loader:
            for _ in range(8):
                backward(model, prepared(x), y)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    optimizer.step()
        assert rates(engine) == ([rate] + [1.0] * 7) * 2


def test_an_old_batch_is_known_by_its_memory_even_if_a_batch_of_its_size_was_left_out():
    engine, model, optimizer, loader = private(sample_rate=0.999999, batch_size=40)  # all 40 records
    x, y = [*loader, *loader][0]
    for _ in range(2):
        backward(model, x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    assert rates(engine) == [0.999999, 1.0]


def test_draws_that_add_up_to_the_size_of_another_are_refused():
    third = 0
    for seed in range(60):
        engine, model, optimizer, loader = private(PrivacyEngine(secret=Secret(seed)), batch_size=4)
        batches = list(loader)
        sizes = [len(x) for x, _ in batches]
        third += sizes[0] + sizes[1] in sizes[2:]
        optimizer.signal_skip_step()
        backward(model, *batches[0])
        optimizer.step()
        optimizer.signal_skip_step(False)
        backward(model, *batches[1])
        with pytest.raises(GredpError, match="more than one draw"):
            optimizer.step()
        assert not engine.ledger.steps
    assert third  # among these were such


def test_workers_of_a_loader_that_another_program_built_are_refused():
    """They would draw ahead of what the loop is handed."""
    _, _, _, loader = private(num_workers=1)
    rebuilt = DataLoader(
        RECORDS, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, num_workers=1
    )
    with pytest.raises(GredpError, match="prefetch batches uncounted"):
        next(iter(rebuilt))
    assert len(list(loader)) == 5


def test_workers_that_persist_hand_out_every_pass():
    engine, model = PrivacyEngine(), nn.Linear(5, 3)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(RECORDS, batch_size=8, num_workers=1, persistent_workers=True),
        noise_multiplier=Z,
        max_grad_norm=1.0,
    )
    for _ in range(2):
        for x, y in loader:
            backward(model, x, y)
            optimizer.step()
    assert rates(engine) == [RATE] * 10


def test_views_and_a_collate_function_of_ones_own_are_refused():
    """Rows that it reorders would be folded into records that they are not of."""
    data = DataLoader(RECORDS, batch_size=8, collate_fn=lambda rows: default_collate(rows[::2] + rows[1::2]))
    with pytest.raises(GredpError, match=r"remove collate_fn.* side by side"):
        private(data_loader=data, views=2)


def test_two_models_of_one_engine_draw_different_batches():
    """Also under one secret: the same draw would compose to more than two draws do."""
    engine = PrivacyEngine(secret=Secret(3))
    draws = []
    for _ in range(2):
        loader = private(engine)[3]
        draws.append([loader.batch_sampler.draw() for _ in range(5)])
        engine.detach()
    assert draws[0] != draws[1]
    assert sum(first == second for first, second in zip(*draws)) <= 1


def test_a_sampler_that_would_be_replaced_is_refused():
    with pytest.raises(GredpError, match=r"40 records .* SubsetRandomSampler: .* torch.utils.data.Subset"):
        private(sampler=SubsetRandomSampler(range(20)))
    with pytest.raises(GredpError, match="RandomSampler"):
        private(sampler=RandomSampler(RECORDS, num_samples=20))
    loader = private(dataset=Subset(RECORDS, range(20)))[3]
    assert loader.batch_sampler.records == 20


def test_a_private_loader_keeps_its_rate():
    loader = private()[3]
    with pytest.raises(GredpError, match=r"draws at rate 0\.2, not 0\.5"):
        private(data_loader=loader, sample_rate=0.5)
    assert private(data_loader=loader)[3].batch_sampler is loader.batch_sampler


def test_secure_mode_refuses_a_seeded_loader_and_others_show_it():
    seeded = torch.Generator().manual_seed(1)
    with pytest.raises(GredpError, match="remove the generators"):
        private(PrivacyEngine(secure_mode=True), generator=seeded)
    engine = private(PrivacyEngine(), generator=seeded)[0]
    assert "INSECURE" in str(engine)
    assert "INSECURE" not in str(private(PrivacyEngine())[0])
