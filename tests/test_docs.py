"""What README and docs say is so: links lead somewhere, code runs, commands run or are understood."""

import ast
import doctest
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import tyro
import yaml
from torch.utils.data import DataLoader, TensorDataset

import gredp
from gredp import PrivacyEngine
from gredp.app.cli import Command, main

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
#: subcommand → its settings
COMMANDS = {typing.get_args(c)[1].name: typing.get_args(c)[0] for c in typing.get_args(Command)}
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
#: a line that is typed: in a bash block, or indented by four with or without a prompt
TYPED = re.compile(r"^ {4}(?:\$ )?((?:gredp|make|python|torchrun|pip) .*)$", re.M)
INLINE = re.compile(r"`((?:gredp|make|python|torchrun|pip) [^`]+)`")
#: why a command is understood but not executed here; the first that fits
NOT_RUN = {
    r"^make ": "sets up an environment, or runs what other tests run",
    r"^pip ": "needs a package registry",
    r"^gredp (train|audit)\b": "takes minutes; tests/test_cli.py and tests/audit run it on small settings",
    r"^gredp ledger\b": "needs a run; tests/test_cli.py has one",
    r"^gredp (?!account)": "has tests of its own",
    r"torchrun": "needs processes; tests/test_distributed.py has them",
    r"^python ": "makes a record or a page; tests/test_architecture.py checks the pages",
    r"^(mkdir|source|export|RUN=|if |else |srun)": "the shell's own, or a cluster's",
}


def commands(text: str) -> list[str]:
    """What a reader would type: comments and prompts taken off, lines that end in a backslash joined."""
    text = re.sub(r"[ ]*\\\n\s*", " ", text)
    blocks = [body for kind, body in FENCE.findall(text) if kind in ("bash", "sh")]
    lines = [line.strip().removeprefix("$ ") for body in blocks for line in body.splitlines()]
    found = [*lines, *TYPED.findall(FENCE.sub("", text))]
    return [line for line in (re.sub(r"\s+#\s.*$", "", f).strip() for f in found) if line and line[0] != "#"]


def reason(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def understood(command: str, whole: bool) -> None:
    """Fails unless the real program would take it; a part of a command has known options at least."""
    words = shlex.split(command.replace("…", ""), comments=True)
    words = words[: words.index(">")] if ">" in words else words
    if "gredp" in words:
        words = words[words.index("gredp") + 1 :]
        if not words or words[0] in ("--version", "--help") or words[0].startswith("--tyro"):
            return
        if whole and "$" not in command:
            tyro.cli(Command, args=words)
            return
        known = {f"--{f.name.replace('_', '-')}" for f in fields(COMMANDS[words[0]])}
        known |= {"--data"} if "--dataset" in known else set()  # its other name
        unknown = {w.split("=")[0] for w in words if w.startswith("--")} - known
        assert not unknown, f"gredp {words[0]} has no {unknown}"
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {w for w in words[1:] if "=" not in w} <= set(targets)
    elif words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {e for w in words for e in re.findall(r"(?:gredp|\.)\[(\w+)\]", w)} <= set(extras)
    else:
        assert all((ROOT / w).exists() for w in words if w.endswith(".py")), command


def every_command() -> list[tuple[str, str]]:
    return sorted({(page.name, command) for page in PAGES for command in commands(page.read_text())})


def test_the_collector_finds_what_is_typed():
    text = (
        "\n    $ gredp account \\\n      --epsilon 1  # why\n    make train   # all\n\n    z = 1\n"
        "```bash\npip x\n```\n"
    )
    assert commands(text) == ["pip x", "gredp account --epsilon 1", "make train"]
    assert len(every_command()) > 20
    for wrong in ("gredp account --epsilom 1", "gredp tran", "make trian", "python benchmarks/none.py"):
        with pytest.raises((SystemExit, AssertionError, KeyError)):
            understood(wrong, whole=True)
    with pytest.raises(AssertionError):
        understood("gredp train --resum", whole=False)


@pytest.mark.parametrize(("page", "command"), every_command())
def test_commands_run_or_are_understood(page, command, capsys, tmp_path, monkeypatch):
    why = reason(command)
    if why is not None:
        if not re.match(r"(mkdir|source|export|RUN=|if |else |srun)", command):
            understood(command, whole=True)
        return
    monkeypatch.chdir(tmp_path)
    assert command.startswith("gredp account"), f"{page}: say in NOT_RUN why {command!r} is not run"
    main([*shlex.split(command)[1:], "--accountant", "rdp"])
    assert "proven ε" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_in_sentences_have_known_options(page):
    for command in INLINE.findall(FENCE.sub("", page.read_text())):
        understood(command, whole=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        file = (page.parent / place) if place else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}, but there is no such heading"


def anchors(page: Path) -> set[str]:
    """As mkdocs names headings."""
    from markdown.extensions.toc import slugify

    return {slugify(h, "-") for h in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)}


def blocks(name: str) -> list[str]:
    return [body for kind, body in FENCE.findall((ROOT / name).read_text()) if kind == "python"]


def surroundings() -> dict:
    """What the pages take for granted: a model, data, and after make_private what it returned."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    data = TensorDataset(torch.rand(300, 1, 8, 8), torch.arange(300) % 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"torch": torch, "DataLoader": DataLoader, "data": data, "model": model, "optimizer": optimizer}


def private_surroundings() -> dict:
    """The same after make_private."""
    names = surroundings()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=names["model"],
        optimizer=names["optimizer"],
        data_loader=DataLoader(names["data"], batch_size=100),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return names | {"engine": engine, "model": model, "optimizer": optimizer, "loader": loader}


def test_the_first_example_runs_as_it_stands_and_prints_what_the_page_says(capsys):
    (block,) = blocks("README.md")
    (shown,) = (body for kind, body in FENCE.findall((ROOT / "README.md").read_text()) if kind == "text")
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == shown


@pytest.mark.filterwarnings("ignore")
def test_code_of_the_tutorial_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks("docs/tutorial.md"):
        exec(compile(block, "docs/tutorial.md", "exec"), names)


@pytest.mark.parametrize("block", [b for b in blocks("docs/howto.md") if "lightning" not in b])
@pytest.mark.filterwarnings("ignore")
def test_code_of_the_how_to_page_runs(block, capsys):
    """Its Lightning part is run by tests/adapters/test_lightning.py, where that package is loaded anyhow."""
    names = surroundings() if "make_private" in block else private_surroundings()
    exec(compile(block, "docs/howto.md", "exec"), names)


def test_no_page_with_code_is_forgotten():
    run = {"README.md", "docs/tutorial.md", "docs/howto.md"}
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        found = blocks(name)
        assert name in run or not found, f"{name}: run its code above"
        for block in found:
            ast.parse(block)


def test_every_page_is_in_the_navigation():
    """`make docs` fails as well; this needs no site."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = re.findall(r"[\w-]+\.md", str(settings["nav"]))
    assert sorted(named) == sorted(["index.md", *(page.name for page in PAGES if page.name != "README.md")])
    assert settings["validation"]["nav"]["omitted_files"] == "warn"


def test_the_reference_has_every_public_name_and_every_command():
    listed = set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), re.M))
    names = {name.rpartition(".")[2] for name in listed}
    assert set(gredp.__all__) - names <= {"__version__"}
    assert {f"{settings.__module__}.{settings.__name__}" for settings in COMMANDS.values()} <= listed


def test_files_of_the_architecture_are_there():
    """Every file that the page names, by the end of its path."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    for name in sorted(set(re.findall(r"`((?:\w+/)*\w+\.py)`", page))):
        assert any(f"/{path}".endswith(f"/{name}") for path in files), f"there is no {name}"


#: of code on the site at a width of 1280 pixels; more is hidden behind a scroll bar
COLUMNS = 100


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_fits_on_a_screen(page):
    text = page.read_text()
    typed = [line for _, body in FENCE.findall(text) for line in body.splitlines()]
    typed += re.findall(r"^ {4}(.*)$", FENCE.sub("", text), re.M)
    assert not [line for line in typed if len(line) > COLUMNS]


def test_the_site_is_built_without_warnings_and_needs_no_other(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text() for path in tmp_path.glob("*.html")}
    for name, page in pages.items():
        loads = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page)
        assert not loads, f"{name} loads {loads}"
    for page in PAGES:
        shown = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert shown in pages
        assert f'href="{shown}' in pages["theory.html"], f"{page.name} is not in the navigation"
    assert "make_private_with_epsilon" in pages["reference.html"]


EXAMPLES = [p for p in sorted((ROOT / "src" / "gredp").rglob("*.py")) if ">>> " in p.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_in_docstrings_print_what_they_say(path):
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed
