"""A private choice that has not ended: how many trials it has, how many are done, and the best of them.

Formal guarantee. The number of trials is drawn once, before the first, and kept. A trial counts when it has
ended; one that was interrupted is forgotten and drawn anew. So an interruption that depends on no trial's
outcome leaves the law of what is released as it was, and with it the ε of `privacy.selection`. To begin anew
would not: choices that take long, which have many trials, would be given up more often than others, and the
number of trials would not be the one that ε is proven for.

None of this may be seen. It lies in a folder that only its owner can read, it is never printed, and it is
gone when the choice is released.
"""

import shutil
from pathlib import Path
from typing import Any

from gredp.errors import GredpError
from gredp.storage.files import cannot, read, read_document, write, write_document

#: in the run folder until the choice is released
UNRELEASED, STATE = "unreleased", "state.json"
OWNER_ONLY = 0o600


class Choice:
    """`trials` in all, `done` of them; `best` is score, candidate and record of the best, None at first."""

    def __init__(self, out: Path, trials: int, done: int = 0, best: dict[str, Any] | None = None) -> None:
        self.folder = out / UNRELEASED
        self.trials, self.done, self.best = trials, done, best

    @classmethod
    def begin(cls, out: Path, trials: int) -> "Choice":
        choice = cls(out, trials)
        try:
            choice.folder.mkdir(mode=0o700)
        except OSError as error:
            raise cannot(choice.folder, "made", error) from None
        choice._save()
        return choice

    @classmethod
    def resume(cls, out: Path) -> "Choice":
        state = read_document(out / UNRELEASED / STATE)
        return cls(out, state["trials"], state["done"], state["best"])

    @property
    def trial(self) -> Path:
        """An empty place for the next trial: one that was interrupted is forgotten."""
        shutil.rmtree(self.folder / "trial", ignore_errors=True)
        return self.folder / "trial"

    def add(self, score: float, candidate: dict[str, float], record: dict[str, Any], weights: bytes) -> None:
        """One more trial has ended; it is kept if it is the best so far."""
        if self.best is None or score > self.best["score"]:
            file = f"{self.done}.safetensors"
            write(self.folder / file, weights, OWNER_ONLY)
            self.best = {"score": score, "candidate": candidate, "record": record, "weights": file}
        self.done += 1
        self._save()
        for other in self.folder.glob("*.safetensors"):
            if other.name != self.best["weights"]:
                other.unlink()

    def weights(self) -> bytes:
        """Of the best trial."""
        if self.best is None:
            raise GredpError("no trial has ended")
        return read(self.folder / self.best["weights"])

    def _save(self) -> None:
        state = {"trials": self.trials, "done": self.done, "best": self.best}
        write_document(self.folder / STATE, state, OWNER_ONLY)

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def is_unfinished(out: Path) -> bool:
    """Whether a choice in this folder can be resumed."""
    return (out / UNRELEASED / STATE).exists() and not (out / "record.json").exists()
