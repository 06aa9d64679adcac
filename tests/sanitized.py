"""The native kernels built with the address and undefined-behaviour sanitizers, beside the tests that come first."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MISSING = [name for name in ("cmake", "g++") if not shutil.which(name)]
MISSING += ["nanobind"] * (importlib.util.find_spec("nanobind") is None)


class SanitizedBuild:
    """A build that begins when this is made and takes only time that nobody else wants: two minutes of a processor."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="millstream-sanitized-")
        build = Path(self._folder.name)
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-DMILLSTREAM_SANITIZE=ON"]
        configure.append(f"-DPython_EXECUTABLE={sys.executable}")
        self._log = build / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", '"$@" && exec cmake --build "$0" --parallel 2', str(build), *configure],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))

    def wait(self) -> Path:
        """The compiled module. Raises AssertionError with the compiler's words where there is none."""
        assert self._process.wait() == 0, self._log.read_text()
        [module] = Path(self._folder.name).glob("_native*.so")
        return module

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._folder.cleanup()
