"""Runs of `gredp train` in forked processes that are killed, starved and raced; shared by the fault tests.

A child notes every noise draw in a file of its own, which a kill does not lose: what was truly spent.
"""

import functools
import hashlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import gredp.gradient.step as step
from gredp.app.cli import main
from gredp.gradient.noise import SecretSource
from gredp.storage.ledger_file import LedgerFile, read_ledger
from ranks import free_port

STEPS = 10  # of a whole run: two epochs of five
TARGET = 3.0
TIMEOUT = 3.0  # seconds, for a process that does not answer


def small_data(folder: Path) -> Path:
    """Forty records of 8×8 with three labels."""
    rng = np.random.default_rng(0)
    path = folder / "mine.npz"
    np.savez(
        path,
        x_train=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        y_train=(np.arange(40) % 3).astype(np.uint8),
        x_test=rng.integers(0, 256, (10, 8, 8), dtype=np.uint8),
        y_test=(np.arange(10) % 3).astype(np.uint8),
    )
    return path


def train_arguments(folder: Path, *more: str) -> list[str]:
    data = ["--dataset", str(folder / "mine.npz"), "--model", "lenet-small", "--batch-size", "8"]
    rest = ["--epochs", "2", "--epsilon", str(TARGET), "--accountant", "rdp", "--json"]
    return ["train", *data, *rest, "--out", str(folder / "run"), *more]


def start(folder: Path, arguments: list[str], prepare: Callable[[], None] = lambda: None) -> int:
    """Fork a child that runs the command; its output goes to `out` and `err`, its draws to `draws`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        for descriptor, name in ((1, "out"), (2, "err")):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        warnings.simplefilter("default")
        note_draws(folder / "draws")
        prepare()
        main(arguments)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start_many(
    folder: Path, world: int, arguments: list[str], prepare: Callable[[int], None] = lambda rank: None
) -> list[int]:
    """The same command in `world` processes as torchrun would start them; the notes of each in `rankN`."""
    port, children = free_port(), []
    for rank in range(world):
        place = folder / f"rank{rank}"
        place.mkdir(exist_ok=True)

        def joined(rank: int = rank) -> None:
            torch.set_num_threads(1)
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "RANK": rank}
            os.environ.update({name: str(value) for name, value in where.items()})
            os.environ["GREDP_TIMEOUT_SECONDS"] = str(TIMEOUT)
            prepare(rank)

        children.append(start(place, arguments, joined))
    return children


def wait(child: int) -> int:
    """The exit status; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, arguments: list[str], prepare: Callable[[], None] = lambda: None) -> int:
    return wait(start(folder, arguments, prepare))


def error(folder: Path) -> str:
    return (folder / "err").read_text()


def note_draws(path: Path) -> None:
    """Write down, before anything can be done with them, each step that is noised and each draw's digest."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    normal, begin = SecretSource.normal, SecretSource.begin

    def noting(self, shape, like):
        values = normal(self, shape, like)
        if values.numel() > 3:  # fewer normal numbers may agree by chance, in single precision
            digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
            os.write(file, f"draw {digest}\n".encode())
        return values

    def beginning(self, number):
        begin(self, number)
        os.write(file, b"step\n")

    SecretSource.normal, SecretSource.begin = noting, beginning


def slowly(seconds: float = 0.03) -> None:
    """Each step takes a while, so that there is time to interfere."""
    honest = step.add_noise

    def slow(*arguments):
        time.sleep(seconds)
        return honest(*arguments)

    step.add_noise = slow


# ------------------------------------------------------------------ kill points


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killing(owner: object, name: str, when: str, nth: int) -> None:
    """The process dies before, after or in the middle of the nth call."""
    honest, calls = getattr(owner, name), Counter()

    @functools.wraps(honest)
    def wrapped(*arguments, **options):
        calls[name] += 1
        if calls[name] == nth:
            if when == "before":
                die()
            if when == "within":  # of os.write: a part of the line
                honest(arguments[0], arguments[1][: len(arguments[1]) // 2])
                die()
        result = honest(*arguments, **options)
        if calls[name] == nth and when == "after":
            die()
        return result

    setattr(owner, name, wrapped)


#: what a step and a checkpoint consist of, in their order
POINTS: dict[str, tuple[object, str]] = {
    "charge": (LedgerFile, "append"),
    "mark": (LedgerFile, "_move_mark"),
    "noise": (step, "add_noise"),
    "update": (torch.optim.SGD, "step"),
    "fsync": (os, "fsync"),
    "rename": (os, "replace"),
    "unlink": (Path, "unlink"),
}


def kill_at(environment: str) -> None:
    """`"before charge 3"`: the fault that GREDP_TEST_KILL names."""
    when, point, nth = environment.split()
    owner, name = (os, "write") if point == "write" else POINTS[point]
    killing(owner, name, when, int(nth))


# ------------------------------------------------------------------ what must hold afterwards


def spent_and_charged(folder: Path) -> tuple[int, int]:
    """(steps that were noised, steps in the ledger); no draw may have been used twice."""
    notes = [note for file in folder.glob("**/draws") for note in file.read_text().splitlines()]
    draws = [note for note in notes if note.startswith("draw")]
    assert len(set(draws)) == len(draws), "a noise draw was repeated"
    ledger = folder / "run" / "ledger"
    return notes.count("step"), read_ledger(ledger).steps if ledger.exists() else 0


def assert_nothing_was_forgotten(folder: Path) -> None:
    """I1 and I2."""
    spent, charged = spent_and_charged(folder)
    assert charged >= spent
