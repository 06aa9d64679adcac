"""The figures of all API processes together: whichever is asked for /metrics asks the others.

Each listens on a Unix socket in the engine's folder, writes its figures as text to whoever connects, and closes. Every
request is counted by the process that answers it, and what the engine tells of its steps by one process only, so that
sums are right for all figures. Those of a process that died are gone: counters then fall, as after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from millstream.log import log
from millstream.server.llm import ServedMetrics

ANSWER_SECONDS = 2.0
"""A process that does not answer in this time is left out."""


class Siblings:
    """This process's place among those that share a folder.

    Args:
        folder: where their sockets are.
        name: of this process, different from the others'.
        metrics: this process's own figures.
    """

    def __init__(self, folder: Path, name: str, metrics: ServedMetrics) -> None:
        self._path = socket_path(folder, name)
        self._metrics = metrics

    async def start(self) -> asyncio.Server:
        """Begin to answer the others."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(self._metrics.render())
                await writer.drain()
            writer.close()

        return await asyncio.start_unix_server(answer, self._path)

    async def render(self) -> bytes:
        """The figures of all processes, as text."""
        others = sorted(path for path in self._path.parent.glob(socket_path(Path(), "*").name) if path != self._path)
        texts = await asyncio.gather(*(_ask(path) for path in others))
        return summed([self._metrics.render(), *texts])


def socket_path(folder: Path, name: str) -> Path:
    """Where the process called `name` tells its figures."""
    return folder / f"metrics-{name}"


async def _ask(path: Path) -> bytes:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as e:
        log.warning("The API process at %s tells no figures: %s", path.name, e or "it does not answer")
        return b""


class _Sum(Collector):
    """Families of figures, those of the same name and labels added up."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._families: dict[str, Metric] = {}
        self._values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in texts:
            for family in text_string_to_metric_families(text.decode()):
                self._families.setdefault(family.name, family)
                values = self._values.setdefault(family.name, {})
                for sample in family.samples:
                    key = (sample.name, tuple(sample.labels.items()))
                    values[key] = values.get(key, 0.0) + sample.value

    def collect(self) -> Iterable[Metric]:
        for name, found in self._families.items():
            family = Metric(name, found.documentation, found.type)
            for (sample, labels), value in self._values[name].items():
                family.add_sample(sample, dict(labels), value)
            yield family


def summed(texts: Sequence[bytes]) -> bytes:
    """Figures in Prometheus' text format, added up over several texts of them."""
    registry = CollectorRegistry()
    registry.register(_Sum(texts))
    return generate_latest(registry)
