"""A run folder: its lock, its ledger and its checkpoints. No torch.

| file | what | written |
|---|---|---|
| settings.json | the settings of the run, sealed (`gredp train` only) | once |
| split | with correlation bands: the key that splits the records into parts, mode 600 | once |
| ledger | every step charged, sealed line by line | fsync before each noisy update |
| ledger.mark | how far the ledger has come | in place, fsync behind each of its lines |
| checkpoint-N.safetensors | tensors | atomically; the last two are kept |
| checkpoint-N.json | the rest, with the SHA-256 of the tensors, sealed | after its tensors |
| metrics.json, record.json, model.safetensors, report.html | what is released | atomically |
| lock | held while a process trains; the system frees it however that process ends | |
"""

import fcntl
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gredp.errors import GredpError
from gredp.privacy.ledger import Entry
from gredp.storage.evidence import Place
from gredp.storage.files import CorruptFile, cannot, read, read_document, write, write_document
from gredp.storage.ledger_file import LedgerFile, ledger_of

#: largest checkpoint that is read
LARGEST_TENSORS = 64 << 30


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` are the bytes of a safetensors file, `facts` everything else."""

    tensors: bytes
    facts: dict[str, Any]


class RunFolder:
    """A run folder, locked by this process until `close`."""

    def __init__(self, path: Path, open_ledger: Callable[[Path], LedgerFile]) -> None:
        """Lock a folder that exists, then open its ledger."""
        self.path = path
        self._lock: int | None = _take_lock(path)
        self._last: int | None = None  # the newest checkpoint known to be whole
        try:
            self.ledger = open_ledger(path / "ledger")
        except BaseException:
            self._unlock()
            raise

    @classmethod
    def create(cls, path: Path, inherited: Iterable[Entry] = ()) -> "RunFolder":
        """A new folder with a ledger; a folder that exists is not written into."""
        try:
            path.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            raise GredpError(f"{path} exists already: choose another --out, or --resume it") from None
        except OSError as error:
            raise cannot(path, "written", error) from None
        return cls(path, lambda ledger: LedgerFile.create(ledger, inherited))

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """A folder that a run left; what it has spent is verified against all that it holds."""
        ledger_of(path)  # before a lock is left in a folder of something else
        return cls(path, LedgerFile.open)

    def keep_split(self, key: bytes) -> None:
        """Before the first checkpoint: a run that can be resumed has its split."""
        write_document(self.path / "split", {"key": key.hex()}, mode=0o600)

    def split(self) -> str | None:
        """The key of the split, in hexadecimal; None where there is none."""
        path = self.path / "split"
        if not path.exists():
            return None
        kept = read_document(path)
        try:
            return bytes.fromhex(kept["key"]).hex()
        except (KeyError, TypeError, ValueError):
            raise CorruptFile(f"{path} is not the split of a run") from None

    def save(self, tensors: bytes, facts: dict[str, Any]) -> None:
        """A new checkpoint; the one before it is kept, older ones go once this one is on the disk."""
        known = self._numbers()
        number = 1 + max(known, default=0)
        content = {"size": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}
        place = self.ledger.written.place._asdict()
        write(self._file(number, "safetensors"), tensors)
        write_document(self._file(number, "json"), {"tensors": content, "ledger": place, **facts})
        for old in sorted({*known} - {self._last}):
            for file in sorted(
                self.path.glob(f"checkpoint-{old:06d}.*")
            ):  # .json first: none without tensors
                file.unlink(missing_ok=True)
        self._last = number

    def newest(self) -> Checkpoint:
        """The newest whole checkpoint; damaged ones are skipped with a warning."""
        for number in sorted(self._numbers(".json"), reverse=True):
            try:
                found = self._read(number)
            except CorruptFile as error:
                warnings.warn(f"{error}; the checkpoint before it is used", stacklevel=2)
                continue
            self._last = number
            return found
        raise GredpError(f"{self.path} has no whole checkpoint")

    def _read(self, number: int) -> Checkpoint:
        facts = read_document(self._file(number, "json"))
        path = self._file(number, "safetensors")
        try:
            size, digest = facts["tensors"]["size"], facts["tensors"]["sha256"]
            Place.of(facts["ledger"])
        except (KeyError, TypeError, ValueError):
            raise CorruptFile(f"{self._file(number, 'json')} is not a checkpoint") from None
        tensors = read(path, min(size, LARGEST_TENSORS))
        if hashlib.sha256(tensors).hexdigest() != digest:
            raise CorruptFile(f"{path} is damaged: its hash does not match")
        return Checkpoint(tensors, facts)

    def _numbers(self, end: str = "") -> list[int]:
        """Numbers of checkpoints that were begun; with ".json", of those that were finished."""
        names = (p.name for p in self.path.glob(f"checkpoint-*{end}"))
        stems = (name.removeprefix("checkpoint-").split(".")[0] for name in names)
        return sorted({int(stem) for stem in stems if stem.isdecimal()})

    def _file(self, number: int, kind: str) -> Path:
        return self.path / f"checkpoint-{number:06d}.{kind}"

    def close(self) -> None:
        self.ledger.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            _locks.discard(self._lock)
            os.close(self._lock)
            self._lock = None


#: locks of this process; workers that it forks must not hold on to them when it dies
_locks: set[int] = set()


def _leave_locks_to_the_parent() -> None:
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


def _take_lock(path: Path) -> int:
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise cannot(path, "written", error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        raise GredpError(f"{path} is in use by process {holder or '?'}: one process at a time") from None
    _locks.add(lock)
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock
