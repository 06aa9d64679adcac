"""How layers and cores are shared out, and the rings between stages."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from millstream.config import ParallelConfig
from millstream.errors import ConfigError
from millstream.messages import RingEnd
from millstream.parallel.context import ParallelContext, share_cores
from millstream.parallel.layout import StageTime, hidden_slot_bytes, token_slot_bytes
from millstream.parallel.links import HiddenReceiver, HiddenSender, TokenReceiver, TokenSender
from millstream.parallel.ring import Board, NeighbourGoneError, Ring, RingReader, RingWriter
from millstream.parallel.stage import balanced_sizes


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head_cost", "sizes"),
    [
        (30, 1, 8.0, [30]),
        (30, 2, 0.0, [15, 15]),
        (30, 2, 0.7, [15, 15]),
        (30, 2, 8.0, [19, 11]),
        (30, 4, 8.0, [9, 9, 10, 2]),
        (4, 4, 100.0, [1, 1, 1, 1]),
        (7, 3, 0.5, [2, 3, 2]),
    ],
)
def test_the_slowest_stage_takes_the_least_time(
    num_layers: int, num_stages: int, head_cost: float, sizes: list[int]
) -> None:
    assert balanced_sizes(num_layers, num_stages, head_cost=head_cost) == sizes


def test_no_other_split_is_faster() -> None:
    for num_layers in range(3, 14):
        for head_cost in (0.0, 0.3, 1.0, 2.5, 9.0):
            sizes = balanced_sizes(num_layers, 3, head_cost=head_cost)
            best = min(
                max(a, b, num_layers - a - b + head_cost)
                for a in range(1, num_layers - 1)
                for b in range(1, num_layers - a)
            )
            assert sum(sizes) == num_layers and min(sizes) >= 1
            assert max(*sizes[:-1], sizes[-1] + head_cost) == best


def test_a_split_by_hand() -> None:
    context = ParallelContext(1, 3, (8, 2, 5))
    assert list(context.stage(15).layers) == [8, 9]
    with pytest.raises(ValueError, match="15 layers for a model of 16"):
        context.stage(16)


@pytest.mark.parametrize("split", ["8,8,x", "8", "8,0", "", "4,4,4"])
def test_a_split_that_can_not_be(split: str) -> None:
    with pytest.raises(ConfigError, match="--pipeline-layer-split is"):
        ParallelConfig(pipeline_parallel_size=2, pipeline_layer_split=split)


def test_cores_are_shared_evenly() -> None:
    assert share_cores([0, 1], 2) == [[0], [1]]
    assert share_cores([2, 3, 4, 5, 8], 2) == [[2, 3], [4, 5]]
    assert share_cores([6, 7], 5) == [[6], [7], [6], [7], [6]]


def own(end: RingEnd) -> RingEnd:
    """With descriptors of its own, as another process has them."""
    return RingEnd(os.dup(end.memory_fd), os.dup(end.filled_fd), os.dup(end.freed_fd), end.num_slots, end.slot_bytes)


def close(end: RingEnd) -> None:
    for fd in (end.memory_fd, end.filled_fd, end.freed_fd):
        os.close(fd)


@pytest.fixture
def ends() -> Iterator[tuple[RingEnd, RingEnd]]:
    num_bytes = hidden_slot_bytes(max_tokens=4, width=6, itemsize=2, num_stages=3)
    ring = Ring(num_slots=3, slot_bytes=max(num_bytes, token_slot_bytes(max_rows=4)))
    writer, reader = own(ring.writer), own(ring.reader)
    ring.close()
    yield writer, reader
    for end in (writer, reader):
        for fd in (end.memory_fd, end.filled_fd, end.freed_fd):
            with contextlib.suppress(OSError):
                os.close(fd)


def test_hidden_states_keep_their_bits(ends: tuple[RingEnd, RingEnd]) -> None:
    sender = HiddenSender(ends[0], width=6, dtype=torch.bfloat16, num_stages=3)
    receiver = HiddenReceiver(ends[1], width=6, dtype=torch.bfloat16, num_stages=3, rank=2)
    sent = [torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (4, 1, 3, 2, 4)]
    sent[1][0, 0], sent[2][0, 1] = float("nan"), float("-inf")
    for i, hidden in enumerate(sent):
        sender.send(i, hidden, [StageTime(100.0 + i, 0.25 * i, 1.5)], started=time.monotonic() - 5)
        if i >= 2:
            # the ring is full here; each slot given back is used again
            found, (first, second) = receiver.receive(i - 2, len(sent[i - 2]))
            assert torch.equal(found.view(torch.int16), sent[i - 2].view(torch.int16))
            assert first == StageTime(100.0 + i - 2, 0.25 * (i - 2), 1.5)
            # the sender's own: when it began as it said, then until it sent, then what sending took
            assert second.started + second.seconds + second.send_seconds <= time.monotonic()
            assert second.seconds >= 5
            assert second.send_seconds > 0
            receiver.release()
    with pytest.raises(AssertionError, match="step 3 came for step 7"):
        receiver.receive(7, 2)


def test_a_full_ring_makes_its_writer_wait(ends: tuple[RingEnd, RingEnd]) -> None:
    sender, receiver = TokenSender(ends[0]), TokenReceiver(ends[1])
    assert not receiver.is_ready()
    count = 200
    thread = threading.Thread(target=lambda: [sender.send(i, [i, 2 * i]) for i in range(count)])
    thread.start()
    assert [receiver.receive(i) for i in range(count)] == [[i, 2 * i] for i in range(count)]
    thread.join()
    assert not receiver.is_ready()


def test_a_neighbour_that_ends(ends: tuple[RingEnd, RingEnd]) -> None:
    writer, reader = RingWriter(ends[0]), RingReader(ends[1])
    writer.take()
    writer.commit()
    close(ends[0])
    assert reader.take() == 0  # what was handed over before counts
    with pytest.raises(NeighbourGoneError):
        reader.release()
    with pytest.raises(NeighbourGoneError):
        reader.take()


def test_the_reader_ends(ends: tuple[RingEnd, RingEnd]) -> None:
    writer = RingWriter(ends[0])
    close(ends[1])
    writer.take()
    with pytest.raises(NeighbourGoneError):
        writer.commit()


def test_the_board_shows_how_many_steps_each_stage_has_done() -> None:
    fd = Board.create(2)
    here, there = Board(fd, 2), Board(fd, 2)
    os.close(fd)
    assert [here.num_done(0), here.num_done(1)] == [0, 0]
    for _ in range(3):
        there.count(1)
    assert [here.num_done(0), here.num_done(1)] == [0, 3]
    here.close()
    there.close()
