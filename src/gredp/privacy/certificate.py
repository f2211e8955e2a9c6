"""What a step releases, stated as a clip set K and a covariance Σ; the noise multiplier follows.

Formal guarantee. A step releases `Σ_i v_i + n` with every `v_i` in K and `n ~ N(0, Σ)`, all real.
Under adding or removing one record this is exactly the Gaussian mechanism with multiplier

    z = 1 / sup { ‖Σ^(-1/2) v‖ : v ∈ K }

and nothing done afterwards (inverse transform, real part, crop, optimizer) can lower it.
"""

import math
from dataclasses import dataclass
from itertools import product

from gredp.errors import GredpError


@dataclass(frozen=True)
class Block:
    """The geometry of one parameter: what a mechanism has to know of it, without its values.

    `grid` are the sizes of the Fourier grid its trailing axes are transformed on, `released` the
    indices of that grid, per axis, that come back as parameters (all of them unless a kernel is
    cropped out of a padded grid).
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    released: tuple[tuple[int, ...], ...]

    @classmethod
    def whole(cls, name: str, layer: str, shape: tuple[int, ...], grid_axes: int) -> "Block":
        """A block whose own trailing axes are the grid, all of it released."""
        grid = tuple(shape[len(shape) - grid_axes :])
        return cls(name, layer, tuple(shape), grid, tuple(tuple(range(n)) for n in grid))


def real_part_variances(block: Block, a: float, b: float) -> tuple[float, ...]:
    """Distinct eigenvalues of the noise left on `block` by unit complex noise with parts a, b.

    Noise `a·x + i·b·y` on every coefficient leaves, after the inverse transform and the real part,
    variance a² on even directions (e_j + e_−j) and b² on odd ones. An index whose mirror image is
    not released carries (a² + b²)/2, independently of all others.
    """
    released = [set(axis) for axis in block.released]
    found: set[float] = set()
    for index in product(*block.released):
        mirror = tuple(-j % n for j, n in zip(index, block.grid))
        if mirror == index:
            found.add(a * a)
        elif all(j in axis for j, axis in zip(mirror, released)):
            found.update((a * a, b * b))
        else:
            found.add((a * a + b * b) / 2)
        if len(found) == 3:
            break
    return tuple(sorted(found))


@dataclass(frozen=True)
class Release:
    """One ball of K and the noise over it: `‖v‖ ≤ clip_norm`, and Σ ≥ noise_std² on its span.

    `noise_std` is the root of Σ's smallest eigenvalue there, which the ball touches, so that the
    bound is attained.
    """

    name: str
    clip_norm: float
    noise_std: float

    def __post_init__(self) -> None:
        if math.isnan(self.clip_norm) or self.clip_norm <= 0:
            raise GredpError(f"{self.name}: the clipping norm must be above 0, not {self.clip_norm}")
        if math.isnan(self.noise_std) or self.noise_std < 0:
            raise GredpError(f"{self.name}: the noise must not be negative, but is {self.noise_std}")

    @property
    def sensitivity(self) -> float:
        """μ of this release alone: how many noise deviations one record can move it."""
        return self.clip_norm / self.noise_std if self.noise_std > 0 else math.inf


@dataclass(frozen=True)
class Certificate:
    """K is the product of the releases' balls, Σ is block-diagonal over them.

    | case | multiplier |
    |---|---|
    | one ball of radius C, noise σC | σ |
    | L balls of radius c, noise σc each | σ/√L |
    | L balls of radius C/√L, noise σC each | σ |
    | any direction released without noise | 0 |
    | no release at all | ∞ |

    >>> Certificate((Release("all", clip_norm=2.0, noise_std=3.0),)).noise_multiplier
    1.5
    """

    releases: tuple[Release, ...]

    @property
    def noise_multiplier(self) -> float:
        """The z that the accountant is given."""
        mu = math.hypot(*(release.sensitivity for release in self.releases))
        return math.inf if mu == 0 else 1 / mu  # NaN stays NaN, and no ledger takes it
