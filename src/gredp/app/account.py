"""`gredp account`: what a run would cost, before there is a model. No torch."""

from dataclasses import asdict, dataclass

from gredp.app.settings import Flag, PrivacyOptions
from gredp.budget import quote
from gredp.privacy.accountant import delta_times


@dataclass(frozen=True)
class AccountSettings(PrivacyOptions):
    """What a run would cost: from σ its proven and claimed ε, or from a target ε the σ that it needs."""

    sigma: float | None = None
    """the mechanism's noise scale"""
    epsilon: float | None = None
    """target; give this or --sigma"""
    batch_size: int = 500
    records: int = 60_000
    epochs: int = 30
    layers: int = 1
    """layers that are each clipped to the same norm, as in the paper's Algorithm 2; 1 is flat clipping"""
    json: Flag = False
    """print one JSON object instead of a table"""


def run_account(settings: AccountSettings) -> None:
    from gredp.app.console import show

    options = asdict(settings)
    as_json, target, bands = (options.pop(name) for name in ("json", "epsilon", "correlation_bands"))
    result = quote(target_epsilon=target, bands=bands, **options)
    rows = result.rows()
    rows.insert(1, ("δ × records", delta_times(settings.delta, settings.records)))
    show(as_json, result.to_json(), f"{settings.method}, claim {settings.claim}", rows)
