"""A trained model as one file for other programs: preparation, features, network and softmax in stock layers.

Nothing is pickled, and no path of the machine that writes a file is in it.
"""

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gredp.app.dataset import centered
from gredp.app.features.backbone import Backbone
from gredp.app.features.patches import Patches
from gredp.app.features.real_scattering import RealScattering
from gredp.app.features.writing import Writing
from gredp.app.predictor import Predictor
from gredp.errors import GredpError
from gredp.layers import BlockCirculantLinear, SpectralConv2d, WSConv2d

#: what the file takes
INPUT = "input"
#: where a file keeps what config.json says
NOTE = "gredp.json"


class Whole(nn.Module):
    """`[n, channels, height, width]` in [0, 1], or columns `[n, d]` → probabilities `[n, classes]`.

    Of a model that predicts a number, `[n, 1]` in its declared range.
    """

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        blueprint, extract = predictor.blueprint, predictor.extract
        self.target = blueprint.target
        shape = blueprint.image or blueprint.input_shape
        #: of one record
        self.shape = tuple(shape)
        self.features: nn.Module | None = None
        if isinstance(extract, Backbone):
            self.features = Frozen(extract)
        elif isinstance(extract, Patches | Writing):
            self.features = extract.network(*self.shape)
        elif extract is not None:
            self.features = RealScattering(*self.shape)
        self.network = stock(predictor.network)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = centered(x) if self.features is None else self.features(x)
        found = self.network(x)
        if self.target is None:
            return torch.softmax(found, 1)
        low, high = self.target
        return low + (high - low) * (found.clamp(-1, 1) + 1) / 2

    @property
    def output(self) -> str:
        """What the file gives."""
        return "probabilities" if self.target is None else "prediction"


class Frozen(nn.Module):
    """The public part of a transferred network."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.network = copy.deepcopy(backbone.network)
        self.network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.network.features(x)


def stock(network: nn.Module) -> nn.Module:
    """A copy whose layers are all torch's own: the same function, and every weight dense."""
    network = copy.deepcopy(network)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, BlockCirculantLinear):
            _replace(network, name, _linear(layer))
        elif isinstance(layer, WSConv2d):
            _replace(network, name, _convolution(layer, layer.standardized()[0].view_as(layer.weight)))
        elif isinstance(layer, SpectralConv2d):
            _replace(network, name, _convolution(layer, layer.to_dense()))
    return network


def _replace(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, layer)


def _linear(layer: BlockCirculantLinear) -> nn.Linear:
    dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    dense.weight = nn.Parameter(layer.to_dense().detach().clone())
    if layer.bias is not None:
        dense.bias = layer.bias
    return dense


def _convolution(layer: nn.Conv2d, weight: Tensor) -> nn.Conv2d:
    conv = nn.Conv2d(1, 1, 1)
    conv.__dict__.update({name: value for name, value in layer.__dict__.items() if not name.startswith("_")})
    conv._reversed_padding_repeated_twice = layer._reversed_padding_repeated_twice
    conv.weight, conv.bias = nn.Parameter(weight.detach().clone()), layer.bias
    return conv


def _program(model: Whole) -> torch.export.ExportedProgram:
    """The model as a graph, for any number of records; without the file names that torch notes in it."""
    example = torch.zeros(2, *model.shape)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    program.example_inputs = None  # torch would pickle it
    return program


def to_pt2(model: Whole, note: str) -> bytes:
    """For `torch.export.load`."""
    file = io.BytesIO()
    with _quiet():
        torch.export.save(_program(model), file, extra_files={NOTE: note})
    return file.getvalue()


def to_onnx(model: Whole, note: str) -> bytes:
    """For onnxruntime and others."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise GredpError(f"--format onnx needs {error.name}: pip install 'gredp[onnx]'") from None
    with _quiet():
        exported = torch.onnx.export(
            _program(model), input_names=[INPUT], output_names=[model.output], dynamo=True, verbose=False
        )
    assert exported is not None
    found = exported.model_proto
    for part in _noted(found):
        del part.metadata_props[:]
        part.doc_string = ""
    onnx.helper.set_model_props(found, {NOTE: note})
    onnx.checker.check_model(found)
    return found.SerializeToString(deterministic=True)


def _noted(found: Any) -> Iterator[Any]:
    """All parts of a model in which the exporter leaves notes."""
    yield from (found, found.graph, *found.functions)
    for graph in (found.graph, *found.functions):
        yield from graph.node
    yield from (*found.graph.input, *found.graph.output, *found.graph.value_info, *found.graph.initializer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters talk of what is none of the user's business, such as packages that are not there."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)


#: format → what writes it
FORMATS: dict[str, Callable[[Whole, str], bytes]] = {"onnx": to_onnx, "pt2": to_pt2}
