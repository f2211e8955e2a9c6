"""The settings of a training run, checked before any data is read. No torch.

Options are flat; the groups are base classes, so that a command takes the groups it needs.
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gredp.app.known_data import EMBEDDED, KNOWN, fetchable
from gredp.app.learning_rate import Schedule
from gredp.app.ranges import check_ranges, option
from gredp.app.trackers import TrackerName, check_trackers
from gredp.errors import GredpError
from gredp.mechanisms import ClaimName, MethodName, NoiseName
from gredp.mechanisms.registry import find, mechanism, noise_scale, own_options
from gredp.privacy.accountant import AccountantName, check_delta
from gredp.privacy.certificate import Block
from gredp.storage.files import read_document

DATASETS = f"""{EMBEDDED} (embedded), {", ".join(fetchable())}, the path of your own .npz or .csv, of a
folder of images in CLASS or in train/CLASS and test/CLASS, or of .npy files for data larger than memory. For
your own images without --model: patch features, a linear classifier, 30 full batches; for a table: a
small network, 10 epochs"""
#: the file with the settings in a run folder
FILE = "settings.json"
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
#: networks for any features, and for those of one kind
FOR_FEATURES = ("linear", "scatter-cnn")
FOR_SOME_FEATURES = ("mirror-linear", "orders-linear")
#: settings of one start of a run, not of the run
OF_ONE_START = ("resume", "fork", "out", "json", "track")
#: settings that a resumed run may change, since its result does not depend on them
MAY_CHANGE = (*OF_ONE_START, "max_physical_batch_size", "data_dir", "checkpoint_seconds", "pretrained",
              "allow_large_delta")  # fmt: skip
#: names of earlier versions on the command line, in recipes and in files → the names of today
RENAMED = {"front": "features", "normalise": "normalize"}
#: settings of earlier versions that are options in Python only, with the values that files may have for them
RETIRED = {"groups": "both", "window": 50}


def current_names(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of a file, under the names of today."""
    kept = {name: value for name, value in values.items() if (name, value) not in RETIRED.items()}
    return {RENAMED.get(name, name): value for name, value in kept.items()}


@dataclass(frozen=True)
class DataOptions:
    """What is read."""

    dataset: Annotated[str, tyro.conf.arg(aliases=["--data"], help=DATASETS)] = EMBEDDED
    holdout: float | None = None
    """share of class folders or of a table to hold out as the test set, if there is no test split; by
    default a fifth"""
    person: str | None = None
    """whose records are whose, so that ε is for a person with all of them: the column of a table, for images
    folder (CLASS/PERSON/*.png) or a regular expression whose one group is found in a file's name"""
    records_per_person: int = 4
    """with --person, records of a drawn person that take part in a step; --batch-size counts persons then"""
    image_size: int | None = None
    """scale images to this height and width; by default your own to at most 32"""
    target_range: tuple[float, float] | None = None
    """range of the labels of your own arrays, if they are numbers to predict and not classes; a table has
    target = [low, high] in its schema"""
    validation: int = 0
    """hold out the last N training records and report accuracy on them instead of the test set, to choose
    settings by; they are not private in that run"""
    augment: int = 0
    """random views of each record, averaged before clipping: shifts, and flips of color images; 0 is none"""
    data_dir: str | None = None
    """where NAME.npz files are; default GREDP_DATA or ~/.cache/gredp/data"""


@dataclass(frozen=True)
class ModelOptions:
    """What is trained."""

    model: str | None = None
    """mlp, lenet-small, lenet5, lenet5-tanh, model3, resnet20, alexnet, cnn-tanh, wrn16-4; with --pretrained
    resnet18-1conv or resnet18-2conv; for features linear, scatter-cnn, mirror-linear or orders-linear
    (scattering only). By default that of the dataset"""
    features: Literal["none", "scattering", "patches", "writing"] = "none"
    """train on fixed features of each image, cached in the data folder: of wavelets (scattering), of patches
    and wavelets, whitened by drawn images (patches), or of wavelets, whitened by drawn strokes (writing)"""
    normalize: float = 0.0
    """share of the privacy budget for means of features and energies of channels, released before training;
    0.02 is plenty, 0 leaves the features as they are"""
    pretrained: str | None = None
    """weights of a ResNet-18 trained on public data, as safetensors with torchvision's names. Its later
    stages compute features; resnet18-1conv and resnet18-2conv train its last block"""
    block: int | None = None
    """block size of circulant fully connected layers; 0 is dense. By default 8 for gredp and spectral_dp"""
    ema: float = 0.0
    """decay of a moving average of the weights, which is then evaluated and saved; 0 is none"""


@dataclass(frozen=True)
class PrivacyOptions:
    """What is proven, and by whom."""

    method: MethodName = "gredp"
    noise: NoiseName = "white"
    """white, real (the paper's Algorithm 1 read literally) or shaped; for method gredp"""
    claim: ClaimName = "proven"
    """proven: the target is a true ε. paper: σ as the paper sets it for that ε, and the ε it really costs"""
    delta: float = 1e-5
    allow_large_delta: Flag = False
    """allow a --delta of 1/records or more, at which ε means little"""
    accountant: AccountantName = "pld"
    correlation_bands: int = 1
    """steps over which noise is correlated, and parts of the records that take turns; 1: independent"""


@dataclass(frozen=True)
class NoiseOptions:
    """How gradients are clipped and noised."""

    clip_norm: float = 1.0
    clipping: str | None = None
    """flat, per_layer, automatic, layer_wise (the paper's Algorithm 2), adaptive or adaptive_per_layer"""
    target_unclipped_quantile: float = 0.5
    """adaptive clipping: the share of records that the norm leaves whole; --clip-norm is the first norm"""
    precision: Literal["single", "bf16"] = "single"
    """bf16: each record's outputs, gradients and products in bfloat16; weights, norms, sums and noise not"""
    filter_ratio: float = 0.5
    """share of coefficients that spectral_dp keeps"""
    noise_schedule: float = 1.0
    """noise at the end of the run relative to its start, in five stages; 1 is constant, below 1 it falls"""
    exponent: float = 0.5
    """shaped noise: weights w² ∝ m^(−exponent) from the learned energies m; 0 is white"""
    preconditioner: float = 0.0
    """shaped noise: multiply the update by m^(−preconditioner), and keep its norm"""


@dataclass(frozen=True)
class OptimizerOptions:
    """How released gradients are used."""

    epochs: int = 20
    batch_size: int = 192
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """sgd, adam or adamw; from Python, any optimizer of torch"""
    weight_decay: float = 0.0
    """L2 penalty of sgd and adam, decoupled decay of adamw"""
    lr: float = 0.1
    schedule: Schedule = "constant"
    """learning rate: constant, or cosine to 0 at the end of the run"""
    warmup: int = 0
    """steps over which the learning rate rises to its value"""
    momentum: float = 0.9
    """of sgd; the first beta of adam and adamw"""


@dataclass(frozen=True)
class RunOptions:
    """Where a run is stored, and what it shows."""

    max_physical_batch_size: int = 512
    """inputs in memory at once; does not change the result"""
    seed: int = 0
    """for initialization only; noise and sampling are always secret"""
    insecure_seed: int | None = None
    """testing only: reproducible noise and batches; the run is NOT private"""
    out: str | None = None
    """run folder; must not exist yet"""
    resume: str | None = None
    """folder of an interrupted run: continue it with its settings; noise is drawn anew, all charges count"""
    fork: str | None = None
    """folder of a run to start from: a new run with its weights, whose ε includes all that it has spent"""
    checkpoint_seconds: float = 300.0
    """seconds between checkpoints, at most; there is one after every epoch as well"""
    track: tuple[TrackerName, ...] = ()
    """log the run to files in its folder (csv, jsonl, tensorboard) or to a service (mlflow, wandb)"""
    json: Flag = False
    """print one JSON object instead of tables"""


@dataclass(frozen=True)
class TrainSettings(RunOptions, OptimizerOptions, NoiseOptions, PrivacyOptions, ModelOptions, DataOptions):
    """Train a network privately; without options, a small LeNet on the embedded digits at (2, 1e-5).
    For your own data, --data FOLDER or --data MINE.csv, settings that fit are chosen from public facts."""

    recipe: str | None = None
    """settings from a file: mnist, fashion-mnist, cifar10, cifar100, cifar10-transfer, cifar100-transfer, or
    the path of your own .toml; command-line options override it"""
    epsilon: float = 2.0

    @property
    def private(self) -> bool:
        return find(self.method, self.noise).kind.private

    @property
    def block_size(self) -> int:
        """Spectral methods use block-circulant layers, as in the paper, unless `block` is set."""
        return find(self.method, self.noise).block if self.block is None else self.block

    @property
    def split(self) -> str:
        """What accuracies are called by: one on validation records is not a test accuracy."""
        return "validation" if self.validation else "test"

    @property
    def judged_on(self) -> str:
        if not self.validation:
            return "the test set"
        return f"the last {self.validation} training records: held out, and not private in this run"

    @property
    def not_covered(self) -> str:
        """For the end of a record's `selection`: an accuracy on held-out records is a statistic of them."""
        held_out = "; test figures are measured on held-out records, which ε does not cover"
        return held_out if self.holdout is not None else ""

    def kept(self) -> dict[str, Any]:
        """What the run folder keeps."""
        return {name: value for name, value in asdict(self).items() if name not in OF_ONE_START}

    def options(self) -> dict[str, Any]:
        """Options of the mechanism beyond those every method has."""
        own = own_options(find(self.method, self.noise).kind, self.clipping)
        return {field.name: getattr(self, field.name) for field in fields(TrainSettings) if field.name in own}

    def check(self) -> None:
        """Reject what can be rejected without data."""
        bands = self.correlation_bands
        chosen = mechanism(self.method, self.noise, self.claim, self.clipping, bands, **self.options())
        check_delta(self.delta)
        check_trackers(self.track)
        check_ranges(self)
        if chosen.private:
            block = Block.whole("weight", "layer", (8,), 1)
            noise_scale(1.0, chosen.unit_multiplier([block], self.clip_norm, 1), self.claim)
        for conflict in chain(self._conflicts(), self._conflicts_with_runs()):
            raise GredpError(conflict)

    def _conflicts(self) -> Iterator[str]:
        """Options that are each right, but not together."""
        model, pretrained = self.model or "", self.pretrained is not None
        transfer, features = model.startswith("resnet18-"), self.features != "none"
        if self.normalize and self.claim == "paper":
            yield "--normalize has no part in the paper: use it with --claim proven"
        if self.normalize and transfer:
            yield f"--normalize: {model} expects the features as its frozen part gives them"
        if self.normalize and not (features or pretrained):
            yield "--normalize needs --features or --pretrained: pixels are centered by fixed numbers"
        if features and pretrained:
            yield f"--features {self.features} and --pretrained cannot be combined: give one"
        if transfer and not pretrained:
            yield f"--model {model} needs --pretrained: the file with the frozen weights"
        if pretrained and not transfer and model not in ("", *FOR_FEATURES):
            yield f"--pretrained is for resnet18-1conv, -2conv, {' or '.join(FOR_FEATURES)}, not for {model}"
        if self.person is not None and self.validation:
            yield "--validation holds out records, not persons: use --holdout with --person"
        if self.noise_schedule != 1 and self.correlation_bands != 1:
            yield "nothing is proven for --noise-schedule with --correlation-bands: use one of the two"
        if self.augment and (pretrained or features):
            yield "--augment draws views of images, but features are computed once"
        if self.target_range is not None and not self.target_range[0] < self.target_range[1] < math.inf:
            yield "--target-range is LOW HIGH, with LOW below HIGH, and both finite"
        for name, value in asdict(self).items():
            if str(value).encode(errors="replace").decode() != str(value):
                yield f"{option(name)} is {value!a}, which is not UTF-8: rename it"

    def _conflicts_with_runs(self) -> Iterator[str]:
        """What the runs to resume or to fork do not allow."""
        if self.resume is not None and (self.out is not None or self.fork is not None):
            yield "--resume continues in the folder of the run: give neither --out nor --fork with it"
        known = self.fork is not None and (Path(self.fork) / FILE).exists()
        if known and self.insecure_seed is None and saved_settings(self.fork or "").insecure_seed is not None:
            yield (  # noise that is known stays known, whatever is added to it later
                f"the noise of {self.fork} comes from --insecure-seed, and a fork of it protects nobody "
                "either: give an --insecure-seed"
            )
        changed = None if self.resume is None else self.changed(saved_settings(self.resume))
        if changed is not None:
            yield (
                f"{self.resume} was started with {changed}: a resumed run keeps its settings; to change "
                f"them, start a new run with --fork {shlex.quote(self.resume or '')}"
            )

    def changed(self, saved: "TrainSettings") -> str | None:
        """The first setting that matters and differs from the saved one, with both values."""
        for field in fields(TrainSettings):
            before, now = getattr(saved, field.name), getattr(self, field.name)
            moved = field.name == "dataset" and now not in KNOWN and Path(before).name == Path(now).name
            if before != now and field.name not in MAY_CHANGE and not moved:
                return f"{option(field.name)} {before}, not {now}"
        return None


def saved_settings(folder: str) -> TrainSettings:
    """Those of the run in `folder`, to resume it."""
    values = read_document(Path(folder) / FILE)
    if "tuning" in values:
        raise GredpError(
            f"{folder} is a choice of gredp tune: its own command resumes it, and it cannot be forked"
        )
    try:
        kept = {k: tuple(v) if isinstance(v, list) else v for k, v in values["settings"].items()}
        return replace(TrainSettings(**current_names(kept)), resume=folder)
    except (TypeError, KeyError) as error:
        raise GredpError(f"{Path(folder) / FILE} is not of this version of gredp: {error}") from None
