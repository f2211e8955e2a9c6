"""Writes docs/performance.md and its pictures from the records in results/.

python benchmarks/page.py            # write
python benchmarks/page.py --check    # exit status 1 if they are not current
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDS = [
    ROOT / "results" / name for name in ("step_time.json", "step_time_one_thread.json", "scaling.json")
]
KEPT = ROOT / "results" / "kept_memory.json"
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.svg"
TEXT = (Path(__file__).parent / "performance.md.in").read_text()
#: the ratios that were aimed for, by network
AIMS = {"lenet5": 1.4, "model3": 1.15, "resnet20": 1.25}


def step_table(networks: dict) -> str:
    variants = list(next(iter(networks.values()))["variants"])
    rows = [["network", "batch", *variants[1:], "ahead of the best peer"]]
    for name, entry in networks.items():
        cells = entry["variants"]
        shown = [
            f"{row['time_ratio']:.2f} ({row['memory_ratio']:.2f})" if "time_ratio" in row else "fails"
            for row in (cells[v] for v in variants[1:])
        ]
        rows.append([name, str(entry["batch"]), *shown, ahead(cells)])
    return markdown(rows)


def ahead(cells: dict) -> str:
    """The quicker of the peer's modes over our `dpsgd`."""
    peers = [row["time_ratio"] for v, row in cells.items() if v.startswith("opacus") and "time_ratio" in row]
    return f"{min(peers) / cells['dpsgd']['time_ratio']:.2f}×" if peers else "–"


def aims_table(records: list[dict]) -> str:
    """Step time of dpsgd, aim against measurement, for each number of threads."""
    rows = [["network", "aim", *[f"{record['threads']} thread(s)" for record in records]]]
    for name, aim in AIMS.items():
        found = [record["networks"][name]["variants"]["dpsgd"]["time_ratio"] for record in records]
        rows.append([name, f"≤ {aim}", *[f"{x:.2f}{'' if x <= aim else ', not reached'}" for x in found]])
    return markdown(rows)


def profile_table(profile: dict) -> str:
    names = list(dict.fromkeys(name for cells in profile.values() for name in cells if name != "all others"))
    rows = [["operator, ms", *profile]]
    rows += [
        [name, *[f"{cells[name]:.0f}" if name in cells else "" for cells in profile.values()]]
        for name in [*names, "all others"]
    ]
    return markdown(rows)


def batch_table(batch: dict) -> str:
    rows = [["records", "plain", "dpsgd", "shaped", "shaped, peak above plain's"]]
    for size, cells in batch.items():
        seconds = [f"{cells[v]['seconds']:.2f} s" for v in ("plain", "dpsgd", "gredp shaped")]
        above = cells["gredp shaped"]["peak_bytes"] - cells["plain"]["peak_bytes"]
        rows.append([size, *seconds, f"{above / 2**20:.0f} MiB"])
    return markdown(rows)


def kept_table(networks: dict) -> str:
    """What keeping freed memory changes, for a plain and for a private step."""
    rows = [["network", "plain: time", "peak memory", "gredp: time", "peak memory"]]
    for name, cells in networks.items():
        changes = [
            f"{100 * (cells[f'{variant} kept'][what] / cells[variant][what] - 1):+.0f} %"
            for variant in ("plain", "gredp")
            for what in ("seconds", "peak_bytes")
        ]
        rows.append([name, *changes])
    return markdown(rows)


def circulant_table(sizes: dict) -> str:
    kinds = list(next(iter(sizes.values())))
    rows = [["units", *kinds]]
    rows += [[n, *[f"{1e3 * cells[kind]:.2f} ms" for kind in kinds]] for n, cells in sizes.items()]
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def picture(steps: dict, scaling: dict) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gredp"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    names = list(steps["networks"])
    shown = ("dpsgd", "gredp", "gredp shaped", "opacus hooks", "opacus ghost")
    for place, variant in enumerate(shown):
        cells = [steps["networks"][n]["variants"][variant].get("time_ratio", float("nan")) for n in names]
        axes[0, 0].bar([i + 0.16 * (place - 2) for i in range(len(names))], cells, 0.16, label=variant)
    axes[0, 0].axhline(1, color="black", linewidth=0.8)
    axes[0, 0].set(yscale="log", ylabel="step time / plain", title="Step time relative to plain PyTorch")
    axes[0, 0].set_xticks(range(len(names)), names, rotation=25, ha="right")
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
    for axis in axes.flat:
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(PICTURE, metadata={"Date": None, "Description": digest()})


def digest() -> str:
    """Of the records: what the picture says it was drawn from."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in RECORDS)).hexdigest()


def page() -> str:
    steps, one, scaling = (json.loads(path.read_text()) for path in RECORDS)
    kept = json.loads(KEPT.read_text())
    largest = scaling["batch"][max(scaling["batch"], key=int)]
    above = max(largest[v]["peak_bytes"] for v in largest) - largest["plain"]["peak_bytes"]
    shaped = {
        n: e["variants"]["gredp shaped"]["seconds"] / e["variants"]["gredp"]["seconds"] - 1
        for n, e in steps["networks"].items()
    }
    return TEXT.format(
        command=steps["command"],
        created=steps["created"][:10],
        torch=steps["versions"]["torch"],
        threads=steps["threads"],
        rounds=steps["rounds"],
        table=step_table(steps["networks"]),
        aims=aims_table([one, steps]),
        one_command=one["command"],
        profile=profile_table(scaling["profile"]),
        shaped=", ".join(f"{n} {100 * share:+.0f} %" for n, share in shaped.items()),
        kept_command=kept["command"],
        kept=kept_table(kept["networks"]),
        scaling_command=scaling["command"],
        batch=batch_table(scaling["batch"]),
        above=f"{above / 2**20:.0f} MiB",
        circulant=circulant_table(scaling["circulant"]),
    )


def main() -> None:
    if "--check" in sys.argv:
        current = PAGE.read_text() == page() and digest() in PICTURE.read_text()
        sys.exit(0 if current else "docs/performance.md is not current: run benchmarks/page.py")
    PAGE.write_text(page())
    picture(*(json.loads(path.read_text()) for path in (RECORDS[0], RECORDS[2])))


if __name__ == "__main__":
    main()
