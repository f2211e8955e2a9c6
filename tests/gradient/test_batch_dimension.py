"""Rows that are as many as the records by coincidence are not taken for records."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import GredpError, PrivacyEngine, PrivateMultiheadAttention
from oracles import bare, clipped_sum, flat
from worlds import make_private, released

LENGTH = 5


class Words(nn.Module):
    """Ids `[b, t]` → `[b, 2]`."""

    def __init__(self, length: int = LENGTH):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)
        self.places = nn.Embedding(length, 4)
        self.register_buffer("ids", torch.arange(length), persistent=False)

    def positions(self, x: Tensor) -> Tensor:
        return self.places(self.ids[: x.shape[1]].expand(len(x), -1))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(torch.tanh(self.table(x) + scale * self.positions(x)).mean(1))


class Broadcast(Words):
    """Every record has the same places: a table without a batch dimension."""

    def positions(self, x: Tensor) -> Tensor:
        return self.places(self.ids[: x.shape[1]])


class OneRow(Words):
    """The same as `[1, t]`, as BERT and GPT-2 have it."""

    def positions(self, x: Tensor) -> Tensor:
        return self.places(self.ids[None, : x.shape[1]])


class Scrambled(Words):
    """Rows without a batch dimension that are not positions."""

    def positions(self, x: Tensor) -> Tensor:
        return self.places(self.ids[: x.shape[1]].flip(0))


class TimeFirst(Words):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = self.table(x) + scale * self.positions(x)
        return self.head(torch.tanh(h).transpose(0, 1)).mean(0)


def texts(records: int) -> Tensor:
    return torch.randint(7, (records, LENGTH), generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, x: Tensor, **kwargs):
    model, optimizer, _, _ = make_private(model, (x, torch.zeros(len(x))))
    model(x, **kwargs).square().sum(1).mean().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("build", "layer"), [(Scrambled, "places"), (TimeFirst, "head")])
@pytest.mark.parametrize("kwargs", [{}, {"scale": 2.0}], ids=["plain", "keyword"])
def test_a_coincidence_of_sizes_is_refused_by_name_before_anything_is_charged(build, layer, kwargs):
    x = texts(LENGTH)
    model, optimizer, _, _ = make_private(build(), (x, torch.zeros(LENGTH)))
    for _ in range(2):  # and refused again
        with pytest.raises(
            GredpError, match=rf"^{layer} \(\w+\) has {LENGTH} rows whatever the batch.*expand"
        ):
            model(x, **kwargs)
    assert optimizer.ledger.steps == 0


@pytest.mark.parametrize("records", [1, 2, 3, LENGTH, 9])
def test_positions_with_a_batch_dimension_are_trained(records):
    assert step(Words(), texts(records)).ledger.steps == 1


@pytest.mark.parametrize("records", [2, 3, 9])
def test_other_sizes_are_refused_as_before(records):
    with pytest.raises(GredpError, match=r"places \(Embedding\) turns .* here \d records"):
        step(Scrambled(), texts(records))


@pytest.mark.parametrize("build", [Broadcast, OneRow])
@pytest.mark.parametrize("records", [1, 2, 3, LENGTH, 9])
def test_positions_that_are_broadcast_are_clipped_record_by_record(build, records):
    """Equal to a loop over single records, also where there are as many records as positions."""
    torch.manual_seed(0)
    model, x, clip = build(), texts(records), 0.05
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(records):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        for name, p in model.named_parameters():
            wanted[name] += p.grad * min(1.0, clip / float(norm))
    model.zero_grad()
    model, optimizer, _, _ = make_private(model, (x, torch.zeros(records)), clip=clip, lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).square().sum(1).mean().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose((before[name] - p) * records, wanted[name], atol=1e-6), name


def test_positions_of_shorter_texts_are_known_too():
    x = texts(4)
    model, optimizer, _, _ = make_private(OneRow(), (x, torch.zeros(4)))
    for length in (LENGTH, 2, 1):
        model(x[:, :length].contiguous()).square().sum(1).mean().backward()
        assert optimizer.capture.take() is not None


def test_an_empty_first_batch_puts_the_look_off():
    x = texts(LENGTH)
    model, _, _, _ = make_private(TimeFirst(), (x, torch.zeros(LENGTH)))
    with pytest.raises(GredpError, match="0 records"):  # time before records has five rows still
        model(x[:0])
    with pytest.raises(GredpError, match="whatever the batch"):
        model(x)


def test_the_look_leaves_no_trace():
    class Watched(Words):
        def __init__(self):
            super().__init__()
            self.drop, self.seen = nn.Dropout(0.5), []

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            self.seen.append((len(x), bool(x.any()), torch.is_grad_enabled()))
            return self.drop(super().forward(x, scale))

    x, model = texts(LENGTH), Watched()
    torch.manual_seed(3)
    plain = model(x)
    model, optimizer, _, _ = make_private(model, (x, torch.zeros(LENGTH)))
    torch.manual_seed(3)
    assert torch.equal(model(x), plain)  # the same dropout
    model(x)
    assert model.seen[1:] == [
        (3, False, False),
        (LENGTH, True, True),
        (LENGTH, True, True),
    ]  # zeros, and once
    assert optimizer.ledger.steps == 0
    assert optimizer.capture.take() is None


class Around(nn.Module):
    """Takes what cannot be made of zeros."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / int(x.any())


@pytest.mark.parametrize("whole", [True, False], ids=["within the model", "in place of it"])
def test_parts_are_looked_at_where_the_model_cannot_be(whole):
    x = texts(LENGTH)
    for build in (Scrambled, TimeFirst):
        model, _, _, _ = make_private(Around(build()), (x, torch.zeros(LENGTH)))
        with pytest.raises(GredpError, match="whatever the batch"):
            (model if whole else model.net)(x)
    model, optimizer, _, _ = make_private(Around(Words()), (x, torch.zeros(LENGTH)))
    (model if whole else model.net)(x).square().sum(1).mean().backward()
    optimizer.step()


def test_a_model_that_cannot_be_run_on_zeros_is_trained_all_the_same():
    class Choosy(Words):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            if not x.any():
                raise ValueError("nothing to read")
            return super().forward(x, scale)

    assert step(Choosy(), texts(LENGTH)).ledger.steps == 1


# ------------------------------------------------------------------ records in the second dimension


class Later(nn.Module):
    """Ids `[t, b]` → `[b, 2]`: time comes first until it is gone, but within attention."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.attention, self.scale = PrivateMultiheadAttention(4, 2), Scale()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(self.table(x)))
        h = self.scale(h + self.attention(h, h, h, need_weights=False)[0])
        return self.head(torch.tanh(h).mean(0))


class Scale(nn.Module):
    """Has no rule of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def time_first(rows):
    return torch.stack([x for x, _ in rows], 1) if rows else torch.zeros(LENGTH, 0, dtype=torch.long)


@pytest.mark.parametrize("count", [1, 4, LENGTH, 9])
def test_records_in_the_second_dimension_equal_the_loop(count):
    torch.manual_seed(1)
    x, model = texts(count), Later()
    twin, rows = bare(model), []
    for record in x:
        loss = twin(record[:, None]).square().sum()
        rows.append(torch.autograd.grad(loss, list(twin.parameters())))
    gradients = {n: torch.stack(g) for (n, _), g in zip(twin.named_parameters(), zip(*rows))}
    expected = clipped_sum(gradients, flat(gradients, 0.5))
    model, optimizer, _, _ = make_private(model, (x, torch.zeros(count)), clip=0.5, batch_first=False)
    model(x.T).square().sum(1).mean().backward()
    optimizer.step()
    for name, found in released(model, optimizer).items():
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_an_empty_draw_has_no_records_in_the_second_dimension():
    engine, model = PrivacyEngine(), Later()
    data = TensorDataset(texts(8), torch.zeros(8))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=1, collate_fn=time_first),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1e-9,
        batch_first=False,
    )
    x = next(iter(loader))
    assert x.shape == (LENGTH, 0)
    model(x).square().sum(1).mean().backward()
    optimizer.step()
    assert engine.ledger.steps == 1


class Tabled(Later):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(0) + self.scale(self.table.weight[: x.shape[0]]).mean(0))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (Tabled, rf"^scale \(Scale\) (has {LENGTH} rows whatever the batch|turns)"),
        (lambda: nn.Linear(LENGTH, 2), "a Linear that did not run on zeros: nothing tells"),
    ],
)
def test_what_does_not_follow_the_second_dimension_is_refused(build, why):
    x = texts(LENGTH)
    model, _, _, _ = make_private(build(), (x, torch.zeros(LENGTH)), batch_first=False)
    with pytest.raises(GredpError, match=why):
        model(x.T if isinstance(model, Later) else x.float())
