"""Turns text into a dataset that training reads: PREFIX.bin, PREFIX.idx and PREFIX.json (and PREFIX.mask).

Inputs are .jsonl (a document a line, its text under --json-key), .parquet (a document a row) and .txt (the whole file
is one document), each also with .gz or .zst. Documents keep their order, whatever --workers is. The files appear when
all is done; after an error nothing is left behind.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes this folder's place, whose names hide others
    _here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [os.path.dirname(_here), *(entry for entry in sys.path if os.path.realpath(entry) != _here)]

from data.command_line import run_script
from data.corpus_reader import Document, Fields, check_inputs
from data.encoding import encode_documents
from data.holdout import divide, text_bytes
from data.indexed import companion, token_dtype
from data.indexed_writer import DatasetWriter
from data.progress import Progress
from data.tokenizer import KINDS, Tokenizer, load_tokenizer
from megazero.errors import CommandLine, ConfigError

_BYTES_PER_WORKER = 8 << 20
"""A process takes half a second to start; less input than this is not worth one."""


def parse_arguments() -> argparse.Namespace:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, type=Path, metavar="FILE", help="text files, taken in this order")
    add("--tokenizer", required=True, metavar="SPEC", help=KINDS)
    add("--output", required=True, metavar="PREFIX", help="where the dataset goes: PREFIX.bin, PREFIX.idx, PREFIX.json")
    add("--workers", type=int, metavar="N", help="processes (default: one per CPU, fewer for small inputs)")
    add("--json-key", default="text", metavar="KEY", help="field or column with the text (default: text)")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document id")
    add("--prompt-key", metavar="KEY", help="field with a prompt, kept out of the loss by PREFIX.mask")
    add("--response-key", metavar="KEY", help="field with the response to it; replaces --json-key")
    add(
        "--holdout",
        type=float,
        metavar="FRACTION",
        help="keep this last part of the text, by bytes, out of PREFIX; a document on the border is cut after a line",
    )
    add("--holdout-output", metavar="PREFIX", help="where the held-out part goes")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ConfigError with everything that is wrong with the flags."""
    problems = []
    if (arguments.prompt_key is None) != (arguments.response_key is None):
        problems.append(("--prompt-key", "needs --response-key, and the other way round"))
    if (arguments.holdout is None) != (arguments.holdout_output is None):
        problems.append(("--holdout", "needs --holdout-output, and the other way round"))
    if arguments.holdout is not None and not 0 < arguments.holdout < 1:
        problems.append(("--holdout", f"is {arguments.holdout}; it must lie between 0 and 1"))
    if arguments.holdout_output is not None and Path(arguments.holdout_output) == Path(arguments.output):
        problems.append(("--holdout-output", "must differ from --output"))
    for flag, prefix in (("--output", arguments.output), ("--holdout-output", arguments.holdout_output)):
        if prefix is not None and os.path.basename(prefix) in ("", ".", ".."):
            problems.append((flag, f"{prefix!r} names no file; give a prefix such as {os.path.join(prefix, 'tokens')}"))
        for suffix in ("bin", "idx", "json", "mask") if prefix is not None else ():
            path = companion(prefix, suffix)
            if path.is_dir():
                problems.append((flag, f"{path} is a directory, where a file has to go; remove it or choose another"))
    if arguments.workers is not None and arguments.workers < 1:
        problems.append(("--workers", f"is {arguments.workers}; it must be at least 1"))
    if problems:
        raise ConfigError(problems)


def main() -> None:
    arguments = parse_arguments()
    check_arguments(arguments)
    fields = Fields(arguments.json_key, arguments.prompt_key, arguments.response_key)
    check_inputs(arguments.input, fields)
    tokenizer = load_tokenizer(arguments.tokenizer)
    if arguments.append_eod and tokenizer.eod_id is None:
        raise ConfigError.single("--append-eod", f"{arguments.tokenizer} has no end-of-document token")
    with Progress(arguments.input) as progress:
        if arguments.holdout is None:
            write([(arguments.output, progress.documents("tokenising", fields))], arguments, tokenizer)
            return
        total = sum(text_bytes(document) for document in progress.documents("measuring", fields))
        kept = round(total * (1 - arguments.holdout))
        first, rest = divide(progress.documents("tokenising", fields), kept)
        write([(arguments.output, first), (arguments.holdout_output, rest)], arguments, tokenizer)


def write(parts: list[tuple[str, Iterator[Document]]], arguments: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Tokenise each part's documents, one part after the other, and put all datasets in place at the end."""
    workers = arguments.workers or default_workers(arguments.input)
    writers: list[DatasetWriter] = []
    metadata = []
    try:
        for prefix, documents in parts:
            writer = DatasetWriter(
                prefix,
                token_dtype(tokenizer.vocab_size),
                vocab_size=tokenizer.vocab_size,
                masked=arguments.prompt_key is not None,
            )
            writers.append(writer)
            size = 0
            for batch in encode_documents(documents, arguments.tokenizer, arguments.append_eod, workers):
                writer.add_documents(batch.tokens, batch.lengths, batch.mask if arguments.prompt_key else None)
                size += batch.bytes
            metadata.append(
                {
                    "tokenizer": arguments.tokenizer,
                    "vocab_size": tokenizer.vocab_size,
                    "eod_id": tokenizer.eod_id,
                    "append_eod": arguments.append_eod,
                    "bytes": size,
                }
            )
        for writer, description in zip(writers, metadata, strict=True):
            writer.commit(description)
    finally:
        for writer in writers:
            writer.abort()
    for writer, description in zip(writers, metadata, strict=True):
        print(
            f"{writer.prefix}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens, "
            f"{description['bytes']:,} bytes of text"
        )


def default_workers(inputs: list[Path]) -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, sum(path.stat().st_size for path in inputs) // _BYTES_PER_WORKER))


if __name__ == "__main__":
    run_script(main)
