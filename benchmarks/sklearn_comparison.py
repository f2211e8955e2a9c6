"""`gredp.sklearn.PrivateClassifier` beside diffprivlib's `LogisticRegression`; see results/sklearn.json.

python benchmarks/sklearn_comparison.py ours
python benchmarks/sklearn_comparison.py diffprivlib    # in an environment with diffprivlib==0.6.6

diffprivlib 0.6.6 imports with scikit-learn 1.5 only, so each side runs in an environment of its own and keeps
the other's cells. Both get the same splits and the same bounds (least and largest value of each column of
the whole table, taken as public). diffprivlib promises δ = 0, ours δ = 1e-5: a stronger promise of theirs.
Of diffprivlib two scalings of the rows are tried, columns to [−1, 1] and rows to norm 1; the better one *on
the test rows* is shown, which favors it. Ours has one setting, its default.
"""

import json
import platform
import sys
import warnings
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

OUT = Path(__file__).parent.parent / "results" / "sklearn.json"
TABLES = {"breast cancer": load_breast_cancer, "digits": load_digits, "wine": load_wine}
EPSILONS = (0.5, 1.0, 2.0)
DELTA = 1e-5
SPLITS = 10


def ours(x, y, x_test, y_test, epsilon, bounds):
    from gredp.sklearn import PrivateClassifier

    model = PrivateClassifier(epsilon, DELTA, bounds=bounds, classes=np.unique(y)).fit(x, y)
    assert model.guarantee_.proven_epsilon <= epsilon
    return {"default": model.score(x_test, y_test)}


def diffprivlib(x, y, x_test, y_test, epsilon, bounds):
    from diffprivlib.models import LogisticRegression as Private

    low, width = bounds[0], np.where(bounds[1] > bounds[0], bounds[1] - bounds[0], 1)
    x, x_test = (2 * (part - low) / width - 1 for part in (x, x_test))
    unit, unit_test = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (x, x_test))
    columns = Private(epsilon=epsilon, data_norm=np.sqrt(x.shape[1]), max_iter=1000).fit(x, y)
    rows = Private(epsilon=epsilon, data_norm=1.0, max_iter=1000).fit(unit, y)
    return {
        "columns to [-1, 1]": columns.score(x_test, y_test),
        "rows to norm 1": rows.score(unit_test, y_test),
    }


def plain(x, y, x_test, y_test, epsilon, bounds):
    low, width = bounds[0], np.where(bounds[1] > bounds[0], bounds[1] - bounds[0], 1)
    x, x_test = (2 * (part - low) / width - 1 for part in (x, x_test))
    return {"default": LogisticRegression(max_iter=5000).fit(x, y).score(x_test, y_test)}


def bounds_of(x):
    low, high = x.min(0), x.max(0)
    return low, np.where(high > low, high, low + 1)


def measure(fit, epsilon):
    cells = {}
    for name, load in TABLES.items():
        x, y = load(return_X_y=True)
        scores = []
        for seed in range(SPLITS):
            x_train, x_test, y_train, y_test = train_test_split(
                x, y, test_size=0.25, random_state=seed, stratify=y
            )
            scores.append(fit(x_train, y_train, x_test, y_test, epsilon, bounds_of(x)))
        cells[name] = {way: [round(float(s[way]), 4) for s in scores] for way in scores[0]}
        print(
            fit.__name__,
            epsilon,
            name,
            {w: round(float(np.mean(v)), 3) for w, v in cells[name].items()},
            flush=True,
        )
    return cells


def versions():
    found = {"python": platform.python_version()}
    for name in ("gredp", "torch", "numpy", "scikit-learn", "diffprivlib"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    side = sys.argv[1] if len(sys.argv) == 2 else ""
    if side not in ("ours", "diffprivlib"):
        raise SystemExit("usage: python benchmarks/sklearn_comparison.py ours | diffprivlib")
    record = json.loads(OUT.read_text()) if OUT.exists() else {"format": "gredp-record", "version": 1}
    record |= {"kind": "sklearn", "delta": DELTA, "splits": SPLITS}
    cells = {f"{e:g}": measure(ours if side == "ours" else diffprivlib, e) for e in EPSILONS}
    if side == "ours":
        record["plain"] = measure(plain, 0)
    record[side] = {
        "command": f"python benchmarks/sklearn_comparison.py {side}",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "accuracy": cells,
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
