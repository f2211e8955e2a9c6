"""What Opacus users call by other names: the same things, under theirs."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gredp.budget import Sampling, noise_multiplier
from gredp.errors import GredpError
from gredp.privacy.accountant import ACCOUNTANTS, Accountant
from gredp.privacy.ledger import Ledger
from gredp.storage.resumable import Resumable
from gredp.validation import ModuleValidator, validate

#: arguments of Opacus' make_private that ask for what is always so here: the model is never wrapped, empty
#: batches are stepped, and noise is calibrated more tightly than any tolerance
ALWAYS_SO = ("wrap_model", "rand_on_empty", "epsilon_tolerance")


class OpacusNames(Resumable):
    """Methods of Opacus' PrivacyEngine that this one has by other names."""

    def per_sample_gradients(self) -> dict[str, Tensor]:
        """Of the last backward, before `step()`: each record's own gradient `[b, *shape]`, by parameter.

        Opacus' `p.grad_sample`, for research. They are private data, and so is all that is printed, drawn or
        decided by them: ε covers none of it. The engine says from then on, and in checkpoints, that they were
        read. They are returned and not kept on the parameters, which `torch.save` would write.
        """
        _, optimizer = self._private()
        spectra = optimizer.capture.pending()
        if spectra is None:
            raise GredpError(
                "there are no per-sample gradients: ask after backward(), before optimizer.step()"
            )
        optimizer.capture.exposed += 1
        return {name: gradient.dense() * spectra.scale for name, gradient in spectra.gradients.items()}

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """A copy by `ModuleValidator.fix`; what has no replacement is rejected by name."""
        fixed = ModuleValidator.fix(module)
        for error in validate(fixed):
            raise error
        return fixed

    @staticmethod
    def is_compatible(
        *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: Any = None
    ) -> bool:
        """Whether `make_private` would take this model."""
        return not validate(module)

    @staticmethod
    def validate(*, module: nn.Module, optimizer: Optimizer | None = None, data_loader: Any = None) -> None:
        """Raise the first reason why `make_private` would reject this model."""
        for error in validate(module):
            raise error

    def save_checkpoint(
        self,
        *,
        path: str | Path,
        module: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """`save`: `path` is a folder, with a ledger that every later step is charged to; nothing is pickled.

        Model and optimizer are those that `make_private` returned, whatever is given here. `checkpoint_dict`
        is your own, plain JSON.
        """
        _reject(others)
        self.save(path, checkpoint_dict)

    def load_checkpoint(
        self,
        *,
        path: str | Path,
        module: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """`load`, after `make_private` with the same settings; returns the saved `checkpoint_dict`."""
        _reject(others)
        return self.load(path)


def _reject(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value:
            raise GredpError(f"{name} has no part in a checkpoint here: remove it (docs/howto.md)")


def without_opacus_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the method alone."""
    return {name: value for name, value in options.items() if name not in ALWAYS_SO}


def create_accountant(mechanism: str) -> Accountant:
    """An accountant without an engine: `step` charges it."""
    return Accountant(Ledger(), "pld" if mechanism == "prv" else mechanism)


class RDPAccountant(Accountant):
    def __init__(self) -> None:
        super().__init__(Ledger(), "rdp")


class PRVAccountant(Accountant):
    def __init__(self) -> None:
        super().__init__(Ledger(), "pld")


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "pld",
    epsilon_tolerance: float | None = None,
) -> float:
    """The least noise multiplier at which `steps`, or `epochs` of 1/sample_rate steps each, meet the target.

    | argument | default | meaning |
    |---|---|---|
    | `target_epsilon`, `target_delta` | | what the run may cost, proven |
    | `sample_rate` | | share of the records in a batch, on average |
    | `epochs`, `steps` | `None` | how long it trains: one of them |
    | `accountant` | `"pld"` | or "rdp"; Opacus' "prv" means "pld" |
    | `epsilon_tolerance` | `None` | of Opacus; the result here is always on the private side of the target |

    >>> round(get_noise_multiplier(target_epsilon=2, target_delta=1e-5, sample_rate=1.0, steps=1), 3)
    1.994
    """
    if (epochs is None) == (steps is None):
        raise GredpError("get_noise_multiplier takes epochs or steps, one of them")
    if not 0 < sample_rate <= 1:
        raise GredpError(f"the sampling rate must be above 0 and at most 1, not {sample_rate}")
    total = steps if steps is not None else math.ceil((epochs or 0) / sample_rate)
    name = "pld" if accountant == "prv" else accountant
    if name not in ACCOUNTANTS:
        raise GredpError(f"unknown accountant {accountant!r}: use {' or '.join(ACCOUNTANTS)}")
    return noise_multiplier(target_epsilon, target_delta, Sampling(sample_rate, total), accountant=name)
