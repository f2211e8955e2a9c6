"""How much noise and clip the paper's figures allow: part of docs/paper.md, of results/paper_noise.json."""

import math
from typing import Any

from gredp.paper.cells import PAPER
from gredp.paper.paper import CLIPPING, HEADLINE
from gredp.privacy.accountant import round_up
from values import load

#: points that a figure may be off by chance: about two standard deviations of LeNet-5 over seeds
CHANCE = 1.0
#: networks at other noise scales and clipping norms
RUNS = [{"clip_norm": 1.0} | cell for cell in load("paper_noise")["cells"].values()]


def curves() -> list[dict[str, Any]]:
    """Each network at several noise scales, and between which of them it meets the paper's figure."""
    alike: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for cell in RUNS:
        alike.setdefault((cell["network"], cell["epochs"], cell["lr"]), []).append(cell)
    places = sorted(alike, key=lambda place: ([*HEADLINE].index(str(place[0])), place[1:]))
    return [_curve(alike[place]) for place in places]


def _curve(found: list[dict[str, Any]]) -> dict[str, Any]:
    by_noise = sorted(found, key=lambda cell: (_share(cell), cell["clip_norm"], cell["seed"]))
    return {
        **{key: by_noise[0][key] for key in ("network", "epochs", "lr", "paper")},
        "claimed": HEADLINE[by_noise[0]["network"]],
        "rows": [
            (
                *(f"{_share(cell):.3g}", f"{cell['clip_norm']:g}", str(cell["seed"])),
                *(shown_proven(cell), f"{cell['accuracy']:.1f}"),
            )
            for cell in by_noise
        ],
        **_reached(by_noise),
    }


def _share(cell: dict[str, Any]) -> float:
    """Its noise multiplier over the claimed one."""
    return cell["fraction"] / cell["clip_norm"]


def _reached(by_noise: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest noise multiplier that meets the paper's figure, and the least above it that does not."""
    meets = [cell for cell in by_noise if cell["accuracy"] >= cell["paper"]]
    most = _share(meets[-1]) if meets else -1.0  # of several with one multiplier, one is enough
    below = [cell for cell in by_noise if cell["accuracy"] < cell["paper"] and _share(cell) > most]
    return {
        "from_none": by_noise[0]["fraction"] == 0,
        "enough": shown_proven(meets[-1]) if meets else None,
        "too_little": shown_proven(below[0]) if meets and below else None,
    }


def longest(fraction: float, clip_norm: float) -> dict[str, dict[str, Any]]:
    """By network the run of most epochs with this share of the claimed noise, clipped at this norm."""
    alike = [
        run
        for run in RUNS
        if run["clip_norm"] == clip_norm and math.isclose(run["fraction"], fraction, rel_tol=1e-3)
    ]
    found = {run["network"]: run for run in sorted(alike, key=lambda run: run["epochs"])}
    return {network: found[network] for network in HEADLINE if network in found}


def public_code() -> list[tuple[str, ...]]:
    """For each network the longest run with the noise of public code, and the least ε that is enough."""
    batch, near = PAPER["batch_size"], nearest()
    return [
        (
            *(network, str(run["epochs"]), f"{run['paper']:g}"),
            *_with_difference(run),
            *(_with_difference(near[network]) if network in near else ("", "")),
        )
        for network, run in longest(math.sqrt(batch), batch).items()
    ]


def _with_difference(run: dict[str, Any]) -> tuple[str, str]:
    return f"{run['accuracy']:.1f} ({run['accuracy'] - run['paper']:+.1f})", shown_proven(run)


def nearest() -> dict[str, dict[str, Any]]:
    """For each network the run of the least ε that comes near the paper's figure, if one does."""
    near = [run for run in RUNS if run["accuracy"] > run["paper"] - CHANCE]
    found = {run["network"]: run for run in sorted(near, key=lambda run: (_share(run), run["accuracy"]))}
    return {network: found[network] for network in HEADLINE if network in found}


def two_norms() -> dict[str, Any]:
    """A tenth of the claimed noise multiplier by a norm of 10 and by less noise, beside the paper's norms."""
    settings = {(1.0, 10.0): 1.0, (0.1, 1.0): 0.1}  # (noise, norm) to the paper's norm
    runs: dict[tuple[str, int], dict[float, dict[str, Any]]] = {}
    for run in RUNS:
        norm = settings.get((run["fraction"], run["clip_norm"]))
        if norm:
            runs.setdefault((run["network"], run["epochs"]), {})[norm] = run
    rows, off = [], {}
    for (network, epochs), here in runs.items():
        if len(here) == len(settings):
            ours = [here[norm]["accuracy"] for norm in (1.0, 0.1)]
            printed = [CLIPPING[network][norm][HEADLINE[network]] for norm in (1.0, 0.1)]
            changes = [small - usual for usual, small in (ours, printed)]
            off[network] = abs(changes[0] - changes[1])
            figures = [f"{a:.1f}, {b:.1f} ({by:+.1f})" for (a, b), by in zip((ours, printed), changes)]
            rows.append((network, str(epochs), shown_proven(here[1.0]), *figures))
    return {"rows": rows, "misfit": max(off, key=lambda network: off[network], default="")}


def shown_proven(run: dict[str, Any]) -> str:
    """ε that is proven, rounded up; two digits of a very large one."""
    spent = float(run["guarantee"]["proven_epsilon"])
    if math.isinf(spent):
        return "∞"
    if spent < 1000:
        return f"{round_up(spent, 2)}"
    unit = 10 ** (math.floor(math.log10(spent)) - 1)
    return f"{math.ceil(spent / unit) * unit:.1e}" if spent > 1e6 else f"{math.ceil(spent):,}"
