"""From a target ε to the noise of a step. The only place with this arithmetic. No torch."""

import math
from dataclasses import dataclass

from gredp.errors import GredpError
from gredp.guarantee import Guarantee
from gredp.mechanisms import mechanism
from gredp.mechanisms.banded import check_bands
from gredp.mechanisms.registry import noise_scale
from gredp.privacy.accountant import AccountantName, check_delta, reject_large_delta
from gredp.privacy.calibrate import calibrate
from gredp.privacy.certificate import Block
from gredp.privacy.ledger import Entry
from gredp.privacy.paper_claims import claimed_sigma
from gredp.privacy.schedule import CONSTANT, NoiseSchedule


@dataclass(frozen=True)
class Sampling:
    """`steps` batches drawn at `rate` on average; with noise correlated over `bands` steps, in as many parts.

    One record can take part in ⌈steps/bands⌉ of them, each drawn from at rate bands·rate.
    """

    rate: float
    steps: int
    bands: int = 1

    @classmethod
    def of_epochs(cls, records: int, batch_size: int, epochs: int, bands: int = 1) -> "Sampling":
        """Passes of a loader over `records` with batches of `batch_size` on average."""
        if batch_size > records:
            raise GredpError(
                f"the batch size {batch_size} is larger than the dataset of {records} records: "
                f"take at most {records}"
            )
        return cls(batch_size / records, epochs * math.ceil(records / batch_size), bands)

    @property
    def turn_rate(self) -> float:
        """The rate at which the part is drawn from whose turn it is."""
        return check_bands(self.bands, self.rate)

    @property
    def rounds(self) -> int:
        """The most steps that one record can take part in."""
        return -(-self.steps // self.bands)


def noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling: Sampling,
    *,
    claim: str = "proven",
    accountant: AccountantName = "pld",
    spent: tuple[Entry, ...] = (),
    schedule: NoiseSchedule = CONSTANT,
) -> float:
    """What to ask `make_private` for.

    Under `claim="proven"` the least z whose proven ε, what was `spent` before included, is at most the
    target; under `claim="paper"` the σ that the paper's experiments take, whose proven ε is larger.
    """
    if claim == "paper":
        if not schedule.constant:
            raise GredpError("the paper's noise is the same in every step: schedule it under claim 'proven'")
        return claimed_sigma(target_epsilon, delta, sampling.rate, sampling.steps)
    return calibrate(target_epsilon, delta, sampling.turn_rate, sampling.rounds, accountant, spent, schedule)


def query_multiplier(
    target_epsilon: float, delta: float, share: float, accountant: AccountantName = "pld"
) -> float:
    """The z of one query of all records before training, where `share` of the budget is set aside for it.

    1/z² is that share of what a single release might have.
    """
    return calibrate(target_epsilon, delta, 1.0, 1, accountant) / math.sqrt(share)


def quote(
    *,
    method: str,
    noise: str = "white",
    claim: str = "proven",
    sigma: float | None = None,
    target_epsilon: float | None = None,
    delta: float = 1e-5,
    batch_size: int = 500,
    records: int = 60_000,
    epochs: int = 30,
    layers: int = 1,
    accountant: AccountantName = "pld",
    bands: int = 1,
    allow_large_delta: bool = False,
) -> Guarantee:
    """What `epochs` passes would cost, for any method, before there is a model.

    `layers` stand for as many fully released blocks; more than one are each clipped to the same norm.
    `bands` are steps over which noise is correlated.
    """
    check_delta(delta)
    counts = {"batch-size": batch_size, "records": records, "epochs": epochs, "layers": layers}
    for name, value in counts.items():
        if value < 1:
            raise GredpError(f"--{name} must be at least 1, not {value}")
    if (sigma is None) == (target_epsilon is None) and method != "plain":
        raise GredpError("give either --sigma or --epsilon")
    if sigma is not None and not (sigma >= 0 and math.isfinite(sigma)):
        raise GredpError(f"--sigma must be 0 or more and finite, not {sigma}")
    sampling = Sampling.of_epochs(records, batch_size, epochs, bands)
    chosen = mechanism(method, noise, claim, "layer_wise" if layers > 1 else None, bands)
    blocks = [Block.whole(f"layer{i}", f"layer{i}", (8,), 1) for i in range(layers)]
    unit = chosen.unit_multiplier(blocks, 1.0, batch_size)
    if method == "plain":
        sigma = 0.0
    else:
        reject_large_delta(delta, records, allow_large_delta)
        noise_scale(1.0, unit, claim)  # rejects a mechanism that releases a direction without noise
    if sigma is None:
        assert target_epsilon is not None
        z = noise_multiplier(target_epsilon, delta, sampling, claim=claim, accountant=accountant)
        sigma = noise_scale(z, unit, claim)
    proven = chosen.plan(blocks, 1.0, sigma, batch_size).certificate().noise_multiplier
    claimed = sigma if chosen.claimed_by_paper else None
    split = "to be drawn" if bands > 1 else ""
    spent = Entry(proven, sampling.turn_rate, sampling.steps, claimed, bands, split)
    return Guarantee.of((spent,), delta, step=spent, sigma=sigma, accountant=accountant)
