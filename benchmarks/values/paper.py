"""docs/paper.md, from the records in results/paper/."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from gredp.paper.cells import EPOCHS, PAPER, ROWS, TUNING, Cell, Target, cells, title
from gredp.paper.figures import draw_dynamics, draw_epsilon
from gredp.paper.paper import ABLATIONS, CLIPPING, HEADLINE
from gredp.paper.tables import HEADER, Line, by_setting, clipped_layers, lines, paper_figure
from gredp.privacy.accountant import epsilon, round_up
from gredp.privacy.ledger import Entry
from gredp.privacy.paper_claims import claimed_sigma
from values import RESULTS, Figure, load

OUT = RESULTS / "paper"
#: a title, the header and the rows of one table
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
TARGETS: tuple[Target, ...] = (
    "table1", "figure-epsilon", "table2", "table3", "ablation-batch", "ablation-lr",
)  # fmt: skip


def values() -> dict[str, Any]:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(OUT.glob("*-seed*.json"))]
    table1 = best("table1")
    return {
        "paper": PAPER,
        "transfer_lr": 0.001,
        "alpha": max((record["audit"]["alpha"] for record in records if "audit" in record), default=0.01),
        "summary": _summary(table1),
        "early": [line for line in table1 if line.cell.row == "plain" and line.cell.epochs < EPOCHS["full"]],
        "layers": _layers(),
        "one_step": _one_step(),
        "table1": _tables(table1),
        "epsilon": _tables(best("figure-epsilon")),
        "beginning": _beginning(),
        "table2": _tables(best("table2")),
        "table3": _tables(best("table3")),
        "ablation_batch": _over(one_scale("ablation-batch"), "batch_size"),
        "ablation_lr": _over(one_scale("ablation-lr"), "lr"),
        "held_out": TUNING["lenet5"].held_out,
        "tuning": [
            _over(lines(cells("tuning", "full", only=(network,)), OUT), "batch_size", "lr")
            for network, tuning in TUNING.items()
            if tuning.best and tuning.tried
        ],
        "theorems": _theorems(),
        "ends": _ends(),
        "rates": _rates(),
        "norms": _norms(),
        "chosen": _chosen(),
        "less_noise": math.sqrt(2 * PAPER["batch_size"]),
        "readings": _readings(),
        "headlines": _headlines(),
        "full_epochs": EPOCHS["full"],
        "noise": _noise(),
        "missing": [missing for target in TARGETS if (missing := _missing(target))],
        "runs": len(records),
        "hours": sum(record.get("seconds", 0.0) for record in records) / 3600,
    }


def figures() -> dict[str, Figure]:
    return {
        "paper-epsilon.svg": Figure(partial(draw_epsilon, best("figure-epsilon"))),
        "paper-dynamics.svg": Figure(partial(draw_dynamics, best("figure-dynamics"))),
    }


def best(target: Target, only: tuple[str, ...] = ()) -> list[Line]:
    """The largest scale that has a record, for each kind of line."""
    found: dict[tuple[object, ...], Line] = {}
    for scale in ("quick", "full"):
        for line in lines(cells(target, scale, only=only), OUT):
            found[kind(line.cell)] = line
    order = [kind(cell) for cell in cells(target, "full", only=only)]
    return sorted(found.values(), key=lambda line: order.index(kind(line.cell)))


def one_scale(target: Target) -> list[Line]:
    """Lines that may be compared: all of them in full, or else all with fewer epochs."""
    every = cells(target, "full")
    full = lines(every, OUT)
    return full if len(full) == len(every) else lines(cells(target, "quick"), OUT)


def kind(cell: Cell) -> tuple[object, ...]:
    settings = {key: value for key, value in cell.settings.items() if PAPER.get(key) != value}
    return cell.dataset, cell.model.removesuffix("-half"), cell.row, cell.epsilon, *sorted(settings.items())


def _tables(found: Iterable[Line]) -> list[Table]:
    return [(title, HEADER, [line.shown() for line in group]) for title, group in by_setting(found).items()]


def _over(found: list[Line], *names: str) -> Table:
    """One table of lines that differ in these settings, which lead."""
    ablation = names[0] if len(names) == 1 else None
    rows = [
        (*(str(line.cell.settings.get(name, PAPER[name])) for name in names), *line.shown(ablation))
        for line in found
    ]
    cell = found[0].cell
    title = f"{cell.model} on {cell.dataset}, {cell.epochs} epochs"
    return title, (*(name.replace("_", " ") for name in names), *HEADER), rows


def _summary(found: list[Line]) -> list[dict[str, Any]]:
    """For each network that has the rows: claimed, proven, and DP-SGD."""
    said = []
    untuned = [line for line in found if set(line.cell.settings) <= set(PAPER)]
    for network in HEADLINE:
        here = {x.cell.row: x for x in untuned if x.cell.model.removesuffix("-half") == network}
        if {"dpsgd", "gredp-claimed", "gredp"} <= set(here):
            spent = round_up(here["gredp-claimed"].proven, 2)
            said.append(
                {
                    "claimed": here["gredp-claimed"],
                    "proven": here["gredp"],
                    "dpsgd": here["dpsgd"],
                    "spent": spent,
                }
            )
    return said


def _layers() -> dict[str, int]:
    """L of each network with claimed rows, which their proven ε depends on."""
    found: dict[str, int] = {}
    for target in ("table1", "table2"):
        for line in best(target):
            if line.cell.row == "gredp-claimed":
                found.setdefault(line.cell.model, clipped_layers(line.records[0]["guarantee"]))
    return found


def _one_step() -> float:
    """ε that the paper's accountant claims after the first of LeNet-5's steps, on the way to ε = 2."""
    records, delta = 60_000, PAPER["delta"]
    rate = PAPER["batch_size"] / records
    sigma = claimed_sigma(2.0, delta, rate, EPOCHS["full"] * math.ceil(1 / rate))
    return epsilon([Entry(sigma, rate, 1)], delta, "rdp")


def _beginning() -> list[tuple[float, float]]:
    """(accuracy, proven ε) after LeNet-5's first epoch: GReDP as claimed, DP-SGD, Spectral-DP."""
    rows = {line.cell.row: line for line in best("figure-dynamics", ("lenet5",))}
    first = [
        rows[row].records[0]["metrics"][0] for row in ("gredp-claimed", "dpsgd", "spectral-dp") if row in rows
    ]
    return [(100 * m["test_accuracy"], round_up(m["proven_epsilon"], 2)) for m in first]


def _ends() -> list[float]:
    """LeNet-5 at ε = 0.5 and at 2: DP-SGD, then GReDP as claimed."""
    found = {(x.cell.row, x.cell.epsilon): x.mean for x in best("figure-epsilon", ("lenet5",))}
    keys = [(row, eps) for row in ("dpsgd", "gredp-claimed") for eps in (0.5, 2.0)]
    return [found[key] for key in keys if key in found]


def _rates() -> dict[str, float]:
    """The claimed row at the least and the largest learning rate, and the paper's figure at the least."""
    ours = {
        line.cell.settings.get("lr", PAPER["lr"]): line.mean
        for line in one_scale("ablation-lr")
        if line.cell.row == "gredp-claimed"
    }
    return {"least": ours[0.001], "largest": ours[0.1], "paper": ABLATIONS["lr"][0.001]}


def _norms() -> dict[str, float]:
    """The same from Table 3, where a smaller norm is a shorter step; at ε = 0.5."""
    found = {
        x.cell.settings.get("clip_norm", PAPER["clip_norm"]): x.mean
        for x in best("table3", ("lenet5", "gredp-claimed"))
        if x.cell.epsilon == 0.5
    }
    paper = [CLIPPING["lenet5"][norm][0.5] for norm in (0.1, 1.0)]
    return {"small": found[0.1], "usual": found[1.0], "paper_small": paper[0], "paper_usual": paper[1]}


def _chosen() -> list[dict[str, Any]]:
    """What settings of its own do for DP-SGD on transferred networks."""
    found: dict[tuple[str, str], dict[bool, Line]] = {}
    for line in best("table2", ("dpsgd",)):
        if line.cell.epsilon == 2.0:
            where = line.cell.model, line.cell.dataset
            found.setdefault(where, {})["clipping" in line.cell.settings] = line
    return [
        {
            "network": network,
            "dataset": dataset,
            "tuned": here[True].mean,
            "untuned": here[False].mean,
            "paper": paper_figure(replace(here[False].cell, row="gredp-claimed")),
        }
        for (network, dataset), here in found.items()
        if len({line.cell.epochs for line in here.values()}) == 1 < len(here)
    ]


#: answers to what the paper leaves open, and figures of LeNet-5 that they should meet
READINGS = load("paper_readings")["cells"].values()
#: by which every reading is compared
FIGURES = 5


def _readings() -> dict[str, Any]:
    """Each reading's accuracies for the same figures, and how far they are from the paper's on average."""
    tried: dict[str, dict[str, dict[str, Any]]] = {}
    for cell in READINGS:
        figure = cell["figure"]
        if cell["epochs"] == min(c["epochs"] for c in READINGS):
            settings = f"rate {figure['lr']:g}, norm {figure['clip_norm']:g}, ε {figure['epsilon']:g}"
            name = f"{figure['row']}, {settings}"
            tried.setdefault(_reading(cell["reading"]), {})[name] = cell
    tried = {
        reading: ours for reading, ours in tried.items() if len(ours) >= FIGURES
    }  # the others are not done
    found = next(iter(tried.values()))
    shared = [name for name in found if all(name in ours for ours in tried.values())]
    rows = [("**the paper**", *[f"{found[name]['figure']['paper']:g}" for name in shared], "")]
    for reading, ours in tried.items():
        off = [abs(ours[name]["accuracy"] - ours[name]["figure"]["paper"]) for name in shared]
        accuracies = [f"{ours[name]['accuracy']:.1f}" for name in shared]
        rows.append((reading, *accuracies, f"{sum(off) / len(off):.1f}"))
    first = found[shared[0]]
    return {"epochs": first["epochs"], "seed": first["seed"], "figures": shared, "rows": rows}


def _reading(answers: dict[str, Any]) -> str:
    """What differs from the first reading that was tried, which gives all of its answers."""
    base = next(iter(READINGS))["reading"]
    other = [f"{key.replace('_', ' ')} {value}" for key, value in answers.items() if value != base[key]]
    return ", ".join(other) or ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in base.items())


def _headlines() -> list[tuple[str, ...]]:
    """Table 1's rows of LeNet-5 under the reading that fits, as long as the paper trains by our reading."""
    return [
        (
            title(cell["figure"]["row"]),
            f"{cell['figure']['paper']:g}",
            f"{cell['accuracy']:.2f}",
            f"{cell['accuracy'] - cell['figure']['paper']:+.2f}",
            f"{cell['figure']['epsilon']:g}" if cell["figure"]["epsilon"] else "–",
            _proven(cell),
        )
        for cell in sorted(READINGS, key=lambda cell: list(ROWS).index(cell["figure"]["row"]))
        if cell["epochs"] == EPOCHS["full"]
    ]


def _proven(cell: dict[str, Any]) -> str:
    spent = float(cell["guarantee"]["proven_epsilon"])
    return "∞" if math.isinf(spent) else f"{round_up(spent, 2)}"


def _noise() -> list[dict[str, Any]]:
    """Each network at several noise scales, and between which of them it meets the paper's figure."""
    by_network: dict[str, list[dict[str, Any]]] = {}
    for cell in load("paper_noise")["cells"].values():
        by_network.setdefault(cell["network"], []).append(cell)
    return [_noise_of(network, found) for network, found in by_network.items()]


def _noise_of(network: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    by_noise = sorted(found, key=lambda cell: cell["fraction"])
    paper, claimed = by_noise[0]["paper"], HEADLINE[network]
    meets = [cell for cell in by_noise if cell["accuracy"] >= paper]
    below = [cell for cell in by_noise if cell["accuracy"] < paper]
    return {
        "network": network,
        "epochs": by_noise[0]["epochs"],
        "lr": by_noise[0]["lr"],
        "paper": paper,
        "claimed": claimed,
        "rows": [
            (f"{cell['fraction']:.3f}", f"{cell['fraction'] * cell['claimed_sigma']:.3f}", _proven(cell),
             f"{cell['accuracy']:.1f}")
            for cell in by_noise
        ],
        "enough": _proven(meets[-1]) if meets else None,
        "too_little": _proven(below[0]) if meets and below else None,
    }  # fmt: skip


def _missing(target: Target) -> dict[str, Any] | None:
    """What a full run of `target` would add."""
    every = cells(target, "full")
    left = [cell for cell in every if not (OUT / f"{cell.name}.json").exists()]
    short = {kind(line.cell) for line in lines(cells(target, "quick"), OUT)}
    few = sum(kind(cell) in short and cell.seed == 0 for cell in left)
    if not left:
        return None
    done = len(every) - len(left)
    return {"target": target, "runs": len(every), "done": done, "few": few, "none": len(left) - few}


def _theorems() -> dict[str, list[tuple[str, ...]]]:
    verdicts = json.loads((OUT / "theorems.json").read_text(encoding="utf-8"))["verdicts"]
    games = [
        (
            verdict["name"],
            row.get("noise") or row["claim"],
            *(f"{float(row[key]):.3f}" for key in ("claimed_epsilon", "audited_epsilon_lower")),
            "∞" if row["proven_epsilon"] == "inf" else f"{round_up(row['proven_epsilon'], 3)}",
            "refuted" if row["refuted"] else "not refuted",
        )
        for verdict in verdicts
        for row in verdict["measured"]["rows"]
        if "claimed_epsilon" in row
    ]
    said = [(v["name"], v["says"], f"**{v['verdict']}**", v["holds"]) for v in verdicts]
    return {"verdicts": said, "games": games}
