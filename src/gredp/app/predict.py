"""`gredp predict`: what a trained model says of new records, as CSV. No torch until it runs."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gredp.errors import GredpError
from gredp.storage.files import cannot


@dataclass(frozen=True)
class PredictSettings:
    """Classify new records with the model of a finished run; write a CSV file with probabilities."""

    run: Annotated[str, tyro.conf.Positional]
    """folder of the run, or its model.safetensors"""
    input: Annotated[str, tyro.conf.Positional]
    """a folder of images, an image, a .txt list of images, a .npy array, or a .csv table without the label"""
    out: str = "predictions.csv"
    """file to write; - is standard output"""


def run_predict(settings: PredictSettings) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from gredp.app.predictor import Predictor, count, write_predictions

    predictor = Predictor(settings.run)
    console = Console(stderr=True)
    columns = (TextColumn("records"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=count(settings.input, predictor.blueprint))
        advance = lambda done: bar.advance(task, done)  # noqa: E731
        if settings.out == "-":
            write_predictions(predictor, settings.input, sys.stdout, advance)
            return
        out, part = Path(settings.out), Path(f"{settings.out}.part")
        try:
            with part.open("w", encoding="utf-8", newline="") as file:
                done = write_predictions(predictor, settings.input, file, advance)
            os.replace(part, out)
        except GredpError:
            part.unlink(missing_ok=True)
            raise
        except OSError as error:
            raise cannot(out, "written", error) from None
    print(f"{done} predictions in {out}; the model: {predictor.guarantee}")
