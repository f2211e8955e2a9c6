"""Every example runs, as its first lines say, on small settings of its own."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "examples"
#: example → arguments, run in this process: it has torch already
ARGUMENTS = {
    "audit_opacus.py": [],
    "own_cnn.py": [],
    "train_digits.py": ["--epochs", "1", "--accountant", "rdp", "--out", "run"],
}
SLOW = {
    "block_circulant_mlp.py": ["--epochs", "1"],
    "compare_methods.py": ["--epochs", "1", "--runs", "1", "--accountant", "rdp"],
    "fine_tune_transformer.py": ["--records", "500", "--epochs", "1", "--public-steps", "3"],
}
CASES = [*ARGUMENTS.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]


def test_no_example_is_forgotten_or_long():
    found = {path.name for path in FOLDER.glob("*.py")}
    assert found == {*ARGUMENTS, *SLOW, "resume.py", "two_processes.py"}
    for name in found:
        assert len((FOLDER / name).read_text().splitlines()) < 100


@pytest.mark.parametrize(("name", "arguments"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_it_runs(name, arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert capsys.readouterr().out.count("proven ε") == (5 if name == "compare_methods.py" else 1)


@pytest.mark.slow
@pytest.mark.pages
def test_the_notebook_runs_from_a_table_to_predictions(capsys, monkeypatch, tmp_path):
    """Its cells in order, as Jupyter would; it is kept without outputs."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((FOLDER / "own_table.ipynb").read_text())["cells"]
    names: dict = {}
    for number, cell in enumerate(c for c in cells if c["cell_type"] == "code"):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        exec(compile("".join(cell["source"]), f"own_table.ipynb, cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "as in an id" in said
    assert said.count("proven ε") == 2
    assert np.mean(names["predicted"] == names["later"]) > 0.8
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 101
    assert (tmp_path / "runs" / "patients" / "report.html").exists()


@pytest.mark.slow
def test_two_processes_train_one_model():
    how = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*how, str(FOLDER / "two_processes.py"), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 processes: test accuracy")


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(FOLDER / "resume.py"), "--epochs", "3", *more]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert run("--die-in-epoch", "1").returncode == 1
    told = run().stdout
    assert "resumes after 12 of 24 charged steps" in told
    assert "after 24 steps at proven ε" in told
