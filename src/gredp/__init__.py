"""GReDP: differentially private training in the frequency domain, with every ε proven.

The names are loaded when they are first used, so that `import gredp` and the command line stay quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gredp import opacus_modules

if TYPE_CHECKING:
    from gredp.engine import PrivacyEngine as PrivacyEngine
    from gredp.errors import GredpError as GredpError
    from gredp.gradient.rules import register_rule as register_rule
    from gredp.layers import BlockCirculantLinear as BlockCirculantLinear
    from gredp.layers import PrivateMultiheadAttention as PrivateMultiheadAttention
    from gredp.layers import SpectralConv2d as SpectralConv2d
    from gredp.layers import WSConv2d as WSConv2d
    from gredp.opacus_names import get_noise_multiplier as get_noise_multiplier
    from gredp.sampling import BatchMemoryManager as BatchMemoryManager
    from gredp.validation import ModuleValidator as ModuleValidator
    from gredp.validation import fix as fix
    from gredp.validation import to_spectral as to_spectral
    from gredp.validation import validate as validate

__version__ = "0.1.0"

_HOMES = {
    "PrivacyEngine": "gredp.engine",
    "GredpError": "gredp.errors",
    "BlockCirculantLinear": "gredp.layers",
    "PrivateMultiheadAttention": "gredp.layers",
    "SpectralConv2d": "gredp.layers",
    "WSConv2d": "gredp.layers",
    "BatchMemoryManager": "gredp.sampling",
    "ModuleValidator": "gredp.validation",
    "fix": "gredp.validation",
    "get_noise_multiplier": "gredp.opacus_names",
    "load": "gredp.app.predictor",
    "register_rule": "gredp.gradient.rules",
    "to_spectral": "gredp.validation",
    "validate": "gredp.validation",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in opacus_modules.MODULES:
        return import_module(f"gredp.{name}")
    if name not in _HOMES:
        return opacus_modules.find("", name)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
