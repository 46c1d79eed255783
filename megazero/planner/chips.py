"""What is known of each kind of GPU: data-sheet figures, the links between them, and how much of both training reaches.

A user's own YAML or JSON file may add a chip, or change one: ``based_on`` names the chip it starts from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megazero.config_cli import describe_errors, read_file
from megazero.config_tree import merged
from megazero.errors import ConfigError, near

GIB = 2**30


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Facts):
    """One GPU's connection to others."""

    bandwidth: float = Field(gt=0, allow_inf_nan=False, description="bytes/s out of one GPU, one direction, data sheet")
    latency: float = Field(ge=0, allow_inf_nan=False, description="seconds until a hop's first byte arrives")


class Efficiency(_Facts):
    """How much of the data sheet long-running training reaches, all parts together under the power limit.

    The one place of fitted constants. The defaults are Hopper's, fitted on this project's own H200 runs
    (docs/plan.md) between the chip's measured ceilings: products 645 to 690 TFLOP/s sustained, cuDNN attention 459,
    copies and AdamW 3.5 to 4.2 TB/s, collectives 211 to 284 GB/s of 450.
    """

    matmul: float = Field(0.68, gt=0, le=1, description="share of the peak in products of large matrices")
    matmul_edge: float = Field(
        75, ge=0, description="elements e: an M x N x K product takes 1 + e (1/M + 1/N + 1/K) times what its FLOPs do"
    )
    attention: float = Field(
        0.46,
        gt=0,
        le=1,
        description="share of the peak in causal attention, head size 128, long sequences, counted half",
    )
    memory: float = Field(
        0.8, gt=0, le=1, description="share of the memory bandwidth in pointwise work and the optimizer"
    )
    link: float = Field(
        0.7, gt=0, le=1, description="share of the bandwidth inside a machine in collectives of many megabytes"
    )
    network: float = Field(0.85, gt=0, le=1, description="the same between machines")
    interference: float = Field(
        0.15, ge=0, le=1, description="seconds that a second of hidden communication takes from the work beside it"
    )
    kernel: float = Field(3e-6, ge=0, allow_inf_nan=False, description="seconds between one kernel and the next")
    collective: float = Field(
        40e-6, ge=0, allow_inf_nan=False, description="seconds that a collective takes, however small"
    )
    issue: float = Field(
        1.9e-3,
        ge=0,
        allow_inf_nan=False,
        description="seconds in which the host issues one layer's forward and backward of one micro-batch",
    )


class Host(_Facts):
    """One GPU's share of its machine's processors, memory and disks. The defaults are of a rented H200's machine: what
    16 cores copy, what pinned memory gives over PCIe 5, one data-centre NVMe disk."""

    memory: float = Field(
        256 * GIB, gt=0, allow_inf_nan=False, description="bytes of host memory that one GPU's process may take"
    )
    bandwidth: float = Field(
        91e9, gt=0, allow_inf_nan=False, description="bytes/s of host memory that one process's threads reach"
    )
    link: float = Field(
        55e9, gt=0, allow_inf_nan=False, description="bytes/s between a GPU and pinned host memory, one direction"
    )
    disk: float = Field(3e9, gt=0, allow_inf_nan=False, description="bytes/s of one process's files, one direction")


class Chip(_Facts):
    """A kind of GPU and the machines it comes in."""

    name: str = Field(min_length=1, description="what --gpu calls it")
    device: str = Field(description="part of the name that the driver gives the device")
    peak_flops: float = Field(gt=0, allow_inf_nan=False, description="dense 16-bit FLOP/s, data sheet")
    memory: float = Field(gt=0, allow_inf_nan=False, description="bytes that the driver reports")
    memory_bandwidth: float = Field(gt=0, allow_inf_nan=False, description="bytes/s, data sheet")
    gpus_per_node: int = Field(ge=1, description="GPUs of one machine")
    node: Link = Field(description="between the GPUs of a machine")
    network: Link = Field(description="between machines, each GPU's share")
    efficiency: Efficiency = Field(default_factory=Efficiency, description="how much of these training reaches")
    host: Host = Field(default_factory=Host, description="its share of the machine, for what is kept off the GPU")

    @property
    def node_rate(self) -> float:
        """Bytes/s out of a GPU in long collectives inside a machine."""
        return self.node.bandwidth * self.efficiency.link

    @property
    def network_rate(self) -> float:
        """The same between machines."""
        return self.network.bandwidth * self.efficiency.network

    def usable_memory(self) -> float:
        """Bytes that a plan may fill: less what the device's context and libraries take, and less what the allocator
        (of torch 2.11 and 2.13) loses between blocks."""
        return (self.memory - 3 * GIB) * 0.96


# Of these no run of this project exists: their shares are those of published measurements of large products and of
# attention, to be fitted by whoever has one.
_HOPPER = Efficiency()
_AMPERE = Efficiency(matmul=0.8, attention=0.55, memory=0.8)
_BLACKWELL = Efficiency(attention=0.4)
_ADA = Efficiency(matmul=0.9, attention=0.7, memory=0.85, link=0.4)
_CDNA = Efficiency(matmul=0.5, attention=0.3)

_NVLINK, _NETWORK = 2e-6, 5e-6

CHIPS: dict[str, Chip] = {}


def _chip(
    name: str,
    device: str,
    peak: float,
    gib: float,
    bandwidth: float,
    node: float,
    network: float,
    efficiency: Efficiency,
    gpus_per_node: int = 8,
) -> None:
    CHIPS[name] = Chip(
        name=name,
        device=device,
        peak_flops=peak,
        memory=gib * GIB,
        memory_bandwidth=bandwidth,
        gpus_per_node=gpus_per_node,
        node=Link(bandwidth=node, latency=_NVLINK),
        network=Link(bandwidth=network, latency=_NETWORK),
        efficiency=efficiency,
    )


# Data sheets of the makers: dense 16-bit peak, bandwidth of memory and of links. A device is the first whose name is
# part of its own, so that a form factor stands before the chip's plain name. Networks: the usual NIC per GPU.
_chip("b200", "B200", 2250e12, 178.3, 7.7e12, 900e9, 50e9, _BLACKWELL)
_chip("h200", "H200", 989e12, 139.8, 4.8e12, 450e9, 50e9, _HOPPER)
_chip("h100-pcie", "H100 PCIe", 756e12, 79.1, 2.0e12, 64e9, 25e9, _HOPPER)
_chip("h100-nvl", "H100 NVL", 835e12, 93.1, 3.9e12, 64e9, 50e9, _HOPPER)
_chip("h100", "H100", 989e12, 79.1, 3.35e12, 450e9, 50e9, _HOPPER)
_chip("a100-40", "A100-SXM4-40GB", 312e12, 39.4, 1.555e12, 300e9, 25e9, _AMPERE)
_chip("a100-80", "A100", 312e12, 79.2, 2.039e12, 300e9, 25e9, _AMPERE)
_chip("rtx4090", "RTX 4090", 165e12, 23.5, 1.008e12, 32e9, 3.1e9, _ADA, gpus_per_node=4)
_chip("mi300x", "MI300X", 1307e12, 191.5, 5.3e12, 448e9, 50e9, _CDNA)


def chip_of_device(device_name: str) -> Chip | None:
    """The chip that the driver calls ``device_name``; None where it is not in the table."""
    return next((chip for chip in CHIPS.values() if chip.device in device_name), None)


def load_chip(text: str) -> Chip:
    """The chip of a name in the table, or of a YAML or JSON file. Raises ConfigError that names field and fix."""
    if Path(text).suffix.lower() not in (".yaml", ".yml", ".json"):
        name = text.lower()
        if name not in CHIPS:
            close = near(name, CHIPS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(CHIPS)}."
            raise ConfigError.single("--gpu", f"unknown chip {text!r}; {hint} A file of yours ends in .yaml or .json")
        return CHIPS[name]
    try:
        tree = read_file(text)
    except ConfigError as error:
        raise ConfigError([("--gpu", message) for _, message in error.problems]) from error
    return _chip_of(tree, text)


def _chip_of(tree: dict[str, Any], path: str) -> Chip:
    base = tree.pop("based_on", None)
    if base is not None and (not isinstance(base, str) or base not in CHIPS):
        raise ConfigError.single("--gpu", f"{path}: based_on: {base!r} is none of {', '.join(CHIPS)}")
    known = {"name": Path(path).stem, "device": Path(path).stem}
    if base is not None:
        known = CHIPS[base].model_dump() | known
    try:
        return Chip.model_validate(merged(known, tree))
    except ValidationError as error:
        raise ConfigError([(f"--gpu {path}: {field}", why) for field, why in describe_errors(error, Chip)]) from error
