"""A ring of slots in shared memory, from one process to another of the same host, and the stages' notice board.

    writer   take ─> fill the slot ─> commit ──(a byte: filled)──> reader   take ─> use the slot ─> release
       ^                                                                                              |
       +──────────────────────────────────────(a byte: freed)─────────────────────────────────────────+

The memory has no name in any file system and the two pipes are inherited, so nothing can be left behind, nobody else
can come in, and a neighbour's death shows as the end of a pipe. Both sides sleep in `read` while they wait. On the
reference machine handing over a chunk of 512 tokens of width 576 takes 52 us, against 140 us with gloo; one row takes
17 us against 40 us. Imports no torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct

from millstream.messages import RingEnd

_ALIGNMENT = 128
_BYTE = b"\0"


class NeighbourGoneError(Exception):
    """The process at the other end of a ring has ended."""


class Ring:
    """Both ends, as made by the process that starts the two. After starting them, `close` its own copies."""

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        memory_fd = _shared_memory("millstream-ring", num_slots * slot_bytes)
        filled_reader, filled_writer = os.pipe()
        freed_reader, freed_writer = os.pipe()
        self.writer = RingEnd(memory_fd, filled_writer, freed_reader, num_slots, slot_bytes)
        self.reader = RingEnd(memory_fd, filled_reader, freed_writer, num_slots, slot_bytes)

    def close(self) -> None:
        """Close this process's descriptors. Safe to call once only."""
        for fd in {*fds_of(self.writer), *fds_of(self.reader)}:
            os.close(fd)


def fds_of(end: RingEnd | None) -> tuple[int, ...]:
    """What a process must inherit to use this end."""
    return () if end is None else (end.memory_fd, end.filled_fd, end.freed_fd)


class _Slots:
    def __init__(self, end: RingEnd) -> None:
        self.num_slots = end.num_slots
        self._end = end
        self._memory = mmap.mmap(end.memory_fd, end.num_slots * end.slot_bytes)
        view = memoryview(self._memory)
        self.slots = [view[i * end.slot_bytes : (i + 1) * end.slot_bytes] for i in range(end.num_slots)]
        self._count = 0

    def _wait(self, fd: int) -> None:
        if not os.read(fd, 1):
            raise NeighbourGoneError

    def _tell(self, fd: int) -> None:
        try:
            os.write(fd, _BYTE)
        except BrokenPipeError as e:
            raise NeighbourGoneError from e


class RingWriter(_Slots):
    """The sending end. Raises NeighbourGoneError where the reader has ended."""

    def take(self) -> int:
        """The number of a slot to fill; waits while all are in use."""
        if self._count >= self.num_slots:
            self._wait(self._end.freed_fd)
        return self._count % self.num_slots

    def commit(self) -> None:
        """Hand over the slot taken last."""
        self._count += 1
        self._tell(self._end.filled_fd)


class RingReader(_Slots):
    """The receiving end. Raises NeighbourGoneError where the writer has ended."""

    def __init__(self, end: RingEnd) -> None:
        super().__init__(end)
        self._poll = select.poll()
        self._poll.register(end.filled_fd, select.POLLIN)

    def is_ready(self) -> bool:
        """Whether `take` would not wait."""
        return bool(self._poll.poll(0))

    def take(self) -> int:
        """The number of the next slot that was filled; waits for it."""
        self._wait(self._end.filled_fd)
        return self._count % self.num_slots

    def release(self) -> None:
        """Give back the slot taken last."""
        self._count += 1
        self._tell(self._end.freed_fd)


class Board:
    """Where each stage counts the steps it has done, so that whoever looks sees which stage hangs."""

    def __init__(self, fd: int, num_stages: int) -> None:
        self._memory = mmap.mmap(fd, num_stages * 8)

    @staticmethod
    def create(num_stages: int) -> int:
        """A new board's file descriptor."""
        return _shared_memory("millstream-board", num_stages * 8)

    def count(self, rank: int) -> None:
        """This stage has done one more step."""
        struct.pack_into("q", self._memory, rank * 8, self.num_done(rank) + 1)

    def num_done(self, rank: int) -> int:
        """Steps that a stage has done."""
        found: int = struct.unpack_from("q", self._memory, rank * 8)[0]
        return found

    def close(self) -> None:
        self._memory.close()


def _shared_memory(name: str, num_bytes: int) -> int:
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, num_bytes)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    return fd
