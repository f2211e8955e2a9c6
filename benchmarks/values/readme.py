"""The tables of README.md: accuracy from the recipes' records, step time from that of the benchmark."""

from typing import Any

from values import load, markdown
from values.performance import ahead, over_kept
from values.results import KNOWN, final, recipes

#: networks of the benchmark as a reader knows them
NETWORKS = {
    "lenet5": "LeNet-5",
    "model3": "Model-3",
    "resnet20": "ResNet-20",
    "alexnet": "AlexNet",
    "resnet18-2conv": "ResNet-18, last two convolutions",
    "mlp": "MLP, 1.8 M weights",
    "transformer": "Transformer, 2 layers",
}


def values() -> dict[str, Any]:
    networks = load("step_time")["networks"]
    return {"lead": _lead(networks), "accuracy": _accuracy(), "speed": _speed(networks)}


def _lead(networks: dict[str, Any]) -> str:
    """Least and largest ratio over the networks of the table."""
    shown = [networks[name]["variants"] for name in NETWORKS]
    ours = sorted(variants["dpsgd"]["time_ratio"] for variants in shown)
    kept = sorted(map(over_kept, shown))
    theirs = sorted(map(ahead, shown))
    return (
        f"A private step takes {ours[0]:.1f} to {ours[-1]:.1f} times a plain one by default, "
        f"{kept[0]:.1f} to {kept[-1]:.1f} times where plain training\nkeeps its memory as ours does; "
        f"Opacus' faster mode takes {theirs[0]:.1f} to {theirs[-1]:.1f} times ours."
    )


def _accuracy() -> str:
    groups = recipes()
    finals = [final(key, groups[key].get("final", [])) for key in KNOWN]
    rows = [(f"`{recipe}`", eps, ours, paper) for recipe, eps, paper, _, _, ours, *_ in finals]
    header = ("`gredp train --recipe`", "proven ε", "test accuracy, % (seeds)", "paper, at a claimed ε")
    return markdown(rows, header)


def _speed(networks: dict[str, Any]) -> str:
    rows = []
    for name, title in NETWORKS.items():
        cells = networks[name]["variants"]
        times = [cells[v].get("time_ratio") for v in ("dpsgd", "opacus hooks", "opacus ghost")]
        shown = ["fails" if time is None else f"{time:.1f}×" for time in times]
        rows.append((title, shown[0], f"{over_kept(cells):.1f}×", *shown[1:], f"{ahead(cells):.2f}×"))
    ours = "GReDP, DP-SGD", "over plain with memory kept"
    return markdown(rows, ("network", *ours, "Opacus, hooks", "Opacus, ghost", "faster than Opacus by"))
