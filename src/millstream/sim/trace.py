"""`millstream trace`: what a trace file of `serve` or `simulate` says about the stages.

A stage is busy while it computes. It is a bubble when some step is in the pipe and the stage computes none. The longest
bubble is its stall.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from millstream.errors import ConfigError
from millstream.sim.timeline import Timeline, Work, draw_text

CHART_WIDTH = 80


class _Args(msgspec.Struct):
    step: int = -1
    tokens: int = 0
    rows: int = 0
    chunk_tokens: int = 0
    requests: list[str] = []


class _Event(msgspec.Struct):
    ph: str
    pid: int
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


class _Document(msgspec.Struct):
    traceEvents: list[_Event]


class Period(NamedTuple):
    """Seconds after the trace's begin."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Trace:
    """What a file holds."""

    timeline: Timeline
    num_stages: int
    num_steps: int
    active: list[Period]
    """When at least one step was in the pipe, in order, without overlaps."""

    @property
    def period(self) -> Period:
        """From the first step to the last."""
        return Period(self.active[0].start, self.active[-1].end)


@dataclass(frozen=True)
class StageSummary:
    """How a stage spent its time."""

    busy: float
    """Share of the whole period."""
    bubble: float
    """Share of the time with a step in the pipe."""
    stall: Period
    """The longest bubble; of no length if there was none."""


def read_trace(path: str) -> Trace:
    """Read a trace, which may end in the middle. Raises ConfigError where it can't be read or has no step in it."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"{path} can't be read: {e.strerror or e}") from e
    timeline = Timeline(begin=0.0, limit=sys.maxsize, has_names=True)
    spans: list[Period] = []
    for event in _events(data, path):
        if event.ph != "X" or event.cat not in ("compute", "in flight"):
            continue
        spans.append(Period(event.ts / 1e6, (event.ts + event.dur) / 1e6))
        if event.cat == "compute":
            timeline.work.append(_work(event))
    if not timeline.work:
        raise ConfigError(f"{path} has no step in it: it must be a trace of `serve --trace` or `simulate --trace`")
    timeline.work.sort(key=lambda w: w.start)
    return Trace(
        timeline=timeline,
        num_stages=max(w.stage for w in timeline.work) + 1,
        num_steps=len({w.step_id for w in timeline.work}),
        active=list(_union(_whole_steps(timeline.work, spans))),
    )


def _events(data: bytes, path: str) -> Iterable[_Event]:
    try:
        if data.startswith(b"{"):
            return msgspec.json.decode(data, type=_Document).traceEvents
        if data.rstrip().endswith(b"]"):
            return msgspec.json.decode(data, type=list[_Event])
        return list(_unfinished(data))
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{path} is no trace: {e}") from e


def _unfinished(data: bytes) -> Iterator[_Event]:
    """The events of a server that was killed: one a line, the last of them perhaps cut off."""
    decoder = msgspec.json.Decoder(_Event)
    first, *lines = data.split(b"\n")
    if first.strip() != b"[":
        raise msgspec.DecodeError("it does not begin like one")
    for i, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line.rstrip(b","))
        except msgspec.DecodeError:
            if i < len(lines):
                raise


def _work(event: _Event) -> Work:
    args = event.args
    return Work(
        step_id=args.step,
        stage=event.pid,
        start=event.ts / 1e6,
        end=(event.ts + event.dur) / 1e6,
        num_tokens=args.tokens,
        num_rows=args.rows,
        num_chunk_tokens=args.chunk_tokens,
        request_ids=tuple(args.requests),
    )


def _whole_steps(work: Sequence[Work], spans: Iterable[Period]) -> list[Period]:
    """When each step was in the pipe: from its first stage to its last, or as the engine saw it where that is there."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for w in work:
        first[w.step_id] = min(w.start, first.get(w.step_id, w.start))
        last[w.step_id] = max(w.end, last.get(w.step_id, w.end))
    return sorted([*spans, *(Period(first[i], last[i]) for i in first)])


def _union(periods: Iterable[Period]) -> Iterator[Period]:
    """Periods, ordered by their starts, with those that touch joined."""
    current: Period | None = None
    for period in periods:
        if current is None or period.start > current.end:
            if current is not None:
                yield current
            current = period
        else:
            current = Period(current.start, max(current.end, period.end))
    if current is not None:
        yield current


def _gaps(active: Sequence[Period], busy: Sequence[Period]) -> Iterator[Period]:
    """What of `active` is not `busy`; both in order, without overlaps."""
    i = 0
    for period in active:
        at = period.start
        while i < len(busy) and busy[i].start < period.end:
            if busy[i].start > at:
                yield Period(at, busy[i].start)
            at = max(at, busy[i].end)
            if busy[i].end > period.end:
                break
            i += 1
        if at < period.end:
            yield Period(at, period.end)


def summarize(trace: Trace) -> list[StageSummary]:
    """Of each stage, first to last."""
    whole = trace.period.seconds
    active = sum(p.seconds for p in trace.active)
    found = []
    for stage in range(trace.num_stages):
        work = (Period(w.start, w.end) for w in trace.timeline.work if w.stage == stage)
        busy = list(_union(work))
        gaps = list(_gaps(trace.active, busy))
        stall = max(gaps, key=lambda gap: gap.seconds, default=Period(whole, whole))
        found.append(
            StageSummary(
                busy=sum(p.seconds for p in busy) / whole if whole > 0 else 0.0,
                bubble=sum(p.seconds for p in gaps) / active if active > 0 else 0.0,
                stall=stall,
            )
        )
    return found


def report(trace: Trace) -> list[str]:
    """The summary as lines, with the timeline as a picture in text."""
    period, stages = trace.period, summarize(trace)
    active = sum(p.seconds for p in trace.active)
    lines = [
        f"{trace.num_steps} steps on {trace.num_stages} stages in {period.seconds:.3f} s; "
        f"a step was in the pipe for {active:.3f} s of them",
        f"{'Stage':<8}{'busy':>8}{'bubble':>8}   (of the whole time; of the time with a step in the pipe)",
    ]
    lines += [f"{i:<8}{s.busy:>8.1%}{s.bubble:>8.1%}" for i, s in enumerate(stages)]
    lines.append(f"Bubble share of all stages: {sum(s.bubble for s in stages) / len(stages):.1%}")
    worst = max(range(len(stages)), key=lambda i: stages[i].stall.seconds)
    stall = stages[worst].stall
    lines.append(f"Longest stall: {stall.seconds * 1000:.1f} ms on stage {worst}, at {stall.start:.3f} s")
    if period.seconds > 0:
        lines.append(f"Stages busy from {period.start:.3f} s to {period.end:.3f} s:")
        lines += draw_text(trace.timeline, trace.num_stages, first=period.start, last=period.end, width=CHART_WIDTH)
    return lines


def show_trace(path: str, *, plot: str | None) -> int:
    """Print the summary of a trace, and draw it if `plot` names a file; the command's exit status.

    Raises ConfigError where a file can't be read or written.
    """
    trace = read_trace(path)
    for line in report(trace):
        print(line)
    if plot is not None:
        from millstream.sim.plot import plot_stages

        plot_stages(trace.timeline, trace.num_stages, plot)
        print(f"Picture written to {plot}", file=sys.stderr)
    return 0
