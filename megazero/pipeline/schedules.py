"""Pipeline schedules as data: for every rank, the list of actions it takes in one step.

Pure Python. The executor obeys these lists, the checker proves them, the simulator times them and the
planner and the timeline draw from them; none of the four knows a schedule by name.

What a list means
-----------------
Actions happen in list order. A maximal run of consecutive communication actions is one *batch*: its
transfers are issued together as a group (`groups` yields them) and those to one peer match in order. The
next action may start once the batch has completed.

``GATHER`` is first in every list: from there on the stage's parameters must be usable. At stages 0 to 2 it
is where the all-gather of the parameters that the last update changed is waited for or overlapped with
forward; at stage 3 it allows the first prefetch. ``REDUCE`` stands directly before the ``BACKWARD`` whose
gradients complete the accumulation, the last one of the stage: block by block, as that backward finishes a
block, the block's accumulated gradient may be reduced over the data-parallel ranks. No gradient of the
stage changes after that backward.

Backward takes the micro-batches in ascending order in every schedule, so gradients accumulate in one order
whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b"]


class Kind(Enum):
    """What an action does; ``FORWARD`` transfers carry activations, ``BACKWARD`` ones their gradients."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"
    REDUCE = "reduce"
    GATHER = "gather"


COMMUNICATION = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})


class Action(NamedTuple):
    """One entry of a rank's list.

    ``micro_batch`` is None for ``GATHER`` only. ``chunk`` numbers the model chunks this rank holds (always 0
    where a rank holds one). ``peer`` is the other pipeline rank of a transfer, None for the rest.
    """

    kind: Kind
    micro_batch: int | None = None
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        text = self.kind.value
        if self.micro_batch is not None:
            text += f" of micro-batch {self.micro_batch}"
        if self.chunk:
            text += f", chunk {self.chunk}"
        if self.peer is not None:
            text += f" {'to' if self.kind in SENDS else 'from'} rank {self.peer}"
        return text


Schedule = list[list[Action]]


class ScheduleFault(AssertionError):
    """A schedule that cannot be run as it is; ``rank`` and ``index`` say where its list goes wrong."""

    def __init__(self, rank: int, index: int, reason: str) -> None:
        self.rank, self.index, self.reason = rank, index, reason
        super().__init__(f"schedule of pipeline rank {rank}, action {index}: {reason}")


def groups(actions: Sequence[Action]) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """(index of the first action, actions): each communication batch whole, every other action alone."""
    start = 0
    while start < len(actions):
        end = start + 1
        if actions[start].kind in COMMUNICATION:
            while end < len(actions) and actions[end].kind in COMMUNICATION:
                end += 1
        yield start, tuple(actions[start:end])
        start = end


def build_schedule(name: ScheduleName, stages: int, micro_batches: int) -> Schedule:
    """Each rank's actions for one training step; any number of stages and micro-batches from 1 up.

    ``gpipe``: all forwards, then all backwards (Huang et al. 2019, section 2.3, with backward ascending).
    ``1f1b``: after a warm-up of one forward per later stage, one forward and one backward in turn
    (Narayanan et al. 2021, section 2.2, "PipeDream-Flush").
    """
    assert stages >= 1 and micro_batches >= 1
    warm_up = {"gpipe": _all_forwards, "1f1b": _one_forward_per_later_stage}[name]
    return [
        _stage_actions(stage, stages, micro_batches, warm_up(stage, stages, micro_batches)) for stage in range(stages)
    ]


def activation_bound(name: ScheduleName, stages: int, micro_batches: int, stage: int) -> int:
    """Most micro-batches whose activations ``stage`` may hold at once, the running one included."""
    return {"gpipe": micro_batches, "1f1b": min(micro_batches, stages - stage)}[name]


def evaluation_schedule(stages: int, micro_batches: int) -> Schedule:
    """Each rank's actions for forward only; a stage's activations are free once they are sent."""
    assert stages >= 1 and micro_batches >= 1
    lists = []
    for stage in range(stages):
        actions = [Action(Kind.GATHER)]
        for micro_batch in range(micro_batches):
            _forward(actions, stage, stages, micro_batch)
            _send_forward(actions, stage, stages, micro_batch)
        lists.append(actions)
    return lists


def _all_forwards(stage: int, stages: int, micro_batches: int) -> int:
    return micro_batches


def _one_forward_per_later_stage(stage: int, stages: int, micro_batches: int) -> int:
    return min(micro_batches, stages - 1 - stage)


def _stage_actions(stage: int, stages: int, micro_batches: int, warm_up: int) -> list[Action]:
    """``warm_up`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    actions = [Action(Kind.GATHER)]
    for micro_batch in range(warm_up):
        _forward(actions, stage, stages, micro_batch)
        _send_forward(actions, stage, stages, micro_batch)
    # In the steady state a stage meets its next neighbour between F and B (activation out, gradient in) and its
    # previous one between B and F; the lists below put those transfers side by side, which makes them one batch.
    for micro_batch in range(warm_up, micro_batches):
        _forward(actions, stage, stages, micro_batch)
        _send_forward(actions, stage, stages, micro_batch)
        _backward(actions, stage, stages, micro_batch - warm_up, micro_batches)
    for micro_batch in range(micro_batches - warm_up, micro_batches):
        _backward(actions, stage, stages, micro_batch, micro_batches)
    return actions


def _forward(actions: list[Action], stage: int, stages: int, micro_batch: int) -> None:
    if stage > 0:
        actions.append(Action(Kind.RECV_FORWARD, micro_batch, peer=stage - 1))
    actions.append(Action(Kind.FORWARD, micro_batch))


def _send_forward(actions: list[Action], stage: int, stages: int, micro_batch: int) -> None:
    if stage < stages - 1:
        actions.append(Action(Kind.SEND_FORWARD, micro_batch, peer=stage + 1))


def _backward(actions: list[Action], stage: int, stages: int, micro_batch: int, micro_batches: int) -> None:
    if stage < stages - 1:
        actions.append(Action(Kind.RECV_BACKWARD, micro_batch, peer=stage + 1))
    if micro_batch == micro_batches - 1:
        actions.append(Action(Kind.REDUCE, micro_batch))
    actions.append(Action(Kind.BACKWARD, micro_batch))
    if stage > 0:
        actions.append(Action(Kind.SEND_BACKWARD, micro_batch, peer=stage - 1))
