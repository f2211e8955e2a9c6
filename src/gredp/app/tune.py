"""`gredp tune`: a random number of private trainings, the best by a noisy score, one ε for all of it.

No torch until it trains. The guarantee is that of `gredp.privacy.selection`: the chosen model, its settings
and its score are released; the number of trials and all of the others are not, and are deleted. No file that
is kept tells when a trial began or ended, and no line that is printed how many there were. A choice that a
signal stopped keeps its finished trials unseen (`choice.py`); the same command resumes it.
"""

import json
import math
import os
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gredp.app.choice import Choice, is_unfinished
from gredp.app.ranges import option
from gredp.app.settings import FILE, MAY_CHANGE, TrainSettings
from gredp.app.signals import Stopped
from gredp.budget import Sampling
from gredp.errors import GredpError
from gredp.privacy.accountant import check_delta_for, epsilon
from gredp.privacy.ledger import Entry, Ledger
from gredp.privacy.selection import calibrate_selection, check_trials, draw_trials
from gredp.storage.files import read_document, write, write_document
from gredp.storage.record import plain_numbers
from gredp.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from gredp.app.data import Splits
    from gredp.app.train import Run


#: why a choice cannot use an option of training → those options
UNUSABLE: dict[str, tuple[str, ...]] = {
    "give its settings as options": ("recipe",),
    "it holds out --score-share of the records itself": ("validation",),
    "it scores records, not persons": ("person",),
    "its trials train on the records in memory (--features none for images)": ("pretrained", "features"),
    "losing trials and their number must stay unseen": ("track",),
    "a private choice needs private trials": ("claim", "insecure_seed"),
    "it prices independent steps of equal noise only": ("correlation_bands", "noise_schedule"),
    "a choice is resumed by its own command, with the same --out": ("resume", "fork"),
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
        if self.out is not None and Path(self.out).exists() and not is_unfinished(Path(self.out)):
            raise GredpError(f"{self.out} exists already")
        if not self.candidates():
            raise GredpError("there is nothing to choose from: give --lrs and --momenta")
        for candidate in self.candidates():
            TrainSettings.check(replace(self, **candidate))


def tune(settings: TuneSettings) -> "Run":
    """Choose, write `record.json` and `model.safetensors` of the best trial, return its record.

    The proven ε of the record is that of the whole choice, at most the target. The ledger is charged with the
    whole choice before its first trial.
    """
    settings.check()
    from gredp.app.blueprint import MODEL
    from gredp.app.data import load
    from gredp.app.train import Run
    from gredp.storage.record import header, new_folder, save, undate

    head = header()
    whole = load(
        settings.dataset, settings.data_dir, settings.holdout, settings.image_size, settings.target_range
    )
    data, apart = _validation(whole, settings.score_share)
    spent = _trial(settings, len(data.y_train))
    out = Path(settings.out or new_folder(settings.dataset, "tuned"))
    folder, choice, head["created"] = _begin(settings, out, spent, data, head["created"])
    try:
        _run_trials(choice, settings, spent, data, apart)
        record = _record(settings, spent, choice) | {"starts": folder.ledger.written.incarnations} | head
        write(out / MODEL, _released(choice.weights(), record["guarantee"]))
        save(out / "record.json", record)
        choice.forget()
        undate(out, head["created"])
        return Run(out, record)
    except Stopped as stop:
        kept = f"; nothing is released, and {choice.folder} keeps what is done: do not look into it"
        raise Stopped(stop.status - 128, f"{kept}; resume with: {_command(out)}") from None
    except GredpError:
        shutil.rmtree(out, ignore_errors=True)
        raise
    finally:
        folder.close()


def _begin(
    settings: TuneSettings, out: Path, spent: tuple[Entry, Entry], data: "Splits", day: str
) -> tuple[RunFolder, Choice, str]:
    """A new choice, or the one that was stopped in this folder; and the day on which it began."""
    from gredp.app.dataset import describe_data
    from gredp.randomness import Secret

    kept = {name: value for name, value in settings.kept().items() if name not in MAY_CHANGE}
    own = {name: kept.pop(name) for name in ("lrs", "momenta", "trials", "score_share", "score_noise")}
    facts = {"settings": kept | {"accountant": "rdp"}, "tuning": own, "data": describe_data(data)}
    facts = json.loads(json.dumps(facts | {"trial": [asdict(entry) for entry in spent]}))
    if is_unfinished(out):
        folder = RunFolder.open(out)
        try:
            saved = read_document(out / FILE)
            if {name: saved.get(name) for name in facts} != facts:
                raise GredpError(f"{out} holds a choice with other settings or data: choose another --out")
            folder.ledger.start()
            return folder, Choice.resume(out), saved["created"]
        except BaseException:
            folder.close()
            raise
    folder = RunFolder.create(out, _charged(settings, spent))  # before the first trial
    try:
        write_document(out / FILE, facts | {"created": day})
        folder.ledger.start()
        uniform = float(Secret().uniform(1, "trials"))
        return folder, Choice.begin(out, draw_trials(settings.trials, uniform)), day
    except BaseException:
        folder.close()
        shutil.rmtree(out, ignore_errors=True)
        raise


def _charged(settings: TuneSettings, spent: tuple[Entry, Entry]) -> list[Entry]:
    """The whole choice, for the ledger."""
    return [replace(entry, trials=settings.trials, choice="tune") for entry in spent]


def _command(out: Path) -> str:
    """The one that was given, with the folder if that was not named."""
    from gredp.app.merge_settings import named

    words = sys.argv[1:] if sys.argv[1:2] == ["tune"] else ["tune"]
    place = [] if "out" in named(words) else ["--out", str(out)]
    return shlex.join(["gredp", *words, *place])


def _released(weights: bytes, guarantee: dict[str, Any]) -> bytes:
    """The model file of the best trial, with the guarantee of the choice in place of its own."""
    from safetensors.torch import load, save

    from gredp.app.blueprint import blueprint_of

    return save(load(weights), replace(blueprint_of(weights), guarantee=guarantee).metadata())


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


def _run_trials(
    choice: Choice, settings: TuneSettings, spent: tuple[Entry, Entry], data: "Splits", apart: "Splits"
) -> None:
    """Those that are left, one after the other; nothing is kept of those that lose."""
    import torch

    from gredp.app.blueprint import MODEL
    from gredp.app.evaluate import score
    from gredp.app.train import train
    from gredp.gradient.noise import SecretSource
    from gredp.randomness import Secret

    secret = Secret()
    source = SecretSource(secret)
    target = epsilon([spent[0]], settings.delta, "rdp")
    candidates = settings.candidates()
    shared = {field.name: getattr(settings, field.name) for field in fields(TrainSettings)}
    for number in range(choice.done, choice.trials):
        place = math.ceil(float(secret.uniform(1, "candidate", number)) * len(candidates)) - 1
        own = {"epsilon": target, "accountant": "rdp", "out": str(choice.trial)}
        run = train(TrainSettings(**shared | candidates[place] | own), data=data)
        _reject_other_charges(run.record["ledger"], spent[0])
        source.begin(number + 1)
        noise = float(source.normal((1,), torch.zeros(1, dtype=torch.float64)))
        noisy = score(run, apart) + settings.score_noise * noise
        weights = (run.folder / MODEL).read_bytes()
        choice.add(noisy, candidates[place], plain_numbers(run.record), weights)


def _reject_other_charges(ledger: list[dict[str, Any]], expected: Entry) -> None:
    """The bound holds for trials that spend what was promised, not more."""
    charged = sum(entry["steps"] for entry in ledger)
    for entry in ledger:
        same = entry["sample_rate"] == expected.sample_rate and charged == expected.steps
        if not same or entry["noise_multiplier"] < expected.noise_multiplier * (1 - 1e-12):
            raise GredpError(f"a trial was charged {entry}, not {expected}: nothing is released")


def _record(settings: TuneSettings, spent: tuple[Entry, Entry], choice: Choice) -> dict[str, Any]:
    """That of the chosen run, with the ε of the choice in place of its own."""
    assert choice.best is not None
    best = choice.best
    run, charged = best["record"], _charged(settings, spent)
    proven = epsilon(charged, settings.delta, "rdp")
    return run | {
        "settings": run["settings"] | {"epsilon": settings.epsilon},
        "guarantee": run["guarantee"]
        | {
            "proven_epsilon": proven,
            "claimed_epsilon": None,
            "noise_multiplier": spent[0].noise_multiplier,
        },
        "ledger": Ledger(tuple(charged)).to_json(),
        "metrics": [last | {"proven_epsilon": proven} for last in run["metrics"][-1:]],
        "selection": f"the best of a random number of private trainings, {settings.trials:g} on average, by "
        f"a noisy score on {settings.score_share:g} of the training records; the proven ε covers the choice"
        f"{settings.not_covered}",
        "tuning": {
            "candidates": settings.candidates(),
            "chosen": best["candidate"],
            "mean_trials": settings.trials,
            "validation": settings.score_share,
            "score_noise": settings.score_noise,
            "noisy_score": best["score"],
            "epsilon_of_one_training": epsilon([spent[0]], settings.delta, "rdp"),
        },
    }
