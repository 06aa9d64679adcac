"""Where there is a compiler, the kernels are there: else most of their tests would be skipped unnoticed."""

from __future__ import annotations

import shutil

from millstream.kernels.native import native_available, native_unavailable_reason


def test_the_kernels_are_built_where_there_is_a_compiler() -> None:
    assert native_available() or not shutil.which("c++"), native_unavailable_reason()
