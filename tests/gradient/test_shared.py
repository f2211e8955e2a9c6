"""Tables that records share: gradients equal the loop over records, however both meet."""

import pytest
import torch
from torch import Tensor, nn

from gredp.errors import GredpError
from gredp.gradient.capture import Capture
from oracles import per_sample_gradients, wavy

LENGTH, WIDTH, HEADS = 5, 4, 2


class WithTable(nn.Module):
    """`[b, t, d]` and a table; `meet` says how they do."""

    def __init__(self, ids: Tensor, meet, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.meet = ids, meet
        self.table, self.body = nn.Embedding(2 * LENGTH, width), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.meet(self.body(x), self.table(self.ids))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def attend(x: Tensor, bias: Tensor) -> Tensor:
    """As T5 does: `[q, k, heads]` → `[1, heads, q, k]`, which is then added to scores."""
    x, bias = heads(x), bias.permute(2, 0, 1).unsqueeze(0)
    x = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)
    return (x @ x.transpose(2, 3) + bias).softmax(3) @ x


def iadd(x: Tensor, table: Tensor) -> Tensor:
    x = x.clone()
    x += table
    return x


PLACES = torch.arange(LENGTH)
DISTANCES = PLACES[None] - PLACES[:, None] + LENGTH - 1
WAVES = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
CASES = {
    "[t]": (PLACES, lambda x, table: x + table),
    "[1, t]": (PLACES[None], lambda x, table: torch.tanh(x) * table),
    "[t], a dimension more": (PLACES, lambda x, table: iadd(x, table.unsqueeze(0))),
    "[1, t], its only row": (PLACES[None], lambda x, table: x + table[0]),
    "[1, t], expanded": (PLACES[None], lambda x, table: table.expand(len(x), -1, -1) + x),
    "[1, t], repeated": (PLACES[None], lambda x, table: x + table.repeat(len(x), 1, 1)),
    # as many constants as records, which they might be taken for
    "[t], beside constants": (PLACES, lambda x, table: x + (table + WAVES)),
    "[1, t], beside constants": (PLACES[None], lambda x, table: x + (table * WAVES[:, None])[2]),
    "[t], keys of heads": (PLACES, lambda x, table: heads(x) @ table[:, :2].T),
    "[q, k]": (DISTANCES, attend),
}


@pytest.mark.parametrize("batch", [1, HEADS, 3, LENGTH])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_loop_over_records(case, batch):
    ids, meet = CASES[case]
    model = WithTable(ids, meet, HEADS if ids is DISTANCES else WIDTH).double()
    x = torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64)
    truth = per_sample_gradients(model, x)
    capture = Capture(model.train(), "sum")
    wavy(model(x)).sum().backward()
    found = capture.take().gradients
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.dense(), truth[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("ids", "meet", "why"),
    [
        (
            PLACES,
            lambda x, table: x + nn.functional.normalize(table),
            "normalize of a table that records share",
        ),
        (PLACES, lambda x, table: torch.cat([x, table[None].expand_as(x)]), "cat of a table"),
        (PLACES.flip(0), lambda x, table: x + table, "whatever the batch"),  # might come from records
        (DISTANCES.flip(0), lambda x, table: x + table.sum(0), "whatever the batch"),
    ],
)
def test_what_cannot_be_told_apart_is_rejected(ids, meet, why):
    model = WithTable(ids, meet)
    capture = Capture(model.train(), "sum")
    with pytest.raises(GredpError, match=why):
        model(torch.randn(LENGTH, LENGTH, WIDTH))
    capture.detach()
