"""docs/opacus.md: which names of Opacus are there, from the table that finds them."""

from typing import Any

from gredp.opacus_modules import NOT_OFFERED, OFFERED


def values() -> dict[str, Any]:
    return {
        "offered": [
            (f"`opacus.{path}`", ", ".join(_shown(name, home) for name, home in names.items()))
            for path, names in OFFERED.items()
        ],
        "not_offered": [
            (f"`opacus.{path}`".replace(".`", "`"), ", ".join(names), why)
            for path, reasons in NOT_OFFERED.items()
            for why, names in _by_reason(reasons).items()
        ],
    }


def _shown(name: str, home: str) -> str:
    """The name, and what it is called here if that is another."""
    other = home.partition(":")[2]
    return f"`{name}` (`{other}`)" if other else f"`{name}`"


def _by_reason(reasons: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in reasons.items():
        found.setdefault(why, []).append("all others" if name == "*" else f"`{name}`")
    return found
