"""`evaluate` against one record at a time, in double precision."""

import math

import pytest
import torch
from torch import nn

from gredp.app.evaluate import evaluate


@pytest.mark.parametrize("records", [1, 1023, 1025])
def test_accuracy_and_loss_are_those_of_the_records_one_by_one(records):
    torch.manual_seed(records)
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).double()
    x, y = torch.randn(records, 5, dtype=torch.float64), torch.randint(3, (records,))
    weight, bias = model[0].weight, model[0].bias
    hits, total = 0, 0.0
    for row, label in zip(x, y):
        scores = [sum(w * v for w, v in zip(line, row)).item() + b.item() for line, b in zip(weight, bias)]
        hits += scores.index(max(scores)) == label
        total += math.log(sum(math.exp(s) for s in scores)) - scores[label]
    accuracy, loss = evaluate(model, x, y)
    assert accuracy == hits / records
    assert math.isclose(loss, total / records, rel_tol=1e-9)
    assert model.training


def test_pixels_are_prepared():
    x, y = torch.full((4, 1, 1, 2), 0.5), torch.zeros(4, dtype=torch.int64)
    accuracy, loss = evaluate(nn.Flatten(), x, y, lambda pixels: pixels * torch.tensor([2.0, 0.0]))
    assert accuracy == 1.0
    assert math.isclose(loss, math.log(1 + math.exp(-1)), rel_tol=1e-9)
