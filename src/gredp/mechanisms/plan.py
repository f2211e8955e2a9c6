"""The frozen plan of a step: the gradient path executes it, and the certificate is read from the same fields.

Because the certificate is computed from the very fields that the gradient stages read, the noise
that is drawn and the noise that is accounted for cannot drift apart.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from gredp.errors import GredpError, choose
from gredp.mechanisms.banded import coefficients
from gredp.privacy.certificate import Block, Certificate, Release, real_part_variances

Transform = Literal["none", "kernel", "padded"]
Needs = Literal["norms", "spectra", "inputs"]
Groups = Literal["both", "layer", "frequency"]
Clipping = Literal["flat", "per_layer", "layer_wise", "automatic", "adaptive", "adaptive_per_layer"]
FLAT: Clipping = "flat"
NO_GRID: Transform = "none"
#: of spectral methods: the parameter's own, or the padded input's as the paper has it
GRIDS = ("kernel", "padded")
#: real and imaginary noise of Theorem 1
HALVES = (math.sqrt(0.5), math.sqrt(0.5))


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
        choose("groups", self.groups, get_args(Groups))
        if not (self.window >= 0 and float(self.window).is_integer()):
            raise GredpError(f"the window must be a whole number of releases, or 0, not {self.window}")


@dataclass(frozen=True)
class Quantile:
    """Norms that adapt until a share of the records is within them (`gradient/adaptive.py`); names of Opacus.

    C ← C·exp(−`clipbound_learning_rate`·(share − `target_unclipped_quantile`)) after each step, from counts
    that are noised: `count_noise` is their multiplier relative to the gradient's.
    """

    target_unclipped_quantile: float = 0.5
    clipbound_learning_rate: float = 0.2
    min_clipbound: float = 0.0
    max_clipbound: float = 1e300
    count_noise: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.target_unclipped_quantile < 1:
            raise GredpError(
                f"target_unclipped_quantile lies between 0 and 1, not {self.target_unclipped_quantile}"
            )
        if not (0 < self.clipbound_learning_rate < math.inf and 0 < self.count_noise < math.inf):
            raise GredpError(
                "clipbound_learning_rate and count_noise must be above 0 and finite, not "
                f"{self.clipbound_learning_rate} and {self.count_noise}"
            )
        if not 0 <= self.min_clipbound < self.max_clipbound:
            bounds = f"{self.min_clipbound} and {self.max_clipbound}"
            raise GredpError(f"min_clipbound must be 0 or more and below max_clipbound, not {bounds}")


@dataclass(frozen=True)
class StepPlan:
    """Everything that one private step does to the gradients.

    `noise_parts` (a, b) scale the real and the imaginary noise on each Fourier coefficient; None
    means one real draw per coordinate instead (carried through the transform where there is one).
    `keep_ratio` is the share of coefficients that Spectral-DP keeps. `energy_std` is the deviation
    of the noise on the energy query when `shaping` is set. `correlation` is the first column of C, by which
    the noise of a step is correlated with that of the steps before it; (1,) is noise independent of them.
    With a `quantile` the norms of the groups are those of the first step, and `count_std` is the deviation of
    the noise on each count of records within a norm.
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
    quantile: Quantile | None = None
    count_std: float = 0.0

    @property
    def query_std(self) -> float | None:
        """Of what is released beside the gradients, energy shares or counts; None where nothing is."""
        if self.quantile is not None:
            return self.count_std
        return None if self.shaping is None else self.energy_std

    @cached_property
    def digest(self) -> str:
        """By which processes tell plans apart."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def white_part(self) -> float | None:
        """a, where noise on a whole block with one weight is white of deviation a·noise_std: a real draw.

        Equal parts on the coefficients of a unitary transform leave a² on even and on odd directions, hence
        on every coordinate. None where they differ, or where a preconditioner comes after. On the padded
        grid the paper's steps are taken one by one, whatever the parts are.
        """
        a, b = self.noise_parts or (1.0, 1.0)
        preconditioned = self.shaping is not None and bool(self.shaping.preconditioner)
        return a if a == b and self.transform != "padded" and not preconditioned else None

    @property
    def keeps_sums(self) -> bool:
        """Whether what a step releases of a whole block is its sum and noise: nothing dropped or scaled."""
        return self.keep_ratio is None and (self.shaping is None or not self.shaping.preconditioner)

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
        if self.quantile is not None:  # ±½ for each group
            most = math.sqrt(len(self.groups)) / 2
            releases.append(Release("records within the norm", most * column, self.count_std))
        return Certificate(tuple(releases))

    def scaled(self, factor: float) -> "StepPlan":
        """The same step with all of its noise times `factor`, and so its multiplier."""
        if factor == 1:
            return self
        groups = tuple(replace(group, noise_std=group.noise_std * factor) for group in self.groups)
        energy_std, count_std = self.energy_std * factor, self.count_std * factor
        return replace(self, groups=groups, energy_std=energy_std, count_std=count_std)

    def _least_scale(self, block: Block) -> float:
        """Root of the least eigenvalue of Σ on this block, for a unit deviation."""
        if self.noise_parts is None:
            return 1.0
        # A band is cut out before the clip, so what is released spans the band, not the crop: there
        # the even and odd parts count, whatever the crop does afterwards.
        whole = block if self.keep_ratio is None else Block.whole("", "", block.grid, len(block.grid))
        return math.sqrt(min(real_part_variances(whole, *self.noise_parts)))


@dataclass(frozen=True)
class Mechanism:
    """A method with its options, before it meets a model: blocks and norms in, a plan out.

    A method is a subclass: its fields are its options, and `step` states what it does differently from
    DP-SGD. Correlated noise changes neither, so any method takes `correlation_bands` (`banded.py`).
    """

    correlation_bands: int = field(default=1, kw_only=True)
    #: with adaptive clipping
    quantile: Quantile | None = field(default=None, kw_only=True)
    #: the name that `method=` takes
    name: ClassVar[str]
    #: whether the paper claims an ε for this method, namely that of DP-SGD at the same σ
    in_paper: ClassVar[bool] = True
    #: whether it has noise at all
    private: ClassVar[bool] = True
    #: what the clip asks of a layer on the kernel's own grid
    reads: ClassVar[Needs] = "norms"

    # Methods that can choose have fields of these names.
    clipping = FLAT
    grid = NO_GRID

    @property
    def claimed_by_paper(self) -> bool:
        return self.in_paper and self.correlation_bands == 1 and self.quantile is None

    @property
    def needs(self) -> Needs:
        """What the clip asks of a layer: norms, energies by frequency, or nothing before the sum's inputs."""
        return "inputs" if self.grid == "padded" else self.reads

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The names and defaults of its own options."""
        usual = cls()
        return {f.name: getattr(usual, f.name) for f in fields(usual) if not f.kw_only}

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
        column = coefficients(self.correlation_bands)
        plan = StepPlan(tuple(blocks), groups, self.grid, self.clipping == "automatic", correlation=column)
        if self.quantile is not None:
            count_std = self.quantile.count_noise * sigma * math.sqrt(len(groups)) / 2
            plan = replace(plan, quantile=self.quantile, count_std=count_std)
        return self.step(plan, sigma, expected_batch_size)

    def step(self, plan: StepPlan, sigma: float, expected_batch_size: float) -> StepPlan:
        """The method's own step, from one with white noise on every coordinate."""
        return plan

    def unit_multiplier(
        self, blocks: Sequence[Block], clip_norm: float | Sequence[float], expected_batch_size: float
    ) -> float:
        """z at σ = 1. Every certificate is linear in σ, so this converts between the two."""
        return self.plan(blocks, clip_norm, 1.0, expected_batch_size).certificate().noise_multiplier


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
    | adaptive, adaptive_per_layer | in the beginning those of flat, per_layer | as there | σ/√(1 + r⁻²) |

    r is the count_noise of a `Quantile`.
    """
    choose("clipping", clipping, get_args(Clipping))
    norms = [positive_norm(c) for c in (clip_norm if isinstance(clip_norm, Sequence) else [clip_norm])]
    if not (sigma >= 0 and math.isfinite(sigma)):
        raise GredpError(f"the noise scale must be 0 or more and finite, not {sigma}")
    if clipping in ("flat", "automatic", "adaptive"):
        if len(norms) != 1:
            raise GredpError(f"{clipping} clipping takes one norm, not {len(norms)}")
        return (ClipGroup("all", tuple(b.name for b in blocks), norms[0], sigma * norms[0]),)
    members = _layers(blocks, len(norms))
    total = math.hypot(*norms)
    if len(norms) == 1:
        norms *= len(members)
        if clipping != "layer_wise":
            norms = [c / math.sqrt(len(members)) for c in norms]
    return tuple(
        ClipGroup(name, names, c, sigma * (c if clipping == "layer_wise" else total))
        for (name, names), c in zip(members.items(), norms)
    )


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
