"""What a run would cost, for any method, before there is a model: the arithmetic behind `gredp account`."""

import math
from typing import Any, Literal

from gredp.errors import GredpError
from gredp.mechanisms import mechanism
from gredp.mechanisms.banded import check_bands
from gredp.mechanisms.registry import noise_scale
from gredp.privacy.accountant import AccountantName, check_delta, epsilon, refuse_large_delta
from gredp.privacy.calibrate import calibrate
from gredp.privacy.certificate import Block
from gredp.privacy.choose_bands import choose_bands
from gredp.privacy.ledger import Entry
from gredp.privacy.paper_claims import claimed_epsilon, claimed_sigma


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
    bands: int | Literal["auto"] = 1,
    momentum: float = 0.9,
    allow_large_delta: bool = False,
) -> dict[str, Any]:
    """Proven and claimed ε, multiplier and σ of `epochs` passes at batch_size/records.

    `layers` stand for as many fully released blocks; more than one are each clipped to the same norm.
    `bands` are steps over which noise is correlated; "auto" chooses them for a target ε and a `momentum`.
    """
    check_delta(delta)
    for name, value in (
        ("batch-size", batch_size),
        ("records", records),
        ("epochs", epochs),
        ("layers", layers),
    ):
        if value < 1:
            raise GredpError(f"--{name} must be at least 1, not {value}")
    if batch_size > records:
        raise GredpError(f"the batch size {batch_size} is larger than the data set of {records} records")
    if (sigma is None) == (target_epsilon is None) and method != "plain":
        raise GredpError("give either --sigma or --epsilon")
    if sigma is not None and not (sigma >= 0 and math.isfinite(sigma)):
        raise GredpError(f"--sigma must be 0 or more and finite, not {sigma}")
    if method != "plain":
        refuse_large_delta(delta, records, allow_large_delta)
    clipping = "layer_wise" if layers > 1 else None
    mean_rate, steps = batch_size / records, epochs * math.ceil(records / batch_size)
    if bands == "auto":
        if target_epsilon is None:
            raise GredpError("--bands auto chooses for a target: give --epsilon")
        bands = choose_bands(target_epsilon, delta, mean_rate, steps, momentum)
    rate = check_bands(bands, mean_rate)
    chosen = mechanism(method, noise, claim, clipping, bands)
    blocks = [Block.whole(f"layer{i}", f"layer{i}", (8,), 1) for i in range(layers)]
    unit = chosen.unit_multiplier(blocks, 1.0, batch_size)
    if method == "plain":
        sigma = 0.0
    else:
        noise_scale(1.0, unit, claim)  # refuses a mechanism that releases a direction without noise
    if sigma is None:
        assert target_epsilon is not None
        if claim == "paper":
            sigma = claimed_sigma(target_epsilon, delta, rate, steps)
        else:
            z = calibrate(target_epsilon, delta, rate, -(-steps // bands), accountant)
            sigma = noise_scale(z, unit, claim)
    multiplier = chosen.plan(blocks, 1.0, sigma, batch_size).certificate().noise_multiplier
    turns: Any = {"bands": bands, "split": "to be drawn"} if bands > 1 else {}
    spent = (Entry(multiplier, rate, steps, sigma if chosen.claimed_by_paper else None, **turns),)
    return {
        "proven_epsilon": epsilon(spent, delta, accountant),
        "claimed_epsilon": claimed_epsilon(spent, delta),
        "noise_multiplier": multiplier,
        "sigma": sigma,
        "delta": delta,
        "accountant": accountant,
        "steps": steps,
        "sample_rate": rate,
        "correlation_bands": bands,
    }
