"""The blocks of the KV cache: which are free, which hold a known prefix, who uses them.

    free list   [ no contents ... | least recently used ... most recently used ]
                  taken from this end                        returned to this end

A free block keeps its contents and its hash until it is taken for something else, so a later prompt that begins
alike finds it (`lookup`) and takes it back out of the free list (`touch`). A block given back while a step that may
still write or read it is in flight is fenced: it becomes free when that step has landed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class Block:
    """A block's number, how many requests use it, the hash of the prefix that ends with it, if published, its fence."""

    __slots__ = ("block_hash", "block_id", "fence", "num_users")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_users = 0
        self.block_hash: bytes | None = None
        self.fence = -1  # the last step, of those known when it was given back, that may touch it


class BlockPool:
    """All blocks, with `num_blocks` fixed for life."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, Block] = OrderedDict((b.block_id, b) for b in self._blocks)
        self._by_hash: dict[bytes, Block] = {}
        self._fenced: deque[tuple[int, list[Block]]] = deque()
        self._num_fenced = 0
        self._last_landed = -1

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, those with a cached prefix included."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Blocks that become free when steps in flight have landed."""
        return self._num_fenced

    @property
    def num_cached(self) -> int:
        """Blocks, used or free, whose prefix can be found."""
        return len(self._by_hash)

    def take(self, count: int) -> list[Block]:
        """Take `count` free blocks, those without contents first, then the least recently used."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        taken = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            if block.block_hash is not None:
                self._evict(block)
            block.num_users = 1
            taken.append(block)
        return taken

    def lookup(self, block_hash: bytes) -> Block | None:
        """The block whose prefix has this hash."""
        return self._by_hash.get(block_hash)

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more user for each of these blocks."""
        for block in blocks:
            if block.num_users == 0:
                # a fenced block is in no free list; its new user keeps it from entering one
                self._free.pop(block.block_id, None)
            block.num_users += 1

    def publish(self, block: Block, block_hash: bytes) -> None:
        """Let others find this full block by its hash. The first block with a hash keeps it."""
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block

    def release(self, blocks: Sequence[Block], *, fence: int | None = None) -> None:
        """One user less. Blocks without users become free: now, or when step `fence` has landed.

        Give a request's blocks with its last first: the end of a prefix is evicted before its beginning.
        """
        unused = []
        for block in blocks:
            assert block.num_users > 0, f"block {block.block_id} is released by nobody"
            block.num_users -= 1
            if block.num_users == 0:
                unused.append(block)
        if fence is None:
            # a fence may stand from an earlier user: then `land` makes it free
            self._make_free([b for b in unused if b.fence <= self._last_landed])
        elif unused:
            for block in unused:
                block.fence = fence
            self._fenced.append((fence, unused))
            self._num_fenced += len(unused)

    def land(self, step_id: int) -> None:
        """Steps up to `step_id` are done: lift their fences."""
        self._last_landed = step_id
        while self._fenced and self._fenced[0][0] <= step_id:
            _, blocks = self._fenced.popleft()
            self._num_fenced -= len(blocks)
            self._make_free([b for b in blocks if b.num_users == 0 and b.fence <= step_id])

    def check_integrity(self) -> None:
        """Assert what must hold when no request is open: every block is free, every hash leads to its block."""
        assert not self._fenced, f"{self._num_fenced} blocks are fenced though nothing is in flight"
        assert len(self._free) == self.num_blocks, f"{self.num_blocks - len(self._free)} blocks are lost"
        assert all(b.num_users == 0 for b in self._blocks), "a block is in use by nobody"
        assert all(b.block_hash == h for h, b in self._by_hash.items()), "a hash leads to another block"

    def _make_free(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._free[block.block_id] = block
            if block.block_hash is None:
                self._free.move_to_end(block.block_id, last=False)

    def _evict(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        block.block_hash = None
