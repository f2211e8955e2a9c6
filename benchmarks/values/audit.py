"""docs/audit.md, from the records of the auditor."""

import math
from typing import Any

from gredp.app.audit_figure import draw
from values import Figure, load


def values() -> dict[str, Any]:
    record, self_test, null = load("audit"), load("audit_self_test"), load("audit_null")
    rows, bugs = record["rows"], self_test["self_test"]
    paper, proven = ([row["refuted"] for row in rows if row["claim"] == kind] for kind in ("paper", "proven"))
    return {
        "record": record,
        "null": null,
        "self_test": self_test,
        "paper": len(paper),
        "refuted": sum(paper),
        "proven": len(proven),
        "fallen": sum(proven),
        "canaries": next(row["canaries"] for row in rows if "canaries" in row),
        "persons": load("persons"),
        "moves": [_moved(row) for row in load("persons")["rows"]],
        "claims": [_claim(row) for row in rows],
        "caught": sum(row["caught"] for row in bugs),
        "bugs": [(row["bug"], row["check"], row["says"] or "–") for row in bugs],
    }


def figures() -> dict[str, Figure]:
    # The figure's bytes depend on fonts and versions; the date of its record is written into it.
    record = load("audit")
    return {"audit.svg": Figure(lambda path: draw(record, path), record["created"])}


def _claim(row: dict[str, Any]) -> tuple[str, ...]:
    lower = f"{math.floor(100 * row['audited_epsilon_lower']) / 100:.2f}"
    verdict = "**refuted**" if row["refuted"] else "not refuted"
    attack = row.get("direction", "many canaries in one run")
    return (
        row["name"],
        row["claim"],
        _up(row["claimed_epsilon"]),
        lower,
        _up(row["proven_epsilon"]),
        verdict,
        attack,
    )


def _moved(row: dict[str, Any]) -> tuple[str, ...]:
    """A sensitivity is rounded up, as every bound on what a person may move."""
    found = row["audit"]
    moves = (f"{math.ceil(1e4 * row['sensitivity'][key]) / 1e4:.4f}" for key in ("random", "alike"))
    lower = f"{math.floor(100 * found['audited_epsilon_lower']) / 100:.2f}"
    verdict = "**refuted**" if found["refuted"] else "not refuted"
    name = "each person (the engine)" if row["clipped"] == "person" else "each record (planted bug)"
    return name, *moves, _up(found["claimed_epsilon"]), lower, verdict


def _up(value: float | str) -> str:
    return "∞" if float(value) == math.inf else f"{math.ceil(100 * float(value)) / 100:.2f}"
