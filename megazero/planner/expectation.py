"""What a run with its state off the device is told at its start."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.config import Config
from megazero.errors import ConfigError
from megazero.planner.chips import Chip
from megazero.planner.compute import Machine
from megazero.planner.step_time import StepModel


def expectation(config: Config, world_size: int, chip: Chip | None) -> Iterator[str]:
    """Of a step on GPUs of this kind; nothing where it is not known, or the settings are not modelled."""
    if chip is None:
        return
    try:
        model = StepModel(config, config.layout(world_size), Machine(chip))
    except ConfigError:
        return
    time, stage = model.time(), max(model.stages, key=lambda stage: stage.exposed_update)
    bound = stage.host.bound() if time.offload > 0.1 * time.seconds else "computation"
    link = sum(stage.on_link) * model.micro_batches
    if link > 0.1 * time.seconds:
        bound = "the link, which parameters and gradients cross in every micro-batch"
        if config.zero.offload_param.device == "nvme":
            bound = "the disk, which parameters are read from in every forward and backward"
    yield (
        f"offload: a step is expected to take {time.seconds:.2f} s, {time.offload:.2f} s of them waiting for the host; "
        f"bound by {bound}"
    )
