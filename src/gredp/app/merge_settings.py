"""The settings of a command: options override the run, recipe or table they refer to. No torch."""

import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from gredp.app.recipe import Recipe
from gredp.app.settings import RENAMED, TrainSettings, option, saved_settings
from gredp.errors import GredpError

Settings = TypeVar("Settings", bound=TrainSettings)


def with_current_names(arguments: Sequence[str]) -> list[str]:
    """The same words with options of earlier versions under the names of today, and a warning for each."""
    renamed = {"bands": "correlation_bands"} if "account" in arguments[:1] else RENAMED
    old = {option(name): option(new) for name, new in renamed.items()}
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        if name in old:
            warnings.warn(f"{name} is deprecated: use {old[name]}", FutureWarning, stacklevel=2)
        words.append(old.get(name, name) + equals + value)
    return words


def resolved(kind: type[Settings], command: str, arguments: Sequence[str]) -> Settings:
    """The settings of `gredp COMMAND ARGUMENTS`; a recipe is taken at the ε that the options name."""

    def parse(given: TrainSettings) -> Settings:
        default = kind(**{field.name: getattr(given, field.name) for field in fields(TrainSettings)})
        return tyro.cli(kind, prog=f"gredp {command}", args=arguments, default=default)

    settings = parse(TrainSettings())
    run = settings.resume or settings.fork
    if run is not None and command == "train":
        if settings.fork is not None and settings.recipe is not None:
            raise GredpError("--fork takes the settings of its run, which options override: give no --recipe")
        return parse(replace(saved_settings(run), resume=None))
    if settings.recipe is not None:
        recipe = Recipe(settings.recipe)
        return parse(recipe.at(parse(recipe.common()).epsilon))
    if Path(settings.dataset).suffix == ".csv":
        return parse(replace(TrainSettings(), **table_defaults(settings)))
    return settings


def table_defaults(settings: TrainSettings) -> dict[str, Any]:
    """Batches of a fifth of the rows, and settings that did well on public tables (docs/results.md).

    The number of rows is not secret here, as it is not in `--batch-size`.
    """
    share = settings.holdout or 0.0
    try:
        with open(settings.dataset, "rb") as file:
            rows = sum(1 for line in file if line.strip()) - 1
    except OSError:
        return {}  # reading the table gives the better message
    if not 0 <= share < 1:
        return {}  # rejected with all other settings
    return {
        "batch_size": max(1, int(rows * (1 - share) / 5)),
        "epochs": 10,
        "lr": 0.3,
        "clipping": "automatic",
    }


def named(arguments: Sequence[str]) -> set[str]:
    """Settings that the options name, whether or not they change a default; no option is abbreviated."""
    words = {word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    return {"dataset" if word == "data" else word for word in words}
