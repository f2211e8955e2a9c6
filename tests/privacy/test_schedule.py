"""Noise that changes by a public function of the step: what is drawn, charged, accounted, and goes on."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import gredp.gradient.step as private_step
from gredp import GredpError, PrivacyEngine, schedulers
from gredp.privacy.accountant import epsilon
from gredp.privacy.calibrate import calibrate
from gredp.privacy.ledger import Entry
from gredp.privacy.schedule import CONSTANT, NoiseSchedule
from worlds import MECHANISMS, batches, make_private, no_gradient_step, one_step, records, small_model, world

STAGES = [(2, 1.0), (3, 0.5), (1, 2.0)]
FACTORS = [1.0, 1.0, 0.5, 0.5, 0.5, 2.0, 2.0, 2.0]  # the last one stays


def test_factors_and_entries_follow_the_stages():
    schedule = NoiseSchedule.of(STAGES)
    assert [schedule.stages[schedule.stage(t)][1] for t in range(8)] == FACTORS
    for steps in range(9):
        entries = schedule.entries(1.5, 0.1, steps)
        found = [e.noise_multiplier for e in entries for _ in range(e.steps)]
        assert found == [1.5 * factor for factor in FACTORS[:steps]]
    assert CONSTANT.entries(1.5, 0.1, 7) == [Entry(1.5, 0.1, 1), Entry(1.5, 0.1, 6)]


@pytest.mark.parametrize("steps", [1, 3, 5, 8, 103])
@pytest.mark.parametrize("end", [0.5, 1.0, 3.0])
def test_noise_moves_geometrically_from_one_to_the_end(end, steps):
    schedule = NoiseSchedule.towards(end, steps)
    assert sum(n for n, _ in schedule.stages) == steps
    factors = [f for _, f in schedule.stages]
    assert factors[0] == 1
    if steps > 1:
        assert factors[-1] == pytest.approx(end)
    assert schedule.constant == (end == 1 or steps == 1)
    ratios = [b / a for a, b in pairwise(factors)]
    assert ratios == pytest.approx(ratios[:1] * len(ratios))


@pytest.mark.parametrize(
    "stages", [[], [(0, 1.0)], [(2.5, 1.0)], [(3, 0.0)], [(3, float("nan"))], [3], "falling", 7]
)
def test_schedules_that_cannot_be_are_refused_in_one_line(stages):
    with pytest.raises(GredpError) as error:
        NoiseSchedule.of(stages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_calibration_finds_the_common_factor_from_the_private_side(accountant):
    schedule = NoiseSchedule.of([(30, 1.0), (30, 0.5)])
    z = calibrate(2.0, 1e-5, 0.1, 60, accountant, (), schedule)
    spent = [epsilon(schedule.entries(z * scale, 0.1, 60), 1e-5, accountant) for scale in (1.0, 0.999)]
    assert spent[0] <= 2.0 < spent[1]
    constant = calibrate(2.0, 1e-5, 0.1, 60, accountant)
    assert z * 0.5 < constant < z


@pytest.mark.parametrize("mechanism", ["dpsgd", "gredp", "gredp shaped"])
def test_what_is_drawn_is_what_is_charged(mechanism):
    """V at every stage, and the ledger's entry of each step; ε in between is that of the steps so far."""
    z, clip, x = 1.7, 0.8, torch.ones(2, 300)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200))
    model, optimizer, _, engine = make_private(
        model,
        (x, torch.zeros(2)),
        noise_multiplier=z,
        clip=clip,
        noise_schedule=STAGES,
        **MECHANISMS[mechanism],
    )
    if optimizer.private_step.learned is not None:
        optimizer.private_step.learned.learn = lambda *_: None
    for step, factor in enumerate(FACTORS):
        noise = no_gradient_step(model, optimizer, x)["0.weight"].double()
        charged = engine.ledger.entries[-1].noise_multiplier
        assert charged == pytest.approx(z * factor, rel=1e-12)
        query = 1.01 if mechanism == "gredp shaped" else 1.0
        # six standard errors of a variance from 60,000 draws
        assert abs(float(noise.square().mean()) / (charged**2 * clip**2 * query) - 1) <= 0.035
        entries = [Entry(z * f, 1.0, 1) for f in FACTORS[: step + 1]]
        assert engine.get_epsilon(1e-5) == pytest.approx(epsilon(entries, 1e-5), rel=1e-9)


def test_a_sum_keeps_the_plan_it_began_with(monkeypatch):
    """Also where another query is charged to the ledger before its last part: drawn and charged alike."""
    x, y = records(8)
    model, optimizer, _, engine = make_private(
        small_model(), (x, y), noise_multiplier=1.0, noise_schedule=[(1, 1.0), (9, 0.5)]
    )
    noised, honest = [], private_step.add_noise
    monkeypatch.setattr(private_step, "add_noise", lambda *stage: noised.append(stage[0]) or honest(*stage))
    for part, skip in ((slice(4), True), (slice(4, 8), False)):
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.signal_skip_step(skip)
        optimizer.step()
        if skip:
            engine.ledger.charge(optimizer.certificate, 1.0)
    assert noised[0].plan is optimizer.private_step.plan
    assert [entry.noise_multiplier for entry in engine.ledger.entries] == pytest.approx([1.0, 1.0])
    one_step(model, optimizer, x, y)
    assert noised[1].plan == optimizer.private_step.plan.scaled(0.5)
    assert engine.ledger.entries[-1].noise_multiplier == pytest.approx(0.5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_all_noise_of_a_plan_is_scaled_and_so_is_its_multiplier(mechanism):
    """The energy query's as well: a part left behind would show in z."""
    _, optimizer, _, _ = make_private(
        small_model(), records(6), noise_multiplier=1.3, **MECHANISMS[mechanism]
    )
    plan = optimizer.private_step.plan
    assert plan.scaled(0.3).certificate().noise_multiplier == pytest.approx(0.39, rel=1e-12)
    assert plan.scaled(1.0) is plan


def test_a_schedule_goes_on_where_the_ledger_says(tmp_path):
    """Steps before the folder, after it, lost ones, and a fork that begins its own."""
    settings = {"noise_multiplier": 1.0, "noise_schedule": STAGES}
    model, private, engine = world(**settings)
    for x, y in batches(1):
        one_step(model, private, x, y)
    engine.save(tmp_path / "run")
    for x, y in batches(2):
        one_step(model, private, x, y)  # charged, then lost
    engine.detach()
    model, private, engine = world(**settings)
    engine.load(tmp_path / "run")
    for x, y in batches(5):
        one_step(model, private, x, y)
    charged = [e.noise_multiplier for e in engine.ledger.entries for _ in range(e.steps)]
    assert charged == pytest.approx(FACTORS)
    engine.save(tmp_path / "run")
    engine.detach()
    _, _, other = world(noise_multiplier=1.0, noise_schedule=[(2, 1.0), (3, 0.4)])
    with pytest.raises(GredpError, match="another noise_schedule"):
        other.load(tmp_path / "run")
    child = PrivacyEngine()
    child.fork(tmp_path / "run")
    model = small_model()
    model, private, _ = child.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*records(12)), batch_size=12),
        max_grad_norm=1.0,
        **settings,
    )
    for x, y in batches(3):
        one_step(model, private, x, y)
    own = [e.noise_multiplier for e in child.ledger.entries for _ in range(e.steps)][8:]
    assert own == pytest.approx(FACTORS[:3])


def test_targets_are_met_and_the_papers_claim_has_no_schedule():
    def made(**options):
        model, engine = torch.nn.Linear(3, 2), PrivacyEngine(accountant="rdp")
        data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
        parts = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(data, batch_size=10),
            target_epsilon=1.5,
            target_delta=1e-5,
            epochs=2,
            max_grad_norm=1.0,
            noise_schedule=[(4, 1.0), (4, 0.25)],
            **options,
        )
        return engine, parts

    engine, (model, optimizer, loader) = made()
    for _ in range(2):
        for x, y in loader:
            one_step(model, optimizer, x, y)
    assert 1.49 < engine.get_epsilon(1e-5) <= 1.5
    assert [entry.steps for entry in engine.ledger.entries] == [4, 4]
    with pytest.raises(GredpError, match="schedule it under claim 'proven'"):
        made(claim="paper", method="gredp")


@pytest.mark.parametrize("mechanism", ["dpsgd", "dpsgd per layer", "gredp shaped"])
def test_a_set_multiplier_and_norm_are_drawn_clipped_and_charged(mechanism):
    """V and K after each change: the noise alone, and a record far beyond any norm."""
    model, optimizer, _, engine = make_private(
        torch.nn.Sequential(torch.nn.Linear(300, 200, bias=False)),
        (torch.ones(2, 300), torch.zeros(2)),
        noise_multiplier=1.7,
        **MECHANISMS[mechanism],
    )
    if optimizer.private_step.learned is not None:
        optimizer.private_step.learned.learn = lambda *_: None
    expected = []
    for z, clip in ((1.7, 1.0), (0.6, 1.0), (0.6, 3.0), (2.0, 0.1)):
        optimizer.noise_multiplier, optimizer.max_grad_norm = z, clip
        assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (pytest.approx(z), clip)
        noise = no_gradient_step(model, optimizer, torch.ones(2, 300))["0.weight"].double()
        query = 1.01 if mechanism == "gredp shaped" else 1.0
        assert abs(float(noise.square().mean()) / (z**2 * clip**2 * query) - 1) <= 0.035
        expected.append(Entry(z, 1.0, 1))
        assert engine.get_epsilon(1e-5) == pytest.approx(epsilon(expected, 1e-5), rel=1e-9)
    optimizer.noise_multiplier, optimizer.max_grad_norm = 0.0, 0.25
    optimizer.zero_grad()
    (1e3 * model(torch.ones(1, 300))).sum(1).mean().backward()
    optimizer.step()
    assert float(model[0].weight.grad.norm()) * 2 == pytest.approx(0.25, rel=1e-5)
    assert engine.get_epsilon(1e-5) == float("inf")


def test_a_set_value_waits_for_the_next_sum_and_is_resumed(tmp_path):
    (x, y), settings = batches(1)[0], {"noise_multiplier": 1.0}
    model, optimizer, engine = world(**settings)
    F.cross_entropy(model(x[:6]), y[:6]).backward()
    optimizer.signal_skip_step()
    optimizer.step()
    optimizer.noise_multiplier, optimizer.max_grad_norm = 0.5, 2.0
    F.cross_entropy(model(x[6:]), y[6:]).backward()
    optimizer.signal_skip_step(False)
    optimizer.step()
    one_step(model, optimizer, x, y)
    assert [e.noise_multiplier for e in engine.ledger.entries] == pytest.approx([1.0, 0.5])
    engine.save(tmp_path / "run")
    engine.detach()
    model, optimizer, engine = world(**settings)
    engine.load(tmp_path / "run")
    one_step(model, optimizer, x, y)
    assert [e.steps for e in engine.ledger.entries] == [1, 2]
    assert optimizer.max_grad_norm == 2.0


@pytest.mark.parametrize("home", ["gredp.schedulers", "opacus.schedulers"])
def test_schedulers_of_opacus(home):
    where = pytest.importorskip(home)
    made = {
        "ExponentialNoise": ({"gamma": 0.5}, [1.0, 0.5, 0.25, 0.125]),
        "StepNoise": ({"gamma": 0.5, "step_size": 2}, [1.0, 1.0, 0.5, 0.5]),
        "LambdaNoise": ({"noise_lambda": lambda epoch: 1 + epoch}, [1.0, 2.0, 3.0, 4.0]),
        "ExponentialGradClip": ({"gamma": 0.5}, [1.0, 0.5, 0.25, 0.125]),
        "StepGradClip": ({"gamma": 0.5, "step_size": 2}, [1.0, 1.0, 0.5, 0.5]),
        "LambdaGradClip": ({"scheduler_function": lambda epoch: 1 + epoch}, [1.0, 2.0, 3.0, 4.0]),
    }
    for name, (options, values) in made.items():
        _, optimizer, _, _ = make_private(small_model(), records(6), noise_multiplier=1.0)
        scheduler, found = getattr(where, name)(optimizer, **options), []
        for _ in values:
            found.append(optimizer.noise_multiplier if "Noise" in name else optimizer.max_grad_norm)
            scheduler.step()
        assert found == pytest.approx(values), name
        assert scheduler.state_dict()["last_epoch"] == 4


def test_norms_of_layers_are_scheduled_together():
    _, optimizer, _, _ = make_private(
        small_model(), records(6), noise_multiplier=1.0, clip=[1.0, 2.0, 3.0], clipping="per_layer"
    )
    schedulers.ExponentialGradClip(optimizer, gamma=0.5).step()
    assert optimizer.max_grad_norm == [0.5, 1.0, 1.5]


def test_what_cannot_change_or_was_promised_is_said():
    for options in ({"correlation_bands": 2, "sample_rate": 0.5}, {"noise_schedule": STAGES}):
        _, optimizer, _, _ = make_private(small_model(), records(6), noise_multiplier=1.0, **options)
        with pytest.raises(GredpError, match=r"bands|noise_schedule"):
            optimizer.noise_multiplier = 0.5
        assert optimizer.noise_multiplier == 1.0
    model = small_model()
    data = torch.utils.data.TensorDataset(*records(12))
    _, optimizer, _ = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=6),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
    )
    optimizer.max_grad_norm = 0.5
    optimizer.noise_multiplier *= 2
    with pytest.raises(GredpError, match="noise multiplier must be 0 or more"):
        optimizer.noise_multiplier = float("nan")
    with pytest.warns(UserWarning, match="made for ε = 3"):
        optimizer.noise_multiplier *= 0.1
