"""Pipeline schedules as data: for every rank, the list of actions it takes in one step.

Pure Python. The executor obeys these lists, the checker proves them, the simulator times them and the
planner and the timeline draw from them; none of the four knows a schedule by name.

What a list means
-----------------
Computations happen in list order. A maximal run of consecutive transfers of one slot with one peer is a *batch*
(`groups` yields them): its members are issued together, as a group, once the computations listed before them are done.
A rank's batches with one peer are carried out in order, beside its computations and beside its batches with other
peers; the k-th of a rank with a peer holds the other ends of the peer's k-th with the rank. A batch is waited for only
by what uses a tensor that it receives: a forward its input, a backward the gradient of its output. Nothing waits for a
send.

[Note: no deadlock]
`build_schedule` lists both ends of a transfer at one moment, the end of the slot in which its tensor is made, and
what two ranks exchange in one slot is a batch on both. So of all that is not done, what stands in the earliest slot has
everything before it on both sides, computations and batches, and can go on. That holds where sends wait for their
receives, and where the host waits in the issue of a batch until the peer issues its end, as NCCL does both, the latter
when it connects two ranks; and where the first launch of a kernel waits for all that the device was given before. It
needs no more than a stream per pair of ranks. Streams shared by several pairs would let a
rank's late receive hold up its sends: with backwards of twice the time of forwards the interleaved schedule then waits
up to two and a half times as long as the formula says.

``GATHER`` is first in every list: from there on the stage's parameters must be usable. At stages 0 to 2 it
is where the all-gather of the parameters that the last update changed is waited for or overlapped with
forward; at stage 3 it allows the first prefetch. ``REDUCE`` stands directly before the ``BACKWARD`` whose
gradients complete the accumulation, the last one of the chunk: block by block, as that backward finishes a
block, the block's accumulated gradient may be reduced over the data-parallel ranks. No gradient of the
chunk changes after that backward.

A rank holds one chunk of the model or several: chunk c of rank r is stage c * ranks + r of the model. Backward takes
a chunk's micro-batches in ascending order in every schedule, so gradients accumulate in one order whatever the layout.

``BACKWARD`` may be two actions: ``BACKWARD_INPUT`` makes the gradient of the chunk's input, which the stage before
waits for, and ``BACKWARD_WEIGHT``, any time later, those of its weights. ``REDUCE`` then stands before the last of
these. An activation is held from its forward to the end of its backward, of both parts where there are two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class Kind(Enum):
    """What an action does; ``FORWARD`` transfers carry activations, ``BACKWARD`` ones their gradients."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"
    REDUCE = "reduce"
    GATHER = "gather"


COMMUNICATION = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})

BROUGHT_BY = {
    Kind.FORWARD: Kind.RECV_FORWARD,
    Kind.BACKWARD: Kind.RECV_BACKWARD,
    Kind.BACKWARD_INPUT: Kind.RECV_BACKWARD,
}
"""Which transfer brings what a computation uses, where it is not on its own rank."""


class Action(NamedTuple):
    """One entry of a rank's list.

    ``micro_batch`` is None for ``GATHER`` only. ``chunk`` numbers the model chunks this rank holds (always 0
    where a rank holds one). ``peer`` is the other pipeline rank of a transfer, and ``slot`` says when it is issued, by
    the same number on both ends; both are None for the rest.
    """

    kind: Kind
    micro_batch: int | None = None
    chunk: int = 0
    peer: int | None = None
    slot: int | None = None

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
    """(index of the first action, actions): each batch of transfers whole, every other action alone."""
    start = 0
    while start < len(actions):
        end = start + 1
        if actions[start].kind in COMMUNICATION:
            together = actions[start][-2:]  # peer and slot
            while end < len(actions) and actions[end].kind in COMMUNICATION and actions[end][-2:] == together:
                end += 1
        yield start, tuple(actions[start:end])
        start = end


def build_schedule(name: ScheduleName, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Each rank's actions for one training step; ``stages`` ranks and ``micro_batches``, any number from 1 up.

    ``gpipe``: all forwards, then all backwards (Huang et al. 2019, section 2.3, with backward ascending).
    ``1f1b``: after a warm-up of one forward per later stage, one forward and one backward in turn
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2, "PipeDream-Flush").
    ``interleaved``: 1F1B over ``chunks`` chunks per rank, 2 or more, in groups of as many micro-batches as there are
    ranks (the same section, "schedule with interleaved stages"); a last group of fewer leaves ranks waiting.
    ``zero_bubble``: 1F1B with backward in two parts, the weights' put off into what was idle time (Qi et al. 2023,
    arXiv 2401.10241, section 2.3, "ZB-H1").
    """
    assert stages >= 1 and micro_batches >= 1 and chunks >= 1
    assert (name == "interleaved") == (chunks > 1) and (chunks == 1 or stages > 1), (name, stages, chunks)
    bounds = [activation_bound(name, stages, micro_batches, stage, chunks) for stage in range(stages)]
    forwards, backwards = forward_order(stages, micro_batches, chunks), backward_order(stages, micro_batches, chunks)
    if name != "zero_bubble":
        return _Slots(stages, chunks, forwards, backwards, bounds).run()
    warm_up = [activation_bound("1f1b", stages, micro_batches, stage) for stage in range(stages)]
    return _Slots(stages, chunks, forwards, backwards, warm_up, bounds).run()


def activation_bound(name: ScheduleName, stages: int, micro_batches: int, stage: int, chunks: int = 1) -> int:
    """Most activations that rank ``stage`` may hold at once, the running ones included, each those of one micro-batch
    in one chunk."""
    warm_up = {
        "gpipe": micro_batches - 1,
        "1f1b": stages - 1 - stage,
        "interleaved": (chunks - 1) * min(stages, micro_batches) + 2 * (stages - 1 - stage),
        "zero_bubble": stages - 1,  # on every rank as on the first of 1F1B
    }
    return min(chunks * micro_batches, warm_up[name] + 1)


def evaluation_schedule(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Each rank's actions for forward only; a stage's activations are free once they are sent."""
    assert stages >= 1 and micro_batches >= 1 and (chunks == 1 or stages > 1)
    bounds = [chunks * micro_batches] * stages
    return _Slots(stages, chunks, forward_order(stages, micro_batches, chunks), [], bounds).run()


Pass = tuple[int, int]
"""(micro-batch, chunk): what one forward, or one backward, runs."""


def forward_order(stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """Every rank's forwards: a group of up to ``stages`` micro-batches through one chunk after the other."""
    groups = [range(i, min(i + stages, micro_batches)) for i in range(0, micro_batches, stages)]
    return [(micro_batch, chunk) for group in groups for chunk in range(chunks) for micro_batch in group]


def backward_order(stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """As ``forward_order``, the chunks of a group from the last to the first."""
    return [(i, chunks - 1 - chunk) for i, chunk in forward_order(stages, micro_batches, chunks)]


class _Slots:
    """The schedule that comes of doing on every rank, slot by slot, what is next and can be done.

    In a slot each rank computes one pass or waits: a forward where its input is there and fewer than ``ahead`` wait for
    their backward, else a backward where its gradient is there. Forwards go in the order ``forwards``, backwards in
    that of ``backwards``. What is computed in a slot is sent, and received, at its end. With ``held``, backwards are in
    two parts: the weights' have a slot of their own where there is nothing else to do, and no forward is taken up
    where already so many wait for theirs.

    It cannot get stuck. Of the ranks whose next backward comes first in the order, let r be the last one: its gradient
    is there, so that it waits for its own forward; that comes at most (chunks - 1) * (the size of the group) forwards
    later in the order than there are backwards done, which is within r's bound. So r waits for another forward's
    output: one of a rank as far behind, which waits for the same reason, or can go on.
    """

    def __init__(
        self,
        stages: int,
        chunks: int,
        forwards: Sequence[Pass],
        backwards: Sequence[Pass],
        ahead: Sequence[int],
        held: Sequence[int] | None = None,
    ) -> None:
        self.stages, self.last = stages, stages * chunks - 1
        self.forwards, self.backwards, self.ahead, self.held = forwards, backwards, ahead, held
        self.last_micro_batch = forwards[-1][0]
        self.slot = 0
        self.lists: Schedule = [[Action(Kind.GATHER)] for _ in range(stages)]
        self.forwards_done, self.backwards_done, self.weights_done = ([0] * stages for _ in range(3))
        # (stage of the model, micro-batch) of inputs and of gradients that are there.
        self.inputs = {(0, i) for i, _ in forwards}
        self.gradients: set[tuple[int, int]] = set()

    def run(self) -> Schedule:
        left = self.stages * (len(self.forwards) + len(self.backwards) * (1 if self.held is None else 2))
        while left:
            computed = [(rank, action) for rank in range(self.stages) if (action := self._next(rank)) is not None]
            assert computed, "no rank can go on"
            left -= len(computed)
            sent = [self._compute(rank, action) for rank, action in computed]
            received = [(peer, action) for peer, action in sent if action is not None]
            # What a rank exchanges with one peer stands side by side, so that it is one batch.
            to = {action.peer: peer for peer, action in received}
            for peer, action in sorted(received, key=lambda each: to.get(each[0]) != each[1].peer):
                self.lists[peer].append(action)
            self.slot += 1
        return self.lists

    def _next(self, rank: int) -> Action | None:
        forwards, backwards, weights = self.forwards_done[rank], self.backwards_done[rank], self.weights_done[rank]
        held = self.held is not None and forwards - weights == self.held[rank]
        if forwards < len(self.forwards) and forwards - backwards < self.ahead[rank] and not held:
            micro_batch, chunk = self.forwards[forwards]
            if (chunk * self.stages + rank, micro_batch) in self.inputs:
                return Action(Kind.FORWARD, micro_batch, chunk)
        if backwards < len(self.backwards):
            micro_batch, chunk = self.backwards[backwards]
            if (chunk * self.stages + rank, micro_batch) in self.gradients:
                return Action(Kind.BACKWARD if self.held is None else Kind.BACKWARD_INPUT, micro_batch, chunk)
        if self.held is not None and weights < backwards:
            return Action(Kind.BACKWARD_WEIGHT, *self.backwards[weights])
        return None

    def _compute(self, rank: int, action: Action) -> tuple[int, Action | None]:
        """List what a rank does in this slot, and the send of what it makes: to whom, and what is received there."""
        micro_batch, chunk = action.micro_batch, action.chunk
        actions, stage = self.lists[rank], chunk * self.stages + rank
        forward = action.kind is Kind.FORWARD
        done = {Kind.FORWARD: self.forwards_done, Kind.BACKWARD_WEIGHT: self.weights_done}
        done.get(action.kind, self.backwards_done)[rank] += 1
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) and micro_batch == self.last_micro_batch:
            actions.append(Action(Kind.REDUCE, micro_batch, chunk))
        actions.append(action)
        if action.kind is Kind.BACKWARD_WEIGHT:
            return rank, None
        if forward and stage == self.last:
            self.gradients.add((stage, micro_batch))  # that of the loss is 1
            return rank, None
        receiver = stage + 1 if forward else stage - 1
        if receiver < 0:
            return rank, None
        (self.inputs if forward else self.gradients).add((receiver, micro_batch))
        peer = receiver % self.stages
        send = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
        actions.append(Action(send, micro_batch, chunk, peer, self.slot))
        receive = Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD
        return peer, Action(receive, micro_batch, receiver // self.stages, rank, self.slot)
