"""The fastest layouts of a model on a number of GPUs: all that the rules allow, less what does not fit, timed.

ZeRO stages and recompute form ladders: a higher rung takes less memory and never less time. Of each choice of tp, pp,
virtual stages and micro-batch size only the lowest rungs that fit are timed. Stage 0 is not asked where dp is more than
1: it moves what stage 1 moves and holds more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megazero.config import Config
from megazero.config_rules import divisors
from megazero.errors import ConfigError
from megazero.layout import Layout
from megazero.models.parameters import flops_per_token
from megazero.planner.chips import Chip
from megazero.planner.compute import Machine
from megazero.planner.many import Memories
from megazero.planner.memory import RankMemory, rank_memory
from megazero.planner.step_time import StepModel, StepTime, balanced_counts
from megazero.planner.traffic import check_planned
from megazero.zero.offload.settings import Offload

RECOMPUTE = ("none", "selective", "full")
LARGEST_MICRO_BATCH = 64
MOST_VIRTUAL = 16
NOISE = 0.98


class Choice(NamedTuple):
    """One point of the search; ``virtual``: stages of the model per pipeline rank."""

    tp: int
    pp: int
    virtual: int
    dp: int
    zero: int
    micro_batch: int
    recompute: str

    def __str__(self) -> str:
        virtual = f" x {self.virtual} virtual" if self.virtual > 1 else ""
        return (
            f"tp={self.tp} pp={self.pp}{virtual} dp={self.dp} zero={self.zero} micro-batch {self.micro_batch}, "
            f"recompute {self.recompute}"
        )


@dataclass(frozen=True)
class Plan:
    """A layout that fits. ``memory``: of the rank that needs most; ``tokens_per_second``: per GPU; ``mfu``: of the
    chip's dense peak."""

    choice: Choice
    config: Config
    memory: RankMemory
    time: StepTime
    tokens_per_second: float
    mfu: float


@dataclass(frozen=True)
class Rejection:
    """``kind``: what the choice breaks, ``memory`` or a setting's name; ``lacks``: bytes; ``reason``: for people."""

    choice: Choice
    kind: str
    reason: str
    lacks: float = 0.0


def too_large(choice: Choice, rank: int, needs: float, usable: float, what: str = "it needs") -> Rejection:
    """For memory of the device, in bytes."""
    lacks = needs - usable
    reason = f"rank {rank} lacks {lacks / 1e9:.1f} GB: {what} {needs / 1e9:.1f} of {usable / 1e9:.1f} GB"
    return Rejection(choice, "memory", reason, lacks)


@dataclass(frozen=True)
class Search:
    """``plans``: fastest first; ``fitting``: how many fit; ``rejected``: the others."""

    plans: list[Plan]
    fitting: int
    rejected: list[Rejection]


class _Lack(Enum):
    """Of memory: nothing, no more than the whole gradients take, or more."""

    NOTHING = "nothing"
    GRADIENTS = "gradients"
    MORE = "more"


class _Fit(NamedTuple):
    """A choice that fits, before it is timed. ``at_least``: seconds; ``rank``: the one that needs most memory."""

    at_least: float
    choice: Choice
    rank: int
    config: Config
    step: StepModel


def search(base: Config, gpus: int, chip: Chip, top: int = 5) -> Search:
    """The ``top`` fastest layouts of ``base``'s model, sequence and global batch on ``gpus`` of ``chip``.

    Raises ConfigError where the settings are wrong under every layout.
    """
    base = with_stage(base, least_stage(base))
    check_planned(base)
    if found := base.problems():
        raise ConfigError(found)
    searching = _Searching(base, gpus, chip)
    for shape in searching.shapes():
        searching.climb(shape)
    # What a simulation can at best give decides the order, so that few are simulated: a layout that could at best be
    # ahead by less than the model of time is right to is left out.
    timed: list[tuple[StepTime, _Fit]] = []
    for fit in sorted(searching.fits, key=lambda fit: (fit.at_least, fit.choice)):
        if len(timed) >= top and fit.at_least >= NOISE * timed[top - 1][0].seconds:
            break
        timed.append((fit.step.time(), fit))
        timed.sort(key=lambda item: (item[0].seconds, item[1].choice))
    plans = [searching.plan(time, fit) for time, fit in timed[:top]]
    return Search(plans, len(searching.fits), searching.rejected)


def least_stage(config: Config) -> int:
    """The lowest ZeRO stage that what is kept off the devices needs."""
    offload = Offload.of(config.zero)
    return 3 if offload.parameters != "none" else 1 if offload.optimizer != "none" else 0


def with_stage(config: Config, stage: int) -> Config:
    return config.model_copy(update={"zero": config.zero.model_copy(update={"stage": stage})})


class _Searching:
    def __init__(self, base: Config, gpus: int, chip: Chip) -> None:
        self.base, self.gpus, self.chip = base, gpus, chip
        self.model = base.model.architecture
        self.machine, self.memories = Machine(chip), Memories(self.model)
        self.usable, self.least = chip.usable_memory(), least_stage(base)
        self.fits: list[_Fit] = []
        self.rejected: list[Rejection] = []

    def shapes(self) -> Iterator[Choice]:
        """Every tp that cuts machines into equal parts, every pp and number of virtual stages that the rules allow; the
        rest of the choice is yet to be made."""
        for tp in divisors(math.gcd(self.gpus, min(self.gpus, self.chip.gpus_per_node))):
            if tp > self.model.num_attention_heads:
                break
            for pp in divisors(self.gpus // tp):
                if pp > self.model.num_layers:
                    break
                shape = Choice(tp, pp, 1, self.gpus // (tp * pp), max(1, self.least), 1, "none")
                if not self._breaks_rules(shape):
                    yield from (shape._replace(virtual=virtual) for virtual in self._virtual(pp))

    def _virtual(self, pp: int) -> list[int]:
        """1, 2, 4 and the most there can be, less those that cut unequally what others cut into equal stages."""
        layers = self.model.num_layers
        most = min(layers // pp, MOST_VIRTUAL) if pp > 1 else 1
        return sorted({most, *(n for n in (1, 2, 4) if n <= most and not layers % (pp * n if layers % pp == 0 else 1))})

    def climb(self, shape: Choice) -> None:
        """Keep the choices of this shape that fit and have no lower one that does, by micro-batch size.

        What does not fit does not fit with larger micro-batches either, and is not asked again. But where they become
        so few that no forward follows a backward, activations and whole gradients are no longer there together: that
        may save what a choice lacks, if it is no more than its gradients."""
        samples = self.base.train.batch_unit // shape.dp
        stages = [stage for stage in (1, 2, 3) if stage >= self.least] if shape.dp > 1 or self.least else [0]
        too_much: dict[tuple[str, int], bool] = {}  # what does not fit: whether it lacks no more than that
        for micro_batch in (size for size in range(1, LARGEST_MICRO_BATCH + 1) if samples % size == 0):
            lowest = 4
            for recompute in RECOMPUTE:
                for zero in stages:
                    if zero >= lowest:
                        break
                    choice = shape._replace(zero=zero, micro_batch=micro_batch, recompute=recompute)
                    few = self.base.train.global_batch_size // (shape.dp * micro_batch) <= 2 * shape.pp
                    if not too_much.get((recompute, zero), True) or ((recompute, zero) in too_much and not few):
                        continue
                    lacks = self._lacks(choice)
                    if lacks is _Lack.NOTHING:
                        lowest = zero
                    else:
                        too_much[recompute, zero] = lacks is _Lack.GRADIENTS

    def _breaks_rules(self, choice: Choice) -> bool:
        try:
            self.config_of(choice).validate_world(self.gpus)
        except ConfigError as error:
            field, message = error.problems[0]
            self.rejected.append(Rejection(choice, field, f"{field}: {message}"))
            return True
        return False

    def _lacks(self, choice: Choice) -> _Lack:
        """Takes the choice up where it fits, else says why not."""
        config, layout = self.config_of(choice), Layout(choice.tp, choice.pp, choice.dp)
        counts = config.parallel.partition
        state, rank = self.memories.largest_state(config, layout, counts)
        if state > self.usable:
            self._reject(choice, rank, state, "its model state alone is")
            return _Lack.MORE
        needs = self.memories.fullest(config, layout, counts)
        if needs.peak > self.usable:
            self._reject(choice, needs.rank, needs.peak)
            return _Lack.GRADIENTS if needs.peak - self.usable < needs.state.gradients else _Lack.MORE
        host, room = self.memories.host(config, layout, counts), self.chip.host.memory
        if host > room:
            reason = f"its share of host memory is {room / 1e9:.1f} GB, and it needs {host / 1e9:.1f} GB"
            self.rejected.append(Rejection(choice, "host memory", reason, host - room))
            return _Lack.MORE
        step = StepModel(config, layout, self.machine)
        self.fits.append(_Fit(step.at_least(), choice, needs.rank, config, step))
        return _Lack.NOTHING

    def _reject(self, choice: Choice, rank: int, needs: float, what: str = "it needs") -> None:
        self.rejected.append(too_large(choice, rank, needs, self.usable, what))

    def plan(self, time: StepTime, fit: _Fit) -> Plan:
        train = self.base.train
        tokens = train.global_batch_size * self.base.data.seq_length / self.gpus / time.seconds
        flops = tokens * flops_per_token(self.model, self.base.data.seq_length)
        memory = rank_memory(fit.config, self.model, fit.step.layout, fit.rank)
        return Plan(fit.choice, fit.config, memory, time, tokens, flops / self.chip.peak_flops)

    def config_of(self, choice: Choice) -> Config:
        """The settings of a choice, with the balanced partition written out."""
        counts = balanced_counts(self.model, self.base.data.seq_length, choice.pp * choice.virtual)
        base = self.base
        sections = {
            "parallel": base.parallel.model_copy(
                update={"tp": choice.tp, "pp": choice.pp, "virtual_pp": choice.virtual, "partition": counts}
            ),
            "zero": base.zero.model_copy(update={"stage": choice.zero}),
            "train": base.train.model_copy(
                update={"micro_batch_size": choice.micro_batch, "recompute": choice.recompute}
            ),
        }
        return base.model_copy(update=sections)
