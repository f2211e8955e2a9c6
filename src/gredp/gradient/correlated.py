"""Noise that remembers: what was added in earlier steps is taken back in part in later ones."""

from torch import Tensor

from gredp.errors import GredpError
from gredp.gradient.noise import NoiseSource


class CorrelatedSource:
    """n_t = (ξ_t − Σ_{j≥1} c_j n_{t−j})/c_0 for each block, with ξ from another source: n = C⁻¹ξ.

    Formal guarantee. C has the band `coefficients` below its diagonal, so ξ_t is covered by b rows and no
    column is longer than theirs. Steps are known by their number: one that was charged but drew no noise is a
    row and a column that are left out, which makes columns shorter, never longer.

    Anyone who knows n and the releases knows the sums. So the last b − 1 draws are kept in memory only: a run
    that resumes in another process begins a new sequence, which cuts columns of C off.
    """

    def __init__(self, source: NoiseSource, coefficients: tuple[float, ...]) -> None:
        self.source, self.coefficients = source, coefficients
        self._step = 0
        self._drawn: dict[int, list[Tensor]] = {}  # step → noise of its blocks, in the order of the plan

    def begin(self, step: int) -> None:
        if step <= self._step:
            raise GredpError(f"noise of step {step} was drawn already: a step is noised once")
        self.source.begin(step)
        self._step = step
        reach = step - len(self.coefficients)
        self._drawn = {t: blocks for t, blocks in self._drawn.items() if t > reach} | {step: []}

    def normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        noise = self.source.normal(shape, like)
        block = len(self._drawn[self._step])
        for lag, c in enumerate(self.coefficients[1:], 1):
            before = self._drawn.get(self._step - lag, [])
            if block < len(before):
                noise.sub_(before[block], alpha=c)
        noise.div_(self.coefficients[0])
        self._drawn[self._step].append(noise.clone())  # a copy: the caller scales what it is given in place
        return noise
