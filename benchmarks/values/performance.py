"""docs/performance.md, from the records of step time, scaling and memory."""

import hashlib
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy.optimize import nnls

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from values import RESULTS, Figure, load

#: the ratios that were aimed for, by network
AIMS = {"lenet5": 1.4, "model3": 1.15, "resnet20": 1.25}


def values() -> dict[str, Any]:
    steps, one, scaling, kept = (
        load(name) for name in ("step_time", "step_time_one_thread", "scaling", "kept_memory")
    )
    networks = steps["networks"]
    variants = list(next(iter(networks.values()))["variants"])[1:]
    largest = scaling["batch"][max(scaling["batch"], key=int)]
    return {
        "record": steps,
        "one": one,
        "scaling": scaling,
        "kept": kept,
        "variants": variants,
        "steps": [_step(name, entry, variants) for name, entry in networks.items()],
        "rule": _rule(networks),
        "aims": [_aim(name, aim, [one, steps]) for name, aim in AIMS.items()],
        "shaped": {name: _extra(entry["variants"]) for name, entry in networks.items()},
        "operators": _operators(scaling["profile"]),
        "kept_changes": [_kept(name, cells) for name, cells in kept["networks"].items()],
        "batches": [_batch(size, cells) for size, cells in scaling["batch"].items()],
        "above": (max(cells["peak_bytes"] for cells in largest.values()) - largest["plain"]["peak_bytes"])
        / 2**20,
        "layers": list(next(iter(scaling["circulant"].values()))),
        "circulant": [
            (n, *[f"{1e3 * seconds:.2f} ms" for seconds in cells.values()])
            for n, cells in scaling["circulant"].items()
        ],
    }


def ahead(cells: dict[str, Any]) -> float:
    """The quicker of the peer's modes over our `dpsgd`."""
    peers = [row["time_ratio"] for v, row in cells.items() if v.startswith("opacus") and "time_ratio" in row]
    return float(min(peers) / cells["dpsgd"]["time_ratio"])


def _step(name: str, entry: dict[str, Any], variants: list[str]) -> tuple[str, ...]:
    cells = entry["variants"]
    shown = [
        f"{row['time_ratio']:.2f} ({row['memory_ratio']:.2f})" if "time_ratio" in row else "fails"
        for row in (cells[variant] for variant in variants)
    ]
    return (name, str(entry["batch"]), *shown, f"{ahead(cells):.2f}×")


def _aim(name: str, aim: float, records: list[dict[str, Any]]) -> tuple[str, ...]:
    """Step time of dpsgd, aim against measurement, for each number of threads."""
    found = [record["networks"][name]["variants"]["dpsgd"]["time_ratio"] for record in records]
    return (name, f"≤ {aim}", *[f"{x:.2f}{'' if x <= aim else ', not reached'}" for x in found])


def _rule(networks: dict[str, Any]) -> dict[str, Any] | None:
    """a and b of: a private step takes a·parameters + b·records·products longer than a plain one.

    Fitted to the step times of dpsgd, relative errors alike; None for records without these facts.
    """
    known = {name: entry for name, entry in networks.items() if "products" in entry}
    if len(known) < 3:
        return None
    plain, private = (
        np.array([entry["variants"][v]["seconds"] for entry in known.values()]) for v in ("plain", "dpsgd")
    )
    sizes = np.array([(e["parameters"], e["batch"] * e["products"]) for e in known.values()], dtype=float)
    costs, _ = nnls(sizes / private[:, None], 1 - plain / private)
    ratios = (plain + sizes @ costs) / plain
    errors = np.abs(ratios * plain / private - 1)
    return {
        "parameter": 1e9 * costs[0],
        "product": 1e12 * costs[1],
        "worst": errors.max(),
        "where": list(known)[errors.argmax()],
        "rows": [
            (name, f"{e['parameters']:,}", f"{e['products']:,}", f"{rule:.2f}", f"{measured:.2f}")
            for (name, e), rule, measured in zip(known.items(), ratios, private / plain)
        ],
    }


def _extra(cells: dict[str, Any]) -> float:
    """What shaped noise costs beyond white noise, in percent."""
    return float(100 * (cells["gredp shaped"]["seconds"] / cells["gredp"]["seconds"] - 1))


def _operators(profile: dict[str, Any]) -> list[tuple[str, ...]]:
    names = list(dict.fromkeys(name for cells in profile.values() for name in cells if name != "all others"))
    return [
        (name, *[f"{cells[name]:.0f}" if name in cells else "" for cells in profile.values()])
        for name in [*names, "all others"]
    ]


def _batch(size: str, cells: dict[str, Any]) -> tuple[str, ...]:
    seconds = [f"{cells[v]['seconds']:.2f} s" for v in ("plain", "dpsgd", "gredp shaped")]
    above = cells["gredp shaped"]["peak_bytes"] - cells["plain"]["peak_bytes"]
    return (size, *seconds, f"{above / 2**20:.0f} MiB")


def _kept(name: str, cells: dict[str, Any]) -> tuple[str, ...]:
    """What keeping freed memory changes, for a plain and for a private step."""
    changes = [
        f"{100 * (cells[f'{variant} kept'][what] / cells[variant][what] - 1):+.0f} %"
        for variant in ("plain", "gredp")
        for what in ("seconds", "peak_bytes")
    ]
    return (name, *changes)


def figures() -> dict[str, Figure]:
    names = ("step_time", "step_time_one_thread", "scaling")
    digest = hashlib.sha256(b"".join((RESULTS / f"{name}.json").read_bytes() for name in names)).hexdigest()
    return {"performance.svg": Figure(lambda path: _draw(path, digest), digest)}


def _draw(path: Path, digest: str) -> None:
    networks, scaling = load("step_time")["networks"], load("scaling")
    plt.rcParams["svg.hashsalt"] = "gredp"
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    shown = ("dpsgd", "gredp", "gredp shaped", "opacus hooks", "opacus ghost")
    for place, variant in enumerate(shown):
        cells = [entry["variants"][variant].get("time_ratio", float("nan")) for entry in networks.values()]
        axes[0, 0].bar([i + 0.16 * (place - 2) for i in range(len(networks))], cells, 0.16, label=variant)
    axes[0, 0].axhline(1, color="black", linewidth=0.8)
    axes[0, 0].set(yscale="log", ylabel="step time / plain", title="Step time relative to plain PyTorch")
    axes[0, 0].set_xticks(range(len(networks)), list(networks), rotation=25, ha="right")
    for axis, key, label, title in (
        (axes[0, 1], "batch", "records in a logical batch", "ResNet-20, 128 records in memory at once"),
        (axes[1, 0], "width", "width of the hidden layers", "MLP, 500 records"),
    ):
        sizes = [int(n) for n in scaling[key]]
        for variant in next(iter(scaling[key].values())):
            axis.plot(sizes, [row[variant]["seconds"] for row in scaling[key].values()], "o-", label=variant)
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds a step", title=title)
    sizes = [int(n) for n in scaling["circulant"]]
    for kind in next(iter(scaling["circulant"].values())):
        axes[1, 1].plot(sizes, [row[kind] for row in scaling["circulant"].values()], "o-", label=kind)
    title = "Fully connected layer, 128 records, forward and backward"
    axes[1, 1].set(xscale="log", yscale="log", xlabel="units", ylabel="seconds", title=title)
    for axis in axes.flat[1:]:  # round numbers, and no others that would overlap
        axis.set_xticks(axis.lines[0].get_xdata(), [f"{n:g}" for n in axis.lines[0].get_xdata()])
        axis.xaxis.set_minor_locator(plt.NullLocator())
    for axis in axes.flat:
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None, "Description": digest})
    plt.close(figure)
