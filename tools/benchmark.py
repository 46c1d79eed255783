"""Measures training speed: tokens/s per GPU, model TFLOP/s, MFU and peak memory, on random tokens.

    python tools/benchmark.py --model.preset gpt3-1.3b --data.seq_length 2048 --train.micro_batch_size 4 ...
    megazero launch --nproc 4 tools/benchmark.py --parallel.tp 2 --parallel.pp 2 --model.preset llama3.2-1b ...

Settings are those of pretrain/gpt.py; no data is needed. Prints a JSON line and a row of a Markdown table. FLOPs per
token = 6 x (matmul parameters, head included) + 6 x layers x (heads x head size) x sequence length: causal attention
counts half, recomputation not at all. MFU is against the GPU's dense 16-bit peak.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from megazero.build import precision_on
from megazero.config import Config, load_config
from megazero.engine import Engine, resolve_model
from megazero.errors import CommandLine, ConfigError, LaunchError
from megazero.launch.environment import process_environment
from megazero.launch.errors import report_errors
from megazero.models.parameters import flops_per_token, parameter_count
from megazero.telemetry.commit import running_commit
from megazero.telemetry.kernels import DeviceTime, profile_steps
from megazero.telemetry.peaks import device_peak_flops

HOST_STEPS = 3


class RandomTokens:
    """Batches of uniformly random tokens. Zeros would not do: a GPU multiplies them with less power, hence faster."""

    def __init__(self, vocab_size: int, seq_length: int) -> None:
        self._vocab_size, self._seq_length = vocab_size, seq_length

    def read(
        self, first: int, dp_rank: int, dp_size: int, global_batch_size: int, micro_batch_size: int
    ) -> list[dict[str, torch.Tensor]]:
        """This rank's micro-batches; every position of the sample order has tokens of its own."""
        stride = dp_size * micro_batch_size
        starts = range(first + dp_rank * micro_batch_size, first + global_batch_size, stride)
        return [self._micro_batch(start, micro_batch_size) for start in starts]

    def _micro_batch(self, start: int, size: int) -> dict[str, torch.Tensor]:
        # A sample's tokens follow from its position alone, whatever the micro-batch it is in.
        generators = [torch.Generator().manual_seed(position) for position in range(start, start + size)]
        shape = (self._seq_length + 1,)
        micro_batch = {
            "tokens": torch.stack([torch.randint(self._vocab_size, shape, generator=g) for g in generators]),
            "weights": torch.ones(size, self._seq_length),
            "samples": torch.arange(start, start + size),
        }
        if not torch.cuda.is_available():
            return micro_batch
        return {name: tensor.pin_memory() for name, tensor in micro_batch.items()}


def measure(engine: Engine, source: RandomTokens, warmup: int, steps: int) -> tuple[float, list[float]]:
    """(seconds per step over ``steps`` steps after ``warmup`` that do not count, the losses of all)."""
    losses = [engine.train_batch(source).loss for _ in range(warmup)]
    _synchronise(engine)
    begin = time.perf_counter()
    losses += [engine.train_batch(source).loss for _ in range(steps)]
    _synchronise(engine)
    return (time.perf_counter() - begin) / steps, [float(loss) for loss in losses]


def load_settings(settings: Sequence[str], steps: int, world_size: int) -> Config:
    """Those of a run of so many steps on random tokens. Raises ConfigError, also where they ask for what would not be
    measured."""
    # Neither logging nor saving: both would wait for the device.
    quiet = ["--train.steps", str(steps), "--log.interval", "0", "--checkpoint.resume", "never"]
    config = load_config([*settings, *quiet], world_size=world_size, needs_data=False)
    if config.train.rampup_batch_size is not None:
        told = "a step's time is that of one batch size; leave it out, and measure each size as train.global_batch_size"
        raise ConfigError.single("train.rampup_batch_size", told)
    if config.data.reset_at_document:
        raise ConfigError.single("data.reset_at_document", "random tokens are of no document; leave it out")
    return resolve_model(config, world_size)


def check_steps(arguments: argparse.Namespace, **least: int) -> None:
    """Raises ConfigError where a number of steps is below its least."""
    for name, number in least.items():
        if (value := getattr(arguments, name)) < number:
            raise ConfigError.single(f"--{name}", f"{value} must be at least {number}")


def limit_memory(gib: float, local_rank: int) -> None:
    """Let this process's allocator take no more of its GPU than a smaller one would have."""
    if not torch.cuda.is_available():
        raise LaunchError("--memory-limit: there is no GPU whose memory it could limit; leave it out")
    total = torch.cuda.get_device_properties(local_rank).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), local_rank)


class Timed:
    """The same batches; ``seconds``: that making the last one took."""

    def __init__(self, source: RandomTokens) -> None:
        self._source, self.seconds = source, 0.0

    def read(self, *args: int) -> list[dict[str, torch.Tensor]]:
        begin = time.perf_counter()
        batch = self._source.read(*args)
        self.seconds = time.perf_counter() - begin
        return batch


def host_time(engine: Engine, source: RandomTokens, steps: int) -> float:
    """Seconds that the host takes to issue a step to a device that has nothing to do, random tokens not counted: what a
    step cannot be shorter than, however fast the device. More than some thousand kernels behind, a CUDA device keeps
    the host waiting."""
    times, timed = [], Timed(source)
    for _ in range(steps):
        _synchronise(engine)
        begin = time.perf_counter()
        engine.train_batch(timed)
        times.append(time.perf_counter() - begin - timed.seconds)
    return sorted(times)[steps // 2]


def _synchronise(engine: Engine) -> None:
    """Wait for the devices of all ranks."""
    if dist.is_initialized():
        dist.barrier()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def peak_memory(engine: Engine) -> int | None:
    """Bytes allocated at the highest point, of the rank that needs most; None on a CPU."""
    if engine.device.type != "cuda":
        return None
    peak = torch.tensor(torch.cuda.max_memory_allocated(engine.device), device=engine.device)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def report(
    engine: Engine, seconds: float, host: float, losses: list[float], peak: int | None, command: str
) -> dict[str, Any]:
    """Everything a figure needs beside it: what was run, from which commit, on what."""
    config, layout, device = engine.config, engine.topology.layout, engine.device
    train, seq_length = config.train, config.data.seq_length
    tokens = train.global_batch_size * seq_length / seconds / layout.world_size
    flops = tokens * flops_per_token(engine.model_config, seq_length)
    precision = precision_on(config, device)
    chip_peak = device_peak_flops(device, precision)
    return {
        "command": command,
        "commit": running_commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": parameter_count(engine.model_config),
        "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "zero_stage": config.zero.stage},
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
        "seq_length": seq_length,
        "precision": precision,
        "seconds_per_step": seconds,
        "host_seconds_per_step": host,
        "tokens_per_second_per_gpu": tokens,
        "model_tflops_per_gpu": flops / 1e12,
        "mfu": flops / chip_peak if chip_peak else None,
        "memory_allocated_peak": peak,
        "offload": offloaded(engine),
        "losses": losses,
    }


def offloaded(engine: Engine) -> dict[str, Any] | None:
    """What this rank keeps off its device: bytes, all that it has moved, and the seconds that it took and waited."""
    tier = engine.stage.sharded.tier
    if tier is None:
        return None
    files = {"read": tier.disk.read_bytes, "written": tier.disk.written_bytes} if tier.disk is not None else {}
    return {
        **{"host": tier.memory.taken, "pinned": tier.memory.pinned, "threads": tier.threads},
        **{"link": dict(tier.link.bytes), "files": files, "seconds": dict(tier.meter.seconds)},
    }


def plain_loop_speed(arguments: Sequence[str]) -> float:
    """Tokens/s of tools/plain_loop.py, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("plain_loop.py")), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise LaunchError(f"--beside-plain-loop: the plain loop ended with exit code {done.returncode}; see above")
    return json.loads(done.stdout)["tokens_per_second"]


def profile(engine: Engine, source: RandomTokens, steps: int) -> list[DeviceTime]:
    """Where each rank's device spends a step."""
    if engine.device.type != "cuda":
        raise LaunchError("--profile: there is no GPU to profile; leave it out")
    own = profile_steps(lambda: engine.train_batch(source), steps)
    times: list[Any] = [own]
    if dist.is_initialized():
        times = [None] * dist.get_world_size()
        dist.all_gather_object(times, own)
    return times


def profile_lines(times: Sequence[DeviceTime]) -> Iterator[str]:
    """Milliseconds a step, a line for each rank, and the kernels that took most on the first."""
    for rank, spent in enumerate(times):
        yield (
            f"rank {rank}: {spent.span:.1f} ms a step: compute {spent.compute:.1f}, exposed communication "
            f"{spent.exposed:.1f} of {spent.communication:.1f} (overlap {spent.overlap:.2f}), idle {spent.idle:.1f}"
        )
    for name, milliseconds in times[0].kernels if times else ():
        yield f"  {milliseconds:8.2f} ms  {name[:100]}"


def table_row(config: Config, found: dict[str, Any]) -> str:
    """The report as a row of README's table."""
    layout, peak, mfu = found["layout"], found["memory_allocated_peak"], found["mfu"]
    cells = (
        config.model.preset or f"{found['parameters'] / 1e6:.0f}M",
        f"tp={layout['tp']} pp={layout['pp']} dp={layout['dp']} zero={layout['zero_stage']}",
        f"{found['micro_batch_size']} / {found['global_batch_size']} x {found['seq_length']}",
        f"{found['tokens_per_second_per_gpu']:,.0f}",
        f"{found['model_tflops_per_gpu']:.1f}",
        f"{mfu:.1%}" if mfu is not None else "unknown",
        f"{peak / 2**30:.1f}" if peak is not None else "unknown",
        (found["commit"] or "unknown")[:10],
    )
    return "| " + " | ".join(cells) + " |"


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is the tool's own, and the settings."""
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--warmup", type=int, default=10, help="steps before the clock starts (default: 10)")
    parser.add_argument("--measure", type=int, default=20, help="steps that are timed (default: 20)")
    parser.add_argument("--profile", type=int, default=0, help="steps profiled after those, on a GPU (default: 0)")
    parser.add_argument(
        "--memory-limit", type=float, default=0.0, help="GiB of GPU memory that a process may take (default: all)"
    )
    parser.add_argument(
        "--beside-plain-loop", action="store_true", help="first measure tools/plain_loop.py too (one process)"
    )
    own, settings = parser.parse_beside_settings(argv)
    check_steps(own, warmup=0, measure=1, profile=0)
    return own, settings


def main(argv: Sequence[str]) -> None:
    own, settings = parse_arguments(argv)
    environment = process_environment()
    if own.beside_plain_loop and environment.world_size > 1:
        raise LaunchError("--beside-plain-loop: the plain loop is of one process; leave it out or run one")
    plain = None
    if own.beside_plain_loop:  # first: what this process takes of a GPU, it keeps
        plain = plain_loop_speed(["--warmup", str(own.warmup), "--measure", str(own.measure), *settings])
    if own.memory_limit:
        limit_memory(own.memory_limit, environment.local_rank)
    steps = own.warmup + own.measure + HOST_STEPS + own.profile
    config = load_settings(settings, steps, environment.world_size)
    source = RandomTokens(config.model.vocab_size, config.data.seq_length)
    with Engine(config, environment) as engine:
        seconds, losses = measure(engine, source, own.warmup, own.measure)
        peak = peak_memory(engine)
        host = host_time(engine, source, HOST_STEPS)
        times = profile(engine, source, own.profile) if own.profile else []
        if environment.rank == 0:
            found = report(engine, seconds, host, losses, peak, shlex.join(["tools/benchmark.py", *argv]))
            print(json.dumps({**found, "device_time": [spent._asdict() for spent in times]}))
            print(table_row(config, found))
            print("\n".join(profile_lines(times)))
            if plain is not None:
                ratio = found["tokens_per_second_per_gpu"] / plain
                print(f"plain loop: {plain:,.0f} tokens/s; megazero's speed is {ratio:.3f} of it")


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
