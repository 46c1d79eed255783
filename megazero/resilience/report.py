"""The watchdog's report: from what each rank says of itself to who waits for whom, and who is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megazero.resilience.collectives import Entered


class Statement(NamedTuple):
    """What one rank says. ``at``: where its host is, for ``seconds``; ``device``: where its GPU is, or "". ``awaits``:
    the ranks that its transfer under way is with. ``stack``: of its training thread."""

    host: str
    process: int
    at: str
    seconds: float
    device: str
    awaits: tuple[int, ...]
    groups: tuple[Entered, ...]
    stack: str


class Silence(NamedTuple):
    """A rank that did not answer: what its last sign of life said, or "" where there was none."""

    host: str
    process: int
    at: str


class Wait(NamedTuple):
    """An operation that some ranks of a group are in, and others are not."""

    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def waits(said: Mapping[int, Statement], ranks: Iterable[int]) -> list[Wait]:
    """Every operation that is waited in; those first whose missing ranks wait for nobody: there the trouble began."""
    calls: dict[tuple[str, tuple[int, ...], int], dict[int, str]] = {}
    lasts: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, statement in said.items():
        for group in statement.groups:
            lasts.setdefault((group.group, group.ranks), {})[rank] = group.last
            if group.waits:
                calls.setdefault((group.group, group.ranks, group.waits), {})[rank] = group.operation
    found = []
    for (group, members, number), operations in calls.items():
        last = lasts[group, members]
        missing = tuple(rank for rank in members if rank not in said or last.get(rank, 0) < number)
        operation = f"{next(iter(operations.values()))} (number {number}) of {group} ({spelled(members)})"
        found.append(Wait(operation, tuple(sorted(operations)), missing))
    for rank, statement in said.items():
        if statement.awaits:
            found.append(Wait(f"a transfer ({statement.at})", (rank,), statement.awaits))
    stuck = {rank for wait in found if wait.missing for rank in wait.waiting}

    def order(wait: Wait) -> tuple[bool, bool, tuple[int, ...]]:
        return not wait.missing, all(rank in stuck for rank in wait.missing), wait.waiting

    return sorted(found, key=order)


def spelled(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0 to 3, 8"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(words)}"


def report(cause: str, said: Mapping[int, Statement], silent: Mapping[int, Silence]) -> tuple[str, str]:
    """(the whole text, its summary in a line). ``cause``: what the first rank to raise the alarm saw."""
    found = waits(said, [*said, *silent])
    lines = [f"megazero watch: {cause}"]
    for wait in found:
        missing = f"; {spelled(wait.missing)} missing" if wait.missing else ""
        lines.append(f"  in {wait.operation}: {spelled(wait.waiting)} waiting{missing}")
    for rank, silence in sorted(silent.items()):
        last = f"last heard of at {silence.at}" if silence.at else "never heard of"
        lines.append(f"  {_who(rank, silence)} gave no answer: stopped, dead, or cut off; {last}")
    places: dict[tuple[str, str], list[int]] = {}
    for rank, statement in said.items():
        device = f"; its GPU at {statement.device}" if statement.device else ""
        places.setdefault((f"{statement.at}{device}", statement.host), []).append(rank)
    for (place, host), ranks in sorted(places.items(), key=lambda item: item[1]):
        seconds = min(said[rank].seconds for rank in ranks)
        lines.append(f"  {spelled(ranks)} on {host} for {seconds:.0f} s at {place}")
    lines += _stacks(said)
    summary = cause
    if found and found[0].missing:
        first = found[0]
        summary += f": {first.operation}: {spelled(first.waiting)} waiting, {spelled(first.missing)} missing"
        known = [f"rank {rank} at {said[rank].at}" for rank in first.missing if rank in said]
        summary += f" ({'; '.join(known[:4])})" if known else ""
    return "\n".join(lines) + "\n", summary


def _who(rank: int, silence: Silence) -> str:
    return f"rank {rank} ({silence.host}, process {silence.process})" if silence.host else f"rank {rank}"


def _stacks(said: Mapping[int, Statement]) -> list[str]:
    """Each stack once, with all ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, statement in said.items():
        ranks.setdefault(statement.stack, []).append(rank)
    lines = []
    for stack, where in sorted(ranks.items(), key=lambda item: item[1]):
        lines += [f"  stack of {spelled(where)}:", *("    " + line for line in stack.rstrip().splitlines())]
    return lines
