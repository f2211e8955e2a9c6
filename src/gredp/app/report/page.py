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
from gredp.app.report import figures
from gredp.app.report.facts import Facts, printable
from gredp.app.report.numbers import count, number, setting, short, shown_epsilon, up
from gredp.privacy.accountant import ACCOUNTANTS, LARGE_DELTA, delta_times, epsilon
from gredp.privacy.ledger import mechanisms

HERE = Path(__file__).parent


def page(runs: Sequence[Facts]) -> str:
    """The whole page: no script, no address elsewhere, one style sheet that the policy knows by its hash."""
    css = (HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.get_template("page.html.j2").render(
        title=_title(runs),
        version=__version__,
        css=Markup(css),
        css_hash=f"sha256-{digest}",
        comparison=_comparison(runs) if len(runs) > 1 else None,
        runs=[_run(run) for run in runs],
    )


def _title(runs: Sequence[Facts]) -> str:
    if len(runs) > 1:
        return f"Privacy report of {len(runs)} runs"
    run = runs[0]
    what = f"{run.model} on {run.data['name']}" if run.model and run.data else run.name
    return f"Privacy report: {what}"


def _run(run: Facts) -> dict[str, Any]:
    """What the template shows of one run."""
    return {
        "name": run.name,
        "folder": str(run.folder),
        "quoted": shlex.quote(str(run.folder)),
        "banners": _banners(run),
        "figures_of_merit": _figures_of_merit(run),
        "guarantee": _guarantee(run),
        "claims": _claims(run),
        "trained": _trained(run),
        "judged": _judged(run),
        "course": _pictures([run]),
        "certificate": _certificate(run),
        "multiplier": number(run.spent.written.entries[-1].noise_multiplier) if _entries(run) else "–",
        "noise": _noise(run),
        "disagreements": run.disagreements,
        "verdict": "Does not agree with the record." if run.disagreements else "Verified.",
        "verdict_text": _verdict(run),
        "entries": _entries(run),
        "ledger": _ledger(run),
        "audit": _audit(run),
        "settings": [(k.replace("_", " "), setting(v)) for k, v in run.settings.items()],
        "versions": _versions(run),
    }


def _banners(run: Facts) -> list[tuple[str, str, str]]:
    found = []
    if run.insecure:
        text = "Its noise comes from --insecure-seed: whoever knows that seed can take it off. The ε below"
        found.append(("alarm", "This run protects nobody.", f"{text} is arithmetic, not a guarantee."))
    if run.disagreements:
        text = f"{'; '.join(run.disagreements)}. This page counts by the ledger."
        found.append(("alarm", "Record and ledger do not agree.", text[0].upper() + text[1:]))
    if not run.private:
        found.append(("alarm", "No privacy.", "ε is infinite: something was released without noise."))
    if run.audit and run.audit["refuted"]:
        found.append(("alarm", "The audit refutes this method.", "See below."))
    if run.private and run.data and run.spent.delta * run.data["records"] > LARGE_DELTA:
        text = f"Times the training records it is {delta_times(run.spent.delta, run.data['records'])}."
        found.append(("note", "δ is large.", text))
    if not run.finished:
        of = f" of {count(run.planned_steps)}" if run.planned_steps else ""
        text = f"{count(_own_steps(run))}{of} steps are charged, and ε is what they have spent so far."
        found.append(("note", "This run has not finished.", text))
    return found


def _figures_of_merit(run: Facts) -> list[tuple[str, str]]:
    rows = [
        ("proven ε" + ("" if run.finished else ", so far"), shown_epsilon(run.spent.proven_epsilon)),
        ("δ", short(run.spent.delta)),
    ]
    if run.data:
        rows.append(("training records", count(run.data["records"])))
        rows.append(("δ × records", f"{run.spent.delta * run.data['records']:.2g}"))
    if run.accuracy is not None:
        rows.append((run.judged_by.replace("_", " "), f"{100 * run.accuracy:.2f} %"))
    return rows


def _guarantee(run: Facts) -> list[str]:
    epsilon, delta = run.spent.proven_epsilon, run.spent.delta
    if not run.private:
        return ["There is none. Whether a person's record was used may be told from the model."]
    factor = (
        f"e^ε ≤ {up(math.exp(epsilon), 3)}" if epsilon < 50 else f"e^{up(epsilon, 2)}, which is no limit,"
    )
    seen = "all weights of all steps, checkpoints included"
    paragraphs = [
        f"Adding one record to the training data, or removing one, changes the probability of anything that "
        f"can be seen of this training ({seen}) by at most a factor of {factor} and δ = {short(delta)} on "
        f"top: the training is (ε, δ)-differentially private with ε = {shown_epsilon(epsilon)}.",
        "It is proven step by step. A step is a Gaussian mechanism on a Poisson sample of the records, with "
        f"the noise multiplier that its certificate below derives from clipping and noise; the "
        f"{count(run.spent.written.steps)} steps of the ledger are composed by "
        f"{ACCOUNTANTS[run.spent.accountant].label} ({run.spent.accountant}).",
    ]
    if run.bands > 1:
        counted = sum(entry.steps for entry in mechanisms(run.spent.written.entries))
        paragraphs.append(
            f"Noise is correlated over {run.bands} steps, and the records take turns in as many parts, each "
            "drawn from when it has its turn. No record can take part more often than in "
            f"{count(counted)} of these mechanisms; that many are composed, at the rate of a turn."
        )
    if run.held_out is not None:
        paragraphs.append(
            f"That does not hold for all of the training data: this run was judged on {run.held_out}."
        )
    if run.insecure:
        paragraphs.insert(0, "What follows would hold if nobody could know the seed of the noise.")
    if run.spent.written.inherited:
        paragraphs.append(
            f"{count(run.spent.written.inherited)} of these steps were spent before the first one of this "
            "run, by the one that it was forked from or by a query on its features, and are counted."
        )
    selection = run.record.get("selection")
    none_yet = "nothing was selected yet, and nothing was counted for it"
    paragraphs.append(
        f"Selection: {selection or none_yet}. If settings were tuned on the same records in other runs, what "
        "those have spent comes on top and is not counted here."
    )
    return paragraphs


def _claims(run: Facts) -> list[tuple[str, str, str]]:
    """Proven first; what is claimed never stands alone, and not at all where nobody claims it."""
    claimed, proven = run.claimed_epsilon, run.spent.proven_epsilon
    if claimed is None or shown_epsilon(claimed) == shown_epsilon(proven):
        return []
    return [
        (
            "proven",
            shown_epsilon(proven),
            f"certified noise multiplier, {ACCOUNTANTS[run.spent.accountant].label}",
        ),
        (
            "claimed",
            shown_epsilon(claimed),
            "what the paper would report; its σ, Rényi accounting",
        ),
    ]


def _trained(run: Facts) -> list[tuple[str, str]]:
    rows, data, settings = [], run.data, run.settings
    if run.model:
        rows.append(("network", f"{run.model}, {count(run.parameters)} parameters"))
    if data:
        shape = " × ".join(map(str, data["input_shape"]))
        rows.append(("data", f"{data['name']}: {count(data['records'])} records to train on"))
        use = "to test on" if run.held_out is None else "held out of the training data"
        rows.append(
            ("images", f"{shape} each, {data['classes']} classes; {count(data['test_records'])} {use}")
        )
    if settings:
        noise = f"{settings['noise']} noise{_bands(run)}"
        rows.append(("method", f"{settings['method']}, {noise}, claim {settings['claim']}"))
    if "created" in run.record:
        rows.append(("date", run.record["created"][:10]))  # no time: how long it took follows the draws
        rows.append(("command", run.record["command"]))
        rows.append(("processes", str(run.record["processes"])))
    return rows or [("", "this run was not made by gredp train, and has no settings on file")]


def _bands(run: Facts) -> str:
    return f" correlated over {run.bands} steps" if run.bands > 1 else ""


def _judged(run: Facts) -> tuple[str, str]:
    """Over and under the figures: whose records they come from, and that ε does not cover them."""
    on, note = (
        "on the test records",
        "The test records are taken to be public: these figures are not covered by ε.",
    )
    if run.held_out is not None:
        on = "on held-out training records"
        note = f"Judged on {run.held_out}. ε covers neither these figures nor those records."
    elif run.settings.get("holdout") is not None:
        on = "on held-out records"
        note = "The test records were held out of the private ones: ε does not cover what is told of them."
    return f"Accuracy and loss {on}", note


def _pictures(runs: Sequence[Facts]) -> list[tuple[Markup, str]]:
    drawn = [
        (figures.course(runs, "accuracy", "epoch"), "Accuracy, epoch by epoch."),
        (
            figures.course(runs, "accuracy", "proven_epsilon"),
            "What each point of accuracy has cost: proven ε spent by then.",
        ),
        (figures.course(runs, "loss", "epoch"), "Loss on the same records, epoch by epoch."),
        (figures.course(runs, "loss", "proven_epsilon"), "The same against the proven ε spent by then."),
    ]
    return [(Markup(picture), caption) for picture, caption in drawn if picture is not None]


def _certificate(run: Facts) -> list[tuple[str, str, str, str]]:
    rows = []
    for release in run.certificate:
        norm, noise = float(release["clip_norm"]), float(release["noise_std"])
        moved = norm / noise if noise > 0 else math.inf
        rows.append((release["name"], number(norm), number(noise), number(moved)))
    return rows


def _noise(run: Facts) -> list[tuple[Markup, str]]:
    noise, shares = (figures.spectrum(run.spectrum, key) for key in ("noise_std", "norm_share"))
    found = []
    if noise is not None and run.private:
        found.append((Markup(noise), "How much noise each layer and frequency gets."))
    if shares is not None:
        text = "Where the gradient is, as the run has learned it privately: the released energy shares."
        found.append((Markup(shares), text))
    return found


def _entries(run: Facts) -> list[tuple[str, str, str, str]]:
    return [
        (count(e.steps), number(e.noise_multiplier), f"{e.sample_rate:.6g}", count(e.bands))
        for e in run.spent.written.entries
    ]


def _own_steps(run: Facts) -> int:
    return run.spent.written.steps - run.spent.written.inherited


def _verdict(run: Facts) -> str:
    lines = count(len(run.spent.written.seals))
    if run.disagreements:
        return f"All {lines} seals match, but {'; '.join(run.disagreements)}."
    if run.finished:
        return f"All {lines} seals match, and the record lists the same steps and the same ε."
    return f"All {lines} seals match."


def _ledger(run: Facts) -> list[tuple[str, str]]:
    written = run.spent.written
    rows = [
        ("steps charged", count(written.steps)),
        ("of them before training began", count(written.inherited)),
        ("starts", count(written.incarnations)),
        ("last line", "cut off by a crash; its step counts" if written.torn else "whole"),
    ]
    if run.finished:
        lost = run.record["steps_lost"]
        rows.insert(
            3, ("lost in crashes", f"{count(lost)} steps" + (", charged all the same" if lost else ""))
        )
    return [*rows, ("last seal", written.seals[-1])]


def _audit(run: Facts) -> dict[str, Any] | None:
    row = run.audit
    if row is None:
        return None
    refuted, delta = row["refuted"], row["delta"]
    text = (
        "The attacker won more often than the claim allows."
        if refuted
        else "The attacks found no contradiction, which is no proof."
    )
    lower = math.floor(1e4 * float(row["audited_epsilon_lower"])) / 1e4
    return {
        "refuted": refuted,
        "verdict": "Refuted." if refuted else "Not refuted.",
        "text": text + " It plays the method of this run at a noise at which few plays tell most.",
        "rows": [
            ("game", f"{row['name']}: {row['game']}"),
            (
                "ε of that game",
                f"{shown_epsilon(row['claimed_epsilon'])} at δ = {short(delta)}, the claim under attack",
            ),
            ("audited", f"at least {lower:.4f}"),
            ("played", f"{row['created'][:10]}: {row['command']}"),
        ],
    }


def _versions(run: Facts) -> list[tuple[str, str]]:
    return [(name, str(version)) for name, version in run.record.get("versions", {}).items()]


def _comparison(runs: Sequence[Facts]) -> dict[str, Any]:
    rows = []
    for run in runs:
        claimed = run.claimed_epsilon
        rows.append(
            (
                run.name
                + (" (INSECURE)" if run.insecure else "")
                + ("" if run.finished else " (not finished)"),
                f"{run.settings['method']}, {run.settings['noise']}{_bands(run)}" if run.settings else "–",
                shown_epsilon(run.spent.proven_epsilon),
                "–" if claimed is None else shown_epsilon(claimed),
                short(run.spent.delta),
                "–"
                if run.accuracy is None
                else f"{100 * run.accuracy:.2f} %" + ("" if run.held_out is None else ", held out"),
                count(run.spent.written.steps),
            )
        )
    delta = min(run.spent.delta for run in runs)
    spent = epsilon([e for run in runs for e in run.spent.written.entries], delta, runs[0].spent.accountant)
    together = f"{shown_epsilon(spent)} at δ = {short(delta)}"
    header = ("run", "method, noise", "proven ε", "claimed ε", "δ", "accuracy", "steps")
    return {
        "header": header,
        "rows": rows,
        "numbers": (2, 3, 4, 5, 6),
        "pictures": _pictures(runs),
        "together": together,
    }


# ------------------------------------------------------------------ numbers
