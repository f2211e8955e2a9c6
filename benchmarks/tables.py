"""How the defaults for tables do on public ones: three folds of each, at two ε; writes results/tables.json.

    python benchmarks/tables.py
    python benchmarks/pages.py results     # writes its table from the record

The folds are of public data, so nothing that was chosen by them costs any ε.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification, make_moons
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from gredp.app.merge_settings import table_defaults
from gredp.app.settings import TrainSettings
from gredp.app.train import train
from gredp.storage.record import header, save

ROOT = Path(__file__).parent.parent
EPSILONS, FOLDS = (2.0, 8.0), 3


def data_sets() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name → (features [n, d], labels [n])."""
    known = {"digits": load_digits, "breast cancer": load_breast_cancer, "wine": load_wine}
    found = {name: (bunch().data, bunch().target) for name, bunch in known.items()}
    found["synthetic, 3 classes"] = make_classification(
        3000, 20, n_informative=8, n_classes=3, class_sep=1.5, random_state=0
    )
    found["two moons"] = make_moons(2000, noise=0.15, random_state=0)
    return found


def write_table(folder: Path, x: np.ndarray, y: np.ndarray, parts: dict[str, np.ndarray]) -> Path:
    names = [f"c{i}" for i in range(x.shape[1])]
    for part, rows in parts.items():
        lines = [",".join([*map(repr, map(float, x[i])), str(y[i])]) for i in rows]
        (folder / f"{part}.csv").write_text("\n".join([",".join([*names, "y"]), *lines]) + "\n")
    varied = [i for i in range(len(names)) if x[:, i].min() < x[:, i].max()]
    schema = {
        "label": "y",
        "classes": sorted(set(map(str, y))),
        "numeric": {names[i]: [float(x[:, i].min()), float(x[:, i].max())] for i in varied},
        "test": "fold.csv",
    }
    (folder / "train.json").write_text(json.dumps(schema))
    return folder / "train.csv"


def measure() -> dict:
    rows = []
    for name, (x, y) in data_sets().items():
        row = {"data": name, "records": len(y), "features": x.shape[1], "accuracy": {}}
        folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y))
        plain = make_pipeline(MinMaxScaler(), LogisticRegression(max_iter=2000))
        row["logistic_regression"] = [float(plain.fit(x[a], y[a]).score(x[b], y[b])) for a, b in folds]
        for target in EPSILONS:
            got = []
            for training, test in folds:
                with tempfile.TemporaryDirectory() as folder:
                    path = write_table(Path(folder), x, y, {"train": training, "fold": test})
                    told = TrainSettings(
                        dataset=str(path), epsilon=target, accountant="rdp", out=f"{folder}/run"
                    )
                    got.append(train(replace(told, **table_defaults(told))).record["test_accuracy"])
            row["accuracy"][f"{target:g}"] = got
            print(name, target, got, flush=True)
        rows.append(row)
    return {**header(["benchmarks/tables.py"]), "kind": "tables", "delta": 1e-5, "rows": rows}


if __name__ == "__main__":
    save(ROOT / "results" / "tables.json", measure())
