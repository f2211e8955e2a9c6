"""The sum that a step releases, noise off, through the whole engine, against the loop over records."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPMultiheadAttention
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import (
    BatchMemoryManager,
    BlockCirculantLinear,
    GredpError,
    PrivacyEngine,
    PrivateMultiheadAttention,
    SpectralConv2d,
)
from gredp.gradient.clip import clip
from gredp.gradient.summation import BoundedSum
from gredp.spectrum import low_band
from oracles import (
    by_layer,
    clipped_sum,
    dft,
    flat,
    inverse_dft,
    padded_correlation,
    padded_spectra,
    per_sample_gradients,
    wavy,
)

BATCH = 6

# ------------------------------------------------------------------ models


def picture_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        SpectralConv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2, stride=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        BlockCirculantLinear(16, 6, block=4),
        nn.ReLU(),
        nn.Linear(6, 3),
    ).double()


def pictures(seed: int = 2) -> Tensor:
    return torch.randn(BATCH, 2, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Pooled(nn.Module):
    """Ids → one vector for each record, through attention."""

    def __init__(self, attention: nn.Module, padding: int | None = 0):
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=padding)
        self.attention = attention
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        return self.head(self.norm(h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


def text_model(heads: int = 2, padding: int | None = 0) -> nn.Module:
    torch.manual_seed(1)
    return Pooled(PrivateMultiheadAttention(4, heads, batch_first=True), padding).double()


def texts() -> Tensor:
    return torch.randint(7, (BATCH, 5), generator=torch.Generator().manual_seed(2))


def wide_model() -> nn.Module:
    """Grids too large for a matrix: spectra by FFT, of even and odd length."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(40, 71), nn.Tanh(), nn.Linear(71, 66), nn.Linear(66, 3)
    ).double()


WORLDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "pictures": (picture_model, pictures),
    "texts": (text_model, texts),
    "wide": (wide_model, pictures),
}
every_world = pytest.mark.parametrize("world", WORLDS)

# ------------------------------------------------------------------ the engine, noise off


def make_private(model: nn.Module, x: Tensor, norm: Any, **settings: Any) -> Any:
    """Everyone takes part, nothing is noised."""
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=norm,
        sample_rate=1.0,
        **settings,
    )


def take_step(model: nn.Module, optimizer: Any, loader: Any, reduce: str = "mean") -> None:
    for (x,) in loader:
        getattr(wavy(model(x)), reduce)().backward()
        optimizer.step()


def released_sum(model: nn.Module, x: Tensor, norm: Any, **settings: Any) -> dict[str, Tensor]:
    """Σ_i of what one step releases, from the change of the parameters."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model, optimizer, loader = make_private(model, x, norm, **settings)
    take_step(model, optimizer, loader)
    for n, p in model.named_parameters():  # plain SGD at rate 1: the gradient is the change
        torch.testing.assert_close(before[n] - p.detach(), p.grad, rtol=1e-6, atol=1e-6)
    return {n: p.grad * len(x) for n, p in model.named_parameters()}


def assert_sums_equal(
    found: Mapping[str, Tensor], truth: Mapping[str, Tensor], tolerance: float = 1e-9
) -> None:
    assert found.keys() == truth.keys()
    largest = max(t.abs().max().item() for t in truth.values())
    assert largest > 1e-3  # or the comparison could not fail
    for name in truth:
        torch.testing.assert_close(
            found[name].double(), truth[name].double(), rtol=tolerance, atol=tolerance * largest, msg=name
        )


def middle_norm(gradients: Mapping[str, Tensor]) -> float:
    """A clipping norm that cuts half of the records and leaves the others alone."""
    energies = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()])
    return float(energies.sum(0).sqrt().median())


@every_world
def test_plain_training_takes_the_ordinary_gradient_and_no_norms(world, monkeypatch):
    build, data = WORLDS[world]
    monkeypatch.setattr("gredp.gradient.clip.energies", None)
    twin, x = build(), data()
    wavy(twin(x)).sum().backward()
    assert_sums_equal(
        released_sum(build(), x, 1.0, method="plain"), {n: p.grad for n, p in twin.named_parameters()}
    )


def prepare(world: str) -> tuple[nn.Module, Tensor, dict[str, Tensor], float]:
    build, data = WORLDS[world]
    model, x = build(), data()
    gradients = per_sample_gradients(model, x)
    return model, x, gradients, middle_norm(gradients)


# ------------------------------------------------------------------ every way to clip


@every_world
@pytest.mark.parametrize("strength", [1e-6, 1.0, 1e6], ids=["all cut", "half cut", "none cut"])
def test_flat_clipping_equals_the_loop(world, strength):
    model, x, gradients, norm = prepare(world)
    truth = clipped_sum(gradients, flat(gradients, norm * strength))
    scale = min(strength, 1.0)
    found = released_sum(model, x, norm * strength)
    assert_sums_equal({n: v / scale for n, v in found.items()}, {n: v / scale for n, v in truth.items()})


@every_world
def test_flat_clipping_equals_the_loop_in_single_precision(world):
    model, x, gradients, norm = prepare(world)
    x = x.float() if x.is_floating_point() else x
    found = released_sum(model.float(), x, norm)
    assert_sums_equal(found, clipped_sum(gradients, flat(gradients, norm)), 2e-5)


@every_world
def test_clipping_by_layer_equals_the_loop(world):
    model, x, gradients, norm = prepare(world)
    truth = clipped_sum(gradients, by_layer(gradients, norm))
    assert_sums_equal(released_sum(model, x, norm, clipping="per_layer"), truth)


@every_world
def test_a_norm_for_each_layer_equals_the_loop(world):
    model, x, gradients, norm = prepare(world)
    layers = [names for names, _ in by_layer(gradients, norm)]
    norms = [norm * (0.1 + 0.1 * i) for i in range(len(layers))]
    truth = clipped_sum(gradients, zip(layers, norms))
    assert_sums_equal(released_sum(model, x, norms, clipping="per_layer"), truth)


@every_world
def test_a_norm_for_each_parameter_equals_the_loop(world):
    model, x, gradients, norm = prepare(world)
    norms = [norm * (0.1 + 0.05 * i) for i in range(len(gradients))]
    truth = clipped_sum(gradients, [([n], c) for n, c in zip(gradients, norms)])
    assert_sums_equal(released_sum(model, x, norms, clipping="per_layer"), truth)


@every_world
def test_the_papers_layer_wise_clipping_gives_every_layer_the_same_norm(world):
    model, x, gradients, norm = prepare(world)
    truth = clipped_sum(gradients, [(names, norm / 3) for names, _ in by_layer(gradients, norm)])
    found = released_sum(model, x, norm / 3, method="gredp", clipping="layer_wise")
    assert_sums_equal(found, truth)


@every_world
def test_automatic_clipping_equals_the_loop(world):
    model, x, gradients, norm = prepare(world)
    truth = clipped_sum(gradients, flat(gradients, norm), automatic=True)
    assert_sums_equal(released_sum(model, x, norm, clipping="automatic"), truth)


@every_world
def test_gredp_on_the_kernels_grid_clips_as_dpsgd_does(world):
    # a unitary transform keeps every norm, so the noiseless sums are the same
    model, x, gradients, norm = prepare(world)
    truth = clipped_sum(gradients, flat(gradients, norm))
    assert_sums_equal(released_sum(model, x, norm, method="gredp"), truth)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_gredp_on_the_padded_grid_clips_the_whole_correlation(clipping):
    model, x, gradients, norm = prepare("pictures")
    spectra = padded_spectra(model, x)
    assert len(spectra) == 2
    groups = by_layer(gradients, norm) if clipping == "per_layer" else flat(gradients, norm)
    measure = lambda name, i, g: spectra[name][i] if name in spectra else g  # noqa: E731
    truth = clipped_sum(gradients, groups, automatic=clipping == "automatic", measure=measure)
    # a crop is shorter than the whole: the padded sum must differ from the kernel's own
    kernel = clipped_sum(gradients, groups, automatic=clipping == "automatic")
    assert any((truth[n] - kernel[n]).abs().max() > 1e-3 for n in truth)
    assert_sums_equal(released_sum(model, x, norm, method="gredp", grid="padded", clipping=clipping), truth)


def grid_axes(model: nn.Module, name: str) -> int:
    layer = model.get_submodule(name.rpartition(".")[0])
    return 2 if isinstance(layer, nn.Conv2d) and name.endswith("weight") else 1


@every_world
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_spectral_dp_clips_and_keeps_the_low_band_only(world, ratio, clipping):
    model, x, gradients, norm = prepare(world)

    def band(name: str, g: Tensor) -> Tensor:
        axes = grid_axes(model, name)
        grid = tuple(g.shape[-axes:])
        return dft(g, axes) * low_band(grid, ratio if g.dim() > 1 else 1.0).view(grid)  # biases stay whole

    groups = by_layer(gradients, norm) if clipping == "per_layer" else flat(gradients, norm)
    truth = clipped_sum(
        gradients,
        groups,
        measure=lambda name, i, g: band(name, g),
        release=lambda name, g: inverse_dft(band(name, g), grid_axes(model, name)).real,
    )
    found = released_sum(model, x, norm, method="spectral_dp", filter_ratio=ratio, clipping=clipping)
    assert_sums_equal(found, truth)


def test_spectral_dp_on_the_padded_grid_keeps_a_band_of_it():
    model, x, gradients, norm = prepare("pictures")
    spectra = padded_spectra(model, x)

    def band(name: str, spectrum: Tensor, axes: int) -> Tensor:
        grid = tuple(spectrum.shape[-axes:])
        return spectrum * low_band(grid, 0.5 if spectrum.dim() > 1 else 1.0).view(grid)

    # a record's padded spectrum cannot be had from its gradient: release by record, kernels apart
    total = {n: torch.zeros_like(g[0]) for n, g in gradients.items()}
    for i in range(BATCH):
        kept = {
            n: band(n, spectra[n][i] if n in spectra else dft(g[i], 1), 2 if n in spectra else 1)
            for n, g in gradients.items()
        }
        length = math.sqrt(sum(v.abs().square().sum().item() for v in kept.values()))
        for n, v in kept.items():
            values = inverse_dft(v, 2 if n in spectra else 1).real
            if n in spectra:  # no dilation here: the kernel is the first corner
                values = values[..., : total[n].shape[-2], : total[n].shape[-1]]
            total[n] += min(1.0, norm / length) * values
    found = released_sum(model, x, norm, method="spectral_dp", filter_ratio=0.5, grid="padded")
    assert_sums_equal(found, total)


# ------------------------------------------------------------------ shaped noise: clipping in weighted norms


def weighted(step: Any, model: nn.Module) -> Callable[[str, int, Tensor], Tensor]:
    """w ⊙ F g with the weights that the step holds now."""
    weights = {n: w.double().sqrt() for n, w in step.squared_weights.items()}

    def measure(name: str, i: int, g: Tensor) -> Tensor:
        view = step.block_views[name]
        if view.groups is None:
            return weights[name] * g
        axes = grid_axes(model, name)
        return dft(g, axes) * weights[name][view.groups].view(g.shape[-axes:])

    return measure


@every_world
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_shaped_clipping_bounds_the_weighted_spectrum_and_gives_the_weights_back(world, clipping):
    model, x, gradients, norm = prepare(world)
    model, optimizer, loader = make_private(
        model, x, norm, method="gredp", noise="shaped", bands=3, clipping=clipping
    )
    step = optimizer.private_step
    generator = torch.Generator().manual_seed(4)
    squared = torch.rand(len(step.learned.sizes), generator=generator, dtype=torch.float64)
    step.learned._squared = 0.1 + 9 * squared
    truth, unweighted = (
        clipped_sum(gradients, flat(gradients, norm), automatic=clipping == "automatic", **options)
        for options in ({"measure": weighted(step, model)}, {})
    )
    assert any((truth[n] - unweighted[n]).abs().max() > 1e-3 for n in truth)  # the weights matter
    take_step(model, optimizer, loader)
    # weights are kept in single precision
    assert_sums_equal({n: p.grad * BATCH for n, p in model.named_parameters()}, truth, 1e-6)


def test_shaped_clipping_uses_the_weights_learned_in_earlier_steps():
    model, x, _, norm = prepare("pictures")
    model, optimizer, loader = make_private(model, x, norm, method="gredp", noise="shaped")
    step = optimizer.private_step
    assert all(w.eq(1).all() for w in step.squared_weights.values())  # white before the first release
    for _ in range(2):
        gradients = per_sample_gradients(model, x)
        truth = clipped_sum(gradients, flat(gradients, norm), measure=weighted(step, model))
        take_step(model, optimizer, loader)
        assert_sums_equal({n: p.grad * BATCH for n, p in model.named_parameters()}, truth, 1e-6)
    spread = torch.cat(list(step.squared_weights.values()))
    assert spread.max() > 2 * spread.min()


# ------------------------------------------------------------------ what must not matter

METHODS = {
    "dpsgd": {},
    "per layer": {"clipping": "per_layer"},
    "automatic": {"clipping": "automatic"},
    "gredp": {"method": "gredp"},
    "gredp, padded": {"method": "gredp", "grid": "padded"},
    "spectral_dp": {"method": "spectral_dp"},
    "spectral_dp, padded": {"method": "spectral_dp", "grid": "padded"},
    "shaped": {"method": "gredp", "noise": "shaped", "bands": 3},
}
every_method = pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS.keys())


@every_method
@pytest.mark.parametrize("physical", range(1, BATCH + 1))
def test_the_sum_does_not_depend_on_the_physical_batch(settings, physical):
    model, x, _, norm = prepare("pictures")
    whole = copy.deepcopy(model)
    truth = released_sum(whole, x, norm, **settings)
    model, optimizer, loader = make_private(model, x, norm, **settings)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
    ) as parts:
        take_step(model, optimizer, parts)
    assert_sums_equal({n: p.grad * BATCH for n, p in model.named_parameters()}, truth)
    assert optimizer.ledger.steps == 1


@every_method
def test_a_summed_loss_releases_the_same_sum(settings):
    model, x, _, norm = prepare("pictures")
    truth = released_sum(copy.deepcopy(model), x, norm, **settings)
    model, optimizer, loader = make_private(model, x, norm, loss_reduction="sum", **settings)
    take_step(model, optimizer, loader, "sum")
    assert_sums_equal({n: p.grad for n, p in model.named_parameters()}, truth)


@every_method
def test_an_empty_batch_releases_a_zero_sum_and_is_charged(settings):
    model, x, _, norm = prepare("pictures")
    before = copy.deepcopy(model.state_dict())
    model, optimizer, _ = make_private(model, x, norm, **settings)
    wavy(model(x[:0])).mean().backward()
    optimizer.step()
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert optimizer.ledger.steps == 1


@every_method
def test_one_record_moves_the_sum_by_at_most_the_norm(settings):
    # the clip set itself: the step on one record alone, in weighted norm where the plan weighs
    model, x, _, norm = prepare("pictures")
    total = released_sum(model, 100 * x[:1], norm / 7, **settings)
    length = math.sqrt(sum(v.square().sum().item() for v in total.values()))
    assert length <= norm / 7 * (1 + 1e-9)
    assert length > 0


# ------------------------------------------------------------------ Opacus


class OpacusAttention(nn.Module):
    """The arguments of the stock module over Opacus' own attention, with the same weights."""

    def __init__(self, private: PrivateMultiheadAttention):
        super().__init__()
        self.inner = DPMultiheadAttention(private.embed_dim, private.num_heads, batch_first=True)
        for mine, theirs in OPACUS_NAMES.items():
            self.inner.get_submodule(theirs).load_state_dict(private.get_submodule(mine).state_dict())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        return self.inner(q, k, v, need_weights=need_weights)[0], None


OPACUS_NAMES = {"q_proj": "qlinear", "k_proj": "klinear", "v_proj": "vlinear", "out_proj": "out_proj"}


class Tilted(nn.Module):
    """Bare parameters; Opacus takes these by its functorch path."""

    def __init__(self):
        super().__init__()
        self.mix, self.tilt = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.mix.T) * self.tilt


def gaussian(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(3))


SHARED_LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(5, 3), gaussian(5)),
    "linear, positions": (lambda: nn.Linear(5, 3), gaussian(4, 5)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), gaussian(2, 6)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=2), gaussian(2, 7, 6)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), gaussian(4, 5, 5)),
    "conv2d, same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), gaussian(2, 4, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, padding=1), gaussian(2, 3, 3, 2)),
    "spectral conv2d": (lambda: SpectralConv2d(2, 3, 3, padding=1), gaussian(2, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), gaussian(4, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm((3, 4)), gaussian(2, 3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), gaussian(3, 4)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(3, affine=True), gaussian(3, 6)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(3, affine=True), gaussian(3, 3, 4)),
    # without padding_idx: Opacus gives the padding row a gradient, where autograd (and the loop) give none
    "embedding": (lambda: nn.Embedding(7, 3), texts),
    "bare parameters": (Tilted, gaussian(4)),
    "a network": (lambda: nn.Sequential(*picture_model()[2:6], nn.Linear(16, 3)).float(), gaussian(3, 4, 5)),
    # one head: with several, Opacus 1.6.0 mixes heads and positions where batch_first=True
    "a language model": (lambda: text_model(heads=1, padding=None).float(), texts),
}


def opacus_twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    if isinstance(twin, Pooled):
        twin.attention = OpacusAttention(model.attention)
    return twin


def opacus_sum(model: nn.Module, x: Tensor, norm: float | list[float]) -> dict[str, Tensor]:
    module = GradSampleModule(model, loss_reduction="mean")
    kind = DPPerLayerOptimizer if isinstance(norm, list) else DPOptimizer
    optimizer = kind(
        torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=norm,
        expected_batch_size=len(x),
        loss_reduction="mean",
    )
    wavy(module(x)).mean().backward()
    optimizer.step()
    sums = {}
    for name, parameter in model.named_parameters():
        for mine, theirs in OPACUS_NAMES.items():
            name = name.replace(f"attention.inner.{theirs}", f"attention.{mine}")
        sums[name] = parameter.grad.view(parameter.shape) * len(x)
    return sums


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("kind", SHARED_LAYERS)
def test_the_clipped_sum_equals_that_of_opacus(kind, clipping):
    build, data = SHARED_LAYERS[kind]
    torch.manual_seed(1)
    model, x = build(), data()
    gradients = per_sample_gradients(model, x)
    norm: Any = middle_norm(gradients)
    if clipping == "per_layer":  # Opacus' layers are single parameters
        norm = [float(g.flatten(1).norm(dim=1).median()) + 0.01 for g in gradients.values()]
    theirs = opacus_sum(opacus_twin(model), x, norm)
    assert_sums_equal(released_sum(model, x, norm, clipping=clipping), theirs, 1e-5)


# ------------------------------------------------------------------ records that are not finite


def rectified_model() -> nn.Module:
    """No saturation: what is too large stays too large."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        BlockCirculantLinear(60, 8, block=4),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


@every_method
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("where", ["everywhere", "one pixel"])
def test_a_record_that_is_not_finite_contributes_nothing(settings, poison, where):
    model, x = rectified_model(), pictures().float()
    norm = middle_norm(per_sample_gradients(model, x))
    others = torch.tensor([0, 1, 2, 4, 5])
    truth = released_sum(copy.deepcopy(model), x[others], norm, **settings)
    if where == "everywhere":
        x[3] = poison
    else:
        x[3, 1, 2, 3] = poison
    model, optimizer, loader = make_private(model, x, norm, **settings)
    take_step(model, optimizer, loader)
    assert_sums_equal({n: p.grad * BATCH for n, p in model.named_parameters()}, truth, 1e-5)
    assert all(p.isfinite().all() for p in model.parameters())
    assert optimizer.ledger.steps == 1  # charged like any other step
    if optimizer.private_step.learned is not None:
        assert all(w.isfinite().all() for w in optimizer.private_step.squared_weights.values())


@every_method
def test_a_physical_batch_with_nothing_finite_adds_nothing(settings):
    model, x = rectified_model(), pictures().float()
    norm = middle_norm(per_sample_gradients(model, x))
    truth = released_sum(copy.deepcopy(model), x[1:], norm, **settings)
    x[0] = math.nan
    model, optimizer, loader = make_private(model, x, norm, **settings)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer) as parts:
        take_step(model, optimizer, parts)
    assert_sums_equal({n: p.grad * BATCH for n, p in model.named_parameters()}, truth, 1e-5)


#: size of the input and slope of the loss: in the first three one square vanishes, the product does not
EXTREMES = [(1.8e19, 6e-20), (1e19, 6e-20), (2.5e-23, 7e21), (1e-30, 1e30), (1e12, 1e-12), (1e-20, 1e-20)]
PADDED = {"method": "gredp", "grid": "padded"}
EXTREME_LAYERS = {
    "linear": (lambda: nn.Linear(1, 64, bias=False), (1,), {}),
    "linear, positions": (lambda: nn.Linear(1, 64, bias=False), (2, 1), {}),
    "circulant": (lambda: BlockCirculantLinear(1, 64, block=2, bias=False), (1,), {}),
    "conv": (lambda: nn.Conv2d(1, 64, 1, bias=False), (1, 1, 2), {}),
    "conv, padded": (lambda: nn.Conv2d(1, 64, 1, bias=False), (1, 1, 2), PADDED),
}


@pytest.mark.parametrize(("size", "slope"), EXTREMES)
@pytest.mark.parametrize("layer", EXTREME_LAYERS)
def test_the_norm_holds_for_extreme_factors(layer, size, slope):
    # The norm of a factored gradient is a product of two norms; in single precision the square of one may
    # vanish while the other is huge. A record that looks shorter than it is would pass the clip.
    build, shape, settings = EXTREME_LAYERS[layer]
    model, records = build(), 4096
    nn.init.zeros_(model.weight)
    x = torch.zeros(records, *shape)
    x[0] = size
    model, optimizer, loader = make_private(model, x, 1.0, **settings)
    for (batch,) in loader:
        (model(batch).flatten(1).sum(1) * slope).mean().backward()
        optimizer.step()
    total = model.weight.grad.double() * records
    assert total.isfinite().all()
    assert total.norm() <= 1 + 1e-6


# ------------------------------------------------------------------ each stage takes only the one before


def test_only_per_sample_gradients_can_be_clipped_and_only_clipped_ones_summed():
    model, x, _, norm = prepare("pictures")
    _, optimizer, _ = make_private(model, x, norm)
    step = optimizer.private_step
    with pytest.raises(TypeError, match="only PerSampleSpectra can be clipped, not dict"):
        clip({}, step.plan, step.block_views, step.squared_weights)
    with pytest.raises(TypeError, match="only ClippedSpectra can be summed, not dict"):
        BoundedSum(step.plan, step.block_views).add({})


def test_a_released_sum_takes_no_more_records():
    model, x, _, norm = prepare("pictures")
    model, optimizer, _ = make_private(model, x, norm)
    wavy(model(x)).mean().backward()
    step, spectra = optimizer.private_step, optimizer.capture.take()
    clipped = clip(spectra, step.plan, step.block_views, step.squared_weights)
    with pytest.raises(GredpError, match="released already"):
        BoundedSum(step.plan, step.block_views, spent=True).add(clipped)


def test_the_padded_grid_refuses_inputs_of_another_size():
    model, x = nn.Sequential(nn.Conv2d(1, 1, 2), nn.AdaptiveAvgPool2d(1)), torch.randn(3, 1, 4, 4)
    model, optimizer, _ = make_private(model, x, 1.0, method="gredp", grid="padded")
    wavy(model(torch.randn(3, 1, 5, 5))).mean().backward()
    wrong = r"^0.weight was certified for inputs padded to \(4, 4\) but got \(5, 5\)"
    with pytest.raises(GredpError, match=wrong):
        optimizer.step()


def test_the_padded_grid_refuses_a_kernel_used_twice():
    conv = nn.Conv2d(1, 1, 3, padding=1)
    model, x = nn.Sequential(conv, nn.ReLU(), conv), torch.randn(3, 1, 4, 4)
    model, optimizer, _ = make_private(model, x, 1.0, method="gredp", grid="padded")
    wavy(model(x)).mean().backward()
    with pytest.raises(GredpError, match="used more than once in a forward"):
        optimizer.step()


def test_the_padded_grid_takes_an_input_given_by_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(input=x)

    model, x = Keyword().double(), torch.randn(3, 1, 4, 4).double()
    gradients, spectra = per_sample_gradients(model, x), [padded_correlation_of(model, r) for r in x]
    truth = clipped_sum(
        gradients, flat(gradients, 0.5), measure=lambda n, i, g: spectra[i] if n == "conv.weight" else g
    )
    assert_sums_equal(released_sum(model, x, 0.5, method="gredp", grid="padded"), truth)


def padded_correlation_of(model: nn.Module, record: Tensor) -> Tensor:
    """The whole correlation of one record of a model that is one convolution."""
    out = model(record[None])
    (g,) = torch.autograd.grad(wavy(out).sum(), out)
    return padded_correlation(model.conv, record, g[0])
