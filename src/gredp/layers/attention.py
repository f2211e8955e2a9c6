"""Multi-head attention made of plain linear layers, so that each record's gradient can be had."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Appended(nn.Module):
    """One more position for every record, `[B, T, E]` → `[B, T + 1, E]`, with the same learned numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(1, 1, size))
        nn.init.xavier_normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.bias.expand(len(x), 1, -1)], 1)


class PrivateMultiheadAttention(nn.Module):
    """Stands in for `nn.MultiheadAttention`: the same arguments, masks, defaults and result.

    The stock module multiplies packed weights inside a fused function that no hook can see.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.dropout = nn.Dropout(dropout)
        self.bias_k, self.bias_v = (_Appended(embed_dim) if add_bias_kv else None for _ in "kv")
        self.add_zero_attn = add_zero_attn
        # nn.TransformerEncoderLayer asks for these before it takes its fused path; this says no.
        self.in_proj_bias = None
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`[B, T, E]` with `batch_first`, else `[T, B, E]`; masks as the stock module takes them."""
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = self.bias_k(k), self.bias_v(v)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        # [B, heads, T, E/heads]
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, q)
        if not need_weights:  # torch's fused attention never forms the weights
            rate = self.dropout.p if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, mask, rate)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            weights = self.dropout((scores if mask is None else scores + mask).softmax(-1))
            mixed = weights @ v
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not self.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, weights.mean(1) if average_attn_weights else weights

    def _mask(self, pairs: Tensor | None, keys: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as one that is added to the scores, `[B or 1, heads or 1, T or 1, T]`."""
        if pairs is not None and pairs.dim() == 3:
            pairs = pairs.view(-1, self.num_heads, *pairs.shape[1:])
        if keys is not None:
            keys = keys[:, None, None, :]
        masks = [
            torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
            if mask.dtype == torch.bool
            else mask.to(like)
            for mask in (pairs, keys)
            if mask is not None
        ]
        if not masks:
            return None
        added = int(self.bias_k is not None) + self.add_zero_attn  # positions that nothing masks
        return F.pad(sum(masks[1:], masks[0]), (0, added))

    @classmethod
    def from_stock(cls, stock: nn.MultiheadAttention) -> "PrivateMultiheadAttention":
        """The same weights, unpacked."""
        new = cls(
            stock.embed_dim,
            stock.num_heads,
            stock.dropout,
            stock.in_proj_bias is not None,
            stock.bias_k is not None,
            stock.add_zero_attn,
            stock.kdim,
            stock.vdim,
            stock.batch_first,
        ).to(stock.out_proj.weight)
        if stock.in_proj_weight is not None:
            weights = stock.in_proj_weight.chunk(3)
        else:
            weights = (stock.q_proj_weight, stock.k_proj_weight, stock.v_proj_weight)
        biases = (None,) * 3 if stock.in_proj_bias is None else stock.in_proj_bias.chunk(3)
        layers = (new.q_proj, new.k_proj, new.v_proj, new.out_proj)
        sources = zip((*weights, stock.out_proj.weight), (*biases, stock.out_proj.bias))
        with torch.no_grad():
            for layer, (weight, bias) in zip(layers, sources):
                layer.weight.copy_(weight).requires_grad_(weight.requires_grad)
                if bias is not None:
                    layer.bias.copy_(bias).requires_grad_(bias.requires_grad)
            for appended, given in ((new.bias_k, stock.bias_k), (new.bias_v, stock.bias_v)):
                if appended is not None and given is not None:
                    appended.bias.copy_(given).requires_grad_(given.requires_grad)
        return new.train(stock.training)
