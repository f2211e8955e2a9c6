"""Laws that every layer type must obey: a new rule joins `CASES` and inherits all of them."""

import copy
import doctest
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from gredp import BlockCirculantLinear, PrivateMultiheadAttention, SpectralConv2d, WSConv2d, register_rule
from gredp.errors import GredpError
from gredp.gradient.capture import Capture
from gredp.gradient.per_sample import Dense, PerSampleGradient
from gredp.gradient.rules import rule_for
from gredp.gradient.units import blocks
from oracles import clipped_sum, grid_energy, of_records, per_sample_gradients, wavy
from worlds import make_private, released

quick = settings(max_examples=30, deadline=None, derandomize=True)

# ------------------------------------------------------------------ modules under test


class SelfAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = PrivateMultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Bare(nn.Module):
    """Parameters that belong to no stock layer: only the generic rule can serve."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 4))
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.mix.T) * self.shift


class Rooted(nn.Module):
    """A root model with a parameter of its own and children below it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x * self.scale))


class Tapered(nn.Linear):
    """A user's layer, with a rule that was registered from outside of the package."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sin(x))


class Counted(Tapered):
    pass


@register_rule(Tapered)
def tapered(layer: Tapered, x: Tensor, g: Tensor) -> dict[str, PerSampleGradient]:
    return {"weight": Dense(g[:, :, None] * torch.sin(x)[:, None]), "bias": Dense(g)}


class Pairs(nn.Module):
    """Two tensors go into a layer, with a row for each record in both."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(2, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :2], torch.tanh(x[:, 2:]))


class Bags(nn.Module):
    """Each record's ids up to the first 3, all in one row with offsets."""

    def __init__(self, weighted: bool = False, **options):
        super().__init__()
        self.layer, self.weighted = nn.EmbeddingBag(6, 3, **options), weighted

    def forward(self, x: Tensor) -> Tensor:
        kept = (x != 3).cumprod(1).bool()
        offsets = nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
        offsets = offsets if self.layer.include_last_offset else offsets[:-1]
        weights = torch.arange(1, 1 + x.shape[1]).to(self.layer.weight).expand(x.shape)[kept]
        return self.layer(x[kept], offsets, per_sample_weights=weights if self.weighted else None)


class Upper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu()


class Scalar(nn.Module):
    """A learned temperature: a parameter without any axis."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.temperature


class Subclassed(nn.Linear):
    """Inherits the forward of a known layer, hence its rule."""


class Rescaled(nn.Linear):
    """Inherits from a known layer but computes something else: its rule must not be used."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one record
    ids: int = 0  # records are ids below this number instead of real values
    #: torch's own forward refuses an empty batch
    refuses_empty: bool = False

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(1)
        model = self.build().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():  # norms start at 1 and 0, where mistakes hide
                parameter.add_(0.3 * torch.randn_like(parameter))
        return model

    def records(self, batch: int, dtype: torch.dtype = torch.float64, seed: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.ids:
            return torch.randint(self.ids, (batch, *self.shape), generator=generator)
        return torch.randn(batch, *self.shape, generator=generator, dtype=torch.float64).to(dtype)

    def other(self, x: Tensor) -> Tensor:
        """Another input of the same records."""
        return (x + 1) % self.ids if self.ids else 1.5 * x


C = BlockCirculantLinear
CASES = {
    "linear": Case(lambda: nn.Linear(5, 3), (5,)),
    "linear, no bias": Case(lambda: nn.Linear(5, 3, bias=False), (5,)),
    "linear, 1 to 1": Case(lambda: nn.Linear(1, 1), (1,)),
    # few positions and a large matrix take the Gram path, many positions and a small one the direct path
    "linear, few positions": Case(lambda: nn.Linear(9, 8), (2, 9)),
    "linear, many positions": Case(lambda: nn.Linear(3, 2), (7, 3)),
    "linear, two axes of positions": Case(lambda: nn.Linear(4, 3), (2, 3, 4)),
    "linear, subclass": Case(lambda: Subclassed(5, 3), (5,)),
    "linear, subclass with its own forward": Case(lambda: Rescaled(5, 3), (5,)),
    "registered from outside": Case(lambda: Tapered(5, 3), (5,)),
    "conv1d": Case(lambda: nn.Conv1d(2, 3, 3), (2, 7)),
    "conv1d, stride and dilation": Case(lambda: nn.Conv1d(2, 3, 2, stride=2, dilation=3), (2, 9)),
    "conv1d, same": Case(lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 6)),
    "conv1d, replicate": Case(lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"), (2, 5)),
    "conv2d": Case(lambda: nn.Conv2d(2, 3, 3), (2, 5, 6)),
    "conv2d, 1 by 1": Case(lambda: nn.Conv2d(2, 3, 1), (2, 3, 3)),
    "conv2d, kernel as large as the input": Case(lambda: nn.Conv2d(2, 3, (4, 5)), (2, 4, 5)),
    "conv2d, stride and padding": Case(lambda: nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 2)), (2, 6, 5)),
    "conv2d, stride that skips the border": Case(lambda: nn.Conv2d(1, 2, 2, stride=3), (1, 7, 6)),
    "conv2d, dilation": Case(lambda: nn.Conv2d(2, 3, 2, dilation=(2, 3)), (2, 5, 6)),
    "conv2d, groups": Case(lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 4, 4)),
    "conv2d, depthwise, no bias": Case(lambda: nn.Conv2d(3, 3, 3, groups=3, bias=False), (3, 4, 5)),
    "conv2d, same": Case(lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=2), (2, 5, 4)),
    "conv2d, valid": Case(lambda: nn.Conv2d(2, 3, 2, padding="valid"), (2, 3, 4)),
    "conv2d, reflect": Case(lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 4, 5)),
    "conv2d, circular": Case(lambda: nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode="circular"), (2, 4, 5)),
    "conv3d": Case(lambda: nn.Conv3d(2, 2, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 0)), (2, 3, 5, 2)),
    "spectral conv2d": Case(lambda: SpectralConv2d(2, 3, 3, stride=2, padding=1), (2, 5, 6)),
    "standardised conv2d": Case(lambda: WSConv2d(2, 3, 3, padding=1), (2, 4, 5)),
    "standardised conv2d, groups, no bias": Case(
        lambda: WSConv2d(4, 6, (2, 3), stride=2, groups=2, bias=False), (4, 5, 6)
    ),
    "group norm": Case(lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "group norm, vectors": Case(lambda: nn.GroupNorm(2, 4), (4,)),
    "layer norm": Case(lambda: nn.LayerNorm(5), (5,)),
    "layer norm, positions": Case(lambda: nn.LayerNorm(5), (3, 5)),
    "layer norm, two axes": Case(lambda: nn.LayerNorm((3, 5)), (2, 3, 5)),
    "layer norm, no bias": Case(lambda: nn.LayerNorm(5, bias=False), (3, 5)),
    "rms norm": Case(lambda: nn.RMSNorm(5), (3, 5)),
    "rms norm, two axes": Case(lambda: nn.RMSNorm((3, 5), eps=1e-3), (3, 5)),
    "instance norm 1d": Case(lambda: nn.InstanceNorm1d(3, affine=True), (3, 5), refuses_empty=True),
    "instance norm 2d": Case(lambda: nn.InstanceNorm2d(3, affine=True), (3, 2, 4), refuses_empty=True),
    "instance norm 3d": Case(lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 2, 3), refuses_empty=True),
    "embedding": Case(lambda: nn.Embedding(6, 3), (4,), ids=6),
    # three ids in five places: every record repeats some of them
    "embedding, repeated ids": Case(lambda: nn.Embedding(6, 3), (5,), ids=3),
    "embedding, padding": Case(lambda: nn.Embedding(4, 3, padding_idx=1), (6,), ids=4),
    "embedding, negative padding": Case(lambda: nn.Embedding(4, 3, padding_idx=-1), (6,), ids=4),
    "embedding, one id a record": Case(lambda: nn.Embedding(6, 3), (), ids=6),
    "embedding, two axes of ids": Case(lambda: nn.Embedding(6, 3), (2, 3), ids=6),
    "circulant, block 1": Case(lambda: C(3, 2, block=1), (3,)),
    "circulant, block 2": Case(lambda: C(5, 3, block=2), (5,)),
    "circulant, block 3": Case(lambda: C(6, 3, block=3), (6,)),
    "circulant, block 5": Case(lambda: C(7, 6, block=5, bias=False), (7,)),
    "circulant, block 8": Case(lambda: C(10, 17, block=8), (10,)),
    "circulant, block beyond both sizes": Case(lambda: C(2, 3, block=8), (2,)),
    "circulant, positions": Case(lambda: C(5, 4, block=3), (4, 5)),
    "circulant, no bias": Case(lambda: C(4, 4, block=2, bias=False), (4,)),
    "attention": Case(SelfAttention, (3, 4)),
    "attention, no bias": Case(lambda: SelfAttention(bias=False), (3, 4)),
    "attention, a learned and a zero position": Case(
        lambda: SelfAttention(add_bias_kv=True, add_zero_attn=True), (3, 4)
    ),
    "weight norm, linear": Case(lambda: weight_norm(nn.Linear(4, 3)), (2, 4)),
    "weight norm, conv1d": Case(lambda: weight_norm(nn.Conv1d(2, 3, 3, bias=False)), (2, 5)),
    "weight norm, of all": Case(lambda: weight_norm(nn.Linear(4, 3), dim=None), (4,)),
    "parametrized": Case(lambda: register_parametrization(nn.Linear(4, 3), "weight", Upper()), (4,)),
    "bilinear": Case(Pairs, (5,)),
    "embedding bag": Case(lambda: nn.EmbeddingBag(6, 3), (4,), ids=6),
    "embedding bag, sum, padding": Case(
        lambda: nn.EmbeddingBag(6, 3, mode="sum", padding_idx=2), (4,), ids=6
    ),
    "embedding bag, maximum": Case(lambda: nn.EmbeddingBag(6, 3, mode="max"), (4,), ids=6),
    "bags with offsets": Case(Bags, (5,), ids=6),
    "bags with offsets, padding": Case(lambda: Bags(padding_idx=2), (5,), ids=6),
    "bags with offsets, weighted, the end too": Case(
        lambda: Bags(True, mode="sum", include_last_offset=True), (5,), ids=6
    ),
    "bare parameters": Case(Bare, (4,)),
    "bare parameters, positions": Case(Bare, (3, 4)),
    "scalar parameter": Case(Scalar, (3,)),
    "transposed convolution": Case(lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 2)),
    "prelu": Case(lambda: nn.PReLU(3), (3, 4)),
    "root with a parameter and children": Case(Rooted, (4,)),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # of torch.func
]


def cases_where(holds: Callable[[Case], bool]) -> pytest.MarkDecorator:
    chosen = {name: case for name, case in CASES.items() if holds(case)}
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen)


every_case = cases_where(lambda case: True)


def captured(model: nn.Module, x: Tensor) -> dict[str, PerSampleGradient]:
    """The gradients of one forward and backward, as the hooks bring them."""
    capture = Capture(model.train(), "sum")
    try:
        wavy(model(x)).sum().backward()
        spectra = capture.take()
        assert spectra is not None, "the backward reached no layer"
        assert spectra.batch == len(x)
        # what a gradient takes for its Fourier grid must be what the plan was certified for
        assert {b.name: len(b.grid) for b in blocks(capture.module, capture.units)}.items() >= {
            n: g.grid_axes for n, g in spectra.gradients.items()
        }.items()
        return dict(spectra.gradients)
    finally:
        capture.detach()


def assert_close(found: Tensor, truth: Tensor, tolerance: float = 1e-9) -> None:
    # far below a typical gradient lies what rounding leaves of an exact zero
    largest = max(truth.abs().max().item(), 0.1) if truth.numel() else 0.0
    torch.testing.assert_close(found.to(truth), truth, rtol=tolerance, atol=tolerance * largest)


def assert_equals_the_loop(model: nn.Module, x: Tensor, tolerance: float = 1e-9) -> None:
    truth = per_sample_gradients(model, x)
    assert any(g.abs().max() > 0.01 for g in truth.values())  # or the comparison could not fail
    found = captured(model, x)
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        assert_close(gradient.dense(), truth[name], tolerance)


def assert_answers_agree(gradients: dict[str, PerSampleGradient], tolerance: float = 1e-9) -> None:
    """The quick answers of each gradient against its materialized values."""
    for gradient in gradients.values():
        dense = gradient.dense()
        rows = dense.double().reshape(len(dense), -1 if len(dense) else 0)
        factors = torch.linspace(0.5, 2, len(dense), dtype=dense.dtype)
        assert_close(gradient.squared_norm(), rows.square().sum(1), tolerance)
        assert_close(gradient.weighted_sum(factors), torch.tensordot(factors, dense, 1), tolerance)
        if len(dense):
            assert_close(gradient.grid_energy(), grid_energy(dense, gradient.grid_axes), tolerance)


# ------------------------------------------------------------------ (a), (b): the truth, and quick answers


@every_case
def test_gradients_equal_the_loop_over_records(case):
    assert_equals_the_loop(case.model(), case.records(4))


@every_case
def test_gradients_equal_the_loop_in_single_precision(case):
    assert_equals_the_loop(case.model(torch.float32), case.records(4, torch.float32), 2e-5)


@every_case
def test_norm_energy_and_sum_equal_those_of_the_dense_gradient(case):
    assert_answers_agree(captured(case.model(), case.records(4)))


@every_case
def test_a_batch_of_one_is_no_special_case(case):
    assert_equals_the_loop(case.model(), case.records(1))


@every_case
def test_removed_records_leave_nothing_behind(case):
    # `zero_unless` is what stands between a record full of NaN and the weights
    x = case.records(3)
    if not case.ids:
        x[1] = torch.nan
    mask = torch.tensor([True, False, True])
    for gradient in captured(case.model(), x).values():
        kept = gradient.zero_unless(mask)
        assert kept.dense()[1].eq(0).all()
        assert kept.weighted_sum(torch.ones(3, dtype=torch.float64)).isfinite().all()
        assert torch.equal(kept.dense()[mask], gradient.dense()[mask])


# ------------------------------------------------------------------ (c): nobody was drawn


@every_case
def test_an_empty_batch_has_empty_norms_and_a_zero_sum(case):
    model, x = case.model(), case.records(0)
    if case.refuses_empty:
        with pytest.raises(IndexError):  # torch's own kernel: the layer cannot be run at all
            model(x)
        return
    for name, gradient in captured(model, x).items():
        shape = model.get_parameter(name).shape
        assert gradient.dense().shape == (0, *shape)
        assert gradient.squared_norm().shape == (0,)
        total = gradient.weighted_sum(torch.ones(0, dtype=torch.float64))
        assert total.shape == shape
        assert total.eq(0).all()


@cases_where(lambda case: not case.refuses_empty)
def test_an_empty_batch_has_empty_energies(case):
    # the shaped and the band-limited step ask for these
    model, x = case.model(), case.records(0)
    capture = Capture(model)
    grids = {block.name: block.grid for block in blocks(capture.module, capture.units)}
    capture.detach()
    for name, gradient in captured(model, x).items():
        assert gradient.grid_energy().shape == (0, *grids[name])


# ------------------------------------------------------------------ (d): records do not see each other


@every_case
@pytest.mark.parametrize("intruder", ["ordinary", "large", "nan"])
def test_a_record_is_bit_equal_whatever_the_others_are(case, intruder):
    model, x = case.model(torch.float32), case.records(4, torch.float32)
    changed = case.records(4, torch.float32, seed=3)
    if not case.ids:
        changed = {"ordinary": changed, "large": 1e6 * changed, "nan": torch.full_like(x, torch.nan)}[
            intruder
        ]
    changed[2] = x[2]
    first, second = captured(copy.deepcopy(model), x), captured(model, changed)
    for name in first:
        assert torch.equal(first[name].dense()[2], second[name].dense()[2])
        assert torch.equal(first[name].squared_norm()[2], second[name].squared_norm()[2])


# ------------------------------------------------------------------ (e): several views of a record


@every_case
@pytest.mark.parametrize("needs", ["norms", "spectra"])
def test_views_of_a_record_count_as_their_mean(case, needs):
    model, x = case.model(), case.records(4 * 3)
    truth = of_records(model, x, 3)
    capture = Capture(model, "mean", needs, views=3)
    wavy(model(x)).mean().backward()
    found = capture.take()
    capture.detach()
    assert found.batch == 4
    assert found.gradients.keys() == truth.keys()
    for name, gradient in found.gradients.items():
        assert_close(gradient.dense() * found.scale, truth[name])
    assert_answers_agree(found.gradients)


# ------------------------------------------------------------------ (f): used twice, tied, shared


class Twice(nn.Module):
    """Applies `first` to the records and `second` to another input of the same records."""

    def __init__(self, case: Case, first: nn.Module, second: nn.Module):
        super().__init__()
        self.case, self.first, self.second = case, first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + 2 * self.second(self.case.other(x))


@every_case
def test_a_layer_used_twice_counts_both_uses(case):
    layer = case.model()
    model = Twice(case, layer, layer)
    assert_equals_the_loop(model, case.records(3))
    assert_answers_agree(captured(model, case.records(3)))


@every_case
def test_two_forwards_count_as_a_layer_used_twice(case):
    model, x = case.model(), case.records(3)
    truth = per_sample_gradients(Twice(case, model, model), x)
    capture = Capture(model.train(), "sum")
    capture.handed_out = lambda: 1  # both are on the same batch of a loader
    wavy(model(x) + 2 * model(case.other(x))).sum().backward()
    found = capture.take().gradients
    capture.detach()
    assert {f"first.{name}" for name in found} == truth.keys()
    for name, gradient in found.items():
        assert_close(gradient.dense(), truth[f"first.{name}"])


@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding", "group norm", "bare parameters"])
def test_a_layer_with_two_parents_is_counted_once_for_each_use(name):
    case = CASES[name]
    layer = case.model()
    assert_equals_the_loop(
        Twice(case, nn.Sequential(layer), nn.Sequential(nn.Identity(), layer)), case.records(3)
    )


@every_case
def test_a_parameter_shared_by_two_layers_counts_both(case):
    first, second = case.model(), case.model()
    for name, parameter in first.named_parameters():
        parent, _, child = name.rpartition(".")
        setattr(second.get_submodule(parent), child, parameter)
        break  # the first parameter is shared, others stay apart
    model = Twice(case, first, second)
    assert len(list(model.parameters())) == 2 * len(list(first.parameters())) - 1
    assert_equals_the_loop(model, case.records(3))
    assert_answers_agree(captured(model, case.records(3)))


class TiedText(nn.Module):
    """The usual tie of language models: the table is also the last matrix."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.table(ids))))


class TiedAutoencoder(nn.Module):
    """A convolution and its transpose share one kernel, one by its own rule, one by the generic rule."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Conv2d(1, 2, 3), nn.ConvTranspose2d(2, 1, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


class TiedUnderTheRoot(nn.Module):
    """Tied weights below a parameter of the root's own, which the generic rule covers together."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 4))
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids) + self.places))


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn(3)), layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale


class WithinAndWithout(nn.Module):
    """A layer that is used by itself and within another that has no rule."""

    def __init__(self, first: str):
        super().__init__()
        layer = nn.Linear(3, 3)
        for name in (first, "layer" if first == "scaled" else "scaled"):
            setattr(self, name, layer if name == "layer" else Scaled(layer))

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("first", ["layer", "scaled"])
def test_a_layer_within_and_without_another_counts_once_for_each_use(first):
    torch.manual_seed(1)
    model, x = WithinAndWithout(first).double(), torch.randn(4, 3).double()
    assert_equals_the_loop(model, x)


def test_tied_weights_under_the_generic_rule():
    torch.manual_seed(1)
    assert_equals_the_loop(TiedUnderTheRoot().double(), torch.randint(6, (3, 5)))


def test_table_tied_to_the_last_layer():
    torch.manual_seed(1)
    model, ids = TiedText().double(), torch.randint(6, (3, 5))
    assert_equals_the_loop(model, ids)
    assert_answers_agree(captured(model, ids))


def test_kernel_tied_to_a_transposed_convolution():
    torch.manual_seed(1)
    model, x = TiedAutoencoder().double(), torch.randn(3, 1, 5, 4).double()
    assert_equals_the_loop(model, x)
    assert_answers_agree(captured(model, x))


# ------------------------------------------------------------------ (g): frozen parts


@cases_where(lambda case: len(list(case.model().parameters())) > 1)
def test_each_parameter_can_be_frozen_alone(case):
    for frozen in [n for n, _ in case.model().named_parameters()]:
        model = case.model()
        model.get_parameter(frozen).requires_grad_(False)
        assert frozen not in captured(model, case.records(3))
        assert_equals_the_loop(model, case.records(3))
        assert not model.get_parameter(frozen).requires_grad


# ------------------------------------------------------------------ surroundings that must not matter


@every_case
@pytest.mark.parametrize("history", [False, True], ids=["first layer", "later layer"])
def test_an_in_place_activation_may_follow(case, history):
    # A first layer's output has no history of its own, a later one's has: two ways to hook it.
    history = history and not case.ids  # ids have no gradient, so nothing can come before them

    def build(inplace: bool) -> nn.Module:
        before = [nn.LayerNorm(case.shape)] if history else []
        torch.manual_seed(5)
        return nn.Sequential(*before, case.model(), nn.LeakyReLU(0.2, inplace=inplace)).double()

    x = case.records(3)
    truth = per_sample_gradients(build(False), x)
    found = captured(build(True), x)
    assert found.keys() == truth.keys()
    for name in truth:
        assert_close(found[name].dense(), truth[name])


def test_an_input_overwritten_after_its_use_is_never_used_silently():
    # Plain autograd refuses this (the saved input changed); a wrong gradient must not come out instead.
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            out = self.second(hidden)
            return out + hidden.mul_(2)

    class Keeps(Overwrites):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.second(hidden) + hidden * 2

    torch.manual_seed(1)
    model, x = Overwrites().double(), torch.randn(3, 3).double()
    twin = Keeps().double()
    twin.load_state_dict(model.state_dict())
    truth = per_sample_gradients(twin, x)
    try:
        found = captured(model, x)
    except (GredpError, RuntimeError):
        return  # refused, as autograd does
    for name in truth:
        assert_close(found[name].dense(), truth[name])


@pytest.mark.parametrize("call", ["positional", "keyword"])
def test_further_arguments_reach_the_generic_rule_or_are_refused(call):
    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Parameter(torch.tensor([1.5, 0.5, 2.0]))

        def forward(self, x: Tensor, power: int = 1) -> Tensor:
            return x * self.base**power

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Power()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, 3) if call == "positional" else self.layer(x, power=3)

    model, x = Model().double(), torch.randn(2, 3).double()
    try:
        captured(copy.deepcopy(model), x)
    except GredpError:
        return  # refused by name is as good
    assert_equals_the_loop(model, x)


def test_a_model_may_be_called_with_the_ids_of_all_records_and_their_offsets():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(6, 3), nn.Linear(3, 2)

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return self.head(self.words(ids, offsets))

    torch.manual_seed(1)
    model, ids = Model().double(), torch.randint(6, (7,))
    capture = Capture(model.train(), "sum")
    wavy(model(ids, torch.tensor([0, 4, 4]))).sum().backward()
    found = capture.take().gradients
    capture.detach()
    for row, bag in enumerate((ids[:4], ids[:0], ids[4:])):
        model.zero_grad()
        wavy(model(bag, torch.tensor([0]))).sum().backward()
        for name, gradient in found.items():
            assert_close(gradient.dense()[row], model.get_parameter(name).grad)


def test_the_input_may_come_as_a_keyword():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.bare = nn.Linear(4, 4), Bare()

        def forward(self, x: Tensor) -> Tensor:
            return self.bare(x=self.layer(input=x))

    torch.manual_seed(1)
    assert_equals_the_loop(Model().double(), torch.randn(2, 4).double())


def test_a_layer_that_the_loss_does_not_reach_has_no_gradient():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.unheard = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.unheard(x)
            return self.used(x)

    assert captured(Model().double(), torch.randn(2, 3).double()).keys() == {"used.weight", "used.bias"}


def test_random_numbers_in_a_generic_forward_are_refused():
    class Noisy(Bare):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    with pytest.raises(GredpError, match=r"Noisy draws random numbers in its forward.*dropout"):
        captured(Noisy().double(), torch.randn(2, 4).double())


def test_hooks_leave_parameters_trainable_when_a_forward_fails():
    model = nn.Linear(4, 3)
    capture = Capture(model)
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 5))
    assert all(p.requires_grad for p in model.parameters())
    capture.detach()


# ------------------------------------------------------------------ shapes drawn by hypothesis

batches = st.integers(0, 5)


def check(model: nn.Module, x: Tensor) -> None:
    model = model.double()
    truth = per_sample_gradients(model, x)
    found = captured(model, x)
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        assert_close(gradient.dense(), truth[name])
    assert_answers_agree(found)


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@quick
@given(batches, st.integers(1, 6), st.integers(1, 6), st.lists(st.integers(1, 4), max_size=2), st.booleans())
def test_linear_of_any_shape(batch, inputs, outputs, positions, bias):
    check(nn.Linear(inputs, outputs, bias), reals(batch, *positions, inputs))


@quick
@given(
    batches, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.lists(st.integers(1, 3), max_size=2)
)
def test_circulant_of_any_shape(batch, inputs, outputs, block, positions):
    check(BlockCirculantLinear(inputs, outputs, block), reals(batch, *positions, inputs))


@quick
@given(st.data(), batches, st.integers(1, 3), st.booleans())
def test_convolution_of_any_shape(data, batch, dimensions, bias):
    axis = st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 2), st.integers(0, 2), st.integers(0, 3))
    kernel, stride, dilation, padding, extra = zip(*[data.draw(axis) for _ in range(dimensions)])
    groups, each, out = (data.draw(st.integers(1, 2)) for _ in range(3))
    # the least input that gives one output, and up to three more
    size = [max(1, d * (k - 1) + 1 - 2 * p) + e for k, d, p, e in zip(kernel, dilation, padding, extra)]
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    layer = kind(groups * each, groups * out, kernel, stride, padding, dilation, groups, bias)
    check(layer, reals(batch, groups * each, *size))


@quick
@given(st.data(), batches, st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(1, 4), max_size=2))
def test_embedding_of_any_shape(data, batch, rows, width, positions):
    padding = data.draw(st.none() | st.integers(0, rows - 1))
    ids = torch.randint(rows, (batch, *positions), generator=torch.Generator().manual_seed(7))
    check(nn.Embedding(rows, width, padding_idx=padding), ids)


@quick
@given(batches, st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=2))
def test_group_norm_of_any_shape(batch, groups, each, grid):
    # more than one value in each group, or the normalised value is 0 and torch refuses
    check(nn.GroupNorm(groups, groups * each * 2), reals(batch, groups * each * 2, *grid))


@quick
@given(
    batches,
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
)
def test_elementwise_norms_of_any_shape(batch, shape, positions, kind):
    check(kind(shape), reals(batch, *positions, *shape))


def test_the_rule_of_the_nearest_type_counts():
    """A rule from outside is used where it was registered for, not the one its layer's parent has."""

    class Child(Tapered):
        pass

    class Own(nn.Linear):
        pass

    assert rule_for(Tapered(2, 2)) is rule_for(Child(2, 2)) is tapered
    assert rule_for(Own(2, 2)) is rule_for(nn.Linear(2, 2))
    register_rule(Own)(tapered)
    assert rule_for(Own(2, 2)) is tapered
    assert rule_for(nn.Linear(2, 2)) is not tapered


def test_make_private_uses_a_rule_registered_from_outside():
    called = []

    @register_rule(Counted)
    def counted(layer: Counted, x: Tensor, g: Tensor) -> dict[str, PerSampleGradient]:
        called.append(len(x))
        return tapered(layer, x, g)

    x = torch.randn(4, 5)
    model, optimizer, _, _ = make_private(Counted(5, 3), (x, x), clip=0.5)
    expected = clipped_sum(per_sample_gradients(model, x), [(("weight", "bias"), 0.5)])
    wavy(model(x)).mean().backward()
    optimizer.step()
    assert called == [4]
    for name, value in released(model, optimizer).items():
        assert_close(value.double(), expected[name], 1e-5)


def test_a_rule_that_leaves_a_parameter_out_is_refused_by_name():
    @register_rule(Counted)
    def weight_only(layer: Counted, x: Tensor, g: Tensor) -> dict[str, PerSampleGradient]:
        return {"weight": tapered(layer, x, g)["weight"]}

    x = torch.randn(4, 5)
    model, _, _, engine = make_private(Counted(5, 3), (x, x), clip=0.5)
    with pytest.raises(GredpError, match="the rule of Counted gives no gradient for bias"):
        wavy(model(x)).mean().backward()
    assert engine.ledger.steps == 0


def test_a_rule_that_joins_records_is_rejected_by_name():
    """One row for all of them would be clipped once: a record could move the sum by twice the norm."""

    @register_rule(Counted)
    def joined(layer: Counted, x: Tensor, g: Tensor) -> dict[str, PerSampleGradient]:
        return {name: Dense(v.dense().sum(0, keepdim=True)) for name, v in tapered(layer, x, g).items()}

    x = torch.randn(4, 5)
    model, _, _, engine = make_private(Counted(5, 3), (x, x), clip=0.5)
    with pytest.raises(GredpError, match="the rule of Counted gives 1 rows of weight for 4 records"):
        wavy(model(x)).mean().backward()
    assert engine.ledger.steps == 0


def test_the_example_of_register_rule_runs():
    example = doctest.DocTestFinder().find(register_rule, "register_rule")[0]
    assert not doctest.DocTestRunner().run(example).failed
