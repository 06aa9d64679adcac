"""Which blocks hold the tokens of which request.

A block's hash is the sha256 of its parent's hash and its own tokens (the first one's parent is the request's salt),
so equal hashes mean equal prefixes, and nobody can make two prompts collide.
"""

from __future__ import annotations

import hashlib
from array import array

from millstream.request import Request
from millstream.sched.block_pool import Block, BlockPool


class _Table:
    """The blocks of one request, in order, and the hashes of those that are full."""

    __slots__ = ("blocks", "hashes", "num_published")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.hashes: list[bytes] = []
        self.num_published = 0


class KVCacheManager:
    """Allocates blocks to requests, finds and publishes prefixes."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, _Table] = {}
        self._refused: dict[str, _Table] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold: 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) <= self.pool.num_blocks

    def admit(self, request: Request, *, reserve: int = 0) -> list[int] | None:
        """Give a request without blocks room for all its known tokens, a cached prefix first.

        Sets `request.num_computed_tokens` to what the prefix spares. At least one token is left to compute.
        Returns the block ids, or None, with nothing changed, where that would leave fewer than `reserve` blocks free.
        """
        assert request.request_id not in self._tables, f"{request.request_id} has blocks already"
        # what an attempt without room has hashed is kept for the next one
        table = self._refused.pop(request.request_id, None) or _Table()
        prefix = self._match_prefix(request, table)
        num_new = self.num_blocks_for(request.num_tokens) - len(prefix)
        # blocks of the prefix that are free now are taken out of the free list too
        num_taken = num_new + sum(b.num_users == 0 for b in prefix)
        if num_taken + reserve > self.pool.num_free:
            self._refused[request.request_id] = table
            return None
        self.pool.touch(prefix)
        table.blocks = prefix + self.pool.take(num_new)
        table.num_published = len(prefix)
        self._tables[request.request_id] = table
        request.num_computed_tokens = len(prefix) * self.block_size
        return [b.block_id for b in table.blocks]

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens; the ids of the blocks added, or None if it fails."""
        blocks = self._tables[request.request_id].blocks
        if num_tokens <= len(blocks) * self.block_size:
            return []
        num_new = self.num_blocks_for(num_tokens) - len(blocks)
        if num_new > self.pool.num_free:
            return None
        added = self.pool.take(num_new)
        blocks.extend(added)
        return [b.block_id for b in added]

    def publish(self, request: Request, num_tokens: int) -> None:
        """Let others reuse the full blocks among the request's first `num_tokens` tokens.

        Called for prompts when the step that computes them is scheduled: workers begin with decisions in order and
        write the keys and values of a whole step before they read any, so whoever finds a block also finds its
        contents. Called for answers when the step has landed.
        """
        if not self.enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        num_full = num_tokens // self.block_size
        if num_full <= table.num_published:
            return
        self._extend_hashes(request, table, num_full)
        for i in range(table.num_published, num_full):
            self.pool.publish(table.blocks[i], table.hashes[i])
        table.num_published = num_full

    def free(self, request: Request, *, fence: int | None = None) -> None:
        """Give back all blocks of the request, if it has any, once step `fence` has landed."""
        self._refused.pop(request.request_id, None)
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self.pool.release(table.blocks[::-1], fence=fence)

    def check_integrity(self) -> None:
        left = [*self._tables, *self._refused]
        assert not left, f"requests with blocks though none is open: {left[:5]}"
        self.pool.check_integrity()

    def _match_prefix(self, request: Request, table: _Table) -> list[Block]:
        """The longest run of published blocks that the request's tokens begin with."""
        # a request for log-probabilities of its prompt needs the prompt computed
        if not self.enable_prefix_caching or request.sampling_params.prompt_logprobs is not None:
            return []
        matched: list[Block] = []
        for i in range((request.num_tokens - 1) // self.block_size):
            self._extend_hashes(request, table, i + 1)
            block = self.pool.lookup(table.hashes[i])
            if block is None:
                break
            matched.append(block)
        return matched

    def _extend_hashes(self, request: Request, table: _Table, count: int) -> None:
        size = self.block_size
        for i in range(len(table.hashes), count):
            parent = table.hashes[-1] if table.hashes else request.cache_salt.encode()
            tokens = array("i", request.token_ids[i * size : (i + 1) * size]).tobytes()
            table.hashes.append(hashlib.sha256(len(parent).to_bytes(4, "little") + parent + tokens).digest())
