"""Opacus' module paths: `from gredp.utils.batch_memory_manager import …` finds what it finds there.

A name that is not offered can be imported, since many files import more than they use; it says why when it is
called. `docs/opacus.md` is written from this table, and a test compares it with the installed Opacus.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gredp.errors import GredpError

_WRAPPER = "the model is never wrapped: make_private returns it, with hooks on its layers"
_SAMPLER = "make_private builds the loader, and its ε holds for the batches of that loader only"
_PRIVATE = "make_private returns the only optimizer that charges the ledger"
_SHARDED = "sharded models are not offered: under torchrun several processes train whole ones as one"
_GHOST = "no loss is wrapped: norms come from factors in every mode, in one backward"
_FIXER = "gredp.fix has a fixed list of replacements: exchange a layer of your own before make_private"
_INNER = "a part of how Opacus computes, which nothing here needs"
_FORMULA = "use RDPAccountant, get_noise_multiplier or gredp.privacy.accountant.epsilon"

#: path below gredp → name → the module that has it, by the same name or by "module:name"
OFFERED: dict[str, dict[str, str]] = {
    "privacy_engine": {"PrivacyEngine": "gredp.engine"},
    "accountants": {
        "IAccountant": "gredp.privacy.accountant:Accountant",
        "RDPAccountant": "gredp.opacus_names",
        "PRVAccountant": "gredp.opacus_names",
        "create_accountant": "gredp.opacus_names",
    },
    "accountants.utils": {"get_noise_multiplier": "gredp.opacus_names"},
    "layers.dp_rnn": dict.fromkeys(("DPGRU", "DPLSTM", "DPRNN"), "gredp.layers"),
    "optimizers": {"DPOptimizer": "gredp.optimizer:PrivateOptimizer"},
    "utils.batch_memory_manager": {"BatchMemoryManager": "gredp.sampling"},
    "validators": {"ModuleValidator": "gredp.validation"},
    "validators.errors": {
        "UnsupportedError": "gredp.validation:UnsupportedModuleError",
        "UnsupportedModuleError": "gredp.validation",
        "UnsupportableModuleError": "gredp.validation:UnsupportedModuleError",
        "NotYetSupportedModuleError": "gredp.validation:UnsupportedModuleError",
        "ShouldReplaceModuleError": "gredp.validation:UnsupportedModuleError",
        "IllegalModuleConfigurationError": "gredp.validation:UnsupportedModuleError",
    },
}


def _all(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


#: path below gredp ("" is gredp itself) → name, or * for all others → why it is not there
NOT_OFFERED: dict[str, dict[str, str]] = {
    "": _all("GradSampleModule GradSampleModuleFastGradientClipping", _WRAPPER),
    "accountants": {
        "GaussianAccountant": "its ε is a limit that may lie below the true one: use RDPAccountant",
        "register_accountant": "every accountant here is proven: docs/theory.md says how",
    },
    "accountants.analysis": {"*": _FORMULA},
    "data_loader": _all(
        "CollateFnWithEmpty DPDataLoader dtype_safe shape_safe switch_generator wrap_collate_with_empty",
        _SAMPLER,
    ),
    "grad_sample": _all(
        "AbstractGradSampleHooks AbstractGradSampleModule GradSampleHooks GradSampleModule "
        "GradSampleHooksFastGradientClipping GradSampleModuleFastGradientClipping "
        "GradSampleModuleExpandedWeights GradSampleHooksNoOp GradSampleModuleNoOp "
        "create_or_accumulate_grad_sample prepare_module wrap_model get_gsm_class",
        _WRAPPER,
    )
    | _all(
        "GradSampleHooksFastGradientClippingFSDP GradSampleModuleFastGradientClippingFSDP "
        "GradSampleHooksFastGradientClippingTP GradSampleModuleFastGradientClippingTP",
        _SHARDED,
    )
    | _all(
        "register_grad_sampler register_norm_sampler",
        "layers without a rule work; for a faster one use gredp.register_rule",
    ),
    "grad_sample.functorch": _all(
        "ft_compute_per_sample_gradient make_functional prepare_layer",
        "gradients of your own have no certificate: torch.func has these functions",
    ),
    "distributed": {"average_gradients": "gradients of all processes are summed before the noise"},
    "layers": {"RenameParamsMixin": _INNER, "SequenceBias": _INNER},
    "layers.dp_rnn": {"*": _INNER},
    "lightning": {"DPLightningDataModule": "use gredp.adapters.PrivacyCallback with any data module"},
    "optimizers": _all(
        "AdaClipDPOptimizer DistributedDPOptimizer DPOptimizerFastGradientClipping DPPerLayerOptimizer "
        "DistributedDPOptimizerFastGradientlipping SimpleDistributedPerLayerOptimizer get_optimizer_class",
        _PRIVATE,
    )
    | _all("FSDPOptimizerFastGradientClipping", _SHARDED),
    "utils.adaptive_clipping": _all(
        "DPTensorFastGradientAdaptiveClipping DPLossFastGradientAdaptiveClipping "
        "PrivacyEngineAdaptiveClipping",
        _GHOST,
    ),
    "utils.batch_memory_manager": _all("BatchSplittingSampler wrap_data_loader", "use BatchMemoryManager"),
    "utils.fast_gradient_clipping_utils": _all(
        "DPTensorFastGradientClipping DPLossFastGradientClipping", _GHOST
    ),
    "utils.fsdp_utils": _all("FSDP2Wrapper has_params iterate_submodules", _SHARDED),
    "utils.module_utils": {"*": _INNER},
    "utils.packed_sequences": {"*": _INNER},
    "utils.per_sample_gradients_utils": {"*": "gredp.register_rule says how a rule of your own is checked"},
    "utils.tensor_utils": {"*": _INNER},
    "utils.uniform_sampler": _all(
        "UniformWithReplacementSampler DistributedUniformWithReplacementSampler", _SAMPLER
    ),
    "validators": _all("register_module_validator register_module_fixer", _FIXER),
}


#: modules that have what the package above them has
BELOW = _all(
    "accountants.accountant accountants.gdp accountants.prv accountants.rdp accountants.registry "
    "accountants.analysis.gdp accountants.analysis.prv accountants.analysis.rdp "
    "grad_sample.grad_sample_module grad_sample.grad_sample_module_fast_gradient_clipping "
    "grad_sample.gsm_base grad_sample.gsm_exp_weights grad_sample.gsm_no_op grad_sample.utils "
    "optimizers.adaclipoptimizer optimizers.optimizer optimizers.optimizer_fast_gradient_clipping "
    "optimizers.ddpoptimizer optimizers.perlayeroptimizer utils.adaptive_clipping.adaptive_clipping_utils "
    "validators.module_validator validators.utils",
    "the same",
)


def modules() -> set[str]:
    """All of these paths, and those above them, below gredp."""
    paths = [path.split(".") for path in (*OFFERED, *NOT_OFFERED, *BELOW) if path]
    return {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}


def find(path: str, name: str) -> Any:
    """`name` of the module `path`: an object of gredp, or a class that says why there is none."""
    above = path.rpartition(".")[0] if path in BELOW else path
    home = OFFERED.get(above, {}).get(name)
    if home is not None:
        module, _, other = home.partition(":")
        return getattr(import_module(module), other or name)
    reasons = NOT_OFFERED.get(above, {})
    why = reasons.get(name) or (None if name.startswith("_") else reasons.get("*"))
    if why is None:
        raise AttributeError(f"module {f'gredp.{path}'.rstrip('.')!r} has no attribute {name!r}")
    return _not_offered(name, why)


def _not_offered(name: str, why: str) -> type:
    def reject(cls: type, *_: object, **__: object) -> None:
        raise GredpError(f"{name} is not offered: {why}")

    return type(name, (), {"__new__": reject, "__doc__": why})


class _OpacusPaths(MetaPathFinder, Loader):
    """Asked last, so that no module of gredp is hidden by these."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, below = fullname.partition(".")
        return (
            ModuleSpec(fullname, self, is_package=True) if package == "gredp" and below in MODULES else None
        )

    def exec_module(self, module: ModuleType) -> None:
        below = module.__name__.partition(".")[2]
        names: Iterable[str] = (*OFFERED.get(below, ()), *NOT_OFFERED.get(below, ()))
        module.__doc__ = f"What Opacus has at opacus.{below}."
        vars(module).update(__all__=[*names], __getattr__=lambda name: find(below, name))


MODULES = modules()
sys.meta_path.append(_OpacusPaths())
