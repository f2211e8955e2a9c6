"""A loss that is not the mean, or sum, that it was said to be is refused; one that is never is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp import GredpError
from gredp.gradient.reduction import LossReduction
from worlds import make_private

RECORDS = 12
CLASSES = torch.arange(RECORDS) % 3
POINTS = torch.linspace(-1, 1, 3 * RECORDS).view(RECORDS, 3)

#: losses of outputs `[b, 3]` that are plainly a mean or a sum, by which of the two they are
PLAIN = {
    "cross entropy": lambda out, kind: F.cross_entropy(out, CLASSES[: len(out)], reduction=kind),
    "of positions": lambda out, kind: F.cross_entropy(
        out.view(len(out), 1, 3).transpose(1, 2), CLASSES[: len(out), None], reduction=kind
    ),
    "nll": lambda out, kind: F.nll_loss(out.log_softmax(1), CLASSES[: len(out)], reduction=kind),
    "mse": lambda out, kind: F.mse_loss(out, POINTS[: len(out)], reduction=kind),
    "l1": lambda out, kind: F.l1_loss(out, POINTS[: len(out)], reduction=kind),
    "huber": lambda out, kind: F.huber_loss(out, POINTS[: len(out)], reduction=kind),
    "binary": lambda out, kind: F.binary_cross_entropy_with_logits(out, out.detach() * 0, reduction=kind),
    "by hand": lambda out, kind: getattr((out - POINTS[: len(out)]).pow(2).sum(-1), kind)(),
    "by axis": lambda out, kind: getattr(out.square(), kind)(0).mean(),
    "two terms": lambda out, kind: getattr(out[:, 0], kind)() + getattr(out.abs(), kind)(),
}
#: losses of which nothing can be said from one batch, all of them right
UNTOLD_MEANS = {
    "divided": lambda out: out.square().sum() / len(out),
    "divided early": lambda out: (out.square().sum(1) / len(out)).sum(),
    "scaled": lambda out: 128 * out.square().mean(),
    "weighted": lambda out: (out.square().sum(1) * torch.full((len(out),), 1 / len(out))).sum(),
    "dot": lambda out: out.square().sum(1) @ torch.full((len(out),), 1 / len(out)),
    "loop": lambda out: torch.stack([F.mse_loss(row, row.detach() + 1) for row in out]).sum() / len(out),
    "smoothed": lambda out: F.cross_entropy(out, CLASSES[: len(out)], label_smoothing=0.1),
    "soft targets": lambda out: F.cross_entropy(out, POINTS[: len(out)].softmax(1)),
    "nothing": lambda out: 0 * out.sum(),
    "gradients": lambda out: (out, torch.full_like(out, 1 / len(out))),
}
UNTOLD_SUMS = {
    "divided by a constant": lambda out: out.square().sum() / RECORDS,
    "a mean times the batch": lambda out: out.square().mean() * len(out),
    "loop": lambda out: sum(F.mse_loss(row, row.detach() + 1) for row in out),
    "one by one": lambda out: sum(F.mse_loss(out[i], POINTS[i]) for i in range(len(out))),
    "parts": lambda out: out[:3].mean() + out[3:].mean() * (len(out) - 3),
    "gradients": lambda out: (out, torch.ones_like(out)),
}
UNTOLD = [("mean", name) for name in UNTOLD_MEANS] + [("sum", name) for name in UNTOLD_SUMS]


def private(declared: str, records: int = RECORDS, **options):
    torch.manual_seed(0)
    x = torch.randn(records, 4)
    return x, *make_private(nn.Linear(4, 3), (x, torch.zeros(records)), loss_reduction=declared, **options)


def differentiate(loss: Tensor | tuple[Tensor, Tensor]) -> None:
    torch.autograd.backward(*loss) if isinstance(loss, tuple) else loss.backward()


@pytest.mark.parametrize("kind", ["mean", "sum"])
@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize("loss", PLAIN)
def test_a_plain_loss_is_known_in_its_first_backward(loss, declared, kind):
    x, model, optimizer, _, engine = private(declared)
    if kind == declared:
        PLAIN[loss](model(x), kind).backward()
        optimizer.step()
        assert engine.ledger.steps == 1
        return
    for _ in range(2):  # a loop that goes on is refused again
        words = f"^the loss is a {kind} over records, but loss_reduction is '{declared}'"
        with pytest.raises(GredpError, match=words):
            PLAIN[loss](model(x), kind).backward()
        with pytest.raises(GredpError, match="without a new backward"):
            optimizer.step()
    assert engine.ledger.steps == 0


@pytest.mark.parametrize(("declared", "loss"), UNTOLD)
def test_of_other_losses_nothing_is_concluded_from_one_batch(declared, loss):
    x, model, optimizer, _, engine = private(declared)
    differentiate((UNTOLD_MEANS if declared == "mean" else UNTOLD_SUMS)[loss](model(x)))
    optimizer.step()
    assert engine.ledger.steps == 1


def test_one_record_moves_the_sum_by_at_most_the_clip_norm_whatever_the_loss_is_said_to_be():
    """Gradients that just pass the clip: with a factor of the batch too many, all of them shrink with it."""
    records, clip, sums = 200, 1.0, []
    for drawn in (records, records - 1):
        x = torch.full((drawn, 4), 1 / 2 / records / math.sqrt(3))
        model, optimizer, _, _ = make_private(nn.Linear(4, 3, bias=False), (x, x), clip=clip)
        try:
            model(x).sum().backward()
        except GredpError:
            return
        optimizer.step()
        sums.append(model.weight.grad * drawn)
    assert (sums[0] - sums[1]).norm() <= clip * (1 + 1e-5)


def train(declared: str, loss, steps: int):
    """On Poisson batches of records as unlike as four and one."""
    x, model, optimizer, loader, engine = private(
        declared, 400, sample_rate=0.1, batch_size=40, noise_multiplier=1.0, lr=0.01
    )
    x.mul_(torch.logspace(-0.3, 0.3, 400)[torch.randperm(400), None])
    while engine.ledger.steps < steps:
        for batch, _ in loader:
            loss(model(batch)).backward()
            optimizer.step()


WRONG = {
    "mean": lambda out: 0.5 * out.square().sum(),
    "sum": lambda out: out.square().sum() / len(out),
}


@pytest.mark.parametrize("declared", WRONG)
def test_any_loss_is_known_by_how_gradients_follow_the_size_of_batches(declared):
    with pytest.raises(GredpError, match=r"follow the size of the batch.* the steps so far does not hold"):
        train(declared, WRONG[declared], 800)


@pytest.mark.parametrize("declared", WRONG)
def test_a_right_loss_is_trained_on(declared):
    (right,) = (WRONG[other] for other in WRONG if other != declared)
    train(declared, right, 200)


@pytest.mark.parametrize("tail", [1, 3], ids=["light", "heavy"])
@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_no_right_loss_is_refused_whatever_its_records_are_like(declared, tail):
    generator = torch.Generator().manual_seed(0)
    for size in (3, 30):
        for _ in range(8):
            check = LossReduction(declared)
            for batch in torch.poisson(torch.full((400,), float(size)), generator=generator).int().tolist():
                slopes = torch.randn(batch, 1, generator=generator).exp() ** tail
                check.look("layer", slopes / batch if declared == "mean" else slopes)
                check.compare()
