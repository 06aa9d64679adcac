"""How long `millstream serve` takes until it is ready, what it keeps in memory, and what it does while idle.

    python benchmarks/start.py [--starts 5] [SERVE-OPTION ...]

Options of `serve` (and MODEL) are handed on. A start is counted from the launch of the command to the first 200 of
/ready. Its phases are those in the server's log: they follow each other in the engine process, beside which the API
process starts. The first start, which may have to read files from disk, is shown but not in the median. Memory is the
proportional set size of all its processes; processor time that of all of them, start and idle.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GB = 1e9
_SERVING = re.compile(r"Serving \S+ on (http://\S+) ")
_READY = re.compile(r"Ready in ([\d.]+) s \((.*)\)")


@dataclass(frozen=True)
class Start:
    """One start: wall-clock and processor seconds, and seconds by phase."""

    seconds: float
    processor_seconds: float
    phases: dict[str, float]


def process_tree(pid: int) -> list[int]:
    """A process and those that it has started, and so on."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def processor_seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        total += int(user) + int(system)
    return total / os.sysconf("SC_CLK_TCK")


def resident_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        total += int(found[1]) * 1024 if found else 0
    return total


def read_until_serving(log: IO[str]) -> tuple[str, dict[str, float]]:
    """The server's URL, and its phases; raises RuntimeError with its log where it ends."""
    lines, phases = [], {}
    for line in log:
        lines.append(line)
        if found := _READY.search(line):
            for phase in found[2].split(", "):
                name, seconds, _ = phase.rsplit(" ", 2)
                phases[name] = float(seconds)
        if found := _SERVING.search(line):
            return found[1], phases
    raise RuntimeError("the server has ended:\n" + "".join(lines))


def start_once(options: list[str], idle_seconds: float) -> tuple[Start, int, float]:
    """Start a server and end it; the start, its resident bytes, and its idle share of a core."""
    command = [sys.executable, "-m", "millstream.cli", "serve", "--port", "0", *options]
    began = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url, phases = read_until_serving(process.stderr)
        with urllib.request.urlopen(url + "/ready") as answer:
            assert answer.status == 200
        seconds = time.monotonic() - began
        pids = process_tree(process.pid)
        used = processor_seconds(pids)
        idle = 0.0
        if idle_seconds:
            time.sleep(1)  # what follows a start
            before = processor_seconds(pids)
            time.sleep(idle_seconds)
            idle = (processor_seconds(pids) - before) / idle_seconds
        return Start(seconds, used, phases), resident_bytes(pids), idle
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    args, options = parser.parse_known_args()
    starts: list[Start] = []
    for n in range(args.starts + 1):
        is_last = n == args.starts
        start, resident, idle = start_once(options, args.idle_seconds if is_last else 0.0)
        if n == 0:
            print(f"{'start':8} {'ready s':>8} {'cpu s':>8}" + "".join(f" {name:>10}" for name in start.phases))
        else:
            starts.append(start)
        show("first" if n == 0 else str(n), start)
    names = starts[0].phases
    median = Start(
        statistics.median(s.seconds for s in starts),
        statistics.median(s.processor_seconds for s in starts),
        {name: statistics.median(s.phases[name] for s in starts) for name in names},
    )
    show("median", median)
    print(f"resident {resident / GB:.2f} GB, idle {idle:.1%} of a core")


def show(name: str, start: Start) -> None:
    phases = "".join(f" {seconds:10.2f}" for seconds in start.phases.values())
    print(f"{name:8} {start.seconds:8.2f} {start.processor_seconds:8.2f}{phases}", flush=True)


if __name__ == "__main__":
    main()
