"""Tells how far prompts are, to those who asked."""

from __future__ import annotations

from millstream.messages import PromptProgress
from millstream.request import Request


class ProgressReporter:
    """Follows the requests that want to know, from `add` until their first token; knows nothing of others."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Request, int]] = {}
        """The request, and how many computed tokens were told of."""

    def add(self, request: Request) -> None:
        self._told[request.request_id] = (request, 0)

    def report(self) -> dict[str, PromptProgress]:
        """By request id: what is new since the last call. A prompt whose last token is computed is not in it.

        A preempted prompt computes its tokens again and is silent until it is further than before.
        """
        news: dict[str, PromptProgress] = {}
        for request_id, (request, told) in list(self._told.items()):
            if request.is_finished or request.num_output_tokens:
                del self._told[request_id]
            elif request.num_computed_tokens > told:
                self._told[request_id] = (request, request.num_computed_tokens)
                news[request_id] = PromptProgress(request.num_computed_tokens, request.num_cached_tokens)
        return news
