"""Proof that a schedule can run and computes what a step must: cheap enough to run before every training.

For the given lists it shows that no rank waits for ever (under the rendezvous semantics of `simulate`, so
under any weaker ones too), that every micro-batch is computed once and in order on every stage, that
transfers match, batch by batch, and that no stage holds more activations than was promised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megazero.pipeline.schedules import COMMUNICATION, SENDS, Action, Kind, Schedule, ScheduleFault, groups
from megazero.pipeline.simulate import simulate


def check_schedule(schedule: Schedule, micro_batches: int, bounds: Sequence[int], chunks: int = 1) -> None:
    """Prove a training schedule; ``bounds[r]`` is the most micro-batches that rank r may hold at once.

    With several ``chunks`` per rank, chunk c of rank r is stage c * ranks + r of the model, and a held
    micro-batch counts once per chunk. Raises ScheduleFault with the rank, the action's index and the reason.
    """
    _check(schedule, micro_batches, bounds, chunks, training=True)


def check_evaluation_schedule(schedule: Schedule, micro_batches: int, chunks: int = 1) -> None:
    """Prove a forward-only schedule. Raises ScheduleFault."""
    _check(schedule, micro_batches, [chunks * micro_batches] * len(schedule), chunks, training=False)


def _check(schedule: Schedule, micro_batches: int, bounds: Sequence[int], chunks: int, training: bool) -> None:
    for rank, actions in enumerate(schedule):
        _RankCheck(rank, len(schedule), micro_batches, bounds[rank], chunks, training).run(actions)
    simulate(schedule, lambda rank, action: 1.0)
    _check_batches(schedule)


def _check_batches(schedule: Schedule) -> None:
    """Show that two ranks have as many batches with each other, each as many sends of one as receives of the other.

    Where one rank's batch is two on the other, the host may wait for ever: in issuing it, for the second to be issued.
    """
    batches: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for rank, actions in enumerate(schedule):
        for index, batch in groups(actions):
            if batch[0].kind in COMMUNICATION:
                sends = sum(action.kind in SENDS for action in batch)
                batches[rank, batch[0].peer].append((index, sends, len(batch) - sends))
    for (rank, peer), own in batches.items():
        other = batches[peer, rank]
        for place, (index, sends, receives) in enumerate(own):
            if other[place : place + 1] and other[place][1:] == (receives, sends):
                continue
            reason = f"its batch {place} with rank {peer}, from {schedule[rank][index]} on, is not one batch there"
            raise ScheduleFault(rank, index, reason)


class _RankCheck:
    """What one rank's list must satisfy alone; `done` is the set of (kind, chunk, micro-batch) so far."""

    def __init__(self, rank: int, ranks: int, micro_batches: int, bound: int, chunks: int, training: bool) -> None:
        self.rank, self.ranks, self.micro_batches = rank, ranks, micro_batches
        self.bound, self.chunks, self.training = bound, chunks, training
        self.split = False  # whether backward is in two parts
        self.done: set[tuple[Kind, int, int]] = set()
        self.counts: dict[tuple[Kind, int], int] = {}
        self.live = 0

    def run(self, actions: Sequence[Action]) -> None:
        self.split = any(action.kind is Kind.BACKWARD_INPUT for action in actions)
        if not actions or actions[0].kind is not Kind.GATHER:
            self._fail(0, "the list must start with gather")
        for index, action in enumerate(actions):
            if action.kind is Kind.GATHER:
                if index:
                    self._fail(index, "gather stands at the start only")
                continue
            self._check_fields(index, action)
            if action.kind is Kind.REDUCE:
                self._check_reduce(index, action, actions)
            else:
                self._check_needs(index, action)
                self._check_order(index, action)
            assert action.micro_batch is not None
            self.done.add((action.kind, action.chunk, action.micro_batch))
            self._check_live(index, action)
        self._check_complete(len(actions))

    def _fail(self, index: int, reason: str) -> None:
        raise ScheduleFault(self.rank, index, reason)

    @property
    def _last_kind(self) -> Kind:
        """The computation that is a micro-batch's last in a chunk."""
        return Kind.BACKWARD_WEIGHT if self.split else Kind.BACKWARD

    def _stage(self, chunk: int) -> int:
        return chunk * self.ranks + self.rank

    def _kinds(self, chunk: int) -> list[Kind]:
        """What must be done for every micro-batch of this chunk."""
        first, last = (self._stage(chunk) == 0, self._stage(chunk) == self.ranks * self.chunks - 1)
        kinds = [Kind.FORWARD]
        kinds += [] if first else [Kind.RECV_FORWARD]
        kinds += [] if last else [Kind.SEND_FORWARD]
        if self.training:
            kinds += [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if self.split else [Kind.BACKWARD]
            kinds += [] if first else [Kind.SEND_BACKWARD]
            kinds += [] if last else [Kind.RECV_BACKWARD]
        return kinds

    def _check_fields(self, index: int, action: Action) -> None:
        if action.micro_batch is None or not 0 <= action.micro_batch < self.micro_batches:
            self._fail(index, f"{action}: micro-batches are 0 to {self.micro_batches - 1}")
        if not 0 <= action.chunk < self.chunks:
            self._fail(index, f"{action}: chunks are 0 to {self.chunks - 1}")
        if action.kind is Kind.REDUCE and self.training:
            return
        if action.kind not in self._kinds(action.chunk):
            self._fail(index, f"{action}: this stage has none")
        if action.kind in COMMUNICATION:
            step = 1 if action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD) else -1
            peer = (self._stage(action.chunk) + step) % self.ranks
            if action.peer != peer:
                self._fail(index, f"{action}: the neighbouring stage is on rank {peer}")

    def _check_needs(self, index: int, action: Action) -> None:
        """What must stand earlier in this list: a forward needs its input, a send its result, and so on."""
        needs = {
            Kind.FORWARD: [Kind.RECV_FORWARD],
            Kind.SEND_FORWARD: [Kind.FORWARD],
            Kind.RECV_BACKWARD: [Kind.SEND_FORWARD],
            Kind.BACKWARD: [Kind.FORWARD, Kind.RECV_BACKWARD],
            Kind.BACKWARD_INPUT: [Kind.FORWARD, Kind.RECV_BACKWARD],
            Kind.BACKWARD_WEIGHT: [Kind.BACKWARD_INPUT],
            Kind.SEND_BACKWARD: [Kind.BACKWARD_INPUT if self.split else Kind.BACKWARD],
        }
        for kind in needs.get(action.kind, []):
            needed = kind in self._kinds(action.chunk)
            if needed and (kind, action.chunk, action.micro_batch) not in self.done:
                self._fail(index, f"{action} comes before its {kind.value}")

    def _check_order(self, index: int, action: Action) -> None:
        expected = self.counts.get((action.kind, action.chunk), 0)
        if action.micro_batch != expected:
            self._fail(index, f"{action}: micro-batch {expected} is next")
        self.counts[action.kind, action.chunk] = expected + 1

    def _check_reduce(self, index: int, action: Action, actions: Sequence[Action]) -> None:
        backward = action._replace(kind=self._last_kind)
        if index + 1 >= len(actions) or actions[index + 1] != backward:
            self._fail(index, f"{action} must stand directly before {backward}")
        if action.micro_batch != self.micro_batches - 1:
            self._fail(index, f"{action}: only the last backward completes the gradients")

    def _check_live(self, index: int, action: Action) -> None:
        if not self.training:
            return
        self.live += (action.kind is Kind.FORWARD) - (action.kind is self._last_kind)
        if self.live > self.bound:
            self._fail(
                index, f"{action}: holds the activations of {self.live} micro-batches, the bound is {self.bound}"
            )

    def _check_complete(self, length: int) -> None:
        for chunk in range(self.chunks):
            for kind in self._kinds(chunk):
                count = self.counts.get((kind, chunk), 0)
                if count != self.micro_batches:
                    reason = f"the list ends with {count} of {self.micro_batches} micro-batches done: {kind.value}"
                    self._fail(length, reason)
            if self.training and (Kind.REDUCE, chunk, self.micro_batches - 1) not in self.done:
                self._fail(length, f"the list ends without a reduce for chunk {chunk}")
