"""The audit as a figure, drawn from its record alone: scores in both worlds, and ε side by side."""

from pathlib import Path
from typing import Any

from gredp.app.figure_file import figure_file

#: key of a row, name and color of its bar
BARS = (
    ("claimed_epsilon", "claimed", "#c44e52"),
    ("audited_epsilon_lower", "audited, at least", "#333333"),
    ("proven_epsilon", "proven", "#4c72b0"),
)


def draw(record: dict[str, Any], path: Path) -> None:
    """Left the scores of the most telling game with its threshold, right claimed, audited and proven ε."""
    rows = record["rows"]
    games = [row for row in rows if "histogram" in row]
    size = (11, max(3.0, 0.34 * len(rows) + 1.2))
    # The date ties the figure to its record.
    title = f"record of {record['created']}"
    with figure_file(path, 1, 2, title=title, figsize=size, width_ratios=(2, 3)) as (left, right):
        if games:
            _scores(left, next((row for row in games if row["refuted"]), games[0]))
        else:
            left.set_axis_off()
        _bars(right, rows)


def _scores(axes: Any, row: dict[str, Any]) -> None:
    for world, label in (("without", "canary not in the data"), ("with", "canary in the data")):
        axes.stairs(row["histogram"][world], row["histogram"]["edges"], fill=True, alpha=0.5, label=label)
    axes.axvline(row["threshold"], color="black", linestyle="--", label="threshold")
    axes.set(title=f"{row['name']} ({row['direction']})", xlabel="score", ylabel="plays")
    axes.legend(fontsize=7)


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    values = [float(row[key]) for row in rows for key, _, _ in BARS if row[key] is not None]
    top = 1.1 * max((value for value in values if value < 1e6), default=1.0)
    for place, row in enumerate(rows):
        for offset, (key, name, color) in enumerate(BARS):
            if row[key] is None:
                continue
            value, height = float(row[key]), place + 0.27 * (offset - 1)
            axes.barh(height, min(value, top), 0.25, color=color, label=name if place == 0 else None)
            if value > top:
                axes.text(top, height, " ∞", va="center", fontsize=7)
    names = [f"{r['name']} – {r['claim']}{', REFUTED' if r['refuted'] else ''}" for r in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel=f"ε at δ = {rows[0]['delta']:g}", xlim=(0, 1.06 * top))
    axes.legend(fontsize=7)
