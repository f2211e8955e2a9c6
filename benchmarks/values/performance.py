"""docs/performance.md, from the records of step time, scaling and memory."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy.optimize import nnls

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from values import RESULTS, Figure, load

#: the largest ratios to plain that we aim for: times by variant, and memory
AIMS = {"dpsgd": 1.25, "gredp": 1.25, "gredp shaped": 1.4, "spectral_dp": 1.4}
MEMORY = 1.5
#: how far ahead of a peer that takes more than so many plain steps; ahead of it everywhere
AHEAD, SLOW_PEER = 1.8, 2.25


def values() -> dict[str, Any]:
    steps, one, scaling = (load(name) for name in ("step_time", "step_time_one_thread", "scaling"))
    networks = steps["networks"]
    variants = _variants(steps)
    largest = scaling["batch"][max(scaling["batch"], key=int)]
    return {
        "record": steps,
        "one": one,
        "scaling": scaling,
        "variants": variants,
        "steps": [_step(name, entry, variants) for name, entry in networks.items()],
        "rule": _rule(networks),
        "aims": AIMS,
        "memory": MEMORY,
        "ahead": AHEAD,
        "slow_peer": SLOW_PEER,
        "over_kept": [
            (name, *[f"{over_kept(entry['variants'], variant):.2f}" for variant in AIMS])
            for name, entry in networks.items()
        ],
        "lenet5": {
            v: 1e3 * networks["lenet5"]["variants"][v]["seconds"] for v in ("plain", "plain kept", "dpsgd")
        },
        "missed": [row for name, entry in networks.items() for row in _missed(name, entry["variants"])],
        "one_thread": [_step(name, entry, _variants(one)) for name, entry in one["networks"].items()],
        "one_thread_variants": _variants(one),
        "shaped": {name: _extra(entry["variants"]) for name, entry in networks.items()},
        "operators": {
            name: _operators({variant: found[name] for variant, found in scaling["profile"].items()})
            for name in scaling["profile"]["plain"]
        },
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


def over_kept(cells: dict[str, Any], variant: str = "dpsgd") -> float:
    """What privacy costs where plain training keeps its memory as well."""
    return float(cells[variant]["seconds"] / cells["plain kept"]["seconds"])


def _variants(record: dict[str, Any]) -> list[str]:
    return list(next(iter(record["networks"].values()))["variants"])[1:]


def _missed(name: str, cells: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """(network, what, aim, measured) of each aim that was not reached."""
    for variant, aim in AIMS.items():
        time, memory = cells[variant]["time_ratio"], cells[variant]["memory_ratio"]
        if time > aim:
            yield name, f"time of {variant}", f"≤ {aim}", f"{time:.2f}"
        if memory > MEMORY:
            yield name, f"memory of {variant}", f"≤ {MEMORY}", f"{memory:.2f}"
    lead = ahead(cells)
    aim = AHEAD if lead * cells["dpsgd"]["time_ratio"] > SLOW_PEER else 1.0
    if lead < aim:
        yield name, "ahead of Opacus", f"≥ {aim}", f"{lead:.2f}"


def _rule(networks: dict[str, Any]) -> dict[str, Any] | None:
    """a and b of: a private step takes a·parameters + b·records·products longer than a plain one.

    Fitted to the step times of dpsgd and of plain training that keeps its memory too, since what the
    allocator takes is no cost of privacy; relative errors alike. None for records without these facts.
    """
    known = {name: entry for name, entry in networks.items() if "products" in entry}
    if len(known) < 3:
        return None
    plain, private = (
        np.array([entry["variants"][v]["seconds"] for entry in known.values()])
        for v in ("plain kept", "dpsgd")
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
