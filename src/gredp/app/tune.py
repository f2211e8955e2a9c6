"""`gredp tune`: a random number of private trainings, the best by a noisy score, one ε for all of it.

No torch until it trains. The guarantee is that of `gredp.privacy.selection`: the chosen model, its settings
and its score are released; the number of trials and all of the others are not, and are deleted. No file that
is kept tells when a trial began or ended.
"""

import math
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gredp.app.settings import TrainSettings, option
from gredp.app.signals import Stopped
from gredp.budget import Sampling
from gredp.errors import GredpError
from gredp.privacy.accountant import check_delta_for, epsilon
from gredp.privacy.ledger import Entry
from gredp.privacy.selection import calibrate_selection, check_trials, draw_trials, selected_epsilon
from gredp.storage.files import make_folder, write

if TYPE_CHECKING:
    from gredp.app.data import Splits
    from gredp.app.train import Run


#: why a choice cannot use an option of training → those options
UNUSABLE: dict[str, tuple[str, ...]] = {
    "give its settings as options": ("recipe",),
    "it holds out --score-share of the records itself": ("validation",),
    "its trials train on the records in memory": ("pretrained", "features"),
    "losing trials and their number must stay unseen": ("track",),
    "a private choice needs private trials": ("claim", "insecure_seed"),
    "it prices independent steps of equal noise only": ("correlation_bands", "noise_schedule"),
    "a choice has no ledger of its own": ("resume", "fork"),
}


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

    def candidates(self) -> list[dict[str, Any]]:
        return [{"lr": lr, "momentum": momentum} for lr, momentum in product(self.lrs, self.momenta)]

    def check(self) -> None:
        """Reject what can be rejected without data."""
        usual = TrainSettings()
        for reason, names in UNUSABLE.items():
            for name in names:
                if getattr(self, name) != getattr(usual, name):
                    raise GredpError(f"gredp tune takes no {option(name)}: {reason}")
        check_trials(self.trials)
        if not self.private:
            raise GredpError(f"a private choice needs private trials: {self.method} training has no noise")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise GredpError("gredp tune runs in one process: each of several would draw trials of its own")
        if self.out is not None and Path(self.out).exists():
            raise GredpError(f"{self.out} exists already")
        if not self.candidates():
            raise GredpError("there is nothing to choose from: give --lrs and --momenta")
        for candidate in self.candidates():
            TrainSettings.check(replace(self, **candidate))


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
    whole = load(settings.dataset, settings.data_dir, settings.holdout, settings.image_size)
    data, apart = _validation(whole, settings.score_share)
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
    check_delta_for(settings.delta, records, settings.allow_large_delta)
    training = Sampling.of_epochs(records, settings.batch_size, settings.epochs)
    score, target = Entry(settings.score_noise, 1.0, 1), (settings.epsilon, settings.delta)
    z = calibrate_selection(*target, training.rate, training.steps, score, settings.trials)
    return Entry(z, training.rate, training.steps), score


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
    """All trials, one after the other; nothing is kept of those that lose."""
    import torch

    from gredp.app.evaluate import score
    from gredp.app.train import train
    from gredp.gradient.noise import SecretSource
    from gredp.randomness import Secret

    secret, best = Secret(), None
    source = SecretSource(secret)
    target = epsilon([spent[0]], settings.delta, "rdp")
    candidates = settings.candidates()
    shared = {field.name: getattr(settings, field.name) for field in fields(TrainSettings)}
    for number in range(draw_trials(settings.trials, float(secret.uniform(1, "trials")))):
        place = math.ceil(float(secret.uniform(1, "candidate", number)) * len(candidates)) - 1
        changes = candidates[place] | {
            "epsilon": target,
            "accountant": "rdp",
            "out": str(folder / str(number)),
        }
        try:
            run = train(TrainSettings(**shared | changes), data=data)
        except Stopped as stop:
            raise Stopped(stop.status - 128, "; nothing was released, and nothing is kept") from None
        _reject_other_charges(run.record["ledger"], spent[0])
        source.begin(number + 1)
        noise = float(source.normal((1,), torch.zeros(1, dtype=torch.float64)))
        found = Trial(score(run, apart) + settings.score_noise * noise, candidates[place], run)
        best = found if best is None or found.score > best.score else best
    assert best is not None
    return best


def _reject_other_charges(ledger: list[dict[str, Any]], expected: Entry) -> None:
    """The bound holds for trials that spend what was promised, not more."""
    charged = sum(entry["steps"] for entry in ledger)
    for entry in ledger:
        same = entry["sample_rate"] == expected.sample_rate and charged == expected.steps
        if not same or entry["noise_multiplier"] < expected.noise_multiplier * (1 - 1e-12):
            raise GredpError(f"a trial was charged {entry}, not {expected}: nothing is released")


def _record(settings: TuneSettings, spent: tuple[Entry, Entry], best: Trial) -> dict[str, Any]:
    """That of the chosen run, with the ε of the choice in place of its own."""
    run, left_out = best.run.record, ("ledger", "starts", "steps_lost", "metrics")
    return {name: value for name, value in run.items() if name not in left_out} | {
        "settings": run["settings"] | {"epsilon": settings.epsilon},
        "guarantee": run["guarantee"]
        | {
            "proven_epsilon": selected_epsilon(spent, settings.trials, settings.delta),
            "claimed_epsilon": None,
            "noise_multiplier": spent[0].noise_multiplier,
        },
        "selection": f"the best of a random number of private trainings, {settings.trials:g} on average, by "
        f"a noisy score on {settings.score_share:g} of the training records; the proven ε covers the choice"
        f"{settings.not_covered}",
        "tuning": {
            "candidates": settings.candidates(),
            "chosen": best.candidate,
            "mean_trials": settings.trials,
            "validation": settings.score_share,
            "score_noise": settings.score_noise,
            "noisy_score": best.score,
            "epsilon_of_one_training": epsilon([spent[0]], settings.delta, "rdp"),
        },
    }
