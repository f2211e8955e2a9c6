"""Whether all processes hold the same records, as far as shows without reading them all.

Record i belongs to process i mod N. Where two processes have different records under one number, a record
may be in both and count twice. So the index sets of every `Subset`, and whose records are whose, are compared
whole, and a few records, chosen by a key of this run, by what they hold: each array by its sum under random
signs, to three digits, since two machines may round a transform differently. What changes when it is read
again, such as a random view, cannot be compared and is skipped.

The processes send each other digests under that key. It is drawn for this alone, and neither it nor a digest
is written or printed.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from gredp.distributed import all_reduce_max, rank, run_on_rank_zero, world_size
from gredp.errors import GredpError, PeerFailed
from gredp.sampling.loader import EmptyBatches, PrivateLoader

#: records that are read, twice each
READ = 16
#: of them must differ. A view that is drawn from two is the same twice in a process and another one twice in
#: the next with probability 1/8 at most: so many do with probability 2e-8
DIFFERENT = 12

WHAT = "a comparison of the records"

Digests = list[list[int | None]]


def reject_other_records(loader: PrivateLoader, key: bytes) -> None:
    """Reject, in all processes, data that are not the first process' own. Its `key` is everyone's."""
    if world_size() == 1:
        return
    _, key = run_on_rank_zero(lambda: (None, key), WHAT)
    persons = loader.poisson.persons
    whose = b"" if persons is None else persons.tobytes()
    own: Digests = [[_digest(index_sets(loader.dataset) + whose, key)], *_read(loader, key)]
    first, _ = run_on_rank_zero(lambda: (own, b""), WHAT)
    differing = all_reduce_max(rank() if _different(own, first) else 0, WHAT)
    if differing:
        error = GredpError if differing == rank() else PeerFailed
        raise error(
            f"process {differing} has other records than the first process under the same numbers: give all "
            "the same dataset, and a common seed to random_split(…, generator=…)"
        )


def index_sets(dataset: Any) -> bytes:
    """Those of each `Subset` in it, one after the other."""
    found = [dataset]
    for each in found:  # and what it holds, and so on
        held = each.datasets if isinstance(each, ConcatDataset) else getattr(each, "__dict__", {}).values()
        found += [x for x in held if isinstance(x, Dataset) and all(x is not y for y in found)]
    sets = [np.asarray(each.indices, dtype=np.int64) for each in found if isinstance(each, Subset)]
    return b"".join(len(indices).to_bytes(8) + indices.tobytes() for indices in sets)


def _read(loader: DataLoader[Any], key: bytes) -> Digests:
    """For each record that is looked at, a digest of each of its parts; None where it changes."""
    words = np.frombuffer(hashlib.shake_256(key + b"places").digest(8 * READ), dtype=np.uint64)
    places = [int(word) % len(loader.dataset) for word in words]  # type: ignore[arg-type]
    state, collate = torch.get_rng_state(), loader.collate_fn
    assert isinstance(collate, EmptyBatches)
    reader: DataLoader[Any] = DataLoader(  # in workers of its own, where training reads in workers
        loader.dataset,
        batch_sampler=[[place] for place in places for _ in range(2)],
        collate_fn=collate.collate,
        num_workers=min(loader.num_workers, 1),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    seen = [[_sketch(part, key) for part in tree_leaves(batch)] for batch in reader]
    torch.set_rng_state(state)
    pairs = zip(seen[::2], seen[1::2])
    return [[_digest(a.encode(), key) if a == b else None for a, b in zip(*pair)] for pair in pairs]


def _sketch(part: Any, key: bytes) -> str:
    try:
        x = torch.as_tensor(part).detach().cpu()
        x = (torch.view_as_real(x) if x.is_complex() else x).double().flatten()
    except (TypeError, ValueError, RuntimeError):
        return part if isinstance(part, str) else type(part).__name__
    bits = np.unpackbits(np.frombuffer(hashlib.shake_256(key).digest(-(-len(x) // 8)), dtype=np.uint8))
    return f"{len(x)} {float((2 * torch.from_numpy(bits[: len(x)]).double() - 1) @ x):.3g}"


def _digest(content: bytes, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, key=key, digest_size=7).digest())


def _different(own: Digests, first: Digests) -> bool:
    """Other index sets, or some part of the records that differs in most of them."""
    (indices, *rows), (first_indices, *first_rows) = own, first
    parts = zip(zip(*rows), zip(*first_rows))
    return indices != first_indices or any(
        sum(None not in (a, b) and a != b for a, b in zip(*part)) >= DIFFERENT for part in parts
    )
