"""How far one person with all of their records moves a step: exactly, and as an attacker sees it.

python benchmarks/persons.py --out results/persons.json

Once as the engine works, and once with a planted bug that clips each record instead of each person.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from gredp.audit.game import audit
from gredp.audit.victims import EnginePersons
from gredp.engine import PrivacyEngine
from gredp.storage.record import header, save
from planted import bugs

#: clipping norm, records of a person that take part, persons with 1, 2, … records, draws
CLIP, MOST, PERSONS, DRAWS = 1.0, 4, 9, 30
SIGMA, PLAYS, ALPHA, DELTA, GRIDS = 0.5, 500, 0.01, 1e-5, ((8,),)


def sensitivity(alike: bool) -> float:
    """The largest move of a sum by one person over all draws and persons; noise is off.

    Records are random, with gradients above the norm; `alike` gives each person's the same values.
    """
    generator = torch.Generator().manual_seed(0)
    ids = [person for person in range(PERSONS) for _ in range(person + 1)]
    x = 3 * torch.randn(PERSONS if alike else len(ids), 8, generator=generator)
    x = x[ids] if alike else x
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=PERSONS),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        persons=ids,
        records_per_person=MOST,
    )

    def released(rows: list[int]) -> Tensor:
        optimizer.zero_grad()
        (10 * model(x[rows]).square().sum(1)).mean().backward()
        optimizer.step()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(grads).double() * PERSONS

    moves = []
    for _ in range(DRAWS):
        rows = loader.poisson.inputs(list(range(PERSONS)))
        whole = released(rows)
        others = ([i for i in rows if ids[i] != person] for person in range(PERSONS))
        moves += [float((whole - released(kept)).norm()) for kept in others]
    return max(moves)


def game() -> dict[str, Any]:
    """A canary person, all of whose records are canaries, against one step of the engine."""
    victim = EnginePersons({"method": "dpsgd", "records_per_person": MOST}, SIGMA, 1, 1.0, grids=GRIDS)
    found = audit(
        victim, GRIDS, victim.claim("proven"), only=("random",), plays=PLAYS, alpha=ALPHA, delta=DELTA
    )
    kept = ("refuted", "claimed_epsilon", "audited_epsilon_lower", "plays", "alpha", "delta", "direction")
    return {name: found.to_json()[name] for name in kept}


def main() -> None:
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else Path("runs/persons.json")
    torch.set_num_threads(1)
    rows = []
    for clipped in ("person", "record"):
        torch.manual_seed(0)
        bug: AbstractContextManager[None] = nullcontext()
        if clipped == "record":
            bug = bugs.planted(bugs.records_of_a_person_clipped_one_by_one)
        with bug:
            moved = {"random": sensitivity(False), "alike": sensitivity(True)}
            rows.append({"clipped": clipped, "sensitivity": moved, "audit": game()})
        print(rows[-1], flush=True)
    record = header() | {
        "command": "python benchmarks/persons.py --out results/persons.json",
        "clip_norm": CLIP,
        "records_per_person": MOST,
        "persons": PERSONS,
        "draws": DRAWS,
        "sigma": SIGMA,
        "rows": rows,
    }
    save(out, record)


if __name__ == "__main__":
    main()
