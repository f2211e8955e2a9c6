"""Writes the pages that quote records of results/, and their figures.

python benchmarks/pages.py                  # write all of them
python benchmarks/pages.py audit paper      # write these
python benchmarks/pages.py --check [PAGE …] # exit status 1, naming what is not current

A page is a template, docs/templates/NAME.md.j2, filled with `values.NAME.values()`. A page without a template
is written by hand; between its lines `<!-- KEY: … -->` and `<!-- end -->` stands the value KEY.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import jinja2
from values import DOCS, ROOT, Figure, markdown

TEMPLATES = DOCS / "templates"
PAGES = sorted(path.stem for path in (Path(__file__).parent / "values").glob("[a-z]*.py"))
BLOCK = re.compile(r"(?<=<!-- )(\w+)(:[^\n]*-->\n).*?(?=<!-- end -->)", re.S)


def text(name: str) -> str:
    """The page as its records have it."""
    values = import_module(f"values.{name}").values()
    if not (TEMPLATES / f"{name}.md.j2").exists():
        written = place(name).read_text(encoding="utf-8")
        return BLOCK.sub(lambda found: f"{found[1]}{found[2]}{values[found[1]]}\n", written)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["table"] = markdown
    environment.filters["fmt"] = format
    return environment.get_template(f"{name}.md.j2").render(values)


def place(name: str) -> Path:
    return ROOT / "README.md" if name == "readme" else DOCS / f"{name}.md"


def figures(name: str) -> dict[str, Figure]:
    found = getattr(import_module(f"values.{name}"), "figures", dict)()
    assert isinstance(found, dict)
    return found


def write(name: str) -> None:
    place(name).write_text(text(name), encoding="utf-8")
    for file, figure in figures(name).items():
        figure.draw(DOCS / file)


def stale(name: str) -> Iterator[Path]:
    """What is not as its records have it."""
    if place(name).read_text(encoding="utf-8") != text(name):
        yield place(name)
    for file, figure in figures(name).items():
        if not current(DOCS / file, figure):
            yield DOCS / file


def current(path: Path, figure: Figure) -> bool:
    if figure.stamp is not None:
        return figure.stamp in path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / path.name
        figure.draw(again)
        return again.read_bytes() == path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help=f"{', '.join(PAGES)}; all of them by default"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is not current")
    arguments = parser.parse_args()
    names = arguments.pages or PAGES
    if unknown := set(names) - set(PAGES):
        parser.error(f"there is no page {', '.join(sorted(unknown))}; choose from {', '.join(PAGES)}")
    if arguments.check:
        old = [path.relative_to(ROOT).as_posix() for name in names for path in stale(name)]
        sys.exit(f"not current: {', '.join(old)}; run python benchmarks/pages.py" if old else 0)
    for name in names:
        write(name)


if __name__ == "__main__":
    main()
