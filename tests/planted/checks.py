"""What the auditor looks at besides the game: exact checks of the running program.

Each check gives None, or one sentence that says what is wrong. The random ones raise a false alarm with
probability below 10⁻⁶, or always see the same draws.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp.adapters.budget import Budget, reject_private_metric
from gredp.audit.canaries import Grid
from gredp.audit.examples import Effort, Verdict, verdict
from gredp.audit.victims import EngineDraws, EngineForwards, EnginePersons, EngineStep
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError
from gredp.privacy import ledger as ledger_
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry
from gredp.randomness import Secret
from gredp.sampling import BatchMemoryManager, PoissonBatchSampler
from gredp.storage.ledger_file import LedgerFile, read_ledger

CLIP, BATCH = 0.5, 4


def game(
    effort: Effort,
    options: dict[str, Any],
    only: Sequence[str] = ("random",),
    grids: tuple[Grid, ...] = ((8,),),
    others: int = 3,
    noise_multiplier: float = 0.5,
) -> Verdict:
    """The game against one step of the engine, held to what its own ledger was charged.

    Of a person, if the options name a number of records; of a step with two forwards, if they say so.
    """
    victim: EngineStep
    if "records_per_person" in options:
        run = 1, 1.0  # steps, rate
        victim = EnginePersons(options, noise_multiplier, *run, grids=grids, seed=effort.seed)
    elif "weights" in options:
        victim = EngineDraws(options, noise_multiplier, 1, 1.0, grids=grids, seed=effort.seed)
    else:
        engine = {n: v for n, v in options.items() if n != "forwards"}
        kind = EngineForwards if engine != options else EngineStep
        victim = kind(engine, noise_multiplier, grids=grids, seed=effort.seed)
    return verdict(effort, victim, grids, victim.claim("proven"), only, others)


# ------------------------------------------------------------------ exact checks


def _private(model: nn.Module, data: Tensor, rate: float = 1.0, z: float = 0.0, clip: float = CLIP) -> Any:
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(data), batch_size=BATCH),
        noise_multiplier=z,
        max_grad_norm=clip,
        sample_rate=rate,
    )
    return *made, engine


def _released(model: Any, optimizer: Any, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """One step; what it hands to the optimizer, as a sum over records."""
    optimizer.zero_grad()
    (model(x) * scale).sum(1).mean().backward()
    optimizer.step()
    found = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
    return torch.cat(found).double() * BATCH


def neighbors() -> Verdict:
    """N: noise off, one record more, be it hostile: the sum moves by at most the clipping norm."""
    x = torch.linspace(-1, 1, 24).view(4, 6)
    hostile = ((1, 1), (1e6, 1), (3e18, 2e-23), (2e-23, 3e18), (1e38, 1), (math.inf, 1), (math.nan, 1))
    for clip in (CLIP, 1e-5):
        model, optimizer, _, _ = _private(nn.Linear(6, 3, bias=False), x, clip=clip)
        base = _released(model, optimizer, x)
        for size, scale in hostile:
            weights = torch.tensor([[1.0]] * 4 + [[scale]])
            more = torch.cat([x, torch.full((1, 6), float(size))])
            moved = float((_released(model, optimizer, more, weights) - base).norm())
            if not moved <= clip * (1 + 1e-6):
                return f"a record of {size:g}, loss times {scale:g}, moves the sum by {moved:.3g}, not {clip}"
    return None


def constants() -> Verdict:
    """R: nothing that the steps are made of follows the records, neither their number nor the batch drawn."""
    seen = []
    for count in (19, 20):
        _, optimizer, loader, _ = _private(
            nn.Linear(6, 3, bias=False), torch.zeros(count, 6), rate=0.2, z=1.0
        )
        seen.append(
            (optimizer.certificate, optimizer.sample_rate, optimizer.expected_batch_size, len(loader))
        )
    if seen[0] != seen[1]:
        return f"19 and 20 records give {seen[0][1:]} and {seen[1][1:]} as rate, divisor and steps"
    x = torch.full((4, 6), 0.01)  # too short to be clipped
    model, optimizer, _, _ = _private(nn.Linear(6, 3, bias=False), x)
    one, four = (float(_released(model, optimizer, x[:drawn]).sum()) / drawn for drawn in (1, 4))
    if not math.isclose(one, four, rel_tol=1e-5):
        return f"a record weighs {one:.4g} in a batch of 1 and {four:.4g} in a batch of 4"
    return None


def sampler() -> Verdict:
    """Poisson batches vary in size, and a rate of 2⁻⁵⁰ draws nobody of 10⁸."""
    n, q = 1000, 0.05
    batches = PoissonBatchSampler(n, q, 1000, torch.Generator().manual_seed(7))
    sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.float64)
    ratio = float(sizes.var()) / (n * q * (1 - q))
    if abs(ratio - 1) > 0.27:
        return f"batch sizes vary {ratio:.2g} times as much as those of Poisson batches"
    for i, batch in enumerate(PoissonBatchSampler(2**22, 2.0**-50, 32, torch.Generator().manual_seed(7))):
        if batch:
            return f"a rate of 2⁻⁵⁰ drew a record within {(i + 1) * 2**22:.0e}"
    return None


def physical_batches() -> Verdict:
    """A logical batch is one step, whatever parts it comes in."""
    x = torch.linspace(0.5, 2, 24).view(4, 6)
    results = []
    for part in (1, 4):
        model, optimizer, loader, engine = _private(nn.Linear(6, 3, bias=False), x)
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=part, optimizer=optimizer)
        with manager as parts:
            for (a,) in parts:
                optimizer.zero_grad()
                model(a).sum(1).mean().backward()
                optimizer.step()
        results.append((engine.ledger.steps, float(model.weight.grad.sum())))
    (steps, total), (_, expected) = results
    if steps != 1 or not math.isclose(total, expected, rel_tol=1e-5):
        return (
            f"a batch in four parts was released {steps} times, with a sum of {total:.4g}, not {expected:.4g}"
        )
    return None


def charge_order() -> Verdict:
    """The ledger is charged before the update: a crash in between leaves the step paid."""
    x = torch.ones(4, 6)
    model, optimizer, _, engine = _private(nn.Linear(6, 3), x, z=1.0)

    def crash() -> None:
        raise InterruptedError

    optimizer.original_optimizer.step = crash
    with suppress(InterruptedError):
        _released(model, optimizer, x)
    return None if engine.ledger.steps == 1 else "a step that crashed in the optimizer was not charged"


def calibration() -> Verdict:
    """Noise chosen for a target ε never spends more than it."""
    engine, model = PrivacyEngine(accountant="rdp"), nn.Linear(6, 3)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.ones(8, 6)), batch_size=2),
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=CLIP,
    )
    for _ in range(2):
        for (x,) in loader:
            _released(model, optimizer, x)
    spent = engine.get_epsilon(1e-5)
    return None if spent <= 2 else f"a run for ε = 2 spends {spent:.5f}"


def small_delta() -> Verdict:
    """At a δ near rounding, ε at a rate just below 1 is not less than by the closed form at rate 1."""
    nearly, exact = (epsilon([Entry(100.0, rate, 10_000)], 1e-14) for rate in (1 - 1e-15, 1.0))
    return None if nearly > exact - 1e-6 else f"ε = {nearly:.4f} at δ = 1e-14, and {exact:.4f} was spent"


def replay() -> Verdict:
    """Two engines, the second started as after a resume, with the same global seed, draw different noise."""
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        model, optimizer, _, _ = _private(nn.Linear(6, 3), torch.ones(4, 6), z=1.0)
        draws.append(_released(model, optimizer, torch.zeros(4, 6), 0.0))
    return "two engines drew the same noise" if torch.equal(*draws) else None


def shape() -> Verdict:
    """Shaped noise: a step's weights are fixed before its records are seen."""
    victim = EngineStep({"method": "gredp", "noise": "shaped"}, 0.5, grids=((8,),))
    step = victim.optimizer.private_step
    before = torch.cat(list(step.squared_weights.values()))
    victim.model(torch.ones(4, 8)).mean().backward()
    step.accumulate(victim.optimizer.capture.take())
    after = torch.cat(list(step.squared_weights.values()))
    return None if torch.equal(before, after) else "the weights of a step follow the records of that step"


def counts() -> Verdict:
    """Adaptive clipping: what the norms learn from is noised as the certificate says, within a sixth."""
    victim = EngineStep({"method": "dpsgd", "clipping": "adaptive"}, 0.5, grids=((8,),), seed=7)
    seen: list[float] = []
    victim.optimizer.private_step.learned.learn = lambda counts, _: seen.append(float(counts))
    for _ in range(400):
        victim(np.zeros((BATCH, 8)))
    certified = victim.optimizer.certificate.releases[-1].noise_std
    found = float(np.std(seen))
    if not abs(found / certified - 1) < 1 / 6:
        return f"counts vary by {found:.3g}, not by the {certified:.3g} of the certificate"
    return None


def fixed_batches() -> Verdict:
    """No record takes part more often than the ledger counts, wherever a pass was left."""
    engine, model = PrivacyEngine(secret=Secret(7)), nn.Linear(1, 1, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(torch.arange(20.0)[:, None]), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
    taken = torch.zeros(20)
    for stop in (3, 5, 2, 4):
        for _, (x,) in zip(range(stop), loader):
            _released(model, optimizer, x, 0.0)
            taken[x.flatten().long()] += 1
        counted = sum(entry.steps for entry in ledger_.mechanisms(engine.ledger.entries))
        if taken.max() > counted:
            return f"a record took part in {int(taken.max())} steps, and {counted} are counted"
    return None


# ------------------------------------------------------------------ noise correlated over steps

BANDS = 4


def _banded(outputs: int) -> Any:
    """Records that are their own numbers, without gradient; the noise and the draws are always the same."""
    engine, model = PrivacyEngine(secret=Secret(7)), nn.Linear(1, outputs, bias=False)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.arange(200.0)[:, None]), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        correlation_bands=BANDS,
    )
    return *made, engine


def turns() -> Verdict:
    """Records take part in steps a whole cycle apart, as often as the ledger's rate and rounds say."""
    model, optimizer, loader, engine = _banded(1)
    last: dict[int, int] = {}
    drawn = 0
    for t, (x,) in enumerate(chain(loader, loader, loader)):
        _released(model, optimizer, x, 0.0)
        for record in x.flatten().long().tolist():
            if t - last.get(record, -BANDS) < BANDS:
                return f"a record takes part in steps {last[record]} and {t}, less than {BANDS} apart"
            last[record] = t
            drawn += 1
        had, paid = t // BANDS + 1, sum(e.steps for e in ledger_.mechanisms(engine.ledger.entries))
        if paid < had:
            return f"after {t + 1} steps a part has had {had} turns, and {paid} are paid"
    rate = engine.ledger.entries[0].sample_rate
    asked = (t + 1) * 200 / BANDS
    if drawn > asked * rate + 6 * math.sqrt(asked * rate):
        return f"{drawn / asked:.3g} of a part are drawn in its turn, and {rate:.3g} are paid"
    return None


def correlation() -> Verdict:
    """Over steps the released noise is C⁻¹ξ: C, from its definition, makes it white again."""
    steps, size = 10, 20_000
    model, optimizer, loader, _ = _banded(size)
    noise = torch.stack([_released(model, optimizer, x, 0.0) * 20 / BATCH for (x,) in loader])
    column = [math.comb(2 * j, j) / 4**j / math.hypot(1, 1 / 2, 3 / 8, 5 / 16) for j in range(BANDS)]
    matrix = sum(c * torch.ones(steps - j).double().diag(-j) for j, c in enumerate(column))
    white = matrix @ noise
    worst = float((white @ white.T / size - torch.eye(steps)).abs().max())
    if worst > 6 * math.sqrt(2 / size):
        return f"C times the noise of {steps} steps is not white: {worst:.3g} off in its covariance"
    return None


# ------------------------------------------------------------------ what must be refused


def _attempt(model: nn.Module, x: Tensor) -> tuple[Any, Any]:
    """One step, and what is needed for another."""
    module, optimizer, _, _ = _private(model, x, z=1.0)
    _released(module, optimizer, x)
    return module, optimizer


def _following_buffer(x: Tensor) -> None:
    layer = nn.Linear(6, 3)
    layer.register_buffer("mean", torch.zeros(6))
    layer.register_forward_pre_hook(lambda layer, args: setattr(layer, "mean", args[0].mean(0)))
    _attempt(nn.Sequential(layer), x)


def _written_by_the_loop(x: Tensor) -> None:
    layer = nn.Linear(6, 3)
    layer.register_buffer("mean", torch.zeros(6))
    model, optimizer, _, _ = _private(layer, x, z=1.0)
    model(x).sum(1).mean().backward()
    model.mean.copy_(x.mean(0))
    optimizer.step()


def _outside(x: Tensor) -> None:
    model, optimizer, _, _ = _private(nn.Linear(6, 6), x, z=1.0)
    (model(x) @ model.weight).mean().backward()
    optimizer.step()


def _summed(x: Tensor) -> None:
    model, optimizer, _, _ = _private(nn.Linear(6, 3), x, z=1.0)
    model(x).sum().backward()
    optimizer.step()


class _TimeFirst(nn.Module):
    """As many steps of time as records, and put before them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None].expand(-1, 4, -1).transpose(0, 1)).mean(0)


def _unfrozen(x: Tensor) -> None:
    model, optimizer = _attempt(nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)), x)
    model[0].requires_grad_(True)
    _released(model, optimizer, x)


def _foreign(x: Tensor) -> None:
    model, optimizer, _, _ = _private(nn.Linear(6, 3), x, z=1.0)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    _released(model, optimizer, x)


def _out_of_turn(x: Tensor) -> None:
    """A second step on a batch whose turn has passed."""
    model, optimizer, loader, _ = _banded(1)
    (drawn,) = next(iter(loader))
    for _ in range(2):
        _released(model, optimizer, drawn)


def _rows(x: Tensor) -> None:
    """Every record twice, each copy clipped by itself."""
    model, optimizer, loader, _ = _private(nn.Linear(6, 3), x)
    (drawn,) = next(iter(loader))
    _released(model, optimizer, torch.cat([drawn, drawn]))


def _two_draws(x: Tensor) -> None:
    """A forward on each of two batches, and one step."""
    model, optimizer, loader, _ = _private(nn.Linear(6, 3), x)
    first, second = (drawn for (drawn,) in chain(loader, loader))
    (model(first).sum(1).mean() + model(second).sum(1).mean()).backward()
    optimizer.step()


def _reordered_views(x: Tensor) -> None:
    """Views of different records side by side."""
    model = nn.Linear(6, 3)
    PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), batch_size=4, collate_fn=lambda rows: rows[::-1]),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        views=2,
    )


def _large_delta(x: Tensor) -> None:
    model = nn.Linear(6, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(x), batch_size=1),
            target_epsilon=1.0,
            target_delta=1 / len(x),
            epochs=1,
            max_grad_norm=CLIP,
        )


def _past_the_target(x: Tensor) -> None:
    """Two steps for each batch of an adapter's run, the second one without a new draw."""
    model = nn.Linear(6, 3)
    budget = Budget(1e-5, CLIP, target_epsilon=2.0, engine=PrivacyEngine(accountant="rdp"))
    loader = budget.poisson(DataLoader(TensorDataset(x), batch_size=1))
    optimizer = budget.spend(model, torch.optim.SGD(model.parameters(), lr=1.0), loader, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (batch,) in chain(loader, loader):
            _released(model, optimizer, batch)
            _released(model, optimizer, batch)


def _shortened_ledger(x: Tensor) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        file = LedgerFile.create(path)
        for _ in range(2):
            file.append(ledger_.Entry(1.0, 0.5, 1))
        file.close()
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
        read_ledger(path)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "batch normalisation": lambda x: _attempt(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), x),
    "a buffer that follows the data": _following_buffer,
    "a buffer that the loop writes to": _written_by_the_loop,
    "a weight used outside of its layer": _outside,
    "a second step on the same gradients": lambda x: _attempt(nn.Linear(6, 3), x)[1].step(),
    "a summed loss that is said to be a mean": _summed,
    "time before records, as long as the batch": lambda x: _attempt(_TimeFirst(), x),
    "a parameter unfrozen after make_private": _unfrozen,
    "a foreign parameter in the optimizer": _foreign,
    "a batch out of turn under correlated noise": _out_of_turn,
    "a ledger with a line cut off": _shortened_ledger,
    "two rates in one split": lambda x: ledger_.mechanisms(
        [ledger_.Entry(1.0, rate, 1, None, BANDS, "a") for rate in (1.0, 0.01)]
    ),
    "a step past the target of an adapter": _past_the_target,
    "a delta of one in the records": _large_delta,
    "a training loss that decides": lambda x: reject_private_metric("EarlyStopping", "train_loss", ()),
    "more inputs than records": _rows,
    "forwards on two draws": _two_draws,
    "views that a collate function may reorder": _reordered_views,
}


def refusal(case: str) -> Verdict:
    """What cannot be private is refused with a sentence, before or at the step."""
    try:
        REFUSED[case](torch.ones(4, 6))
    except GredpError:
        return None
    return f"{case} was not refused"
