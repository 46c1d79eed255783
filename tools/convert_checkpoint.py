"""Weights from and to Hugging Face (GPT-2, Llama, Mistral, Qwen-2, Qwen-3), and from Megatron-Core and DeepSpeed.

tools/convert_checkpoint.py import --from HF_DIR --to DIR [--config config.json]
tools/convert_checkpoint.py export --from DIR --to HF_DIR [--dtype bfloat16]

Several inputs go each into a directory of its name: --from A B --to DIR makes DIR/A and DIR/B.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Memory in large pages: fresh ones cost more than converting what goes into them (4.2 instead of 1.0 GB/s measured).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from data.command_line import run_script
from data.progress import byte_bar
from megazero.convert import HFWeights, open_weights
from megazero.convert.hf_writer import DEFAULT_SHARD_SIZE, DTYPES, export, parse_size
from megazero.convert.importer import import_checkpoint
from megazero.convert.target import refuse_non_empty
from megazero.convert.verify import TOLERANCE, largest_difference, need_transformers
from megazero.convert.weights import open_source
from megazero.errors import CommandLine, ConvertError

_LINE_EVERY = 10.0
"""Seconds between two lines of progress where stderr is no terminal."""


class Shown:
    """How far a conversion is, on stderr: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, name: str) -> None:
        self._name, self._line = name, time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._bar = byte_bar()
        self._task = self._bar.add_task(name, total=None)

    def update(self, done: int, total: int) -> None:
        """Bytes of the target."""
        self._bar.update(self._task, completed=done, total=total)
        if not self._is_terminal and time.monotonic() - self._line >= _LINE_EVERY:
            self._line = time.monotonic()
            print(f"{self._name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB", file=sys.stderr, flush=True)

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def parse_arguments() -> argparse.Namespace:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    incoming = commands.add_parser(
        "import", help="a Hugging Face, Megatron or DeepSpeed directory into a megazero checkpoint"
    )
    outgoing = commands.add_parser("export", help="a megazero checkpoint into a directory that transformers loads")
    for command, source, target in ((incoming, "HF_DIR", "DIR"), (outgoing, "DIR", "HF_DIR")):
        meaning = {
            "HF_DIR": "a Hugging Face, Megatron or DeepSpeed directory",
            "DIR": "a checkpoint, or a directory of some: its newest",
        }
        add = command.add_argument
        add(
            "--from",
            dest="sources",
            action="extend",
            nargs="+",
            type=Path,
            required=True,
            metavar=source,
            help=meaning[source],
        )
        add("--to", dest="target", type=Path, required=True, metavar=target, help="missing or empty")
        add("--verify", action="store_true", help="compare the logits of both sides, by transformers; needs memory")
        add("--skip-existing", action="store_true", help="pass over a target that is there already and whole")
    config_help = "a Megatron or DeepSpeed model's Hugging Face config.json, or its directory"
    incoming.add_argument("--config", type=Path, metavar="FILE", help=config_help)
    add = outgoing.add_argument
    add("--dtype", choices=sorted(DTYPES), default="float32", help="of the tensors written (default: float32)")
    size_help = f"bytes of one file at most, e.g. 500MB (default: {DEFAULT_SHARD_SIZE})"
    add("--max-shard-size", default=DEFAULT_SHARD_SIZE, metavar="SIZE", help=size_help)
    add("--tokenizer", type=Path, metavar="PATH", help="a directory or file whose tokenizer files go along")
    return parser.parse_args()


def plan(arguments: argparse.Namespace) -> list[tuple[Path, Path]]:
    """(source, target) of each conversion that is to be done. Raises where one cannot be, before any is started."""
    sources, target = arguments.sources, arguments.target
    if arguments.verify:
        need_transformers()
    if arguments.command == "export":
        parse_size(arguments.max_shard_size)
    names = [Path(os.path.abspath(source)).name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConvertError(f"--from: two inputs are called {name}, so they would share {target / name}")
    targets = [target] if len(sources) == 1 else [target / name for name in names]
    todo = []
    for source, target in zip(sources, targets, strict=True):
        weights = open_source(source, arguments.config) if arguments.command == "import" else open_weights(source)
        if arguments.skip_existing and target.is_dir() and any(target.iterdir()):
            # An export may have biases (zeros) more.
            if open_weights(target).parameters.items() >= weights.parameters.items():
                print(f"{target}: there already", file=sys.stderr)
                continue
            raise ConvertError(f"{target}: holds another model than {source}; remove it or choose another --to")
        refuse_non_empty(target)
        if arguments.verify and arguments.command == "import" and not isinstance(weights, HFWeights):
            raise ConvertError(f"{source}: is no Hugging Face directory; to verify it, export the import with --verify")
        for note in getattr(weights, "notes", ()):
            print(f"{source}: {note}", file=sys.stderr)
        todo.append((source, target))
    return todo


def verify(source: Path, result: Path, arguments: argparse.Namespace) -> None:
    """Prints the difference; raises ConvertError where it is too large."""
    importing = arguments.command == "import"
    ours, theirs = (result, source) if importing else (source, result)
    dtype = torch.float32 if importing else DTYPES[arguments.dtype]
    difference = largest_difference(open_weights(ours), theirs, dtype)
    print(f"{result}: logits differ from transformers' by {difference:.1e} of the largest", file=sys.stderr)
    if not difference <= TOLERANCE:
        raise ConvertError(f"{result}: is written, but its logits differ by more than {TOLERANCE:.0e} of the largest")


def main() -> None:
    arguments = parse_arguments()
    for source, target in plan(arguments):
        with Shown(str(target)) as shown:
            if arguments.command == "import":
                result = import_checkpoint(source, target, shown.update, arguments.config)
            else:
                result = export(
                    source, target, arguments.dtype, arguments.max_shard_size, arguments.tokenizer, shown.update
                )
        print(result, flush=True)
        if arguments.verify:
            verify(source, result, arguments)


if __name__ == "__main__":
    run_script(main)
