"""One logger for the whole program: `log.info("...")`, a line with the time, on stderr.

`MILLSTREAM_LOG_LEVEL` (debug, info, warning, error) sets the level where `configure` gets none.
"""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("millstream")

_LEVELS = ("debug", "info", "warning", "error")


class _OneLine(logging.Formatter):
    """Escapes control characters, so that text from a request can't forge a log line or move the cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def configure(level: str | None = None) -> None:
    """Send log lines of `level` and above to stderr. Safe to call again."""
    chosen = (level or os.environ.get("MILLSTREAM_LOG_LEVEL") or "info").lower()
    if chosen not in _LEVELS:
        chosen = "info"
    log.setLevel(chosen.upper())
    log.propagate = False
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_OneLine("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
        log.addHandler(handler)
