"""What every stage did when, as a Chrome trace, which Perfetto and chrome://tracing open.

    process 0 .. P-1   a stage:  lane compute   ├─ step 7 ─┤      ├── step 8 ──┤
                                 lane wait                 ├──────┤               for its next step, or the engine
                                 lane send                 ├┤                     to the next stage
    process P          the engine: a lane for each step in flight at once, from submission to result

The file is an array with one event on each line, written as steps land; the format lets it end anywhere, so the trace
of a server that was killed opens as well. Nothing is kept in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from millstream.errors import ConfigError
from millstream.log import log
from millstream.messages import ModelRunnerOutput, SchedulerOutput

MAX_REQUESTS_NAMED = 64
"""In an event; chunks of prompts are named always, there are few in a step."""
COMPUTE, WAIT, SEND = range(3)
"""The lanes of a stage."""

Event = dict[str, Any]
_encode = msgspec.json.Encoder().encode


def process_name(pid: int, name: str) -> Event:
    """Names a process of the trace."""
    return {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}


def lane_name(pid: int, tid: int, name: str) -> Event:
    """Names a lane of a process."""
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def span(pid: int, tid: int, category: str, step_id: int, *, start: float, seconds: float, **args: Any) -> Event:
    """Something that took time for a step; `start` in seconds after the trace's begin."""
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": category,
        "name": f"step {step_id}",
        "ts": round(start * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "args": {"step": step_id, **args},
    }


def describe(step: SchedulerOutput) -> dict[str, Any]:
    """What is in a step: counts, its chunks of prompts, and the first of its requests by name."""
    rows = zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
    chunks = [{"request": name, "start": start, "tokens": count} for name, start, count in rows if count > 1]
    return {
        "tokens": step.num_tokens,
        "rows": len(step.request_ids),
        "chunk_tokens": sum(chunk["tokens"] for chunk in chunks),
        "chunks": chunks,
        "requests": step.request_ids[:MAX_REQUESTS_NAMED],
    }


class Tracer:
    """Writes a trace. Raises ConfigError where the file can't be opened; a disk that fills up only ends the trace."""

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        try:
            self._file: BinaryIO | None = open(path, "wb")  # noqa: SIM115
        except OSError as e:
            raise ConfigError(f"--trace is {path!r}: the file can't be written ({e.strerror or e})") from e
        self._begin = clock()
        self._free_since: list[float] = []
        """By stage: when it was done with the step before."""
        self._is_empty = True

    def step(self, step: SchedulerOutput, result: ModelRunnerOutput, *, submitted: float, landed: float) -> None:
        """Write what became of a step; times are those of time.monotonic."""
        events = self._names(len(result.stage_started)) if self._is_empty else []
        contents = describe(step)
        num_stages = len(result.stage_started)
        for stage, started in enumerate(result.stage_started):
            seconds, send_seconds = result.stage_seconds[stage], result.stage_send_seconds[stage]
            # before the step was submitted there may have been nothing to do
            idle_since = max(self._free_since[stage], submitted)
            if started > idle_since:
                events.append(self._span(stage, WAIT, "wait", step, idle_since, started - idle_since))
            events.append(self._span(stage, COMPUTE, "compute", step, started, seconds, **contents))
            if send_seconds > 0:
                events.append(self._span(stage, SEND, "send", step, started + seconds, send_seconds))
            self._free_since[stage] = started + seconds + send_seconds
        if step.num_steps == 1:
            # the decision is done; there may be one more of them in flight than there are stages
            lane = step.step_id % (num_stages + 1)
            events.append(self._span(num_stages, lane, "in flight", step, submitted, landed - submitted, **contents))
        self._write(events)

    def close(self) -> None:
        """End the array and close the file. Safe to call twice."""
        if self._file is not None:
            self._put(b"[]\n" if self._is_empty else b"\n]\n")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _names(self, num_stages: int) -> list[Event]:
        self._free_since = [0.0] * num_stages
        events = [process_name(num_stages, "engine: steps in flight")]
        for stage in range(num_stages):
            events.append(process_name(stage, f"stage {stage}"))
            lanes = ((COMPUTE, "compute"), (WAIT, "wait"), (SEND, "send"))
            events += [lane_name(stage, tid, name) for tid, name in lanes]
        return events

    def _span(
        self, pid: int, tid: int, category: str, step: SchedulerOutput, start: float, seconds: float, **args: Any
    ) -> Event:
        return span(pid, tid, category, step.step_id, start=start - self._begin, seconds=seconds, **args)

    def _write(self, events: list[Event]) -> None:
        # separators come before events, so that what is in the file is always the beginning of valid JSON
        separator = b"[\n" if self._is_empty else b",\n"
        self._is_empty = False
        self._put(separator + b",\n".join(map(_encode, events)))

    def _put(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as e:
            log.warning("The trace %s ends here: %s", self.path, e.strerror or e)
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                log.debug("and it could not be closed")
