"""Whose records a user's are: a column of a table, or the folders or names of image files. No torch.

A line about a record names its row or its file, and never the person: lines end up in logs.
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from gredp.app.data.tables import Schema, is_missing, read_columns
from gredp.errors import GredpError

#: `--person folder`: images lie in CLASS/PERSON/*.png
FOLDER = "folder"


def of_rows(path: Path, schema: Schema, column: str) -> list[str]:
    """For each row of the table at `path` what it says in `column`, which is no feature."""
    if column in (schema.label, *schema.inputs):
        raise GredpError(f"--person {column} is the label or a feature in the schema: take it out there")
    columns = read_columns(path)
    if column not in columns:
        raise GredpError(f"{path} has no column {column!r} for --person: its first line names the columns")
    ids = columns.pop(column)
    for place, each in enumerate(ids):
        if is_missing(each):
            raise GredpError(f"{path}, row {place + 1}: {column} is missing, so the row has no person")
    places = [f"{path}, row {place + 1}" for place in range(len(ids))]
    more = "if they are two records, add a column that tells them apart; the schema need not name it"
    reject_shared(zip(*columns.values()), ids, places, more)
    return ids


def of_files(files: Sequence[Path], person: str) -> list[str]:
    """For each image its person: the folder that it is in, or what the one group of a pattern finds."""
    if person == FOLDER:
        return [file.parent.name for file in files]
    pattern = _pattern(person)
    found = [pattern.match(file.name) for file in files]
    for file, match in zip(files, found):
        if match is None or not match[1]:
            raise GredpError(f"{file}: --person {person!r} finds no person from the start of its name on")
    return [match[1] for match in found if match is not None]


def _pattern(person: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(person)
    except re.error as error:
        raise GredpError(f"--person {person!r} is not a regular expression: {error}") from None
    if pattern.groups != 1:
        raise GredpError(
            f"--person of images is {FOLDER} (CLASS/PERSON/*.png) or a regular expression with one group, "
            rf"such as '(p\d+)_', which finds the person in a file's name, not {person!r}"
        )
    return pattern


def reject_shared(
    records: Iterable[Hashable], ids: Sequence[str], places: Sequence[object], more: str = ""
) -> None:
    """Reject a record that is there under two persons: to remove one of them would not remove it."""
    first: dict[Hashable, int] = {}
    for place, record in enumerate(records):
        other = first.setdefault(record, place)
        if ids[other] != ids[place]:
            raise GredpError(
                f"{places[other]} and {places[place]} are the same record under two persons: a record has one"
                + (f"; {more}" if more else "")
            )
