"""`gredp export`: a finished run as a folder that other programs can use. No torch until it runs."""

import hashlib
import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gredp.app.not_covered import held_out, not_covered
from gredp.errors import GredpError
from gredp.guarantee import NEIGHBORS
from gredp.storage.files import make_folder, write
from gredp.storage.record import accuracy, dumps, load, shown_accuracy

if TYPE_CHECKING:
    from gredp.app.predictor import Predictor

CONFIG, CARD = "config.json", "README.md"
#: entries of a list that the card shows; config.json has all
SHOWN = 20


@dataclass(frozen=True)
class ExportSettings:
    """Write the model of a finished run as ONNX or as a program of torch.export, with a model card."""

    run: Annotated[str, tyro.conf.Positional]
    """folder of the run"""
    format: Literal["onnx", "pt2"] = "onnx"
    """onnx: for onnxruntime and others, needs the extra gredp[onnx]; pt2: for torch.export.load"""
    out: str | None = None
    """folder to write, by default RUN/export; a second format may be added to it"""


def run_export(settings: ExportSettings) -> None:
    from gredp.app.blueprint import FEATURES, MODEL
    from gredp.app.exported import FORMATS, Whole
    from gredp.app.predictor import Predictor

    run = Path(settings.run)
    record = load(run)
    if not record:
        raise GredpError(f"{run} has no record.json: give the folder of a run that has finished")
    predictor = Predictor(run)
    out = Path(settings.out) if settings.out is not None else run / "export"
    own, other = (run / MODEL).read_bytes(), out / MODEL
    if other.exists() and other.read_bytes() != own:
        raise GredpError(f"{out} holds another model: give an --out that does not exist yet")
    model = Whole(predictor)
    config = describe(predictor, record, model.output)
    note = dumps(config)
    files = {MODEL: own, f"model.{settings.format}": FORMATS[settings.format](model, note)}
    if (run / FEATURES).exists():
        files[FEATURES] = (run / FEATURES).read_bytes()
    make_folder(out)
    for name, content in files.items():
        write(out / name, content)
    write(out / CONFIG, f"{note}\n".encode())
    names = (MODEL, FEATURES, "model.onnx", "model.pt2", CONFIG)
    sums = {n: hashlib.sha256((out / n).read_bytes()).hexdigest() for n in names if (out / n).exists()}
    write(out / CARD, card(predictor, record, config, sums).encode())
    print(f"{out / f'model.{settings.format}'}, with {CARD} and {CONFIG}; the model: {predictor.guarantee}")


def describe(predictor: "Predictor", record: dict[str, Any], output: str) -> dict[str, Any]:
    """What a program must know to use the file: declared or released values only."""
    from gredp.app.data.tables import encoding

    blueprint = predictor.blueprint
    schema = blueprint.schema
    shape: tuple[str | int, ...] = ("n", *(blueprint.image or blueprint.input_shape))
    return {
        "library_name": "gredp",
        "gredp_version": record["versions"].get("gredp"),
        "classes": list(blueprint.classes),
        "input": {"name": "input", "dtype": "float32", "shape": list(shape)},
        "target": blueprint.target,
        "output": {"name": output, "dtype": "float32", "shape": ["n", len(blueprint.classes) or 1]},
        "pixels": None if blueprint.image is None else "in [0, 1], channels first; color as RGB",
        "schema": None if schema is None else asdict(schema),
        "encoding": None if schema is None else encoding(schema),
        "network": blueprint.network,
        "features": blueprint.features,
        "guarantee": predictor.guarantee.to_json(),
        "insecure": record["insecure"],
        "model_sha256": predictor.sha256,
    }


def card(predictor: "Predictor", record: dict[str, Any], config: dict[str, Any], sums: dict[str, str]) -> str:
    """A model card as Hugging Face reads it. Names that users gave stand in it as indented JSON alone."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["listed"] = listed
    unit = next(unit for unit, words in NEIGHBORS.items() if words == predictor.guarantee.neighbors)
    tuned = any(row.get("trials") for row in record["ledger"])
    measure, value = shown_accuracy(*accuracy(record))
    return environment.get_template("card.md.j2").render(
        config=config,
        blueprint=predictor.blueprint,
        guarantee=predictor.guarantee,
        private=predictor.guarantee.noise_multiplier > 0,
        record=record,
        settings=record["settings"],
        unit=unit,
        held_out=held_out(record["settings"]),
        not_covered=list(not_covered(record["settings"], record["data"], unit, tuned)),
        measured=f"{measure[0].upper()}{measure[1:]}: {value}",
        sums=sums,
    )


def listed(values: list[Any]) -> str:
    """JSON, a line for each value, indented so that nothing in it can be markup; no more than are read."""
    lines = [json.dumps(value, ensure_ascii=False) for value in values[:SHOWN]]
    if len(values) > SHOWN:
        lines.append(f"… {len(values)} in all: config.json")
    return textwrap.indent("\n".join(lines), "    ")
