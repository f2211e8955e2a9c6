"""What a command line says of a run, and where it is silent its recipe, its table, or the usual. No torch."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

import tyro

from gredp.app.recipe import Recipe
from gredp.app.settings import TrainSettings
from gredp.app.table_defaults import is_table, table_defaults

Settings = TypeVar("Settings", bound=TrainSettings)
ALIASES = {"data": "dataset"}


def resolved(kind: type[Settings], command: str, arguments: Sequence[str]) -> Settings:
    """The settings of `gredp COMMAND ARGUMENTS`; options come before a recipe, taken at their ε."""

    def parse(given: TrainSettings) -> Settings:
        default = kind(**{field.name: getattr(given, field.name) for field in fields(TrainSettings)})
        return tyro.cli(kind, prog=f"gredp {command}", args=arguments, default=default)

    settings = parse(TrainSettings())
    if settings.recipe is not None:
        recipe = Recipe(settings.recipe)
        return parse(recipe.at(parse(recipe.common()).epsilon))
    if is_table(settings):
        return parse(replace(TrainSettings(), **table_defaults(settings)))
    return settings


def named(arguments: Sequence[str]) -> set[str]:
    """Settings that the words name, be it with the value they would have had; no option is abbreviated."""
    words = {word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    return {ALIASES.get(word, word) for word in words}
