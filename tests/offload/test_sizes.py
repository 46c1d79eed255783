"""P3, P4 of what is kept off the device: bytes taken and moved are the planner's; so is the page's table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.config import Config, load_config
from megazero.errors import ConfigError
from megazero.host_memory import HostMemory, check_host_memory
from megazero.models.config import ModelConfig
from megazero.planner.chips import CHIPS
from megazero.planner.memory import plan
from megazero.planner.model_state import stage_buffers
from megazero.planner.offload import block_shares, host_seconds, moved
from megazero.planner.traffic import gathers
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import leaving_blocks
from tests.distributed.runs import TokenSource, make_engine, random_weights, settings
from tests.distributed.test_cases import GPT2
from tests.offload.choices import CPU, FILES, PARAMETERS, in_files, nvme

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "offload.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if any(f"| {tier} |" in line for tier in ("host memory", "files", "files, parameters too"))
]


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_the_table_of_a_14b_model(row: list[str]) -> None:
    gradients, masters, moments, tier, gpu, host, files, room = row
    state = {"device": "cpu" if tier == "host memory" else "nvme", "nvme_path": "x"}
    parameters = in_files(FILES, Path("x")) if tier.endswith("parameters too") else PARAMETERS
    zero = {"stage": 3, "offload_optimizer": {**state, "masters": masters, "moments": moments}, **parameters}
    train = {"global_batch_size": 16, "recompute": "full", "grad_dtype": gradients, "precision": "bf16"}
    tree = {"model": {"preset": "qwen2.5-14b"}, "data": {"seq_length": 2048}, "zero": zero, "train": train}
    found = plan(Config.from_dict(tree), 1).fullest
    assert found.host is not None
    told = [f"{size / 1e9:.1f}" for size in (found.peak, found.host.memory, found.host.on_disk)]
    assert told == [gpu, host, files]
    assert float(host) + 4 <= float(room.removesuffix(" GB"))


def test_the_table_has_rows_for_64_and_128_gb() -> None:
    assert len(ROWS) == 9 and {"64 GB", "128 GB"} <= {row[-1] for row in ROWS}


@pytest.mark.parametrize(
    ("zero", "train"),
    [
        ({"stage": 1, "offload_optimizer": CPU}, {"precision": "bf16"}),
        ({"stage": 2, "offload_optimizer": {**CPU, "ratio": 0.6}}, {"precision": "bf16", "grad_dtype": "bf16"}),
        ({"stage": 3, "offload_optimizer": CPU, **PARAMETERS}, {"precision": "fp32"}),
        ({"stage": 3, "offload_optimizer": {**CPU, "masters": "split", "moments": "bf16"}, **PARAMETERS}, {}),
        ({"stage": 2, "offload_optimizer": {**CPU, "masters": "bf16"}}, {}),
        ({"stage": 3, **PARAMETERS}, {}),
        ({"stage": 3, "offload_optimizer": CPU, **FILES}, {}),
        ({"stage": 3, **FILES}, {"precision": "fp32"}),
        ({"stage": 3}, {}),
    ],
)
def test_bytes_are_as_planned(zero: dict[str, Any], train: dict[str, Any], tmp_path: Path) -> None:
    """Of host memory and files, of what crosses the link in each direction, of what is read and written: all exact."""
    zero = zero if len(zero) > 1 else zero | nvme(tmp_path, moments="bf16")
    zero = in_files(zero, tmp_path)
    tree = settings(GPT2, zero=zero, train={"precision": "bf16", "micro_batch_size": 2, **train})
    config = Config.from_dict(tree)
    source, steps = TokenSource(37, 12), 3
    with make_engine(config, random_weights(ModelConfig(**GPT2))) as engine:
        for _ in range(steps):
            engine.train_batch(source)
        for block in engine.stage.sharded.blocks:
            block.settle()
        tier = engine.stage.sharded.tier
        taken, link = tier.memory.taken, dict(tier.link.bytes)
        layout, parameter_file = engine.topology.layout, tier.parameter_file
    # Closing has waited for the last write.
    files = (tier.disk.read_bytes, tier.disk.written_bytes, tier.disk.file.size) if tier.disk is not None else None
    offload, model = Offload.of(config.zero), config.model.architecture
    shares = block_shares(
        stage_buffers(config, model, layout, 0).all,
        config.zero.stage,
        config.train.precision,
        config.train.grad_dtype,
        offload,
    )
    micro_batches = config.micro_batches(1)
    wanted = moved(shares, config.zero.stage, offload, micro_batches, gathers(config, micro_batches))
    scalars = 12 if config.zero.offload_optimizer.device != "none" else 0
    assert link.get("out", 0) == steps * (wanted.out + scalars)
    assert link["back"] == steps * wanted.back
    host = plan(config, 1, gpu=False).fullest.host
    assert host is not None
    noise = 4 * (1024 + 2**16) if "bf16" in (offload.moments, offload.masters) else 0
    assert taken == host.memory - noise  # which torch has made
    if parameter_file is not None:
        assert parameter_file.file.size == host.parameter_files > 0
        assert parameter_file.read_bytes == steps * wanted.fetched
    if files is not None:
        # Pieces are read and written in whole pages.
        assert files[2] == host.files and files[0] == files[1] == steps * host.files
        assert wanted.files <= host.files


def test_host_memory_is_taken_at_once_in_huge_pages_and_not_copied_by_a_fork() -> None:
    numel, page = 2**22 + 1, 4096
    memory = HostMemory(torch.device("cpu"))
    tensor = memory.empty(numel, torch.float32)
    assert memory.taken == 4 * numel and not tensor.any()
    blocks = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]
    spans = [[int(end, 16) for end in block.split(maxsplit=1)[0].split("-")] for block in blocks]
    (block,) = (b for b, (low, high) in zip(blocks, spans, strict=True) if low <= tensor.data_ptr() < high)
    kib, kinds = (re.search(rf"(?m)^{name}:(.*)$", block)[1].split() for name in ("Rss", "VmFlags"))
    assert int(kib[0]) * 1024 >= 4 * numel // page * page
    assert "wf" in kinds and "sh" not in kinds
    assert "hg" in kinds or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_a_share_is_of_whole_layers() -> None:
    """0.55 * 100 is a little more than 55."""
    assert leaving_blocks([5] * 20, Offload(optimizer="cpu", ratio=0.55)) == set(range(9, 20))
    assert leaving_blocks([0, 10, 10], Offload(optimizer="cpu", ratio=0.75)) == {1, 2}


def test_what_does_not_fit_says_so() -> None:
    with pytest.raises(ConfigError, match=r"offload: 20.0 GB of host memory are needed .* and 10.0 GB are available"):
        check_host_memory("offload", 20 * 10**9, "buy some", limit=10 * 10**9)


def test_masters_of_parameters_that_are_not_bfloat16() -> None:
    zero = {"stage": 1, "offload_optimizer": {**CPU, "masters": "bf16"}}
    with pytest.raises(ConfigError, match=r"offload_optimizer.masters: bf16 is made of bfloat16 parameters"):
        make_engine(settings(GPT2, zero=zero, train={"precision": "auto"}))  # float32 on a CPU


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({"zero": {"offload_optimizer": {"device": "cpu"}}}, "zero.offload_optimizer.device", "use 1, 2 or 3"),
        (
            {"zero": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "zero.offload_optimizer.nvme_path",
            "missing",
        ),
        ({"zero": {"stage": 2, "offload_param": {"device": "cpu"}}}, "zero.offload_param.device", "use 3"),
        ({"zero": {"stage": 1, "offload_optimizer": {"moments": "bf16"}}}, "zero.offload_optimizer.moments", "needs"),
        ({"zero": {"stage": 1, "offload_optimizer": {"nvme_path": "x"}}}, "zero.offload_optimizer.nvme_path", "needs"),
        ({"zero": {"stage": 1, "offload_optimizer": {"ratio": 0.5}}}, "zero.offload_optimizer.ratio", "needs"),
        (
            {"zero": {"stage": 3, "offload_optimizer": {"device": "cpu", "masters": "split"}}},
            "zero.offload_optimizer.masters",
            "use zero.offload_param.device cpu",
        ),
        (
            {
                "zero": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}},
                "checkpoint": {"dir": "x", "async_save": True},
            },
            "checkpoint.async_save",
            "would copy to host memory",
        ),
        ({"train": {"offload_activations": True}}, "train.offload_activations", "use train.recompute full"),
        (
            {
                "zero": {"stage": 1, "offload_optimizer": {"device": "cpu", "masters": "split"}},
                "train": {"precision": "fp16"},
            },
            "zero.offload_optimizer.masters",
            "use bf16",
        ),
        (
            {
                "zero": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu", "masters": "split"},
                    "offload_param": {"device": "nvme", "nvme_path": "x"},
                }
            },
            "zero.offload_optimizer.masters",
            "use fp32",
        ),
        ({"zero": {"stage": 3, **FILES}}, "zero.offload_param.nvme_path", "is missing"),
        (
            {"zero": {"stage": 3, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 2}},
            "zero.zero_hpz_partition_size",
            "leave out one",
        ),
    ],
)
def test_settings_that_cannot_be(sections: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"model": GPT2, "data": {"seq_length": 8}, **sections})
    assert dict(caught.value.problems).keys() == {field} and words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "nanoseconds"), [({}, 0.30), ({"moments": "bf16"}, 0.75), ({"moments": "bf16", "masters": "bf16"}, 0.75)]
)
def test_an_update_in_few_bits_takes_longer(fields: dict[str, str], nanoseconds: float) -> None:
    """What 16 cores with 107 GB/s of host memory took for an element: 0.28, 0.83 and 0.72 ns (docs/offload.md)."""
    host = CHIPS["h200"].host.model_copy(update={"bandwidth": 107e9})
    flags = [word for name, value in fields.items() for word in (f"--zero.offload_optimizer.{name}", value)]
    asked = ["--model.preset", "gpt3-1.3b", "--zero.stage", "3", "--zero.offload_optimizer.device", "cpu"]
    asked += ["--zero.offload_param.device", "cpu"]
    config = load_config([*asked, *flags], world_size=1, needs_data=False)
    found = host_seconds(config, 10**9, 10**9, "bf16", host).update
    assert found == pytest.approx(nanoseconds, rel=0.05)
