"""The versioned record of a run: settings, guarantee, ledger, what was released. No torch, no seed of noise.

Only what is covered by ε, or does not depend on the private records, goes in: no training loss, no
gradient norm, no hash of the data, and of times the day on which the run began. How long it took follows the
batches that were drawn, and how long a choice took the number of its trials.
"""

import json
import math
import os
import platform
import shlex
import sys
import uuid
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gredp.errors import GredpError
from gredp.privacy.certificate import Certificate
from gredp.storage.files import make_folder, read_json, write

FORMAT, VERSION = "gredp-record", 1
FILE = "record.json"
PACKAGES = ("gredp", "torch", "numpy", "dp-accounting", "scikit-learn")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def header(command: list[str] | None = None) -> dict[str, Any]:
    """What every record begins with; taken when the command begins, so that nothing tells when it ended."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "created": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": shlex.join(["gredp", *(sys.argv[1:] if command is None else command)]),
        "versions": versions(),
    }


def new_folder(dataset: str, kind: str) -> Path:
    """For a run that was given none: the day, and something that no other run has."""
    return Path("runs") / f"{Path(dataset).stem}-{kind}-{datetime.now(UTC):%Y%m%d}-{uuid.uuid4().hex[:8]}"


def undate(folder: Path, day: str) -> None:
    """Give all files in `folder` the time at which `day` began: their own tell how long the run took."""
    moment = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
    for path in (*folder.rglob("*"), folder):
        with suppress(OSError, NotImplementedError):
            os.utime(path, (moment, moment), follow_symlinks=False)


def accuracy(record: dict[str, Any]) -> tuple[str, float]:
    """Name and value of what a run is measured by, its accuracy or, of a number that it predicts, its R².

    One on validation records is not a test accuracy. `record` may be the metrics of an epoch.
    """
    names = (f"{split}_{measure}" for measure in ("accuracy", "r2") for split in ("test", "validation"))
    name = next((name for name in names if name in record), "test_accuracy")
    return name, float(record[name])


def shown_accuracy(name: str, value: float) -> tuple[str, str]:
    """As a person reads it: the name, and a share in percent."""
    label = name.replace("_", " ").replace("r2", "R²")
    return label, f"{value:.4f}" if name.endswith("r2") else f"{100 * value:.2f} %"


def describe(certificate: Certificate) -> list[dict[str, Any]]:
    """K and Σ, release by release."""
    return [asdict(release) for release in certificate.releases]


def plain_numbers(value: Any) -> Any:
    """What JSON has no number for as the strings "inf", "-inf" and "nan", which float() reads back."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def dumps(record: dict[str, Any]) -> str:
    return json.dumps(plain_numbers(record), indent=2, ensure_ascii=False, allow_nan=False)


def save(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all, folders included."""
    make_folder(path.parent)
    write(path, f"{dumps(record)}\n".encode())


def load(folder: Path) -> dict[str, Any]:
    """The record in a run folder, empty if there is none yet; other formats and versions are rejected."""
    record = read_json(folder / FILE)
    found = (record.get("format"), record.get("version"))
    if record and found != (FORMAT, VERSION):
        was = " ".join(map(str, found))
        raise GredpError(f"{folder / FILE} has format {was!r}; this gredp reads '{FORMAT} {VERSION}'")
    return record
