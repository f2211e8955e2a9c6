"""How often an audit refutes a true claim: 1,000 whole audits of the real step, each against its proven ε.

python benchmarks/audit_null.py --out results/audit_null.json
"""

import sys
from pathlib import Path

from gredp.audit.game import audit
from gredp.audit.victims import EngineStep
from gredp.storage.record import header, save

AUDITS, ALPHA, PLAYS, GRIDS = 1000, 0.2, 40, ((15,),)
DIRECTIONS = ("sinusoid", "random", "quietest")


def main() -> None:
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else Path("runs/audit_null.json")
    victim = EngineStep({"method": "dpsgd"}, 0.5, grids=GRIDS)
    claim = victim.claim("proven")
    alarms = 0
    for _ in range(AUDITS):
        alarms += audit(victim, GRIDS, claim, plays=PLAYS, alpha=ALPHA, only=DIRECTIONS).refuted
    record = header() | {
        "command": "python benchmarks/audit_null.py --out results/audit_null.json",
        "audits": AUDITS,
        "alpha": ALPHA,
        "plays": PLAYS,
        "directions": list(DIRECTIONS),
        "alarms": alarms,
    }
    save(out, record)
    print(f"{alarms} alarms in {AUDITS} audits of a true claim at alpha = {ALPHA}")


if __name__ == "__main__":
    main()
