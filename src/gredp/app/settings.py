"""What a training run is told. Checked before any data is read; no torch."""

import math
import shlex
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gredp.app.known_data import EMBEDDED, fetchable
from gredp.app.learning_rate import Schedule
from gredp.app.trackers import TrackerName, check_trackers
from gredp.errors import GredpError
from gredp.mechanisms import Claim, MethodName, NoiseName
from gredp.mechanisms.plan import Groups
from gredp.mechanisms.registry import find, mechanism, noise_scale
from gredp.privacy.accountant import AccountantName, check_delta
from gredp.privacy.certificate import Block
from gredp.storage.files import read_document

DATASETS = f"""{EMBEDDED} (embedded), {", ".join(fetchable())}, the path of your own .npz or .csv, of a
folder train/CLASS, test/CLASS of images, or of .npy files for data larger than memory"""
#: where the settings lie in a run's folder
FILE = "settings.json"
Front = Literal["none", "scattering"]
OptimizerName = Literal["sgd", "adam", "adamw"]
#: networks for the features of any front
FOR_FEATURES = ("linear", "scatter-cnn")
#: settings that belong to one start of a run, not to the run
OF_ONE_START = ("resume", "fork", "out", "json", "track")
#: settings that may differ when a run goes on: its result does not depend on them
MAY_CHANGE = (
    *OF_ONE_START,
    "max_physical_batch_size",
    "data_dir",
    "checkpoint_seconds",
    "pretrained",
    "allow_large_delta",
)


@dataclass(frozen=True)
class TrainSettings:
    """Train a network privately; without options, a small LeNet on the embedded digits at (2, 1e-5)."""

    recipe: str | None = None
    """settings from a file: mnist, fashion-mnist, cifar10, cifar10-transfer, or the path of your own .toml;
    other options given here come before it"""
    dataset: Annotated[str, tyro.conf.arg(aliases=["--data"], help=DATASETS)] = EMBEDDED
    holdout: float | None = None
    """share of class folders or of a table to keep apart for the test, where there is no test split"""
    image_size: int | None = None
    """scale images in class folders to this height and width"""
    model: str | None = None
    """mlp, lenet-small, lenet5, lenet5-tanh, model3, resnet20, alexnet, cnn-tanh, wrn16-4, or with
    --pretrained resnet18-1conv or resnet18-2conv; for a front linear, scatter-cnn or (scattering only)
    mirror-linear; by default the data set's own"""
    front: Front = "none"
    """scattering: train on fixed wavelet features of each image, computed once and kept in the data folder"""
    normalise: float = 0.0
    """share of the privacy budget for means and energies of the front's channels, learned before training;
    0.02 is plenty, 0 takes the features as they are"""
    pretrained: str | None = None
    """weights of a ResNet-18 trained on public data, as safetensors with torchvision's names: all before its
    last block is a front, and resnet18-1conv and resnet18-2conv train the rest of it"""
    block: int | None = None
    """block size of circulant fully connected layers; 0 is dense. By default 8 for gredp and spectral_dp"""
    method: MethodName = "gredp"
    noise: NoiseName = "white"
    """white, real (the paper's Algorithm 1 read literally) or shaped; for method gredp"""
    claim: Claim = "proven"
    """proven: the target is a true ε. paper: σ as the paper takes it, and the ε that this really costs"""
    epsilon: float = 2.0
    delta: float = 1e-5
    allow_large_delta: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """take a --delta of one in the number of records or more, at which ε says little"""
    accountant: AccountantName = "pld"
    epochs: int = 20
    batch_size: int = 192
    clip_norm: float = 1.0
    clipping: str | None = None
    """flat, per_layer, automatic, or layer_wise (the paper's Algorithm 2)"""
    correlation_bands: int = 1
    """steps over which noise is correlated, and parts of the records that take turns; 1: independent"""
    filter_ratio: float = 0.5
    """share of coefficients that spectral_dp keeps"""
    noise_schedule: float = 1.0
    """noise at the end of the run over that at its start, in five stages; 1 is constant, below 1 it falls"""
    exponent: float = 0.5
    """of shaped noise: weights w² ∝ m^(−exponent) from the learned energies m; 0 is white"""
    preconditioner: float = 0.0
    """of shaped noise: the update is multiplied by m^(−preconditioner), and its size kept"""
    groups: Groups = "both"
    """of shaped noise: what may differ in weight, layers, frequencies within a layer, or both"""
    window: int = 50
    """of shaped noise: releases over which the energies are averaged; 0 is all of them"""
    optimizer: OptimizerName = "sgd"
    """sgd, adam or adamw; from Python, any of torch's"""
    weight_decay: float = 0.0
    """L2 penalty of sgd and adam, decoupled decay of adamw"""
    lr: float = 0.1
    schedule: Schedule = "constant"
    """of the learning rate: constant, or cosine to 0 at the end of the run"""
    warmup: int = 0
    """steps over which the learning rate rises to its value"""
    momentum: float = 0.9
    """of sgd; of adam and adamw, the first of their two betas"""
    validation: int = 0
    """hold out this many of the last training records and report accuracy on them instead of the test set, to
    choose settings by; they are not private in that run"""
    ema: float = 0.0
    """decay of a moving average of the weights, which is then evaluated and saved; 0 is none"""
    augment: int = 0
    """random views of each record, averaged before the clip: shifts, and flips of color images; 0 is none"""
    max_physical_batch_size: int = 512
    """inputs in memory at once; the result does not depend on it"""
    seed: int = 0
    """for initialization only; noise and sampling are always secret"""
    insecure_seed: int | None = None
    """for tests only: makes noise and batches repeatable, and the run worthless as a private one"""
    data_dir: str | None = None
    """where NAME.npz files are; default GREDP_DATA or ~/.cache/gredp/data"""
    out: str | None = None
    """folder of the run; must not exist yet"""
    resume: str | None = None
    """folder of a run that was interrupted: go on with its settings, noise drawn afresh, all charges kept"""
    fork: str | None = None
    """folder of a run to start from: a new run with its weights, whose ε includes all that it has spent"""
    checkpoint_seconds: float = 300.0
    """most seconds between two checkpoints; there is one after every epoch as well"""
    track: tuple[TrackerName, ...] = ()
    """follow the run in files of its folder (csv, jsonl, tensorboard) or in a service (mlflow, wandb)"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead of tables"""

    @property
    def block_size(self) -> int:
        """Block-circulant layers go with the spectral methods, as in the paper, unless said otherwise."""
        return find(self.method, self.noise).block if self.block is None else self.block

    @property
    def judged_by(self) -> str:
        """What a run's accuracy is called: one on held-out training records must not pass for the other."""
        return "validation_accuracy" if self.validation else "test_accuracy"

    @property
    def loss_name(self) -> str:
        return "validation_loss" if self.validation else "test_loss"

    @property
    def judged_on(self) -> str:
        if not self.validation:
            return "the test set"
        return f"the last {self.validation} training records: held out, and not private in this run"

    @property
    def not_covered(self) -> str:
        """For the end of a record's `selection`: an accuracy on held-out records is a statistic of them."""
        if self.holdout is None:
            return ""
        return "; the test accuracy is measured on held-out records, which ε does not cover"

    def kept(self) -> dict[str, Any]:
        """What the run's folder keeps."""
        return {name: value for name, value in asdict(self).items() if name not in OF_ONE_START}

    def options(self) -> dict[str, Any]:
        """Options of the mechanism beyond those every method has."""
        own = set(find(self.method, self.noise).kind.options()) - {"clipping"}
        return {field.name: getattr(self, field.name) for field in fields(TrainSettings) if field.name in own}

    def check(self) -> None:
        """Refuse what can be refused without data."""
        bands = self.correlation_bands
        chosen = mechanism(self.method, self.noise, self.claim, self.clipping, bands, **self.options())
        check_delta(self.delta)
        check_trackers(self.track)
        for name, value, least in (
            ("epsilon", self.epsilon, 0.0),
            ("clip-norm", self.clip_norm, 0.0),
            ("lr", self.lr, 0.0),
        ):
            if not (value > least and math.isfinite(value)):
                raise GredpError(f"--{name} must be a positive number, not {value}")
        if chosen.private:
            block = Block.whole("weight", "layer", (8,), 1)
            noise_scale(1.0, chosen.unit_multiplier([block], self.clip_norm, 1), self.claim)
        for name, whole in (
            ("epochs", self.epochs),
            ("batch-size", self.batch_size),
            ("max-physical-batch-size", self.max_physical_batch_size),
        ):
            if whole < 1:
                raise GredpError(f"--{name} must be at least 1, not {whole}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise GredpError(f"--weight-decay must be 0 or more, not {self.weight_decay}")
        if self.validation < 0:
            raise GredpError(f"--validation must be 0 or more, not {self.validation}")
        self._check_front()
        if not 0 <= self.ema < 1:
            raise GredpError(f"--ema must lie in [0, 1), not {self.ema}")
        if not (self.noise_schedule > 0 and math.isfinite(self.noise_schedule)):
            raise GredpError(f"--noise-schedule must be a positive number, not {self.noise_schedule}")
        if self.noise_schedule != 1 and self.correlation_bands != 1:
            raise GredpError(
                "nothing is proven for --noise-schedule with --correlation-bands: take one of the two"
            )
        if self.warmup < 0:
            raise GredpError(f"--warmup must be 0 or more steps, not {self.warmup}")
        if self.augment < 0:
            raise GredpError(f"--augment must be 0 or more views, not {self.augment}")
        if self.augment and (self.pretrained is not None or self.front != "none"):
            raise GredpError("--augment draws views of images, but a front's features are computed once")
        if self.holdout is not None and not 0 < self.holdout < 1:
            raise GredpError(f"--holdout must lie strictly between 0 and 1, not {self.holdout}")
        if self.image_size is not None and not 1 <= self.image_size <= 4096:
            raise GredpError(f"--image-size must lie in 1 to 4096, not {self.image_size}")
        if self.block is not None and self.block < 0:
            raise GredpError(f"--block must be 0 (dense) or more, not {self.block}")
        if not self.checkpoint_seconds >= 0:
            raise GredpError(f"--checkpoint-seconds must be 0 or more, not {self.checkpoint_seconds}")
        self._check_texts()
        if self.fork is not None and self.insecure_seed is None:
            self._check_parent(Path(self.fork))
        if self.resume is not None:
            self._check_resumed(saved_settings(self.resume))
        if not 0 <= self.momentum < 1:
            raise GredpError(f"--momentum must lie in [0, 1), not {self.momentum}")

    def _check_texts(self) -> None:
        """Records and settings are UTF-8: what cannot be written is refused before anything is spent."""
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                str(value).encode()
            except UnicodeEncodeError:
                option = field.name.replace("_", "-")
                raise GredpError(f"--{option} is {value!a}, which is not UTF-8: rename it") from None

    def _check_parent(self, parent: Path) -> None:
        """Noise that is known stays known, whatever is added to it later."""
        if (parent / FILE).exists() and saved_settings(str(parent)).insecure_seed is not None:
            raise GredpError(
                f"the noise of {parent} comes from --insecure-seed, and a fork of it protects nobody either: "
                "give an --insecure-seed"
            )

    def _check_front(self) -> None:
        if not 0 <= self.normalise < 1:
            raise GredpError(f"--normalise must lie in [0, 1), not {self.normalise}")
        if self.normalise and self.claim == "paper":
            raise GredpError("--normalise has no part in the paper: use it with --claim proven")
        transfer = self.model is not None and self.model.startswith("resnet18-")
        if self.normalise and transfer:
            raise GredpError(f"--normalise: {self.model} expects the features as its frozen part gives them")
        if self.normalise and self.front == "none" and self.pretrained is None:
            raise GredpError("--normalise goes with a front: pixels are centered by fixed numbers")
        if self.front != "none" and self.pretrained is not None:
            raise GredpError(f"--front {self.front} and --pretrained are two fronts: give one")
        if transfer and self.pretrained is None:
            raise GredpError(f"--model {self.model} needs --pretrained: the file with the frozen weights")
        if self.pretrained is not None and not transfer and self.model not in (None, *FOR_FEATURES):
            raise GredpError(
                f"--pretrained goes with resnet18-1conv, resnet18-2conv, {' or '.join(FOR_FEATURES)}, "
                f"not with {self.model}"
            )

    def _check_resumed(self, saved: "TrainSettings") -> None:
        if self.out is not None or self.fork is not None:
            raise GredpError(
                "--resume goes on in the folder of the run: give neither --out nor --fork with it"
            )
        changed = self.changed(saved)
        if changed is not None:
            raise GredpError(
                f"{self.resume} was started with {changed}: a run goes on as it began; to change it, start a "
                f"new run with --fork {shlex.quote(self.resume or '')}"
            )

    def changed(self, saved: "TrainSettings") -> str | None:
        """The first option that matters and is not as it was, with both values."""
        for field in fields(TrainSettings):
            was, told = getattr(saved, field.name), getattr(self, field.name)
            if was != told and field.name not in MAY_CHANGE:
                return f"--{field.name.replace('_', '-')} {was}, not {told}"
        return None


def saved_settings(folder: str) -> TrainSettings:
    """Those of the run in `folder`, to go on with."""
    values = read_document(Path(folder) / FILE)
    try:
        return replace(TrainSettings(**values["settings"]), resume=folder)
    except (TypeError, KeyError) as error:
        raise GredpError(f"{Path(folder) / FILE} is not of this version of gredp: {error}") from None
