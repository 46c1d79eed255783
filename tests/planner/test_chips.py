"""The table of chips, and files that add to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.errors import ConfigError
from megazero.planner.chips import CHIPS, chip_of_device, load_chip


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_devices(device: str, name: str) -> None:
    chip = chip_of_device(device)
    assert chip is CHIPS[name] is load_chip(name)
    assert 0.8 * chip.memory < chip.usable_memory() < chip.memory


def test_an_h200s_memory_is_what_the_driver_reports() -> None:
    # torch.cuda.get_device_properties(0).total_memory of one: 139.8 GiB.
    assert CHIPS["h200"].memory == pytest.approx(150.1e9, rel=0.001)


def test_a_file_changes_some_facts_of_a_known_chip(tmp_path: Path) -> None:
    path = tmp_path / "capped.yaml"
    path.write_text("based_on: h100\nmemory_bandwidth: 2.4e12\nnode: {latency: 1e-6}\nefficiency: {matmul: 0.5}\n")
    chip, known = load_chip(str(path)), CHIPS["h100"]
    assert chip.name == "capped" and chip.memory_bandwidth == 2.4e12 and chip.peak_flops == known.peak_flops
    assert chip.node.latency == 1e-6 and chip.node.bandwidth == known.node.bandwidth
    assert chip.efficiency == known.efficiency.model_copy(update={"matmul": 0.5})


def test_a_file_adds_a_chip(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    link = {"bandwidth": 1e11, "latency": 1e-6}
    facts = {"peak_flops": 1e15, "memory": 1e11, "memory_bandwidth": 3e12, "gpus_per_node": 4}
    path.write_text(json.dumps({**facts, "node": link, "network": link}))
    assert load_chip(str(path)).gpus_per_node == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("based_on: h1000", "'h1000' is none of b200, h200"),
        ("based_on: h100\nnode: {bandwith: 3}", "node.bandwith: unknown field; did you mean node.bandwidth?"),
        ("based_on: h100\nmemory: -3", "memory: -3 must be above 0"),
        ("peak_flops: 1e15", "memory_bandwidth: is missing: bytes/s, data sheet"),
        ("based_on: [", "--gpu: "),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_chip(str(path))
    assert message in str(caught.value) and "mine.yaml" in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("h1oo", "did you mean h100"), ("tpu", "b200"), ("no.yaml", "no.yaml")])
def test_an_unknown_chip_has_its_nearest_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_chip(text)
