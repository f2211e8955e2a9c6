"""Parts of the records that take turns: who may be drawn when, over loops, processes and restarts."""

import math
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import BatchMemoryManager, GredpError, PrivacyEngine
from gredp.distributed import rank
from gredp.privacy import ledger
from gredp.privacy.certificate import Certificate, Release
from gredp.randomness import Secret, Split
from gredp.sampling import PoissonBatchSampler
from oracles import band_matrix
from ranks import in_world
from worlds import MECHANISMS

BANDS, RATE, COUNT = 4, 0.1, 200


def world(secret=None, bands=BANDS, **options):
    """A model whose records are their own numbers."""
    engine = PrivacyEngine(secret=secret, accountant="rdp")
    data = TensorDataset(torch.arange(float(COUNT))[:, None])
    made = _private(engine, DataLoader(data, batch_size=int(RATE * COUNT)), bands, **options)
    return *made, engine


def _private(engine, data, bands=BANDS, **options):
    model = nn.Linear(1, 4000, bias=False)
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        correlation_bands=bands,
        **options,
    )


def step(model, optimizer, x) -> list[int]:
    """One step without gradient; the numbers of its records."""
    optimizer.zero_grad()
    (model(x).sum() * 0).backward()
    optimizer.step()
    return x.flatten().long().tolist()


def train(model, optimizer, loader, steps: int) -> list[list[int]]:
    seen: list[list[int]] = []
    while len(seen) < steps:
        for (x,) in loader:
            seen.append(step(model, optimizer, x))
            if len(seen) == steps:
                break
    return seen


def assert_turns_are_apart(seen: list[list[int]], bands: int = BANDS) -> None:
    last: dict[int, int] = {}
    assert sum(map(len, seen)) > 0
    for t, batch in enumerate(seen):
        for record in batch:
            assert t - last.get(record, -bands) >= bands, f"record {record} at {last[record]} and {t}"
            last[record] = t


def test_a_record_takes_part_in_steps_a_whole_cycle_apart():
    """Over loops that are left early, and whatever the length of an epoch."""
    model, optimizer, loader, engine = world()
    seen = train(model, optimizer, loader, 7) + train(model, optimizer, loader, 26)
    assert_turns_are_apart(seen)
    assert [e.steps for e in ledger.mechanisms(engine.ledger.entries)] == [9]


def test_the_ledger_holds_the_rate_at_which_a_part_is_drawn_from():
    """Every record of the part whose turn it is, with probability b·q: six standard errors."""
    model, optimizer, loader, engine = world()
    steps = 200
    drawn = sum(map(len, train(model, optimizer, loader, steps)))
    (entry,) = engine.ledger.entries
    chances = steps * COUNT / BANDS  # each record is asked once a cycle
    p = entry.sample_rate
    assert (entry.bands, entry.steps) == (BANDS, steps)
    assert abs(drawn - chances * p) <= 6 * math.sqrt(chances * p * (1 - p))
    assert optimizer.expected_batch_size == 20


def test_parts_are_even_independent_and_hidden_without_the_key():
    n, parts = 60_000, 6
    numbers = torch.arange(n)
    one, other = (Split(bytes([k]) * 32, parts).part_of(numbers) for k in (1, 2))
    for found in (one, other, parts * one + other):
        counts = torch.bincount(found).double()
        expected = n / len(counts)
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic <= len(counts) - 1 + 6 * math.sqrt(2 * len(counts))
    neighbors = parts * one[:-1] + one[1:]  # of consecutive records
    counts = torch.bincount(neighbors).double()
    assert float(((counts - n / 36) ** 2 / (n / 36)).sum()) <= 35 + 6 * math.sqrt(70)
    assert torch.equal(one[[5, 17, 3]], Split(bytes([1]) * 32, parts).part_of(torch.tensor([5, 17, 3])))


def test_splits_have_names_that_tell_them_apart_and_not_their_keys():
    split = Split(bytes(range(32)), 4)
    assert split.name == Split(bytes(range(32)), 4).name != Split(bytes(32), 4).name
    assert split.key.hex() not in repr(split) + split.name
    _, first, _, _ = world()
    _, second, _, _ = world()
    assert first.split.name != second.split.name


def test_a_rate_of_one_takes_the_whole_part():
    sampler = PoissonBatchSampler(50, 0.25, 4, split=Split(bytes(32), 4))
    batches = list(sampler)
    assert sorted(record for batch in batches for record in batch) == list(range(50))


@pytest.mark.parametrize("physical", [3, 1000])
def test_physical_batches_keep_the_turns(physical):
    model, optimizer, loader, engine = world()
    seen: list[list[int]] = [[]]
    for _ in range(3):
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        )
        with manager as parts:
            for (x,) in parts:
                before = engine.ledger.steps
                seen[-1] += step(model, optimizer, x)
                if engine.ledger.steps > before:
                    seen.append([])
    assert engine.ledger.steps == 30
    assert_turns_are_apart(seen[:-1])


def test_a_batch_left_out_used_again_or_taken_too_early_is_refused():
    model, optimizer, loader, engine = world()
    batches = iter(loader)
    step(model, optimizer, next(batches)[0])
    (skipped,) = next(batches)
    with pytest.raises(GredpError, match=r"taken before optimizer.step\(\) was called"):
        next(batches)
    step(model, optimizer, skipped)
    older = iter(loader)
    step(model, optimizer, next(older)[0])
    (x,) = next(iter(loader))  # a new loop begins with the turn that is due
    step(model, optimizer, x)
    with pytest.raises(GredpError, match=r"step 5 needs .* not that of step 4"):
        step(model, optimizer, x)
    with pytest.raises(GredpError, match="another loop over parts of batches began"):
        next(older)
    assert engine.ledger.steps == 4


def test_workers_that_draw_ahead_do_not_shift_the_turns():
    _, _, loader, _ = world()
    made = _private(PrivacyEngine(), DataLoader(loader.dataset, batch_size=20, num_workers=1))
    assert_turns_are_apart(train(*made, 3) + train(*made, 12))


def test_a_step_that_fails_after_its_charge_has_had_its_turn(monkeypatch):
    model, optimizer, loader, engine = world()
    seen = train(model, optimizer, loader, 5)
    honest = optimizer.private_step.release

    def failing(*arguments):
        raise InterruptedError

    monkeypatch.setattr(optimizer.private_step, "release", failing)
    (x,) = next(iter(loader))
    with pytest.raises(InterruptedError):
        step(model, optimizer, x)
    monkeypatch.setattr(optimizer.private_step, "release", honest)
    optimizer.forget()
    seen += [x.flatten().long().tolist(), *train(model, optimizer, loader, 9)]
    assert engine.ledger.steps == 15
    assert_turns_are_apart(seen)


def test_loaders_are_not_shared_between_ways_of_sampling():
    _, _, loader, _ = world()
    poisson = DataLoader(loader.dataset, batch_sampler=PoissonBatchSampler(COUNT, RATE, 3))
    for made, bands in ((loader, 1), (poisson, 2)):
        with pytest.raises(GredpError, match="not made private before"):
            _private(PrivacyEngine(), made, bands)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bands": 11}, "at most 10 bands"),
        ({"bands": 2.5}, "whole number, not 2.5"),
        ({"bands": "auto"}, "lost accuracy where it acted, and is gone"),
        ({"claim": "paper"}, "paper makes no claim"),
        ({"method": "plain"}, "no noise"),
        ({"noise_schedule": [(3, 1.0), (3, 0.5)]}, "nothing is proven for a noise schedule"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(GredpError, match=words):
        world(**options)


def test_views_of_a_record_have_its_part_and_its_turns():
    model, optimizer, loader, engine = world(views=3)
    seen = train(model, optimizer, loader, 13)
    assert all(batch[::3] == batch[1::3] == batch[2::3] for batch in seen)
    assert_turns_are_apart([batch[::3] for batch in seen])
    assert engine.ledger.entries[0].sample_rate == pytest.approx(BANDS * RATE)


def test_turns_count_from_the_first_step_after_a_query():
    """Part 0 comes first whatever was charged before, and both are paid for."""
    engine, data = PrivacyEngine(accountant="rdp"), TensorDataset(torch.arange(float(COUNT))[:, None])
    for _ in range(3):
        engine.ledger.charge(Certificate((Release("query", 1.0, 20.0),)), sample_rate=1.0)
    model, optimizer, loader = _private(engine, DataLoader(data, batch_size=20))
    seen = train(model, optimizer, loader, 6)
    parts = [set(optimizer.split.part_of(torch.tensor(batch)).tolist()) for batch in seen]
    assert all(found <= {t % BANDS} for t, found in enumerate(parts))
    assert [(e.sample_rate, e.steps) for e in ledger.mechanisms(engine.ledger.entries)] == [
        (1.0, 3),
        (pytest.approx(BANDS * RATE), 2),
    ]


def test_what_steps_will_cost_is_what_they_have_cost_then():
    """From every step to every later one, in the middle of a cycle and over its end."""
    model, optimizer, loader, engine = world()
    steps = 2 * BANDS + 1
    foretold: list[dict[int, float]] = []
    for done in range(steps + 1):
        foretold.append({later: engine.get_epsilon(1e-5, later - done) for later in range(done, steps + 1)})
        promised = engine.guarantee(1e-5, steps - done)
        assert promised["proven_epsilon"] == foretold[-1][steps]
        assert (promised["correlation_bands"], promised["steps"]) == (BANDS, steps)
        if done < steps:
            train(model, optimizer, loader, 1)
    spent = [told[done] for done, told in enumerate(foretold)]
    for told in foretold:
        assert all(value == spent[later] for later, value in told.items())
    assert len(set(spent)) == 4  # none, and one, two, three turns
    assert "of 4 parts in turn" in str(engine)


@pytest.mark.parametrize(("bands", "epsilon"), [(3, 2.0), pytest.param(8, 8.0, marks=pytest.mark.slow)])
def test_a_target_is_met_at_every_step_and_never_passed(bands, epsilon):
    engine, model = PrivacyEngine(accountant="rdp"), nn.Linear(1, 3)
    data = DataLoader(TensorDataset(torch.zeros(50, 1)), batch_size=5)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        data_loader=data,
        target_epsilon=epsilon,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        correlation_bands=bands,
    )
    spent = []
    for _ in range(2):
        for (x,) in loader:
            step(model, optimizer, x)
            spent.append(engine.get_epsilon(1e-5))
    assert spent == sorted(spent)
    assert 0.99 * epsilon < spent[-1] <= epsilon
    assert optimizer.split is not None
    assert engine.get_claimed_epsilon(1e-5) is None


# ------------------------------------------------------------------ restarts


def noise_of(model, optimizer) -> torch.Tensor:
    return model.weight.grad.flatten().double() * optimizer.expected_batch_size


def run_with_restart(folder, lost: int):
    """5 steps, a checkpoint, `lost` more, a new process, 7 more: (batches, noise, numbers of the ledger)."""
    seen, noise = [], []
    model, optimizer, loader, engine = world()
    for t in range(5 + lost):
        if t == 5:
            engine.save(folder / "run")
        seen += train(model, optimizer, loader, 1)
        noise.append(noise_of(model, optimizer))
    if not lost:
        engine.save(folder / "run")
    engine.detach()
    model, optimizer, loader, engine = world()
    engine.load(folder / "run")
    for _ in range(7):
        seen += train(model, optimizer, loader, 1)
        noise.append(noise_of(model, optimizer))
    engine.detach()
    return seen, torch.stack(noise), engine


@pytest.mark.parametrize("lost", [0, 3])
def test_the_parts_go_on_taking_turns_after_a_restart(tmp_path, lost):
    seen, _, engine = run_with_restart(tmp_path, lost)
    assert_turns_are_apart(seen)
    (paid,) = ledger.mechanisms(engine.ledger.entries)
    assert paid.steps == -(-len(seen) // BANDS)


@pytest.mark.parametrize("lost", [0, 2])
def test_noise_of_an_earlier_start_is_never_taken_back(tmp_path, lost):
    """Released noise is C⁻¹ξ with C cut at the restart: white after C, and independent across the cut."""
    _, noise, _ = run_with_restart(tmp_path, lost)
    steps = 12 + lost
    white = band_matrix(BANDS, steps, [5 + lost]) @ noise
    gram = white @ white.T / noise.shape[1]
    assert float((gram - torch.eye(steps)).abs().max()) <= 6 * math.sqrt(2 / noise.shape[1])


def test_the_folder_holds_the_split_for_its_owner_and_no_noise(tmp_path):
    model, optimizer, loader, engine = world()
    train(model, optimizer, loader, 3)
    engine.save(tmp_path / "run")
    kept = (tmp_path / "run" / "split").read_text()
    assert optimizer.split.key.hex() in kept
    assert os.stat(tmp_path / "run" / "split").st_mode & 0o777 == 0o600
    drawn = [block for blocks in optimizer.private_step._noise._drawn.values() for block in blocks]
    content = b"".join(p.read_bytes() for p in (tmp_path / "run").iterdir())
    assert drawn
    assert not any(block.numpy().tobytes()[:64] in content for block in drawn)
    others = [p for p in (tmp_path / "run").iterdir() if p.name != "split"]
    assert not any(optimizer.split.key.hex().encode() in p.read_bytes() for p in others)
    engine.detach()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "is not there any more: fork"),
        (lambda path: path.write_text("x" * 80), "damaged"),
        (lambda path: path.write_bytes(other_split().encode()), "not the one that was charged: fork"),
    ],
)
def test_without_its_split_a_run_does_not_go_on(tmp_path, damage, words):
    model, optimizer, loader, engine = world()
    engine.save(tmp_path / "run")
    train(model, optimizer, loader, 2)
    engine.detach()
    damage(tmp_path / "run" / "split")
    _, _, _, engine = world()
    with pytest.raises(GredpError, match=words) as error:
        engine.load(tmp_path / "run")
    assert "\n" not in str(error.value)


def other_split() -> str:
    from gredp.storage.files import seal

    return seal('{"key": "' + "ab" * 32 + '"}')[0]


def test_another_number_of_bands_is_refused_on_resume(tmp_path):
    _, _, _, engine = world()
    engine.save(tmp_path / "run")
    engine.detach()
    for bands in (1, 3):
        _, _, _, engine = world(bands=bands)
        with pytest.raises(GredpError, match=r"another (sample_rate|correlation_bands)"):
            engine.load(tmp_path / "run")


def test_a_fork_pays_for_its_own_turns(tmp_path):
    model, optimizer, loader, engine = world()
    train(model, optimizer, loader, 1)
    engine.save(tmp_path / "run")
    engine.detach()
    child = PrivacyEngine(accountant="rdp")
    child.fork(tmp_path / "run")
    train(*_private(child, DataLoader(loader.dataset, batch_size=20)), 1)
    assert [e.steps for e in ledger.mechanisms(child.ledger.entries)] == [1, 1]
    assert child.get_epsilon(1e-5) > engine.get_epsilon(1e-5)


# ------------------------------------------------------------------ processes


def in_one_process() -> dict:
    torch.manual_seed(0)
    model, optimizer, loader, engine = world()
    seen = train(model, optimizer, loader, 14)
    return {"seen": seen, "split": optimizer.split.key, "rank": rank(), "ledger": engine.ledger.to_json()}


def test_processes_share_the_split_and_take_the_same_turns():
    found = in_world(2, in_one_process)
    assert found[0]["split"] == found[1]["split"]
    assert found[0]["ledger"] == found[1]["ledger"]
    together = [a + b for a, b in zip(found[0]["seen"], found[1]["seen"])]
    assert_turns_are_apart(together)
    for each in found:
        assert all(record % 2 == each["rank"] for batch in each["seen"] for record in batch)


def restarted(folder) -> list[list[int]]:
    seen, _, engine = run_with_restart(folder, 2)
    return [seen, engine.ledger.to_json()]


def test_processes_go_on_with_the_split_of_the_folder(tmp_path):
    (first, paid), (second, same) = in_world(2, lambda: restarted(tmp_path))
    assert paid == same
    assert_turns_are_apart([a + b for a, b in zip(first, second, strict=True)])


# ------------------------------------------------------------------ N over steps


@pytest.mark.parametrize("mechanism", ["dpsgd", "gredp", "spectral-dp", "dpsgd per layer", "gredp shaped"])
def test_one_record_moves_all_releases_together_by_no_more_than_its_turns(mechanism):
    """Noise off, every record in each turn of its part, one record more: ‖C·Δ‖² ≤ turns·c²."""
    steps, clip = 11, 0.5
    for scale in (0.01, 1.0, 1e6):
        sums = []
        for count in (19, 20):
            torch.manual_seed(0)
            x = torch.linspace(-1, 1, 19 * 15).view(19, 15)
            data = torch.cat([x, torch.full((1, 15), scale)])[:count]
            model = nn.Linear(15, 4, bias=False)
            engine = PrivacyEngine(secret=Secret(5))
            model, optimizer, loader = engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
                data_loader=DataLoader(TensorDataset(data), batch_size=4),
                noise_multiplier=0.0,
                max_grad_norm=clip,
                sample_rate=1 / BANDS,
                correlation_bands=BANDS,
                **MECHANISMS[mechanism],
            )
            if optimizer.private_step.learned is not None:
                optimizer.private_step.learned.learn = lambda *_: None
            rows = []
            while len(rows) < steps:
                for (a,) in loader:
                    optimizer.zero_grad()
                    model(a).square().sum(1).mean().backward()
                    optimizer.step()
                    rows.append(model.weight.grad.flatten().double() * 4)
                    if len(rows) == steps:
                        break
            sums.append(torch.stack(rows))
        part = int(optimizer.split.part_of(torch.tensor([19])))
        turns = len(range(part, steps, BANDS))
        moved = band_matrix(BANDS, steps) @ (sums[1] - sums[0])
        assert 0 < float(moved.square().sum()) <= turns * clip**2 * (1 + 1e-5)


def test_secret_seeds_make_splits_repeatable_for_tests_only():
    one, two = (world(Secret(3))[1].split.key for _ in range(2))
    assert one == two != world()[1].split.key
