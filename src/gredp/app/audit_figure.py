"""The audit as a figure, drawn from its record alone: scores in both worlds, and ε side by side."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"claimed": "#c44e52", "audited, at least": "#333333", "proven": "#4c72b0"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Left the scores of the most telling game with its threshold, right claimed, audited and proven ε."""
    rows = record["rows"]
    games = [row for row in rows if "histogram" in row]
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "gredp", "font.size": 9}
    with plt.rc_context(style):
        size = (11, max(3.0, 0.34 * len(rows) + 1.2))
        figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained", width_ratios=(2, 3))
        if games:
            _scores(left, next((row for row in games if row["refuted"]), games[0]))
        else:
            left.set_axis_off()
        _bars(right, rows)
        # The date ties the figure to its record; without one of its own the file is the same every time.
        metadata = {"Title": f"record of {record['created']}"} | (
            {"Date": None} if path.suffix == ".svg" else {}
        )
        if path.suffix == ".pdf":
            metadata = {"Title": metadata["Title"], "CreationDate": None}
        figure.savefig(path, metadata=metadata)
        plt.close(figure)


def _scores(axes: Any, row: dict[str, Any]) -> None:
    histogram = row["histogram"]
    axes.stairs(
        histogram["without"], histogram["edges"], fill=True, alpha=0.5, label="canary not in the data"
    )
    axes.stairs(histogram["with"], histogram["edges"], fill=True, alpha=0.5, label="canary in the data")
    axes.axvline(row["threshold"], color="black", linestyle="--", label="threshold")
    axes.set(title=f"{row['name']} ({row['direction']})", xlabel="score", ylabel="plays")
    axes.legend(fontsize=7)


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    values = [
        {"claimed": row["claimed_epsilon"], "audited, at least": row["audited_epsilon_lower"],
         "proven": row["proven_epsilon"]}
        for row in rows
    ]  # fmt: skip
    finite = [float(v) for row in values for v in row.values() if v is not None and float(v) < 1e6]
    top = 1.1 * max(finite, default=1.0)
    for place, row in enumerate(values):
        for offset, (name, value) in enumerate(row.items()):
            if value is None:
                continue
            label = name if place == 0 else None
            shown = min(float(value), top)
            axes.barh(place + 0.27 * (offset - 1), shown, 0.25, color=COLORS[name], label=label)
            if float(value) > top:
                axes.text(top, place + 0.27 * (offset - 1), " ∞", va="center", fontsize=7)
    names = [f"{r['name']} – {r['claim']}{', REFUTED' if r['refuted'] else ''}" for r in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel=f"ε at δ = {rows[0]['delta']:g}", xlim=(0, 1.06 * top))
    axes.legend(fontsize=7)
