"""A person, not a row: persons are drawn, some of their records take part, and these are clipped once."""

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import oracles
from gredp import BatchMemoryManager, GredpError, PrivacyEngine
from gredp.privacy.accountant import epsilon
from gredp.privacy.certificate import Certificate, Release
from gredp.privacy.ledger import Entry, Ledger
from gredp.randomness import Secret
from gredp.sampling.persons import Persons
from gredp.storage.ledger_file import LedgerFile, read_ledger
from gredp.storage.spent import spent
from worlds import MECHANISMS, flat, released, small_model

#: of records in no order; persons with 1, 2, 3, 4, 5 and 9 of them
COUNTS = {"ada": 3, "bo": 1, "cy": 5, "di": 9, "ed": 2, "flo": 4}
K, CLIP = 4, 0.8


def shuffled_ids() -> list[str]:
    ids = [name for name, count in COUNTS.items() for _ in range(count)]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))
    return [ids[i] for i in order]


IDS = shuffled_ids()


def dense_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 9), nn.Tanh(), nn.Linear(9, 4))


MODELS = {"dense": dense_model, "convolutional": small_model}


def private(build=small_model, *, batch=3, k=K, persons=IDS, engine=None, workers=0, **options):
    """Records (x, y, their number): the last says whose each row is, wherever the loader puts it."""
    generator = torch.Generator().manual_seed(0)
    count = len(IDS)
    x, y = torch.randn(count, 1, 5, 5, generator=generator), torch.arange(count) % 4
    model, engine = build(), engine or PrivacyEngine(secret=Secret(insecure_seed=7))
    settings = {"noise_multiplier": 0.0, "max_grad_norm": CLIP} | options
    loader = DataLoader(TensorDataset(x, y, torch.arange(count)), batch_size=batch, num_workers=workers)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=loader,
        **settings | ({} if persons is None else {"persons": persons, "records_per_person": k}),
    )
    return *made, engine


def step(model, optimizer, x, y) -> torch.Tensor:
    """What one step releases, as a sum over persons."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return flat(released(model, optimizer)).double()


def clipped_persons(model, x, y, places, norm=CLIP) -> torch.Tensor:
    """The oracle: record by record, the mean over the rows of each person, clipped, added up."""
    rows = oracles.per_sample_gradients(model, x, targets=y, loss=F.cross_entropy)
    rows = torch.cat([rows[name].flatten(1) for name, _ in model.named_parameters()], 1).double()
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for name in COUNTS:
        own = [i for i, place in enumerate(places.tolist()) if IDS[place] == name]
        if own:
            mean = rows[own].mean(0)
            total += mean * min(1.0, norm / float(mean.norm()))
    return total


# ------------------------------------------------------------------ which records take part


@pytest.mark.parametrize("k", [1, 2, 4, 7, 20])
def test_a_person_gives_k_rows_and_uses_their_records_evenly(k):
    persons, secret = Persons(IDS, len(IDS), k), Secret(insecure_seed=1)
    for number in range(200):
        drawn = list(range(0, len(persons), 1 + number % 2))
        rows = persons.rows(drawn, secret.uniform(k * len(drawn), "test", number))
        for place, person in enumerate(drawn):
            found = Counter(rows[place * k : (place + 1) * k])
            own = persons.of(person)
            assert set(found) <= set(own)
            assert sum(found.values()) == k
            assert max(found.values()) <= math.ceil(k / len(own))
            assert min(found[i] for i in own) >= k // len(own)


@pytest.mark.parametrize(("records", "k"), [(5, 2), (5, 8), (4, 3), (3, 5)])
def test_every_subset_is_as_likely_as_any_other(records, k):
    """R: 20,000 draws from a fixed secret; each subset within 5 deviations of its share."""
    persons, draws = Persons([0] * records, records, k), 20_000
    rows = torch.tensor(persons.rows([0] * draws, Secret(insecure_seed=2).uniform(k * draws, "test")))
    extra = Counter()
    for row in rows.view(draws, k).tolist():
        found = Counter(row)
        extra[tuple(i for i in range(records) if found[i] > k // records)] += 1
    subsets = list(combinations(range(records), k % records))
    share = 1 / len(subsets)
    for subset in subsets:
        assert abs(extra[subset] - draws * share) < 5 * math.sqrt(draws * share * (1 - share))
    assert set(extra) == set(subsets)


def test_no_person_is_an_empty_list_of_rows():
    assert Persons(IDS, len(IDS)).rows([], torch.zeros(0).double()) == []


def test_persons_are_drawn_independently_at_their_rate():
    *_, loader, _ = private(batch=2)
    sampler = loader.poisson
    drawn = Counter(person for _ in range(6000) for person in sampler.draw())
    assert sampler.sample_rate == 2 / len(COUNTS)
    assert sampler.steps == 3
    for person in range(len(COUNTS)):
        assert abs(drawn[person] - 2000) < 5 * math.sqrt(6000 * 2 / 9)


def test_a_mapping_says_the_same_as_ids():
    groups = {name: [i for i, owner in enumerate(IDS) if owner == name] for name in COUNTS}
    one, other = Persons(IDS, len(IDS), 3), Persons(groups, len(IDS), 3)
    assert sorted(map(one.of, range(6))) == sorted(map(other.of, range(6)))
    numbers = [list(COUNTS).index(name) for name in IDS]
    for ids in (np.array(IDS), np.array(numbers), torch.tensor(numbers), [torch.tensor(n) for n in numbers]):
        assert list(map(Persons(ids, len(IDS)).of, range(6))) == list(map(one.of, range(6)))
    shares = one.shares()
    for person in range(6):
        assert torch.allclose(shares[one.of(person)].sum(), torch.tensor(1.0).double())


# ------------------------------------------------------------------ what a step releases


@pytest.mark.parametrize("mechanism", ["dpsgd", "gredp"])
@pytest.mark.parametrize("build", MODELS.values(), ids=list(MODELS))
def test_a_step_releases_the_sum_of_persons_clipped_once(build, mechanism):
    model, optimizer, loader, _ = private(build, **MECHANISMS[mechanism])
    sizes = set()
    for _ in range(4):
        for x, y, places in loader:
            truth = clipped_persons(model, x, y, places)
            torch.testing.assert_close(step(model, optimizer, x, y), truth, rtol=1e-5, atol=1e-6)
            sizes.add(len(x))
            assert len(x) % K == 0
    assert len(sizes) > 2


def test_an_empty_draw_is_noised_and_charged():
    model, optimizer, loader, engine = private(batch=1, sample_rate=1e-6, noise_multiplier=1.0)
    x, y, _ = next(iter(loader))
    assert len(x) == 0
    assert step(model, optimizer, x, y).abs().max() > 0
    assert engine.ledger.steps == 1


def test_views_of_records_and_records_of_persons_multiply():
    model, optimizer, loader, _ = private(views=3, k=2, batch=6, sample_rate=1.0)
    x, y, places = next(iter(loader))
    assert len(x) == 6 * 2 * 3
    assert [len(set(group)) for group in places.view(-1, 3).tolist()] == [1] * 12
    truth = clipped_persons(model, x, y, places)
    torch.testing.assert_close(step(model, optimizer, x, y), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 6, 9, 100])
def test_the_records_of_a_person_stay_together_in_physical_batches(size):
    model, optimizer, loader, engine = private(batch=6, sample_rate=1.0)
    seen = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as parts:
        for x, y, places in parts:
            assert len(x) <= max(size, K)
            seen.append((x, y, places))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert engine.ledger.steps == 1
    truth = clipped_persons(model, *(torch.cat(part) for part in zip(*seen)))
    torch.testing.assert_close(flat(released(model, optimizer)).double(), truth, rtol=1e-5, atol=1e-6)


def test_a_person_moves_the_sum_by_at_most_the_clip_norm():
    """N: for every draw and person, be their records hostile; those whose records agree reach it."""
    model, optimizer, loader, _ = private(dense_model, max_grad_norm=0.1)
    moves = []
    for scale in (1.0, 1e6, 1e-9, 1e38, math.nan):
        drawn = loader.poisson.inputs(list(range(len(COUNTS))))
        x, y, places = (part[drawn].clone() for part in loader.dataset.tensors)
        x[places == IDS.index("di")] *= scale
        for name in COUNTS:
            own = torch.tensor([IDS[place] == name for place in places.tolist()])
            whole = step(model, optimizer, x, y)
            moves.append(float((whole - step(model, optimizer, x[~own], y[~own])).norm()))
    assert max(moves) <= 0.1 * (1 + 1e-5)
    assert max(moves) > 0.0999


def test_workers_draw_no_random_numbers():
    """The rows are chosen where the secret is: worker processes only read."""
    model, optimizer, loader, _ = private(batch=6, sample_rate=1.0, workers=1)
    x, y, places = next(iter(loader))
    truth = clipped_persons(model, x, y, places)
    torch.testing.assert_close(step(model, optimizer, x, y), truth, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ what is promised


def test_epsilon_is_that_of_persons_and_says_so(tmp_path):
    model, optimizer, loader, engine = private(batch=2, noise_multiplier=1.5)
    engine.save(tmp_path / "run")
    for x, y, _ in loader:
        step(model, optimizer, x, y)
    assert engine.ledger.entries == (Entry(1.5, 2 / 6, 3, 1.5, unit="person"),)
    guarantee = engine.guarantee(1e-5)
    assert guarantee.neighbors == "add or remove one person, with all of their records"
    assert guarantee.neighbors in str(engine)
    assert guarantee.proven_epsilon == epsilon([Entry(1.5, 2 / 6, 3)], 1e-5)
    engine.detach()
    found = spent(tmp_path / "run")
    assert found.unit == "person"
    assert found.to_json()["neighbors"] == guarantee.neighbors
    assert read_ledger(tmp_path / "run" / "ledger").entries[0].unit == "person"


def test_a_target_is_met_for_persons():
    engine, model = PrivacyEngine(accountant="rdp"), dense_model()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(24, 25), torch.arange(24) % 4), batch_size=2),
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        persons=IDS,
        records_per_person=3,
    )
    for _ in range(2):
        for x, y in loader:
            step(model, optimizer, x, y)
    assert engine.ledger.entries[0].sample_rate == 2 / 6
    assert 1.99 < engine.get_epsilon(1e-5) <= 2.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": 3}, r"another records_per_person \(4\) than now \(3\)"),
        ({"persons": None, "sample_rate": 0.5}, r'another unit \("person"\) than now \("record"\)'),
        ({"persons": [*IDS[:-1], "gil"]}, "another sample_rate"),
        ({"k": 2, "views": 2}, r"another views \(1\) than now \(2\)"),
    ],
    ids=["other k", "records", "one person more", "views for records"],
)
def test_a_resumed_run_keeps_its_unit_persons_and_k(changes, says, tmp_path):
    *_, engine = private(noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    engine.detach()
    *_, engine = private(noise_multiplier=1.0, engine=PrivacyEngine(), **changes)
    with pytest.raises(GredpError, match=says):
        engine.load(tmp_path / "run")


@pytest.mark.parametrize("first", [None, IDS], ids=["records first", "persons first"])
def test_one_engine_does_not_mix_units(first, tmp_path):
    model, optimizer, loader, engine = private(persons=first, noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    x, y, _ = next(iter(loader))
    step(model, optimizer, x, y)
    with pytest.raises(GredpError, match="1 steps are charged with one"):
        private(persons=IDS if first is None else None, noise_multiplier=1.0, engine=engine)
    engine.detach()
    fork = PrivacyEngine()
    fork.fork(tmp_path / "run")
    with pytest.raises(GredpError, match="1 steps are charged with one"):
        private(persons=IDS if first is None else None, noise_multiplier=1.0, engine=fork)


def test_a_ledger_has_one_unit(tmp_path):
    step, ledger = Certificate((Release("all", 1.0, 1.0),)), Ledger()
    ledger.charge(step, 0.1, unit="person")
    with pytest.raises(GredpError, match="no ε holds"):
        ledger.charge(step, 0.1)
    assert ledger.steps == 1
    with pytest.raises(GredpError, match="no ε holds"):
        Ledger((Entry(1.0, 0.1, 1), Entry(1.0, 0.1, 1, unit="person")))
    with pytest.raises(GredpError, match="record or person"):
        Entry(1.0, 0.1, 1, unit="household")
    (tmp_path / "run").mkdir()
    file = LedgerFile.create(tmp_path / "run" / "ledger", [Entry(1.0, 0.1, 2, unit="person")])
    with pytest.raises(GredpError, match="2 steps are charged with one person"):
        file.append(Entry(1.0, 0.1, 1))
    file.close()


# ------------------------------------------------------------------ what is rejected


def all_but(*places) -> list[int]:
    return [i for i in range(24) if i not in places]


@pytest.mark.parametrize(
    ("persons", "says"),
    [
        (IDS[:-1], "persons has 23 ids, but the dataset has 24 records"),
        ([None, *IDS[1:]], "record 0 has no person"),
        ([*IDS[:7], "", *IDS[8:]], "record 7 has no person"),
        ([*range(23), math.nan], "record 23 has no person"),
        ([*IDS[:-1], ["x"]], "the person of record 23 is a list"),
        ({"secret": [0, 24], "b": all_but(0)}, "names record 24, but the dataset has records 0 to 23"),
        ({"secret": [-1], "b": all_but()}, "names record -1"),
        ({"secret": [3], "b": all_but()}, "record 3 under two persons"),
        ({"secret": [3, 3], "b": all_but(3)}, "record 3 twice under one person"),
        ({"secret": [3], "b": all_but(3, 5)}, "record 5 has no person"),
        ({"secret": [], "b": all_but()}, "person 0 in the order of persons has no record"),
        ({"secret": ["x"], "b": all_but()}, "must map each person to the numbers"),
    ],
)  # fmt: skip
def test_a_record_has_one_person(persons, says):
    with pytest.raises(GredpError, match=says) as error:
        private(persons=persons)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_what_persons_do_not_go_with_is_refused_in_one_line():
    for k in (0, -1, 1.5):
        with pytest.raises(GredpError, match="records_per_person must be a whole number"):
            private(k=k)
    with pytest.raises(GredpError, match="batch size 7 is larger than the dataset of 6 persons"):
        private(batch=7)
    with pytest.raises(GredpError, match="records_per_person goes with persons"):
        private(persons=None, records_per_person=2)
    with pytest.raises(GredpError, match="use grid='kernel'"):
        private(**MECHANISMS["gredp padded"])
    model, _, loader, engine = private()
    engine.detach()
    again = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    again |= {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": loader}
    with pytest.raises(GredpError, match="persons need a data loader that was not made private"):
        engine.make_private(**again, persons=IDS)
    _, optimizer, _ = engine.make_private(**again)  # the loader knows its persons
    assert optimizer.one_step.unit == "person"


def test_a_collate_function_of_ones_own_is_refused():
    model = dense_model()
    data = TensorDataset(torch.randn(24, 25), torch.arange(24) % 4)
    loader = DataLoader(data, batch_size=2, collate_fn=lambda rows: default_collate(rows[::-1]))
    with pytest.raises(GredpError, match="remove collate_fn"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            persons=IDS,
        )
