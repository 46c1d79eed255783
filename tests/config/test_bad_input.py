"""P6, errors before work: each wrong setting gives one message that names the field and what would fix it."""

import json

import pytest

from megazero.config import Config, load_config, with_model
from megazero.engine import Engine
from megazero.errors import ConfigError
from megazero.models.config import ModelConfig
from tests.closed import closed_directory

# flags, processes, {field: words its message must have}; no other field may be reported
BAD = [
    # unknown names
    ("--train.stepz 3", 1, {"--train.stepz": "did you mean --train.steps?"}),
    ("--optimiser.lr 1", 1, {"--optimiser.lr": "did you mean --optimizer.lr?"}),
    ("--train.lr 1", 1, {"--train.lr": "did you mean --optimizer.lr?"}),
    ("--seq-length 8", 1, {"--seq-length": "did you mean --data.seq_length?"}),
    ("--train.global-batch-size 8", 1, {"--train.global-batch-size": "did you mean --train.global_batch_size?"}),
    ("--model.preset gpt2_124m", 1, {"model.preset": "did you mean gpt2-124m?"}),
    ("--model.preset lama3-8b", 1, {"model.preset": "did you mean llama3-8b?"}),
    ("--optimizer.schedule cosin", 1, {"optimizer.schedule": "did you mean cosine?"}),
    ("--model.activation swigli", 1, {"model.activation": "did you mean 'swiglu'?"}),
    ("stray", 1, {"stray": "--section.field"}),
    # values
    ("--train.steps", 1, {"train.steps": "needs a value: a whole number"}),
    ("--train.deterministic --train.seed 1", 1, {"train.deterministic": "true or false"}),
    ("--optimizer.lr 1e-3 1e-4", 1, {"optimizer.lr": "takes one value"}),
    ("--train.steps many", 1, {"train.steps": "'many' is not a whole number"}),
    ("--train.steps 2.5", 1, {"train.steps": "2.5 is not a whole number"}),
    ("--train.steps 0", 1, {"train.steps": "0 must be at least 1"}),
    ("--parallel.tp 0", 1, {"parallel.tp": "0 must be at least 1"}),
    ("--optimizer.lr nan", 1, {"optimizer.lr": "is not a number"}),
    ("--optimizer.lr -1e-3", 1, {"optimizer.lr": "must be at least 0"}),
    ("--optimizer.betas 0.9", 1, {"optimizer.betas": "2 numbers"}),
    ("--optimizer.betas 0.9 1.0", 1, {"optimizer.betas": "below 1"}),
    ("--train.precision fp8", 1, {"train.precision": "auto, bf16, fp16 or fp32"}),
    ("--train.compile maybe", 1, {"train.compile": "auto, true or false"}),
    ("--train.time_limit 1:75:00 --checkpoint.dir d", 1, {"train.time_limit": "HH:MM:SS"}),
    ("--model.dropout 1.0", 1, {"model.dropout": "below 1"}),
    ("--data.train 0.5 a 0.5", 1, {"data.train": "alternates weight and prefix"}),
    ("--data.train -0.5 a 0.5 b", 1, {"data.train": "weight -0.5 of a"}),
    ("--data.train 0 a 0 b", 1, {"data.train": "no dataset has a weight above 0"}),
    ("--data.split 100 0", 1, {"data.split": "both shares must be above 0"}),
    # processes and divisibility
    (
        "--parallel.tp 8",
        8,
        {"parallel.tp": "8 does not divide model.num_attention_heads = 12; use 1, 2, 3, 4, 6 or 12"},
    ),
    ("--parallel.tp 4", 2, {"parallel.tp": "needs at least 4 processes and there are 2; start 4"}),
    ("--parallel.tp 2 --parallel.pp 2", 6, {"parallel.tp": "does not divide the 6 processes; start 4 or 8"}),
    (
        "--train.global_batch_size 10 --train.micro_batch_size 4 --parallel.tp 2",
        4,
        {"train.global_batch_size": "10 is not a multiple of train.micro_batch_size x dp = 4 x 2 = 8"},
    ),
    ("--train.global_batch_size 4", 8, {"train.global_batch_size": "use 8"}),
    (
        "--train.global_batch_size 8 --train.micro_batch_size 16",
        1,
        {"train.global_batch_size": "; use 16, or a smaller train.micro_batch_size"},
    ),
    ("--model.num_key_value_heads 5", 1, {"model.num_key_value_heads": "5 does not divide"}),
    ("--model.num_key_value_heads 0", 1, {"model.num_key_value_heads": "at least 1"}),
    ("--model.preset qwen2.5-7b --parallel.tp 7", 7, {"parallel.tp": "model.num_key_value_heads = 4 "}),
    (
        "--model.ffn_hidden_size 1001 --parallel.tp 2",
        2,
        {"parallel.tp": "model.ffn_hidden_size = 1001 (4 x model.hidden_size where unset); use 1, or 1000 or 1002"},
    ),
    ("--model.hidden_size 770", 1, {"model.num_attention_heads": "model.hidden_size = 770; use 768 or 780 wide"}),
    ("--model.position rotary --model.head_dim 63", 1, {"model.head_dim": "use 62 or 64"}),
    ("--parallel.pp 13", 13, {"parallel.pp": "more than model.num_layers = 12"}),
    ("--parallel.pp 2 --parallel.partition 4 4 4", 2, {"parallel.partition": "parallel.pp = 2"}),
    ("--parallel.pp 2 --parallel.partition 6 5", 2, {"parallel.partition": "6 + 5 = 11 layers"}),
    ("--parallel.pp 2 --parallel.partition 12 0", 2, {"parallel.partition": "stage 1 (counted from 0) has no layer"}),
    ("--parallel.partition 6 6", 1, {"parallel.partition": "parallel.pp = 1"}),
    ("--parallel.sequence_parallel true", 1, {"parallel.sequence_parallel": "parallel.tp above 1"}),
    (
        "--parallel.tp 2 --parallel.sequence_parallel true --data.seq_length 33",
        2,
        {"parallel.sequence_parallel": "use 32 or 34 tokens"},
    ),
    ("--parallel.schedule interleaved", 1, {"parallel.schedule": "gpipe or 1f1b"}),
    ("--zero.stage 2 --parallel.keep_gathered true", 1, {"parallel.keep_gathered": "use 3"}),
    ("--zero.reshard_after_forward false", 1, {"zero.reshard_after_forward": "zero.stage = 0, which keeps"}),
    (
        "--zero.stage 3 --parallel.keep_gathered true --zero.reshard_after_forward false",
        1,
        {"zero.reshard_after_forward": "leave out one"},
    ),
    ("--zero.stage 1 --zero.zero_hpz_partition_size 2", 2, {"zero.zero_hpz_partition_size": "has no meaning"}),
    ("--zero.stage 3 --zero.zero_hpz_partition_size 3", 4, {"zero.zero_hpz_partition_size": "use 1, 2 or 4"}),
    ("--zero.mics_shard_size 2", 4, {"zero.mics_shard_size": "use 1, 2 or 3"}),
    ("--zero.stage 3 --zero.mics_shard_size 3", 4, {"zero.mics_shard_size": "does not divide dp = 4"}),
    (
        "--zero.stage 3 --zero.mics_shard_size 2 --zero.zero_hpz_partition_size 2",
        4,
        {"zero.zero_hpz_partition_size": "leave out one"},
    ),
    ("--zero.stage 4", 1, {"zero.stage": "at most 3"}),
    # settings that contradict each other
    ("--data.seq_length 2048", 1, {"data.seq_length": "model.max_position_embeddings = 1024"}),
    ("--data.eod_id 50257", 1, {"data.eod_id": "model.vocab_size = 50257; use at most 50256"}),
    ("--data.valid v --data.split 95 5", 1, {"data.split": "data.valid"}),
    ("--train.eval_interval 10", 1, {"data.valid": "train.eval_interval = 10"}),
    ("--optimizer.min_lr 1", 1, {"optimizer.min_lr": "above optimizer.lr = 0.0003"}),
    ("--optimizer.warmup_steps 2000", 1, {"optimizer.warmup_steps": "train.steps = 1000"}),
    ("--optimizer.schedule wsd", 1, {"optimizer.decay_steps": "e.g. 100 of train.steps = 1000"}),
    ("--optimizer.decay_steps 10", 1, {"optimizer.decay_steps": "optimizer.schedule = cosine"}),
    (
        "--optimizer.schedule wsd --optimizer.warmup_steps 600 --optimizer.decay_steps 500",
        1,
        {"optimizer.decay_steps": "use at most 400"},
    ),
    ("--checkpoint.save_interval 5", 1, {"checkpoint.save_interval": "checkpoint.dir"}),
    ("--checkpoint.keep 5", 1, {"checkpoint.keep": "checkpoint.dir"}),
    ("--train.time_limit 90", 1, {"train.time_limit": "checkpoint.dir"}),
    ("--model.preset gpt2-124m --model.init_from hf", 1, {"model.preset": "model.init_from"}),
    ("--model.rope_scaling.type linear --model.rope_scaling.factor 2", 1, {"model.rope_scaling": "model.position"}),
    ("--model.position rotary --model.rope_scaling.type linear", 1, {"model.rope_scaling.factor": "is missing"}),
]


def problems(argv, world_size=1):
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world_size=world_size)
    fields = [field for field, _ in caught.value.problems]
    assert len(set(fields)) == len(fields), fields
    return dict(caught.value.problems)


@pytest.mark.parametrize("flags, world_size, expected", BAD, ids=[flags for flags, _, _ in BAD])
def test_one_clear_message(flags, world_size, expected):
    argv = flags.split() if "--data.train" in flags else [*flags.split(), "--data.train", "corpus"]
    found = problems(argv, world_size)
    assert found.keys() == expected.keys()
    for field, words in expected.items():
        assert words in found[field]


def test_a_fix_that_is_offered_works():
    flags = ["--data.train", "corpus", "--model.num_attention_heads", "16"]
    assert "use 1, 2, 4, 8 or 16" in problems([*flags, "--parallel.tp", "3"], 3)["parallel.tp"]
    for tp in (1, 2, 4, 8, 16):
        load_config([*flags, "--parallel.tp", str(tp)], world_size=tp)


def test_training_data_must_be_named():
    assert "data/preprocess.py" in problems([])["data.train"]
    load_config([], needs_data=False)


def test_everything_wrong_is_reported_at_once(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("trian: {steps: 3}\noptimizer: {schedul: cosine, eps: 0}\ndata: {train: a}\n")
    found = problems(
        ["--config", str(path), "--train.stepz", "1", "--parallel.tp", "5", "--checkpoint.keep", "1"], world_size=5
    )
    assert set(found) == {
        "--train.stepz",
        "trian",
        "optimizer.schedul",
        "optimizer.eps",
        "checkpoint.keep",
        "parallel.tp",
    }
    assert found["trian"].endswith("did you mean train?")
    assert found["optimizer.schedul"].endswith("did you mean optimizer.schedule?")


def test_what_follows_from_a_wrong_field_is_not_reported():
    found = problems("--data.train a --parallel.tp x --train.micro_batch_size 3 --parallel.pp 2".split(), world_size=4)
    assert found.keys() == {"parallel.tp"}


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.yaml", "train: [1, 2\n", "line 2"),
        ("a.yaml", "train: {steps: 1}\ntrain: {seed: 2}\n", "'train' is given twice"),
        ("a.yaml", "- 1\n", "sections with fields"),
        ("a.yaml", "1: 2\n", "1 is no field name"),
        ("a.yaml", "train: {steps: 08}\ntrain:\n", "'train' is given twice"),
        ("a.json", '{"train": }', "line 1"),
        ("a.json", '{"train": {"steps": 1, "steps": 2}}', "'steps' is given twice in one section"),
        ("a.json", "[" * 200_000, "recursion"),
        ("a.yaml", "[" * 2_000, "brackets inside brackets, more than 50"),
        ("a.yaml", "- " * 2_000, "recursion"),
        ("a.yaml", "train: {deterministic: !!bool maybe}", "is a tag, which settings have no use for"),
        ("a.yaml", "train: !!python/object/apply:os.system [exit]", "is a tag, which settings have no use for"),
        ("a.yaml", "train: {seed: %s}" % ("9" * 5000), "digits"),
        ("a.txt", "", "must end in .yaml, .yml or .json"),
    ],
)
def test_files(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    found = problems(["--config", str(path)])
    assert str(path) in found["--config"] and words in found["--config"]


@pytest.mark.parametrize(
    "text, field, words",
    [
        # Lists of aliases of lists: the error would show nine to the power of thirty of them.
        (
            "data: {train: [&b0 [x], " + ", ".join(f"&b{n} [{f'*b{n - 1}, ' * 9}]" for n in range(1, 30)) + "]}",
            "data.train",
            "must be a prefix, or weights and prefixes in turn",
        ),
        ("train: {seed: &loop [*loop]}", "train.seed", "is not a whole number"),
        ("train: {seed: &loop {again: *loop}}", "train.seed", "a section with 1 fields is not a whole number"),
        ("%s: {}" % ("x" * 1000), "x" * 1000, "unknown field; --help lists all"),
        (f"model: {{num_attention_heads: {10**12}}}", "model.num_attention_heads", "do not divide"),
        ("model: {rope_scaling.type: 1}", "model.rope_scaling.type", "unknown field"),
        ("train.steps: 1", "train.steps", "unknown field"),
        ("model: {rope_scaling: {}}", "model.rope_scaling.type", "is missing"),
    ],
)
def test_files_that_would_keep_it_busy_or_lead_it_astray(tmp_path, text, field, words):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert words in problems(["--config", str(path)])[field]


def test_a_message_is_no_longer_than_can_be_read():
    message = str(ConfigError.single("field", "x" * 100_000 + " is wrong; leave it out"))
    assert len(message) < 2100 and message.startswith("field: xxx") and message.endswith(" is wrong; leave it out")


def test_missing_file(tmp_path):
    found = problems(["--config", str(tmp_path / "none.yaml")])
    assert found["--config"] == f"cannot read {tmp_path / 'none.yaml'}: No such file or directory"


def test_section_that_is_no_mapping(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"train": 5, "data": {"train": "a"}}))
    expected = {"train": "5 is not a section with fields"}
    assert problems(["--config", str(path)]) == expected
    # nor may flags hide it
    assert problems(["--config", str(path), "--train.steps", "3"]) == expected


def test_rules_of_the_architecture_wait_for_init_from():
    config = load_config("--data.train a --model.init_from hf --parallel.tp 5".split())
    with pytest.raises(ConfigError, match="parallel.tp: 5 does not divide model.num_attention_heads = 8"):
        with_model(config, ModelConfig(num_attention_heads=8, hidden_size=64))


def test_architecture_fields_must_agree_with_init_from():
    flags = "--data.train a --model.init_from hf --model.num_layers 3 --model.dropout 0.1 --model.hidden_size 64"
    architecture = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=8)
    with pytest.raises(ConfigError) as caught:
        with_model(load_config(flags.split()), architecture)
    assert caught.value.problems == [("model.num_layers", "3 contradicts 4 at hf; leave it out")]

    config = with_model(load_config([*flags.split(), "--model.num_layers", "4"]), architecture)
    assert config.model.known
    assert config.model.architecture == architecture.model_copy(update={"dropout": 0.1})


def test_layout_refuses_processes_that_do_not_fit():
    config = Config.from_dict({"parallel": {"tp": 2}})
    with pytest.raises(ConfigError, match="does not divide the 3 processes"):
        config.layout(3)
    with pytest.raises(ConfigError, match="zero.mics_shard_size"):
        Config(zero={"stage": 2, "mics_shard_size": 2}).validate_world(1)


def test_a_directory_that_may_not_be_entered_is_named_for_every_path(monkeypatch):
    monkeypatch.chdir("/")
    nvme = {"zero.stage": "3", "zero.offload_optimizer.device": "nvme", "zero.offload_param.device": "nvme"}
    paths = ["checkpoint.dir", "checkpoint.resume", "log.jsonl", "log.events", "log.tensorboard", "log.timeline"]
    paths += ["data.train", "data.valid", "data.tokenizer", "model.init_from"]
    paths += ["zero.offload_optimizer.nvme_path", "zero.offload_param.nvme_path"]
    with closed_directory() as closed:
        given = {path: f"{closed}/a/{path}" for path in paths}
        given["data.tokenizer"] = f"hf:{given['data.tokenizer']}"
        found = dict(problems([word for name, value in {**given, **nvme}.items() for word in (f"--{name}", value)]))
        with pytest.raises(ConfigError, match=f"checkpoint.dir: .*may not enter {closed}; have that allowed"):
            Engine(Config(checkpoint={"dir": given["checkpoint.dir"]}))
    assert found.keys() == given.keys()
    for name, message in found.items():
        assert message.startswith(f"{closed}/a/{name}") and message.endswith(
            f" cannot be reached: this user may not enter {closed}; have that allowed, or choose another place"
        )


def test_a_path_that_cannot_be():
    found = problems(["--data.train", "a", "--checkpoint.dir", "a" * 300])
    assert found["checkpoint.dir"].endswith("a cannot be reached: File name too long; choose another place")


def test_a_home_of_nobody():
    nvme = ["--zero.offload_optimizer.device", "nvme", "--zero.offload_optimizer.nvme_path", "~no-such-user/swap"]
    found = problems(["--data.train", "a", "--data.tokenizer", "hf:~no-such-user/tokenizer.json", *nvme])
    assert found["data.tokenizer"].startswith("~no-such-user/tokenizer.json: there is no user 'no-such-user'; give")
    assert found["zero.offload_optimizer.nvme_path"].startswith("~no-such-user/swap: there is no user 'no-such-user'")
