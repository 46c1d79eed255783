"""Schedules, their checker and their simulator."""

from __future__ import annotations

import functools
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megazero.pipeline.checker import check_evaluation_schedule, check_schedule
from megazero.pipeline.schedules import (
    COMMUNICATION,
    Action,
    Kind,
    Schedule,
    ScheduleFault,
    activation_bound,
    build_schedule,
    evaluation_schedule,
    groups,
)
from megazero.pipeline.simulate import compute_cost, simulate

NAMES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]


def sizes(name: str) -> list[tuple[int, int, int]]:
    """(stages, micro-batches, chunks): all small ones, and some of those up to 16, 64 and 4."""
    draw, several = random.Random(0), name == "interleaved"
    chunks = (2, 3) if several else (1,)
    found = list(itertools.product((2, 3, 4) if several else (1, 2, 3, 4), (1, 2, 3, 4, 5, 8), chunks))
    for _ in range(3):
        found.append((draw.randint(5, 16), draw.randint(1, 64), draw.randint(2, 4) if several else 1))
    return found + [(16, m, 4 if several else 1) for m in (15, 64)]


def all_sizes(name: str) -> Iterator[tuple[int, int, int]]:
    several = name == "interleaved"
    return itertools.product(range(1 + several, 17), range(1, 65), (2, 3, 4) if several else (1,))


built = functools.cache(build_schedule)


def prove(schedule: Schedule, name: str, micro_batches: int, chunks: int = 1) -> None:
    stages = len(schedule)
    bounds = [activation_bound(name, stages, micro_batches, stage, chunks) for stage in range(stages)]
    check_schedule(schedule, micro_batches, bounds, chunks)


def most_held(actions: list[Action]) -> int:
    ends = Kind.BACKWARD_WEIGHT if any(a.kind is Kind.BACKWARD_WEIGHT for a in actions) else Kind.BACKWARD
    return max(itertools.accumulate((a.kind is Kind.FORWARD) - (a.kind is ends) for a in actions))


def compute(actions: list[Action]) -> str:
    """A list's computations in short, as in the papers' figures, a stroke for the second chunk: F0 F1 F0' B0' …"""
    short = {
        Kind.FORWARD: "F",
        Kind.BACKWARD: "B",
        Kind.BACKWARD_INPUT: "B",
        Kind.BACKWARD_WEIGHT: "W",
        Kind.REDUCE: "R",
    }
    return " ".join(short[a.kind] + str(a.micro_batch) + "'" * a.chunk for a in actions if a.kind in short)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_proven(name: str, pytestconfig: pytest.Config) -> None:
    """With --whole, in a quarter of an hour, all of up to 16 stages, 64 micro-batches and 4 chunks."""
    for stages, micro_batches, chunks in all_sizes(name) if pytestconfig.getoption("whole") else sizes(name):
        prove(built(name, stages, micro_batches, chunks), name, micro_batches, chunks)
        evaluation = evaluation_schedule(stages, micro_batches, chunks)
        check_evaluation_schedule(evaluation, micro_batches, chunks)


def test_1f1b_is_the_papers_figure() -> None:
    """Narayanan et al. 2021, figure 4 (top half), four stages and eight micro-batches."""
    lists = [compute(actions) for actions in build_schedule("1f1b", 4, 8)]
    assert lists[0] == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 R7 B7"
    assert lists[2] == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 R7 B7"
    assert lists[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 R7 B7"


def test_interleaved_is_the_papers_figure() -> None:
    """Narayanan et al. 2021, figure 4 (bottom half): four ranks of two chunks and eight micro-batches. The first rank
    takes a backward, B2', where it would wait for the input of F4'."""
    lists = [compute(actions) for actions in build_schedule("interleaved", 4, 8, 2)]
    assert lists[3] == (
        "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 F6 B2 F7 B3 F4' B4' F5' B5' F6' B6' F7' R7' B7' "
        "B4 B5 B6 R7 B7"
    )
    assert lists[0] == (
        "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' B2' F4' B3' F5' B0 F6' B1 F7' B2 B3 B4' B5' B6' R7' B7' "
        "B4 B5 B6 R7 B7"
    )


def test_zero_bubble_is_the_papers_figure() -> None:
    """Qi et al. 2023, figure 2 (ZB-H1): four ranks and eight micro-batches."""
    lists = [compute(actions) for actions in build_schedule("zero_bubble", 4, 8)]
    assert lists[0] == "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 R7 W7"
    assert lists[3] == "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 R7 W7"


def test_activations_are_within_the_published_bounds() -> None:
    """1F1B: as many as later stages and itself (Narayanan et al. 2021, section 2.2.1). Interleaved: on the first rank
    p (1 + (p - 1) / (p v)) times its layers, that is p v + p - 1 chunks (Korthikanti et al. 2022, section 4.2.3).
    ZB-H1: on no rank more than 1F1B on its first (Qi et al. 2023, section 2.3)."""
    for stages, micro_batches, _ in sizes("1f1b"):
        for rank, actions in enumerate(built("1f1b", stages, micro_batches, 1)):
            assert most_held(actions) == min(micro_batches, stages - rank)
    for stages, micro_batches, chunks in sizes("interleaved"):
        first = most_held(built("interleaved", stages, micro_batches, chunks)[0])
        assert first <= min(stages * chunks + stages - 1, chunks * micro_batches)
    for stages, micro_batches, _ in sizes("zero_bubble"):
        for actions in built("zero_bubble", stages, micro_batches, 1):
            assert most_held(actions) <= min(micro_batches, stages)


def test_gpipe_is_all_forwards_then_all_backwards() -> None:
    assert compute(build_schedule("gpipe", 2, 3)[1]) == "F0 F1 F2 B0 B1 R2 B2"


def test_steady_state_groups_transfers_with_one_neighbour() -> None:
    found = [batch for _, batch in groups(build_schedule("1f1b", 4, 8)[2]) if batch[0].kind in COMMUNICATION]
    batches = [tuple(action._replace(slot=None) for action in batch) for batch in found]
    next_stage = (Action(Kind.SEND_FORWARD, 3, peer=3), Action(Kind.RECV_BACKWARD, 2, peer=3))
    previous_stage = (Action(Kind.SEND_BACKWARD, 2, peer=1), Action(Kind.RECV_FORWARD, 4, peer=1))
    assert next_stage in batches and previous_stage in batches


def test_groups_cover_the_list() -> None:
    for actions in build_schedule("1f1b", 3, 5):
        rebuilt = []
        for index, batch in groups(actions):
            assert index == len(rebuilt)
            rebuilt.extend(batch)
        assert rebuilt == actions


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("forward, backward", [(1.0, 1.0), (1.0, 2.0)])
def test_bubble_fraction_is_the_papers(name: str, forward: float, backward: float) -> None:
    """(p - 1) / (v m) of the ideal time (Narayanan et al. 2021, section 2.2), where v > 1 of whole groups."""
    for stages, micro_batches, chunks in sizes(name):
        if chunks == 1 or micro_batches % stages == 0:
            schedule = built(name, stages, micro_batches, chunks)
            timeline = simulate(schedule, compute_cost(forward, backward))
            slots = chunks * micro_batches + stages - 1
            assert timeline.duration == slots * (forward + backward)
            for rank in range(stages):
                assert timeline.idle_fraction(rank) == pytest.approx((stages - 1) / slots)


def test_bubble_of_zero_bubble_is_the_papers() -> None:
    """(p - 1) (T_F + T_B - T_W) where the three are equal (Qi et al. 2023, section 2.3); it wants p micro-batches. With
    fewer, or other costs, it is never above that of 1F1B."""
    for stages, micro_batches, _ in sizes("zero_bubble"):
        schedule = built("zero_bubble", stages, micro_batches, 1)
        if micro_batches >= stages:
            assert simulate(schedule, compute_cost(1, 1, 1)).duration == 3 * micro_batches + stages - 1
        for forward, part, weight in ((1, 1, 1), (1, 1.25, 0.75), (1, 0.75, 1)):
            slots = micro_batches + stages - 1
            found = simulate(schedule, compute_cost(forward, part, weight)).duration
            assert found <= slots * (forward + part + weight), (stages, micro_batches, forward, part, weight)


def test_timeline_by_hand() -> None:
    """Two stages, one micro-batch, transfers of half a unit: F, send, F, B, send, B."""
    costs = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.GATHER: 0.0, Kind.REDUCE: 0.0}
    timeline = simulate(build_schedule("gpipe", 2, 1), lambda rank, action: costs.get(action.kind, 0.5))
    spans = [[(s.action.kind.value, s.start, s.end) for s in spans] for spans in timeline.ranks]
    assert spans[0] == [
        ("gather", 0, 0),
        ("forward", 0, 1),
        ("send_forward", 1, 1.5),
        ("recv_backward", 1.5, 5),
        ("reduce", 1, 1),
        ("backward", 5, 7),
    ]
    assert spans[1] == [
        ("gather", 0, 0),
        ("recv_forward", 0, 1.5),
        ("forward", 1.5, 2.5),
        ("reduce", 2.5, 2.5),
        ("backward", 2.5, 4.5),
        ("send_backward", 4.5, 5),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_checker_objects_to_every_dropped_or_doubled_action(name: str) -> None:
    stages, micro_batches, chunks = (2, 2, 2) if name == "interleaved" else (3, 4, 1)
    schedule = build_schedule(name, stages, micro_batches, chunks)
    for rank, actions in enumerate(schedule):
        for index in range(len(actions)):
            for replacement in ([], [actions[index]] * 2):
                mutant = [list(a) for a in schedule]
                mutant[rank][index : index + 1] = replacement
                with pytest.raises(ScheduleFault):
                    prove(mutant, name, micro_batches, chunks)


def test_checker_objects_to_swapped_actions() -> None:
    """Two computations, or two actions of one kind. (A transfer may move: others are then met later.)"""
    transfers_apart = {kind: {kind} for kind in COMMUNICATION}
    computations = set(Kind) - COMMUNICATION
    schedule = build_schedule("1f1b", 3, 4)
    for rank, actions in enumerate(schedule):
        for a, b in itertools.combinations(range(len(actions)), 2):
            if actions[b].kind not in transfers_apart.get(actions[a].kind, computations):
                continue
            mutant = [list(x) for x in schedule]
            mutant[rank][a], mutant[rank][b] = actions[b], actions[a]
            with pytest.raises(ScheduleFault):
                prove(mutant, "1f1b", 4)


def test_checker_objects_to_wrong_fields() -> None:
    schedule = build_schedule("1f1b", 3, 4)
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            for change in ({"micro_batch": (action.micro_batch or 0) + 1}, {"peer": 7}, {"chunk": 1}):
                if action.kind is Kind.GATHER or ("peer" in change and action.peer is None):
                    continue
                mutant = [list(x) for x in schedule]
                mutant[rank][index] = action._replace(**change)
                with pytest.raises(ScheduleFault) as fault:
                    prove(mutant, "1f1b", 4)
                assert fault.value.rank == rank and f"pipeline rank {rank}, action" in str(fault.value)


def test_checker_sees_a_deadlock() -> None:
    """Each list is sound alone: rank 0 wants its first gradient before it sends more, rank 1 all activations first."""
    eager = [Action(Kind.GATHER)]
    for i in range(2):
        eager += [Action(Kind.FORWARD, i), Action(Kind.SEND_FORWARD, i, peer=1), Action(Kind.RECV_BACKWARD, i, peer=1)]
        eager += [Action(Kind.REDUCE, i)] if i == 1 else []
        eager += [Action(Kind.BACKWARD, i)]
    with pytest.raises(ScheduleFault, match="deadlock") as fault:
        check_schedule([eager, build_schedule("gpipe", 2, 2)[1]], 2, [2, 2])
    assert (fault.value.rank, fault.value.index) == (0, 3)
    assert "rank 0 at action 3 (recv_backward of micro-batch 0 from rank 1)" in str(fault.value)
    assert "rank 1 at action 3 (recv_forward of micro-batch 1 from rank 0)" in str(fault.value)


def test_checker_sees_batches_that_differ() -> None:
    """Of two ranks the first one waits for its first gradient where it has sent its second activation."""
    schedule = build_schedule("1f1b", 2, 4)
    ends = [[action.slot for action in actions if action.kind in COMMUNICATION] for actions in schedule]
    assert ends[0] == ends[1] and ends[0] == sorted(ends[0])
    merged = [[action._replace(slot=None) for action in actions] for actions in schedule]
    with pytest.raises(ScheduleFault, match="batch 1 with rank 1, .* is not one batch there"):
        check_schedule(merged, 4, [2, 1])


def test_checker_sees_too_many_activations() -> None:
    schedule = build_schedule("gpipe", 2, 4)
    with pytest.raises(ScheduleFault, match="holds the activations of 3 micro-batches, the bound is 2"):
        check_schedule(schedule, 4, [2, 1])


def test_simulator_sees_a_mismatch() -> None:
    send = [Action(Kind.SEND_FORWARD, 1, peer=1)]
    receive = [Action(Kind.RECV_FORWARD, 0, peer=0)]
    with pytest.raises(ScheduleFault, match="recv_forward of micro-batch 0 from rank 0 meets"):
        simulate([send, receive], compute_cost(1, 1))


def test_schedules_need_no_torch() -> None:
    code = (
        "import sys, megazero.pipeline.checker, megazero.pipeline.partition;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
