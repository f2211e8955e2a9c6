"""What a training run is told. Checked before any data is read; no torch."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gredp.errors import GredpError
from gredp.mechanisms.select import Claim, Method, Noise, mechanism, noise_scale
from gredp.privacy.accountant import AccountantName, check_delta
from gredp.privacy.certificate import Block
from gredp.sealed import read_document

#: where the settings lie in a run's folder
FILE = "settings.json"
#: settings that belong to one start of a run, not to the run
OF_ONE_START = ("resume", "fork", "out", "json")
#: settings that may differ when a run goes on: its result does not depend on them
MAY_CHANGE = (*OF_ONE_START, "max_physical_batch_size", "data_dir", "checkpoint_seconds")


@dataclass(frozen=True)
class TrainSettings:
    """Train a network privately; without options, a small LeNet on the embedded digits at (2, 1e-5)."""

    dataset: str = "digits"
    """digits (embedded), mnist, fashion-mnist, cifar10, cifar100, the path of your own .npz, or of a
    folder of .npy files for data larger than memory"""
    model: str | None = None
    """lenet-small, lenet5, model3, resnet20 or alexnet; by default the one that goes with the data set"""
    block: int | None = None
    """block size of circulant fully connected layers; 0 is dense. By default 8 for gredp and spectral_dp"""
    method: Method = "gredp"
    noise: Noise = "white"
    """white, real (the paper's Algorithm 1 read literally) or shaped; for method gredp"""
    claim: Claim = "proven"
    """proven: the target is a true ε. paper: σ as the paper takes it, and the ε that this really costs"""
    epsilon: float = 2.0
    delta: float = 1e-5
    accountant: AccountantName = "pld"
    epochs: int = 20
    batch_size: int = 192
    clip_norm: float = 1.0
    clipping: str | None = None
    """flat, per_layer, automatic, or layer_wise (the paper's Algorithm 2)"""
    correlation_bands: int | Literal["auto"] = 1
    """steps over which noise is correlated, and parts of the records that take turns; 1: independent noise.
    auto: the number that leaves least noise on the iterates, by the accountant, before training"""
    filter_ratio: float = 0.5
    """share of coefficients that spectral_dp keeps"""
    lr: float = 0.1
    momentum: float = 0.9
    max_physical_batch_size: int = 512
    """records in memory at once; the result does not depend on it"""
    seed: int = 0
    """for initialisation only; noise and sampling are always secret"""
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
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead of tables"""

    @property
    def block_size(self) -> int:
        """Block-circulant layers go with the spectral methods, as in the paper, unless said otherwise."""
        if self.block is not None:
            return self.block
        return 8 if self.method in ("gredp", "spectral_dp") else 0

    def kept(self) -> dict[str, Any]:
        """What the run's folder keeps."""
        return {name: value for name, value in asdict(self).items() if name not in OF_ONE_START}

    def options(self) -> dict[str, Any]:
        """Options of the mechanism beyond those every method has."""
        return {"filter_ratio": self.filter_ratio} if self.method == "spectral_dp" else {}

    def check(self) -> None:
        """Refuse what can be refused without data."""
        bands = 2 if self.correlation_bands == "auto" else self.correlation_bands
        chosen = mechanism(self.method, self.noise, self.claim, self.clipping, bands, **self.options())
        check_delta(self.delta)
        for name, value, least in (
            ("epsilon", self.epsilon, 0.0),
            ("clip-norm", self.clip_norm, 0.0),
            ("lr", self.lr, 0.0),
        ):
            if not (value > least and math.isfinite(value)):
                raise GredpError(f"--{name} must be a positive number, not {value}")
        if self.method != "plain":
            block = Block.whole("weight", "layer", (8,), 1)
            noise_scale(1.0, chosen.unit_multiplier([block], self.clip_norm, 1), self.claim)
        for name, whole in (
            ("epochs", self.epochs),
            ("batch-size", self.batch_size),
            ("max-physical-batch-size", self.max_physical_batch_size),
        ):
            if whole < 1:
                raise GredpError(f"--{name} must be at least 1, not {whole}")
        if self.block is not None and self.block < 0:
            raise GredpError(f"--block must be 0 (dense) or more, not {self.block}")
        if not self.checkpoint_seconds >= 0:
            raise GredpError(f"--checkpoint-seconds must be 0 or more, not {self.checkpoint_seconds}")
        if self.resume is not None:
            self._check_resumed(saved_settings(self.resume))
        if not 0 <= self.momentum < 1:
            raise GredpError(f"--momentum must lie in [0, 1), not {self.momentum}")

    def _check_resumed(self, saved: "TrainSettings") -> None:
        if self.out is not None or self.fork is not None:
            raise GredpError(
                "--resume goes on in the folder of the run: give neither --out nor --fork with it"
            )
        for field in fields(self):
            was, told = getattr(saved, field.name), getattr(self, field.name)
            if was != told and field.name not in MAY_CHANGE:
                option = field.name.replace("_", "-")
                raise GredpError(
                    f"{self.resume} was started with --{option} {was}, not {told}: a run goes on as it "
                    f"began; to change it, start a new run with --fork {self.resume}"
                )


def saved_settings(folder: str) -> TrainSettings:
    """Those of the run in `folder`, to go on with."""
    values = read_document(Path(folder) / FILE)
    try:
        return replace(TrainSettings(**values["settings"]), resume=folder)
    except (TypeError, KeyError) as error:
        raise GredpError(f"{Path(folder) / FILE} is not of this version of gredp: {error}") from None
