"""Poisson batches: how records are drawn (`samplers`), handed out (`loader`) and recognized (`draws`)."""

from gredp.sampling.draws import Draw as Draw
from gredp.sampling.draws import HandedOut as HandedOut
from gredp.sampling.draws import Part as Part
from gredp.sampling.loader import BatchMemoryManager as BatchMemoryManager
from gredp.sampling.loader import EmptyBatches as EmptyBatches
from gredp.sampling.loader import PrivateLoader as PrivateLoader
from gredp.sampling.loader import part_of as part_of
from gredp.sampling.loader import poisson_loader as poisson_loader
from gredp.sampling.samplers import PoissonBatchSampler as PoissonBatchSampler
