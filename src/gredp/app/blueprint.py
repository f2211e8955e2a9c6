"""What a model file says of itself: how to build its network, and how to prepare an input.

It lies as JSON in the metadata of `model.safetensors`, so that a run works wherever its folder is moved. All
of it is declared or released: class names, the schema, sizes and the guarantee; no record enters.
"""

import hashlib
import json
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from gredp.app.data.tables import Schema, parse_schema
from gredp.app.features.backbone import STAGES, Backbone
from gredp.app.features.cache import FeatureExtractor
from gredp.app.features.fronts import FRONTS
from gredp.app.features.normalize import ChannelNorm
from gredp.app.models import build
from gredp.errors import GredpError
from gredp.storage.checkpoint import load_weights
from gredp.storage.files import one_line
from gredp.storage.record import dumps

MODEL, KEY, VERSION = "model.safetensors", "gredp", 1
#: the public weights that features are computed with, if there are any
FEATURES = "features.safetensors"


@dataclass(frozen=True)
class Blueprint:
    """`image` is (channels, height, width) of pixels, None for a table; `schema` is that of a table."""

    network: str
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    block: int = 0
    normalized: bool = False
    image: tuple[int, int, int] | None = None
    schema: Schema | None = None
    features: dict[str, Any] | None = None
    guarantee: dict[str, Any] | None = None
    #: whether the noise came from a seed, which voids the guarantee
    insecure: bool = False
    #: range of the number that it predicts; None for classes
    target: tuple[float, float] | None = None
    version: int = VERSION

    def build(self) -> nn.Module:
        """The network as it was before training."""
        network = build(self.network, self.input_shape, len(self.classes) or 1, self.block)
        if not self.normalized:
            return network
        # Files have its parameters under the name "normalise".
        parts = [("normalise", ChannelNorm(*self.input_shape)), ("network", network)]
        return nn.Sequential(OrderedDict(parts))

    def extractor(self, folder: Path) -> FeatureExtractor | None:
        """What computes the features, with its public weights from `folder`."""
        if self.features is None:
            return None
        if self.features["name"] in FRONTS:
            extractor: FeatureExtractor = FRONTS[self.features["name"]]()
        else:
            stages = self.features.get("until") == STAGES
            extractor = Backbone(str(folder / FEATURES), self.features["size"], stages)
        if extractor.identity() != self.features:
            raise GredpError(
                f"{folder} was trained on features that this version of gredp computes differently: "
                "use the version in its record.json"
            )
        return extractor

    def metadata(self) -> dict[str, str]:
        """For safetensors, which keeps strings; under one key, since it writes several in any order."""
        return {KEY: dumps(asdict(self))}


def read_model(file: Path) -> tuple[Blueprint, nn.Module, str]:
    """The blueprint, the trained network in evaluation mode, and the SHA-256 of the file."""
    if not file.is_file():
        raise GredpError(f"{file} is not there: give the folder of a run that has finished")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        values = json.loads(metadata.get(KEY, "{}"))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise GredpError(f"{file} cannot be read: {one_line(error)}") from None
    if values.get("version") != VERSION:
        raise GredpError(
            f"{file} does not say how to use it (version {values.get('version')} of its blueprint, not "
            f"{VERSION}): train again with this version of gredp"
        )
    try:
        blueprint = _blueprint(values)
        network = blueprint.build()
    except (TypeError, ValueError, KeyError) as error:
        raise GredpError(f"{file} holds a blueprint that cannot be read: {one_line(error)}") from None
    load_weights(network, weights)
    return blueprint, network.eval(), digest


def blueprint_of(content: bytes) -> Blueprint:
    """Of the content of a model file that this version has written."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return _blueprint(json.loads(header["__metadata__"][KEY]))


def _blueprint(values: dict[str, Any]) -> Blueprint:
    found = {field.name: values[field.name] for field in fields(Blueprint) if field.name in values}
    found.setdefault("target", None)  # files from before there was one
    for name in ("input_shape", "classes", "image", "target"):
        found[name] = None if found[name] is None else tuple(found[name])
    if found["schema"] is not None:
        found["schema"] = parse_schema(found["schema"])
    return Blueprint(**found)
