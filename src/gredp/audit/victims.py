"""What the game is played against: our engine, for one step or a whole run, or a user's function."""

import copy
import math
import pkgutil
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp.audit.bounds import Claim, Floats
from gredp.audit.canaries import Grid
from gredp.audit.game import AuditedStep
from gredp.engine import PrivacyEngine, Private
from gredp.errors import GredpError
from gredp.gradient.adaptive import AdaptedNorms
from gredp.layers import BlockCirculantLinear, SpectralConv2d
from gredp.privacy.ledger import Entry, mechanisms
from gredp.sampling import Draw, Part

#: a linear layer and a kernel, of odd and of even length; whole runs and the self-test play a circulant too
GRIDS: tuple[Grid, ...] = ((15,), (4, 4))
#: the expected batch, by which every sum is divided; the batch that is played is larger
BATCH = 2


class LinearLoss(nn.Module):
    """A model whose loss is linear in its weights, so that a record's gradient is the record itself.

    `[b, d]` → `[b]`. Every layer is a real one, with the rule, norm, transform and inverse of training: a
    grid of odd length is a linear layer, of even length a circulant, of two axes a kernel.
    """

    def __init__(self, grids: tuple[Grid, ...] = GRIDS) -> None:
        super().__init__()
        self.grids = grids
        self.layers = nn.ModuleList(map(self._layer, grids))

    @staticmethod
    def _layer(grid: Grid) -> nn.Module:
        n = grid[-1]
        if len(grid) == 2:
            return SpectralConv2d(1, 1, (grid[0], n), bias=False)
        return BlockCirculantLinear(n, n, n, bias=False) if n % 2 == 0 else nn.Linear(n, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        parts = torch.split(x, [math.prod(grid) for grid in self.grids], 1)
        for layer, grid, part in zip(self.layers, self.grids, parts):
            if isinstance(layer, SpectralConv2d):
                part = part.view(-1, 1, *grid)
            elif isinstance(layer, BlockCirculantLinear):
                part = part.flip(1).roll(1, 1)  # its first output reads the input backwards
            total = total + layer(part).flatten(1)[:, 0]
        return total


class EngineStep:
    """One step of a private optimizer on a batch that holds every record; weights start at zero each time.

    `entry` is what the ledger was charged for a step: the claim comes from it, not from the request.
    """

    #: of the model in a step, all on the same records
    forwards = 1

    def __init__(
        self,
        options: dict[str, Any],
        noise_multiplier: float,
        grids: tuple[Grid, ...] = GRIDS,
        seed: int | None = None,
    ) -> None:
        self.options, self.noise_multiplier, self.grids = options, noise_multiplier, grids
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.model, self.optimizer, _ = self._private(torch.zeros(BATCH, self.dimension), 1.0)
        step = self.optimizer.private_step
        if isinstance(step.learned, AdaptedNorms):
            step.learned.log_ratio += math.log(4)  # far from where the plan has them; what they are is public
        elif step.learned is not None:
            # Some weights far from 1, as if learned from earlier releases; what they are is public.
            shares = 0.7 ** torch.arange(len(step.learned.sizes), dtype=torch.float64)
            step.learned.learn(BATCH * shares / shares.norm(), 0.0)
        self(np.zeros((BATCH, self.dimension)))
        self.entry = self.engine.ledger.entries[-1]

    @property
    def dimension(self) -> int:
        return sum(math.prod(grid) for grid in self.grids)

    def claim(self, whose: str) -> Claim:
        """Of the charged steps: the proven multiplier, or the σ that the paper takes for it."""
        (entry,) = mechanisms([self.entry])
        z = entry.noise_multiplier if whose == "proven" else entry.claimed_multiplier
        if z is None:
            raise GredpError("the paper makes no claim about this method: use --claim proven")
        return Claim((Entry(z, entry.sample_rate, entry.steps),))

    def _private(self, data: Tensor, rate: float | None) -> Private:
        self.engine, model = PrivacyEngine(), LinearLoss(self.grids)
        return self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(data), batch_size=BATCH),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=1.0,
            sample_rate=rate,
            noise_generator=self.generator,
            **self.options,
        )

    def __call__(self, gradients: Floats) -> Floats:
        _zero(self.model)
        step = self.optimizer.private_step
        before = copy.deepcopy(step.learned)
        _train(self.model, self.optimizer, torch.from_numpy(gradients).float(), self.forwards)
        step.learned = before
        return _moved(self.model, self.optimizer)


class EngineForwards(EngineStep):
    """Two forwards in a step, as on real and generated inputs: each has the record's whole gradient."""

    forwards = 2

    def __call__(self, gradients: Floats) -> Floats:
        _hand_out(self.optimizer, len(gradients))
        return super().__call__(gradients)


class EngineTurn(EngineStep):
    """Noise correlated over b steps: the b steps over which a record that takes part in the first one counts.

    It returns what the best attacker makes of all their releases: Σ_i c_i (C y)_i, in which the record is
    back to its length and the noise is that of one step.
    """

    def __init__(self, options: dict[str, Any], noise_multiplier: float, **rest: Any) -> None:
        self._earlier: list[Floats] = []
        super().__init__(options, noise_multiplier, **rest)

    def _private(self, data: Tensor, rate: float | None) -> Private:
        return super()._private(data, (rate or 1.0) / self.options["correlation_bands"])

    def __call__(self, gradients: Floats) -> Floats:
        column = self.optimizer.private_step.plan.correlation
        reach = len(column) - 1
        y = self._earlier[-reach:] or [np.zeros(self.dimension)] * reach
        for drawn in (gradients, *[gradients[:0]] * reach):
            _hand_out(self.optimizer, len(drawn))
            y.append(super().__call__(drawn))
        self._earlier = y[-reach:]
        whitened = [sum(c * y[t - j] for j, c in enumerate(column)) for t in range(reach, len(y))]
        return np.asarray(sum(c * row for c, row in zip(column, whitened)))


class EngineRun(EngineStep):
    """A whole run over the dataset of these records: engine, Poisson sampler, optimizer, all new."""

    def __init__(
        self, options: dict[str, Any], noise_multiplier: float, steps: int, rate: float, **rest: Any
    ) -> None:
        self.steps, self.rate = steps, rate
        super().__init__(options, noise_multiplier, **rest)

    def __call__(self, gradients: Floats) -> Floats:
        data = torch.from_numpy(gradients).float()
        model, optimizer, loader = self._private(data, self.rate)
        _zero(model)
        while self.engine.ledger.steps < self.steps:
            for (x,) in loader:
                _train(model, optimizer, x)
                if self.engine.ledger.steps == self.steps:
                    break
        return _moved(model, optimizer)


class EnginePersons(EngineRun):
    """The same with a person in place of each record: their records all have that gradient.

    They have more records than the `records_per_person` of the options that take part in a step.
    """

    def _private(self, data: Tensor, rate: float | None) -> Private:
        each = self.options["records_per_person"] + 2
        self.options = self.options | {"persons": torch.arange(len(data)).repeat_interleave(each)}
        return super()._private(data.repeat_interleave(each, 0), rate)


class EngineDraws(EngineRun):
    """Batches of a fixed size, or records drawn by weights: blank ones stand in for those that are not there.

    The first one, a canary, is the heaviest.
    """

    RECORDS = 6

    def _private(self, data: Tensor, rate: float | None) -> Private:
        blank = data.new_zeros(self.RECORDS - len(data), data.shape[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that fixed batches have a price
            return super()._private(torch.cat([data, blank]), None)


def _zero(model: nn.Module) -> None:
    for p in model.parameters():
        nn.init.zeros_(p)


def _hand_out(optimizer: Any, records: int) -> None:
    """In place of the loader, which would sample."""
    optimizer.handed.begin()
    optimizer.handed.add(Part(Draw(records, optimizer.next_turn), records))


def _train(model: Any, optimizer: Any, x: Tensor, forwards: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(forwards):
        model(x).mean().backward()
    optimizer.step()


def _moved(model: nn.Module, optimizer: Any) -> Floats:
    """What the weights tell of the summed gradients: SGD with rate 1 from zero."""
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()
    return np.asarray(-moved * optimizer.expected_batch_size)


def load_target(name: str) -> AuditedStep:
    """A user's `module:function`, found as Python finds modules, the current folder included."""
    if not all(name.partition(":")):
        raise GredpError(f"--target takes module:function, not {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:  # anything may happen while a user's module is loaded
        raise GredpError(f"--target {name} cannot be loaded: {error}") from None
    if not callable(found):
        raise GredpError(f"--target {name} is not a function")

    def step(gradients: Floats) -> Floats:
        try:
            return np.asarray(found(gradients), dtype=float)
        except Exception as error:
            raise GredpError(f"--target {name} failed: {type(error).__name__}: {error}") from None

    return step
