"""PrivateMultiheadAttention against nn.MultiheadAttention, alone and inside stock transformers."""

import copy

import pytest
import torch
from torch import nn

import gredp
from gredp import PrivateMultiheadAttention

T, S, B, E, H = 3, 4, 2, 8, 2  # target and source positions, records, width, heads


def masks() -> dict[str, dict]:
    generator = torch.Generator().manual_seed(5)
    blocked = torch.rand(T, S, generator=generator) < 0.4
    blocked[:, 0] = False  # a row that may look nowhere is nan in both
    apart = torch.rand(B * H, T, S, generator=generator) < 0.4
    apart[:, :, 0] = False
    padding = torch.tensor([[False, False, False, True], [False, True, True, False]])
    added = torch.randn(T, S, generator=generator)
    return {
        "none": {},
        "bool": {"attn_mask": blocked},
        "float": {"attn_mask": added},
        "bool for each head": {"attn_mask": apart},
        "float for each head": {"attn_mask": torch.randn(B * H, T, S, generator=generator)},
        "padding": {"key_padding_mask": padding},
        "padding as numbers": {"key_padding_mask": torch.randn(B, S, generator=generator)},
        "bool and padding": {"attn_mask": blocked, "key_padding_mask": padding},
        "float and padding": {
            "attn_mask": added,
            "key_padding_mask": torch.zeros(B, S).masked_fill(padding, -torch.inf),
        },
    }


def pair(**options) -> tuple[nn.MultiheadAttention, PrivateMultiheadAttention]:
    torch.manual_seed(1)
    stock = nn.MultiheadAttention(E, H, **options)
    with torch.no_grad():
        for parameter in stock.parameters():  # biases start at zero, where mistakes hide
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stock, PrivateMultiheadAttention.from_stock(stock)


def inputs(batch_first: bool, kdim: int = E, vdim: int = E) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(B, t, n, generator=generator) for t, n in ((T, E), (S, kdim), (S, vdim))]
    return tensors if batch_first else [t.transpose(0, 1) for t in tensors]


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_output_and_weights_equal_the_stock_module(mask, batch_first, average):
    stock, private = pair(batch_first=batch_first)
    options = {**masks()[mask], "average_attn_weights": average}
    truth, found = (m(*inputs(batch_first), **options) for m in (stock, private))
    torch.testing.assert_close(found[0], truth[0])
    torch.testing.assert_close(found[1], truth[1])


@pytest.mark.parametrize("batch_first", [True, False])
def test_weights_are_returned_only_when_asked_for(batch_first):
    stock, private = pair(batch_first=batch_first)
    out, weights = private(*inputs(batch_first), need_weights=False)
    assert weights is None
    torch.testing.assert_close(out, stock(*inputs(batch_first), need_weights=False)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"kdim": 5},
        {"vdim": 6},
        {"kdim": 5, "vdim": 6},
        {"add_bias_kv": True},
        {"add_zero_attn": True, "add_bias_kv": True, "kdim": 5},
    ],
    ids=str,
)
def test_sizes_and_biases_of_the_stock_module_are_kept(options):
    stock, private = pair(batch_first=True, **options)
    tensors = inputs(True, options.get("kdim", E), options.get("vdim", E))
    for mask in masks().values():
        torch.testing.assert_close(private(*tensors, **mask), stock(*tensors, **mask))
    assert sum(p.numel() for p in private.parameters()) == sum(p.numel() for p in stock.parameters())


def test_gradients_at_the_inputs_equal_those_of_the_stock_module():
    stock, private = pair(batch_first=True)
    grads = []
    for module in (stock, private):
        tensors = [t.clone().requires_grad_() for t in inputs(True)]
        out = module(*tensors)[0]
        grads.append(torch.autograd.grad(out.square().sum(), tensors))
    for truth, found in zip(*grads):
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_from_stock_keeps_mode_type_and_dropout(training, dtype):
    stock = nn.MultiheadAttention(E, H, dropout=0.25, batch_first=True, dtype=dtype).train(training)
    private = PrivateMultiheadAttention.from_stock(stock)
    assert private.training is training
    assert private.dropout.p == 0.25
    assert private.dropout.training is training
    assert {p.dtype for p in private.parameters()} == {dtype}


def test_dropout_acts_in_training_only():
    stock, _ = pair(batch_first=True, dropout=0.5)
    private = PrivateMultiheadAttention.from_stock(stock)
    torch.manual_seed(3)
    first, second = (private(*inputs(True))[0] for _ in range(2))
    assert not torch.equal(first, second)
    torch.testing.assert_close(private.eval()(*inputs(True))[0], stock.eval()(*inputs(True))[0])


def test_an_empty_batch_passes():
    _, private = pair(batch_first=True)
    out, weights = private(*[t[:0] for t in inputs(True)])
    assert out.shape == (0, T, E)
    assert weights.shape == (0, T, S)


# ------------------------------------------------------------------ inside stock transformers


def padding() -> torch.Tensor:
    return torch.tensor([[False, False, False, True], [False, False, True, True]])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_encoder_layer_is_the_same_after_fix(training, norm_first, masked):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, norm_first=norm_first, batch_first=True)
    fixed = gredp.fix(layer)
    assert isinstance(fixed.self_attn, PrivateMultiheadAttention)
    assert gredp.validate(fixed) == []
    x = torch.randn(B, S, E)
    options = {"src_key_padding_mask": padding()} if masked else {}
    visible = ~padding() if masked else torch.ones(B, S, dtype=torch.bool)
    with torch.set_grad_enabled(training):  # eval without gradients is where torch takes its fused path
        truth, found = (m.train(training)(x, **options) for m in (layer, fixed))
    # the fused path leaves zeros where the padding is; nobody may look there
    torch.testing.assert_close(found[visible], truth[visible], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("masked", [True, False])
def test_whole_encoder_is_the_same_after_fix(training, masked):
    torch.manual_seed(1)
    stock = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True), 2)
    fixed = gredp.fix(stock)
    x = torch.randn(B, S, E)
    options = {"src_key_padding_mask": padding()} if masked else {}
    with torch.set_grad_enabled(training):
        truth, found = (m.train(training)(x, **options) for m in (stock, fixed))
    visible = ~padding()[:, : truth.shape[1]] if masked else torch.ones(B, S, dtype=torch.bool)
    torch.testing.assert_close(found[:, : truth.shape[1]][visible], truth[visible], rtol=1e-4, atol=1e-5)


def test_decoder_layer_is_the_same_after_fix():
    torch.manual_seed(1)
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    fixed = gredp.fix(layer)
    x, memory = torch.randn(B, T, E), torch.randn(B, S, E)
    causal = nn.Transformer.generate_square_subsequent_mask(T)
    torch.testing.assert_close(
        fixed(x, memory, tgt_mask=causal, tgt_is_causal=True),
        layer(x, memory, tgt_mask=causal, tgt_is_causal=True),
    )


def test_fix_leaves_the_model_it_was_given_alone():
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    before = copy.deepcopy(layer.state_dict())
    gredp.fix(layer)
    assert isinstance(layer.self_attn, nn.MultiheadAttention)
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())
