"""A folder with small data for runs in forked processes."""

from pathlib import Path

import pytest
from children import small_data, train_arguments

from gredp.app.cli import main


@pytest.fixture(scope="module")
def everything_loaded(tmp_path_factory) -> None:
    """Children inherit what is imported and calibrated, and are quick."""
    folder = tmp_path_factory.mktemp("first")
    small_data(folder)
    main(train_arguments(folder))


@pytest.fixture
def folder(tmp_path: Path, everything_loaded: None) -> Path:
    small_data(tmp_path)
    return tmp_path
