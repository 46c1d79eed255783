"""What scripts and libraries find under DeepSpeed's names: module → name → what it is here.

``home:attribute``, or ``home`` where the attribute has the same name. ``*``: every other name. Found by reading what
transformers 5, accelerate 1, peft and trl import, and what users' scripts do. A name that is not here is an error that
says so.
"""

from __future__ import annotations

_OURS = "megazero.integrations.deepspeed"
_OPTIMIZERS = "megazero.integrations.optimizers"
_ZERO = "megazero.zero"
_SCHEDULES = "megazero.ds_config.schedules"

_SHARDED = {
    "Init": "megazero.integrations.parameters",
    "GatheredParameters": _ZERO,
    "register_external_parameter": _ZERO,
}
_ACCESS = {
    name: _ZERO
    for name in (
        "safe_get_full_fp32_param",
        "safe_get_full_grad",
        "safe_get_full_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_optimizer_state",
    )
}
_LEAVES = {
    name: "megazero.integrations.parameters"
    for name in ("get_z3_leaf_modules", "set_z3_leaf_modules", "unset_z3_leaf_modules")
}
_LOGGING = {"logger": _OURS, "log_dist": _OURS}
_COMM = {"init_distributed": _OURS, "*": "torch.distributed"}
_FP32 = {
    name: "megazero.integrations.weights"
    for name in (
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
        "convert_zero_checkpoint_to_fp32_state_dict",
    )
}
_ADAM = {"DeepSpeedCPUAdam": _OPTIMIZERS, "FusedAdam": _OPTIMIZERS}
_LAYERS = {name: "megazero.pipe" for name in ("LayerSpec", "PipelineModule", "TiedLayerSpec")}
_STAGES = {"PipelineEngine": "megazero.foreign.pipe.engine"}
_LION = {"DeepSpeedCPULion": _OPTIMIZERS, "FusedLion": f"{_OPTIMIZERS}:DeepSpeedCPULion"}

SURFACE: dict[str, dict[str, str]] = {
    "deepspeed": {
        "__version__": "megazero.integrations.hook:VERSION",
        "DeepSpeedEngine": "megazero.foreign.engine:ZeroEngine",
        "PipelineModule": "megazero.pipe",
        **_STAGES,
        "initialize": _OURS,
        "init_distributed": _OURS,
        "add_config_arguments": _OURS,
        "init_inference": _OURS,
        "tp_model_init": _OURS,
        "OnDevice": "megazero.integrations.parameters",
        "get_accelerator": "megazero.integrations.accelerator",
        "dist": "torch:distributed",
    },
    "deepspeed.accelerator": {"get_accelerator": "megazero.integrations.accelerator"},
    "deepspeed.accelerator.real_accelerator": {"get_accelerator": "megazero.integrations.accelerator"},
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": "megazero.integrations.weights"},
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": _OURS},
    "deepspeed.ops": {"__compatible_ops__": _OPTIMIZERS},
    "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": _OPTIMIZERS},
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": _ADAM,
    "deepspeed.ops.adam.fused_adam": _ADAM,
    "deepspeed.ops.aio": {"AsyncIOBuilder": _OPTIMIZERS},
    "deepspeed.ops.lion": _LION,
    "deepspeed.pipe": _LAYERS,
    "deepspeed.runtime": {},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": "megazero.foreign.engine:ZeroEngine"},
    "deepspeed.runtime.lr_schedules": {
        "VALID_LR_SCHEDULES": _OPTIMIZERS,
        **{name: _SCHEDULES for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")},
    },
    "deepspeed.runtime.pipe": _LAYERS,
    "deepspeed.runtime.pipe.engine": _STAGES,
    "deepspeed.runtime.pipe.module": _LAYERS,
    "deepspeed.runtime.pipe.topology": {"PipeDataParallelTopology": _OURS},
    "deepspeed.runtime.utils": {"move_to_device": "megazero.foreign.data:to_device", "see_memory_usage": _OURS},
    "deepspeed.runtime.zero": _SHARDED,
    "deepspeed.runtime.zero.partition_parameters": {
        **_SHARDED,
        "ZeroParamStatus": "megazero.integrations.parameters",
        "zero_wrapper_for_fp_tensor_constructor": "megazero.integrations.parameters",
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": "megazero.integrations.accelerator",
    },
    "deepspeed.runtime.zero.utils": {"is_zero_param": "megazero.integrations.parameters"},
    "deepspeed.utils": {**_ACCESS, **_LEAVES, **_LOGGING, "OnDevice": "megazero.integrations.parameters"},
    "deepspeed.utils.groups": {"*": "megazero.integrations.groups"},
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.zero_to_fp32": _FP32,
    "deepspeed.zero": _SHARDED,
}
