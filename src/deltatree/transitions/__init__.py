"""The target's own transitions: the text it writes by itself, the table counted on it, and the tree policy that reads it."""

from deltatree.lazy import lazy_names

_HOMES = {
    "TransitionTable": "deltatree.transitions.table",
    "TransitionTree": "deltatree.transitions.policy",
    "chat_opening": "deltatree.transitions.self_text",
    "table_file": "deltatree.transitions.store",
    "table_for": "deltatree.transitions.store",
    "write_self_text": "deltatree.transitions.self_text",
    "write_table": "deltatree.transitions.store",
}
__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
