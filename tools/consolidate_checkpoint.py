"""A checkpoint of engine.save_checkpoint, of any number of ranks and any stage, into safetensors with whole tensors.

tools/consolidate_checkpoint.py --from DIR --to DIR [--dtype bfloat16] [--max-shard-size 5GB]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.convert.hf_writer import DEFAULT_SHARD_SIZE, DTYPES
from megazero.errors import CommandLine
from megazero.foreign.consolidate import consolidate


def main() -> None:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    source_help = "a checkpoint, or the directory given to save_checkpoint: its latest"
    add("--from", dest="source", type=Path, required=True, metavar="DIR", help=source_help)
    add("--to", dest="target", type=Path, required=True, metavar="DIR", help="missing or empty")
    add("--dtype", choices=sorted(DTYPES), default="float32", help="of the weights written (default: float32)")
    size_help = f"bytes of one file at most, e.g. 500MB (default: {DEFAULT_SHARD_SIZE})"
    add("--max-shard-size", default=DEFAULT_SHARD_SIZE, metavar="SIZE", help=size_help)
    add("--exclude-frozen-parameters", action="store_true", help="only the parameters that were trained")
    asked = parser.parse_args()
    frozen = asked.exclude_frozen_parameters
    written = consolidate(asked.source, asked.target, asked.dtype, asked.max_shard_size, exclude_frozen=frozen)
    print(written, flush=True)


if __name__ == "__main__":
    run_script(main)
