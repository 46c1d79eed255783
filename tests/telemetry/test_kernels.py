"""Intervals of kernels add up to what a stopwatch on the device would say."""

import random

import pytest

from megazero.telemetry.kernels import Kernel, device_time, is_communication, union


def test_a_hand_made_trace():
    ms = 1_000_000
    kernels = [
        Kernel("gemm", 0, 4 * ms),
        Kernel("ncclDevKernel_AllGather", 2 * ms, 6 * ms),  # 2 hidden, 2 exposed
        Kernel("gemm", 6 * ms, 8 * ms),
        Kernel("ncclDevKernel_ReduceScatter", 7 * ms, 8 * ms),  # hidden
        Kernel("norm", 7 * ms, 8 * ms),  # beside the product
        Kernel("gemm", 9 * ms, 10 * ms),  # 1 idle before it
    ]
    found = device_time(kernels, steps=2, most=2)
    assert found[:5] == (5.0, 3.5, 2.5, 1.0, 0.5)
    assert found.overlap == pytest.approx(0.6)
    assert found.kernels == [("gemm", 3.5), ("ncclDevKernel_AllGather", 2.0)]


def test_nothing_to_hide():
    assert device_time([Kernel("gemm", 0, 10)], 1).overlap == 1.0
    assert device_time([], 3).span == 0.0
    assert is_communication("ncclDevKernel_AllReduce_Sum_f32_RING_LL") and not is_communication("ampere_sgemm")


def test_against_counting_every_nanosecond():
    draw = random.Random(0)
    for _ in range(50):
        kernels = []
        for _ in range(draw.randint(1, 12)):
            start = draw.randint(0, 40)
            kernels.append(Kernel(draw.choice(["gemm", "nccl"]), start, start + draw.randint(1, 9)))
        compute = {t for k in kernels if k.name == "gemm" for t in range(k.start, k.end)}
        communication = {t for k in kernels if k.name == "nccl" for t in range(k.start, k.end)}
        span = max(k.end for k in kernels) - min(k.start for k in kernels)
        found = device_time(kernels, 1)
        wanted = (
            span,
            len(compute),
            len(communication),
            len(communication - compute),
            span - len(compute | communication),
        )
        assert [round(x * 1e6) for x in found[:5]] == list(wanted)
        assert len(union((k.start, k.end) for k in kernels)) <= len(kernels)
