"""docs/results.md, from the records of recipes, tables, scikit-learn's estimators and correlated noise."""

import json
import math
import statistics
from collections import defaultdict
from typing import Any

from accuracy import HELD_OUT
from scipy.stats import t as student

from gredp.privacy.accountant import round_up
from values import RESULTS, load

#: (recipe, ε) → what is aimed at, what the paper claims, what the literature has, in percent
KNOWN = {
    ("mnist", 1.0): (98.5, "96.5 (LeNet-5)", "98.1 at ε = 1.2, scattering (Tramèr and Boneh 2021)"),
    ("fashion-mnist", 1.0): (89.0, "–", "86.1 at ε = 2.7, bounded activations (Papernot et al. 2021)"),
    ("cifar10", 1.0): (74.0, "–", "72.3, priors learned from random processes (Tang et al. 2023)"),
    ("cifar10", 1.5): (76.0, "59.31 (ResNet-20)", "–"),
    ("cifar10", 2.0): (77.0, "67.87 (Model-3)", "69.4 (DPSUR, Fu et al. 2024)"),
    ("cifar100", 2.0): (35.0, "–", "–"),
    ("cifar10-transfer", 2.0): (
        86.0,
        "80.86 (ResNet-18-2Conv)",
        "above 90 with larger networks and all layers (De et al. 2022)",
    ),
    ("cifar100-transfer", 2.0): (55.0, "45.12 (ResNet-18-2Conv)", "–"),
}

#: (recipe, ε) → what was changed → records
Groups = dict[tuple[str, float], dict[str, list[dict[str, Any]]]]


def values() -> dict[str, Any]:
    groups, tables, bands = recipes(), load("tables"), load("bands")
    return {
        "held_out": HELD_OUT,
        "finals": [final(key, groups[key].get("final", [])) for key in KNOWN],
        "below": [line for key in KNOWN for line in _below(key, groups[key].get("final", []))],
        "ablations": [
            (recipe, epsilon, _ablation(found))
            for (recipe, epsilon), found in groups.items()
            if "as it is" in found
        ],
        "features": load("features"),
        "feature_rows": [_feature(row) for row in load("features")["rows"]],
        "epsilons": list(tables["rows"][0]["accuracy"]),
        "tables": [_table(row) for row in tables["rows"]],
        "own_images": load("own_images"),
        "own_image_rows": [_images(row) for row in load("own_images")["rows"]],
        "lstm": load("lstm"),
        "lstm_rows": _recurrent(load("lstm")),
        "clipping": load("clipping"),
        "clipping_norms": [f"{norm:g}" for norm in _norms(load("clipping"))],
        "clipping_rows": _clipping(load("clipping")),
        "sklearn": load("sklearn"),
        "sklearn_rows": _sklearn(load("sklearn")),
        "bands": bands,
        "band_counts": [row["bands"] for row in _cases(bands)[0]],
        "band_errors": [row for case in _cases(bands) for row in _errors(case)],
        "band_accuracies": [
            (f"{case[0]['epsilon']:g}", str(case[0]["epochs"]), *map(_with_error, case))
            for case in _cases(bands)
        ],
        "band_choices": [_choice(*pair) for pair in zip(_cases(bands), bands["auto"], strict=True)],
    }


def recipes() -> Groups:
    groups: Groups = defaultdict(lambda: defaultdict(list))
    for path in sorted((RESULTS / "accuracy").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        groups[record["recipe"], record["settings"]["epsilon"]][record["what"]].append(record)
    return groups


def final(key: tuple[str, float], records: list[dict[str, Any]]) -> tuple[str, ...]:
    aim, paper, literature = KNOWN[key]
    known = (key[0], f"{key[1]:g}", paper, literature, f"{aim:g}")
    if not records:
        return (*known, "not run yet", "–", "–")
    spent = max(float(record["guarantee"]["proven_epsilon"]) for record in records)
    minutes = statistics.median(record.get("seconds", 0.0) for record in records) / 60
    accuracy = _mean([record["test_accuracy"] for record in records])
    return (*known, accuracy, f"{round_up(spent, 3)}", f"{minutes:.0f}")


def _below(key: tuple[str, float], records: list[dict[str, Any]]) -> list[str]:
    """The recipe and its mean, not rounded up to its target, where it misses it."""
    mean, aim = 100 * statistics.mean([record["test_accuracy"] for record in records] or [1.0]), KNOWN[key][0]
    return [f"{key[0]} at ε = {key[1]:g} ({mean:.3f} for {aim:g})"] if mean < aim else []


def _mean(accuracies: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(accuracies):.2f} ({len(accuracies)})" if len(accuracies) > 1 else ""
    return f"{100 * statistics.mean(accuracies):.2f}{spread}"


def _ablation(found: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """The recipe, then what was changed, best first, and whether Student's t calls the difference chance."""
    scores = {
        what: [record["validation_accuracy"] for record in records]
        for what, records in found.items()
        if what != "final"
    }
    base = scores.pop("as it is")
    finals = [record["test_accuracy"] for record in found["final"]]
    spread, quantile = statistics.stdev(finals), float(student.ppf(0.975, len(finals) - 1))
    rows = [("as it is", _mean(base), "", "")]
    for what, here in sorted(scores.items(), key=lambda pair: (-statistics.mean(pair[1]), pair[0])):
        gain = statistics.mean(here) - statistics.mean(base)
        chance = quantile * spread * math.sqrt(1 / len(here) + 1 / len(base))
        rows.append((what, _mean(here), f"{100 * gain:+.2f}", "no" if abs(gain) <= chance else "yes"))
    return rows


def _feature(row: dict[str, Any]) -> tuple[str, ...]:
    accuracy = f"{100 * row['accuracy']:.1f}"
    if not row["kind"]:
        return "", f"**{row['changed']}**", accuracy, ""
    return row["kind"], row["changed"], accuracy, f"{100 * row['difference']:+.1f} ± {100 * row['error']:.1f}"


def _table(row: dict[str, Any]) -> tuple[str, ...]:
    cells = [*row["accuracy"].values(), row["logistic_regression"]]
    shown = [f"{100 * statistics.mean(c):.1f} ({100 * min(c):.1f}–{100 * max(c):.1f})" for c in cells]
    return (row["data"], str(row["records"]), str(row["features"]), *shown)


def _images(row: dict[str, Any]) -> tuple[str, ...]:
    private = "private" if float(row["proven_epsilon"]) < math.inf else "plain"
    counts = f"{row['records']} / {row['test_records']}"
    accuracy = f"{100 * row['test_accuracy']:.1f}"
    return (row["data"], private, counts, accuracy, f"{row['seconds']:.0f}", str(row["peak_megabytes"]))


def _recurrent(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """Plain and private training: steps, the largest ε, the mean accuracy and its range over the seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault(row["training"], []).append(row)
    shown = []
    for training, rows in found.items():
        accuracies = [100 * row["test_accuracy"] for row in rows]
        spent = [row["proven_epsilon"] for row in rows if row["proven_epsilon"] is not None]
        accuracy = f"{statistics.mean(accuracies):.2f} ({min(accuracies):.2f}–{max(accuracies):.2f})"
        epsilon = f"{round_up(max(spent), 3)}" if spent else "–"
        shown.append((training, str(rows[0]["steps"]), epsilon, accuracy))
    return shown


def _norms(record: dict[str, Any]) -> list[float]:
    return sorted({row["norm"] for row in record["rows"]})


def _clipping(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """Fixed and adaptive norms, one column for each first norm: mean and range of the seeds."""
    found = {(row["clipping"], row["norm"]): row["accuracies"] for row in record["rows"]}
    named = {"flat": "fixed", "adaptive": "adaptive"}
    return [
        (named[clipping], *(_mean_and_range(found[clipping, norm]) for norm in _norms(record)))
        for clipping in named
    ]


def _mean_and_range(accuracies: list[float]) -> str:
    return f"{statistics.mean(accuracies):.1f} ({min(accuracies):.1f} to {max(accuracies):.1f})"


def _sklearn(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each table and ε: ours, diffprivlib's better scaling, scikit-learn without privacy."""

    def shown(cells: dict[str, list[float]]) -> str:
        best = max(cells.values(), key=statistics.mean)
        return f"{100 * statistics.mean(best):.1f} ({100 * min(best):.1f}–{100 * max(best):.1f})"

    ours, theirs = record["ours"]["accuracy"], record["diffprivlib"]["accuracy"]
    return [
        (name, epsilon, shown(ours[epsilon][name]), shown(theirs[epsilon][name]), shown(plain))
        for name, plain in record["plain"].items()
        for epsilon in ours
    ]


def _cases(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Rows of one ε and number of epochs together, b = 1 first."""
    found: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault((row["epsilon"], row["epochs"]), []).append(row)
    return [sorted(rows, key=lambda row: row["bands"]) for rows in found.values()]


def _errors(case: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Noise that is left, relative to b = 1."""
    base = case[0]
    return [
        (
            f"{row['epsilon']:g}",
            str(row["epochs"]),
            str(row["bands"]),
            f"{row['noise_multiplier']:.3f}",
            f"{row['prefix_error'] / base['prefix_error']:.3f}",
            f"{row['prefix_error_measured'] / base['prefix_error']:.3f}",
            f"{row['momentum_error'] / base['momentum_error']:.3f}",
        )
        for row in case
    ]


def _with_error(row: dict[str, Any]) -> str:
    return f"{100 * row['test_accuracy']:.1f} ± {100 * row['standard_error']:.1f}"


def _choice(case: list[dict[str, Any]], auto: dict[str, Any]) -> dict[str, Any]:
    """What `auto` took, which knows no data, and how it did against b = 1, by their own standard errors."""
    base = case[0]
    said = {"epsilon": base["epsilon"], "epochs": base["epochs"], "bands": auto["bands"], "gain": None}
    chosen = next((row for row in case if row["bands"] == auto["bands"]), base)
    if chosen is not base:
        gain = 100 * (chosen["test_accuracy"] - base["test_accuracy"])
        error = 100 * math.hypot(chosen["standard_error"], base["standard_error"])
        said |= {"gain": gain, "error": error, "significant": abs(gain) > 2 * error}
    return said
