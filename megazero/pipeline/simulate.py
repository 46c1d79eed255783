"""Run a schedule's lists on paper: who waits for whom, and when every action starts and ends.

Rendezvous semantics, stricter than NCCL's: a batch completes only when the matching transfers of all its
members have been posted by their peers, and a rank does nothing else until then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megazero.pipeline.schedules import COMMUNICATION, SENDS, Action, Kind, Schedule, ScheduleFault, groups

Cost = Callable[[int, Action], float]
"""(rank, action) → seconds, or any unit; a batch takes as long as its longest transfer."""

_COUNTERPART = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}


class Span(NamedTuple):
    """When one action of a rank's list ran: ``start`` (for a transfer, when it was posted) and ``end``."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """``ranks[r]`` holds a span per action of rank r's list, in list order."""

    ranks: list[list[Span]]

    @property
    def duration(self) -> float:
        """From 0 to the end of the last action of any rank."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    def idle_fraction(self, rank: int) -> float:
        """The share of the whole duration in which the rank computes nothing."""
        busy = sum(s.end - s.start for s in self.ranks[rank] if s.action.kind not in COMMUNICATION)
        return 1 - busy / self.duration

    @property
    def bubble_fraction(self) -> float:
        """Mean idle share over ranks."""
        return sum(self.idle_fraction(r) for r in range(len(self.ranks))) / len(self.ranks)


class _Post(NamedTuple):
    """One posted transfer: its place in the rank's list, and when its batch was posted."""

    index: int
    action: Action
    time: float


class _Simulation:
    """State of a run: per rank a place in its list and a clock; per (from, to, direction) what was posted."""

    def __init__(self, schedule: Schedule, cost: Cost) -> None:
        self.schedule, self.cost = schedule, cost
        self.groups = [list(groups(actions)) for actions in schedule]
        self.place = [0] * len(schedule)
        self.clock = [0.0] * len(schedule)
        self.spans: list[list[Span]] = [[] for _ in schedule]
        # posts[owner, peer, is_send]: transfers carry no tag, so the k-th send meets the k-th receive.
        self.posts: dict[tuple[int, int, bool], list[_Post]] = defaultdict(list)
        self.pending: list[list[tuple[tuple[int, int, bool], int]] | None] = [None] * len(schedule)

    def run(self) -> None:
        ready = deque(range(len(self.schedule)))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        stuck = [r for r in range(len(self.schedule)) if self.place[r] < len(self.groups[r])]
        if stuck:
            lines = [f"rank {r} at action {self._unmet(r)[0]} ({self._unmet(r)[1]})" for r in stuck]
            index, action = self._unmet(stuck[0])
            raise ScheduleFault(stuck[0], index, f"deadlock: {action} is never met; waiting: {'; '.join(lines)}")

    def _advance(self, rank: int) -> set[int]:
        """Run ``rank`` until it waits or ends; returns the ranks that its new posts may have freed."""
        touched: set[int] = set()
        while self.place[rank] < len(self.groups[rank]):
            index, actions = self.groups[rank][self.place[rank]]
            if actions[0].kind not in COMMUNICATION:
                end = self.clock[rank] + self.cost(rank, actions[0])
                self.spans[rank].append(Span(actions[0], self.clock[rank], end))
            else:
                if self.pending[rank] is None:
                    self._post(rank, index, actions)
                    touched.update(a.peer for a in actions if a.peer is not None)
                met = self._met(rank)
                if met is None:
                    break
                end = max(met, self.clock[rank]) + max(self.cost(rank, a) for a in actions)
                self.spans[rank].extend(Span(a, self.clock[rank], end) for a in actions)
                self.pending[rank] = None
            self.clock[rank] = end
            self.place[rank] += 1
        return touched

    def _post(self, rank: int, index: int, actions: Sequence[Action]) -> None:
        pending = []
        for offset, action in enumerate(actions):
            if action.peer is None or not 0 <= action.peer < len(self.schedule) or action.peer == rank:
                raise ScheduleFault(rank, index + offset, f"{action}: there is no such peer")
            is_send = action.kind in SENDS
            queue = self.posts[rank, action.peer, is_send]
            queue.append(_Post(index + offset, action, self.clock[rank]))
            pending.append(((action.peer, rank, not is_send), len(queue) - 1))
            self._compare(rank, queue[-1], self.posts[action.peer, rank, not is_send], len(queue) - 1)
        self.pending[rank] = pending

    def _compare(self, rank: int, post: _Post, counterparts: list[_Post], position: int) -> None:
        if position >= len(counterparts):
            return
        other = counterparts[position]
        ours = (_COUNTERPART[post.action.kind], post.action.micro_batch, self._edge(rank, post.action))
        theirs = (other.action.kind, other.action.micro_batch, self._edge(post.action.peer, other.action))
        if ours != theirs:
            reason = f"{post.action} meets rank {post.action.peer}'s action {other.index}, {other.action}"
            raise ScheduleFault(rank, post.index, reason)

    def _edge(self, rank: int, action: Action) -> int:
        """The boundary between stages that a transfer crosses, by the stage before it."""
        stage = action.chunk * len(self.schedule) + rank
        return stage - (action.kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD))

    def _met(self, rank: int) -> float | None:
        """When the last counterpart of the rank's batch was posted, or None where one is still missing."""
        times = []
        for key, position in self.pending[rank] or ():
            if position >= len(self.posts[key]):
                return None
            times.append(self.posts[key][position].time)
        return max(times)

    def _unmet(self, rank: int) -> tuple[int, Action]:
        index, actions = self.groups[rank][self.place[rank]]
        for offset, (key, position) in enumerate(self.pending[rank] or ()):
            if position >= len(self.posts[key]):
                return index + offset, actions[offset]
        raise AssertionError("a rank that waits has a transfer that is not met")


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """Time every action; all ranks start at 0.

    Raises ScheduleFault where ranks wait for each other for ever, or where a transfer meets one of another
    micro-batch or direction.
    """
    simulation = _Simulation(schedule, cost)
    simulation.run()
    return Timeline(simulation.spans)


def compute_cost(forward: float, backward: float) -> Cost:
    """The cost of equal stages whose transfers take no time."""
    durations = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    return lambda rank, action: durations.get(action.kind, 0.0)
