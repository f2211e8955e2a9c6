"""Entries of a ledger → ε at a δ. Both accountants are upper bounds, in floating point too.

Formal guarantee. If every charged step is a Poisson-subsampled Gaussian mechanism at the entry's
rate and multiplier, their adaptive composition is (ε, δ)-DP for adding or removing one record. Steps with
correlated noise count as the mechanisms that one record can take part in (docs/theory.md, section 6).

| case | ε |
|---|---|
| nothing charged | 0 |
| a multiplier of 0 | ∞ |
| a private choice among it | Rényi orders, by `selection.composed_epsilon` |
| every rate 1 | the closed form of the Gaussian mechanism ("pld") |
| otherwise | Rényi orders ("rdp"); the smaller of these and privacy-loss distributions ("pld") |

Error bound. Whatever rounding may have taken from a result is added to it. `renyi_divergences` states the
allowance of Rényi orders; `loss_distribution` derives that of loss distributions, and counts it against δ: ε
is the least with δ(ε) + allowance ≤ δ. For up to 10⁶ steps and δ ≥ 1e-9 that moves ε by less than 1e-4 of
itself; below, by more where rare large losses prevail (a rate of 1e-4 at z = 1).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from gredp.errors import GredpError, choose
from gredp.privacy.certificate import Certificate, Release
from gredp.privacy.ledger import Entry, Ledger, mechanisms

#: (multiplier, rate, steps)
Spent = tuple[tuple[float, float, int], ...]

#: sensitivity in noise deviations beyond which ε is bounded by μ²/2 + μ√(2 ln 1/δ) alone
LARGEST_MU = 1e5
#: above it the widest rounding of losses overflows, and Rényi divergences are as good
LARGEST_PLD = 1e6
#: δ times records from which a run is warned
LARGE_DELTA = 0.1
#: of a curve: the least of these bounds counts
TILTS = (0.05, 1.0, 8.0)
ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 72, 96, 128, 192, 256, 384, 512, 1024)


@dataclass(frozen=True)
class Accounting:
    """One way to compose: never below what was spent. Multipliers that it gets are above 0 and finite."""

    label: str
    epsilon: Callable[[Spent, float], float]
    deltas: Callable[[Spent, list[float]], list[float]]
    #: the name of one that is quicker and never below, mostly by 6 to 8 %: a search begins there
    rough: str | None = None


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise GredpError(f"delta must lie strictly between 0 and 1, not {delta}")


def reject_large_delta(delta: float, records: float, allow_large: bool = False) -> None:
    """Reject a δ of 1/records or more, unless `allow_large` says that it is meant.

    At δ = 1/records publishing a record at random has ε = 0, so such an ε says nothing. `records` are as
    many as are public: where their number is confidential, the batch over the stated rate.
    """
    check_delta(delta)
    if delta * records >= 1 and not allow_large:
        raise GredpError(
            f"δ × {records:,.0f} records is {delta_times(delta, records)}, or say with allow_large_delta "
            "(--allow-large-delta) that you mean it: publishing a record at random would pass for private"
        )


def check_delta_for(delta: float, records: float, allow_large: bool = False) -> None:
    """As above, with a warning from δ = 1/(10 records) on."""
    reject_large_delta(delta, records, allow_large)
    if delta * records > LARGE_DELTA:
        warnings.warn(f"δ × {records:,.0f} records is {delta_times(delta, records)}", stacklevel=3)


def delta_times(delta: float, records: float) -> str:
    """δ times records for print: so many are exposed whole in the worst case that δ allows, on average."""
    product = f"{delta * records:.2g}"
    if delta * records <= LARGE_DELTA:
        return product
    return f"{product}, above {LARGE_DELTA:g}: take δ below {LARGE_DELTA / records:.1g}"


def spent_by(entries: Iterable[Entry]) -> Spent:
    """What costs something, alike mechanisms added up, those with the least noise first."""
    steps: dict[tuple[float, float], int] = {}
    for e in mechanisms(entries):
        if e.choice:
            raise GredpError(
                "a private choice is no composition of its steps: its ε comes from `epsilon` alone"
            )
        if e.steps and not math.isinf(e.noise_multiplier):
            kind = (min(e.noise_multiplier, 1e100), e.sample_rate)  # less noise than there was: safe
            steps[kind] = steps.get(kind, 0) + e.steps
    return tuple((*kind, n) for kind, n in sorted(steps.items()))


def epsilon(entries: Iterable[Entry], delta: float, accountant: str = "pld") -> float:
    """The proven ε of `entries` at `delta`; never below what was spent.

    >>> entries = [Entry(noise_multiplier=1.0, sample_rate=0.01, steps=1000)]
    >>> round(epsilon(entries, 1e-5), 3), round(epsilon(entries, 1e-5, "rdp"), 3)
    (1.828, 2.101)
    """
    check_delta(delta)
    choose("accountant", accountant, ACCOUNTANTS)
    entries = tuple(entries)
    if any(entry.choice for entry in entries):
        from gredp.privacy.selection import composed_epsilon

        return composed_epsilon(entries, delta)
    spent = spent_by(entries)
    if not spent:
        return 0.0
    return _epsilon(spent, delta, accountant) if spent[0][0] > 0 else math.inf


def deltas(entries: Iterable[Entry], epsilons: list[float], accountant: str = "pld") -> list[float]:
    """The proven δ of `entries` at each ε; every multiplier must be above 0."""
    choose("accountant", accountant, ACCOUNTANTS)
    spent = spent_by(entries)
    if not spent:
        return [0.0] * len(epsilons)
    if spent[0][0] == 0:
        raise GredpError("a curve δ(ε) needs noise multipliers above 0")
    return ACCOUNTANTS[accountant].deltas(spent, epsilons)


@lru_cache(maxsize=4096)
def _epsilon(spent: Spent, delta: float, accountant: str) -> float:
    mu = _sensitivity(spent)
    if mu > LARGEST_MU:
        # Sampling only helps, and so does the exact profile; neither has digits to show this far out.
        return mu * (mu / 2 + math.sqrt(2 * -math.log(delta))) if mu < 1e150 else math.inf
    return ACCOUNTANTS[accountant].epsilon(spent, delta)


def _sensitivity(spent: Spent) -> float:
    """In noise deviations, if every rate were 1."""
    return math.hypot(*(math.sqrt(n) / z for z, _, n in spent))


def _least_epsilon(spent: Spent, delta: float) -> float:
    if all(q == 1 for _, q, _ in spent):
        return _gaussian_epsilon(_sensitivity(spent), delta)
    rdp = _rdp_epsilon(spent, delta)
    # Both are upper bounds on the same quantity, so the smaller one is proven as well. It also
    # catches a loss distribution whose truncated tails alone exceed a very small δ.
    if rdp == 0 or rdp > LARGEST_PLD:
        return rdp
    return min(rdp, _pld_epsilon(spent, delta, rdp))


def _least_deltas(spent: Spent, epsilons: list[float]) -> list[float]:
    if all(q == 1 for _, q, _ in spent):
        return [_gaussian_delta(_sensitivity(spent), eps) for eps in epsilons]
    from gredp.privacy.loss_distribution import Tilted, both_ways

    tilted = [[Tilted(parts, t) for t in TILTS] for parts in both_ways(spent, 1e-3, -100.0)]
    return [max(min(t.delta(eps) for t in one) for one in tilted) for eps in epsilons]


def _gaussian_delta(mu: float, eps: float) -> float:
    """The profile of a Gaussian mechanism with sensitivity μ, and the rounding of its two terms on top."""
    from scipy.stats import norm

    first = float(norm.cdf(mu / 2 - eps / mu))
    return first * (1 + 1e-14 * (1 + eps)) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of a Gaussian mechanism with sensitivity μ, from its exact profile, ended on the private side."""
    from scipy.optimize import brentq

    def excess(eps: float) -> float:
        return _gaussian_delta(mu, eps) - delta

    if excess(0.0) <= 0:
        return 0.0
    upper = mu * mu / 2 + mu * math.sqrt(2 * -math.log(delta)) + 1
    root = float(brentq(excess, 0.0, upper, xtol=1e-12, rtol=1e-14))
    return root + 1e-9 * (1 + root)


def _rdp_epsilon(spent: Spent, delta: float) -> float:
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    return float(compute_epsilon(ORDERS, renyi_divergences(spent), delta)[0])


def _rdp_deltas(spent: Spent, epsilons: list[float]) -> list[float]:
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    divergences = renyi_divergences(spent)
    return [float(compute_delta(ORDERS, divergences, eps)[0]) for eps in epsilons]


def renyi_divergences(spent: Spent) -> list[float]:
    """The Rényi divergence of all steps at each order, never below the exact one.

    dp-accounting takes the logarithm of a sum that is 1 but for what was spent: divergences near 1e-16 come
    out as rounding, and negative ones it counts as ε = 0. Hence the allowance for each sampled step: terms
    are exponentials of up to 2·10⁴ (log-binomials of 1,024, powers of a rate of 1e-6), off by 8 units in the
    last place, and the series is ended at e^−30 of its sum.
    """
    of_steps = [(n, _of_one_step(z, q, ORDERS)) for z, q, n in spent]
    allowance = 2e-11 * sum(n for _, q, n in spent if q < 1)
    return [
        max(0.0, sum(n * divergences[i] for n, divergences in of_steps)) + allowance / (order - 1)
        for i, order in enumerate(ORDERS)
    ]


@lru_cache(maxsize=4096)
def _of_one_step(z: float, q: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Divergences add up, and one pair takes a third of a second: a run asks for the same in every epoch."""
    from dp_accounting import dp_event, rdp

    accountant = rdp.RdpAccountant(orders)
    with quiet():
        accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)))
    return tuple(float(r) for r in accountant.rdp)


def _pld_epsilon(spent: Spent, delta: float, scale: float) -> float:
    from gredp.privacy.loss_distribution import both_ways, least_epsilon

    # The rounding of losses is pessimistic at any width, so the width is a matter of cost alone:
    # relative to ε (in powers of two, so that neighboring calls share it) it keeps the work bounded
    # for a huge ε and the bound tight for a tiny one.
    width = 2.0 ** math.floor(math.log2(max(scale * 1e-4, 1e-7)))
    log_tail = math.log(delta) - math.log(sum(n for _, _, n in spent)) - 20
    try:
        return max(least_epsilon(parts, delta, scale) for parts in both_ways(spent, width, log_tail))
    except ValueError:  # of dp-accounting, next to a rate of 1
        return math.inf


@contextmanager
def quiet() -> Iterator[None]:
    """Rényi orders that do not converge are left out, which is safe; the log line is of no use here."""
    from absl import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)


#: by name; a new one is one more entry
ACCOUNTANTS = {
    "pld": Accounting("privacy-loss distributions", _least_epsilon, _least_deltas, rough="rdp"),
    "rdp": Accounting("Rényi differential privacy", _rdp_epsilon, _rdp_deltas),
}
if TYPE_CHECKING:
    AccountantName = str
else:  # for the command line, which lists them
    AccountantName = Literal[*ACCOUNTANTS]


class Accountant:
    """The view of a ledger that an Opacus user knows: `accountant.get_epsilon(delta=1e-5)`."""

    def __init__(self, ledger: Ledger, name: str = "pld") -> None:
        if name == "gdp":
            raise GredpError(
                "accountant 'gdp' is not offered: its ε is a limit that may lie below the true one"
            )
        choose("accountant", name, ACCOUNTANTS)
        self.ledger = ledger
        self.name: str = name

    def get_epsilon(
        self, delta: float, alphas: object = None, eps_error: object = None, delta_error: object = None
    ) -> float:
        """The proven ε spent so far. Opacus' orders and errors are accepted: none is a setting here."""
        return epsilon(self.ledger.entries, delta, self.name)

    def get_privacy_spent(self, *, delta: float, alphas: object = None) -> tuple[float, float]:
        """ε, and not a number where Opacus has the best of its `alphas`: orders are no setting here."""
        return self.get_epsilon(delta), math.nan

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sampling rate, steps) of all that was charged, as Opacus has it.

        Replayed as independent steps it costs at least as much. Of a private choice it would cost less.
        """
        if any(entry.choice for entry in self.ledger.entries):
            raise GredpError("a private choice has no history of steps: its ε comes from get_epsilon alone")
        return [(e.noise_multiplier, e.sample_rate, e.steps) for e in self.ledger.entries]

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charge a step that was made elsewhere; those of our optimizer are charged by themselves."""
        self.ledger.charge(Certificate((Release("a step elsewhere", 1.0, noise_multiplier),)), sample_rate)

    def state_dict(self) -> dict[str, object]:
        return {"history": self.history, "mechanism": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Charge all of a `state_dict` to a ledger that is still empty."""
        if self.ledger.steps:
            raise GredpError("the accountant has charged steps of its own: load into a new engine")
        for multiplier, rate, steps in state["history"]:
            for _ in range(steps):
                self.step(noise_multiplier=multiplier, sample_rate=rate)

    def __len__(self) -> int:
        return self.ledger.steps

    def mechanism(self) -> str:
        return self.name


def round_up(value: float, digits: int = 4) -> float:
    """For print: an ε is never shown smaller than it is."""
    if not math.isfinite(value) or (abs(value) >= 1e15 and digits >= 0):  # there are no such digits
        return value
    return float(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_CEILING))


def in_trials(trials: float) -> str:
    """The same for a part of a private choice."""
    return f", the best of {trials:g} trials on average" if trials else ""


def in_turns(bands: int, shuffled: bool = False) -> str:
    """What to print behind a sampling rate."""
    if shuffled:
        return f" of {bands} shuffled batches in turn"
    return f" of {bands} parts in turn, noise correlated over as many steps" if bands > 1 else ""
