"""DPLSTM, DPGRU and DPRNN: the layers of torch, with gradients equal to a loop over single records."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from gredp import GredpError, PrivacyEngine, fix, validate
from gredp.layers import DPGRU, DPLSTM, DPRNN

KINDS = {"lstm": (nn.LSTM, DPLSTM), "gru": (nn.GRU, DPGRU), "rnn": (nn.RNN, DPRNN)}
OPTIONS = [
    {},
    {"num_layers": 2},
    {"bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
]
CASES = [(kind, options) for kind in KINDS for options in OPTIONS]
CASES += [
    ("lstm", {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    ("rnn", {"nonlinearity": "relu"}),
]
LENGTHS = [2, 5, 4]


def pair(kind, options):
    stock, ours = KINDS[kind]
    layer = stock(4, 6, **options).double()
    return layer, ours.from_stock(layer)


def flat(state):
    return torch.cat([s.flatten() for s in (state if isinstance(state, tuple) else (state,))])


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_it_computes_what_the_layer_of_torch_computes(kind, options, packed, given):
    stock, ours = pair(kind, options)
    first = options.get("batch_first", False)
    x = torch.randn((3, 5, 4) if first else (5, 3, 4), dtype=torch.float64)
    if packed:
        x = pack_padded_sequence(x, LENGTHS, batch_first=first, enforce_sorted=False)
    states = [torch.randn_like(s) for s in _states(stock(x)[1])] if given else []
    hx = (tuple(states) if kind == "lstm" else states[0]) if given else None
    (wanted, last), (found, state) = stock(x, hx), ours(x, hx)
    if packed:
        assert isinstance(found, PackedSequence)
        assert torch.equal(found.batch_sizes, wanted.batch_sizes)
        wanted, found = (pad_packed_sequence(each)[0] for each in (wanted, found))
    assert torch.allclose(found, wanted, atol=1e-12)
    assert torch.allclose(flat(state), flat(last), atol=1e-12)
    assert torch.allclose(flat(ours.to_stock()(x, hx)[1]), flat(last), atol=1e-12)


def _states(state):
    return state if isinstance(state, tuple) else (state,)


class Classifier(nn.Module):
    """Reads a sequence, packed or not, and classifies its last states."""

    def __init__(self, recurrent, width, packed):
        super().__init__()
        self.recurrent, self.packed = recurrent, packed
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        lengths = x[:, :, 0].ne(0).sum(1).clamp(min=1).cpu()
        if not self.recurrent.batch_first and not self.packed:
            x = x.transpose(0, 1)
        if self.packed:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, state = self.recurrent(x)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.out(hidden.transpose(0, 1).flatten(1))


def batch(records=5, length=6):
    x, y = torch.randn(records, length, 4), torch.randint(3, (records,))
    for i in range(records):
        x[i, 2 + i % (length - 1) :] = 0
    return x, y


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_is_the_clipped_sum_of_a_loop_over_records(kind, options, packed):
    torch.manual_seed(0)
    stock, _ = pair(kind, options)
    width = flat(stock(torch.zeros((1, 2, 4) if stock.batch_first else (2, 1, 4), dtype=torch.float64))[1])
    width = len(width) // (2 if kind == "lstm" else 1)
    if kind == "lstm" and options.get("proj_size"):
        width = 3 * 4
    model = fix(Classifier(stock.float(), width, packed))
    x, y = batch()
    clip, wanted = 0.1, None
    for i in range(len(y)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        gradient *= min(1.0, clip / float(gradient.norm()))
        wanted = gradient if wanted is None else wanted + gradient
    model.zero_grad()
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(y)),
        noise_multiplier=0.0,
        max_grad_norm=clip,
    )
    before = torch.cat([p.detach().flatten() for p in private.parameters()]).double()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(inputs), labels).backward()
        optimizer.step()
    after = torch.cat([p.detach().flatten() for p in private.parameters()]).double()
    assert torch.allclose((before - after) * len(y), wanted, atol=1e-5)
    engine.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_fix_puts_it_in_place_of_the_layers_of_torch_and_of_opacus(kind):
    opacus = pytest.importorskip("opacus.layers")
    stock, ours = KINDS[kind]
    for given in (stock(4, 6, 2), getattr(opacus, ours.__name__)(4, 6, 2)):
        model = nn.Sequential(given)
        assert "gredp.fix(model)" in str(validate(model)[0])
        fixed = fix(model)
        assert type(fixed[0]) is ours
        assert not validate(fixed)
        x = torch.randn(5, 3, 4)
        assert torch.allclose(fixed(x)[0], given(x)[0], atol=1e-6)


def test_it_begins_as_the_layer_of_torch_does():
    torch.manual_seed(1)
    wanted = nn.LSTM(4, 6, 2)
    torch.manual_seed(1)
    found = DPLSTM(4, 6, 2).to_stock()
    for one, other in zip(wanted.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)


def test_cells_and_records_without_a_batch_are_rejected():
    [error] = validate(nn.LSTMCell(3, 4))
    assert "use the layer" in str(error)
    with pytest.raises(GredpError, match="batch, positions, numbers"):
        DPLSTM(4, 6)(torch.zeros(5, 4))


def test_dropout_lies_between_layers():
    layer = DPLSTM(4, 6, 2, dropout=1.0)
    output, _ = layer(torch.randn(5, 3, 4))
    same, _ = layer(torch.randn(5, 3, 4))
    assert torch.equal(output, same)  # the second layer sees nothing
    layer.eval()
    assert not torch.equal(layer(torch.randn(5, 3, 4))[0], layer(torch.randn(5, 3, 4))[0])
