"""An alarm for gross errors: one training run of a real network with many canaries (Steinke et al. 2023).

It notices noise that is missing by an order of magnitude, in exactly the code that was trained with, and
nothing finer: a √2 needs the game. "Not refuted" means even less here than there.
"""

import copy
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp.audit.bounds import guess, one_run_epsilon, one_run_p_value
from gredp.audit.canaries import generator
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError

#: of the canaries, the share that is guessed to be in, and the share that is guessed to be out
GUESSED = 0.1


@dataclass(frozen=True)
class OneRun:
    """`right` of `guesses` were right; the claim is refuted if that is less likely than α under it."""

    canaries: int
    guesses: int
    right: int
    claimed_epsilon: float
    proven_epsilon: float
    audited_epsilon_lower: float
    p_value: float
    delta: float
    alpha: float

    @property
    def refuted(self) -> bool:
        return self.p_value <= self.alpha

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"refuted": self.refuted, "kind": "gross-error alarm"}


def one_run(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    options: dict[str, Any],
    noise_multiplier: float,
    *,
    claim: str = "proven",
    steps: int = 4,
    clip_norm: float = 1.0,
    alpha: float = 0.01,
    delta: float = 1e-5,
    seed: int | None = None,
) -> OneRun:
    """Train `model` on these records, each in by a fair coin, and guess the coins from the weights' path.

    The attacker knows every candidate's gradient at the weights before each step, and finds the
    multiples of them that explain the update best.
    """
    rng = generator(seed)
    coins = rng.random(len(x)) < 0.5
    bare = copy.deepcopy(model)
    engine = PrivacyEngine()
    chosen = torch.from_numpy(coins)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x[chosen], y[chosen]), batch_size=len(x) // 4),
        noise_multiplier=noise_multiplier,
        max_grad_norm=clip_norm,
        sample_rate=1.0,
        **options,
    )
    scores = np.zeros(len(x))
    for _ in range(steps):
        before = _weights(model)
        gradients = _clipped_gradients(bare, model, x, y, clip_norm)
        for a, b in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
        update = (before - _weights(model)) * optimizer.expected_batch_size / 0.1
        gram = gradients @ gradients.T
        ridge = 1e-2 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        scores += torch.linalg.solve(gram + ridge, gradients @ update).numpy()
    inside, outside = guess(scores, GUESSED)
    right = int(coins[inside].sum() + (~coins[outside]).sum())
    counts, proven = (len(x), len(inside) + len(outside), right), engine.get_epsilon(delta)
    claimed = proven if claim == "proven" else engine.get_claimed_epsilon(delta)
    if claimed is None:
        raise GredpError("the paper makes no claim about this method: use --claim proven")
    lower, p = one_run_epsilon(*counts, delta, alpha), one_run_p_value(*counts, claimed, delta)
    return OneRun(*counts, claimed, proven, lower, p, delta, alpha)


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def _clipped_gradients(bare: nn.Module, model: nn.Module, x: Tensor, y: Tensor, clip_norm: float) -> Tensor:
    """`[n, parameters]`: what each candidate would add to the sum."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(bare, parameters, (a[None],)), b[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(values, x, y)
    rows: Tensor = torch.cat([g.flatten(1) for g in found.values()], 1).double()
    factors: Tensor = (clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    return rows * factors
