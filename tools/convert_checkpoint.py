"""Weights from and to Hugging Face: GPT-2, Llama, Mistral, Qwen-2 and Qwen-3.

tools/convert_checkpoint.py import --from HF_DIR --to DIR
tools/convert_checkpoint.py export --from DIR --to HF_DIR [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.convert.hf_writer import DEFAULT_SHARD_SIZE, DTYPES, export
from megazero.convert.importer import import_checkpoint


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    incoming = commands.add_parser("import", help="a Hugging Face directory into a megazero checkpoint")
    outgoing = commands.add_parser("export", help="a megazero checkpoint into a directory that transformers loads")
    for command, source, target in ((incoming, "HF_DIR", "DIR"), (outgoing, "DIR", "HF_DIR")):
        meaning = {"HF_DIR": "a directory with config.json", "DIR": "a checkpoint, or a directory of some: its newest"}
        command.add_argument("--from", dest="source", required=True, metavar=source, help=meaning[source])
        command.add_argument("--to", dest="target", required=True, metavar=target, help="missing or empty")
    add = outgoing.add_argument
    add("--dtype", choices=sorted(DTYPES), default="float32", help="of the tensors written (default: float32)")
    size_help = f"bytes of one file at most, e.g. 500MB (default: {DEFAULT_SHARD_SIZE})"
    add("--max-shard-size", default=DEFAULT_SHARD_SIZE, metavar="SIZE", help=size_help)
    add("--tokenizer", type=Path, metavar="PATH", help="a directory or file whose tokenizer files go along")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    source, target = arguments.source, arguments.target
    if arguments.command == "import":
        print(import_checkpoint(source, target))
    else:
        print(export(source, target, arguments.dtype, arguments.max_shard_size, arguments.tokenizer))


if __name__ == "__main__":
    run_script(main)
