"""deltatree: lossless draft-tree decoding (DDTree on DFlash drafters) for targets with a recurrent state.

    pair = deltatree.load("shipped")
    print(pair.generate("Write quicksort.").text)

Importing this package loads neither torch nor transformers; the first use of a name does.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "DeltatreeError": "deltatree.errors",
    "DraftTree": "deltatree.tree",
    "GenerateOptions": "deltatree.decode.options",
    "Generation": "deltatree.pair_api",
    "Pair": "deltatree.pair_api",
    "ReferenceTarget": "deltatree.models",
    "RightDrafter": "deltatree.drafter",
    "ScriptedDrafter": "deltatree.drafter",
    "custom_generate": "deltatree.transformers_api",
    "load": "deltatree.pair_api",
    "load_drafter": "deltatree.transformers_api",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'deltatree' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
