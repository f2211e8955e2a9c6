"""A file whose tests are all slow is not even loaded where they are not run: its packages take seconds."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    skipped = collection_path.name == "test_hugging_face.py" and config.option.markexpr == "not slow"
    return True if skipped else None
