"""Images of nobody with textures: shapes of all sizes that hide one another, filled with colored 1/f noise.

How features vary together on them is close to how they do on photographs: whitening by these images is nearly
as good as by the records, and costs no privacy (after Baradad et al., "Learning to see by looking at noise",
2021). The seed is fixed and public, and no record takes part.
"""

import math

import torch
from torch import Tensor

#: shapes on an image at most, and how many images are drawn at once
SHAPES, AT_ONCE = 40, 64
#: radii of shapes relative to the image's side; their density is ∝ r⁻³, the same at every scale
SMALLEST, LARGEST = 1 / 16, 1 / 2


def random_images(count: int, channels: int, side: int, seed: int) -> Tensor:
    """`[count, channels, side, side]` in [0, 1]; with one channel, the mean of three."""
    generator = torch.Generator().manual_seed(seed)
    parts = [_draw(AT_ONCE, side, generator) for _ in range(-(-count // AT_ONCE))]
    images = torch.cat(parts)[:count]
    return images if channels == 3 else images.mean(1, keepdim=True).expand(-1, channels, -1, -1)


def _draw(count: int, side: int, generator: torch.Generator) -> Tensor:
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    noise = _noise(count, side, generator)

    def filling() -> Tensor:
        """A color that varies slowly, with some noise."""
        which = torch.randint(count, (count,), generator=generator)
        strength = 0.25 * torch.rand(count, 1, 1, 1, generator=generator).square()
        color = torch.rand(count, 1, 1, 1, generator=generator)
        color = color + 0.12 * torch.randn(count, 3, 1, 1, generator=generator)
        slope = 0.2 * torch.randn(2, count, 1, 1, 1, generator=generator) / side
        return color + strength * noise[which] + slope[0] * y + slope[1] * x

    image = filling()
    shapes = torch.randint(3, SHAPES, (count, 1, 1), generator=generator)
    for place in range(SHAPES):
        share = torch.rand(count, 1, 1, generator=generator)
        radius = side * (SMALLEST**-2 - share * (SMALLEST**-2 - LARGEST**-2)) ** -0.5
        shape = _shape(count, side, y, x, radius, generator) * (place < shapes)
        image = torch.lerp(image, filling(), shape[:, None])
    return image.clamp(0, 1)


def _noise(count: int, side: int, generator: torch.Generator) -> Tensor:
    """`[count, 3, side, side]`, about 0 with deviation 1: 1/f^a noise, a third of it stretched."""
    axis = torch.fft.fftfreq(side)
    exponent = 0.5 + 2.0 * torch.rand(count, 1, 1, generator=generator)
    angle = math.pi * torch.rand(count, 1, 1, generator=generator)
    stretch = torch.where(torch.rand(count, 1, 1, generator=generator) < 0.33, 6.0, 1.0)
    along = axis[:, None] * angle.cos() + axis * angle.sin()
    across = axis * angle.cos() - axis[:, None] * angle.sin()
    gain = (along.square() + (stretch * across).square() + (0.5 / side) ** 2) ** (-exponent / 2)
    white = torch.fft.fft2(torch.randn(count, 3, side, side, generator=generator))
    noise = torch.fft.ifft2(white * gain[:, None]).real
    # Neighboring colors go together, as they do in light.
    mixing = 1.0 + 0.5 * torch.randn(count, 3, 1, generator=generator)
    other = 0.4 * torch.randn(count, 3, 3, generator=generator)
    noise = torch.einsum("nij,njhw->nihw", other, noise) + mixing[..., None] * noise[:, :1]
    noise = noise - noise.mean((1, 2, 3), True)
    return noise / noise.std((1, 2, 3), keepdim=True)


def _shape(count: int, side: int, y: Tensor, x: Tensor, radius: Tensor, generator: torch.Generator) -> Tensor:
    """`[count, side, side]` in [0, 1]: an ellipse, a rectangle or a star-like shape with a soft edge."""
    middle = side * (1.2 * torch.rand(2, count, 1, 1, generator=generator) - 0.1)
    turn, phase = 2 * math.pi * torch.rand(2, count, 1, 1, generator=generator)
    aspect = torch.exp(0.5 * torch.randn(count, 1, 1, generator=generator))
    a = ((y - middle[0]) * turn.cos() + (x - middle[1]) * turn.sin()) / aspect
    b = ((x - middle[1]) * turn.cos() - (y - middle[0]) * turn.sin()) * aspect
    kind = torch.rand(count, 1, 1, generator=generator)
    points = torch.randint(2, 7, (count, 1, 1), generator=generator)
    wobble = torch.where(kind > 0.6, 0.5 * torch.rand(count, 1, 1, generator=generator), 0.0)
    around = a.hypot(b) * (1 + wobble * torch.cos(points * torch.atan2(b, a) + phase))
    distance = torch.where(kind < 0.35, torch.maximum(a.abs(), b.abs()), around)
    return (radius - distance).add(0.5).clamp(0, 1)
