"""The native kernels in programs of their own: not built, and with pinned threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millstream.kernels.native import LEVELS, native_available, native_level

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


PINNED = """
import os
import torch
from millstream.kernels.native import NativeOps
cpus = sorted(os.sched_getaffinity(0))
if len(cpus) > 1:
    ops = NativeOps(dtype="float32", threads=2, is_pinned=True)
    x = torch.eye(64)
    assert torch.equal(ops.linear(x, ops.pack_linear(x)), x)  # so every thread has begun
    assert os.sched_getaffinity(0) == {cpus[0]}
    threads = [int(t) for t in os.listdir("/proc/self/task")]
    assert {cpus[1]} in [os.sched_getaffinity(t) for t in threads]
"""


@pytest.mark.skipif(not native_available(), reason="the native kernels are not built")
@pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux only")
def test_pinned_threads_keep_to_a_cpu_each() -> None:
    found = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True)
    # and the program's end, with the threads asleep, is clean
    assert (found.returncode, found.stderr) == (0, "")


REFUSED = """
import ctypes
# With a signal stack too small for the tile registers Linux keeps them from the process.
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
from millstream.kernels.native import NativeOps, native_level
print(native_level())
try:
    NativeOps(dtype="bfloat16", level="amx")
except ValueError as e:
    print(e)
"""


@pytest.mark.skipif(not native_available() or native_level() != "amx", reason="needs a processor with AMX")
def test_without_the_tile_registers_the_level_below_runs() -> None:
    found = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    below = LEVELS[LEVELS.index("amx") - 1]
    assert found.stdout.splitlines() == [below, f"level is amx: this processor has at most {below}"]
