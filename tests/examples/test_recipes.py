"""What the recipes would start: each is run with a Python that records the launch in place of making it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megazero.config import Config, load_config
from megazero.planner.adapters import adapter_memory, adapter_time
from megazero.planner.chips import CHIPS
from megazero.planner.dry_adapters import adapters_dry_run, adapters_planned
from megazero.planner.dry_run import dry_run, planned
from megazero.planner.memory import plan
from megazero.planner.step_time import step_time
from tools.benchmark import load_settings, parse_arguments
from tools.layout_runs import parse_run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAYOUT = (
    *("TP", "PP", "VPP", "ZERO", "MBS", "GBS", "RECOMPUTE", "NPROC", "MODEL", "SEQ", "STEPS", "DATA", "OUT"),
    *("PYTHON", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"),
)
SLURM = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "42"}

RECORDER = """#!/usr/bin/env bash
case "$1 $2 $3" in
    "-m megazero launch" | "-m torch.distributed.run"*) printf '%s\\n' "$@" >"$RECORD" ;;
    "-c import torch; print(torch.cuda.device_count())"*) echo "${GPUS:-0}" ;;
    *) exec {python} "$@" ;;
esac
"""


class Recipes:
    """Runs scripts of examples/ in a folder whose name has a space."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a folder"
        self.folder.mkdir()
        self.record = self.folder / "record"
        recorder = self.folder / "python"
        recorder.write_text(RECORDER.replace("{python}", f"'{sys.executable}'"))
        recorder.chmod(0o755)
        for name, text in (("srun", 'shift; exec "$@"'), ("scontrol", "echo node-a; echo node-b")):
            (self.folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (self.folder / name).chmod(0o755)

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        kept = {key: value for key, value in os.environ.items() if key not in LAYOUT}
        kept |= {"PYTHON": str(self.folder / "python"), "RECORD": str(self.record), "OUT": str(self.folder / "out")}
        kept |= {"DATA": "prefix", "PATH": f"{self.folder}:{kept['PATH']}"} | environment
        self.record.unlink(missing_ok=True)
        command = ["bash", str(EXAMPLES / script), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=kept, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def launched(
        self, script: str, *arguments: str, program: str = "pretrain/gpt.py", **environment: str
    ) -> tuple[list[str], list[str]]:
        """(the launcher's arguments, those of the program, pretrain/gpt.py unless said otherwise)."""
        done = self.run(script, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        words = self.record.read_text().splitlines()
        split = words.index(str(ROOT / program))
        return words[:split], words[split + 1 :]


@pytest.fixture
def recipes(tmp_path: Path) -> Recipes:
    return Recipes(tmp_path)


def parsed(flags: list[str], processes: int) -> Config:
    return load_config(flags, world_size=processes, needs_data=False)


@pytest.mark.parametrize(
    "script", sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))
)
def test_scripts_are_sound_bash(script: str):
    subprocess.run(["bash", "-n", str(EXAMPLES / script)], check=True)


def test_single_gpu(recipes: Recipes):
    launcher, flags = recipes.launched("single_gpu.sh", "--train.steps", "7", MBS="2", GBS="4", SEQ="128", ZERO="0")
    assert launcher == ["-m", "megazero", "launch", "--nproc", "1"]
    config = parsed(flags, 1)
    assert config.train.steps == 7 and config.train.micro_batch_size == 2 and config.train.global_batch_size == 4
    assert config.data.seq_length == 128 and config.zero.stage == 0 and config.model.preset == "gpt2-124m"
    assert config.checkpoint.dir == str(recipes.folder / "out" / "checkpoints")


@pytest.mark.parametrize("gpus, processes", [("0", 4), ("8", 8)])
def test_one_node_uses_what_is_there(recipes: Recipes, gpus: str, processes: int):
    launcher, flags = recipes.launched("one_node.sh", TP="2", PP="2", GPUS=gpus)
    assert launcher[-1] == str(processes)
    config = parsed(flags, processes)
    assert (config.parallel.tp, config.parallel.pp, config.zero.stage) == (2, 2, 1)


def test_two_nodes(recipes: Recipes):
    environment = {"MASTER": "node-a", "NODE_RANK": "1", "NPROC": "4", "TP": "4", "PP": "2"}
    launcher, flags = recipes.launched("two_nodes.sh", **environment)
    assert launcher == [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4"),
        *("--master-addr", "node-a", "--master-port", "29500"),
    ]
    assert parsed(flags, 8).parallel.tp == 4
    environment.pop("MASTER")
    failed = recipes.run("two_nodes.sh", **environment)
    assert failed.returncode != 0 and "MASTER is unset" in failed.stderr


def test_a_hostfile(recipes: Recipes):
    hosts = recipes.folder / "hosts"
    hosts.write_text("node-a slots=4\nnode-b slots=4\n")
    launcher, flags = recipes.launched("hostfile.sh", HOSTFILE=str(hosts), LAUNCH="--env A=b", TP="4", PP="2")
    assert launcher == ["-m", "megazero", "launch", "--hostfile", str(hosts), "--restarts", "3", "--env", "A=b"]
    assert parsed(flags, 8).parallel.tp == 4
    failed = recipes.run("hostfile.sh", HOSTFILE="none")
    assert failed.returncode != 0 and "HOSTFILE=none: no such file" in failed.stderr


def test_slurm(recipes: Recipes):
    environment = SLURM | {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "TP": "8", "MODEL": "llama3-8b"}
    launcher, flags = recipes.launched("slurm.sbatch", **environment)
    assert launcher == [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "8"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a:20042", "--rdzv-id", "42"),
    ]
    assert parsed(flags, 16).parallel.tp == 8


@pytest.mark.parametrize(
    ("script", "environment", "message"),
    [
        ("quickstart.sh", {"NPROC": "two"}, "NPROC=two: give a whole number from 1 on"),
        ("quickstart.sh", {"NPROC": "0"}, "NPROC=0: give a whole number from 1 on"),
        ("quickstart.sh", {"OUT": "/dev/null/out"}, "OUT=/dev/null/out: nothing can be written there"),
        ("sweep_layouts.sh", {"OUT": "/dev/null/out"}, "nothing can be written there"),
        ("measure_layouts.sh", {"OUT": "/dev/null/out", "NPROC": "2"}, "nothing can be written there"),
        ("single_gpu.sh", {"STEPS": "ten"}, "STEPS=ten: give a whole number from 1 on"),
        ("one_node.sh", {"TP": "2", "PP": "0"}, "PP=0: give a whole number from 1 on"),
        (
            "slurm.sbatch",
            {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": ""},
            "this is no Slurm job: start it by sbatch",
        ),
        (
            "recipes/llama3-70b.sbatch",
            {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": ""},
            "this is no Slurm job: start it by sbatch",
        ),
    ],
)
def test_mistakes_in_the_environment(recipes: Recipes, script: str, environment: dict[str, str], message: str):
    done = recipes.run(script, **environment)
    errors = done.stderr.splitlines()
    assert done.returncode == 1 and not recipes.record.exists()
    assert errors[-1].startswith("error: ") and message in errors[-1]
    assert not [line for line in errors if "line " in line], "bash's own words"


@pytest.mark.parametrize("requeue, said", [("1", ["requeue 42"]), ("0", [])])
def test_slurm_requeues_a_job_whose_time_is_over(recipes: Recipes, requeue: str, said: list[str]):
    """Slurm signals the script; what srun has started is told to end, and does so in its own time."""
    commands = {
        "srun": """trap 'sleep 0.2; echo saved >saved; exit' TERM
echo $$ >new; mv new pid; for i in {1..600}; do sleep 0.1; done""",
        "scontrol": 'if [ "$1" = show ]; then echo node-a; else echo "$@" >>said; fi',
        "scancel": 'echo "$@" >cancelled; kill -TERM "$(cat pid)"',
    }
    for name, text in commands.items():
        (recipes.folder / name).write_text(f"#!/usr/bin/env bash\ncd '{recipes.folder}'\n{text}\n")
        (recipes.folder / name).chmod(0o755)
    process = recipes.start("slurm.sbatch", SLURM_NNODES="1", SLURM_GPUS_ON_NODE="1", REQUEUE=requeue, **SLURM)
    while not (recipes.folder / "pid").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert (recipes.folder / "cancelled").read_text() == "--signal=TERM 42\n"
    assert (recipes.folder / "saved").read_text() == "saved\n"
    found = (recipes.folder / "said").read_text().splitlines() if (recipes.folder / "said").exists() else []
    assert found == said


# Script, environment, GPUs; chip of the plan that stands in the script.
RECIPES = [
    ("recipes/gpt3-1.3b-8gpu.sh", {}, 8, "h100"),
    ("recipes/gpt2-774m-24gb.sh", {}, 1, "rtx4090"),
    ("recipes/llama3.2-3b-h200.sh", {}, 1, "h200"),
    ("recipes/qwen2.5-14b-zero2-8gpu.sh", {}, 8, "h100"),
    *(
        (
            "recipes/llama3-70b.sbatch",
            SLURM | {"SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": "8"},
            8 * nodes,
            "h100",
        )
        for nodes in (4, 16, 64, 128)
    ),
    (
        "recipes/llama3-70b.sbatch",
        SLURM
        | {"SLURM_NNODES": "64", "SLURM_GPUS_ON_NODE": "8", "TP": "4", "PP": "4", "VPP": "16", "ZERO": "2"}
        | {"MBS": "1", "RECOMPUTE": "selective"},
        512,
        "h100",
    ),
]


def test_every_recipe_is_here():
    there = {f"recipes/{path.name}" for path in (EXAMPLES / "recipes").iterdir()}
    assert {script for script, *_ in RECIPES} | {ADAPTERS} == there


ADAPTERS = "recipes/llama3.1-8b-lora.sh"


def test_the_recipe_of_adapters_is_as_planned(recipes: Recipes):
    """As below; what it starts is a script of transformers' and peft's."""
    program = "examples/huggingface/train_sft.py"
    launcher, words = recipes.launched(ADAPTERS, "--seed", "7", program=program, MODEL="a model", DATA="texts.jsonl")
    assert launcher[3:] == ["--as-deepspeed", "--num_gpus=8"]
    flags = dict(
        zip(words[words.index("--model_name_or_path") :: 2], words[words.index("--model_name_or_path") + 1 :: 2])
    )
    assert flags["--model_name_or_path"] == "a model" and flags["--train_file"] == "texts.jsonl"
    assert flags["--seed"] == "7" and "--gradient_checkpointing" not in flags
    ds = json.loads((recipes.folder / "out" / "ds_config.json").read_text())
    micro_batch, steps = int(flags["--per_device_train_batch_size"]), int(flags["--gradient_accumulation_steps"])
    tree = {
        "model": {"preset": "llama3.1-8b"},
        "zero": {"stage": ds["zero_optimization"]["stage"]},
        "data": {"seq_length": int(flags["--max_length"])},
        "train": {"micro_batch_size": micro_batch, "global_batch_size": 8 * micro_batch * steps},
    }
    config, chip = Config.from_dict(tree), CHIPS["h100"]
    model, layout = config.model.architecture, config.layout(8)
    memory, seconds = adapter_memory(config, model, 16, layout), adapter_time(config, model, 16, layout, chip).seconds
    assert memory.peak <= chip.usable_memory()
    speed = config.train.global_batch_size * config.data.seq_length / 8 / seconds
    text = (EXAMPLES / ADAPTERS).read_text()
    assert f"{speed:,.0f} tokens/s per GPU" in text
    assert f"{memory.peak / 1e9:.1f} of {chip.usable_memory() / 1e9:.1f} GB" in text
    tree["model"]["num_layers"], tree["train"]["global_batch_size"] = 2, 8 * micro_batch * 2
    shallow = Config.from_dict(tree)
    assert adapters_dry_run(shallow, 8, 7, 16) == adapters_planned(shallow, 8, 7, 16)


@pytest.mark.parametrize(
    "environment, message",
    [
        ({}, "MODEL is unset"),
        ({"MODEL": "x", "TP": "2"}, "TP=2 PP=1: a Hugging Face model is neither"),
        ({"MODEL": "x", "GBS": "20"}, "GBS=20 is not a multiple of MBS x NPROC = 2 x 8"),
        ({"MODEL": "x", "GBS": "0"}, "MBS=2 NPROC=8 GBS=0: each must be at least 1"),
    ],
)
def test_the_recipe_of_adapters_says_why_not(recipes: Recipes, environment: dict[str, str], message: str):
    failed = recipes.run(ADAPTERS, **environment)
    assert failed.returncode != 0 and failed.stderr.count("\n") == 1 and message in failed.stderr


@pytest.mark.parametrize("script, environment, gpus, gpu", RECIPES)
def test_a_recipe_is_as_planned(recipes: Recipes, script: str, environment: dict[str, str], gpus: int, gpu: str):
    """It starts on its GPUs, fits them, and its figures are the planner's; its last rank goes through a dry run."""
    launcher, flags = recipes.launched(script, **environment)
    processes = int(launcher[launcher.index("--nproc") + 1]) if "--nproc" in launcher else gpus
    assert processes == gpus
    config, chip = parsed(flags, gpus), CHIPS[gpu]
    memory, time_of_step = plan(config, gpus), step_time(config, gpus, chip)
    assert memory.fullest.peak <= chip.usable_memory()
    speed = config.train.global_batch_size * config.data.seq_length / gpus / time_of_step.seconds
    text = (EXAMPLES / script).read_text()
    figures = f"{speed:,.0f} tokens/s", f"{memory.fullest.peak / 1e9:.1f} of {chip.usable_memory() / 1e9:.1f} GB"
    assert any(all(figure in line for figure in figures) for line in text.splitlines()), figures
    # Fewer layers and micro-batches, as many as show what there is to see.
    parallel = config.parallel
    batch = max(2, parallel.pp) * config.train.micro_batch_size * config.layout(gpus).dp
    fewer = ["--model.num_layers", str(max(4, parallel.pp * parallel.virtual_pp))]
    shallow = parsed([*flags, *fewer, "--train.global_batch_size", str(batch)], gpus)
    assert dry_run(shallow, gpus, gpus - 1) == planned(shallow, gpus, gpus - 1)


@pytest.mark.parametrize(
    "environment, layout",
    [
        ({}, (4, 2, 2)),
        ({"GPUS": "8"}, (4, 2, 2)),
        ({"GPUS": "3"}, (2, 2, 1)),
        ({"GPUS": "1"}, (1, 1, 1)),
        ({"NPROC": "1"}, (1, 1, 1)),
        ({"NPROC": "2"}, (2, 2, 1)),
        ({"NPROC": "3"}, (3, 1, 3)),
        ({"NPROC": "4"}, (4, 2, 2)),
        ({"NPROC": "8"}, (8, 2, 2)),
        ({"NPROC": "4", "TP": "4"}, (4, 4, 1)),
        ({"NPROC": "4", "PP": "4"}, (4, 1, 4)),
        ({"NPROC": "2", "PP": "2"}, (2, 1, 2)),
        ({"NPROC": "4", "TP": "1", "PP": "1"}, (4, 1, 1)),
        ({"TP": "2", "PP": "1"}, (2, 2, 1)),
        ({"PP": "3"}, (3, 1, 3)),
    ],
)
def test_quickstart_chooses_a_layout(tmp_path: Path, environment: dict[str, str], layout: tuple[int, int, int]):
    """Only the choice: the shell function by itself, between a fixed number of GPUs and what was asked for."""
    script = (EXAMPLES / "quickstart.sh").read_text()
    function = script[script.index("choose_layout() {") : script.index("# Takes OUT for this run")]
    program = f'fail() {{ exit 1; }}; gpu_count() {{ echo "${{GPUS:-0}}"; }}\n{function}\nchoose_layout >/dev/null\n'
    done = subprocess.run(
        ["bash", "-euc", program + 'echo "$NPROC $TP $PP $MBS"'],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    *chosen, micro_batch_size = done.stdout.split()
    assert tuple(map(int, chosen)) == layout
    processes, tp, pp = layout
    flags = ["--config", str(EXAMPLES / "quickstart.yaml"), "--parallel.tp", str(tp), "--parallel.pp", str(pp)]
    parsed([*flags, "--train.micro_batch_size", micro_batch_size, "--checkpoint.dir", "somewhere"], processes)


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"NPROC": "4", "GPUS": "2"}, "4 processes need 4 GPUs and there are 2"),
        ({"NPROC": "3", "TP": "2"}, "tp x pp = 2 x 1 does not divide 3 processes"),
        (
            {"NPROC": "3", "TP": "1", "PP": "1"},
            "dp = 3 (3 processes / tp x pp = 1 x 1) does not divide the batch of 8",
        ),
    ],
)
def test_quickstart_says_in_one_line_why_not(recipes: Recipes, environment: dict[str, str], message: str):
    failed = recipes.run("quickstart.sh", **environment)
    assert failed.returncode != 0 and failed.stderr.count("\n") == 1 and message in failed.stderr
    assert not (recipes.folder / "out").exists()


def test_sweep_prints_one_table_with_reasons(recipes: Recipes):
    """The launch is replaced: it writes the metrics that a run would have, or fails."""
    script = """#!/usr/bin/env bash
case "$1 $2 $3" in
    "-m megazero launch")
        while [ "$1" != "--log.jsonl" ]; do
            if [ "$1 $2" = "--parallel.tp 3" ]; then echo "parallel.tp: 3 does not divide"; exit 2; fi
            shift
        done
        for step in 5 10 15; do
            echo "{\\"step\\": $step, \\"loss\\": 2.5, \\"tokens_per_second\\": $((step * 1000)),\\
                \\"model_tflops_per_gpu\\": 1.5, \\"mfu\\": 0.25, \\"memory_allocated_peak\\": 2147483648}"
        done | tr -d '\\n' | sed 's/}/}\\n/g' >"$2" ;;
    *) exec {python} "$@" ;;
esac
"""
    (recipes.folder / "python").write_text(script.replace("{python}", f"'{sys.executable}'"))
    done = recipes.run("sweep_layouts.sh", LAYOUTS="1 1 1 2, 3 1 1 2", NPROC="2")
    assert done.returncode == 0, done.stderr
    heading, _, first, second = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()
    )
    assert heading == ["layout", "tokens/s", "TFLOP/s per GPU", "MFU", "peak memory GiB", "loss"]
    assert first == ["tp1-pp1-zero1-mbs2", "12,500", "1.50", "25.0%", "2.0", "2.5000"]
    assert second == ["tp3-pp1-zero1-mbs2", "parallel.tp: 3 does not divide"]


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_layouts_that_are_measured_are_ones_that_work(recipes: Recipes, processes: int):
    """Every run of measure_layouts.sh fits its processes, has batches that its layout divides, and is planned."""
    script = """#!/usr/bin/env bash
case "$1 $2" in
    *benchmark_layouts.py*) printf '%s\\0' "${@:2}" >>"$RECORD"; printf '\\n' >>"$RECORD" ;;
    "-m megazero") echo "step 1/8  loss 2.5000  lr" ;;
    "-c import torch; print(torch.cuda.device_count())"*) echo 0 ;;
    *) exec {python} "$@" ;;
esac
"""
    (recipes.folder / "python").write_text(script.replace("{python}", f"'{sys.executable}'"))
    done = recipes.run("measure_layouts.sh", NPROC=str(processes), GPU="h200")
    assert done.returncode == 0 and "step 1/8  loss 2.5000" in done.stdout, done.stderr
    tables = [line.rstrip("\0").split("\0") for line in recipes.record.read_text().splitlines()]
    assert len(tables) == 2
    for table, most in zip(tables, ({2: 6, 4: 9, 8: 10}[processes], {2: 4, 4: 6, 8: 8}[processes]), strict=True):
        runs = table[table.index("--runs") + 1 :]
        common = [word for word in table[table.index("--model.preset") : table.index("--runs")] if word != "h200"]
        common.remove("--gpu")
        assert len(runs) == len(set(runs)) == most
        for run in runs:
            count, flags = parse_run(run)
            own, settings = parse_arguments([*common, *flags])
            config = load_settings(settings, own.warmup + own.measure, count)
            assert count <= processes
            assert plan(config, count).fullest.peak > 0 and step_time(config, count, CHIPS["h200"]).seconds > 0


@pytest.mark.parametrize("processes, message", [("3", "NPROC=3 is not a power of two"), ("1", "nothing to lay out")])
def test_layouts_cannot_be_measured_on_any_number(recipes: Recipes, processes: str, message: str):
    failed = recipes.run("measure_layouts.sh", NPROC=processes)
    assert failed.returncode != 0 and failed.stderr.count("\n") == 1 and message in failed.stderr
