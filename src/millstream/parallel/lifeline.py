"""How a process learns that its parent is gone."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable


def follow_parent(on_lost: Callable[[], None] = lambda: None) -> None:
    """End this process when its standard input closes, which it does when the parent is gone, however it went.

    `on_lost` is called before, in another thread: to take along what nobody else would clean up.
    """

    # not through sys.stdin: its lock, held by a thread that never ends, makes the interpreter's own end fail
    descriptor = sys.stdin.fileno()

    def watch() -> None:
        while os.read(descriptor, 4096):
            pass
        try:
            on_lost()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()
