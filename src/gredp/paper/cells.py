"""Cells: one training run each, written as the `gredp train` command that repeats it. No torch."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import product
from typing import Any, Literal

from gredp.errors import GredpError
from gredp.mechanisms.registry import Method, find
from gredp.paper.paper import HEADLINE

Scale = Literal["smoke", "full"]
Target = Literal[
    "table1",
    "table2",
    "table3",
    "figure-epsilon",
    "figure-dynamics",
    "ablation-batch",
    "ablation-lr",
    "tuning",
    "theorems",
    "all",
]

#: options of `gredp train` for each row; the paper's own calibration where it makes a claim
ROWS: dict[str, dict[str, str]] = {
    "plain": {"method": "plain"},
    "dpsgd": {"method": "dpsgd"},
    "spectral-dp": {"method": "spectral_dp", "claim": "paper"},
    "gredp-claimed": {"method": "gredp", "claim": "paper"},
    "gredp": {"method": "gredp"},
    "shaped": {"method": "gredp", "noise": "shaped"},
}
PRIVATE = tuple(row for row in ROWS if row != "plain")
#: the paper's method under its claim and as proven: what Table 3 and the ablations compare
BOTH = ("gredp-claimed", "gredp")
EPSILONS = (0.5, 1.0, 1.5, 2.0)
CLIP_NORMS = (0.1, 1.0)
#: what the ablations try, by setting and network
ABLATED: dict[str, dict[str, tuple[float, ...]]] = {
    "batch_size": {"lenet-small": (64, 256), "lenet5": (256, 512, 1024, 2048), "resnet20": (256, 500, 2048)},
    "lr": {
        "lenet-small": (0.001, 0.1),
        "lenet5": (0.001, 0.005, 0.01, 0.025, 0.05, 0.1),
        "resnet20": (0.001, 0.01, 0.025),
    },
}
#: fixed before a run: about as many as training without noise needs to meet the paper's figure for it
EPOCHS = {"lenet-small": 10, "lenet5": 30, "resnet20": 15, "model3": 18, "alexnet": 8}
EPOCHS |= {"resnet18-1conv": 3, "resnet18-2conv": 3}
#: those of Table 3 and the ablations, where they would take days, and the ε of that table then
SHORTER = {"resnet20": 4}
SHORTER_EPSILONS = (0.5, 2.0)
#: by default one seed; Table 1 has more of these
SEEDS = {"lenet5": 3}


def title(row: str) -> str:
    """The name of a row in tables and figures; the paper's own method is there as claimed and as proven."""
    proven = ", proven" if ROWS[row]["method"] == "gredp" else ""
    return _method(row).label + (", claimed" if "claim" in ROWS[row] else proven)


def color(row: str) -> str:
    return "#c44e52" if row == "gredp-claimed" else _method(row).color


def _method(row: str) -> Method:
    return find(ROWS[row]["method"], ROWS[row].get("noise", "white"))


@dataclass(frozen=True)
class Tuning:
    """Settings of one network for the noise that is really there, from `tuning.toml`."""

    epochs: int
    best: dict[str, dict[str, object]] = field(default_factory=dict)
    tried: dict[str, list[object]] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    held_out: int = 10_000


_TUNING = tomllib.loads((files("gredp.paper") / "tuning.toml").read_text(encoding="utf-8"))
TUNING = {network: Tuning(**values) for network, values in _TUNING.items()}
#: networks of Table 2, whose last layers are trained; they need `--pretrained`
TRANSFERRED = ("resnet18-1conv", "resnet18-2conv")

#: the paper's settings, as we read them: it does not name its optimizer (docs/paper.md)
PAPER = {"batch_size": 500, "optimizer": "adam", "lr": 0.001, "clip_norm": 1.0, "delta": 1e-5}
#: settings of which it says nothing, so it has the same figure for any
UNSAID = ("precision", "augment")
#: another reading of its baseline, for which it ran public code: the usual optimizer and the rate of its text
BASELINE: dict[str, Any] = {"optimizer": "sgd", "lr": 0.01}
#: networks whose runs take hours: in half precision, where the processor is quicker in it
LARGE = ("resnet20", "model3", "alexnet", *TRANSFERRED)
#: shifts and flips of images, which the paper does not name: without them Model-3 ends below its plain figure
AUGMENTED = {"model3": 1}
#: records of theirs in memory at once, which changes nothing but the time
PHYSICAL = 128
#: seconds of one thread for a thousand records, about: for the time left
COST = {"lenet5": 0.16, "model3": 2.3, "resnet20": 2.9, "alexnet": 4.6}
COST |= {"resnet18-1conv": 1.5, "resnet18-2conv": 2.5}


@dataclass(frozen=True)
class Cell:
    """One run: `row` of a table for `model` on `dataset` at `epsilon`, with all settings it is given."""

    dataset: str
    model: str
    row: str
    epsilon: float
    epochs: int
    seed: int = 0
    settings: dict[str, object] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Different for different settings; the name of its record and of its run folder."""
        return f"{self.group}-seed{self.seed}"

    @property
    def group(self) -> str:
        """The same for all seeds."""
        given = {**PAPER, **self.settings}
        other = [f"{k.replace('_', '')}{v}" for k, v in sorted(given.items()) if PAPER.get(k) != v]
        epsilon = [] if self.row == "plain" else [f"eps{self.epsilon:g}"]
        return "-".join([self.dataset, self.model, self.row, *epsilon, f"{self.epochs}epochs", *other])

    @property
    def arguments(self) -> list[str]:
        """Those of `gredp train`, without the folder."""
        given: dict[str, object] = {"dataset": self.dataset, "model": self.model, **ROWS[self.row]}
        given |= {"epsilon": self.epsilon, "epochs": self.epochs, "seed": self.seed, **PAPER, **self.settings}
        if self.model in LARGE:
            given["max_physical_batch_size"] = PHYSICAL
        return [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]

    @property
    def changed(self) -> dict[str, object]:
        """Settings that are not the paper's, of those that it states."""
        given = {key: value for key, value in self.settings.items() if key not in UNSAID}
        return {key: value for key, value in given.items() if PAPER.get(key) != value}

    @property
    def in_single_precision(self) -> "Cell":
        """Itself where it is so anyway."""
        return replace(self, settings={k: v for k, v in self.settings.items() if k != "precision"})

    @property
    def facts(self) -> dict[str, str]:
        return {"cell": self.name, "row": self.row}

    @property
    def transferred(self) -> bool:
        """Whether it trains the last layers of a pretrained network, from a file that the user brings."""
        return self.model in TRANSFERRED

    @property
    def work(self) -> float:
        """Seconds of one thread, roughly."""
        return self.epochs * (0.5 if self.dataset == "digits" else 55 * COST.get(self.model, 4.0))


@dataclass(frozen=True)
class Plan:
    """What `--scale`, `--seeds` and `--only` make of the tables. `only` names networks and rows."""

    scale: Scale
    seeds: int | None = None
    only: tuple[str, ...] = ()

    def rows(self, rows: Iterable[str] = ROWS) -> list[str]:
        named = set(self.only) & set(ROWS)
        return [row for row in rows if not named or row in named]

    def networks(self, networks: Iterable[str] | None = None) -> list[str]:
        """Those that are trained from scratch at this scale, or the given ones."""
        if networks is None:
            networks = ["lenet-small"] if self.scale == "smoke" else HEADLINE
        named = set(self.only) - set(ROWS)
        return [network for network in networks if not named or network in named]

    @property
    def transferred(self) -> list[str]:
        return [] if self.scale == "smoke" else self.networks(TRANSFERRED)

    @property
    def epsilons(self) -> tuple[float, ...]:
        return (2.0,) if self.scale == "smoke" else EPSILONS

    def cell(
        self,
        network: str,
        row: str,
        epsilon: float | None = None,
        seed: int = 0,
        dataset: str | None = None,
        **settings: object,
    ) -> Cell:
        """By default at the ε under which the paper's tables show the network."""
        dataset = dataset or {"lenet-small": "digits", "lenet5": "mnist"}.get(network, "cifar10")
        epsilon = HEADLINE.get(network, 2.0) if epsilon is None else epsilon
        if self.scale == "smoke":  # of 1,438 records the paper's 500 would be a third
            settings = {"batch_size": 192, "lr": 0.01} | settings
        if network in LARGE:
            settings = {"precision": "bf16"} | settings
        if network in AUGMENTED:
            settings = {"augment": AUGMENTED[network]} | settings
        return Cell(dataset, network, row, epsilon, EPOCHS[network], seed, settings)

    def grid(self, **axes: Iterable[Any]) -> Iterator[Cell]:
        """A cell for every combination of its arguments, the last one changing fastest."""
        for values in product(*axes.values()):
            yield self.cell(**dict(zip(axes, values)))

    def with_tuned(self, network: str, **where: Any) -> Iterator[Cell]:
        """Every row with the paper's settings, then those that have better ones with theirs."""
        yield from (self.cell(network, row, **where) for row in self.rows())
        best = TUNING[network].best if network in TUNING else {}
        yield from (tuned(self.cell(network, row, **where), best[row]) for row in self.rows(best))

    def table1(self) -> Iterator[Cell]:
        for network in self.networks():
            for seed in range(self.seeds or SEEDS.get(network, 1)):
                yield from self.with_tuned(network, seed=seed)
            if network in HEADLINE:
                yield from (self.cell(network, row, **BASELINE) for row in self.rows(("dpsgd",)))

    def table2(self) -> Iterator[Cell]:
        where = {"dataset": ("cifar10", "cifar100"), "network": self.transferred}
        for dataset, network in product(*where.values()):
            yield from self.with_tuned(network, dataset=dataset)
        yield from self.grid(epsilon=(1.0, 0.5), **where, row=self.rows(PRIVATE))

    def tuning(self) -> Iterator[Cell]:
        for network in (*self.networks(), *self.transferred):
            tuning = TUNING.get(network, Tuning(0))
            for row, values in product(self.rows(tuning.rows), product(*tuning.tried.values())):
                chosen = dict(zip(tuning.tried, values))
                yield tuned(self.cell(network, row), chosen | {"validation": tuning.held_out})

    def table3(self) -> Iterator[Cell]:
        for network in self.networks():
            epsilons = SHORTER_EPSILONS if network in SHORTER else self.epsilons
            axes = {"row": self.rows(_compared(network)), "epsilon": epsilons, "clip_norm": CLIP_NORMS}
            yield from map(_shorter, self.grid(network=(network,), **axes))

    def ablation(self, setting: str) -> Iterator[Cell]:
        """At ε = 2, for which the paper's text gives most numbers."""
        for network in self.networks():
            values = ABLATED[setting].get(network, ())
            axes: dict[str, Iterable[object]] = {setting: values, "row": self.rows(_compared(network))}
            yield from map(_shorter, self.grid(network=(network,), **axes, epsilon=(2.0,)))


def _compared(network: str) -> tuple[str, ...]:
    """Of a network whose runs take hours, the row that the paper has a figure for."""
    return BOTH[:1] if network in LARGE else BOTH


def _shorter(cell: Cell) -> Cell:
    return replace(cell, epochs=SHORTER.get(cell.model, cell.epochs))


def tuned(cell: Cell, settings: dict[str, object]) -> Cell:
    """The same with settings for the noise that is really there, which were chosen in single precision."""
    settings = cell.in_single_precision.settings | {"optimizer": "sgd", "clipping": "automatic"} | settings
    return replace(cell, epochs=TUNING[cell.model].epochs, settings=settings)


def cells(target: Target, scale: Scale, seeds: int | None = None, only: tuple[str, ...] = ()) -> list[Cell]:
    """All runs behind `target`, each once, the headlines first."""
    plan = Plan(scale, seeds, only)
    known = [*EPOCHS, *ROWS]
    if unknown := sorted(set(only) - set(known)):
        raise GredpError(f"--only takes networks and rows ({', '.join(known)}), not {', '.join(unknown)}")
    networks, epsilons = plan.networks(), plan.epsilons
    found = {
        "table1": plan.table1(),
        "table2": plan.table2(),
        "figure-epsilon": plan.grid(network=networks, epsilon=epsilons, row=plan.rows(PRIVATE)),
        "figure-dynamics": plan.grid(network=networks, row=plan.rows(), epsilon=(2.0,)),
        "table3": plan.table3(),
        "ablation-batch": plan.ablation("batch_size"),
        "ablation-lr": plan.ablation("lr"),
        "tuning": plan.tuning(),
    }
    chosen = found.values() if target == "all" else [found.get(target, iter(()))]
    return list({cell.name: cell for part in chosen for cell in part}.values())
