"""Recurrent layers out of linear ones, whose per-sample gradients are known: DPLSTM, DPGRU, DPRNN.

They compute what torch's LSTM, GRU and RNN compute, by the same equations, with the same arguments, inputs,
outputs and initialization. A layer's products with its inputs are one call for all positions; those with its
state are one call for each. Positions beyond a sequence's length leave its state as it is: packed sequences
keep every record in its row.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from gredp.errors import GredpError

State = tuple[Tensor, ...]


class _Recurrent(nn.Module, ABC):
    """`num_layers` layers in one or two directions; `stock` is the layer of torch that it stands for.

    | argument | default | meaning |
    |---|---|---|
    | `input_size`, `hidden_size` | | numbers in an input and in a state |
    | `num_layers` | 1 | layers on top of each other |
    | `bias`, `batch_first`, `dropout`, `bidirectional` | True, False, 0, False | as in torch |
    | `proj_size` (LSTM), `nonlinearity` (RNN) | 0, "tanh" | as in torch |
    """

    stock: ClassVar[type[nn.RNNBase]]
    #: tensors in a state
    states: ClassVar[int] = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._take(self.stock(*args, **kwargs))

    @classmethod
    def from_stock(cls, layer: Any) -> Self:
        """With the parameters of a layer of torch, or of Opacus' layer of the same name."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._take(layer)
        return new

    def _take(self, layer: Any) -> None:
        self.batch_first, self.dropout = bool(layer.batch_first), nn.Dropout(float(layer.dropout))
        self.num_layers, self.bidirectional = layer.num_layers, bool(layer.bidirectional)
        options = getattr(layer, "cell_params", vars(layer))  # Opacus keeps its own there
        self.relu = options.get("nonlinearity") == "relu"
        self.hidden_size = layer.hidden_size
        parameters = dict(layer.named_parameters())
        for name in self._names():
            for kind in ("ih", "hh", "hr"):
                if f"weight_{kind}_{name}" in parameters:
                    weight, bias = (parameters.get(f"{what}_{kind}_{name}") for what in ("weight", "bias"))
                    self.add_module(f"{kind}_{name}", _linear(weight, bias))

    def _names(self) -> list[str]:
        """Of every layer and direction, as torch has them."""
        ends = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{end}" for layer in range(self.num_layers) for end in ends]

    def to_stock(self) -> nn.RNNBase:
        """Torch's own layer with copies of these parameters, for use without private training."""
        first = self._linear("ih_l0")
        options: dict[str, Any] = (
            {"nonlinearity": "relu" if self.relu else "tanh"} if self.stock is nn.RNN else {}
        )
        projected = self.output_size != self.hidden_size
        options |= {"proj_size": self.output_size} if projected else {}
        make: Any = self.stock
        layer: nn.RNNBase = make(
            first.in_features,
            self.hidden_size,
            self.num_layers,
            bias=first.bias is not None,
            batch_first=self.batch_first,
            dropout=self.dropout.p,
            bidirectional=self.bidirectional,
            **options,
        ).to(first.weight)
        layer.load_state_dict(
            {f"{p}_{m}": v for name, v in self.state_dict().items() for m, p in [name.rsplit(".", 1)]}
        )
        return layer

    @property
    def output_size(self) -> int:
        """Numbers in what a direction hands on: fewer than its state has, if it is projected."""
        return self._linear("hh_l0").in_features

    def _linear(self, name: str) -> nn.Linear:
        layer = self.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        lengths: Tensor | None = None
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input, batch_first=True)
        else:
            x = input if self.batch_first or input.dim() < 3 else input.transpose(0, 1)
        if x.dim() != 3:
            raise GredpError(
                f"{type(self).__name__} takes sequences [batch, positions, numbers], not {x.dim()} axes"
            )
        inside = None if lengths is None else self._inside(x, lengths)
        first = self._first_states(x, hx)
        last: list[State] = []
        for layer in range(self.num_layers):
            if layer:
                x = self.dropout(x)
            names = [name for name in self._names() if name.removesuffix("_reverse") == f"l{layer}"]
            found = [self._run(name, x, first[len(last) + i], inside) for i, name in enumerate(names)]
            x = torch.cat([outputs for outputs, _ in found], 2)
            last += [state for _, state in found]
        states = tuple(torch.stack(each) for each in zip(*last))
        if isinstance(input, PackedSequence):
            assert lengths is not None
            sorted_already = input.sorted_indices is None
            output: Any = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sorted_already)
        else:
            output = x if self.batch_first else x.transpose(0, 1)
        return output, states if len(states) > 1 else states[0]

    def _inside(self, x: Tensor, lengths: Tensor) -> Tensor:
        """`[b, t, 1]`: whether a position is part of its sequence."""
        return (torch.arange(x.shape[1]) < lengths[:, None])[:, :, None].to(x.device)

    def _first_states(self, x: Tensor, hx: Any) -> list[State]:
        """Those of every layer and direction, `[b, numbers]` each."""
        if hx is None:
            sizes = (self.output_size, self.hidden_size)[: self.states]
            return [tuple(x.new_zeros(x.shape[0], size) for size in sizes)] * len(self._names())
        given = hx if isinstance(hx, tuple) else (hx,)
        return list(zip(*(each.unbind(0) for each in given)))

    def _run(self, name: str, x: Tensor, state: State, inside: Tensor | None) -> tuple[Tensor, State]:
        """One direction of one layer: outputs `[b, t, numbers]`, and the state after its last position."""
        inputs, recur = self.get_submodule(f"ih_{name}")(x), self.get_submodule(f"hh_{name}")
        places = range(x.shape[1])
        outputs: list[Tensor] = [x] * x.shape[1]
        for t in reversed(places) if name.endswith("_reverse") else places:
            new = self.cell(name, inputs[:, t], recur(state[0]), state)
            if inside is not None:
                new = tuple(torch.where(inside[:, t], after, before) for after, before in zip(new, state))
            outputs[t] = new[0] if inside is None else new[0] * inside[:, t]
            state = new
        return torch.stack(outputs, 1), state

    @abstractmethod
    def cell(self, name: str, of_input: Tensor, of_state: Tensor, state: State) -> State:
        """The next state from both products and the last state."""


class DPRNN(_Recurrent):
    """`nn.RNN`, trainable record by record."""

    stock = nn.RNN

    def cell(self, name: str, of_input: Tensor, of_state: Tensor, state: State) -> State:
        total = of_input + of_state
        return (total.relu() if self.relu else total.tanh(),)


class DPGRU(_Recurrent):
    """`nn.GRU`, trainable record by record."""

    stock = nn.GRU

    def cell(self, name: str, of_input: Tensor, of_state: Tensor, state: State) -> State:
        (i_reset, i_update, i_new), (s_reset, s_update, s_new) = of_input.chunk(3, 1), of_state.chunk(3, 1)
        reset, update = (i_reset + s_reset).sigmoid(), (i_update + s_update).sigmoid()
        return (torch.lerp((i_new + reset * s_new).tanh(), state[0], update),)


class DPLSTM(_Recurrent):
    """`nn.LSTM`, trainable record by record.

    >>> layer = DPLSTM(4, 8, num_layers=2, batch_first=True, bidirectional=True)
    >>> output, (hidden, cell) = layer(torch.zeros(3, 5, 4))
    >>> tuple(output.shape), tuple(hidden.shape)
    ((3, 5, 16), (4, 3, 8))
    """

    stock = nn.LSTM
    states = 2

    def cell(self, name: str, of_input: Tensor, of_state: Tensor, state: State) -> State:
        enter, forget, new, out = (of_input + of_state).chunk(4, 1)
        memory = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
        shown = out.sigmoid() * memory.tanh()
        project = self._modules.get(f"hr_{name}")
        return (shown if project is None else project(shown), memory)


def _linear(weight: Any, bias: Any) -> nn.Linear:
    """A layer that owns these parameters."""
    layer = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight, layer.bias = weight, bias
    return layer


def recurrent_for(layer: nn.Module) -> type[_Recurrent] | None:
    """Our class for a recurrent layer of torch or of Opacus, which have their weights by the same names."""
    for kind in (DPLSTM, DPGRU, DPRNN):
        if isinstance(layer, kind.stock) or _is_of_opacus(layer, kind.__name__):
            return kind
    return None


def _is_of_opacus(layer: nn.Module, name: str) -> bool:
    """By name: Opacus need not be installed."""
    return any(k.__name__ == name and k.__module__.startswith("opacus.") for k in type(layer).__mro__)
