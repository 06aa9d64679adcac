"""The prompts that are open, counted."""

from __future__ import annotations

from millstream.request import Request
from millstream.sched.cost_model import StepLoad


class Backlog:
    """All prompts that wait or run, as one load.

    A prompt counts whole, but for its cached prefix, until its last token is scheduled. So what follows from the
    backlog (how long a step should take) stays the same from a prompt's first chunk to its last.
    """

    def __init__(self) -> None:
        self.load = StepLoad()
        self._parts: dict[str, tuple[int, int]] = {}

    def put(self, request: Request) -> None:
        """Count what the request has yet to compute, in place of what was counted for it before."""
        self.discard(request)
        start, end = request.num_scheduled_until, request.num_tokens
        part = end - start, (end * (end + 1) - start * (start + 1)) // 2
        self._parts[request.request_id] = part
        self.load.num_tokens += part[0]
        self.load.token_context += part[1]

    def discard(self, request: Request) -> None:
        """The request has no prompt to compute any more."""
        num_tokens, token_context = self._parts.pop(request.request_id, (0, 0))
        self.load.num_tokens -= num_tokens
        self.load.token_context -= token_context
