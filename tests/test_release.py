"""What is shipped: one version everywhere, a citation that readers of it accept, a wheel that works alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import warnings
import zipfile
from pathlib import Path

import pytest
import yaml

import gredp
from gredp.app.cli import main

ROOT = Path(__file__).parent.parent


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "gredp.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", gredp.__version__)
    assert f"\nversion: {gredp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] in ("Unreleased", gredp.__version__)


def test_the_citation_is_valid_and_names_the_paper():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cffconvert import Citation

        citation = Citation((ROOT / "CITATION.cff").read_text())
        citation.validate()
        with pytest.raises(Exception, match="authors"):
            Citation((ROOT / "CITATION.cff").read_text().replace("authors:\n", "nobody:\n", 1)).validate()
    (paper,) = citation.cffobj["references"]
    assert paper["title"].startswith("Training with Differential Privacy: A Gradient-Preserving")
    assert [a["family-names"] for a in paper["authors"]] == ["Wang", "Jiang", "Guo", "Cai", "Wang", "Jia"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_can_complete_commands(tmp_path, shell):
    file = tmp_path / "gredp"
    with pytest.raises(SystemExit) as end:
        main(["--tyro-write-completion", shell, str(file)])
    assert end.value.code in (0, None)
    script = file.read_text()
    for word in ("train", "account", "audit", "ledger", "epsilon"):
        assert word in script
    if shell == "bash":
        subprocess.run(["bash", "-n", str(file)], check=True)


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path):
    """Installed without its dependencies, which are lent from this environment: nothing is downloaded."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]

    def run(*command: object, **settings) -> str:
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        words = [str(word) for word in command]
        done = subprocess.run(words, capture_output=True, text=True, env=clean, cwd=tmp_path, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("gredp-*.whl")
    assert wheel.name == f"gredp-{gredp.__version__}-py3-none-any.whl"
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert "gredp/py.typed" in packed
    assert {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")} <= packed
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    program = tmp_path / "env" / "bin" / "gredp"
    assert run(program, "--version") == f"gredp {gredp.__version__}\n"
    assert str(site) in run(python, "-c", "import gredp; print(gredp.__file__)")
    quick = ("--accountant", "rdp", "--json")
    assert json.loads(run(program, "account", "--epsilon", "1", *quick))["proven_epsilon"] <= 1
    trained = json.loads(run(program, "train", "--epochs", "1", "--out", tmp_path / "run", *quick))
    assert trained["proven_epsilon"] <= 2
    assert (
        json.loads((tmp_path / "run" / "record.json").read_text())["versions"]["gredp"] == gredp.__version__
    )


def test_the_hooks_of_pre_commit_are_local_and_start_what_is_there():
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            for word in hook["entry"].split():
                assert not word.endswith(".py") or (ROOT / word).exists(), hook
