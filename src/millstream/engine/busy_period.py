"""The two summary lines that the log shows when the engine falls idle."""

from __future__ import annotations

from millstream.messages import SchedulerOutput


class BusyPeriod:
    """Counts tokens and seconds from the first request until no request is left.

    A step's time is divided between prompt tokens and decodes by their numbers, since a step may hold both.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0

    def add_step(self, step: SchedulerOutput, *, num_sampled: int, seconds: float) -> None:
        """Count a step with rows. A row of one sampled token is a decode, all other rows are prompt tokens."""
        num_decodes = sum(
            n == 1 and wanted > 0 for n, wanted in zip(step.num_scheduled_tokens, step.num_sampled_tokens, strict=True)
        )
        num_prefill = step.num_tokens - num_decodes
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += num_sampled
        share = num_prefill / step.num_tokens
        self.prefill_seconds += seconds * share
        self.decode_seconds += seconds * (1 - share)

    def lines(self) -> list[str]:
        """What to log."""
        return [
            f"[{self.num_requests} requests] Prefilling: {self.num_prefill_tokens} prompt tokens processed in "
            f"{self.prefill_seconds:.2f} seconds ({_rate(self.num_prefill_tokens, self.prefill_seconds)} tokens/s)",
            f"[{self.num_requests} requests] Decoding: {self.num_decode_tokens} tokens processed in "
            f"{self.decode_seconds:.2f} seconds ({_rate(self.num_decode_tokens, self.decode_seconds)} tokens/s)",
        ]


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.0f}" if seconds > 0 else "-"
