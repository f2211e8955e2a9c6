"""What an engine and a model look like, and that the memory they speak of is the memory there is."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import BlockCirculantLinear, GredpError, PrivacyEngine, SpectralConv2d
from gredp.privacy.accountant import round_up
from gredp.summary import held_bytes, size
from worlds import make_private, one_step, records, small_model

DELTA = 1e-5


def test_printing_an_engine_shows_the_guarantee():
    assert "nothing spent" in str(PrivacyEngine())
    model, optimizer, _, engine = make_private(
        small_model(), records(8), noise_multiplier=2.0, seed=None, method="gredp", claim="paper"
    )
    one_step(model, optimizer, *records(8))
    text = str(engine)
    proven, claimed = engine.get_epsilon(DELTA), engine.get_claimed_epsilon(DELTA)
    assert claimed < proven
    assert (
        0 < text.index(f"{round_up(proven)} at δ = 1e-05") < text.index(f"{round_up(claimed)} for the same")
    )
    assert "add or remove one record" in text
    assert "1 at sampling rate 1" in text
    assert "INSECURE" not in text
    assert "<table>" in engine._repr_html_()
    assert "INSECURE" in str(make_private(small_model(), records(8), seed=0)[3])


def test_the_delta_that_was_asked_for_is_the_one_shown():
    model, engine = small_model(), PrivacyEngine(accountant="rdp")
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*records(12)), batch_size=6),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
    )
    assert "0.0 at δ = 0.001" in str(engine)
    assert 2.5 < engine.guarantee(1e-3, further_steps=2)["proven_epsilon"] <= 3.0
    assert engine.get_epsilon(1e-3) == 0


def test_names_in_a_notebook_are_text():
    model = nn.ModuleDict({"<script>alert(1)</script>": nn.Linear(2, 2)})
    shown = PrivacyEngine().summary(model)._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


class Own(nn.Module):
    """Without a rule: by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Twice(nn.Module):
    """One layer used twice: its gradients are added up before the norm is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh())


MODELS = {
    "small": (small_model, (1, 5, 5)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), SpectralConv2d(8, 16, 3, stride=2),
            nn.Conv2d(16, 64, 3), nn.Flatten(), BlockCirculantLinear(64 * 25, 8, block=8), nn.Linear(8, 4),
        ),
        (3, 15, 15),
    ),
    "sequences": (lambda: nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3)), (5, 6)),
    "own": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 4), Own()), (4,)),
    "twice": (Twice, (6,)),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"method": "gredp", "noise": "shaped"}, {"grid": "padded"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_memory_per_record_is_what_is_held(name, options):
    """Against the gradients that a backward really leaves behind, storage by storage, layer by layer."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(7, *shape)
    if "grid" in options:
        options = options | {"method": "gredp"}
    model, optimizer, _, engine = make_private(build(), (x, torch.zeros(7)), **options)
    summary = engine.summary(batch=7)
    model(x).square().mean().backward()
    found = optimizer.capture.take().gradients
    for unit, row in zip(optimizer.capture.units, summary.rows):
        held = held_bytes([found[full] for full in unit.parameters.values()])
        assert row.bytes == math.ceil(held / 7), row
        assert row.layer == unit.name
    assert summary.bytes * 7 >= held_bytes(list(found.values()))
    assert summary.parameters == sum(p.numel() for p in model.parameters())


def test_a_large_batch_keeps_factors_where_gradients_would_not_fit():
    model = nn.Sequential(nn.Linear(512, 512))
    example = torch.zeros(1, 40, 512)
    one, many = (PrivacyEngine().summary(model, example, batch).rows[0].bytes for batch in (1, 10_000))
    bias = 512 * 4
    assert one == 512 * 512 * 4 + bias or one == 2 * 40 * 512 * 4 + bias
    assert many == 2 * 40 * 512 * 4 + bias


def test_a_summary_reads_well():
    model = small_model()
    model[0].requires_grad_(False)
    text = str(PrivacyEngine().summary(model, torch.zeros(2, 1, 5, 5)))
    assert [line.split()[:4] for line in text.splitlines()[2:4]] == [
        ["3", "BlockCirculantLinear", "circulant", "157"],
        ["5", "Linear", "linear", "32"],
    ]
    assert "30 parameters are frozen" in text
    assert str(PrivacyEngine().summary(model)).count("?") == 3, "no example, no memory"
    with pytest.raises(GredpError, match="BatchNorm"):
        PrivacyEngine().summary(nn.BatchNorm1d(3))
    with pytest.raises(GredpError, match="make_private first"):
        PrivacyEngine().summary()
    assert [size(n) for n in (12, 2048, 3 << 20)] == ["12 B", "2.0 KiB", "3.0 MiB"]


def test_a_summary_changes_nothing():
    model, optimizer, _, engine = make_private(small_model(), records(8))
    state = torch.get_rng_state()
    before = {name: p.clone() for name, p in model.named_parameters()}
    engine.summary()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    one_step(model, optimizer, *records(8))
    assert engine.ledger.steps == 1


class Sorted(nn.Module):
    """What torch.func cannot do record by record: a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if float(x.detach().sum()) > 0 else x + self.weight


def test_errors_name_the_layer_and_what_to_do():
    model = nn.Sequential(nn.Linear(3, 3), Sorted())
    model = make_private(model, (torch.ones(4, 3), torch.zeros(4)))[0]
    with pytest.raises(GredpError, match=r"^1 \(Sorted\) has no rule of its own.*build it from") as error:
        model(torch.ones(4, 3)).mean().backward()
    assert "\n" not in str(error.value)
