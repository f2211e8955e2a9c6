"""What a record keeps of its evaluation, as rows of a table. No torch."""

from collections.abc import Mapping
from typing import Any


def evaluation_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a record keeps of its evaluation, in few lines."""
    if "mae" in found:
        low, high = found["target"]
        flat = f"{found['mae_of_the_median']:.4g} for the median of these records"
        return [("mean absolute error", f"{found['mae']:.4g} in [{low:g}, {high:g}]; {flat}")]
    if not found:
        return []
    most, seen = found["majority"], [row for row in found["classes"] if row["records"]]
    worst = min(seen, key=lambda row: row["recall"])
    right = f"{round(worst['recall'] * worst['records'])} of {worst['records']}"
    area = "" if found["auc"] is None else f", AUC {found['auc']:.4f}"
    return [
        ("balanced accuracy", f"{100 * found['balanced_accuracy']:.2f} %{area}"),
        ("majority's share", f"{100 * most['share']:.2f} %, class {most['class']}"),
        ("worst recall", f"{100 * worst['recall']:.2f} %, class {worst['class']}: {right}"),
    ]
