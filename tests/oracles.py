"""Slow, obvious, float64 truths that the tests hold the fast code against.

Nothing here is shared with the package: gradients come from autograd on batches of one, transforms from
dense DFT matrices, correlations from their definition.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]  # (output of one record, its target) → scalar
Gradients = dict[str, Tensor]  # name → [b, *shape]

# ------------------------------------------------------------------ gradients record by record


def bare(model: nn.Module) -> nn.Module:
    """A float64 copy without any hook."""
    twin = copy.deepcopy(model).double()
    for layer in twin.modules():
        layer._forward_hooks.clear()
        layer._forward_pre_hooks.clear()
    return twin


def wavy(out: Tensor, target: Tensor | None = None) -> Tensor:
    """A loss whose gradient differs at every output and from record to record. `[b, ...]` → `[b]`."""
    out = out.flatten(1)
    ramp = torch.cos(torch.arange(out.shape[1], dtype=out.dtype) + 0.3)
    return (out * ramp + out.square() / 2).sum(1)


def per_sample_gradients(
    model: nn.Module, x: Tensor, targets: Tensor | None = None, loss: Loss = wavy
) -> Gradients:
    """`[b, *shape]` for every trainable parameter: a Python loop over batches of one."""
    twin = bare(model)
    parameters = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {n: [] for n in parameters}
    for i in range(len(x)):
        record = x[i : i + 1].double() if x.is_floating_point() else x[i : i + 1]
        target = None if targets is None else targets[i : i + 1]
        value = loss(twin(record), target).sum()
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), found):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {
        n: torch.stack(rows[n]) if rows[n] else torch.zeros(0, *p.shape, dtype=torch.float64)
        for n, p in parameters.items()
    }


def of_records(
    model: nn.Module, x: Tensor, views: int, targets: Tensor | None = None, loss: Loss = wavy
) -> Gradients:
    """`[b, *shape]`: the gradient of each record's mean loss over its views, which lie side by side in x."""
    inputs = per_sample_gradients(model, x, targets, loss)
    return {name: torch.stack([v.mean(0) for v in g.split(views)]) for name, g in inputs.items()}


# ------------------------------------------------------------------ clipped sums


def clipped_sum(
    gradients: Mapping[str, Tensor],
    groups: Iterable[tuple[Iterable[str], float]],
    *,
    automatic: bool = False,
    measure: Callable[[str, int, Tensor], Tensor] = lambda name, i, g: g,
    release: Callable[[str, Tensor], Tensor] = lambda name, g: g,
) -> Gradients:
    """Σ_i of each record's gradient, bounded group by group.

    `measure(name, i, g)` is the vector whose norm is bounded (weighted, padded or
    band-limited), `release(name, g)` what of g is added.
    """
    total = {n: torch.zeros(g.shape[1:], dtype=torch.float64) for n, g in gradients.items()}
    batch = len(next(iter(gradients.values())))
    for names, norm in [(list(names), norm) for names, norm in groups]:
        for i in range(batch):
            length = math.sqrt(sum(measure(n, i, gradients[n][i]).abs().square().sum().item() for n in names))
            factor = norm / (length + 0.01) if automatic else min(1.0, norm / max(length, 1e-300))
            for n in names:
                total[n] += factor * release(n, gradients[n][i])
    return total


def flat(gradients: Mapping[str, Tensor], norm: float) -> list[tuple[list[str], float]]:
    """One ball over everything."""
    return [(list(gradients), norm)]


def by_layer(gradients: Mapping[str, Tensor], norm: float) -> list[tuple[list[str], float]]:
    """One ball for each layer, norm/√L each."""
    layers: dict[str, list[str]] = {}
    for name in gradients:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return [(names, norm / math.sqrt(len(layers))) for names in layers.values()]


# ------------------------------------------------------------------ Fourier


def dft_matrix(n: int) -> Tensor:
    """`[n, n]`: exp(−2πi jk/n)/√n."""
    j = torch.arange(n, dtype=torch.float64)
    return torch.exp(-2j * math.pi * j[:, None] * j[None, :] / n) / math.sqrt(n)


def dft(x: Tensor, axes: int) -> Tensor:
    """The unitary DFT over the last `axes` axes, one dense matrix product for each."""
    x = x.to(torch.complex128)
    for axis in range(-axes, 0):
        x = torch.movedim(torch.movedim(x, axis, -1) @ dft_matrix(x.shape[axis]).T, -1, axis)
    return x


def inverse_dft(x: Tensor, axes: int) -> Tensor:
    return dft(x.conj(), axes).conj()


def grid_energy(dense: Tensor, axes: int) -> Tensor:
    """`[b, *lead, *grid]` → `[b, *grid]`."""
    energy = dft(dense, axes).abs().square()
    return energy.flatten(1, energy.dim() - axes - 1).sum(1) if energy.dim() > axes + 1 else energy


# ------------------------------------------------------------------ convolutions on the padded grid


def zero_padded(x: Tensor, padding: tuple[int, int]) -> Tensor:
    """`[c, h, w]` → `[c, h + 2p, w + 2p']`."""
    (p, r), (c, h, w) = padding, x.shape
    out = torch.zeros(c, h + 2 * p, w + 2 * r, dtype=torch.float64)
    out[:, p : p + h, r : r + w] = x
    return out


def padded_correlation(conv: nn.Conv2d, x: Tensor, g: Tensor) -> Tensor:
    """`[out, in/groups, H, W]`: the full circular cross-correlation of one record, by its definition.

    `x` is `[in, h, w]` before padding, `g` the output gradient `[out, h', w']`. Entry (u, v) sums
    x[u + s·t, v + s·r]·g[t, r] with indices modulo the padded grid; the kernel gradient is the crop at
    multiples of the dilation.
    """
    x = zero_padded(x, conv.padding)
    inputs, outputs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    H, W = x.shape[1:]
    total = torch.zeros(conv.out_channels, inputs, H, W, dtype=torch.float64)
    for o in range(conv.out_channels):
        first = (o // outputs) * inputs
        for t in range(g.shape[1]):
            for r in range(g.shape[2]):
                for u in range(H):
                    for v in range(W):
                        at = x[:, (u + conv.stride[0] * t) % H, (v + conv.stride[1] * r) % W]
                        total[o, :, u, v] += at[first : first + inputs] * g[o, t, r]
    return total


def crop(conv: nn.Conv2d, correlation: Tensor) -> Tensor:
    """The kernel's own gradient out of the padded correlation."""
    (k, m), (d, e) = conv.kernel_size, conv.dilation
    return correlation[..., : k * d : d, : m * e : e]


def padded_spectra(
    model: nn.Module, x: Tensor, targets: Tensor | None = None, loss: Loss = wavy
) -> dict[str, list[Tensor]]:
    """For each Conv2d weight, each record's padded spectrum `[out, in/groups, H, W]`."""
    twin = bare(model)
    seen: dict[str, tuple[nn.Conv2d, Tensor, Tensor]] = {}
    for name, layer in twin.named_modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(
                lambda conv, args, out, name=name: seen.__setitem__(f"{name}.weight", (conv, args[0], out))
            )
    found: dict[str, list[Tensor]] = {}
    for i in range(len(x)):
        value = loss(twin(x[i : i + 1].double()), None if targets is None else targets[i : i + 1]).sum()
        outs = [out for _, _, out in seen.values()]
        for (name, (conv, seen_x, _)), g in zip(seen.items(), torch.autograd.grad(value, outs)):
            correlation = padded_correlation(conv, seen_x[0].detach(), g[0])
            found.setdefault(name, []).append(dft(correlation, 2))
    return found


# ------------------------------------------------------------------ noise correlated over steps


def band_matrix(bands: int, steps: int, begins: Iterable[int] = ()) -> Tensor:
    """`[steps, steps]`: C from its definition, binomials and all; sequences begin anew at `begins`."""
    column = torch.tensor([math.comb(2 * j, j) / 4**j for j in range(bands)], dtype=torch.float64)
    column /= column.square().sum().sqrt()
    sequence = [sum(begin <= t for begin in begins) for t in range(steps)]
    matrix = torch.zeros(steps, steps, dtype=torch.float64)
    for t in range(steps):
        for s in range(max(0, t - bands + 1), t + 1):
            if sequence[s] == sequence[t]:
                matrix[t, s] = column[t - s]
    return matrix


def participations(steps: int, gap: int) -> list[tuple[int, ...]]:
    """Every set of steps that lie at least `gap` apart, by trying all sets."""
    sets = ([t for t in range(steps) if number >> t & 1] for number in range(1, 2**steps))
    return [tuple(s) for s in sets if all(b - a >= gap for a, b in pairwise(s))]


def largest_sensitivity(matrix: Tensor, patterns: Iterable[tuple[int, ...]]) -> float:
    """λ_max over all patterns of how far a record of norm 1 a step moves C·sums, in squares a step.

    Against noise of covariance Σ = C⁻¹C⁻ᵀ over steps: Aᵀ Σ⁻¹ A for the steps A that it takes part in.
    """
    inverse = torch.linalg.inv(matrix)
    precision = torch.linalg.inv(inverse @ inverse.T)
    return max(float(torch.linalg.eigvalsh(precision[list(s)][:, list(s)])[-1]) for s in patterns)
