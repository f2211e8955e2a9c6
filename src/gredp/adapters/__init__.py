"""GReDP inside other people's training programs: Opacus, Lightning, Hugging Face.

One file for each, loaded when its name is first used, so that gredp works without any of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gredp.adapters.hugging_face import PrivateTrainer as PrivateTrainer
    from gredp.adapters.lightning import PrivacyCallback as PrivacyCallback
    from gredp.adapters.opacus import register_with_opacus as register_with_opacus

_HOMES = {
    "PrivateTrainer": "hugging_face",
    "PrivacyCallback": "lightning",
    "register_with_opacus": "opacus",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gredp.adapters' has no attribute {name!r}")
    try:
        return getattr(import_module(f"gredp.adapters.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'gredp[adapters]'") from None


def __dir__() -> list[str]:
    return sorted(__all__)
