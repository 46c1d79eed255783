"""What a process finds under deepspeed's names: printed as JSON. No other library is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

FOLDER = next(word for word in sys.argv[1:] if not word.startswith("--"))
SURFACE_OF_LIBRARIES = """
deepspeed DeepSpeedEngine initialize init_distributed zero comm ops runtime utils accelerator tp_model_init
deepspeed.zero Init GatheredParameters register_external_parameter
deepspeed.comm get_rank get_world_size is_initialized init_distributed barrier broadcast all_reduce all_gather
deepspeed.ops.adam DeepSpeedCPUAdam FusedAdam
deepspeed.ops.adagrad DeepSpeedCPUAdagrad
deepspeed.ops.lion DeepSpeedCPULion
deepspeed.runtime.engine DeepSpeedEngine
deepspeed.runtime.lr_schedules VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest
deepspeed.runtime.zero.partition_parameters ZeroParamStatus GatheredParameters zero_wrapper_for_fp_tensor_constructor
deepspeed.runtime.utils move_to_device see_memory_usage
deepspeed.checkpoint.utils clone_tensors_for_torch_save
deepspeed.launcher.runner DEEPSPEED_ENVIRONMENT_NAME
deepspeed.utils logger groups log_dist set_z3_leaf_modules safe_get_full_grad safe_get_full_fp32_param
deepspeed.utils.groups _get_sequence_parallel_group _get_data_parallel_world_size
deepspeed.utils.zero_to_fp32 get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint
deepspeed.accelerator get_accelerator
deepspeed PipelineModule PipelineEngine pipe
deepspeed.pipe PipelineModule LayerSpec TiedLayerSpec
deepspeed.runtime.pipe.module PipelineModule LayerSpec TiedLayerSpec
deepspeed.runtime.pipe.topology PipeDataParallelTopology
"""


def told(name: str) -> str:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return "there"


def train() -> dict[str, Any]:
    """One process, whether a launcher started it or not, at stage 3; and what a checkpoint holds."""
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(4, 1)
    assert model.weight.dtype == torch.bfloat16
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=0.1), config_params=config
    )
    losses = []
    for _ in range(3):
        loss = (engine(torch.ones(2, 4, dtype=torch.bfloat16)) - 10).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.save_checkpoint(FOLDER)
    weights = get_fp32_state_dict_from_zero_checkpoint(FOLDER)
    with deepspeed.zero.GatheredParameters(model.weight):
        same = torch.equal(weights["weight"].to(torch.bfloat16), model.weight)
    masters = {values.dtype for values in optimizer.single_partition_of_fp32_groups}
    loaded = load_state_dict_from_zero_checkpoint(model, FOLDER)
    return {
        "masters": masters == {torch.float32},
        "loaded": torch.equal(loaded.weight, weights["weight"].to(torch.bfloat16)),
        "ranks": [deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()],
        "optimizer": type(optimizer).__name__,
        "learns": losses[2] < losses[0],
        "engine": isinstance(engine, deepspeed.DeepSpeedEngine),
        "config": engine.config["zero_optimization"]["stage"],
        "weights": same and weights["weight"].dtype == torch.float32,
        "marked": model.weight.ds_status is deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE,
        "device": deepspeed.accelerator.get_accelerator().current_device_name(),
    }


def main() -> None:
    found = {"version": importlib.metadata.version("deepspeed")}
    found["spec"] = importlib.util.find_spec("deepspeed") is not None
    from megazero.integrations.surface import SURFACE

    lacking = []
    for line in SURFACE_OF_LIBRARIES.split("\n"):
        module, *names = line.split() or ["deepspeed"]
        lacking += [f"{module}.{name}" for name in names if not hasattr(importlib.import_module(module), name)]
    for module, names in SURFACE.items():
        for name in names:
            if name != "*" and not hasattr(importlib.import_module(module), name):
                lacking.append(f"{module}.{name}")
        dir(importlib.import_module(module))
    found["lacking"] = lacking
    found["unknown"] = [told("deepspeed.moe"), told("deepspeed.runtime.activation_checkpointing")]
    import deepspeed

    for holder, name in (
        (deepspeed, "checkpointing"),
        (deepspeed.comm, "log_summary"),
        (deepspeed.accelerator.get_accelerator(), "on_accelerator"),
    ):
        try:
            getattr(holder, name)
        except AttributeError as error:
            found["unknown"].append(str(error))
    child = "import importlib.metadata; print(importlib.metadata.version('deepspeed'))"
    found["child"] = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip()
    found["other sitecustomize"] = getattr(sys, "other_sitecustomize", False)
    found["train"] = train()
    found["told"] = [os.environ["MASTER_PORT"], *sys.argv[1:]]
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
