"""millstream, an LLM inference and serving engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.request import SamplingParams

if TYPE_CHECKING:
    from millstream.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM brings the tokenizer and more; a server process that only needs SamplingParams should not pay for it
    if name == "LLM":
        from millstream.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
