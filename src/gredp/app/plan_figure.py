"""A plan as a picture: relative noise over ε and over epochs, in an SVG file or on a page of its own."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from gredp.app.figure_file import figure_file
from gredp.app.plan import Plan, other_rows, rows
from gredp.app.report.figures import COLORS, inline_figure
from gredp.app.report.page import render
from gredp.storage.files import cannot, write

#: curve → the name of its axis, and what the picture shows
CURVES = {
    "epsilon": ("ε", "Relative noise of these settings at other ε."),
    "epochs": ("epochs", "Relative noise over other numbers of epochs, at the same ε."),
}


def write_plan(plan: Plan, found: dict[str, Any], path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            with figure_file(path, 1, 2, title="gredp plan", figsize=(9.2, 3.4)) as both:
                for axes, name in zip(both, CURVES):
                    draw(axes, found, name)
        else:
            write(path, page(found).encode())
    except OSError as error:
        raise cannot(path, "written", error) from None
    return path


def page(found: dict[str, Any]) -> str:
    pictures = []
    for name, (axis, caption) in CURVES.items():
        with inline_figure(4.6, 3.2, f"{caption} {_told(found, name, axis)}") as (figure, out):
            draw(figure.subplots(), found, name)
        pictures.append((Markup(out[0]), caption))
    return render("plan.html.j2", found=found, rows=rows(found), others=other_rows(found), pictures=pictures)


def _told(found: dict[str, Any], name: str, axis: str) -> str:
    at, curve = found["knees"][name], found["curves"][name]
    ends = "; ".join(f"{y:.3g} at {axis} {x:.3g}" for x, y in (curve[0], curve[-1])) if curve else "no point"
    return f"{ends}; {'no knee' if at is None else f'knee at {at[0]:.3g}'}."


def draw(axes: Any, found: dict[str, Any], name: str) -> None:
    """One curve with the recommended point and the knee, both axes logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    curve, at, chosen = found["curves"][name], found["knees"][name], found[name]
    axes.plot(*zip(*curve), color=COLORS[0], marker="", linewidth=1.8)
    recommended = f"recommended: {CURVES[name][0]} = {chosen:g}"
    here = ([chosen], [found["relative_noise"]])
    axes.plot(*here, marker="o", markersize=6, linestyle="", color=COLORS[1], label=recommended)
    if at is not None:
        label = f"knee: {CURVES[name][0]} = {at[0]:.2g}" if name == "epsilon" else f"knee: epochs = {at[0]:g}"
        axes.plot(
            *([value] for value in at), marker="D", markersize=6, linestyle="", color=COLORS[2], label=label
        )
    axes.set(xscale="log", yscale="log", xlabel=CURVES[name][0], ylabel="relative noise z/(batch·√steps)")
    low, high = min(y for _, y in curve), max(y for _, y in curve)
    if high < 2 * low:  # a flat curve is shown as one
        axes.set_ylim(low / 2, high * 2)
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scale.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8)
