"""`evaluate` against one record at a time, in double precision."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import nn

from gredp.app.evaluate import Classification, Regression, auc, evaluate


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


def test_figures_of_classes_are_those_of_scikit_learn():
    torch.manual_seed(1)
    y, task = torch.randint(3, (400,)), Classification(("a", "b", "c"))
    outputs = torch.randn(400, 3, dtype=torch.float64) + 1.5 * nn.functional.one_hot(y, 3)
    found, epoch = task.evaluation(outputs, y), task.figures(outputs, y)
    predicted = outputs.argmax(1)
    assert found["confusion"] == metrics.confusion_matrix(y, predicted).tolist()
    assert [row["recall"] for row in found["classes"]] == pytest.approx(
        metrics.recall_score(y, predicted, average=None)
    )
    balanced = metrics.balanced_accuracy_score(y, predicted)
    assert found["balanced_accuracy"] == epoch["balanced_accuracy"] == pytest.approx(balanced)
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(y, outputs.softmax(1), multi_class="ovr"))
    assert found["majority"]["share"] == float(y.bincount().max()) / 400
    assert found["warning"] is None


def test_the_area_of_two_classes_counts_ties_as_scikit_learn_does():
    y, scores = np.array([0, 0, 1, 1, 1, 0]), np.array([0.1, 0.5, 0.5, 0.9, 0.2, 0.2])
    assert auc(np.stack([1 - scores, scores], 1), y) == pytest.approx(metrics.roc_auc_score(y, scores))
    assert auc(np.ones((3, 2)), np.zeros(3, dtype=int)) is None


def test_a_model_that_knows_only_the_majority_is_named():
    y = torch.tensor([0] * 88 + [1] * 12)
    always = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(100, 2)
    found = Classification(("genuine", "fraud")).evaluation(always, y)
    assert found["warning"] == (
        "does not beat the majority: class genuine is 88.00 % of the records; finds 0 of 12 of class fraud"
    )
    assert found["balanced_accuracy"] == 0.5


def test_with_declared_shares_a_model_is_measured_by_classes_alike():
    """More false alarms than frauds cost accuracy, which is what such weights are for."""
    y = torch.tensor([0] * 90 + [1] * 10)
    outputs = nn.functional.one_hot(torch.tensor([1] * 20 + [0] * 70 + [1] * 10), 2).double()
    assert Classification(("a", "b")).evaluation(outputs, y)["warning"] is not None
    assert Classification(("a", "b"), (0.1, 1.0)).evaluation(outputs, y)["warning"] is None


def test_a_class_without_records_has_no_recall_and_spoils_nothing():
    y = torch.tensor([0, 1, 1, 0])
    found = Classification(("a", "b", "c")).evaluation(nn.functional.one_hot(y, 3).double(), y)
    assert found["classes"][2] == {"class": "c", "records": 0, "recall": None}
    assert (found["balanced_accuracy"], found["auc"]) == (1.0, 1.0)


def test_a_weighted_loss_is_a_mean_of_losses_of_each_record_alone():
    outputs, y = torch.randn(5, 2), torch.tensor([0, 1, 0, 0, 1])
    task = Classification(("a", "b"), (0.25, 1.0))
    alone = [
        task.weights[label] * float(nn.functional.cross_entropy(row[None], label[None]))
        for row, label in zip(outputs, y)
    ]
    assert float(task.losses(outputs, y).mean()) == pytest.approx(sum(alone) / 5)


def test_figures_of_a_number_are_those_of_scikit_learn_in_its_own_units():
    torch.manual_seed(2)
    task = Regression(10.0, 50.0)
    y = torch.rand(200) * 2 - 1
    outputs = y[:, None].double() + torch.randn(200, 1, dtype=torch.float64)
    wanted, given = 30 + 20 * y.double(), (30 + 20 * outputs[:, 0]).clamp(10, 50)
    found = task.evaluation(outputs, y)
    assert found["r2"] == pytest.approx(metrics.r2_score(wanted, given))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(wanted, given))
    assert task.evaluation(torch.zeros(200, 1), y)["warning"].startswith("does not beat a constant")


@pytest.mark.parametrize("task", [Classification(("a", "b", "c")), Regression(-5.0, 20.0)])
def test_one_record_moves_the_score_to_choose_by_at_most_1(task):
    """The noise of `gredp tune` on it is certified for that."""
    torch.manual_seed(3)
    numbers = isinstance(task, Regression)
    for _ in range(20):
        y = torch.rand(30) * 2 - 1 if numbers else torch.randint(3, (30,))
        outputs = 9 * torch.randn(30, 1 if numbers else 3)
        moved = task.right(outputs, y) - task.right(outputs[1:], y[1:])
        assert -1e-9 <= moved <= 1 + 1e-9
