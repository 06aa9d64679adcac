"""Fields: settings read from a model's files, each checked as it is taken. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from millstream.errors import ModelError


class Fields:
    """Settings by name. Every getter raises ModelError, naming the file and the setting, for a value that can't be."""

    def __init__(self, values: Mapping[str, Any], *, source: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.values = values
        self.source = source
        self._defaults = defaults or {}

    def get(self, name: str) -> Any:
        """The value or its default; None when there is neither or it is null."""
        return self.values[name] if name in self.values else self._defaults.get(name)

    def error(self, name: str, wanted: str) -> ModelError:
        if self.get(name) is None:
            return ModelError(f"{self.source}: {name} is missing: it must be {wanted}")
        return ModelError(f"{self.source}: {name} is {self.get(name)!r}: it must be {wanted}")

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.error(name, "a positive integer")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not (0 < value < math.inf):
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean; False when it is not set."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return bool(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of them; empty when it is not set."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(name, "a token id or a list of them")
        return tuple(ids)

    def refuse(self, name: str, *, why: str) -> None:
        """Raise ModelError when the setting is set to anything but null, false, 0 or nothing."""
        if self.get(name):
            raise ModelError(f"{self.source}: {name} is {self.get(name)!r}: {why}")

    def section(self, name: str) -> Fields | None:
        """A setting that holds settings; None when it is not set."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, source=f"{self.source}: {name}")
