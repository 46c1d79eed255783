"""Which tokens make the sample at global position i: a pure function of (datasets, weights, seed, i).

Nothing is stored but the arguments, so there is no index file to build, share or go stale, and neither the number of
data-parallel ranks nor the length of the run can change the order. Everything is integer arithmetic in uint64, on
whole arrays of positions.

- A dataset of N tokens holds n = (N - 1) // s samples of s + 1 tokens (neighbours share one), in every epoch.
- Each epoch permutes them by a bijection keyed by (seed, dataset, epoch): a Feistel network over a x b >= n, whose
  few values past n are sent through it again (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
- Each epoch has its own shift between 0 and the (N - 1) mod s tokens that n samples leave over.
- K datasets are merged by (j + 1/2) / weight, j counting the samples of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

_ROUNDS = 8
_FINEST = 2**31
"""Whole-number weights sum to at most this, so that every product below stays under 2**64."""


def samples_in(tokens: int, seq_length: int) -> int:
    """Samples of ``seq_length + 1`` tokens in a stream of ``tokens``, neighbours sharing one token."""
    return max(0, (tokens - 1) // seq_length)


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 with good avalanche: splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def epoch_keys(seed: int, dataset: int, epochs: np.ndarray) -> np.ndarray:
    """A key per epoch: uint64, same shape as ``epochs``."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = np.array([seed % 2**64], np.uint64)
    for part in (np.array([dataset], np.uint64), epochs.astype(np.uint64)):
        key = _mix(_mix(key + golden) ^ part)
    return key


def permute(indices: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """For each key a bijection of [0, count), applied to the index beside it: uint64, same shape as ``indices``."""
    high_count = math.isqrt(count - 1) + 1
    low_count = -(-count // high_count)
    result = np.array(indices, np.uint64)
    pending = np.arange(result.size)
    while pending.size:
        moved = _feistel(result[pending], keys[pending], np.uint64(high_count), np.uint64(low_count))
        result[pending] = moved
        pending = pending[moved >= np.uint64(count)]
    return result


def _feistel(x: np.ndarray, keys: np.ndarray, high_count: np.uint64, low_count: np.uint64) -> np.ndarray:
    """A bijection of [0, high_count * low_count): each half in turn is rotated by a hash of the other."""
    high, low = x // low_count, x % low_count
    for turn in range(_ROUNDS):
        key = _mix(keys + np.uint64(turn))
        if turn % 2 == 0:
            high = (high + _mix(low ^ key) % high_count) % high_count
        else:
            low = (low + _mix(high ^ key) % low_count) % low_count
    return high * low_count + low


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The weights as whole numbers without a common factor: their decimal values exactly, where these sum to at most
    2**31 then, else rounded to such a sum (a positive weight to at least 1)."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    total = sum(whole)
    if total > _FINEST:
        room = _FINEST - len(whole)
        whole = [weight and max(1, weight * room // total) for weight in whole]
    return whole


class Blend:
    """K streams merged into one by (j + 1/2) / weight; ties go to the earlier stream.

    In every prefix each stream is within (K + 1) / 2 samples of its share. The merge repeats after D samples, the sum
    of the whole-number weights W, so a position splits into a period and a remainder r below D. Up to time t (in
    samples) stream k has given (2 t W + D) // (2 D) samples, and all of them together within K / 2 of t: a binary
    search finds the unit of time that contains position r, where each stream gives at most one sample.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        whole = whole_weights(weights)
        self.streams = np.flatnonzero(whole)
        """The streams of a weight above zero; the others never appear."""
        self._weights = np.array([whole[k] for k in self.streams], np.uint64)
        self._period = np.uint64(sum(whole))

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(stream, index within the stream) of each position (P,), both int64 (P,)."""
        if len(self.streams) == 1:
            return np.full(positions.shape, self.streams[0], np.int64), positions.astype(np.int64)
        period, rest = np.divmod(positions.astype(np.uint64), self._period)
        time = self._unit_of(rest)
        given = self._given(time)
        gives = self._given(time + np.uint64(1)) > given
        rank = rest - given.sum(axis=1, dtype=np.uint64)
        order = self._order_in_unit(time, given, gives)
        chosen = np.take_along_axis(order, rank.astype(np.int64)[:, None], axis=1)[:, 0]
        index = np.take_along_axis(given, chosen[:, None], axis=1)[:, 0] + period * self._weights[chosen]
        return self.streams[chosen], index.astype(np.int64)

    def _given(self, time: np.ndarray) -> np.ndarray:
        """Samples each stream has given up to ``time`` (P,): uint64 (P, K)."""
        two = np.uint64(2)
        return (two * time[:, None] * self._weights + self._period) // (two * self._period)

    def _unit_of(self, rest: np.ndarray) -> np.ndarray:
        """The largest whole time at which at most ``rest`` samples have been given: uint64 (P,)."""
        slack = np.uint64(len(self.streams) // 2 + 1)
        low = rest - np.minimum(rest, slack)
        high = np.minimum(rest + slack, self._period)
        while (low < high).any():
            middle = (low + high + np.uint64(1)) // np.uint64(2)
            early = self._given(middle).sum(axis=1, dtype=np.uint64) <= rest
            low = np.where(early, middle, low)
            high = np.where(early, high, middle - np.uint64(1))
        return low

    def _order_in_unit(self, time: np.ndarray, given: np.ndarray, gives: np.ndarray) -> np.ndarray:
        """Streams in the order of their next sample, those that give none in this unit last: (P, K).

        The sample comes ((2 given + 1) D - 2 time W) / (2 W) after ``time``. Two such fractions of denominators summing
        to 2 D <= 2**32 differ by more than 2**-64 or not at all, so 32 + 32 binary digits compare them exactly.
        """
        two, shift = np.uint64(2), np.uint64(32)
        numerator = (two * given + np.uint64(1)) * self._period - two * time[:, None] * self._weights
        denominator = two * self._weights
        numerator = np.where(gives, numerator, np.uint64(0))
        first, remainder = np.divmod(numerator << shift, denominator)
        second = (remainder << shift) // denominator
        return np.lexsort((second, first, ~gives), axis=1)


@dataclass(frozen=True)
class Located:
    """Where samples lie: three int64 arrays of one length."""

    dataset: np.ndarray
    offset: np.ndarray
    """The first of the sample's seq_length + 1 tokens, counted in its dataset's stream."""
    index: np.ndarray
    """How many samples of the same dataset came before, over all epochs."""


class SampleOrder:
    """The order of samples over datasets of ``tokens[k]`` tokens with ``weights[k]`` (any positive scale).

    With ``shuffle`` false each dataset goes in order, over and over, with shift 0.
    """

    def __init__(
        self, tokens: Sequence[int], weights: Sequence[float], seq_length: int, seed: int, shuffle: bool
    ) -> None:
        self.counts = [samples_in(count, seq_length) for count in tokens]
        self._spare = [max(0, count - 1) % seq_length for count in tokens]
        self._blend = Blend(weights)
        assert all(self.counts[k] > 0 for k in self._blend.streams), "a dataset in use holds no sample"
        self._seq_length, self._seed, self._shuffle = seq_length, seed, shuffle

    @property
    def length(self) -> int:
        """Samples of one epoch: of all datasets in use together."""
        return sum(self.counts[k] for k in self._blend.streams)

    def locate(self, positions: np.ndarray) -> Located:
        """Where the samples at global ``positions`` (P,) lie."""
        dataset, index = self._blend.locate(positions)
        offset = np.empty(positions.shape, np.int64)
        for k in np.unique(dataset):
            rows = np.flatnonzero(dataset == k)
            offset[rows] = self._offsets(int(k), index[rows])
        return Located(dataset, offset, index)

    def _offsets(self, dataset: int, index: np.ndarray) -> np.ndarray:
        count = self.counts[dataset]
        epoch, within = np.divmod(index, count)
        if not self._shuffle:
            return within * self._seq_length
        keys = epoch_keys(self._seed, dataset, epoch)
        shift = _mix(~keys) % np.uint64(self._spare[dataset] + 1)
        return permute(within, count, keys).astype(np.int64) * self._seq_length + shift.astype(np.int64)
