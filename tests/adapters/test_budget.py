"""What adapters promise, whatever the program around them does: the run ends at its budget."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from gredp import GredpError, PrivacyEngine
from gredp.adapters.budget import Budget, reject_private_metric
from worlds import records, small_model


def test_a_step_that_would_pass_the_target_is_refused_and_not_charged():
    engine, model = PrivacyEngine(accountant="rdp"), small_model()
    budget = Budget(1e-5, 1.0, target_epsilon=2.0, engine=engine)
    loader = budget.poisson(DataLoader(TensorDataset(*records(24)), batch_size=6))
    optimizer = budget.spend(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, 7)

    def step(x, y):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    batch = next(iter(loader))
    step(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it would be charged at rate 1
        with pytest.raises(GredpError, match=r"above the target of 2.0, after 1 of 7"):
            step(*batch)
    assert engine.ledger.steps == 1
    assert engine.get_epsilon(1e-5) <= 2.0
    for batch in loader:  # the planned steps are still there
        step(*batch)
    assert engine.ledger.steps == 1 + len(loader)


def test_a_large_delta_is_refused_by_adapters():
    def spend(**options):
        model = small_model()
        budget = Budget(0.1, 1.0, noise_multiplier=1.0, options=options)
        loader = budget.poisson(DataLoader(TensorDataset(*records(24)), batch_size=6))
        budget.spend(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, 7)

    with pytest.raises(GredpError, match=r"δ × 24 records is 2.4, above 0.1"):
        spend()
    with pytest.warns(UserWarning, match="records is 2.4"):
        spend(allow_large_delta=True)


def test_a_metric_decides_only_if_no_record_changes_it_or_it_is_declared_public():
    for metric in (None, "epsilon", "step", "val_loss"):
        reject_private_metric("EarlyStopping", metric, {"val_loss"})
    with pytest.raises(
        GredpError, match=r"'train_loss', which ε does not cover.*public_metrics=\('train_loss'"
    ):
        reject_private_metric("EarlyStopping", "train_loss", {"val_loss"})
