"""A script written for DeepSpeed on megazero: ``python -m megazero.integrations.deepspeed train.py ARGS…``.

That runs one process, whose children do the same; `megazero launch --as-deepspeed` starts several. What else is here
are DeepSpeed's own functions; `surface.SURFACE` says where the other names lead.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from megazero.errors import LaunchError, MegazeroError
from megazero.integrations import hook

DEEPSPEED_ENVIRONMENT_NAME = os.path.join(os.path.expanduser("~"), ".deepspeed_env")

logger = logging.getLogger("megazero")


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """`megazero.initialize`. A model without an optimizer, here and in the config, is for evaluation, as in DeepSpeed:
    nothing is kept to train it."""
    from megazero.foreign.initialize import initialize as ours
    from megazero.integrations.parameters import describe, mark

    if mpu is not None or mesh_param is not None:
        raise MegazeroError(
            "initialize: mpu and mesh_param stand for model parallelism, which a foreign model lacks here"
        )
    init_distributed()
    given = config if config is not None else config_params
    evaluates = optimizer is None and model_parameters is None and not _names_optimizer(args, given)
    with _frozen(model, evaluates):
        made = ours(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            config=config,
            config_params=config_params,
        )
    engine = made[0]
    stage = engine.zero_optimization_stage()
    if stage == 3:
        mark(engine.module)
    if engine.optimizer is not None:
        describe(engine.optimizer, stage)
    log_dist(f"DeepSpeed info: version={hook.VERSION}, answered by megazero", [0])
    return made


def _names_optimizer(args: Any, config: Any) -> bool:
    from megazero.ds_config.reader import load_ds_config

    source = config if config is not None else getattr(args, "deepspeed_config", None)
    return source is not None and "optimizer" in load_ds_config(source)


@contextmanager
def _frozen(model: Any, asked: bool) -> Iterator[None]:
    """No parameter requires a gradient inside."""
    trained = [p for p in model.parameters() if p.requires_grad] if asked and hasattr(model, "parameters") else []
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the process group where there is none, as the launcher says."""
    import torch.distributed as dist

    from megazero.engine import device_of
    from megazero.foreign.start import TIMEOUT
    from megazero.launch.environment import process_environment

    if dist.is_initialized():
        return
    environment = process_environment()
    backend = "nccl" if device_of(environment).type == "cuda" else "gloo"
    # Of one process as well: those who ask for its rank do not look whether there is a group.
    dist.init_process_group(
        backend,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout or timedelta(seconds=TIMEOUT),
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """--deepspeed and --deepspeed_config, as scripts with a parser of their own want them."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="train through deepspeed.initialize")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="the ds_config.json")
    return parser


def init_inference(*_: Any, **__: Any) -> None:
    """Not here."""
    raise MegazeroError("deepspeed.init_inference: megazero has no inference engine; give initialize a stage 3 config")


def tp_model_init(*_: Any, **__: Any) -> None:
    """Not here."""
    raise MegazeroError(
        "tensor_parallel.autotp_size: megazero has no tensor parallelism for foreign models; set it to 1, and cut the "
        "model with zero_optimization.stage 3"
    )


def PipeDataParallelTopology(num_pp: int, num_dp: int) -> Any:  # noqa: N802
    """The topology of a PipelineModule."""
    from megazero.layout import Layout

    return Layout(pp=num_pp, dp=num_dp)


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; -1 or none given: on all."""
    rank = int(os.environ.get("RANK", "0"))
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, f"[rank {rank}] {message}")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the GPU memory in use, where ``force`` asks for it."""
    from megazero.integrations.accelerator import get_accelerator

    if force:
        now, peak = get_accelerator().memory_allocated(), get_accelerator().max_memory_allocated()
        logger.info(f"{message}: {now / 2**30:.2f} GiB in use, {peak / 2**30:.2f} at most")


def main() -> None:
    """Run the script of the command line in this process."""
    from megazero.launch.environment import process_environment
    from megazero.launch.errors import report_errors
    from megazero.launch.worker import run_script

    with report_errors():
        if len(sys.argv) < 2:
            raise LaunchError("give the script to run: python -m megazero.integrations.deepspeed train.py ARGS…")
        if not os.path.isfile(sys.argv[1]) and sys.argv[1] != "-m":
            raise LaunchError(f"there is no script {sys.argv[1]!r} that can be read")
        hook.install()
        hook.prepare(os.environ)
        process_environment()
        # As a launcher would say it: without, transformers takes every GPU that it sees for one model.
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        run_script(sys.argv[1:])


if __name__ == "__main__":
    main()
