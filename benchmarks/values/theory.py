"""The figure of docs/theory.md, computed.

Left: noise a·x + i·b·y on the spectrum, transformed back, real part: its deviation along even and odd
directions, by the formula (lines) and as drawn (points). Middle: the ε that the paper's Theorem 3 claims for
a = b = 1/√2 against the ε that holds. Right: the least noise energy of shaped noise against white noise, for
spectra that fall as k^(−p).
"""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry
from values import Figure

RATE, STEPS, DELTA = 500 / 60_000, 3_600, 1e-5


def values() -> dict[str, Any]:
    return {}


def figures() -> dict[str, Figure]:
    return {"theory.svg": Figure(_draw)}


def _deviations(a: float, length: int = 16, draws: int = 4_000) -> tuple[float, float]:
    """Deviation along an even and an odd direction of noise that was really drawn; σc = 1, a² + b² = 1."""
    random = np.random.default_rng(0)
    b = math.sqrt(1 - a * a)
    spectrum = a * random.normal(size=(draws, length)) + 1j * b * random.normal(size=(draws, length))
    noise = np.fft.ifft(spectrum, norm="ortho").real
    even, odd = np.zeros(length), np.zeros(length)
    even[[3, -3]] = math.sqrt(0.5)
    odd[3], odd[-3] = math.sqrt(0.5), -math.sqrt(0.5)
    return float((noise @ even).std()), float((noise @ odd).std())


def _prices(sigmas: np.ndarray) -> tuple[list[float], list[float]]:
    """(claimed, proven): the accountant given σ, and given the σ/√2 that the certificate says."""
    claimed, proven = (
        [epsilon([Entry(float(s) * factor, RATE, STEPS)], DELTA, "rdp") for s in sigmas]
        for factor in (1.0, math.sqrt(0.5))
    )
    return claimed, proven


def _least_energy(power: float, length: int) -> float:
    """(Σ √m)² / (n Σ m) for m_k = k^(−power): 1 is white noise."""
    m = np.arange(1, length + 1, dtype=float) ** -power
    return float(np.sqrt(m).sum() ** 2 / (length * m.sum()))


def _draw(path: Path) -> None:
    style = {"svg.fonttype": "none", "svg.hashsalt": "gredp", "font.size": 9}
    with plt.rc_context(style):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
        a = np.linspace(0, 1, 101)
        left.plot(a, a, label="even directions: a")
        left.plot(a, np.sqrt(1 - a * a), label="odd directions: b")
        left.plot(a, np.minimum(a, np.sqrt(1 - a * a)), "k--", label="proven z/σ: the smaller")
        points = np.linspace(0, 1, 6)
        drawn = [_deviations(float(x)) for x in points]
        left.plot(points, [even for even, _ in drawn], "C0o", points, [odd for _, odd in drawn], "C1s")
        left.axhline(1, color="gray", linewidth=0.8, label="the paper's z/σ")
        left.set(xlabel="a, with a² + b² = 1", ylabel="deviation / σc", ylim=(-0.05, 1.65))
        left.set_title("Noise after the real part")
        claimed, proven = _prices(np.geomspace(0.7, 5, 12))
        middle.loglog(claimed, proven, "o-", color="C3", label="Theorem 1's noise")
        middle.loglog(claimed, claimed, "k--", label="if the claim held")
        middle.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        middle.set_xticks([], minor=True)
        middle.set(xlabel="claimed ε", ylabel="proven ε", title=f"{STEPS} steps at q = 1/120, δ = {DELTA:g}")
        powers = np.linspace(0, 4, 41)
        for length in (8, 64, 512):
            right.plot(
                powers, [_least_energy(float(p), length) for p in powers], label=f"{length} frequencies"
            )
        right.set(
            xlabel="p, energies as k^(−p)", ylabel="noise energy / white", title="Shaped noise, at best"
        )
        for axes in (left, middle, right):
            axes.legend(fontsize=7)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)
