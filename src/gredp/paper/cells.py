"""Cells: one training run each, written as the `gredp train` command that repeats it. No torch."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Literal

from gredp.errors import GredpError
from gredp.mechanisms.registry import find
from gredp.paper.paper import HEADLINE

Scale = Literal["smoke", "quick", "full"]
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

#: how each row is told to `gredp train`; the paper's own calibration where it makes a claim
ROWS: dict[str, dict[str, str]] = {
    "plain": {"method": "plain"},
    "dpsgd": {"method": "dpsgd"},
    "spectral-dp": {"method": "spectral_dp", "claim": "paper"},
    "gredp-claimed": {"method": "gredp", "claim": "paper"},
    "gredp": {"method": "gredp"},
    "shaped": {"method": "gredp", "noise": "shaped"},
}
PRIVATE = tuple(row for row in ROWS if row != "plain")
#: the paper's method under its claim and as proven: what the ablations compare
BOTH = ("gredp-claimed", "gredp")
EPSILONS = (0.5, 1.0, 1.5, 2.0)
BATCH_SIZES = (256, 512, 1024, 2048)
LEARNING_RATES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1)
CLIP_NORMS = (0.1, 1.0)
EPOCHS = {"smoke": 10, "quick": 8, "full": 30}
#: of Table 2, where only the last layers are trained and each epoch takes minutes
TRANSFER_EPOCHS = {"quick": 3, "full": 30}
SEEDS = {"smoke": 1, "quick": 1, "full": 3}

#: rows that keep the ε that was asked for
AT_PROVEN = ("dpsgd", "gredp", "shaped")


def title(row: str) -> str:
    """How a row is called where people read it; the paper's own method is there as claimed and as proven."""
    told = ROWS[row]
    proven = ", proven" if told["method"] == "gredp" else ""
    label = find(told["method"], told.get("noise", "white")).label
    return label + (", claimed" if "claim" in told else proven)


def color(row: str) -> str:
    told = ROWS[row]
    return "#c44e52" if row == "gredp-claimed" else find(told["method"], told.get("noise", "white")).color


@dataclass(frozen=True)
class Tuning:
    """Settings of one network for the noise that is really there."""

    epochs: int
    #: by row: the best of those tried for it or, if there are none, for GReDP, or for the network with one
    #: convolution
    best: dict[str, dict[str, object]]
    #: what `tuning` tries for `rows`, on `held_out` training records; the test set is not looked at
    tried: dict[str, tuple[object, ...]] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    held_out: int = 10_000


_TRANSFER: dict[str, dict[str, object]] = {
    "dpsgd": {"batch_size": 2000, "lr": 1.0},
    "gredp": {"batch_size": 2000, "lr": 1.0},
    "shaped": {"batch_size": 2000, "lr": 0.3},
}
TUNING = {
    "lenet5": Tuning(
        15,
        {row: {"batch_size": 2000, "lr": 0.3} for row in AT_PROVEN},
        {"batch_size": (500, 2000), "lr": (0.03, 0.1, 0.3, 1.0)},
        AT_PROVEN,
    ),
    "lenet-small": Tuning(15, {}, {"batch_size": (192,), "lr": (0.1, 0.3)}, ("gredp",), 300),
    "resnet20": Tuning(
        8,
        {row: {"batch_size": 2000, "lr": 0.3} for row in AT_PROVEN},
        {"batch_size": (2000,), "lr": (0.3, 1.0)},
        ("gredp",),
    ),
    "resnet18-1conv": Tuning(3, _TRANSFER, {"batch_size": (2000,), "lr": (0.1, 0.3, 1.0, 3.0)}, AT_PROVEN),
    "resnet18-2conv": Tuning(3, _TRANSFER),
}
#: networks of Table 2 by data set; they need `--pretrained`
TRANSFERRED = tuple(product(("cifar10", "cifar100"), ("resnet18-1conv", "resnet18-2conv")))

#: the paper's settings; it does not state the momentum (0.9 in the public code of Spectral-DP)
PAPER = {"batch_size": 500, "lr": 0.01, "momentum": 0.9, "clip_norm": 1.0, "delta": 1e-5}
#: seconds of one thread for a thousand records, about: for the time left
COST = {"lenet5": 0.16, "model3": 4.0, "resnet20": 5.9, "alexnet": 5.0, "alexnet-half": 3.5}
COST |= {"resnet18-1conv": 2.5, "resnet18-2conv": 4.0}


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
        told = {**PAPER, **self.settings}
        other = [f"{k.replace('_', '')}{v}" for k, v in sorted(told.items()) if PAPER.get(k) != v]
        epsilon = [] if self.row == "plain" else [f"eps{self.epsilon:g}"]
        return "-".join([self.dataset, self.model, self.row, *epsilon, f"{self.epochs}epochs", *other])

    @property
    def arguments(self) -> list[str]:
        """Those of `gredp train`, without the folder."""
        told = {
            "dataset": self.dataset,
            "model": self.model,
            **ROWS[self.row],
            "epsilon": self.epsilon,
            "epochs": self.epochs,
            "seed": self.seed,
            **PAPER,
            **self.settings,
        }
        return [word for key, value in told.items() for word in (f"--{key.replace('_', '-')}", str(value))]

    @property
    def facts(self) -> dict[str, str]:
        return {"cell": self.name, "row": self.row}

    @property
    def transferred(self) -> bool:
        """Whether it trains the last layers of a pretrained network, from a file that the user brings."""
        return self.model.startswith("resnet18-")

    @property
    def work(self) -> float:
        """Seconds of one thread, roughly."""
        return self.epochs * (0.5 if self.dataset == "digits" else 55 * COST.get(self.model, 4.0))


@dataclass(frozen=True)
class Plan:
    """What `--scale`, `--seeds` and `--only` make of the tables. `only` names networks and rows."""

    scale: Scale
    seeds: int
    only: tuple[str, ...] = ()

    @property
    def networks(self) -> dict[str, float]:
        """Network → the ε under which Table 1 shows it."""
        found = {"lenet-small": 2.0} if self.scale == "smoke" else HEADLINE
        return {name: value for name, value in found.items() if self._wanted(name)}

    @property
    def epsilons(self) -> tuple[float, ...]:
        return (2.0,) if self.scale == "smoke" else EPSILONS

    def rows(self, rows: Iterable[str]) -> list[str]:
        named = [word for word in self.only if word in ROWS]
        return [row for row in rows if not named or row in named]

    def _wanted(self, network: str) -> bool:
        named = [word for word in self.only if word not in ROWS]
        return not named or network in named

    def cell(self, network: str, row: str, epsilon: float, seed: int = 0, **settings: object) -> Cell:
        dataset = {"lenet-small": "digits", "lenet5": "mnist"}.get(network, "cifar10")
        if self.scale == "smoke":  # of 1,438 records the paper's 500 would be a third
            settings = {"batch_size": 192, "lr": 0.1} | settings
        width = "-half" if network == "alexnet" and self.scale != "full" else ""
        return Cell(dataset, network + width, row, epsilon, EPOCHS[self.scale], seed, settings)

    def transferred(self, dataset: str, network: str, row: str, epsilon: float = 2.0) -> Cell:
        return Cell(dataset, network, row, epsilon, TRANSFER_EPOCHS[self.scale], 0, {"lr": 0.001})

    def table1(self) -> Iterator[Cell]:
        for seed in range(self.seeds):
            for network, headline in self.networks.items():
                yield from (self.cell(network, row, headline, seed) for row in self.rows(ROWS))
                yield from self._tuned_rows(network, partial(self.cell, network, epsilon=headline, seed=seed))

    def _tuned_rows(self, network: str, cell: Callable[[str], Cell]) -> Iterator[Cell]:
        best = TUNING[network].best if network in TUNING else {}
        yield from (tuned(cell(row), best[row]) for row in self.rows(best))

    def tuning(self) -> Iterator[Cell]:
        for network, tuning in TUNING.items():
            for row in self.rows(tuning.rows):
                if network in self.networks:
                    cell = self.cell(network, row, self.networks[network])
                elif self._transferred(network):
                    cell = self.transferred("cifar10", network, row)
                else:
                    continue
                for values in product(*tuning.tried.values()):
                    yield tuned(cell, dict(zip(tuning.tried, values)) | {"validation": tuning.held_out})

    def _transferred(self, network: str) -> bool:
        return self.scale != "smoke" and self._wanted(network) and network.startswith("resnet18-")

    def table2(self) -> Iterator[Cell]:
        for epsilon in (2.0,) if self.scale == "quick" else (2.0, 1.0, 0.5):
            for dataset, network in TRANSFERRED:
                if not self._transferred(network):
                    continue
                for row in self.rows(ROWS):
                    if row != "plain" or epsilon == 2.0:
                        yield self.transferred(dataset, network, row, epsilon)
                if epsilon == 2.0:
                    yield from self._tuned_rows(network, partial(self.transferred, dataset, network))

    def table3(self) -> Iterator[Cell]:
        for network, row in product(self.networks, self.rows(BOTH)):
            for epsilon, norm in product(self.epsilons, CLIP_NORMS):
                yield self.cell(network, row, epsilon, clip_norm=norm)

    def figure_epsilon(self) -> Iterator[Cell]:
        for network, epsilon, row in product(self.networks, self.epsilons, self.rows(PRIVATE)):
            yield self.cell(network, row, epsilon)

    def figure_dynamics(self) -> Iterator[Cell]:
        for network, row in product(self.networks, self.rows(ROWS)):
            yield self.cell(network, row, 2.0 if row != "plain" else self.networks[network])

    def ablation(self, setting: str, values: Iterable[object]) -> Iterator[Cell]:
        """On LeNet-5 at ε = 2, for which the paper's text gives most numbers."""
        first = [network for network in self.networks if network.startswith("lenet")]
        for network, value, row in product(first, values, self.rows(BOTH)):
            yield self.cell(network, row, 2.0, 0, **{setting: value})


def tuned(cell: Cell, settings: dict[str, object]) -> Cell:
    """The same with settings for the noise that is really there."""
    settings = cell.settings | {"clipping": "automatic"} | settings
    return replace(cell, epochs=TUNING[cell.model].epochs, settings=settings)


def cells(target: Target, scale: Scale, seeds: int | None = None, only: tuple[str, ...] = ()) -> list[Cell]:
    """All runs behind `target`, each once, the headlines first."""
    plan = Plan(scale, SEEDS[scale] if seeds is None else seeds, only)
    networks = [*HEADLINE, "lenet-small", *dict.fromkeys(network for _, network in TRANSFERRED)]
    unknown = set(only) - set(ROWS) - set(networks)
    if unknown:
        names = ", ".join([*networks, *ROWS])
        raise GredpError(f"--only knows networks and rows ({names}), not {', '.join(sorted(unknown))}")
    sizes = (64, 128, 256, 512) if scale == "smoke" else BATCH_SIZES
    found = {
        "table1": plan.table1(),
        "table2": plan.table2(),
        "figure-epsilon": plan.figure_epsilon(),
        "figure-dynamics": plan.figure_dynamics(),
        "table3": plan.table3(),
        "ablation-batch": plan.ablation("batch_size", sizes),
        "ablation-lr": plan.ablation("lr", LEARNING_RATES),
        "tuning": plan.tuning(),
    }
    chosen = found.values() if target == "all" else [found.get(target, iter(()))]
    return list({cell.name: cell for part in chosen for cell in part}.values())
