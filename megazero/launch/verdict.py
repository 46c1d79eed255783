"""How a job, or one machine's part of it, has ended."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from megazero.launch.errors import USER_ERROR

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class Cause(IntEnum):
    """How good a failure is as an explanation of all the others, the best first.

    A rank that came forward as the first ([Note: first failure]), one that died of a signal, a machine that is gone,
    a rank that ended without a word; SIGTERM is how the others are ended, so it counts least.
    """

    SAID = 0
    KILLED = 1
    LOST = 2
    SILENT = 3
    TERMINATED = 4
    NONE = 5


class Verdict(NamedTuple):
    """``message``: the job's last line, "" where there is nothing to say. ``stopped``: by a signal to the launcher.
    ``misfits``: the job cannot run on so many processes, and may on fewer."""

    code: int
    message: str = ""
    cause: Cause = Cause.NONE
    stopped: bool = False
    misfits: bool = False

    @property
    def may_be_restarted(self) -> bool:
        """Whether another start may end otherwise: not where it is done, or stopped, or the user has to mend it."""
        return self.code not in (0, USER_ERROR) and not self.stopped


def of_failures(failures: Mapping[int, ProcessFailure]) -> Verdict:
    """Which rank failed first, and why. ``failures``: by rank, of one machine.

    Of ranks with equal causes the one that ended first: who does not end when told to is killed half a minute later.
    """
    ranks = sorted(failures, key=lambda rank: (failures[rank].timestamp, rank))
    return min((_of_failure(rank, failures[rank]) for rank in ranks), key=lambda verdict: verdict.cause)


def of_machines(verdicts: Iterable[Verdict]) -> Verdict:
    """That of the whole job."""
    return min(verdicts, key=lambda verdict: (not verdict.stopped, verdict.cause))


def _of_failure(rank: int, failure: ProcessFailure) -> Verdict:
    record = failure.error_file_data.get("megazero", {})
    if record.get("first"):
        message, misfits = f"rank {rank} failed: {record['summary']}", record.get("misfits", False)
        return Verdict(record["code"], message, Cause.SAID, misfits=misfits)
    if failure.exitcode < 0:
        cause = Cause.TERMINATED if failure.exitcode == -signal.SIGTERM else Cause.KILLED
        message = f"rank {rank} (process {failure.pid}) was killed by {failure.signal_name()}"
        return Verdict(128 - failure.exitcode, message, cause)
    summary = record.get("summary") or f"exit code {failure.exitcode}"
    return Verdict(failure.exitcode, f"rank {rank} failed: {summary}", Cause.SILENT)
