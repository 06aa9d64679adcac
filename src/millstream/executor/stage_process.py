"""One worker process, as the executor holds it: starts it, notices its end, shows its stack, ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from millstream.messages import WorkerStart
from millstream.parallel.stage import Stage

_DUMP_SECONDS = 0.5
_READ_BYTES = 65536


class StageProcess:
    """A process that runs one stage. Its standard output ends when it does, whatever the reason."""

    def __init__(self, start: WorkerStart, stage: Stage, *, inherited: Sequence[int]) -> None:
        self.rank = start.rank
        self._stage = stage
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millstream.worker.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=tuple(inherited),
        )
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(msgspec.json.encode(start) + b"\n")
            self._stdin.flush()

    def __str__(self) -> str:
        return f"Stage {self.rank} (layers {self._stage.first_layer} to {self._stage.last_layer})"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output_fd(self) -> int:
        """Can be read when the process has printed something or has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def processor_seconds(self) -> float:
        """What all its threads have used so far."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # it has ended
            return 0.0
        # after the name in brackets, which may hold anything: fields 3 and on
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def has_ended(self) -> bool:
        """Whether it has, once `output_fd` can be read; what it has printed is passed on."""
        if data := os.read(self.output_fd, _READ_BYTES):
            sys.stderr.buffer.write(data)
            return False
        return True

    def describe_end(self) -> str:
        """How it has ended: "signal 9", "exit code 1"."""
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def dump_stack(self) -> None:
        """Make it write its stack to standard error, even if it was stopped."""
        for number in (signal.SIGUSR1, signal.SIGCONT):
            self._signal(number)
        time.sleep(_DUMP_SECONDS)

    def ask_to_end(self) -> None:
        """Close its standard input: it ends at once, unless it is stopped or stuck."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def end(self, seconds: float) -> None:
        """Wait for its end, then insist. Safe to call twice."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _signal(self, number: int) -> None:
        # Popen has seen its end or not: a process that is not waited for keeps its number
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
