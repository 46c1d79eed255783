"""A model for generation alone: one rank's share of the weights in the run's dtype, nothing else."""

from __future__ import annotations

import torch
from torch import nn

from megazero.build import DTYPES, describe_stage
from megazero.checkpoint.writer import row_runs
from megazero.config import Config
from megazero.convert import Weights
from megazero.engine import device_of, start_process_group
from megazero.generation.generator import Generator
from megazero.launch.environment import ProcessEnvironment
from megazero.models.config import ModelConfig
from megazero.models.gpt import GPT
from megazero.sharding import ShardSpec
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.topology import Topology


def inference_config(model: ModelConfig, tp: int, pp: int, world_size: int) -> Config:
    """The settings of a model that is only run. Raises ConfigError where it cannot be cut so."""
    tree = {
        "model": model.model_dump(),
        "parallel": {"tp": tp, "pp": pp, "sequence_parallel": False},
        "data": {"seq_length": model.max_position_embeddings},
    }
    found = []
    if tp >= 1 and pp >= 1 and world_size != tp * pp:
        found.append(
            (
                "parallel.tp",
                f"parallel.tp x parallel.pp = {tp} x {pp} = {tp * pp}, but the number of processes is {world_size}; "
                f"start {tp * pp}, or choose sizes whose product is {world_size}",
            )
        )
    return Config.from_dict(tree, found=found)


def build_generator(
    weights: Weights, config: Config, environment: ProcessEnvironment, precision: str = "auto"
) -> Generator:
    """This rank's generator; makes the process group where there are several ranks and none exists.

    Args:
        config: of ``inference_config``.
        precision: bf16, fp16 or fp32 of weights, activations and cache; auto: bf16 on a GPU, fp32 on a CPU.

    Raises CheckpointError or ConvertError where the weights' bytes are damaged.
    """
    device = device_of(environment)
    start_process_group(environment, device, config.train.timeout)
    topology = Topology(config.layout(environment.world_size), environment.rank, device)
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    tp = TensorParallel(topology.layout.tp, topology.coordinates["tp"], False, topology.group("tp"))
    decoder, specs = describe_stage(config, config.model.architecture, topology.coordinates, tp)
    _load(decoder, specs, weights, DTYPES[precision], device)
    return Generator(decoder, topology)


def _load(
    decoder: GPT, specs: dict[str, ShardSpec], weights: Weights, dtype: torch.dtype, device: torch.device
) -> None:
    """Give every parameter its values; reads this rank's slices only, a few MiB at a time."""
    for path, spec in specs.items():
        value = torch.zeros(spec.local_shape, dtype=dtype, device=device)
        for piece in spec.pieces:
            for box in row_runs(piece.box):
                first = piece.row + box.offsets[0] - piece.box.offsets[0]
                value[first : first + box.shape[0]] = weights.read(piece.name, box).to(device)
        module, _, name = path.rpartition(".")
        setattr(decoder.get_submodule(module), name, nn.Parameter(value, requires_grad=False))
    decoder.tie()
