"""Random numbers without a state: a uniform number is a function of (seed, position).

The generator is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011): ten rounds of multiplication and key addition over a 128-bit counter. The seed is its key, the position its
counter, so every number can be had in any order, on any rank, and in any batch, and is the same.
"""

from __future__ import annotations

_MASK_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter of four and a key of two 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK_32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK_32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK_32, (k1 + _KEY_STEPS[1]) & _MASK_32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. Seeds are taken modulo 2^64; `position` is from 0 to 2^64 - 1."""
    key = (seed & _MASK_32, (seed >> 32) & _MASK_32)
    high, low, _, _ = philox4x32((position & _MASK_32, (position >> 32) & _MASK_32, 0, 0), key)
    return float((high << 21) | (low >> 11)) * 2.0**-53
