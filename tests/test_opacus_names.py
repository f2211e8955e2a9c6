"""Names and arguments of Opacus that its users call every day."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gredp
from gredp import GredpError, PrivacyEngine
from gredp.privacy.accountant import Accountant, epsilon
from gredp.privacy.ledger import Entry, Ledger
from worlds import batches, make_private, records, small_model, world


def private(engine, model=None, **settings):
    torch.manual_seed(0)
    model = model or nn.Linear(4, 2)
    data = TensorDataset(torch.randn(20, 4), torch.zeros(20).long())
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **settings,
    )


def epoch(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("option", [{"wrap_model": False}, {"wrap_model": True}, {"rand_on_empty": True}])
def test_arguments_that_ask_for_what_is_always_so_are_taken(option):
    model, _, _ = private(PrivacyEngine(), **option)
    assert type(model) is nn.Linear


def test_the_tolerance_of_opacus_leaves_epsilon_within_the_target():
    engine, model = PrivacyEngine(accountant="rdp"), nn.Linear(4, 2)
    data = TensorDataset(torch.randn(20, 4), torch.zeros(20).long())
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=5),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
        epsilon_tolerance=0.1,
    )
    epoch(model, optimizer, loader)
    assert 2.9 < engine.get_epsilon(1e-3) <= 3.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_single_records_on_request(reduction):
    """Exact against the loop; the step is what it would have been, and the engine tells."""
    weights = []
    for asked in (True, False):
        model, optimizer, _, engine = make_private(
            small_model(), records(6), lr=0.1, loss_reduction=reduction
        )
        x, y = records(6)
        with pytest.raises(GredpError, match="ask after backward"):
            engine.per_sample_gradients()
        assert "NOT COVERED" not in str(engine)
        nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
        found = engine.per_sample_gradients() if asked else {}
        for i in range(len(x) if asked else 0):
            alone = small_model()
            nn.functional.cross_entropy(alone(x[i : i + 1]), y[i : i + 1]).backward()
            for name, parameter in alone.named_parameters():
                torch.testing.assert_close(found[name][i], parameter.grad, rtol=1e-4, atol=1e-6)
        optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert ("read 1 times: outside ε" in str(engine)) == asked
        assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert torch.equal(*weights)


def test_a_checkpoint_says_that_gradients_were_read(tmp_path):
    model, optimizer, engine = world(noise_multiplier=1.0)
    (x, y) = batches(1)[0]
    nn.functional.cross_entropy(model(x), y).backward()
    engine.per_sample_gradients()
    optimizer.step()
    engine.save(tmp_path / "run")
    engine.detach()
    _, _, again = world(noise_multiplier=1.0)
    again.load(tmp_path / "run")
    assert "per-sample gradients were read 1 times" in str(again)


def test_a_model_is_made_compatible_or_named():
    engine, model = PrivacyEngine(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(GredpError, match="BatchNorm1d"):
        engine.validate(module=model, optimizer=None, data_loader=None)
    fixed = engine.get_compatible_module(model)
    engine.validate(module=fixed)
    assert isinstance(fixed[1], nn.GroupNorm)
    with pytest.raises(GredpError, match="LSTMCell"):
        engine.get_compatible_module(nn.Sequential(nn.LSTMCell(3, 4)))


def test_a_checkpoint_under_their_names_keeps_what_was_spent(tmp_path):
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = private(engine)
    engine.save_checkpoint(path=tmp_path / "run", module=model, optimizer=optimizer)
    epoch(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "run", module=model, checkpoint_dict={"epoch": 1})
    spent, weights = engine.get_epsilon(1e-5), model.weight.clone()
    assert model._module is model
    engine.detach()
    assert not hasattr(model, "_module")
    again = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = private(again)
    assert again.load_checkpoint(path=tmp_path / "run", module=model, optimizer=optimizer) == {"epoch": 1}
    assert again.get_epsilon(1e-5) == spent
    assert torch.equal(model.weight, weights)
    with pytest.raises(GredpError, match="noise_scheduler has no part"):
        again.save_checkpoint(path=tmp_path / "run", noise_scheduler=object())


def test_the_accountant_counts_and_hands_over_its_history():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = private(engine)
    epoch(model, optimizer, loader)
    accountant = engine.accountant
    assert len(accountant) == 4
    assert accountant.history == [(pytest.approx(1.0), loader.sample_rate, 4)]
    state = json.loads(json.dumps(accountant.state_dict()))
    other = PrivacyEngine(accountant="rdp").accountant
    other.load_state_dict(state)
    assert other.get_epsilon(delta=1e-5) == accountant.get_epsilon(1e-5, alphas=[2, 3])
    other.step(noise_multiplier=2.0, sample_rate=0.5)
    spent = [Entry(1.0, 0.25, 4), Entry(2.0, 0.5, 1)]
    assert other.get_epsilon(1e-5) == pytest.approx(epsilon(spent, 1e-5, "rdp"))
    with pytest.raises(GredpError, match="a new engine"):
        other.load_state_dict(state)


def test_a_private_choice_has_no_history_of_steps():
    """Its steps alone would cost less than the choice among trials did."""
    spent = Ledger((Entry(1.0, 0.25, 4, trials=5.0, choice="one"),))
    with pytest.raises(GredpError, match="no history of steps"):
        Accountant(spent, "rdp").state_dict()


def test_an_accountant_that_may_promise_too_much_is_rejected():
    with pytest.raises(GredpError, match="may lie below the true one"):
        PrivacyEngine(accountant="gdp")


@pytest.mark.parametrize("length", [{"steps": 50}, {"epochs": 5}])
def test_the_multiplier_meets_the_target(length):
    z = gredp.get_noise_multiplier(
        target_epsilon=2, target_delta=1e-5, sample_rate=0.1, accountant="rdp", **length
    )
    assert 1.99 < epsilon([Entry(z, 0.1, 50)], 1e-5, "rdp") <= 2


@pytest.mark.parametrize("wrong", [{}, {"steps": 1, "epochs": 1}, {"steps": 1, "sample_rate": 2.0}])
def test_a_multiplier_needs_one_length_and_a_rate(wrong):
    with pytest.raises(GredpError):
        gredp.get_noise_multiplier(**{"target_epsilon": 2, "target_delta": 1e-5, "sample_rate": 0.1} | wrong)


def test_hooks_see_the_noisy_gradients_of_every_step():
    model, optimizer, loader = private(PrivacyEngine())
    seen = []
    optimizer.attach_step_hook(lambda o: seen.append(o.param_groups[0]["params"][0].grad.clone()))
    epoch(model, optimizer, loader)
    assert len(seen) == 4
    assert all(gradient.any() for gradient in seen)


def sharded() -> nn.Module:
    model = nn.Linear(4, 2)
    model.weight.device_mesh = None  # as a DTensor has one
    return model


@pytest.mark.parametrize(
    ("model", "option", "why"),
    [
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 2))), {}, "torch.jit hides the layers"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 2))), {}, "torch.jit hides the layers"),
        (sharded, {}, "sharded .* whole model to each process"),
        (lambda: nn.Linear(4, 2), {"grad_sample_mode": "no_op"}, "have no certificate; use 'hooks'"),
        (lambda: nn.Linear(4, 2), {"grad_sample_mode": "ghost_fsdp"}, "'ghost' with torchrun"),
    ],
)
def test_what_cannot_be_certified_is_named_with_what_can(model, option, why):
    with pytest.raises(GredpError, match=why):
        private(PrivacyEngine(), model=model(), **option)


def test_groups_are_those_of_opacus_where_they_leave_something():
    """Opacus' GroupNorm(32, 32) of a `[batch, 32]` input is its bias, whatever the input."""
    model = nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm2d(20), nn.BatchNorm3d(48), nn.BatchNorm1d(32))
    assert [layer.num_groups for layer in gredp.ModuleValidator.fix(model)] == [32, 20, 16, 2]
    assert [layer.num_groups for layer in gredp.ModuleValidator.fix(model, num_groups=4)] == [4] * 4
    [first, *_] = gredp.ModuleValidator.fix_and_validate(model, replace_bn_with_in=True)
    assert isinstance(first, nn.InstanceNorm2d)
    assert gredp.fix(model)[0].num_groups == 4


def test_every_module_of_opacus_is_found_under_our_name():
    from gredp.accountants import RDPAccountant, create_accountant
    from gredp.accountants.utils import get_noise_multiplier

    from gredp import opacus_modules

    assert get_noise_multiplier is gredp.get_noise_multiplier
    for path, names in opacus_modules.OFFERED.items():
        for name in names:
            assert callable(opacus_modules.find(path, name))
    spent = RDPAccountant()
    spent.step(noise_multiplier=1.0, sample_rate=0.1)
    assert spent.get_epsilon(1e-5) == epsilon([Entry(1.0, 0.1, 1)], 1e-5, "rdp")
    assert create_accountant("prv").mechanism() == "pld"
    assert not isinstance(nn.Linear(1, 1), gredp.GradSampleModule)
    with pytest.raises(GredpError, match="never wrapped"):
        gredp.grad_sample.GradSampleModule(nn.Linear(1, 1))
    with pytest.raises(ImportError, match="cannot import name"):
        from gredp.validators import nothing  # noqa: F401
