"""The sample order: bijections, their quality, blends at every prefix, exact integers far out."""

from fractions import Fraction

import numpy as np
import pytest

from data.sample_order import Blend, SampleOrder, epoch_keys, permute, samples_in, whole_weights

RNG = np.random.default_rng(7)
BLENDS = [
    [1],
    [1, 1],
    [0.001, 0.999],
    [0.7, 0.3],
    [2, 3, 5],
    [1 / 3, 1 / 3, 1 / 3],
    [0, 1, 2],
    [5, 0, 0],
    [1e-9, 1],
    [123456789012, 3],
    list(range(1, 11)),
    *[RNG.random(size).round(digits).tolist() for size in (2, 3, 7, 30) for digits in (2, 4, 16)],
]


def keys_of(seed, count):
    return epoch_keys(seed, 0, np.arange(count))


@pytest.mark.parametrize("count", [*range(1, 40), 100, 255, 256, 257, 1000, 4099])
def test_every_key_gives_a_bijection(count):
    for key in keys_of(3, 3):
        image = permute(np.arange(count), count, np.full(count, key))
        assert np.array_equal(np.sort(image), np.arange(count))


@pytest.mark.parametrize("count", [2**31, 2**31 + 11, 10**12 + 39, 2**52 - 1])
def test_large_bijections_stay_inside_and_do_not_collide(count):
    indices = np.concatenate([np.arange(2000), count - 1 - np.arange(2000)])
    image = permute(indices, count, np.full(4000, keys_of(1, 1)))
    assert image.max() < count and len(np.unique(image)) == 4000


def test_permutations_look_random():
    """Over 2,000 keys every index of 0..19 goes everywhere equally often (chi-square, 361 degrees of freedom)."""
    count, keys = 20, keys_of(5, 2000)
    table = np.zeros((count, count))
    for index in range(count):
        image = permute(np.full(len(keys), index), count, keys).astype(np.int64)
        table[index] = np.bincount(image, minlength=count)
    statistic = ((table - 100) ** 2 / 100).sum()
    assert 260 < statistic < 480
    image = permute(np.arange(10000), 10000, np.full(10000, keys[0])).astype(float)
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.03, "neighbours stay together"
    assert abs(np.corrcoef(image, np.arange(10000))[0, 1]) < 0.03


def test_keys_differ_by_seed_dataset_and_epoch():
    keys = [epoch_keys(seed, dataset, np.arange(50)) for seed in (0, 1, -1, 2**63) for dataset in range(4)]
    assert len(np.unique(np.concatenate(keys))) == 4 * 4 * 50


@pytest.mark.parametrize("weights", BLENDS, ids=str)
def test_every_prefix_of_a_blend_is_close_to_its_weights(weights):
    total = 5000
    stream, index = Blend(weights).locate(np.arange(total))
    used = sum(weight > 0 for weight in weights)
    shares = [float(Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights)) for weight in weights]
    for k, share in enumerate(shares):
        count = np.cumsum(stream == k)
        assert np.abs(count - share * np.arange(1, total + 1)).max() <= (used + 1) / 2 + 1e-6
        assert np.array_equal(index[stream == k], np.arange(count[-1]))


@pytest.mark.parametrize("weights", [[2, 3, 5], [1, 1, 1], [7, 2], [0.001, 0.999], [3, 0, 3, 1, 4], [0.25, 0.125]])
def test_a_blend_is_the_merge_by_time(weights):
    """Against sorting (j + 1/2) / weight in exact fractions, over three periods."""
    events = sorted(
        ((j + Fraction(1, 2)) / Fraction(str(weight)), k, j)
        for k, weight in enumerate(weights)
        if weight
        for j in range(3 * whole_weights(weights)[k])
    )
    stream, index = Blend(weights).locate(np.arange(len(events)))
    assert list(zip(stream.tolist(), index.tolist(), strict=True)) == [event[1:] for event in events]


@pytest.mark.parametrize("weights", BLENDS, ids=str)
@pytest.mark.parametrize("first", [10**6, 2**31 - 500, 10**12 + 12345, 2**50])
def test_a_blend_goes_on_without_gaps_far_out(weights, first):
    stream, index = Blend(weights).locate(np.arange(first, first + 1000))
    total = sum(Fraction(w) for w in whole_weights(weights))
    for k, weight in enumerate(whole_weights(weights)):
        mine = index[stream == k]
        assert np.array_equal(mine, np.arange(mine.size) + (mine[0] if mine.size else 0))
        if mine.size:
            start = np.flatnonzero(stream == k)[0]
            assert abs(mine[0] - (first + int(start)) * weight / total) <= (len(weights) + 1) / 2


def test_weights_become_whole_numbers_exactly_where_they_can():
    assert whole_weights([0.001, 0.999]) == [1, 999]
    assert whole_weights([0.5, 1, 0]) == [1, 2, 0]
    assert whole_weights([30, 70]) == [3, 7]
    tiny, rest = whole_weights([1e-12, 1])
    assert tiny == 1 and 2**31 - 3 <= rest <= 2**31
    thirds = whole_weights([1 / 3, 2 / 3])
    assert sum(thirds) <= 2**31 and abs(thirds[0] / sum(thirds) - 1 / 3) < 1e-9


def offsets(order, first, count):
    return order.locate(np.arange(first, first + count)).offset


def test_in_order_without_shuffle():
    order = SampleOrder([45], [1.0], 4, 9, False)
    assert order.length == 11
    assert offsets(order, 0, 24).tolist() == [*range(0, 44, 4), *range(0, 44, 4), 0, 4]


@pytest.mark.parametrize("tokens", [5, 6, 8, 9, 41, 44, 1001])
def test_each_epoch_is_a_permutation_with_one_shift(tokens):
    order = SampleOrder([tokens], [1.0], 4, 9, True)
    shifts = set()
    for epoch in range(12):
        starts = offsets(order, epoch * order.length, order.length)
        (shift,) = {int(start) % 4 for start in starts}
        assert np.array_equal(np.sort(starts), np.arange(order.length) * 4 + shift)
        assert starts.max() + 5 <= tokens
        shifts.add(shift)
    assert shifts == set(range((tokens - 1) % 4 + 1))


def test_seed_dataset_and_epoch_change_the_order():
    def first_epoch(seed, first=0):
        return offsets(SampleOrder([4001], [1.0], 4, seed, True), first, 1000).tolist()

    assert first_epoch(1) == first_epoch(1)
    assert first_epoch(1) != first_epoch(2)
    assert first_epoch(1) != first_epoch(1, 1000)
    both = SampleOrder([4001, 4001], [1, 1], 4, 1, True).locate(np.arange(2000))
    assert both.offset[both.dataset == 0].tolist() != both.offset[both.dataset == 1].tolist()


def test_a_position_alone_is_the_position_among_others():
    order = SampleOrder([999, 12345, 77], [0.2, 0.5, 0.3], 8, 3, True)
    together = order.locate(np.arange(3000))
    for position in (0, 1, 17, 1500, 2999):
        alone = order.locate(np.array([position]))
        for name in ("dataset", "offset", "index"):
            assert getattr(alone, name)[0] == getattr(together, name)[position]


def test_the_order_is_pinned():
    """These numbers are what a resumed run relies on: a change to the order must not pass unseen."""
    order = SampleOrder([10**9, 123456], [0.9, 0.1], 1024, 1234, True)
    located = order.locate(np.array([0, 1, 5, 10**6, 10**9]))
    assert located.dataset.tolist() == PINNED[0]
    assert located.offset.tolist() == PINNED[1]


PINNED = ([0, 0, 1, 0, 0], [582004178, 750899666, 47632, 587945426, 195497215])


@pytest.mark.parametrize("tokens, samples", [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10**15 + 1, 25 * 10**13)])
def test_samples_in(tokens, samples):
    assert samples_in(tokens, 4) == samples
