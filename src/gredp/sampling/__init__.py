"""Poisson batches: how records are drawn (`samplers`), handed out (`loader`) and recognized (`draws`)."""

from gredp.sampling.draws import Draw, HandedOut, Part
from gredp.sampling.loader import BatchMemoryManager, EmptyBatches, PrivateLoader, part_of, poisson_loader
from gredp.sampling.samplers import CyclicBatchSampler, PoissonBatchSampler

__all__ = [
    "BatchMemoryManager",
    "CyclicBatchSampler",
    "Draw",
    "EmptyBatches",
    "HandedOut",
    "Part",
    "PoissonBatchSampler",
    "PrivateLoader",
    "part_of",
    "poisson_loader",
]
