"""The engine as a user of Opacus meets it, and that what it charges is what it does."""

import copy
import io
import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import BatchMemoryManager, GredpError, ModuleValidator, PrivacyEngine
from gredp.gradient.inverse import invert
from gredp.gradient.noise import add_noise
from gredp.gradient.summation import BoundedSum
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry
from worlds import MECHANISMS, make_private, one_step, records, small_model

DELTA = 1e-5


def blobs(count: int = 240) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 2
    return torch.randn(count, 10, generator=generator) + 1.5 * y[:, None], y


def test_a_loop_written_for_opacus_trains():
    """The names and calls of Opacus' MNIST and CIFAR-10 examples, with nothing but the import changed."""
    x, y = blobs()
    model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model = ModuleValidator.fix(model)
    assert ModuleValidator.validate(model, strict=False) == []
    count = len([p for p in model.parameters() if p.requires_grad])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=40, num_workers=1, pin_memory=False),
        noise_multiplier=1.0,
        max_grad_norm=[1.0 / math.sqrt(count)] * count,
        clipping="per_layer",
        grad_sample_mode="hooks",
    )
    criterion = nn.CrossEntropyLoss()
    model.train()
    for epoch in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * 0.5 * (1 + math.cos(math.pi * epoch / 4))
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
        spent = privacy_engine.accountant.get_epsilon(delta=DELTA)
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
    model.eval()
    with torch.no_grad():
        assert float((model(x).argmax(1) == y).float().mean()) > 0.8
    assert spent == privacy_engine.get_epsilon(DELTA) > 0
    (entry,) = privacy_engine.ledger.entries
    assert (entry.sample_rate, entry.steps) == (40 / 240, 18)
    assert entry.noise_multiplier == pytest.approx(1.0, rel=1e-12)


def test_target_epsilon_is_met_and_never_passed():
    x, y = blobs()
    for accountant in ("pld", "rdp"):
        engine = PrivacyEngine(accountant=accountant)
        model = nn.Linear(10, 2)
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=60),
            target_epsilon=1.5,
            target_delta=DELTA,
            epochs=4,
            max_grad_norm=1.0,
        )
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=16, optimizer=optimizer) as parts:
            for _ in range(4):
                for data, target in parts:
                    one_step(model, optimizer, data, target)
        assert 1.48 <= engine.get_epsilon(DELTA) <= 1.5
    assert PrivacyEngine(accountant="prv").accountant.mechanism() == "pld"


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_ledger_holds_what_was_executed(mechanism):
    """Exact: multiplier, rate and number of steps, for a requested z under every mechanism."""
    x, y = records(20)
    model, optimizer, loader, engine = make_private(
        small_model(), (x, y), noise_multiplier=1.3, batch_size=5, sample_rate=0.25, **MECHANISMS[mechanism]
    )
    executed = 0
    for data, target in loader:
        one_step(model, optimizer, data, target)
        executed += 1
    plan = optimizer.private_step.plan
    (entry,) = engine.ledger.entries
    assert entry.steps == executed == 4
    assert entry.sample_rate == loader.batch_sampler.sample_rate == 0.25
    assert entry.noise_multiplier == plan.certificate().noise_multiplier == pytest.approx(1.3, rel=1e-12)
    assert engine.get_epsilon(DELTA) == epsilon([Entry(entry.noise_multiplier, 0.25, 4)], DELTA)


def test_claims_of_the_paper_stand_beside_the_proven_figure():
    x, y = records(20)
    model, optimizer, _, engine = make_private(
        small_model(), (x, y), noise_multiplier=2.0, method="gredp", claim="paper"
    )
    one_step(model, optimizer, x, y)
    layers = 3
    assert optimizer.noise_multiplier == pytest.approx(2.0 / math.sqrt(2 * layers))
    assert engine.get_claimed_epsilon(DELTA) == epsilon([Entry(2.0, 1.0, 1)], DELTA, "rdp")
    assert engine.get_epsilon(DELTA) > engine.get_claimed_epsilon(DELTA)


def test_real_only_noise_needs_the_papers_claim():
    x, y = records(8)
    with pytest.raises(GredpError, match="claim='paper'"):
        make_private(small_model(), (x, y), noise_multiplier=1.0, method="gredp", noise="real")
    model, optimizer, _, engine = make_private(
        small_model(), (x, y), noise_multiplier=1.0, method="gredp", noise="real", claim="paper"
    )
    one_step(model, optimizer, x, y)
    assert engine.get_epsilon(DELTA) == math.inf
    assert 0 < engine.get_claimed_epsilon(DELTA) < math.inf


@pytest.mark.parametrize("method", ["plain", "dpsgd", "gredp"])
def test_no_noise_is_allowed_and_costs_everything(method):
    x, y = records(8)
    model, optimizer, _, engine = make_private(small_model(), (x, y), method=method)
    assert engine.get_epsilon(DELTA) == 0
    one_step(model, optimizer, x, y)
    assert engine.get_epsilon(DELTA) == math.inf


def test_plain_is_the_ordinary_gradient():
    x, y = records(8)
    model, optimizer, _, _ = make_private(small_model(), (x, y), method="plain")
    one_step(model, optimizer, x, y)
    fresh = small_model()
    F.cross_entropy(fresh(x), y).backward()
    for p, q in zip(model.parameters(), fresh.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam])
def test_any_optimizer_steps_on_the_private_gradient(kind):
    x, y = records(8)
    model = small_model()
    twin = copy.deepcopy(model)
    engine = PrivacyEngine()
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=kind(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    reference = kind(twin.parameters(), lr=0.1)
    for _ in range(3):
        one_step(model, optimizer, x, y)
        for p, q in zip(model.parameters(), twin.parameters()):
            q.grad = p.grad.clone()
        reference.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)


def test_schedulers_and_closures_work():
    x, y = records(8)
    model, optimizer, _, engine = make_private(small_model(), (x, y), noise_multiplier=1.0, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert engine.ledger.steps == 1


def test_the_charge_comes_before_the_update():
    """A crash in the optimizer must leave the step charged: ε is never below what was spent."""
    x, y = records(8)
    model, optimizer, _, engine = make_private(small_model(), (x, y), noise_multiplier=1.0)

    def crash() -> None:
        raise RuntimeError("crash")

    optimizer.original_optimizer.step = crash
    with pytest.raises(RuntimeError, match="crash"):
        one_step(model, optimizer, x, y)
    assert engine.ledger.steps == 1


def test_gradients_are_spent_once():
    x, y = records(8)
    model, optimizer, _, engine = make_private(small_model(), (x, y), noise_multiplier=1.0)
    one_step(model, optimizer, x, y)
    with pytest.raises(GredpError, match="without a new backward"):
        optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()  # forgets the backward
    with pytest.raises(GredpError, match="without a new backward"):
        optimizer.step()
    assert engine.ledger.steps == 1


def test_stages_take_only_the_previous_stages_type():
    """Noising an unclipped sum, noising twice, inverting an un-noised sum: each is an error."""
    x, y = records(8)
    model, optimizer, _, _ = make_private(small_model(), (x, y), noise_multiplier=1.0)
    F.cross_entropy(model(x), y).backward()
    step, parameters = optimizer.private_step, dict(model.named_parameters())
    spectra = optimizer.capture.take()
    with pytest.raises(TypeError, match="ClippedSpectra"):
        step._bounded.add(spectra)
    with pytest.raises(TypeError, match="BoundedSum"):
        add_noise(spectra, parameters, step.squared_weights, step.source)
    with pytest.raises(TypeError, match="NoisySum"):
        invert(step._bounded, {}, {})
    with pytest.raises(TypeError, match="PerSampleSpectra"):
        step.accumulate(step._bounded)
    total = BoundedSum(step.plan, step.block_views)
    add_noise(total, parameters, step.squared_weights, step.source)
    with pytest.raises(GredpError, match="noised already"):
        add_noise(total, parameters, step.squared_weights, step.source)


def test_copies_of_the_model_are_independent():
    """A deep copy (an average of weights, say) must neither feed the engine nor share its layers."""
    x, y = records(8)
    model, optimizer, _, engine = make_private(small_model(), (x, y), noise_multiplier=1.0, lr=1.0)
    twin = copy.deepcopy(model)
    before = twin(x).detach()
    one_step(model, optimizer, x, y)
    assert torch.equal(twin(x).detach(), before)
    assert not torch.equal(model(x).detach(), before)
    assert engine.ledger.steps == 1


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_private_model_is_a_plain_model(how):
    x, y = records(8)
    model, _, _, engine = make_private(small_model(), (x, y))
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        assert b"gredp.gradient" not in file.getvalue()  # whoever loads it need not have what trained it
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    F.cross_entropy(twin(x), y).backward()
    assert all(p.grad is not None for p in twin.parameters())
    twin.load_state_dict(model.state_dict())
    assert make_private(twin, (x, y))[3] is not engine  # and may be made private in turn


@pytest.mark.parametrize("when", ["before", "after", "a part"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_has_the_gradients_of_the_same_model(when):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        x, y = torch.randn(6, 3), torch.arange(6) % 2
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        compile_ = partial(torch.compile, backend="aot_eager") if compiled else lambda model: model
        model = compile_(model) if when == "before" else model
        if when == "a part":
            model[2] = compile_(model[2])
        F.cross_entropy(model(x), y).backward()  # compiled without hooks
        model.zero_grad()
        model, optimizer, _, _ = make_private(model, (x, y), clip=0.1, lr=1.0)
        run = compile_(model) if when == "after" else model
        for _ in range(2):
            one_step(run, optimizer, x, y)
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_detach_gives_the_model_back():
    x, y = records(8)
    model, _, _, engine = make_private(small_model(), (x, y))
    engine.detach()
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_in_place_layers_and_half_precision_parameters():
    x, y = records(8)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(18, 4))
    model = model.bfloat16()
    settings = {"noise_multiplier": 1.0, "method": "gredp"}
    with pytest.raises(GredpError, match=r"mean loss in bfloat16 .* loss_reduction='sum'"):
        one_step(*make_private(copy.deepcopy(model), (x.bfloat16(), y), **settings)[:2], x.bfloat16(), y)
    model, optimizer, _, _ = make_private(model, (x.bfloat16(), y), loss_reduction="sum", **settings)
    F.cross_entropy(model(x.bfloat16()), y, reduction="sum").backward()
    optimizer.step()
    assert all(p.grad.dtype == torch.bfloat16 and torch.isfinite(p.grad).all() for p in model.parameters())


def test_under_autocast_one_record_moves_a_sum_by_at_most_the_clip_norm_and_no_other_record():
    x, y = records(40)
    sums = []
    for count in (40, 39):
        data = (x[:count], y[:count])
        model, optimizer, _, _ = make_private(
            small_model(), data, clip=0.5, batch_size=39, loss_reduction="sum"
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(data[0]), data[1], reduction="sum")
        loss.backward()
        optimizer.step()
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    assert 0.45 < float((sums[0] - sums[1]).norm()) <= 0.5 * (1 + 1e-5)


def test_shaped_noise_learns_from_releases_only():
    """Weights of a step are fixed before its records are seen, and move after it."""
    x, y = records(64)
    model, optimizer, _, engine = make_private(
        small_model(), (x, y), noise_multiplier=1.0, clip=0.5, **MECHANISMS["gredp shaped"]
    )
    weights = [torch.cat(list(optimizer.private_step.squared_weights.values()))]
    for _ in range(3):
        F.cross_entropy(model(x), y).backward()
        optimizer.private_step.accumulate(optimizer.capture.take())
        during = torch.cat(list(optimizer.private_step.squared_weights.values()))
        assert torch.equal(during, weights[-1])
        optimizer.forget()
        one_step(model, optimizer, x, y)
        weights.append(torch.cat(list(optimizer.private_step.squared_weights.values())))
    assert torch.equal(weights[0], torch.ones_like(weights[0]))
    assert not torch.equal(weights[1], weights[2])
    assert engine.ledger.steps == 3


class Temperature(nn.Module):
    """A parameter without any axis."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(25, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)) * self.scale


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if "padded" not in m])
def test_a_parameter_without_axes_is_clipped_and_noised_as_any_other(mechanism):
    x, y = records(8)
    options = MECHANISMS[mechanism]
    model, optimizer, _, _ = make_private(Temperature(), (x, y), clip=1e3, **options)
    one_step(model, optimizer, x, y)
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x), y).backward()
    if "automatic" not in mechanism:  # nothing is clipped, so the mean gradient comes out
        assert model.scale.grad == pytest.approx(float(plain.scale.grad), rel=1e-4)
    model, optimizer, _, _ = make_private(Temperature(), (x, y), noise_multiplier=1e3, **options)
    draws = []
    for _ in range(40):  # always the same ones
        one_step(model, optimizer, x, y)
        draws.append(float(model.scale.grad) * len(x))
    assert torch.tensor(draws).std() >= 0.7 * 1e3


@pytest.mark.parametrize("norm", [np.float32(0.5), torch.tensor(0.5), [np.float32(0.5)]])
def test_a_norm_may_come_from_numpy_or_torch(norm):
    x, y = records(8)
    _, optimizer, _, _ = make_private(small_model(), (x, y), clip=norm)
    assert optimizer.max_grad_norm in (0.5, [0.5])
    assert type(optimizer.max_grad_norm) in (float, list)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_grad_norm": 0.0}, "positive number, not 0.0"),
        ({"max_grad_norm": math.nan}, "positive number, not nan"),
        ({"max_grad_norm": [1.0, 2.0]}, "flat clipping takes one norm, not 2"),
        ({"max_grad_norm": [1.0] * 5, "clipping": "per_layer"}, "5 clipping norms given for 3 layers with 6"),
        ({"max_grad_norm": None}, "positive number, not None"),
        ({"max_grad_norm": 1e308, "noise_multiplier": 10.0}, "too large"),
        ({"noise_multiplier": -1.0}, "0 or more and finite, not -1.0"),
        ({"noise_multiplier": math.nan}, "0 or more and finite, not nan"),
        ({"noise_multiplier": None}, "0 or more and finite, not None"),
        ({"correlation_bands": math.nan}, "whole number, not nan"),
        ({"precision": "half"}, "unknown precision 'half': choose one of single, bf16"),
        ({"views": math.nan}, "whole number of at least 1, not nan"),
        ({"loss_reduction": "median"}, "'mean' or 'sum'"),
        ({"grad_sample_mode": "no_op"}, "no_op"),
        ({"grad_sample_mode": "ghost_fsdp"}, "'ghost_fsdp' is not supported.*torchrun"),
        ({"method": "sgd"}, "unknown method 'sgd'"),
        ({"clipping": "soft"}, "unknown clipping 'soft'"),
        ({"filter_ratio": 0.5}, "dpsgd has no option filter_ratio"),
        ({"method": "spectral_dp", "filter_ratio": 0.0}, "filter ratio"),
        ({"sample_rate": 0.0}, "sampling rate"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_charged(change, words):
    x, y = records(8)
    model = small_model()
    engine = PrivacyEngine()
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | change
    with pytest.raises(GredpError, match=words) as error:
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
            **settings,
        )
    assert "\n" not in str(error.value)
    assert engine.ledger.steps == 0
    F.cross_entropy(model(x), y).backward()  # and no hook stayed behind
    assert model[0].weight.grad is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_epsilon": 0.0}, "positive number, not 0.0"),
        ({"target_epsilon": math.nan}, "positive number, not nan"),
        ({"target_epsilon": 1e-9, "target_delta": 1e-12}, "cannot be reached in 4 steps"),
        ({"target_delta": 1.0}, "strictly between 0 and 1, not 1.0"),
        ({"target_delta": 0.0}, "strictly between 0 and 1, not 0.0"),
        ({"epochs": 0}, "positive whole number, not 0"),
    ],
)
def test_unreachable_targets_are_refused(change, words):
    x, y = records(8)
    model = small_model()
    settings = {"target_epsilon": 1.0, "target_delta": DELTA, "epochs": 2} | change
    with pytest.raises(GredpError, match=words):
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
            max_grad_norm=1.0,
            **settings,
        )


def test_parameters_outside_the_private_path_are_refused_by_name():
    x, y = records(8)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)

    def attempt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )

    model = small_model()
    with pytest.raises(GredpError, match=r"parameter 5\.weight is trainable but not in"):
        attempt(model, torch.optim.SGD(model[:4].parameters(), lr=0.1))
    stranger = nn.Parameter(torch.zeros(1))
    with pytest.raises(GredpError, match="1 of the optimizer's parameters do not belong"):
        attempt(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(GredpError, match="no trainable parameter"):
        attempt(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_one_model_cannot_be_made_private_twice():
    x, y = records(8)
    model, optimizer, _, engine = make_private(small_model(), (x, y))
    with pytest.raises(GredpError, match="private already"):
        make_private(model, (x, y))
    engine.detach()
    make_private(model, (x, y))
    with pytest.raises(GredpError, match="cannot join"):
        optimizer.add_param_group({"params": []})


def test_secure_mode_trains_and_takes_no_generator():
    x, y = records(8)
    for generator in (None, torch.Generator()):
        model, engine = small_model(), PrivacyEngine(secure_mode=True)
        settings = {
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "data_loader": DataLoader(TensorDataset(x, y), batch_size=8),
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "noise_generator": generator,
        }
        if generator is not None:
            with pytest.raises(GredpError, match="remove the generators"):
                engine.make_private(**settings)
            continue
        model, optimizer, _ = engine.make_private(**settings)
        released = torch.cat([v.flatten() for v in one_step(model, optimizer, x, y).values()])
        assert 0.7 < float(released.std()) < 1.6  # noise of deviation 1 and a gradient of norm 8 at most


def test_ghost_mode_returns_the_criterion_too():
    x, y = records(8)
    model, criterion = small_model(), nn.CrossEntropyLoss()
    result = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    assert len(result) == 4
    assert result[2] is criterion


def test_sum_losses_are_supported():
    x, y = records(8)
    model, optimizer, _, _ = make_private(small_model(), (x, y), clip=0.3, loss_reduction="sum")
    F.cross_entropy(model(x), y, reduction="sum").backward()
    optimizer.step()
    by_sum = torch.cat([p.grad.flatten() for p in model.parameters()])
    model, optimizer, _, _ = make_private(small_model(), (x, y), clip=0.3)
    one_step(model, optimizer, x, y)
    by_mean = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(by_sum, by_mean * 8, rtol=1e-5, atol=1e-7)


def test_a_large_delta_is_refused_without_telling_a_confidential_number_of_records():
    def made(delta, **settings):
        model = nn.Linear(3, 2)
        return PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(1234, 3)), batch_size=10),
            target_epsilon=2.0,
            target_delta=delta,
            epochs=1,
            max_grad_norm=1.0,
            **settings,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # refused, not warned of
        with pytest.raises(GredpError, match=r"δ × 1,234 records is 1.2,"):
            made(1e-3)
        with pytest.raises(GredpError, match="δ × 1,000 records is 1,") as error:
            made(1e-3, sample_rate=0.01)
    assert "1234" not in str(error.value).replace(",", "")
    with pytest.warns(UserWarning, match="δ × 1,000 records is 0.5,"):
        made(5e-4, sample_rate=0.01)
    with pytest.warns(UserWarning, match="records is 1.2"):
        made(1e-3, allow_large_delta=True)
    made(5e-5)
    made(1e-3, method="plain")  # it has no δ


def test_what_is_gone_says_what_takes_its_place():
    x, y = records(8)
    engine = make_private(small_model(), (x, y))[3]
    with pytest.raises(AttributeError, match="AveragedModel"):
        _ = engine.averaged
    with pytest.raises(GredpError, match=r"ema: average the released weights by .*AveragedModel"):
        make_private(small_model(), (x, y), ema=0.9)
