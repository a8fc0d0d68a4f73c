"""Random numbers and permutations as pure functions of integers: nothing is stored, nothing is shuffled in memory.

Letters: N numbers at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Weyl increment and multipliers of SplitMix64.
# Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

# Four rounds of a Feistel network with ideal round functions are pseudo-random (Luby and Rackoff 1988); the halves
# here may be tiny and the round function is only a hash, so take twice that.
ROUNDS = 8


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: a bijection of 64-bit words that spreads every bit over all others."""
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


def hash64(*words: ArrayLike) -> NDArray[np.uint64]:
    """Hash integers, element by element where they are arrays, into one 64-bit word.

    Shapes: each word is a number or [N]; the result is [N] (N=1 for numbers only).
    """
    hashed = np.zeros(1, np.uint64)
    for word in words:  # always arrays: numpy warns when scalars wrap around, and wrapping is meant here
        value = np.atleast_1d(np.asarray(word)).astype(np.uint64)
        hashed = _mix((hashed + GOLDEN) ^ _mix(value + GOLDEN))
    return hashed


def uniform(*words: ArrayLike) -> NDArray[np.float64]:
    """Hash integers into numbers in [0, 1), with 53 random bits."""
    return (hash64(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(index: NDArray[np.int64], n: int, *key: ArrayLike) -> NDArray[np.int64]:
    """Where a pseudo-random permutation of ``range(n)`` sends each index; another ``key`` gives another permutation.

    A Feistel network over two digits ``(left, right)`` in bases a and b, with a*b just above n. The few results
    outside ``range(n)`` are permuted again until they fall inside (cycle walking), which keeps it a bijection.

    Shapes: index [N], key words numbers or [N] -> [N].
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 and 5.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    hashed = np.broadcast_to(hash64(*key), index.shape)
    result = _feistel(index, hashed, a, b)
    while (outside := np.flatnonzero(result >= n)).size:
        result[outside] = _feistel(result[outside], hashed[outside], a, b)
    return result


def _feistel(index: NDArray[np.int64], key: NDArray[np.uint64], a: int, b: int) -> NDArray[np.int64]:
    """One pass of the network over ``range(a * b)``."""
    base_left, base_right = np.uint64(a), np.uint64(b)
    left, right = np.divmod(index.astype(np.uint64), base_right)
    for number in range(0, ROUNDS, 2):
        keys = _mix(key + np.full(1, number, np.uint64)), _mix(key + np.full(1, number + 1, np.uint64))
        left = (left + _mix(right ^ keys[0]) % base_left) % base_left
        right = (right + _mix(left ^ keys[1]) % base_right) % base_right
    return (left * base_right + right).astype(np.int64)
