"""Rows that are as many as the records by coincidence are not taken for records."""

import pytest
import torch
from torch import Tensor, nn

from gredp import GredpError
from worlds import make_private

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
        (2, False, False),
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
