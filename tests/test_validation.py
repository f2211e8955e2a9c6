"""What cannot be trained privately is refused by name, in one line; what can be replaced is replaced."""

import contextlib
import copy
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

import gredp
from gredp import (
    BlockCirculantLinear,
    GredpError,
    ModuleValidator,
    PrivacyEngine,
    PrivateMultiheadAttention,
    SpectralConv2d,
)
from gredp.validation import UnsupportedModuleError


def make_private(model: nn.Module, x: Tensor, **settings: Any) -> Any:
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        **settings,
    )


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().flatten(1).sum(1).mean().backward()


# ------------------------------------------------------------------ refusals


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


REFUSED = {
    "BatchNorm1d mixes the records of a batch.*GroupNorm": lambda: nn.BatchNorm1d(4),
    "BatchNorm2d mixes the records of a batch.*eval mode": lambda: nn.BatchNorm2d(4, affine=False),
    "BatchNorm3d mixes the records of a batch": lambda: frozen(nn.BatchNorm3d(4)),
    "BatchNorm1d mixes the records": lambda: nn.BatchNorm1d(4).eval(),
    "SyncBatchNorm mixes the records of a batch": lambda: nn.SyncBatchNorm(4),
    # without running statistics even eval mode takes the batch's own
    "BatchNorm2d mixes": lambda: frozen(nn.BatchNorm2d(4, track_running_stats=False)).eval(),
    "InstanceNorm1d with track_running_stats": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "InstanceNorm2d with track_running_stats keeps statistics.*gredp.fix": lambda: nn.InstanceNorm2d(
        4, affine=True, track_running_stats=True
    ),
    "MultiheadAttention hides its weights.*gredp.fix": lambda: nn.MultiheadAttention(4, 2),
    "LSTM hides its weights.*gredp.fix": lambda: nn.LSTM(4, 4),
    "GRU hides its weights.*gredp.fix": lambda: nn.GRU(4, 4),
    "RNN hides its weights.*gredp.fix": lambda: nn.RNN(4, 4),
    "LSTMCell has no rule: use the layer": lambda: nn.LSTMCell(4, 4),
    "GRUCell has no rule: use the layer": lambda: nn.GRUCell(4, 4),
    "Embedding with max_norm.*max_norm=None": lambda: nn.Embedding(4, 4, max_norm=1.0),
    "Embedding with max_norm rewrites its weights": lambda: frozen(nn.Embedding(4, 4, max_norm=1.0)),
    "EmbeddingBag with max_norm": lambda: frozen(nn.EmbeddingBag(4, 4, max_norm=1.0)),
    "Embedding with scale_grad_by_freq.*False": lambda: nn.Embedding(4, 4, scale_grad_by_freq=True),
    "Linear has complex parameters": lambda: nn.Linear(4, 4, dtype=torch.cfloat),
    "ParametrizationList.*remove the parametrization": lambda: spectral_norm(nn.Linear(4, 4)),
    "LazyLinear has no shapes yet.*one forward": lambda: nn.LazyLinear(4),
    "LazyConv2d has no shapes yet": lambda: nn.LazyConv2d(4, 3),
}
every_refusal = pytest.mark.parametrize(("message", "build"), REFUSED.items(), ids=REFUSED.keys())


@every_refusal
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_what_cannot_be_trained_is_refused_by_name_in_one_line(message, build):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(build()))
    (error,) = gredp.validate(model)
    assert isinstance(error, UnsupportedModuleError)
    assert isinstance(error, GredpError)
    assert "\n" not in str(error)
    assert re.search(rf"^1\.0[\w.]*: {message}", str(error))
    with pytest.raises(GredpError, match=message):
        make_private(model, torch.zeros(2, 4))
    assert not PrivacyEngine.is_compatible(module=model)


def test_a_model_that_is_itself_refused_is_called_the_model():
    (error,) = gredp.validate(nn.BatchNorm1d(3))
    assert str(error).startswith("the model: BatchNorm1d")


def test_every_layer_that_must_go_is_listed():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.LSTM(3, 3), nn.InstanceNorm1d(3))
    assert [str(e).split(":")[0] for e in gredp.validate(model)] == ["0", "2"]


ALLOWED = {
    "frozen BatchNorm in eval mode": lambda: frozen(nn.BatchNorm1d(4)).eval(),
    "InstanceNorm": lambda: nn.InstanceNorm1d(4, affine=True),
    "frozen attention": lambda: frozen(nn.MultiheadAttention(4, 2)),
    "frozen LSTM": lambda: frozen(nn.LSTM(4, 4)),
    "dropout": lambda: nn.Dropout(),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "bare convolution": lambda: nn.ConvTranspose2d(4, 4, 2),
}


@pytest.mark.parametrize("build", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_does_not_mix_records_is_allowed(build):
    assert gredp.validate(nn.Sequential(nn.Linear(4, 4), build())) == []


def test_a_frozen_batch_norm_stays_in_eval_mode_and_its_statistics_stay_as_they_are():
    # allowed only because eval mode takes no batch statistics: whoever switches it on lets records mix
    model = nn.Sequential(nn.Linear(3, 4), frozen(nn.BatchNorm1d(4)).eval(), nn.Linear(4, 2))
    before = copy.deepcopy(model[1].state_dict())
    x = torch.randn(5, 3)
    model, optimizer, _ = make_private(model, x)
    assert not model[1].training
    backward(model, x)
    optimizer.step()
    assert all(torch.equal(v, before[n]) for n, v in model[1].state_dict().items())


def test_a_batch_norm_switched_to_training_is_refused():
    # a loop that calls model.train() every epoch does this; the running statistics would follow the data
    model = nn.Sequential(nn.Linear(3, 4), frozen(nn.BatchNorm1d(4)).eval(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    model, optimizer, _ = make_private(model, x)
    before = copy.deepcopy(model[1].state_dict())
    model.train()
    refused = False
    try:
        backward(model, x)
        optimizer.step()
    except GredpError:
        refused = True
    # or else kept in eval mode
    assert refused or all(torch.equal(v, before[n]) for n, v in model[1].state_dict().items())


# ------------------------------------------------------------------ fix


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
@pytest.mark.parametrize("channels", [1, 3, 16, 24, 40, 48, 64, 100])
def test_batch_norm_becomes_group_norm_over_about_sixteen_channels(kind, channels):
    new = gredp.fix(nn.Sequential(kind(channels, eps=1e-3)))[0]
    assert isinstance(new, nn.GroupNorm)
    assert new.num_channels == channels
    assert channels % new.num_groups == 0
    assert new.num_groups == math.gcd(channels, max(1, channels // 16))
    assert new.eps == 1e-3
    assert new.affine


def test_options_of_fix_are_followed_or_refused():
    model = nn.Sequential(nn.BatchNorm2d(8, eps=1e-3), nn.BatchNorm1d(8))
    for fix in (gredp.fix, gredp.ModuleValidator.fix, gredp.ModuleValidator.fix_and_validate):
        assert [layer.num_groups for layer in fix(model, num_groups=4)] == [4, 4]
        assert [type(layer) for layer in fix(model, replace_bn_with_in=True)] == [
            nn.InstanceNorm2d,
            nn.InstanceNorm1d,
        ]
        with pytest.raises(TypeError, match="num_group"):
            fix(model, num_group=4)
        with pytest.raises(GredpError, match="3 groups do not divide the 8 channels"):
            fix(model, num_groups=3)
        with pytest.raises(GredpError, match="num_groups is a positive number"):
            fix(model, num_groups=4, replace_bn_with_in=True)
    new = gredp.fix(model, replace_bn_with_in=True)[0]
    assert (new.eps, new.affine, new.track_running_stats) == (1e-3, True, False)
    with pytest.raises(GredpError, match="SyncBatchNorm has no InstanceNorm"):
        gredp.fix(nn.SyncBatchNorm(8), replace_bn_with_in=True)


def test_batch_norm_without_parameters_becomes_group_norm_without():
    assert not gredp.fix(nn.BatchNorm2d(4, affine=False)).affine


@pytest.mark.parametrize("shape", [(4,), (4, 5), (4, 3, 3)], ids=str)
def test_a_fixed_batch_norm_can_be_trained(shape):
    # BatchNorm1d is used on [b, c] as well as on [b, c, t]
    kind = nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d
    model = gredp.fix(nn.Sequential(kind(4)))
    x = torch.randn(3, *shape)
    model, optimizer, _ = make_private(model, x)
    backward(model, x)
    optimizer.step()
    assert not model[0].weight.eq(1).all()


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_instance_norm_loses_its_running_statistics(kind):
    new = gredp.fix(nn.Sequential(kind(4, affine=True, eps=1e-3, track_running_stats=True)))[0]
    assert type(new) is kind
    assert not new.track_running_stats
    assert (new.num_features, new.eps, new.affine) == (4, 1e-3, True)


def test_instance_norm_keeps_its_weights():
    # the message says that fix turns the statistics off, not that it starts the layer anew
    model = nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
    nn.init.normal_(model[0].weight)
    nn.init.normal_(model[0].bias)
    fixed = gredp.fix(model)
    assert torch.equal(fixed[0].weight, model[0].weight)
    assert torch.equal(fixed[0].bias, model[0].bias)


def test_attention_becomes_private_attention():
    model = gredp.fix(nn.Sequential(nn.MultiheadAttention(4, 2, batch_first=True)))
    assert isinstance(model[0], PrivateMultiheadAttention)
    assert gredp.validate(model) == []


def test_what_has_no_replacement_stays_and_is_still_refused():
    model = nn.Sequential(nn.LSTMCell(4, 4))
    fixed = gredp.fix(model)
    assert type(fixed[0]) is type(model[0])
    assert len(gredp.validate(fixed)) == 1


def test_fix_leaves_what_is_fine_and_the_given_model_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), frozen(nn.BatchNorm1d(4)).eval())
    fixed = gredp.fix(model)
    assert isinstance(model[1], nn.BatchNorm1d)
    assert torch.equal(fixed[0].weight, model[0].weight)
    assert fixed[0].weight is not model[0].weight
    assert isinstance(fixed[2], nn.BatchNorm1d)  # allowed, so kept
    assert gredp.validate(fixed) == []


@pytest.mark.parametrize("training", [True, False])
def test_fix_keeps_modes_and_types(training):
    fixed = gredp.fix(nn.Sequential(nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2)).double().train(training))
    assert {p.dtype for p in fixed.parameters()} == {torch.float64}
    assert {m.training for m in fixed.modules()} == {training}


def test_a_refused_root_is_replaced_itself():
    assert isinstance(gredp.fix(nn.BatchNorm1d(4)), nn.GroupNorm)


def test_a_layer_with_two_parents_is_replaced_in_both_by_one():
    layer = nn.BatchNorm1d(4)
    fixed = gredp.fix(nn.Sequential(nn.Sequential(layer), nn.Sequential(layer)))
    assert gredp.validate(fixed) == []
    assert fixed[0][0] is fixed[1][0]


# ------------------------------------------------------------------ to_spectral


def test_linear_and_convolution_become_spectral():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
    spectral = gredp.to_spectral(model, block=4)
    assert [type(m) for m in spectral] == [
        SpectralConv2d,
        nn.Flatten,
        BlockCirculantLinear,
        nn.ReLU,
        BlockCirculantLinear,
    ]
    assert spectral[2].block == 4
    assert spectral(torch.randn(3, 1, 6, 6)).shape == (3, 10)
    assert isinstance(model[2], nn.Linear)  # a copy
    assert torch.equal(spectral[0].weight, model[0].weight)
    assert spectral[0].weight is not model[0].weight


@pytest.mark.parametrize(
    ("inputs", "outputs", "block", "size"),
    [(16, 10, 8, 2), (24, 12, 8, 6), (512, 10, 8, 2), (7, 3, 8, 1), (16, 16, 8, 8), (12, 12, 5, 4)],
)
def test_the_last_layer_takes_the_largest_block_that_divides_both_sizes(inputs, outputs, block, size):
    spectral = gredp.to_spectral(nn.Sequential(nn.Linear(9, inputs), nn.Linear(inputs, outputs)), block)
    assert spectral[0].block == block
    assert spectral[1].block == size


def test_spectral_layers_keep_the_norm_of_what_they_replace():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 10))
    spectral = gredp.to_spectral(model)
    for old, new in zip(model, spectral):
        torch.testing.assert_close(new.to_dense().norm(), old.weight.norm())
        assert torch.equal(new.bias, old.bias)


def test_spectral_layers_are_not_converted_twice():
    once = gredp.to_spectral(nn.Sequential(nn.Conv2d(1, 1, 2), nn.Linear(4, 4)))
    twice = gredp.to_spectral(once)
    assert [type(m) for m in twice] == [SpectralConv2d, BlockCirculantLinear]
    assert torch.equal(once[1].weight, twice[1].weight)


def test_layers_with_a_forward_of_their_own_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert type(gredp.to_spectral(nn.Sequential(Scaled(4, 4)))[0]) is Scaled


def test_a_model_with_stock_attention_still_runs_after_to_spectral():
    # the stock module reads the weight of its projection itself: that one cannot be exchanged
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    for converted in (gredp.to_spectral(model, 4), gredp.fix(gredp.to_spectral(model, 4))):
        assert converted(x).shape == (2, 3, 8)


def test_to_spectral_after_fix_converts_the_projections_of_attention():
    model = gredp.to_spectral(gredp.fix(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), 4)
    assert isinstance(model.self_attn.q_proj, BlockCirculantLinear)
    assert isinstance(model.linear1, BlockCirculantLinear)
    for training in (True, False):
        assert model.train(training)(torch.randn(2, 3, 8)).shape == (2, 3, 8)


def test_a_shared_linear_layer_stays_shared_after_to_spectral():
    layer = nn.Linear(4, 4)
    model = gredp.to_spectral(nn.Sequential(nn.Sequential(layer), nn.Sequential(layer)), 2)
    assert isinstance(model[1][0], BlockCirculantLinear)
    assert model[0][0] is model[1][0]


def test_frozen_layers_stay_frozen_after_to_spectral():
    model = gredp.to_spectral(
        nn.Sequential(frozen(nn.Linear(4, 4)), frozen(nn.Conv1d(4, 4, 1)), nn.Linear(4, 2))
    )
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["2.weight", "2.bias"]


# ------------------------------------------------------------------ the names of Opacus


def test_module_validator_has_the_names_an_opacus_user_knows():
    good, bad = nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))
    assert ModuleValidator.validate(good) == []
    assert ModuleValidator.is_valid(good)
    assert not ModuleValidator.is_valid(bad)
    assert len(ModuleValidator.validate(bad)) == 1
    with pytest.raises(UnsupportedModuleError, match="BatchNorm1d"):
        ModuleValidator.validate(bad, strict=True)
    assert isinstance(ModuleValidator.fix(bad)[0], nn.GroupNorm)
    assert ModuleValidator.is_valid(ModuleValidator.fix_and_validate(bad))
    with pytest.raises(UnsupportedModuleError, match="LSTMCell"):
        ModuleValidator.fix_and_validate(nn.Sequential(nn.LSTMCell(3, 3)))


def test_module_validator_reports_all_errors_on_one_line_and_eval_mode_among_them():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LSTM(3, 3)).eval()
    with pytest.raises(UnsupportedModuleError, match=r"BatchNorm1d.*; .*LSTM.*; .*eval mode") as caught:
        ModuleValidator.validate(model, strict=True)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ refused while training


def test_a_weight_used_outside_its_layer_is_refused_by_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.table(ids).mean(1), self.table.weight)

    ids = torch.randint(5, (4, 2))
    model, _, _ = make_private(Tied(), ids)
    with pytest.raises(GredpError, match=r"^parameter table.weight received a gradient outside its layer"):
        backward(model, ids)


def test_a_penalty_on_the_weights_is_refused_by_name():
    # its gradient would reach the optimizer without clip
    model, _, _ = make_private(nn.Linear(3, 2), torch.randn(4, 3))
    with pytest.raises(GredpError, match="parameter weight received a gradient outside its layer"):
        (model(torch.randn(4, 3)).square().mean() + model.weight.square().sum()).backward()


def test_a_parameter_list_is_refused_by_name():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scales[0]

    model, _, _ = make_private(Listed(), torch.randn(4, 3))
    with pytest.raises(GredpError, match=r"parameter scales.0 received a gradient outside"):
        backward(model, torch.randn(4, 3))


def test_a_parameter_unfrozen_after_make_private_is_refused_or_stays():
    # progressive unfreezing: its raw gradient must never reach the optimizer
    model = nn.Sequential(frozen(nn.Linear(3, 3)), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(model, x)
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    with contextlib.suppress(GredpError):
        backward(model, 1000 * x)
        optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_stale_gradient_of_a_frozen_parameter_is_not_stepped():
    # left behind by a backward before make_private: it was never clipped
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    backward(model, 1000 * x)
    frozen(model[0])
    before = model[0].weight.detach().clone()
    model, optimizer, _ = make_private(model, x)
    backward(model, x)
    optimizer.step()
    assert torch.equal(model[0].weight, before)


class Tracking(nn.Module):
    """Keeps a running mean of its inputs, one way or another."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.layer = way, nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        dtype = torch.long if way == "counts" else torch.float32
        self.register_buffer("seen", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean(0)
            if self.way == "in place":
                self.seen.mul_(0.9).add_(mean, alpha=0.1)
            elif self.way == "assigned":
                self.seen = 0.9 * self.seen + 0.1 * mean
            elif self.way == "data":
                self.seen.data.add_(mean)
            elif self.way == "frozen parameter":
                self.frozen.add_(mean)
            elif self.way == "late":
                self.register_buffer("noticed", mean)
            elif self.way == "trained":
                with torch.no_grad():
                    self.layer.bias.add_(mean[:2])
            elif self.way == "counts":
                self.seen += (x > 0).sum(0)
        return self.layer(x)


@pytest.mark.parametrize("way", ["in place", "assigned", "data", "counts"])
def test_a_buffer_that_follows_the_data_is_refused_by_name(way):
    # what it holds leaves with the model, and nothing noised it
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(Tracking(way), x)
    with pytest.raises(GredpError, match=r"^buffer seen was changed after make_private"):
        backward(model, x)
    assert optimizer.ledger.steps == 0


WRITTEN = {
    "frozen parameter": "parameter frozen was changed by a training forward",
    "late": "buffer noticed was changed after make_private",
    "trained": r"parameter layer\.bias was changed by a training forward",
}


@pytest.mark.parametrize("way", WRITTEN)
def test_whatever_a_forward_writes_to_is_refused_by_name(way):
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(Tracking(way), x)
    with pytest.raises(GredpError, match="^" + WRITTEN[way]):
        backward(model, x)
    assert optimizer.ledger.steps == 0


@pytest.mark.parametrize("way", ["in place", "assigned", "frozen parameter", "late"])
def test_it_is_refused_too_when_the_models_own_call_is_gone_round(way):
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(Tracking(way), x)
    model.forward(x).square().sum(1).mean().backward()
    with pytest.raises(GredpError, match="was changed after make_private"):
        optimizer.step()
    assert optimizer.ledger.steps == 0


def from_a_backward_hook(model: nn.Module, x: Tensor) -> None:
    def write(grad: Tensor) -> None:
        model.seen.add_(grad.sum())

    out = model(x)
    out.register_hook(write)
    out.square().sum(1).mean().backward()


def from_the_loop(model: nn.Module, x: Tensor) -> None:
    backward(model, x)
    model.seen.copy_(x.mean(0))


def by_the_data_attribute(model: nn.Module, x: Tensor) -> None:
    backward(model, x)
    model.frozen.data.copy_(x.mean(0))


@pytest.mark.parametrize("write", [from_a_backward_hook, from_the_loop, by_the_data_attribute])
@pytest.mark.parametrize("steps", [0, 2])
def test_state_that_is_written_between_forward_and_release_is_refused(write, steps):
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(Tracking("none"), x)
    for _ in range(steps):
        backward(model, x)
        optimizer.step()
    write(model, x)
    with pytest.raises(GredpError, match=r"^(buffer seen|parameter frozen) was changed after make_private"):
        optimizer.step()
    assert optimizer.ledger.steps == steps


def test_what_is_loaded_is_the_callers_word_and_what_is_written_after_it_is_not():
    # resuming from a checkpoint after make_private
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Sequential(Tracking("none")), x)
    other = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    for part, state in ((model, other), (model[0], {n.removeprefix("0."): v for n, v in other.items()})):
        part.load_state_dict(state)
        model[0](x).square().sum(1).mean().backward()  # parts may be called too
        optimizer.step()
    assert optimizer.ledger.steps == 2
    model[0].seen.add_(x.mean(0))
    with pytest.raises(GredpError, match=r"^buffer 0\.seen was changed"):
        backward(model, x)


def test_weights_may_be_clamped_between_steps():
    """Trained parameters follow from releases; what a loop makes of them is its own."""
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    for _ in range(2):
        backward(model, x)
        optimizer.step()
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1)
    assert optimizer.ledger.steps == 2


def test_a_buffer_written_after_the_last_step_is_not_kept(tmp_path):
    x, model, engine = torch.randn(4, 3), Tracking("none"), PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.layer.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    model.seen.copy_(x.mean(0))
    with pytest.raises(GredpError, match=r"^buffer seen was changed"):
        engine.save(tmp_path / "run")


def test_a_second_forward_is_refused_when_parts_of_the_model_are_called_too():
    # The model's own forward never runs, yet two draws of records must not be added row by row.
    x = torch.randn(4, 3)
    model, _, _ = make_private(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), x)
    model[1](model[0](x)).square().mean().backward()
    with pytest.raises(GredpError, match=r"^a second forward in a step on batches of your own"):
        model[1](model[0](x.flip(0))).square().mean().backward()


def test_two_heads_may_share_one_backward():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return self.first(h), self.second(h)

    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(Heads(), x)
    first, second = model(x)
    (first.square().mean() + second.square().mean()).backward()
    optimizer.step()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


def test_a_step_without_backward_is_refused_and_not_charged():
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    with pytest.raises(GredpError, match=r"^optimizer.step\(\) without a new backward pass"):
        optimizer.step()
    backward(model, x)
    optimizer.step()
    with pytest.raises(GredpError, match="without a new backward"):
        optimizer.step()
    assert optimizer.ledger.steps == 1


def test_zero_grad_forgets_the_backward():
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    backward(model, x)
    optimizer.zero_grad()
    with pytest.raises(GredpError, match="without a new backward"):
        optimizer.step()
    backward(model, x)  # and the next one is not a second
    optimizer.step()
    assert optimizer.ledger.steps == 1


def test_training_in_eval_mode_says_what_to_call():
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    model.eval()
    with pytest.raises(GredpError, match=r"call model.train\(\) before training"):
        backward(model, x)
    with pytest.raises(GredpError, match=r"check model.train\(\)"):
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_between_steps_is_free():
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    with torch.no_grad():
        model(x)
    backward(model, x)
    optimizer.step()
    assert optimizer.ledger.steps == 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x * shared[:1] * self.scale


@pytest.mark.parametrize(
    ("layer", "inputs", "why"),
    [
        # also where they are as many as the records by coincidence
        (Scaled(), lambda x: (x, x.new_ones(4, 3)), r"^mix \(Scaled\) has 4 rows whatever the batch"),
        (Scaled(), lambda x: (x, x.new_ones(5, 3)), r"^mix \(Scaled\) takes 2 tensors and returns Tensor"),
        (
            nn.EmbeddingBag(6, 2, mode="max"),
            lambda x: (x[:, 0].long(), torch.arange(len(x))),
            r"^mix \(EmbeddingBag\) takes the maximum of ids with offsets.*\[batch, length\]",
        ),
    ],
)
def test_inputs_that_are_no_rows_of_records_are_refused_by_name(layer, inputs, why):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(*inputs(x))

    model, _, _ = make_private(Pair(), torch.randn(4, 3).abs())
    with pytest.raises(GredpError, match=why):
        model(torch.randn(4, 3).abs())


def test_a_grad_scaler_is_refused_in_one_line():
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).square().sum(1).mean()).backward()
    with pytest.raises(GredpError, match=r"^a GradScaler's factor would be clipped away"):
        scaler.step(optimizer)
    assert optimizer.ledger.steps == 0


def test_layers_that_see_different_numbers_of_records_are_refused():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.whole = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:  # [b, t, 3]: the words are put on the batch axis
            return self.whole(self.words(x.flatten(0, 1)).view(x.shape).mean(1))

    x = torch.randn(4, 2, 3)
    model, _, _ = make_private(Folded(), x)
    with pytest.raises(GredpError, match=r"words \(Linear\) turns \(8, 3\) into \(8, 3\).* here 4 records"):
        backward(model, x)


def test_a_model_that_puts_positions_before_records_is_refused():
    # every layer agrees on 5 "records", but these are positions: the clip would bound the wrong thing
    class PositionsFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    x = torch.randn(4, 5, 3)
    model, optimizer, _ = make_private(PositionsFirst(), x)

    def train() -> None:
        backward(model, x)
        optimizer.step()

    with pytest.raises(GredpError, match="records"):
        train()


def test_a_layer_that_changes_the_number_of_records_is_refused():
    class Flattening(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).flatten()

    model, _, _ = make_private(nn.Sequential(Flattening()), torch.randn(4, 3))
    with pytest.raises(GredpError, match=r"turns \(4, 3\) into \(12,\): the first dimension"):
        model(torch.randn(4, 3))


def test_a_model_can_be_made_private_only_once():
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    with pytest.raises(GredpError, match="private already"):
        make_private(model, x)
    optimizer.capture.detach()
    make_private(model, x)


def test_a_deep_copy_of_a_private_model_is_an_ordinary_model():
    x = torch.randn(4, 3)
    model, _, _ = make_private(nn.Linear(3, 2), x)
    twin = copy.deepcopy(model)
    backward(twin, x)
    assert twin.weight.grad is not None


def test_parameters_of_model_and_optimizer_must_agree():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    settings = {"data_loader": loader, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    few = torch.optim.SGD(model[0].parameters(), lr=1.0)
    with pytest.raises(GredpError, match=r"parameter 1.weight is trainable but not in the optimizer"):
        PrivacyEngine().make_private(module=model, optimizer=few, **settings)
    many = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(GredpError, match="1 of the optimizer's parameters do not belong to the model"):
        PrivacyEngine().make_private(module=model, optimizer=many, **settings)
    frozen(model)
    with pytest.raises(GredpError, match="no trainable parameter"):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), **settings
        )


def test_a_layer_that_comes_after_make_private_is_refused():
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), x)
    model[1] = nn.Linear(3, 2)
    backward(model, x)
    with pytest.raises(GredpError, match=r"parameter 1\.weight was added after make_private"):
        optimizer.step()


FOREIGN = {
    "appended": lambda optimizer, p: optimizer.param_groups[0]["params"].append(p),
    "a new group": lambda optimizer, p: optimizer.param_groups.append(
        {**optimizer.param_groups[0], "params": [p]}
    ),
    "through the original": lambda optimizer, p: optimizer.original_optimizer.add_param_group(
        {"params": [p]}
    ),
}


@pytest.mark.parametrize("way", FOREIGN)
def test_a_foreign_parameter_in_the_optimizer_is_refused_and_does_not_move(way):
    x = torch.randn(4, 3)
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    scale = nn.Parameter(torch.zeros(2))
    FOREIGN[way](optimizer, scale)
    (model(x) * (1 + scale)).sum(1).mean().backward()
    with pytest.raises(GredpError, match=r"a parameter of shape \(2,\) of the optimizer was not the model's"):
        optimizer.step()
    assert optimizer.ledger.steps == 0
    assert not scale.any()


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "takes a sum, but loss_reduction is 'mean'"),
        (nn.CrossEntropyLoss(weight=torch.ones(2)), "couple records"),
    ],
)
def test_a_criterion_that_couples_records_is_refused(criterion, words):
    with pytest.raises(GredpError, match=words):
        make_private(nn.Linear(3, 2), torch.randn(4, 3), criterion=criterion, grad_sample_mode="ghost")


def test_what_is_no_loader_or_steps_in_its_own_way_is_refused():
    model = nn.Linear(3, 2)
    settings = {"module": model, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.raises(GredpError, match="need a torch DataLoader, not a list"):
        PrivacyEngine().make_private(
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=[1], **settings
        )
    with pytest.raises(GredpError, match="LBFGS evaluates the loss several times"):
        PrivacyEngine().make_private(
            optimizer=torch.optim.LBFGS(model.parameters()),
            data_loader=DataLoader(TensorDataset(torch.randn(4, 3))),
            **settings,
        )


def test_hooks_of_the_optimizer_are_called():
    x, called = torch.randn(4, 3), []
    model, optimizer, _ = make_private(nn.Linear(3, 2), x)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    backward(model, x)
    optimizer.step()
    assert called == ["before", "after"]
