"""Figures of a report, as SVG that stands inside a page: text stays text, ink takes the page's color.

A strict Content-Security-Policy refuses style attributes, so every style becomes an attribute of its own.
"""

import io
import math
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator

from gredp.app.report.facts import Facts, printable
from gredp.app.report.numbers import short

SVG, LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
#: stands for the page's own ink until the figure is drawn; close to black, and nobody's choice
INK = "#010203"
#: readable on white and on black, told apart by the color-blind, and with markers in print
COLORS = ("#2f7ed8", "#d9822b", "#2f9e6e", "#a45fc4", "#c94f4f", "#8a8a3a", "#3aa6b9", "#8a6d5a")
#: few shades: the bar is drawn cell by cell
SHADES = matplotlib.colormaps["viridis"].resampled(24)
MARKERS = "os^Dvphx"
#: by key of a row: what a picture of the spectrum shows, and its unit
SPECTRA = {
    "noise_std": ("Noise on a Fourier coefficient", "standard deviation, in the summed gradient"),
    "norm_share": ("Share of the gradient's norm", "mean share of a record's gradient norm, as released"),
}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a layer called "$x" is no formula
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.framealpha": 0.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "axes.prop_cycle": cycler(color=COLORS, marker=[*MARKERS]),
    "lines.markersize": 3.5,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}


@contextmanager
def inline_figure(width: float, height: float, title: str) -> Iterator[tuple[Figure, list[str]]]:
    """Draw on the figure; the list then holds its SVG. `title` is what a reader without pictures hears."""
    out: list[str] = []
    style: Any = STYLE | {"svg.hashsalt": title}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs that this font lacks are the reader's font's
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, out
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    out.append(_inline(file.getvalue(), title))


def _inline(svg: str, title: str) -> str:
    """Matplotlib's file as an element of a page: no style, no declaration, a name, ids of its own."""
    ET.register_namespace("", SVG)
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        for name, value in _styles(element.attrib.pop("style", "")):
            element.set(name, value)
        if LINK in element.attrib:
            element.set("href", element.attrib.pop(LINK))
        if element.tag in (f"{{{SVG}}}g", f"{{{SVG}}}svg"):
            element.attrib.pop("id", None)
        for name, value in element.attrib.items():
            if value == INK:
                element.set(name, "currentColor")
    for size in ("width", "height"):
        root.attrib.pop(size)
    root.set("role", "img")
    root.set("aria-label", title)
    return ET.tostring(root, encoding="unicode")


def _styles(style: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, map(str.strip, style.split(";"))):
        name, _, value = (word.strip() for word in part.partition(":"))
        if name == "font":  # a shorthand, which is no attribute: its size; the family is the page's
            yield "font-size", next(word for word in value.split() if word.endswith("px"))
        elif not name.startswith("-"):
            yield name, value


def course(runs: Sequence[Facts], what: str, axis: str) -> str | None:
    """`what`, "accuracy" or "loss", against `axis`, "epoch" or "proven_epsilon": a line for each run that has
    both."""
    lines = {run.name: list(_points(run, what, axis)) for run in runs}
    if not any(lines.values()):
        return None
    deltas = ", ".join(sorted({short(run.spent.delta) for run in runs}))
    label = "epochs" if axis == "epoch" else f"proven ε spent, at δ = {deltas}"
    number, measured = any(run.measure == "R²" for run in runs), what == "accuracy"
    shown = "{:.1f} %" if measured else "{:.3g}"
    unit = "mean squared error, scaled" if number else "mean cross-entropy"
    unit = f"{runs[0].measure} in %".replace("Acc", "acc") if measured else unit
    last = {name: line[-1] for name, line in lines.items() if line}
    ends = "; ".join(f"{name}: {shown.format(y)} at {x:.4g}" for name, (x, y) in last.items())
    title = f"{runs[0].measure if measured else 'Loss'} against {label}. At the end, {ends}."
    with inline_figure(4.6, 3.0, printable(title)) as (figure, out):
        axes = figure.subplots()
        for name, line in lines.items():
            axes.plot(*zip(*line), label=name) if line else axes.plot([], [])
        axes.set(xlabel=label, ylabel=unit)
        axes.set_xlim(left=0)
        if axis == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(runs) > 1:
            columns = 2 if max(map(len, lines)) < 20 else 1
            figure.legend(loc="outside upper left", fontsize=8, ncols=columns)
    return out[0]


def _points(run: Facts, what: str, axis: str) -> Iterator[tuple[float, float]]:
    """Finite ones: a plain run has no ε, a run that diverges no loss, an old record no loss at all."""
    split = run.accuracy_name.split("_")[0]
    name, factor = (run.accuracy_name, 100) if what == "accuracy" else (f"{split}_{what}", 1)
    for row in run.metrics:
        x, y = float(row[axis]), factor * float(row.get(name, "nan"))
        if math.isfinite(x) and math.isfinite(y):
            yield x, y


def spectrum(rows: Sequence[dict[str, Any]], key: str) -> str | None:
    """Layers down, frequencies across, low ones left: `key` is "noise_std" or "norm_share"."""
    rows = [row for row in rows if row[key] is not None]
    if len(rows) > 40:  # biases and normalizations have one group; in a deep network they would crowd it
        rows = [row for row in rows if len(row["shape"]) > 1]
    if not rows:
        return None
    what, unit = SPECTRA[key]
    top = max(max(row[key]) for row in rows)
    title = f"{what}, layer by layer and from low to high frequency; {_loudest(rows, key)}"
    with inline_figure(4.6, 0.9 + 0.2 * len(rows), printable(title)) as (figure, out):
        axes = figure.subplots()
        color = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, top or 1), SHADES)
        for place, row in enumerate(rows):
            values, count = row[key], len(row[key])
            cells = [(k / count, 1 / count) for k in range(count)]
            shades = color.to_rgba(np.array([max(float(v), 0.0) for v in values]))
            axes.broken_barh(cells, (place - 0.42, 0.84), facecolors=shades)
        axes.set_yticks(range(len(rows)), [printable(row["block"]) for row in rows], fontsize=8)
        axes.set_xticks([0.02, 0.98], ["low", "high frequency"])
        axes.get_xticklabels()[1].set_horizontalalignment("right")
        axes.get_xticklabels()[0].set_horizontalalignment("left")
        axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
        axes.grid(False)
        axes.tick_params(length=0)
        bar = figure.colorbar(color, ax=axes, location="top", aspect=40, pad=0.02)
        bar.solids.set(rasterized=False, edgecolor="face")  # type: ignore[union-attr]
        bar.set_label(unit, fontsize=8)
    return out[0]


def _loudest(rows: Sequence[dict[str, Any]], key: str) -> str:
    means = {row["block"]: sum(row[key]) / len(row[key]) for row in rows}
    most, least = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    if math.isclose(means[most], means[least], rel_tol=1e-9):
        return f"{means[most]:.3g} for all."
    return f"most for {most} ({means[most]:.3g} on average), least for {least} ({means[least]:.3g})."
