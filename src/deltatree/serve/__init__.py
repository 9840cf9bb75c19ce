"""An OpenAI-compatible server over one pair: schemas, a queue, one decoding thread. Needs the extra `serve`."""

from deltatree.lazy import lazy_names

_HOMES = {
    "Engine": "deltatree.serve.engine",
    "ServeOptions": "deltatree.serve.options",
    "create_app": "deltatree.serve.app",
}
__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
