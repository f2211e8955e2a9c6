"""A user's own class folders or table as `Splits`, with their test split or one that is held out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gredp.app.data.datasets import Splits, pixels
from gredp.app.data.holdout import held_out
from gredp.app.data.images import load_folders
from gredp.app.data.persons import of_rows
from gredp.app.data.tables import Schema, load_table
from gredp.errors import GredpError


def read_own(
    path: Path, table: bool, holdout: float | None, image_size: int | None, person: str | None
) -> Splits:
    """Class folders or a table, with their test split or one that is held out."""
    persons: list[str] | None = None
    schema: Schema | None = None
    target: tuple[float, float] | None = None
    names: Sequence[str]
    if table:
        schema, splits = load_table(path)
        names, target = schema.classes, schema.target
        persons = None if person is None else of_rows(path, schema, person)
    else:
        names, splits, persons = load_folders(path, image_size, person)
    if len(splits) == 2 and holdout is not None:
        raise GredpError(f"{path} has a test split: give no --holdout")
    if len(splits) == 1 and holdout is None:
        how = 'test = "FILE.csv" in the schema' if table else "test/CLASS folders"
        raise GredpError(
            f"{path} has no test split: name one ({how}), or keep a share apart with --holdout 0.2"
        )
    (x, y), (x_test, y_test) = splits[0], splits[-1]
    if holdout is not None:
        apart = held_out(x, y, holdout, "test", persons)
        persons = None if persons is None else [each for each, held in zip(persons, apart) if not held]
        x, y, x_test, y_test = x[~apart], y[~apart], x[apart], y[apart]
    tensor = torch.from_numpy if table else pixels
    labels, test_labels = (torch.from_numpy(each) for each in (y, y_test))
    found = Splits(
        path.stem, len(names), tensor(x), labels, tensor(x_test), test_labels, tuple(names), schema
    )
    return replace(found, target=target, persons=None if persons is None else tuple(persons))
