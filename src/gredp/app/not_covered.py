"""What ε does not cover of a run, in words: the one owner of these sentences. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any


def held_out(settings: Mapping[str, Any]) -> bool:
    """Whether the evaluated records are the user's own, kept apart from training."""
    return bool(settings.get("holdout") or settings.get("validation"))


def about_figures(settings: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Of what a run is measured by."""
    count = f"{data['test_records']:,}"
    if held_out(settings):
        return f"these figures: their {count} records were held out of the private ones"
    return f"these figures: their {count} test records are taken to be public"


def not_covered(
    settings: Mapping[str, Any], data: Mapping[str, Any], unit: str, tuned: bool = False
) -> Iterator[str]:
    """By the facts of one run, as a list for whoever signs it off."""
    if data:
        about = about_figures(settings, data).removeprefix("these figures: their ")
        yield f"All figures of the evaluation, the loss included: the {about}."
        yield f"The number of training records ({data['records']:,}), and the rate that follows from it."
        declared = "the schema: columns, ranges and categories" if len(data["input_shape"]) == 1 else "sizes"
        label = (
            "the range of the target" if data.get("target") else f"the names of the {data['classes']} classes"
        )
        yield f"What was declared beforehand: the name of the dataset, {label}, {declared}."
    if settings.get("pretrained"):
        yield "The records that the pretrained weights were trained on: those weights are taken to be public."
    if tuned:
        yield "The list of settings to choose from. The choice itself is covered."
    else:
        yield "The choice of settings, if they were tuned on the same records in other runs."
    if unit == "record":
        yield "Several records of one person: for k of them ε is up to k times as large, and δ larger still."
    yield "How long the training took, and what else could be watched of the machine while it ran."
    yield (
        "What follows from the records of others: a model that works says something about everyone like "
        "them, whether or not they took part."
    )
