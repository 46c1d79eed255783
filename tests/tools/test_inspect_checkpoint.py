"""inspect_checkpoint.py: its numbers against the tensors that were written, what it finds, how it ends."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megazero.checkpoint import CheckpointWriter, ChunkData, files, manifest, open_checkpoint
from megazero.convert import export, import_checkpoint
from megazero.errors import CheckpointError, ConvertError
from megazero.sharding import Rectangle
from tests.checkpoint import states
from tests.checkpoint.thread_group import run_ranks
from tests.data.helpers import run_script
from tools import inspect_checkpoint

ORACLE = Path(__file__).resolve().parents[1] / "fixtures/oracle"
LAYOUT = (2, 3, 2)


def write(root: Path, step: int, state: states.State, layout: tuple[int, int, int] = LAYOUT) -> Path:
    meta = {
        **states.META,
        "layout": dict(zip(("tp", "pp", "dp"), layout)),
        "config": {"zero": {"stage": 1}},
        "consumed_samples": 1234,
    }

    def work(group):
        chunks = states.chunks_of(state, group.rank, *layout)
        rank_state = {"rng": torch.get_rng_state()}
        return CheckpointWriter(root, group, start_step=step).save(step, chunks, rank_state, meta)

    tp, pp, dp = layout
    return run_ranks(tp * pp * dp, work)[0]


@pytest.fixture(scope="module")
def state():
    return states.make_state(1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, state):
    return write(tmp_path_factory.mktemp("saved"), 7, state)


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the tool in this process; returns (exit code, what it printed)."""

    def run(*arguments) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", *map(str, arguments)])
        code = 0
        try:
            inspect_checkpoint.main()
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().out

    return run


def errors_of(output: str) -> dict[str, float | None]:
    """Of the weights, by name."""
    return {row["name"]: row["error"] for row in json.loads(output)["tensors"] if row["kind"] == "weight"}


def test_show_gives_the_norms_that_were_written(saved, state, call):
    code, output = call("--json", saved.parent, "--verify")  # show is the default
    told = json.loads(output)
    assert code == 0 and told["damage"] == []
    assert (told["step"], told["consumed_samples"], told["model"]) == (7, 1234, states.CONFIG.model_dump())
    assert told["layout"] == {"tp": 2, "pp": 3, "dp": 2, "zero_stage": 1} and told["files"] == 12
    assert told["bytes"] == sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    assert told["parameters"] == sum(state["weight", name].numel() for name in states.SHAPES)
    rows = {(row["kind"], row["name"]): row for row in told["tensors"]}
    assert rows.keys() == state.keys()
    for key, tensor in state.items():
        assert rows[key]["norm"] == pytest.approx(tensor.double().norm().item(), rel=1e-12)
        assert (rows[key]["shape"], rows[key]["dtype"]) == (list(tensor.shape), "float32")
        assert rows[key]["checksum"] == "ok"
    # Columns of two tp ranks, each cut once by dp, in the middle of a row or between two.
    row = rows["weight", "layers.0.attention.out.weight"]
    held = [box for rank in range(12) for _, name, box in states.boxes_of(rank, *LAYOUT) if name == row["name"]]
    assert len(row["files"]) == 4 and 3 * row["boxes"] == len(held)


def test_moments_are_read_only_to_verify(saved, call):
    _, output = call("show", saved)
    lines = output.splitlines()
    assert "consumed samples  1,234" in lines and "layout            tp 2, pp 3, dp 2, zero_stage 1" in lines
    assert len([line for line in lines if " ok " in line]) == len(states.SHAPES)
    assert len([line for line in lines if " unread " in line]) == 2 * len(states.SHAPES)
    _, output = call("show", saved, "--verify")
    assert "unread" not in output and output.endswith("verified: every byte's checksum is right\n")


def test_damage_is_shown_where_it_is(saved, tmp_path, call):
    path = tmp_path / saved.name
    shutil.copytree(saved, path)
    damaged = {}
    for kind, file in zip(("weight", "exp_avg", "state"), manifest.read(path).files):
        tensor = file.state[0] if kind == "state" else next(chunk for chunk in file.chunks if chunk.kind == kind)
        data = bytearray((path / file.name).read_bytes())
        data[tensor.start + 1] ^= 4
        (path / file.name).write_bytes(data)
        damaged[kind] = (file.name, None if kind == "state" else tensor.name)
    # Moments and states of ranks are not read.
    with pytest.raises(CheckpointError, match=f"{damaged['weight'][0]}: damaged: [^;]*where there is none$"):
        call(path)
    done = run_script("tools/inspect_checkpoint.py", path, "--verify", "--json")
    assert (
        done.returncode == 2 and done.stderr.endswith("And 2 more are damaged\n") and len(done.stderr.splitlines()) == 1
    )
    told = json.loads(done.stdout)
    bad = {row["kind"]: row["name"] for row in told["tensors"] if row["checksum"] == "damaged"}
    assert bad == {kind: name for kind, (_, name) in damaged.items() if name}
    for message, (file, name) in zip(told["damage"], damaged.values(), strict=True):
        assert file in message and (name or "rng") in message


def test_diff_of_two_layouts_is_zero_and_of_a_changed_tensor_its_relative_error(saved, state, tmp_path, call):
    changed = dict(state)
    name = "layers.2.mlp.down.weight"
    changed["weight", name] = state["weight", name].clone()
    changed["weight", name][3, 5] += 0.5
    other = write(tmp_path / "same", 7, state, (1, 2, 3))
    code, output = call("diff", saved, other)
    assert code == 0 and f"0 of {len(state)} tensors differ by more than 0\n" in output
    other = write(tmp_path / "other", 7, changed, (1, 2, 3))
    code, output = call("diff", saved, other, "--json")
    found = errors_of(output)
    ours, theirs = state["weight", name].double(), changed["weight", name].double()
    expected = ((ours - theirs).norm() / max(ours.norm(), theirs.norm())).item()
    assert code == 1 and found.pop(name) == pytest.approx(expected, rel=1e-12) and set(found.values()) == {0.0}
    assert call("diff", saved, other, "--tolerance", expected * 0.999)[0] == 1
    assert call("diff", saved, other, "--tolerance", expected * 1.001)[0] == 0


def test_values_that_are_not_finite(state, tmp_path, call):
    """The same in both: equal. In one only: a difference that no tolerance admits, never a nan that compares false."""
    nan, inf, both = "final_norm.weight", "final_norm.bias", "layers.0.mlp.up.bias"
    one, other = ({key: tensor.clone() for key, tensor in state.items()} for _ in range(2))
    other["weight", nan][0] = float("nan")
    one["weight", inf][1] = float("inf")
    for side in (one, other):
        side["weight", both][:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    paths = [write(tmp_path / name, 1, side, (1, 1, 1)) for name, side in (("a", one), ("b", other))]
    code, output = call("diff", *paths, "--tolerance", 1e9, "--json")
    found = errors_of(output)
    assert code == 1 and [name for name, error in found.items() if error != 0.0] == [inf, nan]
    assert found[nan] is None and found[inf] is None
    code, output = call(paths[1])
    assert code == 0 and [line.split()[0] for line in output.splitlines() if "not finite" in line] == [nan, both]


def test_missing_on_either_side_and_another_shape(tmp_path, call):
    def save(root: Path, **shapes) -> Path:
        chunks = [
            ChunkData("weight", name, Rectangle((0,) * len(shape), shape), shape, torch.ones(shape))
            for name, shape in shapes.items()
        ]
        return CheckpointWriter(root).save(1, chunks)

    one = save(tmp_path / "a", both=(2, 3), one=(4,), turned=(2, 5), empty=(0, 3))
    other = save(tmp_path / "b", both=(2, 3), other=(4,), turned=(5, 2), empty=(0, 3))
    code, output = call("diff", one, other, "--tolerance", "1e30")
    words = [line.split() for line in output.splitlines()[2:-1]]
    assert code == 1 and sorted(words, key=lambda line: line[-1]) == [
        ["0", "both"],
        ["0", "empty"],
        ["missing", "in", "B", "one"],
        ["missing", "in", "A", "other"],
        ["[2,", "5]", "and", "[5,", "2]", "turned"],
    ]


@pytest.mark.parametrize("case", ["gpt2-tied", "llama-gqa"])
def test_hugging_face_directories(case, tmp_path, call):
    initial, final = ORACLE / case / "hf_init", ORACLE / case / "hf_final"
    ours = import_checkpoint(initial, tmp_path / "ours")
    half = export(ours, tmp_path / "half", dtype="bfloat16")
    assert call("diff", ours, initial)[0] == call("diff", initial, ours)[0] == 0
    code, output = call("diff", ours, half, "--json")
    assert code == 1 and 1e-4 < max(errors_of(output).values()) < 2**-8
    told = json.loads(call(final, "--verify", "--json")[1])
    tensors = safetensors.torch.load_file(final / "model.safetensors")
    assert {row["name"]: row["norm"] for row in told["tensors"]} == {
        name: pytest.approx(tensor.double().norm().item(), rel=1e-12) for name, tensor in tensors.items()
    }
    assert {row["checksum"] for row in told["tensors"]} == {"none"}
    start = safetensors.torch.load_file(initial / "model.safetensors")
    worst = max(
        ((tensors[name] - start[name]).double().norm() / max(tensors[name].norm(), start[name].norm())).item()
        for name in tensors
        if "c_attn" not in name  # one tensor there, three here
    )
    code, output = call("diff", initial, final, "--json")
    split = {name: error for name, error in errors_of(output).items() if name.split(".")[-2] not in "qkv"}
    assert code == 1 and max(split.values()) == pytest.approx(worst, rel=1e-5)
    code, output = call("diff", ours, saved_like(ours, tmp_path))
    assert "not compared, since only the second has them: exp_avg" in output and code == 0


def saved_like(ours: Path, tmp_path: Path) -> Path:
    """The same weights with a first moment."""
    with open_checkpoint(ours) as checkpoint:
        chunks = [
            ChunkData(kind, name, Rectangle((0,) * len(shape), shape), shape, checkpoint.read("weight", name))
            for kind in ("weight", "exp_avg")
            for name, shape in checkpoint.parameters.items()
        ]
    return CheckpointWriter(tmp_path / "with_moments").save(1, chunks)


def test_a_family_that_is_not_known_goes_by_the_names_in_its_files(tmp_path, call, monkeypatch):
    for name, scale in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "other"}')
        tensors = {"w.10": torch.full((2,), scale, dtype=torch.float16), "w.9": torch.ones(3, 0), "s": torch.tensor(5)}
        safetensors.torch.save_file(tensors, tmp_path / name / "model.safetensors")
    code, output = call(tmp_path / "a")
    rows = [line.split() for line in output.splitlines()[-3:]]
    assert code == 0 and [row[:4] for row in rows] == [
        ["s", "5", "none", "int64"],
        ["w.9", "0", "none", "float32"],
        ["w.10", "1.41421", "none", "float16"],
    ]
    code, output = call("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and "compared by the names in their files" in output and "0.5  w.10" in output
    monkeypatch.delitem(files.DTYPES, "F16")  # in place of a dtype that torch does not have
    code, output = call(tmp_path / "b")
    assert code == 0 and output.splitlines()[-1].split()[:3] == ["w.10", "unread", "F16"]
    ours = write(tmp_path / "ours", 1, states.make_state(0), (1, 1, 1))
    with pytest.raises(ConvertError, match="model_type 'other' is not supported"):
        call("diff", ours, tmp_path / "b")


def test_any_dtype_against_any_other(tmp_path, call):
    """The same numbers are the same, whatever holds them; [1, 4] is off [1, 2] by 2 of the larger norm, √17."""
    others = (torch.complex64, torch.float8_e8m0fnu, torch.float8_e5m2fnuz, torch.uint16, torch.uint64, torch.bfloat16)
    for folder, second in (("a", 2.0), ("b", 4.0)):
        values = torch.tensor([1.0, second])
        tensors = {str(dtype): values.clone() if folder == "a" else values.to(dtype) for dtype in others}
        tensors |= {f"{dtype} 2": torch.tensor([1.0, 2.0]).to(dtype) for dtype in others}
        tensors |= {f"x{'7' * 5000}": values.clone(), "float": torch.tensor([1.0, 2.0], dtype=torch.float64)}
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text('{"model_type": "other"}')
        safetensors.torch.save_file(tensors, tmp_path / folder / "model.safetensors")
    assert call(tmp_path / "b")[0] == 0
    code, output = call("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert code == 1 and set(errors_of(output).values()) == {0.0, 2 / 17**0.5}


def test_mistakes(tmp_path, saved, call, capsys):
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        call(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no megazero checkpoint"):
        call("diff", saved, tmp_path)
    assert call("diff", saved, saved, "--tolerance", "-1")[0] == 2
    assert call("diff", saved, saved, "--tolerance", "inf")[0] == 2  # a missing tensor is within no tolerance
    assert call("diff", saved)[0] == 2 and call()[0] == 2
