"""`gredp tune`: a random number of private trainings, the best by a noisy score, one ε for all of it.

No torch until it trains. The guarantee is that of `gredp.privacy.selection`: the chosen model, its settings
and its score are released; the number of trials and all of the others are not, and are deleted. No file that
is kept tells when a trial began or ended.
"""

import math
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gredp.app.settings import TrainSettings
from gredp.app.signals import Stopped
from gredp.errors import GredpError
from gredp.privacy.accountant import check_delta_for, epsilon
from gredp.privacy.ledger import Entry
from gredp.privacy.selection import calibrate_selection, check_trials, draw_trials, selected_epsilon
from gredp.storage.files import make_folder, write

if TYPE_CHECKING:
    from gredp.app.data import Splits
    from gredp.app.train import Run


@dataclass(frozen=True)
class TuneSettings(TrainSettings):
    """Choose a learning rate privately: some trainings at random, the best is kept, ε covers the choice."""

    lrs: tuple[float, ...] = (0.03, 0.1, 0.3)
    """learning rates to choose from, in place of --lr"""
    momenta: tuple[float, ...] = (0.9,)
    """momenta to choose from, in place of --momentum"""
    trials: float = 4.0
    """trainings on average; how many there are is drawn at random and stays secret"""
    score_share: float = 0.2
    """share of the training records that score the trials and are not trained on"""
    score_noise: float = 5.0
    """deviation of the noise on the number of validation records that a trial gets right"""

    def candidates(self) -> list[dict[str, float]]:
        return [{"lr": lr, "momentum": momentum} for lr, momentum in product(self.lrs, self.momenta)]

    def check(self) -> None:
        """Refuse what can be refused without data."""
        check_trials(self.trials)
        if not (self.score_noise > 0 and math.isfinite(self.score_noise)):
            raise GredpError(f"--score-noise must be a positive number, not {self.score_noise}")
        if not 0 < self.score_share < 1:
            raise GredpError(f"--score-share must lie strictly between 0 and 1, not {self.score_share}")
        if self.validation or self.pretrained is not None:
            raise GredpError("gredp tune takes neither --validation nor --pretrained")
        if self.recipe is not None:
            raise GredpError("gredp tune takes no --recipe: say its settings as options")
        if self.track:
            raise GredpError("gredp tune takes no --track: losing trials and their number must stay unseen")
        if self.claim != "proven" or self.method == "plain":
            raise GredpError(
                "a private choice needs private trials: --claim proven and another method than plain"
            )
        if self.correlation_bands != 1:
            raise GredpError("gredp tune takes no --correlation-bands: it prices independent noise only")
        if self.noise_schedule != 1:
            raise GredpError("gredp tune takes no --noise-schedule: it prices steps of equal noise only")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise GredpError("gredp tune runs in one process: each of several would draw trials of its own")
        if self.resume or self.fork or self.insecure_seed is not None:
            raise GredpError("gredp tune takes neither --resume, --fork nor --insecure-seed")
        if self.out is not None and Path(self.out).exists():
            raise GredpError(f"{self.out} exists already")
        if not self.candidates():
            raise GredpError("there is nothing to choose from: give --lrs and --momenta")
        for candidate in self.candidates():
            TrainSettings.check(replace(self, **candidate))  # type: ignore[arg-type]


def tune(settings: TuneSettings) -> "Run":
    """Choose, write `record.json` and `model.safetensors` of the best trial, return its record.

    The proven ε of the record is that of the whole choice, at most the target. There is no ledger to resume
    or fork from: the charges of one training alone would say too little.
    """
    settings.check()
    from gredp.app.data import load
    from gredp.app.train import Run
    from gredp.storage.record import header, new_folder, save, undate

    head = header()
    data, apart = _validation(
        load(settings.dataset, settings.data_dir, settings.holdout, settings.image_size), settings.score_share
    )
    trial = _trial(settings, len(data.y_train))
    out = Path(settings.out or new_folder(settings.dataset, "tuned"))
    make_folder(out)  # before the first trial: a choice that finds no place would be lost
    try:
        with tempfile.TemporaryDirectory() as folder:
            best = _best(settings, trial, data, apart, Path(folder))
            record = _record(settings, trial, best) | head
            weights = (best.run.folder / "model.safetensors").read_bytes()
        save(out / "record.json", record)
        write(out / "model.safetensors", weights)
        undate(out, head["created"])
    except BaseException:
        with suppress(OSError):  # not empty: something was released
            out.rmdir()
        raise
    return Run(out, record)


def _trial(settings: TuneSettings, records: int) -> tuple[Entry, Entry]:
    """What every trial spends, whatever it draws: its training, and its score."""
    if records < settings.batch_size:
        raise GredpError(
            f"the batch size {settings.batch_size} is larger than the {records} training records"
        )
    check_delta_for(settings.delta, records, settings.allow_large_delta)
    rate = settings.batch_size / records
    steps = settings.epochs * math.ceil(records / settings.batch_size)
    score = Entry(settings.score_noise, 1.0, 1)
    z = calibrate_selection(settings.epsilon, settings.delta, rate, steps, score, settings.trials)
    return Entry(z, rate, steps), score


def _validation(data: "Splits", share: float) -> tuple["Splits", "Splits"]:
    """(data without the validation records, data whose test set they are); each record decides for itself."""
    import torch

    from gredp.app.data.holdout import held_out

    if not isinstance(data.x_train, torch.Tensor):
        raise GredpError("gredp tune takes data that fit in memory, not a folder of .npy files")
    apart = torch.from_numpy(held_out(data.x_train.numpy(), data.y_train.numpy(), share, "validation"))
    kept = replace(data, x_train=data.x_train[~apart], y_train=data.y_train[~apart])
    return kept, replace(data, x_test=data.x_train[apart], y_test=data.y_train[apart])


@dataclass(frozen=True)
class Trial:
    score: float
    candidate: dict[str, float]
    run: "Run"


def _best(
    settings: TuneSettings, spent: tuple[Entry, Entry], data: "Splits", apart: "Splits", folder: Path
) -> Trial:
    """All trials, one after the other; of those that lose nothing is kept."""
    import torch

    from gredp.app.evaluate import score
    from gredp.app.train import train
    from gredp.gradient.noise import SecretSource
    from gredp.randomness import Secret

    secret, best = Secret(), None
    source = SecretSource(secret)
    target = epsilon([spent[0]], settings.delta, "rdp")
    candidates = settings.candidates()
    for number in range(draw_trials(settings.trials, float(secret.uniform(1, "trials")))):
        place = math.ceil(float(secret.uniform(1, "candidate", number)) * len(candidates)) - 1
        told = replace(_plain(settings), epsilon=target, accountant="rdp", out=str(folder / str(number)))
        try:
            run = train(replace(told, **candidates[place]), data=data)  # type: ignore[arg-type]
        except Stopped as stop:
            raise Stopped(stop.status - 128, "; nothing was released, and nothing is kept") from None
        _refuse_other_charges(run.record["ledger"], spent[0])
        source.begin(number + 1)
        noise = float(source.normal((1,), torch.zeros(1, dtype=torch.float64)))
        found = Trial(score(run, apart) + settings.score_noise * noise, candidates[place], run)
        best = found if best is None or found.score > best.score else best
    assert best is not None
    return best


def _plain(settings: TuneSettings) -> TrainSettings:
    names = TrainSettings.__dataclass_fields__
    return TrainSettings(**{name: getattr(settings, name) for name in names})


def _refuse_other_charges(ledger: list[dict[str, Any]], expected: Entry) -> None:
    """The bound holds for trials that spend what was promised, not more."""
    charged = sum(entry["steps"] for entry in ledger)
    for entry in ledger:
        same = entry["sample_rate"] == expected.sample_rate and charged == expected.steps
        if not same or entry["noise_multiplier"] < expected.noise_multiplier * (1 - 1e-12):
            raise GredpError(f"a trial was charged {entry}, not {expected}: nothing is released")


def _record(settings: TuneSettings, spent: tuple[Entry, Entry], best: Trial) -> dict[str, Any]:
    """That of the chosen run, with the ε of the choice in place of its own."""
    record = dict(best.run.record)
    total = selected_epsilon(spent, settings.trials, settings.delta)
    for key in ("ledger", "starts", "steps_lost", "metrics"):
        record.pop(key)
    record["settings"] = record["settings"] | {"epsilon": settings.epsilon}
    record["guarantee"] = record["guarantee"] | {
        "proven_epsilon": total,
        "claimed_epsilon": None,
        "noise_multiplier": spent[0].noise_multiplier,
    }
    record["selection"] = (
        f"the best of a random number of private trainings, {settings.trials:g} on average, by a noisy score "
        f"on {settings.score_share:g} of the training records; the proven ε covers the choice"
        f"{settings.not_covered}"
    )
    record["tuning"] = {
        "candidates": settings.candidates(),
        "chosen": best.candidate,
        "mean_trials": settings.trials,
        "validation": settings.score_share,
        "score_noise": settings.score_noise,
        "noisy_score": best.score,
        "epsilon_of_one_training": epsilon([spent[0]], settings.delta, "rdp"),
    }
    return record
