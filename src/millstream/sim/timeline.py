"""What every stage did when: as shares, as a picture in text, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millstream.engine.trace import COMPUTE, MAX_REQUESTS_NAMED, Event, process_name, span
from millstream.errors import ConfigError
from millstream.sim.executor import Pipe, Span

_SHADES = " .:-=+*#"


@dataclass(frozen=True, slots=True)
class Work:
    """One stage's work on one step; times in seconds after the start."""

    step_id: int
    stage: int
    start: float
    end: float
    num_tokens: int
    num_rows: int
    num_chunk_tokens: int
    """Tokens of rows of several, so of prompts."""
    request_ids: tuple[str, ...]


class Timeline:
    """Keeps the work of all stages, at most `limit` pieces: the beginning of the run. Names requests if `has_names`."""

    def __init__(self, *, begin: float, limit: int, has_names: bool) -> None:
        self.work: list[Work] = []
        self.num_left_out = 0
        self._begin = begin
        self._limit = limit
        self._num_names = MAX_REQUESTS_NAMED if has_names else 0

    def add(self, span: Span) -> None:
        if len(self.work) >= self._limit:
            self.num_left_out += 1
            return
        counts = span.step.num_scheduled_tokens
        self.work.append(
            Work(
                step_id=span.step.step_id,
                stage=span.stage,
                start=span.start - self._begin,
                end=span.end - self._begin,
                num_tokens=sum(counts),
                num_rows=len(counts),
                num_chunk_tokens=sum(n for n in counts if n > 1),
                request_ids=tuple(span.step.request_ids[: self._num_names]),
            )
        )

    @property
    def end(self) -> float:
        return max((w.end for w in self.work), default=0.0)


@dataclass(frozen=True, slots=True)
class StageUse:
    """How a stage spent its time, as shares: of the whole run, and of the time with a step in the pipe."""

    busy: float
    bubble: float


def stage_use(pipe: Pipe, duration: float) -> list[StageUse]:
    """For each stage its busy share of `duration` seconds, and the share of the pipe's active time it stood idle."""
    active = pipe.active_seconds
    return [
        StageUse(busy / duration if duration > 0 else 0.0, max(0.0, 1 - busy / active) if active > 0 else 0.0)
        for busy in pipe.busy_seconds
    ]


def draw_text(timeline: Timeline, num_stages: int, *, first: float, last: float, width: int) -> list[str]:
    """A line for each stage from `first` to `last` seconds; the darker a character, the busier the stage was."""
    slot = (last - first) / width
    lines = []
    for stage in range(num_stages):
        busy = [0.0] * width
        for work in timeline.work:
            if work.stage != stage or work.end <= first or work.start >= last:
                continue
            low, high = int((work.start - first) / slot), int((work.end - first) / slot)
            for i in range(max(low, 0), min(high, width - 1) + 1):
                begin = first + i * slot
                busy[i] += max(0.0, min(work.end, begin + slot) - max(work.start, begin))
        shades = "".join(_SHADES[min(int(b / slot * len(_SHADES)), len(_SHADES) - 1)] for b in busy)
        lines.append(f"stage {stage} |{shades}|")
    return lines


def chrome_trace(timeline: Timeline, num_stages: int) -> list[Event]:
    """The events of a Chrome trace: a process for each stage, an event for each step on it; times in microseconds."""
    events = [process_name(stage, f"stage {stage}") for stage in range(num_stages)]
    events.extend(
        span(
            work.stage,
            COMPUTE,
            "compute",
            work.step_id,
            start=work.start,
            seconds=work.end - work.start,
            tokens=work.num_tokens,
            rows=work.num_rows,
            chunk_tokens=work.num_chunk_tokens,
            requests=list(work.request_ids),
        )
        for work in timeline.work
    )
    return events


def save_trace(events: Sequence[Event], path: str) -> None:
    """Write a trace file. Raises ConfigError where that can't be done."""
    try:
        Path(path).write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as e:
        raise ConfigError(f"--trace {path} can't be written: {e.strerror or e}") from e
