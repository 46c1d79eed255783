"""A ds_config as it is read: values, "auto", batch sizes, and every mistake with its remedy (cases 37, 38)."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass

import pytest
import torch

from megazero.ds_config import DsConfig, read_ds_config
from megazero.ds_config.table import ALIASES, KEYS, SECTIONS, TITLES, Fate
from megazero.errors import ConfigError

MICRO = {"train_micro_batch_size_per_gpu": 2}


def read(settings: dict, world_size: int = 4, **trainer_values) -> DsConfig:
    values = {name.replace("__", "."): value for name, value in trainer_values.items()}
    return read_ds_config(MICRO | settings, world_size, values)


def problems(settings: dict, world_size: int = 4) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read_ds_config(settings, world_size)
    return dict(caught.value.problems)


# As Hugging Face's and Accelerate's documentation has them, down to the Infinity.
HUGGING_FACE = """{
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
             "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW",
                  "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR",
                  "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
                             "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3,
        "offload_optimizer": {"device": "none", "nvme_path": null, "pin_memory": true},
        "offload_param": {"device": "none"},
        "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": Infinity,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}"""
TRAINER = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 5,
    "train_batch_size": 60,
    "gradient_clipping": 0.5,
    "optimizer.params.lr": 2e-5,
    "optimizer.params.betas": [0.9, 0.98],
    "optimizer.params.eps": 1e-6,
    "optimizer.params.weight_decay": 0.01,
    "scheduler.params.total_num_steps": 100,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 2e-5,
    "scheduler.params.warmup_num_steps": 7.0,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "zero_optimization.reduce_bucket_size": 4096,
    "zero_optimization.stage3_prefetch_bucket_size": 3686,
    "zero_optimization.stage3_param_persistence_threshold": 640,
}


def test_a_trainer_s_file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(HUGGING_FACE)
    config = read_ds_config(path, 4, TRAINER)
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert sizes == (60, 3, 5) and config.gradient_clipping == 0.5 and config.steps_per_print is None
    assert config.precision.dtype == torch.bfloat16 and config.precision.grad_dtype == torch.float32
    zero = config.zero
    assert (zero.stage, zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (3, 4096, 3686)
    assert zero.stage3_param_persistence_threshold == 640 and zero.stage3_max_live_parameters == 10**9
    assert type(zero.stage3_max_live_parameters) is int
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params == {"lr": 2e-5, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
    assert config.scheduler.params["warmup_num_steps"] == 7 and config.scheduler.params["total_num_steps"] == 100
    assert config.deferred == ()
    assert config.not_needed == (
        "zero_optimization.sub_group_size",
        "zero_optimization.stage3_max_reuse_distance",
    )


def test_parameters_stay_where_they_are_below_stage_3():
    """accelerate names a place for them at any stage; it is listed as without effect, in either spelling."""
    for settings in ({"offload_param": {"device": "cpu"}}, {"cpu_offload_param": True}):
        config = read_ds_config({"train_batch_size": 1, "zero_optimization": {"stage": 2, **settings}}, 1)
        assert config.zero.offload_param.device == "none"
        assert config.not_needed == ("zero_optimization.offload_param.device",)


def test_without_a_trainer_autos_take_the_defaults():
    settings = json.loads(HUGGING_FACE)
    settings["scheduler"]["params"]["total_num_steps"] = 50
    before = json.dumps(settings)
    config = read_ds_config(settings, 4)
    assert json.dumps(settings) == before
    assert (config.train_batch_size, config.gradient_clipping, config.precision.dtype) == (4, 1.0, torch.float32)
    assert config.zero.reduce_bucket_size == 500_000_000 and config.optimizer.params == {"weight_decay": 0.0}
    assert config.scheduler.params == {"total_num_steps": 50}
    for line in (
        "train_batch_size = 4",
        "train_micro_batch_size_per_gpu = 1",
        "bf16.enabled = false",
        "zero_optimization.reduce_bucket_size = 500000000",
        "optimizer.params.lr = 0.001",
        "scheduler.params.warmup_num_steps = 1000",
        "gradient_clipping = 1.0",
    ):
        assert line in config.deferred, line
    del settings["scheduler"]["params"]["total_num_steps"]
    settings["scheduler"]["params"]["total_num_steps"] = "auto"
    assert "needs it" in problems(settings)["scheduler.params.total_num_steps"]


def test_every_key_may_be_auto():
    """Case 37: never a TypeError."""
    for path, key in KEYS.items():
        if path in ("optimizer.params", "scheduler.params"):
            continue
        settings: dict = {}
        *above, name = path.split(".")
        node = settings
        for part in above:
            node = node.setdefault(part, {})
        node[name] = "auto"
        config = read(settings) if path not in MICRO else read_ds_config(settings, 4)
        expected = key.fate is Fate.USED
        assert [line.split(" = ")[0] for line in config.deferred] == [path] * expected, path
    params = {name: "auto" for name in ("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "amsgrad")}
    assert read({"optimizer": {"type": "Adam", "params": params}}).optimizer.params == {"weight_decay": 0.0}
    config = read({"scheduler": {"type": "StepLR", "params": {"step_size": 3, "gamma": "auto"}}})
    assert config.scheduler.params == {"step_size": 3} and config.deferred == ("scheduler.params.gamma = 0.1",)
    assert read({"fp16": "auto", "zero_optimization": "auto", "optimizer": "auto"}).optimizer is None


def test_whatever_a_key_holds_a_config_comes_out_or_a_config_error():
    wrong = 0
    for path in [*KEYS, *SECTIONS, "optimizer.params.betas", "scheduler.params.warmup_max_lr"]:
        for value in ("", "x", True, -1, 1.5, math.nan, math.inf, [], [None], {"a": 1}, {1: 2}, b"x"):
            settings = value
            for part in reversed(path.split(".")):
                settings = {part: settings}
            for section, kind in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
                if path.startswith(f"{section}.params"):
                    settings[section]["type"] = kind
            try:
                read(settings)
            except ConfigError as error:
                wrong += 1
                assert error.problems[0][0].split(".")[0] == path.split(".")[0]
    assert wrong > 1000


def test_an_empty_config_has_deepspeed_s_defaults():
    config = read({})
    assert config.optimizer is config.scheduler is None and config.precision.dtype == torch.float32
    assert config.zero.stage == 0 and config.gradient_clipping == 1.0
    assert config.precision.loss_scale is None and config.precision.initial_loss_scale == 65536.0
    assert config.not_needed == config.deferred == ()


def test_values():
    config = read(
        {
            "fp16": {"enabled": "true", "loss_scale": "128", "initial_scale_power": 4.0},
            "zero_optimization": {"stage": "2", "reduce_bucket_size": 5e8, "allgather_bucket_size": "2e8"},
            "data_types": {"grad_accum_dtype": "bf16"},
            "communication_data_type": "bfloat16",
            "checkpoint": {"tag_validation": "FAIL", "async_save": True},
            "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
            "tensorboard": {"enabled": True, "output_path": "here", "job_name": "x"},
            "steps_per_print": math.inf,
            "amp": {"enabled": False, "opt_level": "O1"},
            "flops_profiler": {"enabled": "auto", "profile_step": 1},
            "tensor_parallel": {"autotp_size": 1},
            "zero_allow_untested_optimizer": True,
        }
    )
    assert config.precision.dtype == torch.float16 and config.precision.loss_scale == 128.0
    assert config.precision.initial_loss_scale == 16.0 and config.precision.grad_dtype == torch.bfloat16
    assert (config.zero.stage, config.zero.reduce_bucket_size, config.zero.allgather_bucket_size) == (2, 5e8, 2e8)
    assert config.checkpoint.tag_validation == "Fail" and config.checkpoint.async_save
    assert config.comms_logger.prof_ops == ("all_reduce",) and config.tensorboard.output_path == "here"
    assert config.zero_allow_untested_optimizer


def test_other_names():
    config = read({"bfloat16": {"enabled": True}, "zero_optimization": True})
    assert config.precision.dtype == torch.bfloat16 and config.zero.stage == 1
    config = read({"zero_optimization": {"prefetch_bucket_size": 7, "stage3_gather_fp16_weights_on_model_save": True}})
    assert config.zero.stage3_prefetch_bucket_size == 7 and config.zero.stage3_gather_16bit_weights_on_model_save
    both = {"prefetch_bucket_size": 7, "stage3_prefetch_bucket_size": 8}
    path = "zero_optimization.stage3_prefetch_bucket_size"
    assert "given twice" in problems(MICRO | {"zero_optimization": both})[path]


@pytest.mark.parametrize(
    ("total", "micro", "steps", "expected"),
    [
        (64, 4, None, (64, 4, 4)),
        (64, None, 2, (64, 8, 2)),
        (None, 4, 2, (32, 4, 2)),
        (64, 4, 4, (64, 4, 4)),
        (64, None, None, (64, 16, 1)),
        (None, 4, None, (16, 4, 1)),
        (64.0, 4.0, "auto", (64, 4, 4)),
        ("auto", "auto", 3, (12, 1, 3)),
        ("auto", "auto", "auto", (4, 1, 1)),
        (None, "auto", None, (4, 1, 1)),
    ],
)
def test_batch_sizes(total, micro, steps, expected):
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    given = {name: value for name, value in zip(names, (total, micro, steps)) if value is not None}
    config = read_ds_config(given, 4)
    assert tuple(getattr(config, name) for name in names) == expected


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ((60, 4, 4), "train_batch_size", ["4 x", "4 processes = 64", "set it to 64"]),
        ((62, 4, None), "train_batch_size", ["62 is not a multiple of", "= 16", "48 or 64"]),
        ((3, None, None), "train_batch_size", ["4 processes = 4", "use 4"]),
        ((None, None, 3), "train_micro_batch_size_per_gpu", ["missing", "train_batch_size"]),
        ((None, None, None), "train_micro_batch_size_per_gpu", ["missing", "train_batch_size"]),
        ((0, None, None), "train_batch_size", ["0 must be at least 1"]),
        ((8, 1.5, None), "train_micro_batch_size_per_gpu", ["1.5 must be a whole number"]),
    ],
)
def test_batch_sizes_that_cannot_be(given, field, words):
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    found = problems({name: value for name, value in zip(names, given) if value is not None})
    assert list(found) == [field]
    assert all(word in found[field] for word in words), found


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation", "did you mean zero_optimization?"),
        ({"stage": 2}, "stage", "did you mean zero_optimization.stage?"),
        ({"gradient_cliping": 1}, "gradient_cliping", "did you mean gradient_clipping?"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", "did you mean zero_optimization.stage?"),
        ({"gradient_cliping": "auto"}, "gradient_cliping", "did you mean gradient_clipping?"),
        ({"gradient_cliping": None}, "gradient_cliping", "did you mean gradient_clipping?"),
        (
            {"optimizer": {"type": "AdamW", "params": {"weigth_decay": "auto"}}},
            "optimizer.params.weigth_decay",
            "did you mean weight_decay?",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": "auto"}}},
            "scheduler.params.warmup_steps",
            "did you mean warmup_num_steps?",
        ),
        ({"fp16": {"enable": True}}, "fp16.enable", "did you mean fp16.enabled?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "4 must be at most 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "True must be a number"),
        ({"zero_optimization": 3}, "zero_optimization", "must be an object of settings"),
        ({"zero_optimization": {"overlap_comm": "yes"}}, "zero_optimization.overlap_comm", "must be true or false"),
        ({"zero_optimization": {"reduce_bucket_size": math.nan}}, "zero_optimization.reduce_bucket_size", "a number"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}},
            "zero_optimization.offload_optimizer.device",
            "cpu needs zero_optimization.stage 1, 2 or 3",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.nvme_path",
            "give a directory",
        ),
        (
            {
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}},
                "checkpoint": {"async_save": True},
            },
            "checkpoint.async_save",
            "would copy to host memory",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "cpu_offload": True,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "x"},
                }
            },
            "zero_optimization.cpu_offload",
            "and that is nvme",
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states", "goes with"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.nvme_path",
            "is missing",
        ),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights",
            "true asks for what megazero does not have: quantised gathering",
        ),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow", "does not have ZenFlow"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast", "use bf16 or fp16"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel", "does not have"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", 'set it to "mean"'),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled", "fp16.enabled; choose one"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale", "0 must be above 0"),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 8, "initial_scale_power": 2}},
            "fp16.min_loss_scale",
            "8 is above the first one",
        ),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype", "too narrow"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype", "one of fp32, fp16, bf16"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", "bf16, and fp16.enabled"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "data_types.grad_accum_dtype is fp32"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type", "is missing"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params", "must be an object of arguments"),
        ({"optimizer": {"type": 3}}, "optimizer.type", "3 must be a string"),
        (
            {"optimizer": {"type": "Adafactor"}, "zero_optimization": {"stage": 1}},
            "optimizer.type",
            "Adafactor needs whole tensors, and zero_optimization.stage 1",
        ),
        ({"scheduler": {"params": {"warmup_num_steps": 1}}}, "scheduler.type", "is missing"),
        ({"zero_optimization": {"mics_shard_size": 3}}, "zero_optimization.mics_shard_size", "use one of 1, 2, 4"),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size",
            "8 does not divide the 4 processes",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "mics_shard_size": 2}},
            "zero_optimization.zero_hpz_partition_size",
            "leave out one",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else None,
)  # fmt: skip
def test_mistakes(settings, field, words):
    found = problems(MICRO | settings)
    assert list(found) == [field]
    assert words in found[field], found


def test_all_mistakes_at_once_and_none_that_only_follows():
    found = problems(
        {
            "train_batch_size": 60,
            "train_micro_batch_size_per_gpu": 1.5,
            "gradient_accumulation_steps": 4,
            "fp16": {"enabled": "perhaps"},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": -1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "high"}},
            "nebula": {"enabled": True},
            "zero_optimization": {"stage": 9, "mics_shard_size": 3},
        }
    )
    assert list(found) == [
        "train_micro_batch_size_per_gpu",
        "fp16.enabled",
        "nebula",
        "zero_optimization.stage",
        "optimizer.params",
        "scheduler.params.warmup_max_lr",
        "zero_optimization.mics_shard_size",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n // no\n}', "line 2, column 2"),
        ("[1]", "holds a list"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "given twice"),
        ("", "line 1"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"seed": ' + "9" * 5000 + "}", "cannot be read: .*digits"),
        ('{"train_batch_size": ' + "9" * 400 + "}", "must be a number"),
        ('{"optimizer": {"type": "' + "A" * 100_000 + '"}}', "is neither Lion nor in torch.optim; there are"),
    ],
)
def test_files_that_cannot_be_read(text, words, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_ds_config(str(path), 1)


def test_sources_that_cannot_be_read(tmp_path):
    for source, words in ((tmp_path / "none.json", "No such file"), (tmp_path, "directory"), (None, "NoneType")):
        with pytest.raises(ConfigError, match=words):
            read_ds_config(source, 1)
    (tmp_path / "binary").write_bytes(b'{"\xff": 1}')
    with pytest.raises(ConfigError, match="not a text file"):
        read_ds_config(tmp_path / "binary", 1)


def test_the_table_and_the_tree_are_of_one_mind():
    """Each used key has its place in the tree, each place of a section its key; defaults are of their kind."""
    assert len(KEYS) == sum(map(len, TITLES.values())) and not KEYS.keys() & SECTIONS
    assert all(path in KEYS or path in SECTIONS for path in ALIASES.values()) and not KEYS.keys() & ALIASES.keys()

    def paths(name, value):
        if not is_dataclass(value):
            return {name}
        return set().union(*(paths(f"{name}.{part.name}", getattr(value, part.name)) for part in fields(value)))

    config, in_tree = read({}), set()
    for part in fields(config):
        name = "zero_optimization" if part.name == "zero" else part.name
        in_tree |= paths(name, getattr(config, part.name))
    derived = {"fp16", "bf16", "data_types", "optimizer", "scheduler"}
    rules_only = {"communication_data_type", "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"}
    used = {path for path, key in KEYS.items() if key.fate is Fate.USED}
    assert {path for path in used if path.split(".")[0] not in derived} - rules_only <= in_tree
    for key in KEYS.values():
        if key.default is not None and key.kind.name != "any":
            key.kind.read(key.default)
