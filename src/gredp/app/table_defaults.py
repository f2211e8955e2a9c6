"""What `gredp train` takes for a table where the command line says nothing. No torch."""

from pathlib import Path
from typing import Any

from gredp.app.settings import TrainSettings


def table_defaults(settings: TrainSettings) -> dict[str, Any]:
    """Batches of a fifth of the rows, and settings that did well on public tables (docs/results.md).

    The number of rows is no secret here, as it is none in `--batch-size`.
    """
    try:
        with open(settings.dataset, "rb") as file:
            rows = sum(1 for line in file if line.strip()) - 1
    except OSError:
        return {}  # said better where the table is read
    share = settings.holdout or 0.0
    if not 0 <= share < 1:
        return {}  # refused with all other settings
    training = rows * (1 - share)
    return {"batch_size": max(1, int(training / 5)), "epochs": 10, "lr": 0.3, "clipping": "automatic"}


def is_table(settings: TrainSettings) -> bool:
    return Path(settings.dataset).suffix == ".csv"
