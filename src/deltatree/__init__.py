"""deltatree: lossless draft-tree decoding (DDTree on DFlash drafters) for targets with a recurrent state.

    pair = deltatree.load("shipped")
    print(pair.generate("Write quicksort.").text)

Importing this package loads neither torch nor transformers; the first use of a name does.
"""

from deltatree.lazy import lazy_names

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


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
