"""`gredp compare`: several methods on one data set, model and ε, and which differences are more than chance.

Each method is trained `seeds` times, with another initialization, other batches and other noise. Intervals
are those of Student's t for the mean over such runs; differences are Welch's, their p-values corrected by
Holm for the number of pairs. All runs see the same test set: what another one would say is not covered.

The proven ε of a run holds for that run alone. A mean over several is a release of all of them, and so is the
comparison of all runs: what they compose to, by the accountant from their ledgers, stands beside it.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gredp.app.jobs import JUDGED_BY, Bar, command, read_record, run_jobs
from gredp.app.settings import OF_ONE_START, TrainSettings
from gredp.errors import GredpError
from gredp.mechanisms import methods
from gredp.privacy.accountant import epsilon, round_up
from gredp.privacy.ledger import Ledger
from gredp.storage.record import dumps, header, save, undate

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
        if self.workers is not None and self.workers < 1:
            raise GredpError(f"--workers must be at least 1, not {self.workers}")
        super().check()

    def told(self, named: Collection[str]) -> dict[str, Any]:
        """Of what the user has named all that goes to every run; what no run would be told is refused."""
        for name in OWN:
            if name in named and name not in ("out", "json"):
                raise GredpError(
                    f"gredp compare takes no --{name.replace('_', '-')}: it sets method, noise, claim and "
                    "seed of each run itself, and the same command goes on where it was interrupted"
                )
        fitting = [f.name for f in fields(TrainSettings) if f.name in named and f.name not in OWN]
        return {name: getattr(self, name) for name in fitting}


@dataclass(frozen=True)
class Trial:
    """One run of one method; `told` is what the user has said for all."""

    method: str
    seed: int
    told: dict[str, Any]
    epochs: int

    @property
    def name(self) -> str:
        return f"{self.method}-seed{self.seed}"

    @property
    def arguments(self) -> list[str]:
        chosen = methods()[self.method]
        told = {"method": chosen.method, "noise": chosen.noise, "claim": "proven", "seed": self.seed}
        words = []
        for key, value in (told | self.told).items():
            option = f"--{key.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]  # a flag has no value
        return words

    @property
    def work(self) -> float:
        return 1.0

    @property
    def transferred(self) -> bool:
        return False

    @property
    def facts(self) -> dict[str, str]:
        return {"compared": self.method}


def run_compare(settings: CompareSettings, named: Collection[str]) -> None:
    """`named` are the settings that were said: the runs take the others from their recipe or table."""
    told, head = settings.told(named), header()
    settings.check()
    out = Path(settings.out or "comparison")
    trials = [
        Trial(name, seed, told, settings.epochs)
        for seed in range(settings.seeds)
        for name in settings.methods
    ]
    _refuse_another(out, trials)
    workers = settings.workers or len(os.sched_getaffinity(0))
    with Bar() as watch:
        run_jobs(trials, out, out / "runs", workers, {}, watch)
    result = summary({name: _records(out, trials, name) for name in settings.methods})
    save(out / "comparison.json", head | {"settings": told} | result)
    draw(result, out / "comparison.svg")
    undate(out, head["created"])
    if settings.json:
        print(dumps(result | {"record": str(out / "comparison.json")}))
    else:
        _show(result, out)


def _refuse_another(out: Path, trials: Sequence[Trial]) -> None:
    """A folder holds one comparison: records of other settings would be mixed in."""
    for trial in trials:
        record = read_record(out, trial)
        if record is not None and record["command"] != command(trial):
            raise GredpError(f"{out} holds a comparison with other settings: choose another --out")


def _records(out: Path, trials: Sequence[Trial], method: str) -> list[dict[str, Any]]:
    found = [read_record(out, trial) for trial in trials if trial.method == method]
    return [record for record in found if record is not None]


def summary(records: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means with intervals, and each pair's difference with its interval, p-value and what follows."""
    from scipy import stats

    accuracies = {
        name: np.array([record[key] for record in found for key in JUDGED_BY if key in record])
        for name, found in records.items()
    }
    methods = {}
    for name, values in accuracies.items():
        half = stats.t.ppf(1 - LEVEL / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
        found = records[name]
        methods[name] = {
            "accuracies": values.tolist(),
            "mean": float(values.mean()),
            "interval": [float(values.mean() - half), float(values.mean() + half)],
            "proven_epsilon": max(float(record["guarantee"]["proven_epsilon"]) for record in found),
            "composed_epsilon": composed(found),
        }
    pairs = [_difference(a, accuracies[a], b, accuracies[b]) for a, b in combinations(accuracies, 2)]
    for rank, pair in enumerate(sorted(pairs, key=lambda pair: pair["p"])):
        before = max((p["corrected_p"] for p in pairs if "corrected_p" in p), default=0.0)
        pair["corrected_p"] = min(1.0, max(before, (len(pairs) - rank) * pair["p"]))
    for pair in pairs:
        pair["significant"] = pair["corrected_p"] < LEVEL
    every = [record for found in records.values() for record in found]
    return {
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
    said = records[0]["guarantee"]
    return epsilon(spent.entries, said["delta"], said["accountant"])


def _difference(name: str, a: np.ndarray, other: str, b: np.ndarray) -> dict[str, Any]:
    from scipy import stats

    difference = float(a.mean() - b.mean())
    if a.std() == b.std() == 0:  # nothing varied: t has no scale
        return {"pair": [name, other], "difference": difference, "interval": [difference] * 2,
                "p": 1.0 if difference == 0 else 0.0}  # fmt: skip
    test = stats.ttest_ind(a, b, equal_var=False)
    interval = test.confidence_interval(1 - LEVEL)
    return {
        "pair": [name, other],
        "difference": difference,
        "interval": [float(interval.low), float(interval.high)],
        "p": float(test.pvalue),
    }


def _show(result: dict[str, Any], out: Path) -> None:
    from gredp.app.console import table

    def percent(low: float, high: float) -> str:
        return f"{100 * low:.2f} to {100 * high:.2f}"

    rows = [
        (
            name,
            f"{100 * found['mean']:.2f}",
            percent(*found["interval"]),
            shown(found["proven_epsilon"]),
            shown(found["composed_epsilon"]),
        )
        for name, found in result["methods"].items()
    ]
    header = ("method", "mean", "95 % interval", "proven ε, each run", "its runs together")
    table("accuracy, %", rows, header)
    pairs = [
        (
            " − ".join(pair["pair"]),
            f"{100 * pair['difference']:+.2f}",
            percent(*pair["interval"]),
            f"{pair['corrected_p']:.3f}",
            "significant" if pair["significant"] else "not significant",
        )
        for pair in result["differences"]
    ]
    if pairs:
        table("differences, points", pairs, ("pair", "difference", "95 % interval", "p (Holm)", "verdict"))
    print(f"{together(result)}.")
    print(f"record: {out / 'comparison.json'}\nfigure: {out / 'comparison.svg'}")


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
        what = "accuracy, % (dots: runs; bars: 95 % interval of the mean)"
        axes.set(xlabel=f"{what}\n{together(result)}")
        axes.invert_yaxis()
