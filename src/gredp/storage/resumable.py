"""An engine's run in a folder: saved, resumed, forked. Charges are on the disk before noise is drawn."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gredp.distributed import rank, run_on_rank_zero
from gredp.errors import GredpError
from gredp.gradient.capture import Capture
from gredp.gradient.noise import SecretSource
from gredp.optimizer import PrivateOptimizer
from gredp.privacy.ledger import Entry, Ledger
from gredp.randomness import Secret, Split
from gredp.sampling import PrivateLoader
from gredp.storage.checkpoint import restore, tensor_groups, write_checkpoint
from gredp.storage.run_folder import Checkpoint, RunFolder


class Resumable:
    """What a private model spends and resumes from."""

    def __init__(self, secret: Secret) -> None:
        self.secret = secret
        self.ledger = Ledger()
        self._capture: Capture | None = None
        self._optimizer: PrivateOptimizer | None = None
        self._folder: RunFolder | None = None
        self._loader: PrivateLoader | None = None

    @property
    def averaged(self) -> nn.Module:
        raise AttributeError("averaged is gone: average the released weights by torch's AveragedModel")

    def save(
        self,
        path: str | Path,
        progress: dict[str, Any] | None = None,
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """Write a checkpoint into the run folder `path`; the first call makes the folder.

        From the first call on every step is charged to the ledger in that folder, on the disk, before its
        noise is drawn: after a crash `load` finds all that was spent. `progress` is the caller's own, plain
        JSON; `load` gives it back. `modules` are saved beside the model, such as torch's `AveragedModel` of
        its weights: what follows from released weights costs no privacy.

        | case | what happens |
        |---|---|
        | the folder exists and is not this run's | rejected |
        | another process holds it | rejected |
        | the disk is full | rejected; the last checkpoint stays whole |
        | several processes | the first one writes, the others do nothing |
        """
        module, optimizer = self._private()
        optimizer.capture.state.reject_changes()
        if rank():
            return
        if self._folder is None:
            folder = self._keep(RunFolder.create(Path(path), self.ledger.entries))
            if optimizer.split is not None:
                folder.keep_split(optimizer.split.key)
        elif (folder := self._folder).path != Path(path):
            raise GredpError(f"this run is kept in {folder.path}, not in {path}")
        write_checkpoint(folder, module, optimizer, progress or {}, modules or {})

    def load(self, path: str | Path, modules: Mapping[str, nn.Module] | None = None) -> dict[str, Any]:
        """Resume from the newest whole checkpoint of `path`, after `make_private` with the same settings.

        Steps that were charged after that checkpoint stay charged, and noise and batches are drawn afresh: ε
        is never below that of an uninterrupted run. Returns the `progress` that was saved; `modules` get
        their weights back.

        | case | what happens |
        |---|---|
        | settings that the certificate or accountant depend on have changed | rejected, with both values |
        | a damaged checkpoint | the one before it, with a warning; if there is none, rejected |
        | a damaged or shortened ledger | rejected: what was spent is unknown |
        | steps charged to this engine before | rejected |
        | a noise_generator was given | rejected: seeded alike, it would repeat its noise |
        | correlation bands | the parts take turns as before; no noise of earlier starts is taken back |
        """
        module, optimizer = self._private()
        if not isinstance(optimizer.private_step.source, SecretSource):
            raise GredpError("a resumed run needs fresh noise: call make_private without a noise_generator")
        if self._loader is not None and self._loader.generator is not None:
            raise GredpError("a resumed run needs fresh batches: give a data loader without a generator")
        if self._folder is not None or self.ledger.steps:
            raise GredpError(f"{self.ledger.steps} steps are charged already: load into a new engine")
        held: list[RunFolder] = []
        try:
            facts, tensors = run_on_rank_zero(lambda: _open(Path(path), held), "the run to load")
            checkpoint = Checkpoint(tensors, facts["checkpoint"])
            self._resume_split(facts)  # first: what it rejects leaves the model as it was
            progress = restore(checkpoint, module, optimizer, modules or {})
            if held:
                self._keep(held[0])
            else:  # the first process holds the folder
                self.ledger.begin_with([Entry(**row) for row in facts["entries"]], facts["inherited"])
                self.secret.incarnation = facts["starts"] + 1
        except BaseException:
            for folder in held:
                folder.close()
            raise
        return progress

    def _resume_split(self, facts: dict[str, Any]) -> None:
        """The split that the run began with: in another one a record could take part again too soon."""
        _, optimizer = self._private()
        if optimizer.split is None:
            return
        if facts["split"] is None:
            raise GredpError("the run's split of the records into parts is not there any more: fork the run")
        self._use_split(bytes.fromhex(facts["split"]))
        own = sum(row["steps"] for row in facts["entries"]) > facts["inherited"]
        if own and facts["entries"][-1]["split"] != optimizer.split.name:
            raise GredpError("the run's split of the records is not the one that was charged: fork the run")

    def fork(self, path: str | Path) -> dict[str, torch.Tensor]:
        """Begin with all that the run in `path` has spent, before `make_private`; returns its newest weights.

        The ε of this engine then covers the parent's steps too. What either of the two spends later is
        charged to its own ledger: to publish both, add both up.
        """
        if self._optimizer is not None or self.ledger.steps:
            raise GredpError("fork a run before make_private, with a new engine")
        held: list[RunFolder] = []
        try:
            facts, tensors = run_on_rank_zero(lambda: _open(Path(path), held), "the run to fork")
        finally:
            for parent in held:
                parent.close()
        self.ledger.begin_with([Entry(**row) for row in facts["entries"]])
        return tensor_groups(Checkpoint(tensors, {}))["model"]

    def _use_split(self, key: bytes) -> None:
        """The same split in the sampler and in the ledger, and in all processes."""
        sampler = self._private()[1].sampler
        assert sampler.split is not None
        sampler.split = Split(key, sampler.split.parts)

    def _private(self) -> tuple[nn.Module, PrivateOptimizer]:
        if self._capture is None or self._optimizer is None:
            raise GredpError("there is no private model: call make_private first")
        return self._capture.module, self._optimizer

    def _keep(self, folder: RunFolder) -> RunFolder:
        """Begin a new incarnation in `folder` and charge its ledger from now on."""
        self.secret.incarnation = folder.ledger.start()
        self.ledger.keep_in(folder.ledger)
        self._folder = folder
        return folder

    def detach(self) -> None:
        """Remove the hooks from the model and close the run folder; what was spent stays spent."""
        self.ledger.ceiling = None
        if self._capture is not None:
            self._capture.detach()
            attributes = vars(self._capture.module)
            if attributes.get("_module") is self._capture.module:  # Opacus' name, given by make_private
                del attributes["_module"]
            self._capture = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _open(path: Path, held: list[RunFolder]) -> tuple[dict[str, Any], bytes]:
    """What all processes must know of a run: its newest checkpoint, what was spent. `held` takes it."""
    held.append(RunFolder.open(path))
    checkpoint = held[0].newest()
    written = held[0].ledger.written
    facts = {
        "checkpoint": checkpoint.facts,
        "entries": [asdict(entry) for entry in written.entries],
        "inherited": written.inherited,
        "starts": written.incarnations,
        "split": held[0].split(),
    }
    return facts, checkpoint.tensors
