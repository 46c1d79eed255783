"""One rank's actions, proven before they are used; made when they are first asked for."""

from __future__ import annotations

from megazero.pipeline.checker import check_evaluation_schedule, check_schedule
from megazero.pipeline.schedules import Action, ScheduleName, activation_bound, build_schedule, evaluation_schedule


class RankSchedules:
    """Those of pipeline rank ``rank`` of ``stages``, with ``chunks`` of the model each."""

    def __init__(self, name: ScheduleName, stages: int, chunks: int, rank: int) -> None:
        self._name, self._stages, self._chunks, self._rank = name, stages, chunks, rank
        self._training: dict[int, list[Action]] = {}
        self._evaluation: dict[int, list[Action]] = {}

    def training(self, micro_batches: int) -> list[Action]:
        """Of a step of so many micro-batches."""
        if micro_batches not in self._training:
            schedule = build_schedule(self._name, self._stages, micro_batches, self._chunks)
            bounds = [
                activation_bound(self._name, self._stages, micro_batches, stage, self._chunks)
                for stage in range(self._stages)
            ]
            check_schedule(schedule, micro_batches, bounds, self._chunks)
            self._training[micro_batches] = schedule[self._rank]
        return self._training[micro_batches]

    def evaluation(self, micro_batches: int) -> list[Action]:
        """Of as many forwards."""
        if micro_batches not in self._evaluation:
            schedule = evaluation_schedule(self._stages, micro_batches, self._chunks)
            check_evaluation_schedule(schedule, micro_batches, self._chunks)
            self._evaluation[micro_batches] = schedule[self._rank]
        return self._evaluation[micro_batches]
