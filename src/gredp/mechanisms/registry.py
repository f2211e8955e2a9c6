"""From the words a user writes (method, noise, claim, options) to a mechanism."""

import math
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, get_args

from gredp.errors import GredpError
from gredp.mechanisms.banded import Banded
from gredp.mechanisms.dpsgd import DPSGD
from gredp.mechanisms.gredp import HALVES, GReDP
from gredp.mechanisms.plain import Plain
from gredp.mechanisms.plan import Clipping, Mechanism, Shaping
from gredp.mechanisms.shaped import ShapedGReDP
from gredp.mechanisms.spectral_dp import SpectralDP

Method = Literal["plain", "dpsgd", "spectral_dp", "gredp"]
Noise = Literal["white", "real", "shaped"]
Claim = Literal["proven", "paper"]
METHODS: tuple[str, ...] = get_args(Method)

#: noise of GReDP by name: the parts (a, b) on each coefficient
NOISE_PARTS = {"white": HALVES, "real": (1.0, 0.0)}
#: options of earlier versions, and what takes their place
GONE = {
    "ema": "average the released weights by torch.optim.swa_utils.AveragedModel, which costs no privacy, and "
    "save it by engine.save(…, modules=…)",
}


def mechanism(
    method: str,
    noise: str = "white",
    claim: str = "proven",
    clipping: str | None = None,
    correlation_bands: int = 1,
    **options: Any,
) -> Mechanism:
    """The mechanism for `method`; options that it does not have are refused by name.

    Where `clipping` is left open, a spectral method under `claim="paper"` clips layer by layer at the
    same norm, as the paper's Algorithm 2 does; everything else clips flat.
    """
    if correlation_bands != 1:
        if method == "plain":
            raise GredpError("plain training has no noise that correlation bands could correlate")
        if claim == "paper":
            raise GredpError("the paper makes no claim about correlated noise: use claim 'proven'")
        return Banded(mechanism(method, noise, claim, clipping, **options), correlation_bands)
    for word, value, allowed in (
        ("method", method, METHODS),
        ("noise", noise, get_args(Noise)),
        ("claim", claim, get_args(Claim)),
    ):
        if value not in allowed:
            raise GredpError(f"unknown {word} {value!r}: choose one of {', '.join(allowed)}")
    if clipping is not None and clipping not in get_args(Clipping):
        raise GredpError(f"unknown clipping {clipping!r}: choose one of {', '.join(get_args(Clipping))}")
    if noise != "white" and method != "gredp":
        raise GredpError(f"noise {noise!r} belongs to method 'gredp', not to {method!r}")
    if noise == "shaped" and claim == "paper":
        raise GredpError("the paper makes no claim about shaped noise: use claim 'proven'")
    if method == "plain":
        return _build(Plain, method, options)
    if clipping is None:
        clipping = "layer_wise" if claim == "paper" and method != "dpsgd" else "flat"
    options["clipping"] = clipping
    if method == "dpsgd":
        return _build(DPSGD, method, options)
    if method == "spectral_dp":
        return _build(SpectralDP, method, options)
    if noise == "shaped":
        fields = {key: options.pop(key) for key in Shaping.__dataclass_fields__ if key in options}
        shaping = replace(options.pop("shaping", Shaping()), **fields)
        return _build(ShapedGReDP, "gredp with shaped noise", {**options, "shaping": shaping})
    options.setdefault("noise_parts", NOISE_PARTS[noise])
    return _build(GReDP, method, options)


def _build(kind: type[Mechanism], name: str, options: dict[str, Any]) -> Mechanism:
    unknown = set(options) - set(getattr(kind, "__dataclass_fields__", {}))
    if unknown:
        gone = [f"{option}: {GONE[option]}" for option in sorted(unknown) if option in GONE]
        raise GredpError("; ".join(gone) or f"{name} has no option {', '.join(sorted(unknown))}")
    return kind(**options)


def noise_scale(noise_multiplier: float, unit: float, claim: str) -> float:
    """σ for a requested multiplier: the paper's own σ under its claim, otherwise z over z(σ = 1)."""
    if not isinstance(noise_multiplier, Real) or not 0 <= noise_multiplier < math.inf:
        raise GredpError(f"the noise multiplier must be 0 or more and finite, not {noise_multiplier!r}")
    if claim == "paper":
        return noise_multiplier
    if unit == 0:
        raise GredpError(
            "this mechanism releases some directions without any noise (proven multiplier 0, epsilon "
            "infinite): it can be built only with claim='paper'"
        )
    return noise_multiplier / unit
