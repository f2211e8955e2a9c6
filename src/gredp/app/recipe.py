"""Recipes: settings of a run in a small TOML file, by name from `gredp/app/recipes` or by a path. No torch.

Keys are the options of `gredp train`. Tables `[[at]]` hold settings for a target ε: the one with the nearest
ε is used, as a ratio. The command line overrides both.

    dataset = "mnist"
    epsilon = 1.0

    [[at]]
    epsilon = 1.0
    epochs = 40
"""

import math
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from typeguard import TypeCheckError, check_type

from gredp.app.settings import OF_ONE_START, TrainSettings, current_names
from gredp.errors import GredpError
from gredp.storage.files import one_line, read

FOLDER = files("gredp.app") / "recipes"
LARGEST = 1 << 20
#: settings that a file must not decide for its user
NOT_FOR_FILES = (*OF_ONE_START, "recipe", "insecure_seed", "allow_large_delta")


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(item.name.removesuffix(".toml") for item in FOLDER.iterdir() if item.name.endswith(".toml"))


class Recipe:
    """One file, checked whole when it is read."""

    def __init__(self, name: str) -> None:
        own = name in names()
        if not own and not name.endswith(".toml"):
            raise GredpError(
                f"unknown recipe {name!r}: one of {', '.join(names())}, or the path of a .toml file"
            )
        content = (FOLDER / f"{name}.toml").read_bytes() if own else read(Path(name).resolve(), LARGEST)
        self.name = name
        try:
            values = tomllib.loads(content.decode())
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise GredpError(f"recipe {name} cannot be read: {one_line(error)}") from None
        rows = values.pop("at", [])
        self._common = self._checked(values)
        tables = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        self._rows = [self._checked(row) for row in rows] if tables else []
        if not tables or not all(row.get("epsilon", 0) > 0 for row in self._rows):
            raise GredpError(f"recipe {name}: every [[at]] is a table with an epsilon above 0")

    def _checked(self, values: dict[str, Any]) -> dict[str, Any]:
        hints, values = get_type_hints(TrainSettings), current_names(values)
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        for key, value in values.items():
            if key not in hints or key in NOT_FOR_FILES:
                raise GredpError(f"recipe {self.name}: {key} is not a setting of a recipe")
            try:
                check_type(value, hints[key])
            except TypeCheckError:
                raise GredpError(f"recipe {self.name}: {key} cannot be {value!r}") from None
        return values

    def common(self) -> TrainSettings:
        """What holds at every ε."""
        return TrainSettings(**self._common, recipe=self.name)

    def at(self, epsilon: float) -> TrainSettings:
        """The settings for a target ε."""
        if not (self._rows and epsilon > 0):  # a wrong ε is rejected with all other settings
            return self.common()
        row = min(self._rows, key=lambda row: abs(math.log(row["epsilon"] / epsilon)))
        return replace(self.common(), **row | {"epsilon": epsilon})
