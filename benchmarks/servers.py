"""A millstream server for a benchmark: started, used, ended."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

MILLSTREAM = [sys.executable, "-m", "millstream.cli"]
_SERVING = re.compile(r"Serving \S+ on (http://\S+) ")


@contextlib.contextmanager
def server(*options: str) -> Iterator[str]:
    """`millstream serve` on a free port, while it is used; its URL. Raises RuntimeError with its log if it ends."""
    command = [*MILLSTREAM, "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    drain = None
    try:
        for line in process.stderr:
            lines.append(line)
            if found := _SERVING.search(line):
                break
        else:
            raise RuntimeError("the server has ended:\n" + "".join(lines))
        # what it logs from now on must not fill the pipe
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        if drain is not None:
            drain.wait()
