"""One of several processes dies, hangs or is told to end: the others end too, nothing is left uncharged."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from children import (
    STEPS,
    TARGET,
    TIMEOUT,
    assert_nothing_was_forgotten,
    error,
    kill_at,
    slowly,
    spent_and_charged,
    start_many,
    train_arguments,
)

import gredp.gradient.step as step
from gredp.app.cli import main
from gredp.distributed import process_group
from gredp.storage.run_folder import RunFolder
from ranks import wait


def ends(children: list[int], seconds: float = 20) -> list[int]:
    deadline = time.monotonic() + seconds
    return [wait(child, deadline - time.monotonic()) for child in children]


def run_many(folder: Path, world: int, arguments: list[str], prepare=lambda rank: None) -> list[int]:
    return ends(start_many(folder, world, arguments, prepare))


def resume(folder: Path, world: int, *more: str) -> list[int]:
    return run_many(folder, world, ["train", "--resume", str(folder / "run"), "--json", *more])


def errors(folder: Path) -> list[str]:
    return [error(place) for place in sorted(folder.glob("rank*"))]


def assert_finished(folder: Path, world: int) -> dict:
    record = json.loads((folder / "run" / "record.json").read_text())
    assert sum(entry["steps"] for entry in record["ledger"]) == STEPS
    assert record["guarantee"]["proven_epsilon"] <= TARGET
    assert record["processes"] == world
    return record


def no_writing(rank: int) -> None:
    """Only the first process may touch a file of the run."""

    def refuse(*arguments, **options):
        raise AssertionError(f"process {rank} writes")

    if rank:
        import gredp.app.train as loop
        import gredp.storage.files as sealed
        import gredp.storage.ledger_file as ledger_file
        import gredp.storage.record as record

        for owner in (sealed, ledger_file, record, loop):
            owner.write = refuse
        Path.mkdir = refuse
        RunFolder.__init__ = refuse
        ledger_file.LedgerFile.__init__ = refuse


@pytest.mark.fault("lost rank")
@pytest.mark.parametrize("world", [2, 4])
def test_a_whole_run_is_written_by_the_first_process_alone(folder, world):
    assert run_many(folder, world, train_arguments(folder), no_writing) == [0] * world, errors(folder)
    assert_finished(folder, world)
    assert spent_and_charged(folder) == (STEPS, STEPS)
    assert json.loads((folder / "rank0" / "out").read_text())["run"] == str(folder / "run")
    for rank in range(1, world):
        assert [(folder / f"rank{rank}" / name).read_text() for name in ("out", "err", "draws")] == [""] * 3


#: (rank that dies, where)
DEATHS = [
    (0, "before charge 7"),
    (0, "after charge 7"),
    (0, "after noise 7"),
    (0, "before update 7"),
    (1, "before update 7"),
    pytest.param((0, "before noise 7"), marks=pytest.mark.slow),
    pytest.param((0, "after update 7"), marks=pytest.mark.slow),
    pytest.param((1, "after update 7"), marks=pytest.mark.slow),
]


@pytest.mark.fault("lost rank")
@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_a_process_that_is_killed_ends_all_and_the_run_goes_on(folder, death):
    dying, where = death
    begun = time.monotonic()
    statuses = run_many(
        folder, 2, train_arguments(folder), lambda rank: kill_at(where) if rank == dying else None
    )
    assert time.monotonic() - begun < TIMEOUT + 5
    assert statuses[dying] == -signal.SIGKILL
    assert statuses[1 - dying] == 2
    message = error(folder / f"rank{1 - dying}")
    assert message.count("\n") == 1
    assert f"process {1 - dying} of 2 lost contact with others" in message
    assert_nothing_was_forgotten(folder)
    spent, charged = spent_and_charged(folder)
    assert spent <= charged <= spent + 1
    assert resume(folder, 2) == [0, 0], errors(folder)
    assert_nothing_was_forgotten(folder)
    record = assert_finished(folder, 2)
    assert (record["starts"], record["steps_lost"]) == (2, charged - 5)


def stop_before_noise(rank: int, stopped: int) -> None:
    """Hang where the sums are added up: this process does not come to the 7th, the others wait in it."""
    import gredp.gradient.summation as summation

    honest, calls = summation.all_reduce_sum, []

    def hanging(tensors):
        calls.append(rank)
        if rank == stopped and len(calls) == 7:
            os.kill(os.getpid(), signal.SIGSTOP)
        return honest(tensors)

    summation.all_reduce_sum = hanging


@pytest.mark.fault("lost rank")
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_hangs_is_given_up_and_the_run_goes_on(folder, stopped):
    children = start_many(folder, 2, train_arguments(folder), lambda rank: stop_before_noise(rank, stopped))
    begun = time.monotonic()
    assert wait(children[1 - stopped], TIMEOUT + 8) == 2
    assert time.monotonic() - begun >= TIMEOUT - 1
    assert "lost contact with others" in error(folder / f"rank{1 - stopped}")
    if stopped == 0:  # it still holds the run: nobody may go on beside it
        assert resume(folder, 2) == [2, 2]
        assert f"in use by process {children[0]}" in error(folder / "rank0")
        assert error(folder / "rank1") == ""
    os.kill(children[stopped], signal.SIGCONT)
    assert wait(children[stopped], 10) == 2  # it finds the others gone
    assert_nothing_was_forgotten(folder)
    assert resume(folder, 2) == [0, 0], errors(folder)
    assert assert_finished(folder, 2)["steps_lost"] == 2
    assert_nothing_was_forgotten(folder)


@pytest.mark.fault("lost rank")
@pytest.mark.parametrize("told", [[0], [1], [0, 1]])
def test_a_signal_to_any_process_ends_all_with_everything_saved(folder, told):
    children = start_many(folder, 2, train_arguments(folder), lambda rank: slowly())
    ledger, deadline = folder / "run" / "ledger", time.monotonic() + 20
    while not (ledger.exists() and ledger.read_bytes().count(b'"line": "step"') >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for rank in told:
        os.kill(children[rank], signal.SIGTERM)
    assert ends(children) == [143, 143]
    first, second = errors(folder)
    assert first.startswith("gredp: stopped by SIGTERM after")
    assert (first.count("\n"), second) == (1, "")
    assert resume(folder, 2) == [0, 0], errors(folder)
    assert assert_finished(folder, 2)["steps_lost"] == 0


@pytest.mark.fault("changed settings")
def test_another_number_of_processes_on_resume_is_refused(folder, capsys):
    statuses = run_many(
        folder, 2, train_arguments(folder), lambda rank: kill_at("before update 7") if rank else None
    )
    assert statuses == [2, -signal.SIGKILL]
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--resume", str(folder / "run")])
    assert "another processes (2) than now (1)" in capsys.readouterr().err
    assert resume(folder, 4) == [2] * 4
    assert "another processes (2) than now (4)" in error(folder / "rank0")


def test_a_mistake_that_the_first_process_finds_is_told_once(folder):
    (folder / "run").mkdir()
    assert run_many(folder, 2, train_arguments(folder)) == [2, 2]
    first, second = errors(folder)
    assert first == f"gredp: {folder / 'run'} exists already: choose another --out, or --resume it\n"
    assert second == ""


def test_processes_with_other_options_are_refused(folder):
    def other(rank: int) -> None:
        if rank:
            import gredp.app.cli as cli

            honest = cli.resolved
            cli.resolved = lambda *arguments: cli.replace(honest(*arguments), lr=0.2)

    assert run_many(folder, 2, train_arguments(folder), other) == [2, 2]
    assert error(folder / "rank1") == ("gredp: process 1 has another lr (0.2) than the first process (0.1)\n")
    assert not (folder / "run").exists()


@pytest.mark.parametrize("timeout", ["soon", "nan"])
def test_a_timeout_that_is_no_number_is_refused(folder, monkeypatch, capsys, timeout):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("GREDP_TIMEOUT_SECONDS", timeout)
    with pytest.raises(SystemExit, match="2"):
        main(train_arguments(folder))
    assert capsys.readouterr().err == (
        f"gredp: GREDP_TIMEOUT_SECONDS must be a number of seconds, not '{timeout}'\n"
    )


@pytest.mark.slow
def test_a_fork_composes_in_every_process(folder):
    assert run_many(folder, 2, train_arguments(folder)) == [0, 0]
    fork = [
        "train",
        "--fork",
        str(folder / "run"),
        "--epsilon",
        "5",
        "--out",
        str(folder / "again"),
        "--json",
    ]
    assert run_many(folder, 2, fork) == [0, 0], errors(folder)
    record = json.loads((folder / "again" / "record.json").read_text())
    assert record["guarantee"]["steps"] == 2 * STEPS
    assert TARGET - 0.5 < record["guarantee"]["proven_epsilon"] <= 5


def test_a_charge_is_on_the_disk_before_any_process_gets_the_release(folder):
    """I1 as it is seen from the second process: what it steps with has been paid for."""

    def watch(rank: int) -> None:
        honest = step.broadcast

        def noting(tensors):
            result = honest(tensors)
            lines = (folder / "run" / "ledger").read_bytes().count(b'"line": "step"')
            (folder / f"rank{rank}" / "seen").open("a").write(f"{lines}\n")
            return result

        step.broadcast = noting

    assert run_many(folder, 2, train_arguments(folder), watch) == [0, 0], errors(folder)
    seen = [int(line) for line in (folder / "rank1" / "seen").read_text().splitlines()]
    assert len(seen) == STEPS
    assert all(lines >= number for number, lines in enumerate(seen, 1))


# ------------------------------------------------------------------ as typed


def join(port: int, rank: int, start: int, groups: int = 1) -> int:
    """A process of a group whose addresses are in a store that outlives it, as that of torchrun does."""
    child = os.fork()
    if child:
        return child
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank}
    kept = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": start}
    os.environ.update({name: str(value) for name, value in (where | kept).items()})
    try:
        for group in range(groups):
            time.sleep(rank * min(start + group, 1) / 2)  # the first one finds what the second left before
            with process_group():
                dist.barrier()
                if group + 1 == groups:  # gone without a word
                    os._exit(0)
    finally:
        os._exit(70)


@pytest.mark.fault("lost rank")
def test_restarted_processes_do_not_look_for_those_that_are_gone():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in (0, 1):
        assert ends([join(store.port, rank, start) for rank in (0, 1)], 10) == [0, 0]


def test_a_program_may_train_several_times():
    """Under torchrun the second training waited for addresses of the first one's group, without an end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ends([join(store.port, rank, start=0, groups=4) for rank in (0, 1)], 10) == [0, 0]


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    rest = [
        "--master-addr=127.0.0.1",
        "--master-port=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GREDP_TIMEOUT_SECONDS": "60"}
    return subprocess.Popen(
        [*launcher, *rest, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.slow
@pytest.mark.fault("lost rank")
def test_torchrun_restarts_a_run_whose_process_was_killed(folder):
    arguments = train_arguments(folder, "--epochs", "60", "--checkpoint-seconds", "0.2")
    training = torchrun(folder, "--max-restarts=1", "-m", "gredp", *arguments)
    ledger, deadline = folder / "run" / "ledger", time.monotonic() + 120
    try:
        while not (ledger.exists() and ledger.read_bytes().count(b'"line": "step"') >= 30):
            assert time.monotonic() < deadline
            assert training.poll() is None, training.communicate()
            time.sleep(0.02)
        holder = int((folder / "run" / "lock").read_text())
        os.kill(holder, signal.SIGKILL)
        out, err = training.communicate(timeout=180)
    finally:
        training.terminate()  # with its processes, which would outlive a test that fails
        training.wait(60)
    assert training.returncode == 0, err
    record = json.loads((folder / "run" / "record.json").read_text())
    assert (record["starts"], record["processes"], record["guarantee"]["steps"]) == (2, 2, 300)
    assert record["guarantee"]["proven_epsilon"] <= TARGET
    assert json.loads(out)["run"] == str(folder / "run")
