"""A moving average of the released weights. It is computed from them alone, so it costs no privacy."""

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class WeightAverage(AveragedModel):
    """After update t the average moves to the new weights by 1 − min(decay, (1 + t)/(10 + t)).

    The rising decay is a warm-up: without it the first weights would count for 1/(1 − decay) updates.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        super().__init__(module, avg_fn=self._moved)

    def _moved(self, average: Tensor, new: Tensor, updates: Tensor | int) -> Tensor:
        t = float(updates)
        return average.lerp(new.detach(), 1 - min(self.decay, (1 + t) / (10 + t)))
