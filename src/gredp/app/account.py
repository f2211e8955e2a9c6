"""`gredp account`: what a run would cost, before there is a model. No torch."""

from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from gredp.mechanisms import Claim, MethodName, NoiseName
from gredp.privacy.accountant import AccountantName, delta_times


@dataclass(frozen=True)
class AccountSettings:
    """What a run would cost: from σ its proven and claimed ε, or from a target ε the σ that it needs."""

    method: MethodName = "gredp"
    noise: NoiseName = "white"
    claim: Claim = "proven"
    """proven: a target ε is a true one. paper: σ as the paper takes it for that ε, and its true cost"""
    sigma: float | None = None
    """the mechanism's noise scale"""
    epsilon: float | None = None
    """target; give this or --sigma"""
    delta: float = 1e-5
    allow_large_delta: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """take a --delta of one in the number of records or more, at which ε says little"""
    batch_size: int = 500
    records: int = 60_000
    epochs: int = 30
    layers: int = 1
    """layers that are each clipped to the same norm, as in the paper's Algorithm 2; 1 is flat clipping"""
    bands: int = 1
    """steps over which noise is correlated, as --correlation-bands of train"""
    accountant: AccountantName = "pld"
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead of a table"""


def run_account(settings: AccountSettings) -> None:
    from gredp.budget import quote

    told = {name: value for name, value in asdict(settings).items() if name not in ("json", "epsilon")}
    result = quote(target_epsilon=settings.epsilon, **told)
    if settings.json:
        from gredp.storage.record import dumps

        print(dumps(result.to_json()))
        return
    from gredp.app.console import table

    rows = result.rows()
    rows.insert(1, ("δ × records", delta_times(settings.delta, settings.records)))
    table(f"{settings.method}, claim {settings.claim}", rows)
