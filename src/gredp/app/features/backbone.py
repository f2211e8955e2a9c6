"""The frozen part of a pretrained ResNet-18: everything before its last block. For transfer learning.

The weights must come from public data: nothing here protects what they were trained on.
"""

import copy
import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from gredp.app.models.resnet import ResNet18
from gredp.errors import GredpError
from gredp.storage.files import one_line, read

#: largest file of weights that is read
LARGEST_WEIGHTS = 1 << 30
#: height and width that images are scaled up to for a classifier on several stages
SIZE = 128
STAGES = "layer3, layer4.0 and layer4.1, mirrored"
#: records at a time: more would leave the processor's cache
CHUNK = 16


class Backbone:
    """Images `[b, 3, h, w]` in [0, 1], scaled up to `size` pixels → features `[b, 512, size/32, size/32]`.

    With `stages`, `[b, 1280, 2, 2]`: of the third stage and of both blocks of the fourth, averaged over
    quarters of the image, and over the image and its mirror image turned back.

    `path` is a safetensors file with torchvision's names, in half or single precision; its classifier, if it
    has one, is not used. Normalization layers keep the statistics of the file.
    """

    def __init__(self, path: str, size: int = 96, stages: bool = False) -> None:
        content = read(Path(path).expanduser().resolve(), LARGEST_WEIGHTS)
        self.path, self.size, self.stages = path, size, stages
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            found = load(content)
        except SafetensorError as error:
            raise GredpError(f"{path} is not a safetensors file: {one_line(error)}") from None
        self.tensors = {name: t.float() for name, t in found.items() if not name.startswith("fc.")}
        self._check()

    def _check(self) -> None:
        """Reject weights of another network: some layers would keep their random initialization."""
        with torch.device("meta"):  # names and shapes alone
            own = {n: t for n, t in ResNet18().state_dict().items() if not n.startswith("fc.")}
        uncounted = {n for n in own if n.endswith("num_batches_tracked")}  # unused, and absent from old files
        missing = sorted(own.keys() - uncounted - self.tensors.keys())
        foreign = sorted(self.tensors.keys() - own.keys())
        if missing or foreign:
            what = f"lacks {missing[0]}" if missing else f"holds {foreign[0]}"
            raise GredpError(f"{self.path} {what}: its names are not those of a ResNet-18 of torchvision")
        for name, tensor in self.tensors.items():
            if tensor.shape != own[name].shape:
                was, wanted = tuple(tensor.shape), tuple(own[name].shape)
                raise GredpError(f"{self.path}: {name} has shape {was}, not {wanted}")
            if not tensor.isfinite().all():
                raise GredpError(f"{self.path}: {name} holds values that are not finite")

    def identity(self) -> dict[str, Any]:
        until = STAGES if self.stages else "layer4.0"
        return {"name": "resnet18", "until": until, "size": self.size, "sha256": self.sha256}

    @cached_property
    def network(self) -> ResNet18:
        network = ResNet18(size=self.size, stages=self.stages)
        self.load_into(network)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network.requires_grad_(False).eval()

    @cached_property
    def quick(self) -> ResNet18:
        """For all stages in bfloat16 where the processor has it: half the time, and 1 % off."""
        native = self.stages and torch.cpu._is_avx512_bf16_supported()
        return copy.deepcopy(self.network).bfloat16() if native else self.network

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] != 3:
            raise GredpError(f"a pretrained ResNet-18 takes images of 3 channels, not {x.shape[1]}")
        with torch.no_grad():
            parts = x.contiguous(memory_format=torch.channels_last).split(CHUNK)
            return torch.cat([self.quick.features(part) for part in parts]).contiguous()

    def load_into(self, model: nn.Module) -> None:
        """Put the file's weights into the whole network or its tail; the classifier stays as it was drawn."""
        own = {n: t for n, t in model.state_dict().items() if n in self.tensors}
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.tensors[name])
