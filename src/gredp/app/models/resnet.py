"""ResNet-20 for small images with group normalization, and ResNet-18 for transfer with a frozen backbone."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.app.models.sequential import Shape
from gredp.errors import GredpError


class PlainBlock(nn.Module):
    """Two 3×3 convolutions around an identity; new channels of the identity are zeros, as in the original."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(outputs // 8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(outputs // 8, outputs)
        self.new = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + (F.pad(x, (0, 0, 0, 0, 0, self.new)) if self.new else x))


def resnet20(input_shape: Shape, classes: int) -> nn.Module:
    """A 3×3 stem, three blocks for each width with an average-pooling by 2 after them, one linear layer."""
    channels = 16
    stem = nn.Conv2d(input_shape[0], channels, 3, padding=1, bias=False)
    layers: list[nn.Module] = [stem, nn.GroupNorm(2, channels), nn.ReLU()]
    for width in (16, 32, 64):
        layers += [PlainBlock(channels, width), PlainBlock(width, width), PlainBlock(width, width)]
        layers.append(nn.AvgPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch normalization; names as in common weight files."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """The standard network: 7×7 stem, four stages of two blocks; small images are scaled up to `size`.

    With `stages`, its features are what its last stages give, side by side, averaged over the image and its
    mirror image turned back: more for a linear classifier, and nothing for the network's own rest.
    """

    def __init__(self, classes: int = 10, size: int = 96, stages: bool = False) -> None:
        super().__init__()
        self.size, self.stages = size, stages
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return classify(self.layer4[1], self.fc, self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """`[b, 3, h, w]` → `[b, 512, size/32, size/32]`: all before the last block; frozen.

        With `stages` `[b, 1280, 2, 2]`: the third stage, both blocks of the fourth, averaged over quarters.
        """
        if not self.stages:
            return self.layer4[0](self._third(x))
        pairs = zip(self._stages(x), self._stages(x.flip(3)))
        return torch.cat([(seen + mirrored.flip(3)) / 2 for seen, mirrored in pairs], 1)

    def _stages(self, x: Tensor) -> list[Tensor]:
        third = self._third(x)
        fourth = self.layer4[0](third)
        return [F.adaptive_avg_pool2d(t.float(), 2) for t in (third, fourth, self.layer4[1](fourth))]

    def _third(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.size:
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=False)
        x = x.to(self.conv1.weight.dtype)
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.layer3(self.layer2(self.layer1(x)))


class Tail(nn.Module):
    """The last block and the classifier of a ResNet-18, on its `features`; names as in the whole network."""

    def __init__(self, whole: ResNet18) -> None:
        super().__init__()
        self.layer4 = nn.Sequential(OrderedDict([("1", whole.layer4[1])]))
        self.fc = whole.fc

    def forward(self, features: Tensor) -> Tensor:
        return classify(self.layer4, self.fc, features)


def classify(block: nn.Module, fc: nn.Module, features: Tensor) -> Tensor:
    logits: Tensor = fc(F.adaptive_avg_pool2d(block(features), 1).flatten(1))
    return logits


def transfer(model: ResNet18, convolutions: int) -> ResNet18:
    """Freeze all but the classifier and the last one or two convolutions; BatchNorm stays in eval mode."""
    if convolutions not in (1, 2):
        raise GredpError(f"transfer trains the last 1 or 2 convolutions, not {convolutions}")
    model.requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    for name in ["fc", "layer4.1.conv2", "layer4.1.conv1"][: convolutions + 1]:
        model.get_submodule(name).requires_grad_(True)
    return model


def resnet18_2conv(input_shape: Shape, classes: int, convolutions: int = 2) -> nn.Module:
    """On images the whole network, on features of its frozen part the rest of it."""
    whole = transfer(ResNet18(classes), convolutions)
    return Tail(whole) if input_shape[0] == whole.fc.in_features else whole


def resnet18_1conv(input_shape: Shape, classes: int) -> nn.Module:
    return resnet18_2conv(input_shape, classes, 1)
