"""The best models at a proven ε: runs the recipes with several seeds, and each ingredient left out.

python benchmarks/accuracy.py finals --only mnist --seeds 3       # the test set, once for each seed
python benchmarks/accuracy.py ablations --only mnist              # on training records that are held out
python benchmarks/accuracy.py finals --only cifar10-transfer --pretrained WEIGHTS
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from gredp.app.jobs import run_jobs
from gredp.app.recipe import Recipe

OUT = Path(__file__).parent.parent / "results" / "accuracy"
RECIPES: dict[str, tuple[float, ...]] = {
    "mnist": (1.0,),
    "fashion-mnist": (1.0,),
    "cifar10": (1.0, 1.5, 2.0),
    "cifar100": (2.0,),
    "cifar10-transfer": (2.0,),
    "cifar100-transfer": (2.0,),
}
HELD_OUT = 10_000
#: LeNet-5's settings when it sees pixels, those that did best in the first trials of it
PIXELS = {"features": "none", "normalize": "0", "clipping": "automatic", "lr": "0.08", "batch-size": "500",
          "epochs": "15", "clip-norm": "1", "ema": "0"}  # fmt: skip
#: what the recipes were before patches, for gray images and for CIFAR-10
ORDERS = {"features": "scattering", "normalize": "0.02", "model": "orders-linear"}
SCATTERING = {"features": "scattering", "normalize": "0.02", "model": "mirror-linear", "batch-size": "4096",
              "clip-norm": "0.1", "momentum": "0.9", "epochs": "15", "lr": "3.5"}  # fmt: skip
#: all records that are left
ALL = {"batch-size": "40000"}
SHAPED = {"method": "gredp", "noise": "shaped", "block": "0"}
#: what is changed of a recipe to see what it brings; everything else stays
ABLATIONS: dict[str, dict[str, dict[str, str]]] = {
    "mnist": {
        "as it is": {},
        "patches and textures instead": {"features": "patches", "lr": "600"},
        "scattering alone, private normalization": ORDERS | {"lr": "2000"},
        "without average of the weights": {"ema": "0"},
        "LeNet-5 from pixels, products in bfloat16": PIXELS | {"model": "lenet5", "precision": "bf16"},
        "LeNet-5 from pixels instead": PIXELS | {"model": "lenet5"},
        "LeNet-5 from pixels, 4 views of each record": PIXELS | {"model": "lenet5", "augment": "4"},
        "LeNet-5 from pixels, shaped noise": PIXELS | SHAPED | {"model": "lenet5"},
        "LeNet-5 from pixels, tanh": PIXELS | {"model": "lenet5-tanh"},
        "LeNet-5 from pixels, tanh, shaped noise": PIXELS | SHAPED | {"model": "lenet5-tanh"},
        "small CNN with tanh from pixels instead": PIXELS | {"model": "cnn-tanh"},
    },
    "fashion-mnist": {
        "as it is": {},
        "private normalization of patches": {"normalize": "0.02"},
        "scattering alone, private normalization": ORDERS | {"lr": "4000"},
    },
    "cifar10": {
        "as it is": ALL,
        "clipped at norm 60, momentum 0.8": ALL | {"clip-norm": "60", "lr": "0.031", "momentum": "0.8"},
        "average of the weights": ALL | {"ema": "0.5"},
        "scattering alone, private normalization": SCATTERING,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    recipe: str
    epsilon: float
    seed: int
    what: str
    changed: tuple[tuple[str, str], ...] = ()
    validation: int = 0

    @property
    def name(self) -> str:
        words = [self.recipe, f"eps{self.epsilon:g}", self.what.replace(" ", "_").replace(",", "")]
        return "-".join([*words, f"seed{self.seed}"])

    @property
    def arguments(self) -> list[str]:
        told = {
            "recipe": self.recipe,
            "epsilon": str(self.epsilon),
            "seed": str(self.seed),
            **dict(self.changed),
        }
        if self.validation:
            told["validation"] = str(self.validation)
        return [word for key, value in told.items() for word in (f"--{key}", value)]

    @property
    def epochs(self) -> int:
        return int(dict(self.changed).get("epochs", Recipe(self.recipe).at(self.epsilon).epochs))

    @property
    def work(self) -> float:
        return float(self.epochs)

    @property
    def transferred(self) -> bool:
        return self.recipe.endswith("-transfer")

    @property
    def facts(self) -> dict[str, str]:
        return {"recipe": self.recipe, "what": self.what}


@dataclass(frozen=True)
class Settings:
    part: tyro.conf.Positional[Literal["finals", "ablations"]]
    only: tuple[str, ...] = ()
    """recipes to run"""
    what: tuple[str, ...] = ()
    """ablations to run, by name"""
    seeds: int = 3
    workers: int = 1
    pretrained: str | None = None
    runs: str = "runs/accuracy"


def jobs(settings: Settings) -> list[Job]:
    chosen = {name: value for name, value in RECIPES.items() if not settings.only or name in settings.only}
    if settings.part == "finals":
        return [
            Job(name, epsilon, seed, "final")
            for name, epsilons in chosen.items()
            for epsilon in epsilons
            for seed in range(settings.seeds)
        ]
    return [
        Job(name, max(chosen[name]), seed, what, tuple(changed.items()), HELD_OUT)
        for name in chosen
        for what, changed in ABLATIONS.get(name, {}).items()
        if not settings.what or what in settings.what
        for seed in range(settings.seeds)
    ]


def main() -> None:
    settings = tyro.cli(Settings)
    places = {} if settings.pretrained is None else {"pretrained": settings.pretrained}
    run_jobs(jobs(settings), OUT, Path(settings.runs), settings.workers, places, timed=True)


if __name__ == "__main__":
    main()
