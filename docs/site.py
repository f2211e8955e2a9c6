"""Hooks of mkdocs: pages that lie outside docs/."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
#: path on the site → path in the repository
OUTSIDE = {"index.md": "README.md"} | {
    name: name
    for name in (
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *(f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py"))),
    )
}


def on_files(files: Any, config: Any) -> Any:
    for place, source in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they stand in the repository, rewritten for the site's root."""
    if page.file.src_uri in OUTSIDE:
        return markdown.replace("](docs/", "](")
    return markdown.replace("](../README.md", "](index.md").replace("](../", "](")
