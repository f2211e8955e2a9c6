"""The methods by name, and from the words a user writes (method, noise, claim, options) to a mechanism."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

from gredp.errors import GredpError, choose
from gredp.mechanisms.banded import coefficients
from gredp.mechanisms.plan import Clipping, Mechanism, Quantile

ClaimName = Literal["proven", "paper"]

#: options of earlier versions, and what takes their place
GONE = {
    "ema": "average the released weights by torch.optim.swa_utils.AveragedModel, which costs no privacy, and "
    "save it by engine.save(…, modules=…)",
    "unclipped_num_std": "count_noise is the noise on the counts, relative to the gradient's; 10 costs 0.5 %",
}


@dataclass(frozen=True)
class Method:
    """All that is known of a method: where one is named, chosen, built or drawn, it comes from here.

    `name` is its own in comparisons. As an option it is `kind.name`, which methods that differ in noise alone
    share. The fields of `kind` are its options, with their defaults.
    """

    name: str
    kind: type[Mechanism]
    label: str
    color: str
    #: block of the circulant layers that go with it by default; 0 is dense
    block: int = 0
    #: how it clips under `claim="paper"` by default
    paper_clipping: Clipping = "flat"
    #: kinds of noise, the usual one first, and the options that each of them sets
    noises: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"white": {}})

    @property
    def method(self) -> str:
        return self.kind.name

    @property
    def noise(self) -> str:
        return next(iter(self.noises))


_METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Make a method known to the engine and to every command."""
    _METHODS[method.name] = method


def methods() -> dict[str, Method]:
    """Every method by its name in comparisons."""
    return dict(_METHODS)


def method_names() -> tuple[str, ...]:
    """Values of `method=`."""
    return tuple(dict.fromkeys(m.method for m in _METHODS.values()))


def noise_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(noise for m in _METHODS.values() for noise in m.noises))


def find(method: str, noise: str = "white") -> Method:
    """The one that these two options name."""
    choose("method", method, method_names())
    choose("noise", noise, noise_names())
    having = {m.method: m for m in _METHODS.values() if noise in m.noises}
    if method not in having:
        raise GredpError(
            f"noise {noise!r} belongs to method {', '.join(map(repr, having))}, not to {method!r}"
        )
    return having[method]


def own_options(kind: type[Mechanism], clipping: str | None) -> set[str]:
    """Names of the options that a method has beyond those of all."""
    of_norms = set(asdict(Quantile())) if is_adaptive(kind, clipping) else set()
    return set(kind.options()) - {"clipping"} | of_norms


def is_adaptive(kind: type[Mechanism], clipping: str | None) -> bool:
    return clipping in ("adaptive", "adaptive_per_layer") and "clipping" in kind.options()


def mechanism(
    method: str,
    noise: str = "white",
    claim: str = "proven",
    clipping: str | None = None,
    correlation_bands: int = 1,
    **options: Any,
) -> Mechanism:
    """The mechanism for `method`; options that it does not have are rejected by name.

    Where `clipping` is left open, a spectral method under `claim="paper"` clips layer by layer at the
    same norm, as the paper's Algorithm 2 does; everything else clips flat.
    """
    found = find(method, noise)
    choose("claim", claim, get_args(ClaimName))
    if clipping is not None:
        choose("clipping", clipping, get_args(Clipping))
    coefficients(correlation_bands)  # rejects what is not a number of bands
    if correlation_bands != 1 and not found.kind.private:
        raise GredpError(f"{method} training has no noise that correlation bands could correlate")
    if claim == "paper" and correlation_bands != 1:
        raise GredpError("the paper makes no claim about correlated noise: use claim 'proven'")
    if claim == "paper" and found.kind.private and not found.kind.in_paper:
        what = method if noise == "white" else f"{noise} noise"
        raise GredpError(f"the paper makes no claim about {what}: use claim 'proven'")
    adaptive = is_adaptive(found.kind, clipping)
    if adaptive and claim == "paper":
        raise GredpError("the paper makes no claim about adaptive clipping: use claim 'proven'")
    unknown = set(options) - own_options(found.kind, clipping)
    if unknown:
        gone = [f"{option}: {GONE[option]}" for option in sorted(unknown) if option in GONE]
        what = method if noise == found.noise == "white" else f"{method} with {noise} noise"
        raise GredpError("; ".join(gone) or f"{what} has no option {', '.join(sorted(unknown))}")
    of_norms = {name: options.pop(name) for name in asdict(Quantile()) if name in options}
    if "clipping" in found.kind.options():
        options["clipping"] = clipping or (found.paper_clipping if claim == "paper" else "flat")
    every: dict[str, Any] = {"correlation_bands": correlation_bands}
    every["quantile"] = Quantile(**of_norms) if adaptive else None
    return found.kind.build(**{**found.noises[noise], **options}, **every)


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
