"""Several forwards in a step: a record's gradients add up over them, and are clipped once."""

from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gredp import GredpError
from gredp.sampling import BatchMemoryManager
from oracles import bare, clipped_sum, flat
from worlds import MECHANISMS, make_private, released

RECORDS, CLIP = 6, 0.3


def critic() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 2, 3), nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(18, 3)
    return nn.Sequential(*layers)


def images(seed: int = 0, count: int = RECORDS) -> Tensor:
    return torch.randn(count, 1, 5, 5, generator=torch.Generator().manual_seed(seed))


def loss_of(real: Tensor, fake: Tensor) -> Tensor:
    """`[b]`: of both outputs together."""
    return real.square().sum(1) - 2 * fake.tanh().sum(1) + (real - fake).abs().sum(1)


def truth(model: nn.Module, real: Tensor, fake: Tensor) -> dict[str, Tensor]:
    """`[b, *shape]`: a loop over single records, plain autograd over both forwards."""
    twin, rows = bare(model), []
    for a, b in zip(real.double().split(1), fake.double().split(1)):
        value = loss_of(twin(a), twin(b)).sum()
        rows.append(torch.autograd.grad(value, list(twin.parameters())))
    return {name: torch.stack(g) for (name, _), g in zip(twin.named_parameters(), zip(*rows))}


def private(model: nn.Module, x: Tensor, **options):
    return make_private(model, (x, torch.zeros(len(x))), clip=CLIP, **options)


def in_one_loss(model, real, fake):
    loss_of(model(real), model(fake)).mean().backward()


def in_two_backwards(model, real, fake):
    a, b = model(real), model(fake)
    (a.square().sum(1) + (a - b).abs().sum(1)).mean().backward(retain_graph=True)
    (-2 * b.tanh().sum(1)).mean().backward()


def around_a_look_at_inputs(model, real, fake):
    """Adversarial training: `torch.autograd.grad` leaves no gradient on weights."""
    moved = real.clone().requires_grad_()
    torch.autograd.grad(model(moved).square().sum(1).mean(), moved)
    model(moved).square().sum(1).mean().backward(inputs=[moved])
    in_one_loss(model, real, fake)


def by_its_parts(model, real, fake):
    """The model's own forward never runs."""
    a, b = (model[3](model[2](model[1](model[0](x)))) for x in (real, fake))
    loss_of(a, b).mean().backward()


def checkpointed(model, real, fake):
    """The reentrant way runs layers again within the backward."""
    a, b = (checkpoint(model, x.clone().requires_grad_(), use_reentrant=True) for x in (real, fake))
    loss_of(a, b).mean().backward()


WAYS = [in_one_loss, in_two_backwards, around_a_look_at_inputs, by_its_parts, checkpointed]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_equals_the_loop_over_records_and_is_charged_once(way):
    x, fake = images(), images(1)
    model, optimizer, loader, engine = private(critic(), x)
    gradients = truth(model, x, fake)
    expected = clipped_sum(gradients, flat(gradients, CLIP))
    for steps in (1, 2):
        for real, _ in loader:
            way(model, real, fake)
            optimizer.step()
        assert engine.ledger.steps == steps
        for name, found in released(model, optimizer).items():
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mechanism", ["dpsgd", "gredp"])
def test_a_record_moves_the_sum_by_at_most_the_clip_norm_over_all_its_forwards(mechanism):
    x, fake = images(), images(1)
    sums = []
    for count in (RECORDS, RECORDS - 1):
        model, optimizer, loader, _ = private(
            critic(), x[:count], **MECHANISMS[mechanism], batch_size=RECORDS - 1
        )
        for real, _ in loader:
            in_one_loss(model, real, fake[:count])
            optimizer.step()
        sums.append(torch.cat([g.flatten() for g in released(model, optimizer).values()]).double())
    moved = float((sums[0] - sums[1]).norm())
    assert 0.9 * CLIP < moved <= CLIP * (1 + 1e-5)


def test_physical_batches_have_their_own_forwards():
    x, fake = images(), images(1)
    model, optimizer, loader, engine = private(critic(), x)
    gradients = truth(model, x, fake)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as parts:
        done = 0
        for real, _ in parts:
            in_one_loss(model, real, fake[done : done + len(real)])
            optimizer.step()
            done += len(real)
    expected = clipped_sum(gradients, flat(gradients, CLIP))
    assert engine.ledger.steps == 1
    for name, found in released(model, optimizer).items():
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_an_empty_draw_is_a_step_of_two_forwards_too():
    x = images()
    model, optimizer, loader, engine = private(critic(), x, sample_rate=1e-9, batch_size=1)
    real, _ = next(iter(loader))
    in_one_loss(model, real, images(1, 0))
    optimizer.step()
    assert engine.ledger.steps == 1


def test_a_generator_that_learns_through_a_private_critic():
    """The loop of a GAN; gradients that the generator leaves on the critic go to no other batch."""
    x, critic_, generator = images(), critic(), nn.Linear(4, 25)
    model, optimizer, loader, engine = private(critic_, x, lr=0.1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    for real, _ in chain(loader, loader):
        optimizer.zero_grad()
        fake = generator(torch.randn(len(real), 4)).view(-1, 1, 5, 5)
        in_one_loss(model, real, fake.detach())
        optimizer.step()
        of_generator.zero_grad()
        model(fake).square().mean().backward()
        of_generator.step()
    assert engine.ledger.steps == 2
    ((real, _),) = loader
    with pytest.raises(GredpError, match=r"^gradients of an earlier batch are still there.*generator"):
        in_one_loss(model, real, fake.detach())
    assert engine.ledger.steps == 2


# ------------------------------------------------------------------ what is refused


def two_draws(model, optimizer, loader):
    (a, _), (b, _) = chain(loader, loader)
    in_one_loss(model, a, b)
    optimizer.step()


def two_draws_moved(model, optimizer, loader):
    (a, _), (b, _) = chain(loader, loader)
    in_one_loss(model, a.clone(), b.clone())
    optimizer.step()


def two_draws_one_moved(model, optimizer, loader):
    (a, _), (b, _) = chain(loader, loader)
    in_one_loss(model, a, b.clone())
    optimizer.step()


def a_draw_accumulated(model, optimizer, loader):
    for x, _ in chain(loader, loader):
        model(x.clone()).square().mean().backward()


def an_earlier_batch(model, optimizer, loader):
    ((old, _),) = loader
    model(old).square().mean().backward()
    optimizer.step()
    ((new, _),) = loader
    in_one_loss(model, new, old)
    optimizer.step()


def an_earlier_part(model, optimizer, loader):
    old = None
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
        for x, _ in parts:
            in_one_loss(model, x, x if old is None else old)
            optimizer.step()
            old = x


def of_another_size(model, optimizer, loader):
    ((x, _),) = loader
    in_one_loss(model, x, x)
    in_one_loss(model, x[1:], x[1:])


def of_half_the_records(model, optimizer, loader):
    ((x, _),) = loader
    in_one_loss(model, x[:3], x[3:])
    optimizer.step()


def batches_of_ones_own(model, optimizer, loader):
    in_one_loss(model, images(), images(1))


def a_gradient_penalty(model, optimizer, loader):
    ((x, _),) = loader
    x = x.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


REFUSED = {
    two_draws: r"^these inputs are of more than one batch",
    two_draws_moved: r"^several forwards in a step, and more than one batch that no step was on",
    two_draws_one_moved: r"^several forwards in a step, and more than one batch that no step was on",
    a_draw_accumulated: r"^gradients of an earlier batch are still there",
    an_earlier_batch: r"^these inputs are of more than one batch",
    an_earlier_part: r"^these inputs are of more than one batch",
    of_another_size: r"saw 5 records, another layer or forward 6: .*row i of every forward",
    of_half_the_records: r"^the model was run on 3 inputs, but 6 records were drawn",
    batches_of_ones_own: r"^a second forward in a step on batches of your own",
    a_gradient_penalty: r"^gradients of gradients \(create_graph=True",
}


@pytest.mark.parametrize("attempt", REFUSED, ids=lambda attempt: attempt.__name__)
def test_forwards_on_other_records_are_refused(attempt):
    model, optimizer, loader, engine = private(critic(), images())
    with pytest.raises(GredpError, match=REFUSED[attempt]):
        attempt(model, optimizer, loader)
    assert engine.ledger.steps == (attempt is an_earlier_batch)
