"""The advice after the first steps: four planted bottlenecks are named, a well-set run gets none. Times are given."""

from __future__ import annotations

from collections import Counter

import pytest

from megazero.zero.offload.meter import STEPS, WARM, Meter


def advice(seconds: dict[str, float], *, link: float = 0.0, touched: int = 0, **settings) -> str | None:
    """What is said where every step of a second takes these seconds of each kind."""
    moved: Counter[str] = Counter()
    options = {"threads": 16, "cores": 16, "pinned": True} | settings
    meter = Meter(moved, **options)
    told = None
    for step in range(WARM + STEPS + 3):
        for kind, value in seconds.items():
            meter.seconds[kind] += value
        moved["out"] += int(link)
        meter.touched += touched
        found = meter.step(lambda step=step: float(step))
        assert found is None or told is None, "said twice"
        told = told or found
    return told


@pytest.mark.parametrize(
    ("seconds", "settings", "words"),
    [
        ({"copies": 0.4, "wait": 0.1}, {"pinned": False}, ("copies that nothing overlaps", "pin_memory to true")),
        ({"wait": 0.6, "update": 0.9}, {"threads": 1, "touched": 9 * 10**9}, ("10 GB/s", "1 threads", "16 cores")),
        ({"wait": 0.6, "update": 0.2, "files": 0.7}, {}, ("the disk is slower", "moments bf16")),
        ({"wait": 0.6, "update": 0.2, "parameters": 0.9}, {}, ("read from the disk slower", "micro-batch size")),
        ({"wait": 0.1, "update": 0.2}, {"link": 40e9}, ("the link", "40 GB/s", "micro-batch size")),
        ({"wait": 0.3, "update": 0.5}, {"touched": 45 * 10**9}, ("90 GB/s", "accumulation steps", "ratio")),
        ({"wait": 0.3, "update": 0.5}, {"few_bits": True}, ("masters and moments in float32 if they fit",)),
        ({"wait": 0.3, "gradients": 0.5}, {}, ("copies between device and host", "micro-batch")),
    ],
    ids=["unpinned", "one thread", "disk", "parameters from it", "tiny micro-batch", "host memory", "few bits", "link"],
)
def test_what_bounds_a_step_is_named(seconds: dict, settings: dict, words: tuple[str, ...]) -> None:
    told = advice(seconds, **settings)
    assert told is not None and all(word in told for word in words), told


def test_what_makes_an_update_longer_is_no_remedy_for_it() -> None:
    told = advice({"wait": 0.3, "update": 0.5}, touched=45 * 10**9)
    assert told is not None and "bf16" not in told and "float32" not in told


def test_a_well_set_run_is_told_nothing() -> None:
    assert advice({"wait": 0.03, "copies": 0.05, "update": 0.4, "gradients": 0.2}, link=5e9, touched=4 * 10**10) is None
