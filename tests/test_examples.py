"""Every example runs, as its first lines say, on small settings of its own."""

import runpy
import subprocess
import sys
from pathlib import Path

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
