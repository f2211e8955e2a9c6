"""What the paper prints, in percent, from `paper.toml`, which names the place of each. Its ε are claims."""

import tomllib
from importlib.resources import files
from typing import Any

Figures = dict[float, float]
#: accuracy by row and ε
Rows = dict[str, Figures]


def _numbered(table: Any) -> Any:
    """The same with keys that are numbers as numbers: TOML has strings only."""
    if not isinstance(table, dict):
        return table
    return {float(key) if key[0].isdigit() else key: _numbered(value) for key, value in table.items()}


_PRINTED = _numbered(tomllib.loads((files("gredp.paper") / "paper.toml").read_text(encoding="utf-8")))
HEADLINE: dict[str, float] = _PRINTED["headline"]
FROM_SCRATCH: dict[str, Rows] = _PRINTED["from_scratch"]
TRANSFER: dict[str, dict[str, Rows]] = _PRINTED["transfer"]
CLIPPING: dict[str, dict[float, Figures]] = {
    network: norms | {1.0: FROM_SCRATCH[network]["gredp-claimed"]}
    for network, norms in _PRINTED["clipping"].items()
}
#: of LeNet-5 at ε = 2, by setting
ABLATIONS: dict[str, Figures] = _PRINTED["ablations"]
