"""Public names that load their module on first use, so that a mistyped option is reported before torch is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str, homes: dict[str, str]) -> Callable[[str], object]:
    """`__getattr__` for a package whose public names live in `homes`: name -> module."""

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return get
