"""The noise that a report shows is the noise that is drawn."""

import pytest
import torch
from torch import nn

from gredp.gradient.spectra import noise_spectrum, over_steps
from gredp.mechanisms.banded import coefficients
from gredp.spectrum import distance, fft
from oracles import band_matrix
from worlds import MECHANISMS, make_private, no_gradient_step, one_step, records, small_model

#: without a padded grid, whose coefficients are cropped before anybody sees them
NAMES = [name for name in MECHANISMS if "padded" not in name]


@pytest.mark.parametrize("name", NAMES)
def test_noise_by_frequency_is_what_a_step_releases(name):
    """Against many draws without a gradient, transformed and averaged group by group."""
    model, optimizer, _, _ = make_private(small_model(), records(6), noise_multiplier=0.8, **MECHANISMS[name])
    if optimizer.private_step.learned is not None:
        one_step(model, optimizer, *records(6))  # something to learn a shape from
    rows, draws, total = {}, 80, {}
    learned = optimizer.private_step.learned
    if learned is not None:
        learned.learn = lambda *_: None  # the shape stands still while it is measured
    for row in noise_spectrum(optimizer.private_step):
        rows[row["block"]] = row
    for _ in range(draws):
        for block, value in no_gradient_step(model, optimizer, records(6)[0]).items():
            axes = len(optimizer.private_step.block_views[block].block.grid)
            energy = fft(value.double(), axes).abs().square().flatten(0, value.dim() - axes - 1)
            energy = energy.sum(0) if value.dim() > axes else energy
            total[block] = total.get(block, 0) + energy.flatten()
    for block, row in rows.items():
        view = optimizer.private_step.block_views[block]
        groups = torch.zeros(len(total[block]), dtype=torch.long) if view.groups is None else view.groups
        place = distance(view.block.grid).flatten()
        low_to_high = sorted(groups.unique().tolist(), key=lambda g: float(place[groups == g].mean()))
        for group, std, count in zip(low_to_high, row["noise_std"], row["coefficients"]):
            found = float(total[block][groups == group].sum()) / count / draws
            assert count == int(view.group_sizes[group])
            if std == 0:
                assert found < 1e-10
            else:  # 6 deviations of a mean of squares, half of the coefficients being mirror images
                assert found == pytest.approx(std**2, rel=6 * (4 / (count * draws)) ** 0.5)


@pytest.mark.parametrize("bands", [1, 2, 8])
def test_correlated_noise_is_shown_as_large_as_it_becomes(bands):
    """Against the last row of C⁻¹, inverted as a matrix."""
    row = torch.linalg.inv(band_matrix(bands, 60 * bands))[-1]
    assert over_steps(coefficients(bands)) == pytest.approx(float(row.norm()), rel=1e-6)
    private, white = (
        make_private(nn.Linear(3, 2), records_of_three(), correlation_bands=b, sample_rate=0.1)[1]
        for b in (bands, 1)
    )
    for shown, single in zip(noise_spectrum(private.private_step), noise_spectrum(white.private_step)):
        assert shown["noise_std"] == pytest.approx([float(row.norm()) * std for std in single["noise_std"]])


def records_of_three():
    return torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)


def test_shares_are_the_released_ones_and_frequencies_rise():
    model, optimizer, _, _ = make_private(
        small_model(), records(64), noise_multiplier=0.01, method="gredp", noise="shaped"
    )
    one_step(model, optimizer, *records(64))
    rows = noise_spectrum(optimizer.private_step)
    assert [row["block"] for row in rows] == [name for name, _ in model.named_parameters()]
    assert all(row["frequency"] == sorted(row["frequency"]) for row in rows)
    assert sum(sum(row["coefficients"]) for row in rows) == sum(p.numel() for p in model.parameters())
    # r is a vector of norm 1 for each record, so the mean's energy is at most 1, and not far below.
    energy = sum(share**2 for row in rows for share in row["norm_share"])
    assert 0.5 < energy < 1.1
    plain = make_private(nn.Linear(3, 2), (torch.zeros(2, 3), torch.zeros(2)), method="dpsgd")[1]
    assert all(row["norm_share"] is None for row in noise_spectrum(plain.private_step))
