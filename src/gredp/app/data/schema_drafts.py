"""A schema to begin with: a template from the header of a table alone, or a proposal from a public table."""

import csv
import json
import math
from pathlib import Path
from typing import Any

from gredp.app.data.tables import Row, day_number, is_missing, read_columns
from gredp.errors import GredpError
from gredp.storage.files import cannot

#: rows from which a column of different values is taken for an id
ENOUGH_FOR_IDS = 20
#: a label of more different numbers is asked about
MOST_NUMBERS = 20
#: stands for a missing number, but is a word of its own among others
WORD = "none"


def template(path: Path, label: str) -> str:
    """A schema to fill in, as TOML. Reads the first line and no row, so it costs no privacy."""
    columns = header(path)
    if label not in columns:
        raise GredpError(f"{path} has no column {label!r}: its first line must name the columns")
    return f"""\
# From the header of {path.name} alone; no row was read. Fill it in from what you know without the rows:
# a range or a list of values taken from private rows would be a release of its own.
label = {_quoted(label)}
classes = []  # all values of {_quoted(label)}, such as ["no", "yes"]
# or, to predict a number, in place of classes: target = [lowest, highest]
missing = []  # columns that may lack values

# Every column that is left here needs its range: numbers outside of it are clipped. Delete the others (ids!).
[numeric]  # [lowest, highest]
{"".join(f"{_quoted(name)} = []{chr(10)}" for name in columns if name != label)}
[dates]  # move dates here, such as "joined" = ["2015-01-01", "2024-12-31"]

[categorical]  # and words here, such as "work" = ["private", "state", "none"]
"""


def header(path: Path) -> Row:
    """The names of the columns."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            names = [name.strip() for name in next(csv.reader(file, strict=True), [])]
        "".join(names).encode()  # what follows the header may be anything
        return names
    except FileNotFoundError:
        raise GredpError(f"{path} is not there") from None
    except OSError as error:
        raise cannot(path, "read", error) from None
    except (UnicodeEncodeError, csv.Error):
        raise GredpError(f"{path} cannot be read: it is not CSV in UTF-8") from None


def propose(path: Path, label: str) -> str:
    """The schema of a *public* table, as TOML: its ranges, categories and classes, which this publishes."""
    columns = read_columns(path)
    if label not in columns:
        raise GredpError(f"{path} has no column {label!r}, only {', '.join(columns)}")
    sections: dict[str, list[str]] = {"numeric": [], "dates": [], "categorical": []}
    missing = []
    for name, texts in columns.items():
        kind, known = _kind(texts)
        if name == label:
            continue
        line, lacks = _line(name, kind, known, texts)
        sections[kind].append(line)
        if lacks and not line.startswith("#"):
            missing.append(name)
    lines = [
        f"# From {path.name}, which must be public: anyone who reads this learns its ranges and categories.",
        f"label = {_quoted(label)}",
        *_label_lines(sorted({text for text in columns[label] if not _lacks(text, words=True)})),
        f"missing = {_quoted(missing)}",
    ]
    for kind, found in sections.items():
        lines += ["", f"[{kind}]", *found] if found else []
    return "\n".join(lines) + "\n"


def _label_lines(values: Row) -> list[str]:
    """Its classes; about many different numbers a question, since only the user knows."""
    if len(values) <= MOST_NUMBERS or not all(map(_is_number, values)):
        return [f"classes = {_quoted(values)}"]
    numbers = [float(text) for text in values]
    return [
        f"# It holds {len(numbers)} different numbers, so it looks like a number to predict. Keep one line:",
        f"# target = [{min(numbers)!r}, {max(numbers)!r}]  # regression: the range that it can have",
        '# classes = ["…", "…"]  # classification: all values that it can have',
    ]


def _lacks(text: str, words: bool) -> bool:
    """Whether a value is missing; among words "none" is one of them."""
    return is_missing(text) and not (words and text.lower() == WORD)


def _kind(texts: Row) -> tuple[str, list[str]]:
    """The section that a column belongs to, and its different values."""
    known = sorted({text for text in texts if not is_missing(text)})
    if all(_is_number(text) for text in known):
        return "numeric", known
    if all(math.isfinite(day_number(text)) for text in known):
        return "dates", known
    return "categorical", sorted({text for text in texts if not _lacks(text, words=True)})


def _line(name: str, kind: str, known: Row, texts: Row) -> tuple[str, bool]:
    """What the proposal says of a column, in a comment if it is left out; whether values are missing."""
    lacks = any(_lacks(text, kind == "categorical") for text in texts)
    many = len(texts) >= ENOUGH_FOR_IDS
    if len(known) < 2:
        return f"# {_quoted(name)} is left out: it has one value, or none", lacks
    if kind == "numeric":
        numbers = [float(text) for text in known]
        line = f"{_quoted(name)} = [{min(numbers)!r}, {max(numbers)!r}]"
        if many and len(known) == len(texts) and all(number.is_integer() for number in numbers):
            return f"# {line}  # left out: every value differs, as in an id", lacks
        return line, lacks
    if kind == "dates":
        return f"{_quoted(name)} = {_quoted([min(known, key=day_number), max(known, key=day_number)])}", lacks
    if many and 2 * len(known) > len(texts):
        return f"# {_quoted(name)} is left out: most values differ, as in an id or a name", lacks
    return f"{_quoted(name)} = {_quoted(known)}", lacks


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _quoted(value: Any) -> str:
    """JSON's strings and lists are TOML's as well."""
    return json.dumps(value, ensure_ascii=False)
