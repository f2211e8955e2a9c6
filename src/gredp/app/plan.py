"""`gredp plan`: settings and their price before any record is touched. No torch until a step is measured.

The relative noise of a run is r = z/(batch·√steps): the deviation of the noise in the mean of all updates, in
clipping norms. A knee is the point of a curve, both axes logarithmic, that lies farthest below the straight
line between its ends, if that is at least 5 %: up to there a factor in ε or epochs lowers r by more than
behind it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from gredp.app.defaults import for_images, for_table, scaled_size
from gredp.app.settings import FOR_FEATURES, FOR_SOME_FEATURES, Flag, TrainSettings
from gredp.budget import Sampling, noise_multiplier, query_multiplier
from gredp.errors import GredpError, choose
from gredp.privacy.accountant import AccountantName, check_delta_for, delta_times, epsilon
from gredp.privacy.ledger import Entry

#: other ε that the table lists, relative to the requested one
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
#: the ε that a curve covers, at least: a knee must not follow the ε that was asked for
RANGE = (0.125, 32.0)
#: how many times the recommended epochs a curve covers
LONGEST = 8
#: points of a curve, and multipliers that it is interpolated between
POINTS, KNOTS = 25, 12
#: least distance from the chord, as a factor, that makes a knee
KNEE = 1.05
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class PlanSettings:
    """What training would take and cost: batch size, epochs, noise, time. Touches no data.

    Prints the settings that `gredp train` chooses for data of this shape, and what they would cost at other
    ε. Relative noise is z/(batch·√steps): how much noise is left in the average of all updates, where 1 is
    as much as the largest gradient of one record. The knee of a curve is where more ε, or more epochs, begin
    to buy less: the point farthest below the straight line between its ends, both axes logarithmic.
    """

    records: int
    """how many records there will be to train on"""
    epsilon: float = 2.0
    delta: float = 1e-5
    input: str = "3x32x32"
    """one record: channels x height x width of an image, or the number of columns of a table as encoded"""
    classes: int = 10
    model: str | None = None
    """network, if not the one that is chosen for such data"""
    batch_size: int | None = None
    epochs: int | None = None
    accountant: AccountantName = "pld"
    """of the recommended settings; other ε (to 3 percent) and curves (to 7 at their ends) follow rdp"""
    allow_large_delta: Flag = False
    """allow a --delta of 1/records or more, at which ε means little"""
    no_measure: Flag = False
    """do not measure a step on this machine, which takes some seconds: there is no time then"""
    out: str | None = None
    """picture: plan.svg, or a page of its own, plan.html"""
    json: Flag = False
    """print one JSON object instead of tables"""


@dataclass(frozen=True)
class Plan:
    """The recommended settings for `records` of `shape`, and what follows from them."""

    records: int
    shape: tuple[int, ...]
    classes: int
    settings: TrainSettings

    @property
    def sampling(self) -> Sampling:
        return self.over(self.settings.epochs)

    def over(self, epochs: int) -> Sampling:
        return Sampling.of_epochs(self.records, self.settings.batch_size, epochs)

    @cached_property
    def spent(self) -> tuple[Entry, ...]:
        """By the query on the features before training."""
        chosen = self.settings
        if not chosen.normalize:
            return ()
        z = query_multiplier(chosen.epsilon, chosen.delta, chosen.normalize, chosen.accountant)
        return (Entry(z, 1.0, 1),)

    @cached_property
    def multiplier(self) -> float:
        """The z that training will take."""
        chosen = self.settings
        target = chosen.epsilon, chosen.delta, self.sampling
        return noise_multiplier(*target, accountant=chosen.accountant, spent=self.spent)

    def relative(self, z: float, steps: int | None = None) -> float:
        """z/(batch·√steps)."""
        return z / (self.settings.batch_size * math.sqrt(steps or self.sampling.steps))

    @cached_property
    def _grid(self) -> list[float]:
        """Multipliers at which the accountant of the curves is asked; between them they are nearly straight.

        z falls a little more slowly than 1/ε, and less at a large ε.
        """
        least, most = self._epsilons()[0], self._epsilons()[-1]
        chosen = self.settings.epsilon
        return _between(
            self.multiplier * (chosen / most) / 2, self.multiplier * (chosen / least) * 1.3, KNOTS
        )

    def _epsilons(self) -> list[float]:
        chosen = self.settings.epsilon
        return _between(min(RANGE[0], chosen / 2), max(RANGE[1], 2 * chosen), POINTS)

    def _by_rdp(self, target: float, steps: int) -> float | None:
        """z for a target ε, interpolated on logarithms; None beyond the grid."""
        rate, delta = self.sampling.rate, self.settings.delta
        points = [(math.log(z), epsilon([Entry(z, rate, steps)], delta, "rdp")) for z in self._grid]
        for (x, high), (right, low) in pairwise(points):
            if low <= target <= high < math.inf:
                share = math.log(high / target) / math.log(high / low)
                return math.exp(x + share * (right - x))
        return None

    @cached_property
    def _scale(self) -> float:
        """From the curves to the recommended z: rdp takes 6 to 8 % more noise than pld."""
        near = self._by_rdp(self.settings.epsilon, self.sampling.steps)
        return 1.0 if near is None else self.multiplier / near

    def at(self, target: float, epochs: int | None = None) -> tuple[float, float] | None:
        """About (z, relative noise) at another ε, or over other epochs."""
        steps = self.over(epochs or self.settings.epochs).steps
        z = self._by_rdp(target, steps)
        return None if z is None else (self._scale * z, self.relative(self._scale * z, steps))

    def over_epsilon(self) -> Curve:
        """(ε, relative noise)."""
        return [(target, found[1]) for target in self._epsilons() if (found := self.at(target)) is not None]

    def over_epochs(self) -> Curve:
        """(epochs, relative noise)."""
        target = self.settings.epsilon
        grid = sorted({round(n) for n in _between(1.0, LONGEST * self.settings.epochs, POINTS)})
        return [(n, found[1]) for n in grid if (found := self.at(target, n)) is not None]


def _between(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from `low` to `high`, each by the same factor above the one before."""
    return [low * (high / low) ** (k / (count - 1)) for k in range(count)]


def knee(curve: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The point farthest below the chord, on logarithms; None if none is 5 % below it."""
    if len(curve) < 3:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in curve]
    (left, first), (right, last) = logs[0], logs[-1]
    below = [first + (last - first) * (x - left) / (right - left) - y for x, y in logs]
    place = max(range(len(curve)), key=below.__getitem__)
    return curve[place] if below[place] >= math.log(KNEE) else None


def recommend(asked: PlanSettings) -> Plan:
    """By the rules of `gredp train` for own data (`app/defaults.py`), where no option says otherwise."""
    for name in ("records", "classes", "batch_size", "epochs"):
        value = getattr(asked, name)
        least = 2 if name == "classes" else 1
        if value is not None and value < least:
            raise GredpError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    check_delta_for(asked.delta, asked.records, asked.allow_large_delta)
    if asked.model is not None:
        from gredp.app.models import MODELS

        choose("model", asked.model, MODELS)
    shape, chosen = _shape(asked.input), dict[str, Any]()
    if len(shape) == 1:
        chosen = {"model": "mlp", "block": 0} | for_table(asked.records)
    elif asked.model in (None, *FOR_FEATURES, *FOR_SOME_FEATURES):
        shape = (shape[0], *[scaled_size(shape[1:])] * 2)
        chosen = for_images(asked.records, (shape[0], shape[1], shape[2]), asked.epsilon, asked.model)
    named = {name: getattr(asked, name) for name in ("model", "batch_size", "epochs")}
    chosen |= {name: value for name, value in named.items() if value is not None}
    shared = {name: getattr(asked, name) for name in ("epsilon", "delta", "accountant", "allow_large_delta")}
    settings = replace(TrainSettings(), **chosen, **shared)
    settings.check()
    return Plan(asked.records, shape, asked.classes, settings)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().replace("×", "x").split("x"))
    except ValueError:
        shape = ()
    if len(shape) not in (1, 3) or min(shape) < 1:
        raise GredpError(f"--input must be like 3x32x32, or a number of columns, not {text!r}")
    return shape


def run_plan(asked: PlanSettings) -> None:
    from gredp.app.console import show

    if asked.out is not None and Path(asked.out).suffix not in (".svg", ".html"):
        raise GredpError(f"--out must end in .svg or .html, not {asked.out!r}")
    plan = recommend(asked)
    found = facts(plan)
    if not asked.no_measure:
        from gredp.app.measured_step import measure

        found["time"] = measure(plan)
    if asked.out is not None:
        from gredp.app.plan_figure import write_plan

        found["out"] = str(write_plan(plan, found, Path(asked.out)))
    show(asked.json, found, f"plan for {asked.records:,} records at ε = {asked.epsilon:g}", rows(found))
    if not asked.json:
        show(False, {}, "at other ε, about", other_rows(found), ("ε", "z", "relative noise"))


def facts(plan: Plan) -> dict[str, Any]:
    """All that is printed, drawn and given as JSON."""
    chosen, sampling = plan.settings, plan.sampling
    curves = {"epsilon": plan.over_epsilon(), "epochs": plan.over_epochs()}
    others = [(f * chosen.epsilon, plan.at(f * chosen.epsilon)) for f in FACTORS]
    recommended = chosen.epsilon, (plan.multiplier, plan.relative(plan.multiplier))
    return {
        "records": plan.records,
        "input": list(plan.shape),
        "classes": plan.classes,
        "epsilon": chosen.epsilon,
        "delta": chosen.delta,
        "delta_times_records": chosen.delta * plan.records,
        "accountant": chosen.accountant,
        "model": chosen.model,
        "features": chosen.features,
        "normalize": chosen.normalize,
        "batch_size": chosen.batch_size,
        "sample_rate": sampling.rate,
        "epochs": chosen.epochs,
        "steps": sampling.steps,
        "noise_multiplier": plan.multiplier,
        "relative_noise": plan.relative(plan.multiplier),
        "other_epsilons": [
            {"epsilon": eps, "noise_multiplier": z, "relative_noise": r}
            for eps, (z, r) in (
                recommended if eps == chosen.epsilon else (eps, at) for eps, at in others if at
            )
        ],
        "curves": curves,
        "knees": {name: knee(curve) for name, curve in curves.items()},
        "time": None,
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Of the table; a page shows the same."""
    size, time = "×".join(map(str, found["input"])), found["time"]
    shape = f"{size} pixels" if len(found["input"]) == 3 else f"{size} columns"
    features = f" on {found['features']} features" if found["features"] != "none" else ""
    set_aside = f", after {100 * found['normalize']:g} % of the budget for the features" * bool(
        found["normalize"]
    )
    knees = {name: _knee(found, name) for name in ("epsilon", "epochs")}
    measured = "not measured"
    if time is not None:
        parts = f"{duration(time['step'])} a step, {duration(time['features'])} for the features"
        measured = f"about {duration(time['total'])} on this machine: {parts}"
    return [
        ("network", f"{found['model']}{features}, of {shape}; {found['classes']} classes"),
        (
            "batch size",
            f"{found['batch_size']:,} on average: {100 * found['sample_rate']:.3g} % of the records",
        ),
        ("epochs", f"{found['epochs']}: {found['steps']:,} steps"),
        ("noise multiplier z", f"{found['noise_multiplier']:.4f} by {found['accountant']}{set_aside}"),
        ("relative noise", f"{found['relative_noise']:.3g}: z/(batch·√steps)"),
        ("δ × records", delta_times(found["delta"], found["records"])),
        ("δ", f"{found['delta']:g}; 1/records is {1 / found['records']:.2g}"),
        ("time", measured),
        ("knee over ε", knees["epsilon"]),
        ("knee over epochs", knees["epochs"]),
        *([("picture", found["out"])] if "out" in found else []),
    ]


def _knee(found: dict[str, Any], name: str) -> str:
    curve, at = found["curves"][name], found["knees"][name]
    if at is not None:
        unit = f"ε = {at[0]:.2g}" if name == "epsilon" else f"{at[0]:g} epochs"
        return f"{unit}: relative noise {at[1]:.3g}; beyond it, more buys less"
    ends = f"{curve[0][0]:.3g} to {curve[-1][0]:.3g}" if curve else "here"
    flat = curve and max(y for _, y in curve) < 1.1 * min(y for _, y in curve)
    return f"none from {ends}: " + ("the noise is the same" if flat else "every factor buys about as much")


def other_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (f"{row['epsilon']:g}", f"{row['noise_multiplier']:.3g}", f"{row['relative_noise']:.3g}")
        for row in found["other_epsilons"]
    ]


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
