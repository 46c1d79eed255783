"""The engine: one rank's part of a training run, from settings to steps, evaluations and checkpoints."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megazero import restore
from megazero.build import DTYPES, attention_backends, build_stage, precision_on
from megazero.config import Config
from megazero.course import Course
from megazero.divergence import find_divergence, roll_back
from megazero.errors import ConfigError, DivergenceError
from megazero.launch.devices import gpu_of
from megazero.launch.environment import ProcessEnvironment, process_environment
from megazero.launch.rendezvous import own_store
from megazero.optim.schedule import learning_rate
from megazero.optim.step import OptimizerStep, StepSums
from megazero.pipeline.executor import Executor
from megazero.pipeline.p2p import Transfers, neighbour_groups
from megazero.pipeline.rank_schedules import RankSchedules
from megazero.pipeline.schedules import Action
from megazero.places import unreachable
from megazero.planner.chips import chip_of_device
from megazero.planner.expectation import expectation
from megazero.planner.memory import plan
from megazero.resilience.bad_steps import BadSteps
from megazero.resilience.collectives import record_collectives
from megazero.resilience.position import READING, Position
from megazero.resilience.preflight import preflight
from megazero.resilience.replicas import Replicas
from megazero.resilience.signals import LateFlags, StopRequest
from megazero.resilience.stragglers import Stragglers
from megazero.resilience.watchdog import BACKSTOP, Watchdog
from megazero.restore import resolve_model
from megazero.stage import MicroBatch
from megazero.step_graph import StepGraph
from megazero.telemetry.sinks import check_sinks
from megazero.telemetry.telemetry import Telemetry
from megazero.telemetry.trace import StepRecorder
from megazero.topology import Topology

__all__ = ["BatchSource", "Engine", "Metrics", "resolve_model"]


class BatchSource(Protocol):
    """Where micro-batches come from: a pure function of the position in the sample order."""

    def read(
        self, first: int, dp_rank: int, dp_size: int, global_batch_size: int, micro_batch_size: int
    ) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of the global batch that starts at position ``first``."""
        ...


class Metrics(NamedTuple):
    """One step's numbers; ``loss`` and ``grad_norm`` are float64 scalars still on the device."""

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor
    lr: float


class Engine:
    """Trains the decoder that ``config`` describes. Every rank makes the same calls in the same order.

    Making one starts the process group (unless one exists), builds this rank's share of the model and loads it: from
    the newest checkpoint in ``checkpoint.dir``, else from ``model.init_from``, else it is initialised. Use it as a
    context manager, so that the process group and the metrics end with it.

    Attributes: ``step``: optimizer steps taken; ``consumed_samples``: where the next one begins in the sample order;
    ``course``: which samples each step reads.

    Raises ConfigError and CheckpointError before GPU memory is taken where the settings or the checkpoint are wrong.
    """

    def __init__(self, config: Config, environment: ProcessEnvironment | None = None) -> None:
        environment = environment or process_environment()
        if found := list(unreachable(config)):
            raise ConfigError(found)
        config = resolve_model(config, environment.world_size)
        self.config, self.model_config = config, config.model.architecture
        config.validate_world(environment.world_size)
        check_sinks(config.log)
        start = restore.find_start(config)
        self._started = time.monotonic()
        self.device = device_of(environment)
        if config.train.cuda_graph and self.device.type != "cuda":
            raise ConfigError.single("train.cuda_graph", "there is no CUDA GPU; leave it out")
        _set_numerics(config)
        timeout = config.train.timeout + BACKSTOP
        self._owns_group = start_process_group(environment, self.device, timeout)
        layout = config.layout(environment.world_size)
        self.topology = Topology(layout, environment.rank, self.device)
        notes = preflight(config, self.topology, start.resume.step if start.resume is not None else 0)
        ring = config.parallel.virtual_pp > 1
        pairs = neighbour_groups(layout, environment.rank, ring, timeout)  # first: see its note
        precision = precision_on(config, self.device)
        self.stage = build_stage(config, self.model_config, self.topology, DTYPES[precision])
        watch, bad_steps = config.watch, None
        if watch.bad_step == "skip" or watch.loss_spike:
            bad_steps = BadSteps(watch.bad_step == "skip", watch.loss_spike, self.device)
        fp16 = precision == "fp16"
        self.optimizer = OptimizerStep(
            self.stage.sharded, self.topology, config.optimizer, config.train, fp16, bad_steps
        )
        self.step = self.consumed_samples = 0
        self.course = Course(config.train)
        torch.manual_seed(config.train.seed * 1_000_003 + environment.rank)
        self._restored = restore.load_start(start, self)
        parallel = config.parallel
        self._schedules = RankSchedules(
            config.schedule, parallel.pp, parallel.virtual_pp, self.topology.coordinates["pp"]
        )
        count = config.micro_batches(layout.dp)
        self._schedules.training(count)
        self._eval_actions = self._schedules.evaluation(count)
        self._position = Position(self.device)
        self._executor = Executor(self.stage, self._transfers(DTYPES[precision], pairs), note=self._position.at)
        self._graph = StepGraph(self._run, self.stage) if config.train.cuda_graph else None
        timeline, place = config.log.timeline, self.topology.coordinates
        self._recorder = StepRecorder(self._executor, timeline, place, self.device, self.step)
        self._watchdog: Watchdog | None = None
        self._stragglers = Stragglers(self.topology, config.watch.straggler_factor)
        many, interval = layout.world_size > 1, config.watch.replica_interval
        self._replicas = Replicas(self.stage.sharded, self.topology) if many and interval else None
        self._stop = StopRequest()
        self._stop_flags = LateFlags(self.device)
        self._begun = (self.step, self.consumed_samples)  # the run did, or what follows a roll-back
        self._read_since_log = 0
        self._is_new = True
        self._saves = restore.Saves(self, self.step if self._restored.in_own_directory else -1)
        self.telemetry = Telemetry(
            config, self.model_config, layout, self.device, environment.rank, self._restored.run_id, self.step
        )
        if environment.rank == 0:
            planned = plan(config, environment.world_size, gpu=self.device.type == "cuda")
            self.telemetry.message(planned.describe())
            if self.stage.sharded.tier is not None:
                self.telemetry.message(self._describe_offload())
        for note in notes:
            self.telemetry.message(note)
        for message in (*self._restored.messages, *self._restored.changes):
            self.telemetry.event("start", self.step, message)
        if config.log.events:
            starts, size = int(os.environ.get("MEGAZERO_RESTARTS", "0")), environment.world_size
            who = f"{size} processes begin" if size > 1 else "1 process begins"
            text = f"{who} after step {self.step}" + (f" (restart {starts})" if starts else "")
            self.telemetry.event("start", self.step, text, world_size=size, restarts=starts)
        if self.step >= config.train.steps:
            self.telemetry.message(f"all of train.steps = {config.train.steps} are done; raise it to go on")
        # What lives as long as the run is never looked at again by the garbage collector.
        gc.collect()
        gc.freeze()

    def __enter__(self) -> Engine:
        self._stop.install()
        if self.topology.layout.world_size > 1:
            watch, peers = self.config.watch, self.topology.layout.along(self.topology.rank, "pp")
            self._watchdog = Watchdog(
                self._position, peers, self.config.train.timeout, watch.step_timeout, watch.peer_timeout
            )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._position.at("ending", limited=False)
        try:
            # After an error of training a save that is under way ends by itself, before the process does.
            if error is None:
                self._saves.wait()
                self._saves.close(gives_up=lambda: self._stop.reason is not None)
        finally:
            self._saves.close(gives_up=lambda: True)
            if self._watchdog is not None:
                self._watchdog.stop(error)
            if error is not None and self._stop.reason is not None:
                error.told_to_end = True  # see megazero.launch.errors
            self._stop.uninstall()
            if error is not None and self.config.log.events:
                summary = str(error).partition("\n")[0]
                self.telemetry.event("error", self.step, f"{kind.__name__ if kind else ''}: {summary}")
            self.telemetry.close()
            self.stage.sharded.close()
            gc.unfreeze()
        # After an error other ranks may be inside a collective: leave it to the process's end.
        if self._owns_group and error is None:
            dist.destroy_process_group()

    @property
    def dp_size(self) -> int:
        return self.topology.layout.dp

    def _describe_offload(self) -> str:
        """What a step with the state off the device takes, where the chip is known, and what bounds its update."""
        tier = self.stage.sharded.tier
        assert tier is not None
        chip = chip_of_device(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        return "\n".join((*tier.notes(), *expectation(self.config, self.topology.layout.world_size, chip)))

    def _transfers(self, dtype: torch.dtype, pairs: Mapping[int, dist.ProcessGroup]) -> Transfers | None:
        layout = self.topology.layout
        if layout.pp == 1:
            return None
        tokens = self.config.train.micro_batch_size * self.config.data.seq_length
        shape = (self.stage.tp.local_tokens(tokens), self.model_config.hidden_size)
        ranks = layout.along(self.topology.rank, "pp")
        transfers = Transfers(self.topology.group("pp"), ranks, shape, dtype, self.device, pairs)
        transfers.connect(self.topology.coordinates["pp"], self.config.parallel.virtual_pp > 1)
        return transfers

    def running(self) -> bool:
        """Whether another step is to be taken; asked by every rank between steps."""
        if self.step >= self.config.train.steps:
            return False
        self._position.at("waiting for the step before the last")
        stopped = self._stop_flags.up()
        self._position.idle()
        if stopped:
            reason = self._stop.reason or "another rank asked to"
            self.telemetry.event("stop", self.step, f"stopping after step {self.step}: {reason}", reason=reason)
            return False
        return True

    def train_batch(self, source: BatchSource) -> Metrics:
        """One optimizer step on the next global batch; logs it where ``log.interval`` says so.

        That may find that this step or an earlier one was bad: with ``watch.bad_step`` rollback, ``step`` and
        ``consumed_samples`` are then those that the run goes on from.
        """
        step = self.step + 1
        self._position.at(READING, step)
        size = self.course.size(self.consumed_samples)
        micro_batches = self._read(source, self.consumed_samples, size)
        lr = learning_rate(self.config.optimizer, step, self.config.train.steps)
        is_logged = self._is_due(self.config.log.interval, step)
        with self._recorder.step(step, is_logged):
            sums = self._forward_backward(micro_batches, size, lr)
        self.step, self._is_new = step, True
        self._read_since_log += size
        self.consumed_samples = self.course.after(self.consumed_samples)
        self._stop_flags.note(sums.stop)
        self._saves.report()
        if self.stage.sharded.tier is not None and (advice := self.stage.sharded.tier.advice()) is not None:
            self.telemetry.message(advice)
        if is_logged and not self._goes_back(source):
            self._log(sums, lr)
        if self._replicas is not None and self.due(self.config.watch.replica_interval):
            self._compare_replicas()
        self._position.idle()
        return Metrics(step, sums.loss, sums.grad_norm, lr)

    def _read(self, source: BatchSource, first: int, size: int) -> list[MicroBatch]:
        """This rank's part of ``size`` samples."""
        coordinates = self.topology.coordinates
        return source.read(first, coordinates["dp"], self.dp_size, size, self.config.train.micro_batch_size)

    def _forward_backward(self, micro_batches: list[MicroBatch], size: int, lr: float) -> StepSums:
        normalizer = size * self.config.data.seq_length
        self.stage.loss_weight = self.optimizer.loss_scale / normalizer if self.optimizer.fp16 else 1 / normalizer
        self.stage.model.train()
        run = self._run if self._graph is None else self._graph.run
        loss = run(self._schedules.training(len(micro_batches)), micro_batches)
        stop = self._stop.requested(self._started, self.config.train.time_limit)
        if self._saves.failed:
            # Stopping is what all ranks agree on; the error is then raised on all of them at once, where they wait.
            self._stop.reason, stop = f"the checkpoint of step {self._saves.step} could not be saved", True
        self._position.at("the reduction and the update")
        self._saves.before_update()
        return self.optimizer.run(self.step + 1, lr, loss, self._tokens(micro_batches), normalizer, stop)

    def _run(self, actions: list[Action], micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Σ loss of this rank's micro-batches where it is the one that reports them, else 0: float64, on the device."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def on_loss(loss: torch.Tensor) -> None:
            if self._reports_loss:
                total.add_(loss)

        with attention_backends(self.device, self.config.train.deterministic):
            try:
                self._executor.run(actions, micro_batches, on_loss)
            except BaseException:
                self.stage.abandon()
                raise
        return total

    @property
    def _reports_loss(self) -> bool:
        return self.stage.model.head is not None and self.topology.coordinates["tp"] == 0

    def _tokens(self, micro_batches: list[MicroBatch]) -> float:
        """Unmasked tokens, where this rank reports the loss."""
        if not self._reports_loss:
            return 0.0
        return sum(float(micro_batch["weights"].sum(dtype=torch.float64)) for micro_batch in micro_batches)

    def _log(self, sums: StepSums, lr: float) -> None:
        self._position.at("logging")
        self._name_stragglers()
        self._report_skipped()
        tokens = self._read_since_log * self.config.data.seq_length
        self._read_since_log = 0
        left = self.course.total(self.consumed_samples, self.config.train.steps - self.step)
        extra = {"loss_scale": float(self.optimizer.loss_scale)} if self.optimizer.fp16 else {}
        self.telemetry.log_step(
            self.step,
            float(sums.loss),
            float(sums.grad_norm),
            lr,
            self.consumed_samples,
            tokens,
            extra,
            left * self.config.data.seq_length,
        )

    def _report_skipped(self) -> None:
        if self.optimizer.bad_steps is None:
            return
        count, last = self.optimizer.bad_steps.skipped()
        if count:
            read = self.samples_of(last)
            text = (
                f"{count} updates left out (watch.bad_step): the last is step {last}, samples {read[0]} to {read[-1]}"
            )
            self.telemetry.event("skip", self.step, text, count=count, last=last, sample=read[0])

    def _compare_replicas(self) -> None:
        self._position.at("the comparison of replicas")
        assert self._replicas is not None
        if difference := self._replicas.difference():
            raise DivergenceError(
                f"step {self.step}: {difference}. They should hold the same bits: test the memory of these machines, "
                f"and go on from a checkpoint of a step before the last comparison (watch.replica_interval)"
            )

    def _name_stragglers(self) -> None:
        if self._watchdog is None or not self.config.watch.straggler_factor:
            return
        for rank, seconds, median in self._stragglers.gather(self._position.busy()):
            host = self._watchdog.host_of(rank)
            text = (
                f"slow: rank {rank} on {host} computes {seconds:.3g} s per step, where {median:.3g} s is the median of "
                f"its stage"
            )
            self.telemetry.event("slow", self.step, text, rank=rank, host=host, seconds=seconds, median=median)

    def samples_of(self, step: int) -> range:
        """What a step read that this process has taken, counted from the last roll-back."""
        begun, position = self._begun
        return self.course.samples(position, step - begun - 1)

    def run_again(self, source: BatchSource, step: int) -> None:
        """Such a step's forwards and backwards once more."""
        samples = self.samples_of(step)
        micro_batches = self._read(source, samples.start, len(samples))
        self._run(self._schedules.training(len(micro_batches)), micro_batches)

    def _goes_back(self, source: BatchSource) -> bool:
        """Where a step was bad, end the run, or roll it back. Waits for the device."""
        self._position.at("looking for bad steps")
        found = find_divergence(self, source)
        if found is None:
            return False
        if self.config.watch.bad_step != "rollback":
            raise found.error()
        self._position.at("rolling back", limited=False)
        self._saves.wait()
        roll_back(self, found)
        self._begun, self._read_since_log, self._is_new = (self.step, self.consumed_samples), 0, False
        self._saves.step = self.step
        self._recorder.go_back(self.step)
        self.telemetry.go_back(self.step)
        self._position.idle()
        return True

    def due(self, interval: int) -> bool:
        """Whether the step just taken is a multiple of ``interval``, or the run's last; never where that is 0, or right
        after a roll-back."""
        return self._is_new and self._is_due(interval, self.step)

    def _is_due(self, interval: int, step: int) -> bool:
        return bool(interval) and (step % interval == 0 or step == self.config.train.steps)

    @torch.no_grad()
    def eval_batch(self, source: BatchSource, first: int) -> tuple[torch.Tensor, float]:
        """(Σ loss as a float64 scalar on the device, tokens) of this rank's share of one global batch."""
        micro_batches = self._read(source, first, self.config.train.global_batch_size)
        self.stage.loss_weight = 1.0
        self.stage.model.eval()
        return self._run(self._eval_actions, micro_batches), self._tokens(micro_batches)

    def evaluate(self, source: BatchSource) -> float:
        """Mean loss over the unmasked tokens of the first ``train.eval_steps`` global batches of ``source``."""
        self._position.at("evaluation")
        with self.telemetry.paused():
            sums = torch.zeros(2, dtype=torch.float64, device=self.device)
            for batch in range(self.config.train.eval_steps):
                loss, tokens = self.eval_batch(source, batch * self.config.train.global_batch_size)
                sums += torch.stack((loss, torch.full_like(loss, tokens)))
            if self.topology.world.size > 1:
                self.topology.world.all_reduce([sums]).wait()
            loss = float(sums[0] / sums[1].clamp(min=1))
        self._position.idle()
        self.telemetry.log_eval(self.step, loss)
        return loss

    def save(self, source: BatchSource) -> None:
        """Write a checkpoint of the step just taken, where ``checkpoint.dir`` is set and it is not there already. With
        ``checkpoint.async_save`` it is written while training goes on; leaving the engine's context waits for it.

        ``source``: read again if the run has diverged, to say where; a diverged run is not saved.
        """
        if not self._saves.due or self._goes_back(source):
            return
        self._position.at("saving a checkpoint")
        with self.telemetry.paused():
            self._saves.save()
        self._position.idle()


def device_of(environment: ProcessEnvironment) -> torch.device:
    """This process's GPU, which becomes torch's current one, or the CPU. Raises LaunchError where there are too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", gpu_of(environment.local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _set_numerics(config: Config) -> None:
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def start_process_group(environment: ProcessEnvironment, device: torch.device, timeout: float) -> bool:
    """Whether this call made the default process group. ``timeout``: seconds that a collective waits for a rank.

    It is not bound to a device: torch would then make every further group by splitting it, which all ranks must join,
    and groups here are made by their members alone.
    """
    if environment.world_size == 1 or dist.is_initialized():
        return False
    record_collectives()
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=limit,
        store=own_store(environment.rank, environment.world_size, limit),
    )
    return True
