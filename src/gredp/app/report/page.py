"""Facts of runs → one HTML page. Everything that is shown is text, escaped by the template."""

import base64
import hashlib
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gredp import __version__
from gredp.app.report import figures, numbers
from gredp.app.report.facts import Facts, printable
from gredp.privacy.accountant import ACCOUNTANTS, LARGE_DELTA, delta_times, epsilon

HERE = Path(__file__).parent
Pictures = list[tuple[Markup, str]]


def page(runs: Sequence[Facts]) -> str:
    """The whole page."""
    return render(
        "page.html.j2",
        runs=runs,
        together=together(runs),
        accountants=ACCOUNTANTS,
        large_delta=LARGE_DELTA,
        delta_times=delta_times,
        course=course,
        noise=noise,
        certificate=certificate,
    )


def render(template: str, **values: Any) -> str:
    """A page of ours: no script, no address elsewhere, one style sheet that the policy knows by its hash."""
    css = (HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    shown = {name: getattr(numbers, name) for name in ("up", "down", "short", "number", "count", "setting")}
    environment.filters |= {**shown, "epsilon": numbers.shown_epsilon, "quote": shlex.quote, "exp": math.exp}
    style = {"css": Markup(css), "css_hash": f"sha256-{digest}"}
    return environment.get_template(template).render(version=__version__, **style, **values)


def together(runs: Sequence[Facts]) -> tuple[float, float] | None:
    """(ε, δ) of all the runs on the same records, at the smallest δ of any; None if their units differ."""
    if len({run.spent.unit for run in runs}) > 1:
        return None
    delta = min(run.spent.delta for run in runs)
    entries = [entry for run in runs for entry in run.spent.written.entries]
    return epsilon(entries, delta, runs[0].spent.accountant), delta


def course(runs: Sequence[Facts]) -> Pictures:
    """Accuracy and loss over the training."""
    measure = " or ".join(sorted({run.measure for run in runs}))
    drawn = {
        f"{measure}, epoch by epoch.": ("accuracy", "epoch"),
        "What each point of it has cost: proven ε spent by then.": ("accuracy", "proven_epsilon"),
        "Loss on the same records, epoch by epoch.": ("loss", "epoch"),
        "The same against the proven ε spent by then.": ("loss", "proven_epsilon"),
    }
    return _pictures({caption: figures.course(runs, *what) for caption, what in drawn.items()})


def noise(run: Facts) -> Pictures:
    """What each layer and frequency gets, and where the gradient is."""
    rows = run.known.get("spectrum", [])
    levels = [float(value) for row in rows for value in row["noise_std"] or ()]
    white = bool(levels) and max(levels) - min(levels) <= 1e-6 * max(levels)  # nothing to see in a picture
    noised = "How much noise each layer and frequency gets."
    learned = "Where the gradient is, as the run has learned it privately: the released energy shares."
    return _pictures(
        {
            noised: figures.spectrum(rows, "noise_std") if run.private and not white else None,
            learned: figures.spectrum(rows, "norm_share"),
        }
    )


def _pictures(drawn: dict[str, str | None]) -> Pictures:
    return [(Markup(picture), caption) for caption, picture in drawn.items() if picture is not None]


def certificate(run: Facts) -> list[tuple[str, float, float, float]]:
    """For each release: its name, clipping norm, least noise, and how far one record moves it in noises."""
    rows = []
    for release in run.known.get("certificate", []):
        norm, least = float(release["clip_norm"]), float(release["noise_std"])
        rows.append((release["name"], norm, least, norm / least if least > 0 else math.inf))
    return rows
