"""A restart on the machines that are left, where the user allows fewer than there were.

dp shrinks and each process does more of the same global batch. How many machines a layout fits only the job itself can
say (it knows tp, pp and the batch), so it is asked by starting it: one that does not fit ends before any work.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from megazero.launch.cluster import Reach
from megazero.launch.hosts import Host
from megazero.launch.verdict import Cause, Verdict

_PATIENCE = 60.0
"""Seconds that a machine has to answer."""

Answers = Callable[[Host], bool]


def answering(reach: Reach) -> Answers:
    """Whether a command can be run on a machine."""

    def answers(host: Host) -> bool:
        if host.is_here:
            return True
        try:
            words = [*reach(host), "true"]
            return not subprocess.run(
                words, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE
            ).returncode
        except (OSError, subprocess.SubprocessError):
            return False

    return answers


def restart(
    hosts: Sequence[Host],
    least: int,
    answers: Answers,
    start: Callable[[Sequence[Host]], Verdict],
    say: Callable[[str], None],
) -> Verdict:
    """Start the job on the first of the machines that answer: on as many as its layout fits, and no fewer than
    ``least``. A start that finds too few may be tried again: machines come back."""
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        left = [host for host, there in zip(hosts, pool.map(answers, hosts), strict=True) if there]
    if len(left) == len(hosts):
        return start(hosts)
    gone = ", ".join(host.name for host in hosts if host not in left)
    found = f"{gone}: no answer; {len(left)} of {len(hosts)} machines are left"
    if len(left) < least:
        return Verdict(1, f"{found}, and --min_nodes is {least}", Cause.LOST)
    say(f"{found} (--min_nodes {least})")
    first: Verdict | None = None
    for count in range(len(left), least - 1, -1):
        verdict = start(left[:count])
        if not verdict.misfits:
            return verdict
        say(f"not on {count}: {verdict.message}")
        first = first or verdict
    assert first is not None
    return Verdict(1, f"{found}, and the job fits none of {least} to {len(left)}: {first.message}", Cause.LOST)
