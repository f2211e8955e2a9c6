"""A user's table: MINE.csv, and beside it a schema, MINE.toml or MINE.json, of what its columns may hold.

Ranges, categories and classes come from the schema and never from the private rows: the largest value of a
column would be a release of its own. Every row becomes features by fixed numbers, from itself alone. A line
about a bad row names the row and the column and never the value: lines end up in logs. `schema_drafts.py`
writes a schema to begin with.
"""

import csv
import json
import math
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gredp.errors import GredpError
from gredp.storage.files import one_line, read

#: what stands for a value that is not known, in any case, unless the schema lists it as a category
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
LARGEST_SCHEMA = 1 << 20
Row = list[str]


@dataclass(frozen=True)
class Schema:
    """What a table may hold.

    `numeric` columns are clipped to their range and scaled to [−1, 1], and so are `dates`, from ISO dates;
    `categorical` ones become one feature of 0 or 1 for each value. A column of `missing` may lack values:
    they become 0, and a column of numbers or dates has one more feature that says so. Columns that are not
    named are not read.
    """

    label: str
    #: empty where a number is predicted
    classes: tuple[str, ...]
    numeric: dict[str, tuple[float, float]]
    categorical: dict[str, tuple[str, ...]]
    missing: tuple[str, ...] = ()
    test: str | None = None
    dates: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: range of the label, where it is a number to predict
    target: tuple[float, float] | None = None
    #: what part of the records each class is about, as far as is known without them
    shares: dict[str, float] | None = None

    @property
    def inputs(self) -> list[str]:
        """The columns that are learned from."""
        return [*self.numeric, *self.dates, *self.categorical]

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Of the classes, so that each counts alike: 1 for the rarest."""
        if self.shares is None:
            return None
        return tuple(min(self.shares.values()) / self.shares[name] for name in self.classes)


def load_table(path: Path) -> tuple[Schema, list[tuple[np.ndarray, np.ndarray]]]:
    """The schema, and one or two splits, training first: features and labels as of `encode`."""
    schema = read_schema(path)
    files = [path] if schema.test is None else [path, path.with_name(schema.test)]
    return schema, [encode(file, schema) for file in files]


# ------------------------------------------------------------------ the schema


def read_schema(path: Path) -> Schema:
    """Of the table at `path`."""
    if not path.exists():
        raise GredpError(f"{path} is not there")
    files = [path.with_suffix(end) for end in (".toml", ".json") if path.with_suffix(end).exists()]
    if not files:
        schema = shlex.quote(str(path.with_suffix(".toml")))
        raise GredpError(
            f"{path.with_suffix('.toml')} is not there: a table needs a schema, because ranges or categories "
            "taken from private rows would be a release of their own; begin with "
            f"`gredp data schema {shlex.quote(str(path))} --label COLUMN > {schema}`, which reads the header "
            "alone, and fill it in"
        )
    text = read(files[0], LARGEST_SCHEMA)
    try:
        found = tomllib.loads(text.decode()) if files[0].suffix == ".toml" else json.loads(text)
        return parse_schema(found)
    except GredpError as error:
        raise GredpError(f"{files[0]}: {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise GredpError(f"{files[0]} cannot be read: {one_line(error)}") from None


def parse_schema(found: Any) -> Schema:
    """Of what TOML or JSON say."""
    known = {field.name for field in fields(Schema)}
    if not isinstance(found, dict) or set(found) - known or "label" not in found:
        raise GredpError(f"a schema has label and some of {', '.join(sorted(known))}, and nothing else")
    target = found.get("target")
    if "classes" not in found if target is None else found.get("classes"):
        raise GredpError(
            'declare classes = ["a", "b"], or target = [low, high] to predict a number: one of them'
        )
    numeric, dates, categorical = (found.get(kind, {}) for kind in ("numeric", "dates", "categorical"))
    if not all(isinstance(kind, dict) for kind in (numeric, dates, categorical)):
        raise GredpError("numeric, dates and categorical name columns, each with its range or its values")
    schema = Schema(
        str(found["label"]),
        _values("classes", found["classes"]) if target is None else (),
        {name: _range(name, given) for name, given in numeric.items()},
        {name: _values(name, given) for name, given in categorical.items()},
        tuple(dict.fromkeys(map(str, found.get("missing", [])))),
        found.get("test"),
        {name: _date_range(name, given) for name, given in dates.items()},
        None if target is None else _range("target", target),
        _shares(found.get("shares"), found.get("classes")),
    )
    names = [schema.label, *schema.inputs]
    if len(set(names)) < len(names):
        raise GredpError("a column is the label, numeric, a date or categorical, and only one of them")
    if len(names) == 1:
        raise GredpError("there is no numeric, date or categorical column to learn from")
    unknown = sorted(set(schema.missing) - set(names[1:]))
    if unknown:
        raise GredpError(f"missing names {unknown}, which are not columns of the schema")
    test = schema.test
    if test is not None and (
        not isinstance(test, str) or Path(test).name != test or not test.endswith(".csv")
    ):
        raise GredpError(f"test must be the name of a .csv file in the same folder, not {test!r}")
    return schema


def _range(name: str, given: Any) -> tuple[float, float]:
    ends = [float(v) for v in given] if isinstance(given, list | tuple) else []
    if len(ends) != 2 or not (ends[0] < ends[1] and math.isfinite(ends[1] - ends[0])):
        raise GredpError(f"the range of {name} must be [low, high] with low below high, not {given}")
    return ends[0], ends[1]


def _date_range(name: str, given: Any) -> tuple[str, str]:
    ends = [str(v) for v in given] if isinstance(given, list | tuple) else []
    days = [day_number(end) for end in ends]
    if len(ends) != 2 or not (days[0] < days[1] < math.inf):
        shown = [str(v) for v in given] if isinstance(given, list | tuple) else given
        raise GredpError(f'the range of {name} must be ["first", "last"], two dates in order, not {shown}')
    return ends[0], ends[1]


def _values(name: str, given: Any) -> tuple[str, ...]:
    values = tuple(map(str, given)) if isinstance(given, list | tuple) else ()
    if len(values) < 2 or len(set(values)) < len(values):
        raise GredpError(f"{name} must list at least two different values, not {given}")
    return values


def _shares(given: Any, classes: Any) -> dict[str, float] | None:
    """Of every class; one that is not named has what is left, shared alike."""
    if given is None:
        return None
    if not classes or not isinstance(given, dict) or set(given) - set(map(str, classes)):
        raise GredpError("shares names classes, each with its part of the records, such as {fraud = 0.01}")
    named = {name: float(share) for name, share in given.items()}
    others, left = [name for name in map(str, classes) if name not in named], 1 - sum(named.values())
    shares = named | dict.fromkeys(others, left / max(1, len(others)))
    if not all(0 < share < 1 for share in shares.values()) or (not others and abs(left) > 0.01):
        raise GredpError(f"shares must lie between 0 and 1 and add up to 1, not {given}")
    return shares


# ------------------------------------------------------------------ rows


def encode(path: Path, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """`[n, d]` of float32 and `[n]` of int64, or one line that says where the table leaves its schema.

    A number to predict is float32, its range scaled to [−1, 1].
    """
    columns = read_columns(path, [schema.label, *schema.inputs])
    if schema.target is not None:
        y = to_unit(_numbers(str(path), schema.label, columns[schema.label], False, 0), schema.target)
    else:
        y = _indices(str(path), schema.label, columns[schema.label], schema.classes, False)
    return encode_inputs(columns, schema, str(path)), y


def encode_inputs(columns: dict[str, Row], schema: Schema, where: str, before: int = 0) -> np.ndarray:
    """`[n, d]` of float32: what a network takes of each row; `before` rows came earlier in `where`."""
    parts = []
    ranges = {name: (day_number(a), day_number(b)) for name, (a, b) in schema.dates.items()}
    for name, ends in (schema.numeric | ranges).items():
        values = _numbers(where, name, columns[name], name in schema.missing, before, name in ranges)
        unknown = np.isnan(values)
        parts.append(np.where(unknown, 0.0, to_unit(values, ends))[:, None])
        if name in schema.missing:
            parts.append(unknown[:, None])
    for name, allowed in schema.categorical.items():
        index = _indices(where, name, columns[name], allowed, name in schema.missing, before)
        parts.append(index[:, None] == np.arange(len(allowed)))
    return np.concatenate(parts, axis=1).astype(np.float32)


def encoding(schema: Schema) -> list[dict[str, Any]]:
    """What `encode_inputs` puts into each of the d columns, for programs that do it themselves."""
    made: list[dict[str, Any]] = []
    for name, (low, high) in (schema.numeric | schema.dates).items():
        kind = "date" if name in schema.dates else "scaled"
        made.append({"column": name, "is": kind, "low": low, "high": high})
        if name in schema.missing:
            made.append({"column": name, "is": "missing"})
    for name, allowed in schema.categorical.items():
        made += [{"column": name, "is": "equals", "value": value} for value in allowed]
    return made


def to_unit(values: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """Clipped to the declared range, and the range to [−1, 1], of float32."""
    low, high = ends
    return (2 * (np.clip(values.astype(np.float64), low, high) - low) / (high - low) - 1).astype(np.float32)


def read_columns(path: Path, names: Sequence[str] = ()) -> dict[str, Row]:
    """The named columns of a CSV file with a header, or all of them, without blanks around values."""
    return next(column_parts(path, names))


def column_parts(path: Path, names: Sequence[str] = (), size: int = sys.maxsize) -> Iterator[dict[str, Row]]:
    """The same, at most `size` rows at a time."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            if len(set(header)) < len(header):
                raise GredpError(f"{path} names a column twice")
            for name in names:
                if name not in header:
                    raise GredpError(f"{path} has no column {name!r}: its first line must name the columns")
            rows = _checked_rows(path, reader, len(header))
            part = list(islice(rows, size))
            if not part:
                raise GredpError(f"{path} has no rows")
            while part:
                columns = dict(zip(header, zip(*part)))
                yield {name: [value.strip() for value in columns[name]] for name in names or header}
                part = list(islice(rows, size))
    except FileNotFoundError:
        raise GredpError(f"{path} is not there") from None
    except UnicodeDecodeError:
        raise GredpError(f"{path} cannot be read: it is not UTF-8") from None
    except (OSError, csv.Error) as error:
        raise GredpError(f"{path} cannot be read: {one_line(error)}") from None


def _checked_rows(path: Path, reader: Any, width: int) -> Iterator[Row]:
    for row in filter(None, reader):
        if len(row) != width:
            raise GredpError(f"{path}, line {reader.line_num}: {len(row)} values, but {width} columns")
        yield row


def is_missing(text: str) -> bool:
    return text.lower() in MISSING


def _number(text: str) -> float:
    try:
        return math.nan if is_missing(text) else float(text)
    except ValueError:
        return math.inf


def day_number(text: str) -> float:
    """Days since the year 1 of an ISO date, with or without a time (in UTC, unless it says otherwise)."""
    if is_missing(text):
        return math.nan
    try:
        moment = datetime.fromisoformat(text) if "-" in text[:5] else None
    except ValueError:
        moment = None
    if moment is None:
        return math.inf
    moment = moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    seconds = moment.hour * 3600 + moment.minute * 60 + moment.second
    return date.toordinal(moment) + seconds / 86400


def _numbers(
    where: str, name: str, texts: Row, may_be_missing: bool, before: int, dates: bool = False
) -> np.ndarray:
    """`[n]`; not a number where the value is missing, and nowhere else."""
    values = np.array([day_number(text) if dates else _number(text) for text in texts])
    for i in np.flatnonzero(~np.isfinite(values)):
        if not is_missing(texts[i]):
            what = "an ISO date such as 2024-01-31" if dates else "a finite number"
            raise GredpError(f"{_row(where, before + int(i))}: {name} is not {what}")
        if not may_be_missing:
            raise GredpError(
                f"{_row(where, before + int(i))}: {name} is missing; list it under missing if it may be"
            )
    return values


def _indices(
    where: str, name: str, texts: Row, allowed: tuple[str, ...], may_be_missing: bool, before: int = 0
) -> np.ndarray:
    """`[n]`: the place of each value among those allowed, −1 where it is missing."""
    places = {value: i for i, value in enumerate(allowed)}
    found = np.array([places.get(text, -1) for text in texts], dtype=np.int64)
    for i in np.flatnonzero(found < 0):
        if not (may_be_missing and is_missing(texts[i])):
            shown = ", ".join(allowed[:5]) + (", …" if len(allowed) > 5 else "")
            raise GredpError(f"{_row(where, before + int(i))}: {name} is not one of {shown}")
    return found


def _row(where: str, index: int) -> str:
    return f"{where}, row {index + 1}"
