"""Torch as our own processes load it: without what only its compiler needs, and that comes when it is wanted."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from millstream.parallel.lean_torch import load_lean_torch
load_lean_torch()
import torch
assert "torch._refs" not in sys.modules, "its largest part was loaded all the same"
assert torch.ones(3).cumsum(0).tolist() == [1, 2, 3]
# whoever reaches for a part that was left out gets the real one
assert callable(sys.modules["torch._meta_registrations"].activate_meta)
assert sys.modules["torch._meta_registrations"].__file__
"""


def test_what_the_compiler_needs_is_loaded_when_it_is_wanted() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
