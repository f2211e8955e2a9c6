"""Where secret random numbers come from: a 256-bit secret of the process, a keystream for each use of it.

Formal guarantee. key = HMAC-SHA256(secret, purpose, incarnation, numbers), and the bits are AES-256 in
counter mode under that key, on devices other than the CPU ChaCha20: without the secret they look uniform. The
secret comes from the operating system, is written nowhere and is gone with the process, so a run that is
resumed cannot repeat a draw even if it wanted to.
"""

import hmac
import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from gredp.chacha import chacha20
from gredp.errors import GredpError

CPU = torch.device("cpu")


class Secret:
    """Gives a keystream for every (purpose, numbers); the caller never asks for the same twice.

    Callers without numbers of their own take `fresh` ones, which all users of the secret share.

    `insecure_seed` makes the draws repeatable, for tests only: they are no secret then.
    """

    def __init__(self, insecure_seed: int | None = None) -> None:
        seed = f"insecure seed {insecure_seed}".encode()
        self._key = secrets.token_bytes(32) if insecure_seed is None else hmac.digest(b"", seed, "sha256")
        self._process = os.getpid()
        self.insecure = insecure_seed is not None
        #: number of this start of the run; under a seed it alone keeps the draws of two starts apart
        self.incarnation = 0
        self._numbers = itertools.count(1)

    def fresh(self) -> int:
        """A number that nobody was given before."""
        return next(self._numbers)

    def _key_for(self, purpose: str, *numbers: int) -> bytes:
        if os.getpid() != self._process:
            raise GredpError("a secret stays in its process: a forked one would repeat its draws")
        label = "/".join([purpose, *map(str, (self.incarnation, *numbers))])
        return hmac.digest(self._key, label.encode(), "sha256")

    def _cipher(self, purpose: str, *numbers: int) -> Any:
        # A key is used once, so the counter may begin at zero.
        key = self._key_for(purpose, *numbers)
        return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def keystream(self, size: int, purpose: str, *numbers: int) -> bytearray:
        """`size` bytes, and a few more at the end that are not random."""
        stream = bytearray(size + 15)
        self._cipher(purpose, *numbers).update_into(bytes(size), stream)
        return stream

    def words_in_turn(self, counts: Sequence[int], purpose: str, *numbers: int) -> Iterator[Any]:
        """`[count]` of int32 of one keystream for each count, numpy's, in the place of those before them."""
        most = max(counts, default=0)
        cipher, stream, zeros = self._cipher(purpose, *numbers), bytearray(4 * most + 15), bytes(4 * most)
        words = np.frombuffer(stream, dtype=np.int32, count=most)
        for count in counts:
            cipher.update_into(memoryview(zeros)[: 4 * count], stream)
            yield words[:count]

    def words(self, count: int, device: torch.device, purpose: str, *numbers: int) -> Tensor:
        """`[count]` of int32, made where they are used: nothing is copied to the device but a key."""
        if not count:
            return torch.zeros(0, dtype=torch.int32, device=device)
        if device.type == "cpu":
            stream = self.keystream(4 * count, purpose, *numbers)
            return torch.frombuffer(stream, dtype=torch.int32, count=count)
        return chacha20(self._key_for(purpose, *numbers), -(-count // 16), device)[:count]

    def split(self, parts: int) -> "Split":
        """A new one, into so many parts."""
        return Split(bytes(self.keystream(32, "split", self.fresh())[:32]), parts)

    def uniform(self, count: int, purpose: str, *numbers: int) -> Tensor:
        """`[count]` of float64 in (0, 1], multiples of 2⁻⁵³."""
        uniform: Tensor = unit_interval(self.words(2 * count, CPU, purpose, *numbers).view(torch.int64))
        return uniform

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GredpError("a secret cannot be copied or stored: a copy would repeat its draws")

    def __repr__(self) -> str:
        return "Secret()"


@dataclass(frozen=True, repr=False)
class Split:
    """Which of `parts` parts each record belongs to: AES-256 of its number, modulo `parts`.

    Formal guarantee. Without the key, records fall into parts independently and evenly,
    so that a record more or less leaves the law of the others' parts as it was. Given the split, ε still
    holds for neighbors in which the other records keep their numbers: it may lie in the run's folder.
    """

    key: bytes
    parts: int

    @cached_property
    def name(self) -> str:
        """By which the ledger tells splits apart; it does not tell the key."""
        return hmac.digest(self.key, b"name of the split", "sha256")[:8].hex()

    def part_of(self, records: Tensor) -> Tensor:
        """`[n]` of record numbers → `[n]` of parts."""
        return torch.from_numpy((self._words(records, 0) % np.uint64(self.parts)).astype(np.int64))

    def shuffled(self, records: int, epoch: int) -> Tensor:
        """All record numbers in the order of this epoch, the same in every process."""
        order = np.argsort(self._words(torch.arange(records), epoch + 1), kind="stable")
        return torch.from_numpy(order.astype(np.int64))

    def _words(self, records: Tensor, round_: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        blocks = np.zeros((len(records), 2), dtype="<u8")
        blocks[:, 0], blocks[:, 1] = records.numpy(), round_
        # Each pair is encrypted once under this key, so the cipher is the keyed function itself.
        cipher = Cipher(algorithms.AES(self.key), modes.ECB()).encryptor()
        return np.frombuffer(cipher.update(blocks.tobytes()), dtype="<u8").reshape(-1, 2)[:, 0]


def unit_interval(words: Any, cast: Any = Tensor.to, dtype: Any = torch.float64) -> Any:
    """int64 → float64 in (0, 1]; 53 bits each, no rounding. Arrays of numpy bring `cast` and `dtype`."""
    values = cast(words >> 11, dtype)
    values += 2.0**52 + 1
    values *= 2.0**-53
    return values
