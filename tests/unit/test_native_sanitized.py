"""The native tests again, with kernels built with the address and undefined-behaviour sanitizers.

Takes a minute, after the build (tests/sanitized.py). Needs cmake, g++ and nanobind; skipped where one is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.sanitized import ROOT, SanitizedBuild

TESTS = ("attention", "linear", "rows", "plan", "sampling")


# An editable installation would put its own modules before these.
CONFTEST = """
import sys
from pathlib import Path
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
from millstream.kernels import _native
assert Path(_native.__file__).is_relative_to(Path(__file__).parent), f"{_native.__file__} is not the sanitized module"
"""


def test_no_access_out_of_bounds_and_no_undefined_behaviour(tmp_path: Path, sanitized_build: SanitizedBuild) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("_native*.so", "csrc", "__pycache__")
    shutil.copytree(ROOT / "src" / "millstream", source / "millstream", ignore=ignored)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=ignored)
    shutil.copy(sanitized_build.wait(), source / "millstream" / "kernels")
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    (source / "conftest.py").write_text(CONFTEST)
    env = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself never frees some objects
        "PYTHONPATH": str(source),
    }
    names = [f"tests/unit/test_native_{name}.py" for name in TESTS]
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", *names]
    subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=source, env=env, check=True)
