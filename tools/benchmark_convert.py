"""Speed and peak memory of converting a Llama of 7B parameters' shape, both ways, beside what cp does.

tools/benchmark_convert.py FOLDER

Writes a Hugging Face directory of random bfloat16 weights (14 GB) into FOLDER, imports it, exports the result as
bfloat16, and checks that every tensor came back bit for bit. Needs 60 GB there; removes what it wrote.

Each conversion runs in a process of its own. Its time is the wall time from start to exit, imports and fsync included;
cp of the same source directory is timed with a sync of the copy, since a conversion is on the disk when it ends. The
source's pages are dropped from the page cache before each. GB/s are bytes of the source per second. Peak memory is the
kernel's VmHWM of the process: all that was resident at once, pages of Python's and torch's libraries included.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from data.command_line import run_script
from megazero.checkpoint import files
from megazero.convert.configs import choose_family, write_config
from megazero.convert.hf_writer import json_bytes
from megazero.convert.tensor_files import open_files
from megazero.errors import CommandLine, ConvertError
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_count

_TOOL = Path(__file__).with_name("convert_checkpoint.py")
_SHARD_LAYERS = 8
# Runs a script as its own program and says what the kernel saw of it at the end.
_WATCHED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
"""


def random_tensor(shape: tuple[int, ...], generator: np.random.Generator) -> torch.Tensor:
    """bfloat16: sign and mantissa are random, the exponent is that of 2^-7."""
    bits = np.frombuffer(generator.bytes(2 * math.prod(shape)), dtype=np.uint16)
    return torch.from_numpy((bits & 0x807F | 0x3C00).view(np.int16)).view(torch.bfloat16).view(shape)


def write_model(directory: Path, config: ModelConfig) -> dict[str, int]:
    """Random weights in shards of 8 layers; returns the CRC-32 of every tensor."""
    directory.mkdir()
    family, config = choose_family(config)
    generator = np.random.default_rng(0)
    shards: dict[int, list[files.Entry]] = {}
    for name, parts in family.tensors(config).items():
        shape = parts[0][1].shape(parts[0][2])
        layer = re.search(r"\.(\d+)\.", name)
        shard = int(layer[1]) // _SHARD_LAYERS if layer else 0
        entry = files.Entry(name, torch.bfloat16, shape, lambda shape=shape: random_tensor(shape, generator))
        shards.setdefault(shard, []).append(entry)
    checksums, weight_map = {}, {}
    for number, entries in sorted(shards.items()):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        written = files.write_safetensors(directory / file, entries)
        for entry, place in zip(entries, written.tensors, strict=True):
            checksums[entry.key], weight_map[entry.key] = place.checksum, file
    files.write_file(directory / "model.safetensors.index.json", json_bytes({"metadata": {}, "weight_map": weight_map}))
    files.write_file(directory / "config.json", json_bytes(write_config(family, config, "bfloat16", {})))
    return checksums


def inside(directory: Path) -> Iterator[Path]:
    """All files under a directory."""
    return (path for path in directory.rglob("*") if path.is_file())


def forget(directory: Path) -> None:
    """Drops a directory's pages from the page cache."""
    for path in inside(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_copy(source: Path, target: Path) -> float:
    """Seconds of cp and a sync of what it wrote; the copy is removed."""
    forget(source)
    start = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *inside(target)], check=True)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


def time_conversion(command: str, source: Path, target: Path, *flags: str) -> tuple[float, int]:
    """Seconds, and the process's peak resident bytes."""
    forget(source)
    arguments = [command, "--from", str(source), "--to", str(target), *flags]
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _WATCHED, str(_TOOL), *arguments], stderr=subprocess.PIPE, text=True)
    seconds = time.monotonic() - start
    if done.returncode:
        raise ConvertError(f"{command} failed: {done.stderr}")
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is not None, done.stderr
    return seconds, int(peak[1]) * 1024


def report(what: str, source: Path, copy: float, seconds: float, peak: int) -> None:
    """One line."""
    size = sum(path.stat().st_size for path in inside(source)) / 1e9
    print(
        f"{what}: {size:.1f} GB in {seconds:.0f} s, {size / seconds:.3f} GB/s; cp {copy:.0f} s, "
        f"{size / copy:.3f} GB/s, so {copy / seconds:.2f} of cp's; peak {peak / 2**30:.2f} GiB",
        flush=True,
    )


def checksums_of(directory: Path) -> dict[str, int]:
    """The CRC-32 of every tensor of a Hugging Face directory."""
    tensors = open_files(directory).items()
    return {name: zlib.crc32(files.tensor_bytes(stored.read(...))) for name, stored in tensors}


def main() -> None:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; what is made there is removed at the end")
    parser.add_argument("--layers", type=int, default=32, help="of 4096 x 11008; 32 are the 7B (default: 32)")
    arguments = parser.parse_args()
    config = ModelConfig(
        **dict(num_layers=arguments.layers, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=11008),
        **dict(vocab_size=32000, max_position_embeddings=4096, norm="rmsnorm", activation="swiglu", position="rotary"),
        **dict(qkv_bias=False, out_bias=False, mlp_bias=False, tie_word_embeddings=False),
    )
    root = arguments.folder / "benchmark_convert"
    if root.exists():
        raise ConvertError(f"{root}: is there already; remove it or choose another folder")
    root.mkdir(parents=True)
    try:
        first, ours, second = root / "hf", root / "checkpoint", root / "exported"
        before = write_model(first, config)
        # As stored in bfloat16: the stricter reading of "the largest tensor".
        largest = 2 * config.vocab_size * config.hidden_size / 2**30
        print(f"{parameter_count(config) / 1e9:.2f} B parameters, largest tensor {largest:.2f} GiB", flush=True)
        copy = time_copy(first, root / "copy")
        report("import", first, copy, *time_conversion("import", first, ours))
        shutil.rmtree(first)
        copy = time_copy(ours, root / "copy")
        report("export", ours, copy, *time_conversion("export", ours, second, "--dtype", "bfloat16"))
        if checksums_of(second) != before:
            raise ConvertError(f"{second}: some tensor is not what it was")
        print("every tensor came back bit for bit")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    run_script(main)
