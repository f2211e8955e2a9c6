"""How many steps to correlate noise over, from the accountant alone: before training, from no data.

More bands take back more of the noise that earlier steps have added. But they split the records into as many
parts, each drawn from at a higher rate, which amplifies less and needs a larger multiplier.
"""

import math

from gredp.errors import GredpError
from gredp.mechanisms.banded import coefficients
from gredp.privacy.calibrate import calibrate
from gredp.privacy.ledger import Entry

#: the most bands that are tried: noise of as many steps is kept in memory
MOST = 64


def iterate_error(bands: int, steps: int, momentum: float = 0.0) -> float:
    """Root-mean-square noise on a coordinate of the iterates of SGD with momentum, for ξ of deviation 1.

    Iterates are the prefix sums of the momentum's sums of noise n = C⁻¹ξ, all of them Toeplitz, so that one
    impulse response tells all: √(Σ_k (T − k) e_k² / T). Learning rate 1; no curvature, which would forget.
    """
    from scipy.signal import lfilter

    response = [1.0] + [0.0] * (steps - 1)
    for divisor in (coefficients(bands), (1.0, -1.0), (1.0, -momentum)):
        response = lfilter([1.0], divisor, response)
    return math.sqrt(sum((steps - k) * e * e for k, e in enumerate(response)) / steps)


def choose_bands(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    momentum: float = 0.0,
    spent: tuple[Entry, ...] = (),
) -> int:
    """The power of two with the least z(b)·`iterate_error`, z(b) being the multiplier that meets the target.

    Calibrated by Rényi orders, which are quick: the choice is between errors that differ by percents.
    """
    if not 0 <= momentum < 1:
        raise GredpError(f"bands are chosen for a momentum in [0, 1), not {momentum}")

    def error(bands: int) -> float:
        rate, rounds = bands * sample_rate, -(-steps // bands)
        z = calibrate(target_epsilon, delta, rate, rounds, "rdp", spent)
        return z * iterate_error(bands, steps, momentum)

    most = min(MOST, steps, int(1 / sample_rate))
    return min((2**n for n in range(most.bit_length())), key=error)
