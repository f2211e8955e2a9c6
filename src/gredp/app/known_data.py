"""The datasets that are known by name, from `known_data.toml`. No torch."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

EMBEDDED = "digits"
ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class KnownData:
    """Its classes and default network, where it comes from, and what it must be (see `known_data.toml`)."""

    classes: int
    model: str
    repository: str = ""
    image: str = ""
    label: str = ""
    shape: tuple[int, ...] = ()
    train: int = 0
    test: int = 0
    sums: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n, m = self.train, self.test
        return dict(zip(ARRAYS, ((n, *self.shape), (n,), (m, *self.shape), (m,))))


def _entry(values: dict[str, Any]) -> KnownData:
    fixed: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return KnownData(**fixed)


_FILE = (files("gredp.app") / "known_data.toml").read_text()
KNOWN = {name: _entry(values) for name, values in tomllib.loads(_FILE).items()}


def fetchable() -> list[str]:
    """Names that `gredp data get` takes."""
    return [name for name, known in KNOWN.items() if known.repository]


def usual_model(name: str) -> str:
    """The default network of a dataset; of unknown images, Model-3."""
    return KNOWN[name].model if name in KNOWN else "model3"
