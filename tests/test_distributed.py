"""Several processes release what one would have released: one sum, one noise, one charge; all bit-equal."""

import math
import re
import warnings
from dataclasses import replace
from itertools import chain, count

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    TensorDataset,
    random_split,
)

import gredp.distributed as distributed
from gredp import BatchMemoryManager, GredpError, PrivacyEngine
from gredp.distributed import (
    DifferentiallyPrivateDistributedDataParallel,
    rank,
    reject_differences,
    run_on_rank_zero,
)
from gredp.errors import PeerFailed
from gredp.gradient.noise import SecretSource
from gredp.randomness import Secret
from ranks import in_world
from worlds import MECHANISMS, flat, make_private, no_gradient_step, records, released, small_model

Z, C = 1.7, 0.8
V_TOLERANCE, V_DRAWS = 0.027, 100_000
WORLDS = [1, 2, 4]
COUNT = 23  # not a multiple of any number of processes


def trained(steps: int = 4, rate: float = 0.3, physical: int = 3, z: float = 0.0, **options):
    """A few steps over Poisson batches that all draw from one seed: releases, weights, what was paid."""
    model = small_model(seed=rank())  # the first one's weights must win
    if rank():
        torch.manual_seed(rank())
    model, optimizer, loader, engine = make_private(
        model, records(COUNT), noise_multiplier=z, sample_rate=rate, batch_size=7, lr=0.1, **options
    )
    sampler = loader.batch_sampler
    sampler.generator, sampler.steps = torch.Generator().manual_seed(5), steps
    sums, weights, seen = [], [], 0
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
    ) as parts:
        for x, y in parts:
            paid = engine.ledger.steps
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen += len(x)
            if engine.ledger.steps > paid:
                sums.append(flat(released(model, optimizer)))
                weights.append(flat({n: p.detach().clone() for n, p in model.named_parameters()}))
    return {"sums": sums, "weights": weights, "ledger": engine.ledger.to_json(), "seen": seen}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "mechanism", ["dpsgd", "dpsgd adaptive per layer", "gredp padded", "gredp shaped", "spectral-dp"]
)
def test_without_noise_many_processes_release_what_one_does(world, mechanism):
    alone = trained(**MECHANISMS[mechanism])
    found = in_world(world, lambda: trained(**MECHANISMS[mechanism]))
    assert sum(each["seen"] for each in found) == alone["seen"]
    for each in found:
        for mine, theirs in zip(alone["weights"], each["weights"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(found[0]["weights"], each["weights"], strict=True))
        assert each["ledger"] == alone["ledger"]


def test_views_of_a_record_stay_with_its_process():
    alone = trained(views=3)
    found = in_world(2, lambda: trained(views=3))
    assert sum(each["seen"] for each in found) == alone["seen"]
    for each in found:
        for mine, theirs in zip(alone["weights"], each["weights"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mechanism", ["dpsgd", "gredp", "gredp shaped"])
def test_with_noise_processes_stay_bit_equal_at_every_step(mechanism):
    found = in_world(4, lambda: trained(z=Z, seed=None, **MECHANISMS[mechanism]))
    for each in found:
        assert len(each["weights"]) == 4
        assert all(torch.equal(a, b) for a, b in zip(found[0]["weights"], each["weights"], strict=True))
        assert each["ledger"] == found[0]["ledger"]


def drawn_noise(draws: int = V_DRAWS, **options) -> torch.Tensor:
    """Released noise of steps whose gradients are all zero, `[steps, size]`."""
    x = torch.randn(2, 64)
    model = nn.Sequential(nn.Linear(64, 50), nn.Flatten())
    model, optimizer, _, _ = make_private(
        model, (x, torch.zeros(2)), noise_multiplier=Z, clip=C, seed=None, **options
    )
    if optimizer.private_step.learned is not None:
        optimizer.private_step.learned.learn = lambda *_: None
    steps = -(-draws // model[0].weight.numel())
    return torch.stack([no_gradient_step(model, optimizer, x)["0.weight"].flatten() for _ in range(steps)])


@pytest.mark.fault("ranks' noise")
@pytest.mark.parametrize("mechanism", ["dpsgd", "gredp", "gredp shaped"])
@pytest.mark.parametrize("world", WORLDS)
def test_noise_of_the_certificate_is_added_once(world, mechanism):
    """V on the gradient that every process steps with."""
    found = in_world(world, lambda: drawn_noise(**MECHANISMS[mechanism]))
    noise = found[0].double()
    assert noise.numel() >= V_DRAWS
    assert abs(float(noise.var(correction=0)) / (Z * C) ** 2 - 1) <= V_TOLERANCE
    assert all(torch.equal(found[0], each) for each in found)
    steps = noise - noise.mean()
    again = float((steps[1:] * steps[:-1]).mean() / noise.var())
    assert abs(again) <= 6 / math.sqrt(steps[1:].numel())


@pytest.mark.fault("ranks' noise")
@pytest.mark.parametrize("world", [2, 4])
def test_secrets_of_processes_are_independent(world):
    """Whatever they draw under the same labels, they draw it differently: noise and batches."""

    def draws() -> torch.Tensor:
        engine = PrivacyEngine()
        source = SecretSource(engine.secret)
        source.begin(1)
        uniform = engine.secret.uniform(V_DRAWS, "batches", 1) - 0.5
        return torch.stack([source.normal((V_DRAWS,), uniform), uniform * math.sqrt(12)])

    found = in_world(world, draws)
    for i in range(world):
        for j in range(i):
            correlation = (found[i] * found[j]).mean(1).abs()
            assert float(correlation.max()) <= 6 / math.sqrt(V_DRAWS)


@pytest.mark.fault("ranks' noise")
def test_only_the_first_process_draws_noise():
    def draws() -> int:
        counted, honest = [], SecretSource.normal
        SecretSource.normal = lambda self, shape, like: counted.append(shape) or honest(self, shape, like)
        trained(z=Z, seed=None, method="gredp", noise_parts=(0.6, 0.8))
        return len(counted)

    first, *others = in_world(4, draws)
    assert first > 0
    assert others == [0, 0, 0]


def batches(secret: bool, steps: int) -> list[list[int]]:
    from gredp.sampling import PoissonBatchSampler

    generator = None if secret else torch.Generator().manual_seed(1)
    return list(PoissonBatchSampler(1001, 0.1, steps, generator, Secret()))


@pytest.mark.parametrize("secret", [True, False])
def test_all_processes_together_draw_poisson_batches(secret):
    """Each record in one process at most; sizes vary as independent draws do, from one seed or from many."""
    steps = 1000
    found = in_world(4, lambda: batches(secret, steps))
    whole = [sorted(chain(*parts)) for parts in zip(*found)]
    assert all(len(set(batch)) == len(batch) for batch in whole)
    assert all(i % 4 == r for r, mine in enumerate(found) for batch in mine for i in batch)
    if not secret:
        assert whole == batches(secret, steps)
    sizes = torch.tensor([float(len(batch)) for batch in whole])
    assert abs(float(sizes.mean()) - 100.1) <= 6 * math.sqrt(1001 * 0.1 * 0.9 / steps)
    assert abs(float(sizes.var()) / (1001 * 0.1 * 0.9) - 1) <= 0.27


def test_a_process_without_records_takes_part():
    """Two records and four processes: two of them have nothing, and step like the others."""

    def step() -> torch.Tensor:
        model, optimizer, loader, _ = make_private(small_model(), records(2), lr=0.1)
        (x, y), *_ = loader
        assert len(x) == (rank() < 2)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return flat({n: p.detach() for n, p in model.named_parameters()})

    found = in_world(4, step)
    model, optimizer, _, _ = make_private(small_model(), records(2), lr=0.1)
    optimizer.zero_grad()
    F.cross_entropy(model(records(2)[0]), records(2)[1]).backward()
    optimizer.step()
    alone = flat({n: p.detach() for n, p in model.named_parameters()})
    assert all(torch.equal(found[0], each) for each in found)
    assert torch.allclose(found[0], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.fault("ranks apart")
def test_the_worst_process_decides_whether_a_batch_is_new():
    """The second process steps with its last batch again; the first one takes a new one for each step."""

    def charged() -> list[tuple[float, int]]:
        model, optimizer, loader, engine = make_private(
            small_model(), records(COUNT), noise_multiplier=Z, sample_rate=0.3, batch_size=7, seed=None
        )
        batches, last = iter(loader), None
        for again in (False, True, False):
            x, y = last = last if again and rank() else next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        return [(entry.sample_rate, entry.steps) for entry in engine.ledger.entries]

    first, second = in_world(2, charged)
    assert first == second == [(0.3, 1), (1.0, 1), (0.3, 1)]


# ------------------------------------------------------------------ what is refused


def refusal(action) -> str:
    with pytest.raises(GredpError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


DIFFERENCES = {
    "records": lambda: {"data": records(COUNT + rank())},
    "noise_multiplier": lambda: {"data": records(COUNT), "noise_multiplier": 1.0 + rank()},
    "max_grad_norm": lambda: {"data": records(COUNT), "clip": 1.0 + rank()},
    "plan": lambda: {"data": records(COUNT), "method": ["dpsgd", "gredp"][rank()]},
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_processes_that_were_told_different_things_are_refused(what):
    def attempt() -> str:
        options = {"batch_size": 7, "sample_rate": 0.3, **DIFFERENCES[what]()}
        return refusal(lambda: make_private(small_model(), options.pop("data"), **options))

    first, second = in_world(2, attempt)
    assert first == "process 1 has other settings than the first process"
    assert second.startswith(f"process 1 has another {what} (")


def test_models_of_other_shapes_are_refused():
    def attempt() -> str:
        model = nn.Linear(3, 2 + rank())
        return refusal(lambda: DifferentiallyPrivateDistributedDataParallel(model))

    assert in_world(2, attempt)[1] == (
        'process 1 has another shape of weight ([3, 3, "torch.float32"]) than the first process '
        '([2, 3, "torch.float32"])'
    )


def test_the_wrapper_shares_the_first_weights():
    def wrapped() -> torch.Tensor:
        torch.manual_seed(rank())
        inner = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        inner[1].running_mean += rank()
        inner[1].num_batches_tracked += rank()
        model = DifferentiallyPrivateDistributedDataParallel(inner)
        return torch.cat([t.flatten().double() for t in model.state_dict().values()])

    found = in_world(4, wrapped)
    assert all(torch.equal(found[0], each) for each in found)
    assert float(found[0][-1]) == 0


def test_wrappers_and_samplers_that_would_interfere_are_refused():
    def attempt() -> tuple[str, str]:
        x, y = records(8)
        parallel = nn.parallel.DistributedDataParallel(small_model())
        split = DistributedSampler(TensorDataset(x, y))
        model = small_model()

        def with_sampler() -> None:
            PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(TensorDataset(x, y), batch_size=2, sampler=split),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )

        return refusal(lambda: make_private(parallel, (x, y))), refusal(with_sampler)

    for parallel, sampler in in_world(2, attempt):
        assert parallel.endswith("give the model itself")
        assert sampler.startswith("give all records without a DistributedSampler")


def test_processes_that_join_after_make_private_are_refused(monkeypatch):
    model, optimizer, _, _ = make_private(small_model(), records(4))
    monkeypatch.setattr("gredp.optimizer.world_size", lambda: 2)
    message = refusal(lambda: no_gradient_step(model, optimizer, records(4)[0]))
    assert message == (
        "the number of processes changed (1 in make_private, 2 now): join them before make_private"
    )


def test_errors_and_values_of_the_first_process_reach_all():
    def attempt() -> tuple[object, bytes, str, bool]:
        def fail() -> tuple[None, bytes]:
            assert rank() == 0
            raise GredpError("the disk is gone")

        value, content = run_on_rank_zero(lambda: ({"a": [1, None]}, b"\x00\xff" * 5), "a value")
        assert run_on_rank_zero(lambda: (1, b""), "another") == (1, b"")
        reject_differences({"a": 1.5, "b": [rank() - rank()]})
        try:
            run_on_rank_zero(fail, "a mistake")
        except GredpError as error:
            return value, content, str(error), isinstance(error, PeerFailed)
        raise AssertionError("the error was lost")

    first, *others = in_world(4, attempt)
    assert first == ({"a": [1, None]}, b"\x00\xff" * 5, "the disk is gone", False)
    assert others == [(*first[:3], True)] * 3


def moved(model: nn.Module, before: torch.Tensor) -> float:
    return float((model.weight.detach() - before).norm())


def two_models(norms=(1.0, 1000.0), first: int = 1) -> list:
    """Of one engine and of equal shapes, each with the step that it is to take; no noise."""
    distributed._models = count(first)
    engine, found = PrivacyEngine(), []
    data = TensorDataset(torch.full((8, 4), 1e4), torch.zeros(8))
    for norm in norms:
        model = nn.Linear(4, 2, bias=False)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=8.0),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=0.0,
            max_grad_norm=norm,
        )

        def step(model=model, optimizer=optimizer, loader=loader) -> None:
            (x, _), *_ = loader
            optimizer.zero_grad()
            model(x).sum(1).mean().backward()
            optimizer.step()

        found.append((model, step))
    return found


@pytest.mark.fault("ranks apart")
def test_models_stepped_in_another_order_are_refused_by_all():
    """Otherwise the other one's records, clipped at norm 1,000, enter the sum of norm 1 for each record."""

    def attempt() -> tuple[list[str], list[float]]:
        models = two_models()
        before = [model.weight.detach().clone() for model, _ in models]
        said = []
        for _, step in models if rank() == 0 else models[::-1]:
            try:
                step()
            except GredpError as error:
                said.append(str(error))
        return said, [moved(model, b) for (model, _), b in zip(models, before)]

    first, second = in_world(2, attempt)
    said, distances = first
    assert distances[0] <= 8 * (1 + 1e-5)  # eight records of norm 1
    assert first == second
    assert [message.count("\n") for message in said] == [0, 0]
    assert re.sub(r"plan \w{16}", "plan", said[0]) == (
        "process 1 came to step 1 of private model 2 (plan), the first process to step 1 of private model 1 "
        "(plan): all processes must step the same models in the same order"
    )
    assert "process 1 came to step 1 of private model 1" in said[1]


@pytest.mark.fault("ranks apart")
def test_models_of_equal_plans_and_models_of_two_engines_are_told_apart():
    def attempt() -> list[str]:
        (_, one), (_, two) = (
            two_models((1.0, 1.0)) if rank() < 2 else (*two_models((1.0,)), *two_models((1.0,)))
        )
        return refusal(one if rank() == 0 else two)

    assert all("of private model" in said for said in in_world(2, attempt))


@pytest.mark.fault("ranks apart")
@pytest.mark.parametrize("what", ["plan", "step"])
def test_another_plan_or_another_place_in_the_ledger_is_told_apart(what):
    def attempt() -> str:
        ((_, step),) = two_models((1.0,))
        optimizer = step.__defaults__[1]
        if rank() and what == "plan":
            stages = (replace(s, plan=replace(s.plan, normalize=True)) for s in optimizer._stages)
            optimizer._stages = tuple(stages)
        elif rank():
            optimizer.ledger.charge(optimizer.certificate, 1.0)
        return refusal(step)

    first, second = in_world(2, attempt)
    assert first == second
    assert ("process 1 came to step 2 of private model 1" in first) == (what == "step")


@pytest.mark.fault("ranks apart")
def test_a_process_in_another_phase_is_told_apart():
    def attempt() -> str:
        (_, step), *_ = two_models((1.0,))
        return refusal(step if rank() else lambda: reject_differences({"a": 1}))

    first, second = in_world(2, attempt)
    assert first == second
    assert "the first process to a comparison of settings" in first


def test_steps_in_the_same_order_go_on_after_a_refusal():
    """All refused together, so none of them is ahead of the others."""

    def attempt() -> tuple[str, list[float]]:
        (a, one), (b, two) = two_models()
        first = refusal(one if rank() == 0 else two)
        before = [m.weight.detach().clone() for m in (a, b)]
        one(), two()
        return first, [moved(m, w) for m, w in zip((a, b), before)]

    found = in_world(2, attempt)
    assert found[0] == found[1]
    assert found[0][1] == pytest.approx([8, 8000], rel=1e-4)


@pytest.mark.fault("ranks apart")
def test_what_one_process_refuses_all_refuse_and_go_on():
    def attempt() -> tuple[str, bool, float]:
        (model, step), *_ = two_models((1.0,))
        try:
            step() if rank() != 1 else step.__defaults__[1].step()  # no backward
        except GredpError as error:
            said, elsewhere = str(error), isinstance(error, PeerFailed)
        before = model.weight.detach().clone()
        step()
        return said, elsewhere, moved(model, before)

    first, second, third = in_world(3, attempt)
    assert second[0].startswith("optimizer.step() without a new backward pass")
    assert first[0] == third[0] == f"process 1 stopped, and so all do: {second[0]}"
    assert [found[1] for found in (first, second, third)] == [True, False, True]
    assert [found[2] for found in (first, second, third)] == pytest.approx([8] * 3, rel=1e-5)


@pytest.mark.fault("ranks apart")
def test_a_process_that_fails_within_an_exchange_joins_no_later_one(monkeypatch):
    """The others wait for its part of the sum, and must not be given something else."""

    def attempt() -> str:
        (_, one), (_, two) = two_models((1.0, 1.0))
        if rank() == 0:

            def fail(*_):
                raise GredpError("the disk is full")

            monkeypatch.setattr("gredp.privacy.ledger.Ledger.charge", fail)
            assert refusal(one) == "the disk is full"
            return refusal(two)
        return refusal(one)

    first, second = in_world(2, attempt)
    assert re.sub(r"plan \w{16}", "plan", first) == (
        "process 0 failed within step 1 of private model 1 (plan): all must start again"
    )
    assert "lost contact" in second


def private_over(dataset, workers: int = 0) -> None:
    model = nn.Linear(3, 2)
    PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=5, num_workers=workers),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def forty() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(40, 3, generator=generator), torch.arange(40) % 2)


class Views(Dataset):
    """Random views of records, whose labels stay."""

    def __init__(self, records: Dataset, chance: float = 0.5) -> None:
        self.records, self.chance = records, chance

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int):
        x, y = self.records[index]
        return x.flip(0) if float(torch.rand(())) < self.chance else x, y


def split_by(seed: int) -> Subset:
    """The second of two splits, as `random_split` makes it from the global seed."""
    torch.manual_seed(seed)
    return random_split(random_split(forty(), [35, 5])[0], [30, 5])[0]


def backwards(reverse: bool) -> Subset | TensorDataset:
    x, y = forty().tensors
    return TensorDataset(x.flip(0), y.flip(0)) if reverse else forty()


OTHER_RECORDS = {
    "split": lambda: split_by(rank()),
    "views of a split": lambda: Views(split_by(rank())),
    "parts put together": lambda: ConcatDataset([forty(), split_by(rank())]),
    "another order": lambda: backwards(bool(rank())),
}
SAME_RECORDS = {
    "split": lambda: split_by(0),
    "views of a split": lambda: Views(split_by(0)),
    "rare views": lambda: Views(forty(), 0.02),
    "other rounding": lambda: TensorDataset(forty().tensors[0] * (1 + 1e-7 * rank()), forty().tensors[1]),
    "strings": lambda: [(f"record {i}", {"y": i, "name": f"{i}"}) for i in range(40)],
}


@pytest.mark.fault("ranks apart")
def test_records_that_each_process_split_for_itself_are_refused():
    """A record that is in two processes is clipped in each, and moves the sum by twice the norm."""
    for make in OTHER_RECORDS.values():
        first, second = in_world(2, lambda make=make: refusal(lambda: private_over(make())))
        assert first == second
        assert first.startswith("process 1 has other records than the first process under the same numbers")


@pytest.mark.parametrize("name", SAME_RECORDS)
def test_the_same_records_are_taken_and_no_random_number_is_lost(name):
    def attempt() -> bool:
        dataset = SAME_RECORDS[name]()
        torch.manual_seed(rank())
        state = torch.get_rng_state()
        model = nn.Linear(3, 2)
        torch.set_rng_state(state)
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(dataset, batch_size=5),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        return torch.equal(state, torch.get_rng_state())

    assert in_world(2, attempt) == [True, True]


def test_records_are_compared_in_workers_where_training_reads_in_workers():
    def attempt() -> str:
        return refusal(lambda: private_over(backwards(bool(rank())), workers=2))

    assert "other records" in in_world(2, attempt)[0]


def test_a_process_that_leaves_is_noticed_in_one_line():
    def attempt() -> str:
        if rank() == 1:
            dist.destroy_process_group()
            return ""
        return refusal(lambda: reject_differences({}))

    assert "lost contact with others" in in_world(2, attempt)[0]
