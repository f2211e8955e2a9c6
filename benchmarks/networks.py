"""The networks that are timed, each with its batch: (model, input of a batch, classes)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gredp.app.models import build


class SmallTransformer(nn.Module):
    """Encoder layers over tokens, mean-pooled."""

    def __init__(self, width: int = 128, tokens: int = 64, depth: int = 2) -> None:
        super().__init__()
        vocabulary, classes = 1000, 10
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head(self.layers(self.words(ids) + self.places(places)).mean(1))


class SmallLSTM(nn.Module):
    """One layer over 32 tokens, the class from its last state; `gredp.fix` and Opacus' replace the layer."""

    def __init__(self, width: int = 128, vocabulary: int = 1000, classes: int = 10) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.words(ids))[0][:, -1])
        return out


def mlp(width: int = 1024) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


IMAGES = {
    "lenet5": (1, 28, 28),
    "model3": (3, 32, 32),
    "resnet20": (3, 32, 32),
    "alexnet": (3, 32, 32),
    "resnet18-2conv": (3, 32, 32),
}
BATCH = {"lenet5": 500, "mlp": 500, "transformer-6x384": 16, "transformer-6x384-lora": 16}
NETWORKS = (*IMAGES, "mlp", "transformer", "lstm", "transformer-6x384", "transformer-6x384-lora")


def lora(model: SmallTransformer) -> nn.Module:
    """All frozen but adapters of rank 8 on the feed-forward layers, and the head."""
    from peft import LoraConfig, inject_adapter_in_model

    adapted: nn.Module = inject_adapter_in_model(
        LoraConfig(r=8, target_modules=["linear1", "linear2"]), model
    )
    model.head.requires_grad_(True)
    return adapted


def facts(name: str) -> dict[str, int]:
    """Trained `parameters`, and `products`: weights times positions, of layers that see several of a record.

    These are the multiply-adds of a record's gradient where it is no product of two vectors.
    """
    model, x = network(name, 1)
    products = []

    def note(layer: nn.Module, _: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        positions = math.prod(out.shape[2:]) if out.dim() > 3 else out.shape[1] if out.dim() == 3 else 1
        if positions > 1:
            products.append(positions * sum(p.numel() for p in layer.parameters() if p.requires_grad))

    kinds = (nn.Conv2d, nn.Linear, nn.MultiheadAttention, nn.LSTM)
    for layer in model.modules():
        if isinstance(layer, kinds):
            layer.register_forward_hook(note)
    with torch.no_grad():
        model(x)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"parameters": trained, "products": sum(products)}


def network(name: str, batch: int | None = None) -> tuple[nn.Module, Tensor]:
    """A fresh network in training mode and one batch for it; mlp256 is an mlp of width 256."""
    torch.manual_seed(0)
    size = batch or BATCH.get(name, 128)
    if name.startswith("mlp"):
        return mlp(int(name[3:] or 1024)), torch.randn(size, 784)
    if name == "transformer":
        return SmallTransformer(), torch.randint(0, 1000, (size, 64))
    if name.startswith("transformer-6x384"):
        model = SmallTransformer(384, 32, 6)
        return lora(model) if name.endswith("lora") else model, torch.randint(0, 1000, (size, 32))
    if name == "lstm":
        return SmallLSTM(), torch.randint(0, 1000, (size, 32))
    return build(name, IMAGES[name], 10), torch.randn(size, *IMAGES[name])
