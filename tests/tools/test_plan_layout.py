"""tools/plan_layout.py as users run it: the table, JSON, the launch script, the dry run and mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.config import load_config
from megazero.errors import ConfigError, MegazeroError
from tools import plan_layout

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plan_layout.py", *arguments])
    plan_layout.main()


SMALL = ("--model", "gpt2-124m", "--gpus", "8", "--gpu", "rtx4090", "--global-batch-size", "64")


def test_table_and_reasons(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    model = ("--model", "llama3.2-1b", "--seq-length", "2048", "--global-batch-size", "30")
    run(monkeypatch, *model, "--gpus", "3", "--gpu", "rtx4090", "--top", "3")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama3.2-1b on 3 x rtx4090, 30 sequences of 2048 per step (0.1 million tokens): ")
    heading = next(i for i, line in enumerate(lines) if line.startswith("tp "))
    assert [line.split()[0].isdigit() for line in lines[heading + 1 : heading + 4]] == [True] * 3
    reasons = "\n".join(lines[heading + 4 :])
    assert "do not fit in memory; nearest:" in reasons and " GB: it needs " in reasons and " rank 0 lacks " in reasons
    assert "break the rules of parallel.tp; e.g.:" in reasons and "tp=3 pp=1: parallel.tp: 3 does not" in reasons


def test_the_lines_that_the_page_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    shown = page.partition("The first lines for a 70B model on 64 H200s are\n\n```\n")[2].partition("```")[0]
    run(monkeypatch, "--model", "llama3-70b", "--gpus", "64", "--gpu", "h200")
    lines = capsys.readouterr().out.splitlines()
    assert shown and [line for line in shown.splitlines() if line not in lines] == []


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    run(monkeypatch, *SMALL, "--json")
    found = json.loads(capsys.readouterr().out)
    first = found["plans"][0]
    assert first["tp"] * first["pp"] * first["dp"] == 8 and len(found["plans"]) == 5
    assert first["memory"]["peak"] < found["usable_memory"] and found["global_batch_size"] == 64
    time = first["time"]
    parts = sum(time[part] for part in ("compute", "tensor_parallel", "pipeline", "data_parallel", "optimizer"))
    assert parts == pytest.approx(time["seconds"])
    assert all("lacks" in rejection["reason"] for rejection in found["rejected"])


RECORDER = """#!/usr/bin/env bash
case "$1 $2 $3" in
    "-m megazero launch" | "-m torch.distributed.run"*) printf '%s\\n' "$@" >"$RECORD" ;;
    *) exec {python} "$@" ;;
esac
"""


def started(script: Path, folder: Path, **environment: str) -> tuple[list[str], list[str]]:
    """(the launcher's arguments, those of pretrain/gpt.py) that a script would start."""
    for name, text in (
        ("python", RECORDER.replace("{python}", f"'{sys.executable}'")),
        ("srun", '#!/usr/bin/env bash\nshift; exec "$@"\n'),
        ("scontrol", "#!/usr/bin/env bash\necho node-a; echo node-b\n"),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key not in ("TP", "PP", "MODEL", "SEQ", "PYTHONPATH")}
    kept |= {"PYTHON": str(folder / "python"), "RECORD": str(folder / "record"), "DATA": "prefix"}
    kept |= {"PATH": f"{folder}:{kept['PATH']}", "OUT": str(folder / "out"), **environment}
    done = subprocess.run(["bash", str(script)], env=kept, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    words = (folder / "record").read_text().splitlines()
    split = words.index(str(ROOT / "pretrain" / "gpt.py"))
    return words[:split], words[split + 1 :]


def test_script_of_one_machine_starts_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    settings = tmp_path / "my model.yaml"
    settings.write_text(
        "model: {num_layers: 4, hidden_size: 256, num_attention_heads: 4, vocab_size: 1000}\n"
        "data: {seq_length: 512}\ntrain: {grad_dtype: bf16, global_batch_size: 32}\n"
    )
    script = tmp_path / "run.sh"
    arguments = ("--model", str(settings), "--gpus", "4", "--gpu", "a100-40", "--optimizer.betas", "0.9", "0.99")
    run(monkeypatch, *arguments, "--json", "--script", str(script))
    choice = json.loads(capsys.readouterr().out)["plans"][0]
    launcher, flags = started(script, tmp_path)
    assert launcher == ["-m", "megazero", "launch", "--nproc", "4"]
    config = load_config(flags, world_size=4, needs_data=False)
    assert (config.parallel.tp, config.parallel.pp, config.zero.stage) == (choice["tp"], choice["pp"], choice["zero"])
    assert config.train.micro_batch_size == choice["micro_batch"] and config.train.recompute == choice["recompute"]
    assert config.parallel.virtual_pp == choice["virtual"] and config.model.num_layers == 4
    assert config.train.grad_dtype == "bf16" and config.train.global_batch_size == 32
    assert config.data.seq_length == 512 and config.optimizer.betas == (0.9, 0.99)
    # What the environment says wins.
    _, flags = started(script, tmp_path, MBS="2", ZERO="0")
    config = load_config(flags, world_size=4, needs_data=False)
    assert (config.train.micro_batch_size, config.zero.stage) == (2, 0)


def test_script_of_several_machines_is_a_slurm_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    script = tmp_path / "a folder" / "job.sh"
    run(monkeypatch, *SMALL, "--json", "--script", str(script))
    choice = json.loads(capsys.readouterr().out)["plans"][0]
    text = script.read_text()
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gpus-per-node=4\n" in text
    slurm = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    launcher, flags = started(script, tmp_path, **slurm)
    assert launcher[:6] == ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "4"]
    config = load_config(flags, world_size=8, needs_data=False)
    assert config.parallel.tp == choice["tp"] and config.model.preset == "gpt2-124m"


def test_dry_run_of_a_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    settings = tmp_path / "small.yaml"
    settings.write_text("model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 256}\n")
    run(monkeypatch, *SMALL, "--model", str(settings), "--top", "1", "--dry-run", "7")
    text = capsys.readouterr().out
    assert "rank 7 (pp " in text and "model state: " in text and "world all_reduce, 8 B an element: 4 elements" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "lama3-8b", "--gpus", "8", "--gpu", "h100"), "did you mean llama3-8b"),
        (("--model", "gone.yaml", "--gpus", "8", "--gpu", "h100"), "--model: cannot read gone.yaml"),
        (("--model", "llama3-8b", "--gpus", "0", "--gpu", "h100"), "--gpus: 0 must be at least 1"),
        (("--model", "llama3-8b", "--gpus", "9999999", "--gpu", "h100"), "more than the 1048576 that can be planned"),
        (("--model", "llama3-8b", "--gpus", "8", "--gpu", "h1oo"), "--gpu: unknown chip 'h1oo'; did you mean h100"),
        ((*SMALL, "--parallel.tp", "2"), "parallel.tp: is what the search chooses; leave it out"),
        ((*SMALL, "--config", "x.yaml"), "--config: give the file as --model x.yaml"),
        ((*SMALL, "--train.stepz", "2"), "unknown flag; did you mean --train.steps"),
        ((*SMALL, "--seq-length", "4096"), "more than model.max_position_embeddings = 1024"),
        ((*SMALL, "--script", "/proc/nowhere/x.sh"), "--script: /proc/nowhere cannot be made: No such file"),
        ((*SMALL, "--script", "."), "--script: . cannot be written; give the path of a file"),
        (
            (*SMALL, "--lora", "8", "--script", "x.sh"),
            "writes no script with --lora; examples/recipes/llama3.1-8b-lora",
        ),
        ((*SMALL, "--dry-run", "8"), "there is no rank 8: ranks go from 0 to 7"),
        (("--model", "llama3-70b", "--gpus", "1", "--gpu", "h200"), "on a GPU: use more GPUs, larger ones"),
    ],
)
def test_mistakes(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(MegazeroError) as caught:
        run(monkeypatch, *arguments)
    assert message in str(caught.value)


def test_a_script_needs_whole_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MegazeroError, match="6 GPUs are not whole machines of 4"):
        run(monkeypatch, *SMALL, "--gpus", "6", "--global-batch-size", "6", "--script", str(tmp_path / "x.sh"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 3}", "has no section `model`"),
        ("model: {preset: gpt2-124m}\nzero: 3", "zero: 3 is not a section with fields"),
        ("model: gpt2-124m\ntrain: []", "train: \\[\\] is not a section with fields"),
    ],
)
def test_a_settings_file_needs_sections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(monkeypatch, "--model", str(path), "--gpus", "8", "--gpu", "h100")


def test_adapters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    model = ("--model", "llama3.2-1b", "--gpus", "4", "--gpu", "rtx4090", "--lora", "8")
    run(monkeypatch, *model, "--seq-length", "1024", "--json")
    first = json.loads(capsys.readouterr().out)["plans"][0]
    assert (first["tp"], first["pp"], first["dp"]) == (1, 1, 4)
    with pytest.raises(MegazeroError, match=r"lacks .* on a GPU: use more GPUs, larger ones, or shorter sequences$"):
        run(monkeypatch, *model, "--model", "llama3-70b", "--gpus", "2")


@pytest.mark.parametrize(
    ("gpus", "seq_length", "batch"),
    [
        *((8, 8192, 512), (24, 8192, 528), (1024, 8192, 512), (16384, 8192, 2048), (3000, 8192, 500), (1, 1 << 23, 1)),
        *((3, 1024, 3 * 64 * 22), (7, 1024, 7 * 32 * 19)),
    ],
)
def test_default_batch_can_be_shared(gpus: int, seq_length: int, batch: int) -> None:
    assert plan_layout.default_batch(gpus, seq_length) == batch
