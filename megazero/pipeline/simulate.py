"""Run a schedule's lists on paper: who waits for whom, and when every action starts and ends.

Every rank has a clock of its computations and, beside it, a stream of transfers per peer, which carries out the batches
with that peer in order. Rendezvous semantics, stricter than NCCL's: a batch starts once it is issued and the one before
it has ended, and ends only when the peer has started what matches its members.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megazero.pipeline.schedules import BROUGHT_BY, COMMUNICATION, SENDS, Action, Kind, Schedule, ScheduleFault, groups

Cost = Callable[[int, Action], float]
"""(rank, action) → seconds, or any unit; a batch takes as long as its longest transfer."""

_COUNTERPART = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}


class Span(NamedTuple):
    """When one action of a rank's list ran: ``start`` (of a transfer, when its batch's turn had come) and ``end``."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """``ranks[r]`` holds a span per action of rank r's list, in list order."""

    ranks: list[list[Span]]

    @property
    def duration(self) -> float:
        """From 0 to the end of the last action of any rank."""
        return max((span.end for spans in self.ranks for span in spans), default=0.0)

    def idle_fraction(self, rank: int) -> float:
        """The share of the whole duration in which the rank computes nothing."""
        busy = sum(s.end - s.start for s in self.ranks[rank] if s.action.kind not in COMMUNICATION)
        return 1 - busy / self.duration

    @property
    def bubble_fraction(self) -> float:
        """Mean idle share over ranks."""
        return sum(self.idle_fraction(r) for r in range(len(self.ranks))) / len(self.ranks)


class _Post(NamedTuple):
    """One transfer under way: its place in the rank's list, and when its batch started."""

    index: int
    action: Action
    time: float


class _Stream:
    """A rank's batches with one peer: (index, actions, when issued) of those to come, the first one under way where
    ``matches`` is not empty: the places of its members' counterparts among what the peer has started.

    ``time``: when the one under way started, or the last one ended.
    """

    def __init__(self) -> None:
        self.batches: deque[tuple[int, Sequence[Action], float]] = deque()
        self.matches: list[tuple[_Key, int]] = []
        self.time = 0.0


class _Rank:
    """How far one rank is: in its computations, and with each peer."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.groups = list(groups(actions))
        self.place, self.clock = 0, 0.0
        self.streams: dict[int | None, _Stream] = defaultdict(_Stream)
        self.receives = {(a.kind, a.micro_batch, a.chunk) for a in actions if a.kind in COMMUNICATION - SENDS}
        self.arrived: dict[tuple[Kind, int | None, int], float] = {}
        self.spans: list[Span | None] = [None] * len(actions)

    @property
    def waiting(self) -> list[_Stream]:
        return [stream for stream in self.streams.values() if stream.batches]

    @property
    def done(self) -> bool:
        return self.place == len(self.groups) and not self.waiting


_Key = tuple[int, int, bool]
"""(from, to, is a send): transfers carry no tag, so the k-th send meets the k-th receive."""


class _Simulation:
    """State of a run: each rank's, and what was started of each kind between each two."""

    def __init__(self, schedule: Schedule, cost: Cost) -> None:
        self.schedule, self.cost = schedule, cost
        self.ranks = [_Rank(actions) for actions in schedule]
        self.posts: dict[_Key, list[_Post]] = defaultdict(list)

    def run(self) -> None:
        ready = deque(range(len(self.schedule)))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        stuck = [number for number, rank in enumerate(self.ranks) if not rank.done]
        if stuck:
            waits = {number: self._unmet(number) for number in stuck}
            lines = [f"rank {number} at action {index} ({action})" for number, (index, action) in waits.items()]
            index, action = waits[stuck[0]]
            raise ScheduleFault(stuck[0], index, f"deadlock: {action} is never met; waiting: {'; '.join(lines)}")

    def _advance(self, number: int) -> set[int]:
        """Run a rank until it waits or ends; returns the ranks that what it started may have freed."""
        rank, touched = self.ranks[number], set()
        moved = True
        while moved:
            for stream in rank.waiting:
                self._transfer(number, stream, touched)
            moved = False
            while rank.place < len(rank.groups):
                index, actions = rank.groups[rank.place]
                if actions[0].kind in COMMUNICATION:
                    rank.streams[actions[0].peer].batches.append((index, actions, rank.clock))
                elif not self._compute(number, index, actions[0]):
                    break
                rank.place, moved = rank.place + 1, True
        return touched

    def _compute(self, number: int, index: int, action: Action) -> bool:
        """Whether the action's input is there, so that it is done."""
        rank, kind = self.ranks[number], BROUGHT_BY.get(action.kind)
        if kind is not None and (needed := (kind, action.micro_batch, action.chunk)) in rank.receives:
            if needed not in rank.arrived:
                return False
            rank.clock = max(rank.clock, rank.arrived[needed])
        start, rank.clock = rank.clock, rank.clock + self.cost(number, action)
        rank.spans[index] = Span(action, start, rank.clock)
        return True

    def _transfer(self, number: int, stream: _Stream, touched: set[int]) -> None:
        """Start and end batches as far as the peer is."""
        rank = self.ranks[number]
        while stream.batches:
            index, actions, issued = stream.batches[0]
            if not stream.matches:
                stream.time = max(stream.time, issued)
                self._start(number, stream, index, actions)
                touched.add(actions[0].peer)
            if any(position >= len(self.posts[key]) for key, position in stream.matches):
                return
            started = max(self.posts[key][position].time for key, position in stream.matches)
            end = max(started, stream.time) + max(self.cost(number, a) for a in actions)
            for offset, action in enumerate(actions):
                rank.spans[index + offset] = Span(action, stream.time, end)
                rank.arrived[action.kind, action.micro_batch, action.chunk] = end
            stream.batches.popleft()
            stream.matches, stream.time = [], end

    def _start(self, number: int, stream: _Stream, index: int, actions: Sequence[Action]) -> None:
        for offset, action in enumerate(actions):
            peer = action.peer
            if peer is None or not 0 <= peer < len(self.schedule) or peer == number:
                raise ScheduleFault(number, index + offset, f"{action}: there is no such peer")
            is_send = action.kind in SENDS
            queue = self.posts[number, peer, is_send]
            queue.append(_Post(index + offset, action, stream.time))
            stream.matches.append(((peer, number, not is_send), len(queue) - 1))
            self._compare(number, queue[-1], self.posts[peer, number, not is_send], len(queue) - 1)

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

    def _unmet(self, number: int) -> tuple[int, Action]:
        """The first transfer that a rank waits for, or the computation whose input no transfer brings."""
        rank = self.ranks[number]
        unmet = [
            (stream.batches[0][0] + offset, stream.batches[0][1][offset])
            for stream in rank.waiting
            for offset, (key, position) in enumerate(stream.matches)
            if position >= len(self.posts[key])
        ]
        if unmet:
            return min(unmet)
        index, actions = rank.groups[rank.place]
        return index, actions[0]


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """Time every action; all ranks start at 0.

    Raises ScheduleFault where ranks wait for each other for ever, or where a transfer meets one of another
    micro-batch or direction.
    """
    simulation = _Simulation(schedule, cost)
    simulation.run()
    return Timeline([[span for span in rank.spans if span is not None] for rank in simulation.ranks])


def compute_cost(forward: float, backward: float, weight: float = 0.0) -> Cost:
    """The cost of equal stages whose transfers take no time. ``weight``: of the weights' part of a backward in two
    parts, ``backward`` is then that of the other one."""
    durations = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.BACKWARD_INPUT: backward,
        Kind.BACKWARD_WEIGHT: weight,
    }
    return lambda rank, action: durations.get(action.kind, 0.0)
