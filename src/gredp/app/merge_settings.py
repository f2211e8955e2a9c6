"""The settings of a command: options override the run, recipe or table they refer to. No torch."""

import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

import tyro

from gredp.app.defaults import own_defaults
from gredp.app.ranges import option
from gredp.app.recipe import Recipe
from gredp.app.settings import RENAMED, TrainSettings, saved_settings
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
    chosen = own_defaults(settings, named(arguments))
    return parse(replace(TrainSettings(), **chosen)) if chosen else settings


def named(arguments: Sequence[str]) -> set[str]:
    """Settings that the options name, whether or not they change a default; no option is abbreviated."""
    words = {word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    return {"dataset" if word == "data" else word for word in words}
