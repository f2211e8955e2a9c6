"""The frozen plan of a step: the gradient path executes it, and the certificate is read from the same fields.

Because the certificate is computed from the very fields that the gradient stages read, the noise
that is drawn and the noise that is accounted for cannot drift apart.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from gredp.errors import GredpError
from gredp.privacy.certificate import Block, Certificate, Release, real_part_variances

Transform = Literal["none", "kernel", "padded"]
Needs = Literal["norms", "spectra", "inputs"]
Blocks = tuple[Block, ...]
Groups = Literal["both", "layer", "frequency"]
Clipping = Literal["flat", "per_layer", "layer_wise", "automatic"]


@dataclass(frozen=True)
class ClipGroup:
    """Blocks clipped together to one norm, and the noise deviation on each of their coordinates."""

    name: str
    blocks: tuple[str, ...]
    clip_norm: float
    noise_std: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.noise_std):
            raise GredpError(
                f"noise of deviation {self.noise_std}: noise scale times clipping norm is too large"
            )


@dataclass(frozen=True)
class Shaping:
    """Noise shaped over frequency groups (docs/theory.md, section 3).

    `exponent` γ sets the weights w² ∝ m^(−γ) from the learned energies m, `preconditioner` the
    exponent of the update P = m^(−γ′). `energy_noise` is the multiplier of the energy query relative
    to the gradient's. `bands` is the most frequency groups that one block is cut into.

    `groups` is what may differ in weight: layers against each other, frequencies within each layer, or
    both. `window` is over how many releases the energies are averaged, older ones fading exponentially;
    0 is over all of them.
    """

    exponent: float = 0.5
    preconditioner: float = 0.0
    energy_noise: float = 10.0
    bands: int = 16
    groups: Groups = "both"
    window: int = 50

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 1 or not 0 <= self.preconditioner <= 1:
            raise GredpError(
                f"shaping exponents lie in [0, 1], not {self.exponent} and {self.preconditioner}"
            )
        if not 0 < self.energy_noise < math.inf or not isinstance(self.bands, int) or self.bands < 1:
            raise GredpError(
                f"shaping needs energy_noise > 0, finite, and whole bands ≥ 1, not {self.energy_noise} and "
                f"{self.bands}"
            )
        if self.groups not in get_args(Groups):
            raise GredpError(f"unknown groups {self.groups!r}: choose one of {', '.join(get_args(Groups))}")
        if not (self.window >= 0 and float(self.window).is_integer()):
            raise GredpError(f"the window must be a whole number of releases, or 0, not {self.window}")


@dataclass(frozen=True)
class StepPlan:
    """Everything that one private step does to the gradients.

    `noise_parts` (a, b) scale the real and the imaginary noise on each Fourier coefficient; None
    means one real draw per coordinate instead (carried through the transform where there is one).
    `keep_ratio` is the share of coefficients that Spectral-DP keeps. `energy_std` is the deviation
    of the noise on the energy query when `shaping` is set. `correlation` is the first column of C, by which
    the noise of a step is correlated with that of the steps before it; (1,) is noise independent of them.
    """

    blocks: tuple[Block, ...]
    groups: tuple[ClipGroup, ...]
    transform: Transform = "none"
    normalize: bool = False
    noise_parts: tuple[float, float] | None = None
    keep_ratio: float | None = None
    shaping: Shaping | None = None
    energy_std: float = 0.0
    correlation: tuple[float, ...] = (1.0,)

    @cached_property
    def digest(self) -> str:
        """By which processes tell plans apart."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def certificate(self) -> Certificate:
        """K and Σ of this step, hence its multiplier.

        Noise C⁻¹ξ on the sums is noise ξ on C times the sums: there a record's gradient is multiplied by a
        column of C, and K by the column's norm.
        """
        column = math.hypot(*self.correlation)
        blocks = {block.name: block for block in self.blocks}
        releases = []
        for group in self.groups:
            scale = min(self._least_scale(blocks[name]) for name in group.blocks)
            releases.append(Release(group.name, group.clip_norm * column, group.noise_std * scale))
        if self.shaping is not None:
            releases.append(Release("energy shares", column, self.energy_std))
        return Certificate(tuple(releases))

    def scaled(self, factor: float) -> "StepPlan":
        """The same step with all of its noise times `factor`, and so its multiplier."""
        if factor == 1:
            return self
        return replace(self, groups=scale_noise(self.groups, factor), energy_std=self.energy_std * factor)

    def _least_scale(self, block: Block) -> float:
        """Root of the least eigenvalue of Σ on this block, for a unit deviation."""
        if self.noise_parts is None:
            return 1.0
        # A band is cut out before the clip, so what is released spans the band, not the crop: there
        # the even and odd parts count, whatever the crop does afterwards.
        whole = block if self.keep_ratio is None else Block.whole("", "", block.grid, len(block.grid))
        return math.sqrt(min(real_part_variances(whole, *self.noise_parts)))


class Mechanism(ABC):
    """A method with its options, before it meets a model: blocks and norms in, a plan out."""

    name: str
    #: whether the paper claims an ε for this method, namely that of DP-SGD at the same σ
    claimed_by_paper: bool = True
    #: whether it has noise at all
    private: bool = True

    clipping: Clipping

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The names and defaults of its options."""
        usual = cls()
        return {name: getattr(usual, name) for name in getattr(cls, "__dataclass_fields__", ())}

    @classmethod
    def build(cls, **options: Any) -> "Mechanism":
        return cls(**options)

    def plan(
        self,
        blocks: Sequence[Block],
        clip_norm: float | Sequence[float],
        sigma: float,
        expected_batch_size: float,
    ) -> StepPlan:
        """The step for these blocks at noise scale `sigma`."""
        groups = clip_groups(self.clipping, blocks, clip_norm, sigma)
        plan = self.step(tuple(blocks), groups, sigma, expected_batch_size)
        return replace(plan, normalize=self.clipping == "automatic")

    @abstractmethod
    def step(
        self, blocks: Blocks, groups: tuple[ClipGroup, ...], sigma: float, expected_batch_size: float
    ) -> StepPlan:
        """What is particular to the method, for groups clipped and noised as its clipping says."""

    @property
    def transform(self) -> Transform:
        return "none"

    @property
    def needs(self) -> Needs:
        """What the clip asks of a layer: norms, energies by frequency, or nothing before the sum's inputs."""
        return "inputs" if self.transform == "padded" else "norms"

    def unit_multiplier(
        self, blocks: Sequence[Block], clip_norm: float | Sequence[float], expected_batch_size: float
    ) -> float:
        """z at σ = 1. Every certificate is linear in σ, so this converts between the two."""
        plan = self.plan(blocks, clip_norm, 1.0, expected_batch_size)
        return plan.certificate().noise_multiplier


def clip_groups(
    clipping: Clipping, blocks: Sequence[Block], clip_norm: float | Sequence[float], sigma: float
) -> tuple[ClipGroup, ...]:
    """Who is clipped with whom, to what, and the noise that goes with it.

    | clipping | balls | noise per coordinate | z for white noise |
    |---|---|---|---|
    | flat, automatic | one of radius C | σC | σ |
    | per_layer, C | L of radius C/√L | σC | σ |
    | per_layer, a list c | one each of radius c_l | σ‖c‖ | σ |
    | layer_wise (Algorithm 2 of the paper) | L of radius c | σc | σ/√L |
    """
    if clipping not in get_args(Clipping):
        raise GredpError(f"unknown clipping {clipping!r}: choose one of {', '.join(get_args(Clipping))}")
    norms = list(clip_norm) if isinstance(clip_norm, Sequence) else [clip_norm]
    for norm in norms:
        positive_norm(norm)
    if not (sigma >= 0 and math.isfinite(sigma)):
        raise GredpError(f"the noise scale must be 0 or more and finite, not {sigma}")
    if clipping in ("flat", "automatic"):
        if len(norms) != 1:
            raise GredpError(f"{clipping} clipping takes one norm, not {len(norms)}")
        return (ClipGroup("all", tuple(b.name for b in blocks), norms[0], sigma * norms[0]),)
    members = _layers(blocks, len(norms))
    total = math.sqrt(math.fsum(c * c for c in norms)) if len(norms) > 1 else norms[0]
    if clipping == "per_layer":
        each = norms if len(norms) > 1 else [norms[0] / math.sqrt(len(members))] * len(members)
        deviations = [sigma * total] * len(members)
    else:
        each = norms if len(norms) > 1 else norms * len(members)
        deviations = [sigma * c for c in each]
    return tuple(ClipGroup(n, names, c, s) for (n, names), c, s in zip(members.items(), each, deviations))


def positive_norm(norm: Any) -> float:
    """As a plain number; from numpy, from a tensor of one element."""
    try:
        number = float(norm)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 < number < math.inf:
        raise GredpError(f"the clipping norm must be a positive number, not {norm!r}")
    return number


def _layers(blocks: Sequence[Block], norms: int) -> dict[str, tuple[str, ...]]:
    """Blocks by layer; by parameter where a list of norms has one entry for each parameter."""
    layers: dict[str, tuple[str, ...]] = {}
    for block in blocks:
        layers[block.layer] = (*layers.get(block.layer, ()), block.name)
    if norms in (1, len(layers)):
        return layers
    if norms == len(blocks):
        return {block.name: (block.name,) for block in blocks}
    raise GredpError(
        f"{norms} clipping norms given for {len(layers)} layers with {len(blocks)} parameters: "
        "give one norm, one for each layer, or one for each parameter"
    )


def scale_noise(groups: tuple[ClipGroup, ...], factor: float) -> tuple[ClipGroup, ...]:
    return tuple(replace(group, noise_std=group.noise_std * factor) for group in groups)
