"""Where the kernels were not built, everything but them works, and they say why they don't."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["millstream.kernels._native"] = None  # as if there were no such file
from millstream.kernels.native import NativeOps, native_available, native_unavailable_reason
assert not native_available()
print(native_unavailable_reason())
try:
    NativeOps(dtype="float32")
except ValueError as e:
    print(e)
"""


def test_without_the_compiled_module() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    reason, refusal = found.stdout.splitlines()
    assert reason.startswith("the native kernels can't be loaded: ")
    assert refusal == reason
