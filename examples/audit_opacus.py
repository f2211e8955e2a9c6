"""Audit code that is not ours: one step of Opacus' optimizer, wrapped in a function of NumPy arrays.

The same from the command line:  cd examples && gredp audit --target audit_opacus:step --sigma 0.5
"""

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

from gredp.audit.bounds import Claim
from gredp.audit.game import audit
from gredp.privacy.ledger import Entry

SIGMA, CLIP, DIMENSION = 0.5, 1.0, 16
model = GradSampleModule(torch.nn.Linear(DIMENSION, 1, bias=False))
optimizer = DPOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0),
    noise_multiplier=SIGMA, max_grad_norm=CLIP, expected_batch_size=4,
)  # fmt: skip


def step(gradients: np.ndarray) -> np.ndarray:
    """`[n, d]` gradients in, the d released numbers out. The loss is linear: a record is its own gradient."""
    torch.nn.init.zeros_(model._module.weight)
    optimizer.zero_grad()
    model(torch.from_numpy(gradients).float().requires_grad_()).mean().backward()
    optimizer.step()
    return -model._module.weight.detach()[0].numpy() * 4


if __name__ == "__main__":
    claim = Claim((Entry(SIGMA, sample_rate=1.0, steps=1),))
    found = audit(step, [(DIMENSION,)], claim, clip_norm=CLIP, plays=300, alpha=1e-6)
    verdict = "refuted" if found.refuted else "not refuted"
    lower = found.best.epsilon_lower
    print(f"Opacus: {verdict}; audited ε ≥ {lower:.2f}, proven ε = {claim.epsilon(1e-5):.2f} at δ = 1e-5")
