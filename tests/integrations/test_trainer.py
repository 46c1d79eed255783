"""transformers' Trainer under `megazero launch --as-deepspeed` on two CPU processes, against plain Trainer there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launched import HERE, launched
from tests.integrations.test_examples import check

STAGES = ("1", "2", "3")
# DESIGN section 9, float32.
LOSS, NORM = {"abs": 2e-6, "rel": 0}, {"rel": 5e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    done = launched("--as-deepspeed", "--num_gpus=2", HERE / "trainer_runs.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads((folder / "results.json").read_text()), "printed": done.stdout}


@pytest.fixture
def of(results: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the run that the test is named after returned."""
    found = results[request.node.originalname.removeprefix("test_")]
    assert "error" not in found, found["error"]
    return found


def same(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert len(wanted["loss"]) == 4
    assert found["loss"] == pytest.approx(wanted["loss"], **LOSS)
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], **LOSS)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], **NORM)


def test_full(of: dict[str, Any]) -> None:
    assert len(of["plain"]["eval_loss"]) == 2 and max(of["plain"]["grad_norm"]) > 0.5  # it is clipped
    for stage in STAGES:
        same(of[stage], of["plain"])


def test_optimizer_of_the_config(of: dict[str, Any]) -> None:
    same(of["3"], of["plain"])


def test_resumed(of: dict[str, Any]) -> None:
    for stage in STAGES:
        before, after = of[stage]
        assert len(after) == 2 and before == after, stage


def test_saved(of: dict[str, Any]) -> None:
    for stage in ("1", "2", "3"):
        first, last, best = of[stage]["all"]
        assert first < last - 0.1 and best == first == of[stage]["best"], of[stage]
        assert of[stage]["plain"] == pytest.approx(best, **LOSS)


def test_from_pretrained(of: dict[str, Any]) -> None:
    assert of["cut"] == of["made"] == ["ShardedParameter"]
    same(of["3"], of["plain"])
    same(of["masked 3"], of["masked plain"])
    # Other random numbers: only that they are those of a model that learns.
    assert 4.0 < of["made losses"][-1] < of["made losses"][0] < 4.3


def test_resized(of: dict[str, Any]) -> None:
    for stage in ("2", "3"):
        same(of[stage], of["plain"])
        assert of[f"{stage} rows"] == of["plain rows"] == 72


@pytest.mark.parametrize("kind", ["adapters", "head"])
def test_lora(of: dict[str, Any], kind: str) -> None:
    for name in ("2", "3") if kind == "adapters" else ("3",):
        same(of[f"{kind} {name}"], of[f"{kind} plain"])
        assert of[f"{kind} {name}"]["plain"] == pytest.approx(of[f"{kind} {name}"]["ours"], **LOSS)


def test_evaluated(of: dict[str, Any]) -> None:
    assert of["loss"][0] == pytest.approx(of["loss"][1], abs=2e-3)  # bfloat16
    assert of["generated"][0] == of["generated"][1]
    assert (of["optimizer"], of["masters"], of["trains"]) == ("None", 0, True)


def test_accelerated(of: dict[str, Any]) -> None:
    plain = of.pop("plain")
    assert len(plain["losses"]) == 8 and len(of) == 3
    for name, found in of.items():
        assert found["losses"][:8] == pytest.approx(plain["losses"], **LOSS), name
        assert found["norms"][:4] == pytest.approx(plain["norms"], **NORM), name
        # From the state that was saved on, once more.
        assert found["losses"][8:] == found["losses"][4:8] and found["norms"][4:] == found["norms"][2:4], name
        assert found["weights"]


def test_half_precision(of: dict[str, Any], results: dict[str, Any]) -> None:
    for name, losses in of.items():
        assert losses == pytest.approx(results["full"]["plain"]["loss"], abs=2e-3), name


def test_examples(of: dict[str, Any], results: dict[str, Any], folder: Path) -> None:
    assert "step 2: 'It is a truth" in results["printed"] and "step 4: 'It is a truth" in results["printed"]
    assert of["names"] == ["full", "lora", "cut", "trl"]
    for name in of["names"]:
        check(folder / "examples" / name, adapters=name == "lora")


TOLD = {
    "unknown key": ("ConfigError", "zero_optimization.overlap_com", "did you mean zero_optimization.overlap_comm?"),
    "both precisions": ("ValueError", "fp16.enabled=True", "bf16.enabled=True"),
    "both precisions, without Trainer": ("ConfigError", "bf16.enabled: true, and so is fp16.enabled; choose one"),
    "batch product": ("ValueError", "train_batch_size=9", "=8"),
    "optimizer argument": ("ConfigError", "optimizer.params.momentum", "AdamW has no such argument"),
    "unknown optimizer": ("ConfigError", "optimizer.type", "did you mean Adam?"),
    "optimizer twice": ("ValueError", "cannot specify an optimizer in the config file and in the code"),
    "auto without a source": ("ValueError", "train_micro_batch_size_per_gpu", "integer value"),
    "tensor parallel": ("MegazeroError", "tensor_parallel.autotp_size", "stage 3"),
    "not JSON": ("JSONDecodeError", "cut-0.json: line 2, column 23: Expecting value"),
    "auto that Trainer does not fill": ("ValueError", "optimizer.params.momentum", "without `auto`"),
}


def test_mistakes(of: dict[str, Any]) -> None:
    assert of.keys() == TOLD.keys()
    for name, parts in TOLD.items():
        assert not of[name].startswith("Traceback"), of[name]
        for part in parts:
            assert part in of[name], of[name]


def test_troubles(of: dict[str, Any]) -> None:
    """docs/troubleshooting.md, "Under transformers"."""
    assert "global_step4" in of["files"] and not any("model" in name for name in of["files"])
    assert of["told"].keys() == {"save_pretrained", "torch.save", "weight"}
    for told in of["told"].values():
        assert told.startswith("MegazeroError") and "cut over the ranks (stage 3)" in told, told
        assert "with megazero.zero.GatheredParameters(parameter)" in told and "save_16bit_model" in told
    assert "lm_head.weight" in of["told"]["weight"]
    assert of["plain"] == pytest.approx(of["ours"], **LOSS)
    assert of["norm"] == pytest.approx(of["plain norm"], rel=1e-6)
    assert (of["predictions"], of["preprocessed"], of["loss only"]) == ([8, 12, 64], [8, 12], None)
    assert of["resident"] == 0
