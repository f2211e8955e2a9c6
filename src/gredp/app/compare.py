"""`gredp compare`: several methods on one dataset, model and ε, and which differences are more than chance.

Each method is trained `seeds` times, with another initialization, other batches and other noise. Intervals
are those of Student's t for the mean over such runs; differences are Welch's, their p-values corrected by
Holm for the number of pairs. All runs see the same test set: what another one would say is not covered.

The proven ε of a run holds for that run alone. A mean over several is a release of all of them, and so is the
comparison of all runs: the report adds what they compose to, computed from their ledgers.
"""

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gredp.app.jobs import command, read_record, run_jobs
from gredp.app.ranges import option
from gredp.app.settings import OF_ONE_START, TrainSettings
from gredp.app.signals import Stopped
from gredp.errors import GredpError
from gredp.mechanisms import methods
from gredp.privacy.accountant import epsilon, round_up
from gredp.privacy.ledger import Ledger
from gredp.storage.record import accuracy, dumps, header, save, shown_accuracy, undate

if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[*methods()]
#: what `gredp compare` sets itself, or has no use for
OWN = (*OF_ONE_START, "method", "noise", "claim", "seed", "insecure_seed")
LEVEL = 0.05


@dataclass(frozen=True)
class CompareSettings(TrainSettings):
    """Train several methods alike and say which differences are more than chance; options as of train."""

    methods: tuple[Name, ...] = ("dpsgd", "gredp", "shaped")
    seeds: int = 5
    """runs of each method"""
    workers: int | None = None
    """processes at once; by default one for each core"""

    def check(self) -> None:
        if self.seeds < 2:
            raise GredpError(f"--seeds must be at least 2 to tell chance from difference, not {self.seeds}")
        if len(set(self.methods)) != len(self.methods) or not self.methods:
            raise GredpError("--methods names each method once")
        super().check()

    def shared(self, named: Collection[str]) -> dict[str, Any]:
        """Of the settings that the user has named those of every run; others are rejected."""
        for name in OWN:
            if name in named and name not in ("out", "json"):
                raise GredpError(
                    f"gredp compare takes no {option(name)}: it sets method, noise, claim and seed itself; "
                    "to resume a comparison, repeat its command"
                )
        of_training = {field.name for field in fields(TrainSettings)} - set(OWN)
        return {name: value for name, value in asdict(self).items() if name in of_training & set(named)}


@dataclass(frozen=True)
class ComparedRun:
    """One run of one method, with the settings that all runs share: a job."""

    method: str
    seed: int
    shared: dict[str, Any]
    epochs: int
    work: float = 1.0
    transferred: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}-seed{self.seed}"

    @property
    def facts(self) -> dict[str, str]:
        return {"compared": self.method}

    @property
    def arguments(self) -> list[str]:
        chosen = methods()[self.method]
        own = {"method": chosen.method, "noise": chosen.noise, "claim": "proven", "seed": self.seed}
        words = []
        for name, value in (own | self.shared).items():
            several = value if isinstance(value, tuple) else (value,)
            words += (
                [option(name)] if value is True else [option(name), *map(str, several)]
            )  # a flag: no value
        return words


def run_compare(settings: CompareSettings, named: Collection[str]) -> None:
    """`named` are the settings on the command line: the runs take the others from their recipe or table."""
    shared, head = settings.shared(named), header()
    settings.check()
    out = Path(settings.out or "comparison")
    trials = [
        ComparedRun(name, seed, shared, settings.epochs)
        for seed in range(settings.seeds)
        for name in settings.methods
    ]
    _reject_another(out, trials)
    try:
        run_jobs(trials, out, out / "runs", settings.workers or len(os.sched_getaffinity(0)), {})
    except Stopped as stop:
        done = sum(read_record(out, trial) is not None for trial in trials)
        kept = f"; {done} of {len(trials)} runs are done and kept in {out}, others have checkpoints"
        raise Stopped(stop.status - 128, f"{kept}; resume with: {head['command']}") from None
    result = summary({name: _records(out, trials, name) for name in settings.methods})
    save(out / "comparison.json", head | {"settings": shared} | result)
    draw(result, out / "comparison.svg")
    undate(out, head["created"])
    if settings.json:
        print(dumps(result | {"record": str(out / "comparison.json")}))
    else:
        _show(result, out)


def _reject_another(out: Path, trials: Sequence[ComparedRun]) -> None:
    """A folder holds one comparison: records of other settings would be mixed in."""
    for trial in trials:
        record, words = read_record(out, trial), shlex.split(command(trial))
        if record is not None and sorted(shlex.split(record["command"])) != sorted(words):
            raise GredpError(f"{out} holds a comparison with other settings: choose another --out")


def _records(out: Path, trials: Sequence[ComparedRun], method: str) -> list[dict[str, Any]]:
    found = [read_record(out, trial) for trial in trials if trial.method == method]
    return [record for record in found if record is not None]


def summary(records: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means with intervals, and each pair's difference with its interval, p-value and what follows."""
    from scipy import stats

    accuracies, methods = {}, {}
    for name, found in records.items():
        values = accuracies[name] = np.array([accuracy(record)[1] for record in found])
        half = stats.t.ppf(1 - LEVEL / 2, len(values) - 1) * stats.sem(values)
        methods[name] = {
            "accuracies": values.tolist(),
            "mean": float(values.mean()),
            "interval": [float(values.mean() - half), float(values.mean() + half)],
            "proven_epsilon": max(float(record["guarantee"]["proven_epsilon"]) for record in found),
            "composed_epsilon": composed(found),
        }
    pairs = [_difference(a, accuracies[a], b, accuracies[b]) for a, b in combinations(accuracies, 2)]
    least = 0.0
    for rank, pair in enumerate(sorted(pairs, key=lambda pair: pair["p"])):
        least = min(1.0, max(least, (len(pairs) - rank) * pair["p"]))
        pair |= {"corrected_p": least, "significant": least < LEVEL}
    every = [record for found in records.values() for record in found]
    return {
        "measure": accuracy(every[0])[0],
        "methods": methods,
        "differences": pairs,
        "level": LEVEL,
        "proven_epsilon_holds_for": "each run alone",
        "runs": len(every),
        "composed_epsilon": composed(every),
        "delta": every[0]["guarantee"]["delta"],
    }


def composed(records: Sequence[dict[str, Any]]) -> float | None:
    """The proven ε of all these runs together, on the same records; None where one has no ledger on file."""
    if not all("ledger" in record for record in records):
        return None
    spent = Ledger.from_json([row for record in records for row in record["ledger"]])
    first = records[0]["guarantee"]
    return epsilon(spent.entries, first["delta"], first["accountant"])


def _difference(name: str, a: np.ndarray, other: str, b: np.ndarray) -> dict[str, Any]:
    from scipy import stats

    difference = float(a.mean() - b.mean())
    interval, p = [difference, difference], float(difference == 0)
    if a.std() or b.std():  # otherwise nothing varied, and t has no scale
        test = stats.ttest_ind(a, b, equal_var=False)
        interval, p = [float(end) for end in test.confidence_interval(1 - LEVEL)], float(test.pvalue)
    return {"pair": [name, other], "difference": difference, "interval": interval, "p": p}


def _show(result: dict[str, Any], out: Path) -> None:
    from gredp.app.console import table

    def percent(value: float) -> str:
        return f"{100 * value:.2f}"

    rows = [
        (
            name,
            percent(found["mean"]),
            " to ".join(map(percent, found["interval"])),
            shown(found["proven_epsilon"]),
            shown(found["composed_epsilon"]),
        )
        for name, found in result["methods"].items()
    ]
    label = shown_accuracy(result["measure"], 0.0)[0]
    table(f"{label}, %", rows, ("method", "mean", "95 % interval", "proven ε, each run", "its runs together"))
    pairs = [
        (
            " − ".join(pair["pair"]),
            f"{100 * pair['difference']:+.2f}",
            " to ".join(map(percent, pair["interval"])),
            f"{pair['corrected_p']:.3f}",
            "significant" if pair["significant"] else "not significant",
        )
        for pair in result["differences"]
    ]
    if pairs:
        table("differences, points", pairs, ("pair", "difference", "95 % interval", "p (Holm)", "verdict"))
    print(f"{together(result)}.\nrecord: {out / 'comparison.json'}\nfigure: {out / 'comparison.svg'}")


def shown(value: float | None) -> str:
    return "not known" if value is None else "∞" if np.isinf(value) else f"{round_up(value, 3)}"


def together(result: dict[str, Any]) -> str:
    """What a comparison has cost: each run's ε says nothing of the others."""
    found = f"{shown(result['composed_epsilon'])} at δ = {result['delta']:g}"
    return f"ε holds for each run alone; all {result['runs']} on the same records: {found}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Every run as a dot, every mean with its interval."""
    from gredp.app.figure_file import figure_file

    with figure_file(path, figsize=(6, 1 + 0.5 * len(result["methods"]))) as axes:
        for place, (name, found) in enumerate(result["methods"].items()):
            dots = 100 * np.array(found["accuracies"])
            axes.plot(dots, [place] * len(dots), "o", color=methods()[name].color, alpha=0.4)
            low, high = found["interval"]
            error = [[100 * (found["mean"] - low)], [100 * (high - found["mean"])]]
            axes.errorbar(100 * found["mean"], place + 0.15, xerr=error, fmt="k|", capsize=3)
        axes.set_yticks(range(len(result["methods"])), list(result["methods"]))
        label = shown_accuracy(result["measure"], 0.0)[0]
        what = f"{label}, % (dots: runs; bars: 95 % interval of the mean)"
        axes.set(xlabel=f"{what}\n{together(result)}")
        axes.invert_yaxis()
