"""docs/paper.md, from the records in results/paper/."""

import json
import math
import statistics
from collections.abc import Iterable
from functools import partial
from itertools import pairwise, product
from typing import Any

from gredp.paper.cells import (
    AUGMENTED,
    BASELINE,
    CLIP_NORMS,
    EPOCHS,
    EPSILONS,
    LARGE,
    PAPER,
    SHORTER,
    TUNING,
    Cell,
    Target,
    cells,
    title,
)
from gredp.paper.figures import draw_dynamics, draw_epsilon
from gredp.paper.paper import ABLATIONS, CLIPPING, FROM_SCRATCH, HEADLINE
from gredp.paper.tables import HEADER, Line, by_setting, clipped_layers, lines, paper_figure, record_of
from gredp.privacy.accountant import epsilon, round_up
from gredp.privacy.ledger import Entry
from gredp.privacy.paper_claims import claimed_sigma
from values import RESULTS, Figure, load
from values import _paper_noise as noise

OUT = RESULTS / "paper"
#: a title, the header and the rows of one table
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
TARGETS: tuple[Target, ...] = (
    "table1", "figure-epsilon", "table2", "table3", "ablation-batch", "ablation-lr",
)  # fmt: skip
CLAIMED = ("lenet5", "gredp-claimed")
#: the paper's order of the rows, best first
ORDER = ("plain", "gredp-claimed", "spectral-dp", "dpsgd")


def values() -> dict[str, Any]:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(OUT.glob("*-seed*.json"))]
    table1, table2 = recorded("table1"), recorded("table2")
    untuned = [line for line in (*table1, *table2) if not line.cell.changed]
    compared: dict[tuple[str, str], dict[str, Any]] = {}
    for line in untuned:
        if line.cell.epsilon == HEADLINE.get(line.cell.model, 2.0):
            place = line.cell.model, line.cell.dataset
            compared.setdefault(place, {})[line.cell.row] = _compared(line)
    lenet5 = compared.pop(("lenet5", "mnist"))
    larger = {where: rows for where, rows in compared.items() if {"plain", "gredp-claimed"} <= rows.keys()}
    of_seeds = statistics.mean(
        statistics.variance(line.accuracies) for line in untuned if len(line.records) > 1
    )
    order = _order([*untuned, *recorded("figure-epsilon")], of_seeds)
    return {
        "paper": PAPER,
        "epochs": EPOCHS,
        "shorter": SHORTER,
        "alpha": max((record["audit"]["alpha"] for record in records if "audit" in record), default=0.01),
        "lenet5": lenet5,
        "larger": [_short(where, rows) for where, rows in larger.items()],
        "half": [network for network in LARGE if network in {model for model, _ in compared}],
        "worst": max(abs(lenet5[row]["off"]) for row in ORDER),
        "networks": [x for x in HEADLINE if x != "lenet5" and not any(x == model for model, _ in larger)],
        "order": order,
        "broken": [
            (where, rows, ours)
            for where, _, rows, _, ours, _, verdict in order
            if verdict.startswith("not met") and rows.endswith(title("dpsgd"))
        ],
        "of_seeds": math.sqrt(of_seeds),
        "baseline": _baseline(table1, of_seeds),
        "dense": _dense(untuned, of_seeds),
        "layers": {
            x.cell.model: clipped_layers(x.records[0]["guarantee"])
            for x in (*untuned, *recorded("figure-epsilon"))
            if x.cell.row == "gredp-claimed"
        },
        "one_step": _one_step(),
        "table1": _tables(table1),
        "epsilon": _tables(recorded("figure-epsilon")),
        "ends": {(x.cell.row, x.cell.epsilon): x.mean for x in recorded("figure-epsilon", "lenet5")},
        "beginning": _beginning(),
        "table2": _tables(table2),
        "chosen": [(x, _claimed(x.cell)) for x in table2 if _tuned(x.cell) and x.cell.row == "dpsgd"],
        "table3": _tables(recorded("table3")),
        "norms": _norms(),
        "rates": _rates(),
        "ablation_batch": _over(recorded("ablation-batch"), "batch_size"),
        "ablation_lr": _over(recorded("ablation-lr"), "lr"),
        "held_out": TUNING["lenet5"].held_out,
        "tuning": _over(recorded("tuning"), "batch_size", "lr"),
        "theorems": _theorems(),
        "less_noise": math.sqrt(2 * PAPER["batch_size"]),
        "readings": _readings(),
        "literal": _literal(),
        "noise": noise.curves(),
        "held_back": _held_back(untuned),
        "met": [(x, noise.shown_proven(run)) for x, run in noise.nearest().items() if x in LARGE],
        "public_code": noise.public_code(),
        "resnet20": {
            line.cell.row: (f"{round_up(line.proven, 2):g}", line.mean)
            for line in untuned
            if line.cell.model == "resnet20"
        },
        "dead": min(cell["accuracy"] for cell in noise.RUNS),
        "took": {
            optimizer: _first_above(45, changed) for optimizer, changed in (("adam", {}), ("sgd", BASELINE))
        },
        "root": math.sqrt(PAPER["batch_size"]),
        "two_norms": noise.two_norms(),
        "table3_resnet20": CLIPPING["resnet20"],
        "unaugmented": _unaugmented(),
        "missing": {target: _missing(target) for target in TARGETS},
        "runs": len(records),
        "hours": sum(record.get("seconds", 0.0) for record in records) / 3600,
    }


def figures() -> dict[str, Figure]:
    return {
        "paper-epsilon.svg": Figure(partial(draw_epsilon, recorded("figure-epsilon"))),
        "paper-dynamics.svg": Figure(partial(draw_dynamics, recorded("figure-dynamics"))),
    }


def recorded(target: Target, *only: str) -> list[Line]:
    return lines(cells(target, "full", only=only), OUT)


def _tuned(cell: Cell) -> bool:
    """Whether its settings are ours, not the paper's."""
    return "clipping" in cell.settings


def _claimed(cell: Cell) -> float | None:
    """What the paper prints for its own method there."""
    return paper_figure(Cell(cell.dataset, cell.model, "gredp-claimed", cell.epsilon, cell.epochs))


def _compared(line: Line) -> dict[str, Any]:
    return {
        "ours": line.mean,
        "seeds": len(line.records),
        "paper": _paper(line),
        "off": line.mean - _paper(line),
        "asked": line.cell.epsilon,
        "proven": round_up(line.proven, 2),
    }


def _short(where: tuple[str, str], rows: dict[str, Any]) -> tuple[str, ...]:
    """Without noise, as claimed, and what is left with noise for a proven ε as large."""
    plain, claimed = rows["plain"], rows["gredp-claimed"]
    with_paper = (f"{row['ours']:.1f} ({row['paper']:.1f})" for row in (plain, claimed))
    left = (f"{rows[name]['ours']:.1f}" if name in rows else "" for name in ("gredp", "dpsgd"))
    return (" on ".join(where), *with_paper, f"{claimed['asked']:g}", f"{claimed['proven']:g}", *left)


def _order(found: list[Line], of_seeds: float) -> list[tuple[str, ...]]:
    """Each row of a network against the next in the paper's order, and what chance may do to it.

    A row of one seed is taken to vary by `of_seeds`, as others do.
    """
    alike: dict[tuple[str, str], dict[str, Line]] = {}
    for line in found:
        where = f"{line.cell.model} on {line.cell.dataset}", f"{line.cell.epsilon:g}"
        alike.setdefault(where, {}).setdefault(line.cell.row, line)
    return [
        (*where, *_against(rows[better], rows[worse], of_seeds))
        for where, rows in alike.items()
        for better, worse in pairwise(ORDER)
        if better in rows and worse in rows
    ]


def _against(better: Line, worse: Line, of_seeds: float) -> tuple[str, ...]:
    gap, printed = better.mean - worse.mean, _paper(better) - _paper(worse)
    parts = [
        (statistics.variance(line.accuracies) if len(line.records) > 1 else of_seeds) / len(line.records)
        for line in (better, worse)
    ]
    error = math.sqrt(sum(parts))
    alone = min(len(better.records), len(worse.records)) == 1
    verdict = "not told apart" if abs(gap) < 2 * error else "met" if gap > 0 else "not met"
    return (
        f"{title(better.cell.row)} – {title(worse.cell.row)}",
        "–" if math.isnan(printed) else f"{printed:+.2f}",
        f"{gap:+.2f}",
        f"({error:.2f})" if alone else f"{error:.2f}",
        f"{verdict}, one seed" if alone else verdict,
    )


def _baseline(table1: list[Line], of_seeds: float) -> dict[str, Any]:
    """DP-SGD by SGD and by the optimizer of the other rows, and the row that the paper has next above it."""
    lines: dict[str, dict[str, Line]] = {}
    for line in table1:
        name = "sgd" if line.cell.changed == BASELINE else "" if line.cell.changed else line.cell.row
        lines.setdefault(line.cell.model, {})[name] = line
    rows, nearer, aheads = [], 0, {}
    for network, here in lines.items():
        if {"sgd", "dpsgd", "spectral-dp"} <= here.keys():
            sgd, adam, spectral = here["sgd"], here["dpsgd"], here["spectral-dp"]
            _, _, ahead, error, _ = _against(spectral, sgd, of_seeds)
            printed = _paper(sgd)
            means = (f"{line.mean:.2f}" for line in (sgd, adam, spectral))
            rows.append((network, f"{sgd.cell.epsilon:g}", f"{printed:g}", *means, ahead, error))
            nearer += abs(sgd.mean - printed) < abs(adam.mean - printed)
            aheads[f"{network} on {sgd.cell.dataset}"] = ahead
    return {"rows": rows, "nearer": nearer, "ahead": aheads, **BASELINE}


def _first_above(percent: float, changed: dict[str, object]) -> int | None:
    """The epoch in which DP-SGD brought Model-3 there."""
    for line in recorded("table1", "model3", "dpsgd"):
        if line.cell.changed == changed:
            for metrics in line.records[0]["metrics"]:
                if 100 * metrics["test_accuracy"] > percent:
                    return int(metrics["epoch"])
    return None


def _dense(untuned: list[Line], of_seeds: float) -> list[tuple[str, ...]]:
    """DP-SGD in dense layers and in block-circulant ones: proven GReDP, whose noise is the same otherwise."""
    rows: dict[str, dict[str, Line]] = {}
    for line in untuned:
        rows.setdefault(f"{line.cell.model} on {line.cell.dataset}", {})[line.cell.row] = line
    found = []
    for where, here in rows.items():
        if {"dpsgd", "gredp"} <= here.keys():
            dense, circulant = here["dpsgd"], here["gredp"]
            _, _, gap, error, _ = _against(dense, circulant, of_seeds)
            means = (f"{line.mean:.2f}" for line in (dense, circulant))
            found.append((where, f"{dense.cell.epsilon:g}", *means, gap, error))
    return found


def _tables(found: Iterable[Line]) -> list[Table]:
    return [(title, HEADER, [line.shown() for line in group]) for title, group in by_setting(found).items()]


def _over(found: list[Line], *names: str) -> list[Table]:
    """For each network one table of lines that differ in these settings, which lead."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for line in found:
        cell = line.cell
        values = [str(cell.settings.get(name, PAPER[name])) for name in names]
        title = f"{cell.model} on {cell.dataset}, {cell.epochs} epochs"
        tables.setdefault(title, []).append((*values, *line.shown()))
    header = (*(name.replace("_", " ") for name in names), *HEADER)
    return [(title, header, rows) for title, rows in tables.items()]


def _one_step() -> float:
    """ε that the paper's accountant claims after the first of LeNet-5's steps, on the way to ε = 2."""
    records, delta = 60_000, PAPER["delta"]
    rate = PAPER["batch_size"] / records
    sigma = claimed_sigma(2.0, delta, rate, EPOCHS["lenet5"] * math.ceil(1 / rate))
    return epsilon([Entry(sigma, rate, 1)], delta, "rdp")


def _beginning() -> list[tuple[float, float]]:
    """(accuracy, proven ε) after LeNet-5's first epoch: GReDP as claimed, DP-SGD, Spectral-DP."""
    rows = {line.cell.row: line for line in recorded("figure-dynamics", "lenet5")}
    first = [
        rows[row].records[0]["metrics"][0] for row in ("gredp-claimed", "dpsgd", "spectral-dp") if row in rows
    ]
    return [(100 * m["test_accuracy"], round_up(m["proven_epsilon"], 2)) for m in first]


def _norms() -> dict[str, list[tuple[float, float, float]]]:
    """By network (ε, our change, the paper's) from the usual norm to 0.1."""
    found = {
        (line.cell.model, line.cell.epsilon, line.cell.settings["clip_norm"]): line
        for line in recorded("table3", "gredp-claimed")
    }
    norms: dict[str, list[tuple[float, float, float]]] = {}
    for network, eps in product(HEADLINE, EPSILONS):
        if {(network, eps, norm) for norm in CLIP_NORMS} <= found.keys():
            small, usual = (found[network, eps, norm] for norm in CLIP_NORMS)
            changes = small.mean - usual.mean, _paper(small) - _paper(usual)
            norms.setdefault(network, []).append((eps, *changes))
    return norms


def _rates() -> list[tuple[float, float, float]]:
    """(rate, ours, the paper's) of LeNet-5 for all rates that the paper has a figure for, or nothing."""
    found = {x.cell.settings["lr"]: x for x in recorded("ablation-lr", *CLAIMED)}
    rates = ABLATIONS["lr"]
    return [(lr, found[lr].mean, rates[lr]) for lr in rates] if rates.keys() <= found.keys() else []


def _paper(line: Line) -> float:
    return paper_figure(line.cell) or math.nan


#: answers to what the paper leaves open, and figures of LeNet-5 that they should meet
READINGS = load("paper_readings")["cells"].values()
#: by which every reading is compared
FIGURES = 5
LITERAL = {
    "gredp-claimed": "each kernel's own grid, noise once for a batch",
    "gredp-padded": "the padded grid",
    "gredp-each-sample": "noise for each sample",
}


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
    rows = [("**the paper**", *[f"{found[name]['figure']['paper']:g}" for name in shared], "", "")]
    for reading, ours in tried.items():
        here = [ours[name] for name in shared]
        off = {name: abs(cell["accuracy"] - cell["figure"]["paper"]) for name, cell in zip(shared, here)}
        stable = [off[name] for name in shared if found[name]["figure"]["lr"] < 0.1]
        means = [f"{statistics.mean(part):.1f}" for part in (off.values(), stable)]
        rows.append((reading, *[f"{cell['accuracy']:.1f}" for cell in here], *means))
    first = found[shared[0]]
    return {"epochs": first["epochs"], "seed": first["seed"], "figures": shared, "rows": rows}


def _reading(answers: dict[str, Any]) -> str:
    """What differs from the first reading that was tried, which gives all of its answers."""
    base = next(iter(READINGS))["reading"]
    other = [f"{key.replace('_', ' ')} {value}" for key, value in answers.items() if value != base[key]]
    return ", ".join(other) or ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in base.items())


def _literal() -> list[tuple[str, ...]]:
    """The same figure by Algorithm 2 as it is printed, and as the tables read it."""
    wanted = {"epsilon": 2.0, "lr": PAPER["lr"], "clip_norm": PAPER["clip_norm"]}
    first = next(iter(READINGS))
    return [
        (LITERAL[cell["figure"]["row"]], f"{cell['accuracy']:.2f}", noise.shown_proven(cell))
        for cell in READINGS
        if (cell["reading"], cell["epochs"]) == (first["reading"], first["epochs"])
        and cell["figure"]["row"] in LITERAL
        and wanted.items() <= cell["figure"].items()
    ]


def _unaugmented() -> dict[str, float]:
    """Model-3 without noise on images as they are."""
    record = load("paper_unaugmented")
    best = max(epoch["test_accuracy"] for epoch in record["metrics"])
    here = {"epochs": len(record["metrics"]), "last": 100 * record["test_accuracy"], "best": 100 * best}
    return here | {"paper": FROM_SCRATCH["model3"]["plain"][0]}


def _held_back(untuned: list[Line]) -> list[tuple[str, ...]]:
    """Networks clipped but not noised, and their rows without either and with both after as many epochs."""
    rows: dict[str, dict[str, Line]] = {}
    for line in untuned:
        rows.setdefault(line.cell.model, {})[line.cell.row] = line
    found = []
    for network, clipped in noise.longest(0.0, 1.0).items():
        if network == "lenet5" or network in AUGMENTED:  # of another rate, or of other images
            continue
        plain, claimed = (
            100 * rows[network][row].records[0]["metrics"][clipped["epochs"] - 1]["test_accuracy"]
            for row in ("plain", "gredp-claimed")
        )
        figures = plain, clipped["accuracy"], claimed
        found.append((network, str(clipped["epochs"]), *(f"{figure:.1f}" for figure in figures)))
    return found


def _missing(target: Target) -> list[dict[str, Any]]:
    """For each network what a run of `target` would add to the paper's rows."""
    networks: dict[str, list[Cell]] = {}
    for cell in cells(target, "full"):
        if not _tuned(cell):
            networks.setdefault(cell.model, []).append(cell)
    found = []
    for network, every in networks.items():
        left = [cell for cell in every if record_of(OUT, cell) is None]
        if left:
            weights = " --pretrained WEIGHTS" if left[0].transferred else ""
            command = f"gredp reproduce {target} --scale full --only {network}{weights}"
            hours = sum(cell.work for cell in left) / 3600
            counts = {"runs": len(every), "done": len(every) - len(left), "hours": max(1, round(hours))}
            found.append({"network": network, "command": command, **counts})
    return found


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
