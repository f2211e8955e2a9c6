"""Files that show when they were damaged: text under a SHA-256 seal, written whole or not at all.

A sealed line is the hash of (the seal before it, its own text), a blank, the text. A seal finds accidents and
careless edits. It has no key, so it does not find someone who
rewrites every seal behind an edit.
"""

import hashlib
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from gredp.errors import GredpError

#: largest text that is read; a ledger of ten million steps fits
LARGEST_TEXT = 1 << 30


class CorruptFile(GredpError):
    """A file is not what was written."""


def seal(text: str, previous: str = "") -> tuple[str, str]:
    """(the sealed line, its seal)."""
    mark = hashlib.sha256((previous + text).encode()).hexdigest()
    return f"{mark} {text}\n", mark


def unseal(line: str, previous: str = "") -> tuple[Any, str]:
    """(the JSON value on the line, its seal); ValueError if it is not what was sealed."""
    mark, _, text = line.partition(" ")
    if seal(text, previous)[1] != mark:
        raise ValueError("its seal does not match")
    return json.loads(text), mark


def cannot(path: Path, what: str, error: OSError) -> GredpError:
    return GredpError(f"{path} cannot be {what}: {error.strerror or error}")


def read(path: Path, limit: int = LARGEST_TEXT) -> bytes:
    """A plain file of at most `limit` bytes; no link is followed and nothing that could block is opened."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CorruptFile(f"{path} is not a plain file")
            if status.st_size > limit:
                raise CorruptFile(f"{path} has {status.st_size} bytes, more than {limit}")
            return file.read(limit)
    except FileNotFoundError:
        raise CorruptFile(f"{path} is not there") from None
    except OSError as error:
        raise CorruptFile(f"{path} cannot be read: {error.strerror or error}") from None


def write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Whole or not at all, and on the disk on return: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise cannot(path, "written", error) from None


def make_folder(path: Path) -> None:
    """With all above it; one that is there already is as good."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot(path, "made", error) from None


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_document(path: Path, value: Any, mode: int = 0o644) -> None:
    write(path, seal(json.dumps(value, ensure_ascii=False))[0].encode(), mode)


def read_document(path: Path) -> Any:
    """The value that `write_document` was given; anything else is rejected."""
    content = read(path)
    try:
        return unseal(content.decode().removesuffix("\n"))[0]
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is damaged: {one_line(error)}") from None


def read_json(path: Path) -> dict[str, Any]:
    """An object without a seal; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is damaged: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} is damaged: it holds no object")
    return value


def one_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
