"""Loads torch without a part that only its compiler needs: a quarter of the time that importing it takes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# they teach operations to compute shapes without data, for torch.compile and the meta device, and bring torch._refs
_UNUSED = ("torch._meta_registrations", "torch.distributed._meta_registrations")


class _Unloaded(ModuleType):
    """Stands for a module until something of it is wanted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(self.__name__, None)
        return getattr(importlib.import_module(self.__name__), name)


def load_lean_torch() -> None:
    """Import torch in a process of our own. What torch computes is the same; it can't compile."""
    if "torch" not in sys.modules:
        for name in _UNUSED:
            sys.modules[name] = _Unloaded(name)
    importlib.import_module("torch")
