"""Trains a sentencepiece vocabulary on text, for --tokenizer sentencepiece:FILE.model.

Text goes in as it is: no normalisation, no space put in front, bytes for what the vocabulary lacks. So any text comes
back unchanged from its ids (except U+2581, which sentencepiece itself uses for a space). The end of document is the
piece </s>. Inputs are those of data/preprocess.py.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes this folder's place, whose names hide others
    _here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [os.path.dirname(_here), *(entry for entry in sys.path if os.path.realpath(entry) != _here)]

from data.command_line import run_script
from data.corpus_reader import Document, Fields, check_inputs
from data.indexed_writer import write_whole
from data.progress import Progress
from megazero.errors import CommandLine, ConfigError, DataError

_PIECE_OF_TEXT = 2000
"""Characters given to the trainer at a time; whole documents take it longer, lines hide the line ends from it."""
_MOST_PIECES = 1_000_000
"""Of a larger corpus the trainer takes this many at random, 2 GB of text; more changes little and takes memory."""
_SMALLEST = 256 + 3
"""The bytes, and <unk>, <s> and </s>."""


def parse_arguments() -> argparse.Namespace:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, type=Path, metavar="FILE", help="text files")
    add("--vocab-size", required=True, type=int, metavar="N", help="pieces, bytes and special tokens included")
    add("--output", required=True, type=Path, metavar="FILE.model", help="where the model goes")
    add("--type", choices=["bpe", "unigram"], default="bpe", help="kind of vocabulary (default: bpe)")
    add("--json-key", default="text", metavar="KEY", help="field or column with the text (default: text)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.vocab_size <= _SMALLEST:
        raise ConfigError.single("--vocab-size", f"is {arguments.vocab_size}; it must be above {_SMALLEST}")
    if arguments.output.is_dir():
        raise ConfigError.single("--output", f"{arguments.output} is a directory; give the name of a file")
    fields = Fields(arguments.json_key)
    check_inputs(arguments.input, fields)
    with Progress(arguments.input) as progress:
        model = train(progress.documents("reading", fields), arguments.vocab_size, arguments.type)
    write_whole(arguments.output, model)
    print(f"{arguments.output}: {arguments.vocab_size:,} pieces")


def train(documents: Iterator[Document], vocab_size: int, kind: str) -> bytes:
    """A serialised sentencepiece model of exactly ``vocab_size`` pieces. Raises DataError if the text is too small."""
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError("training a vocabulary needs the package sentencepiece: pip install sentencepiece") from error
    pieces = (piece for document in documents for piece in _cut(document.text))
    first = next(pieces, None)
    if first is None:
        raise DataError("--input: there is no text to learn from")
    failure: list[BaseException] = []
    model = io.BytesIO()
    try:
        sentencepiece.set_random_generator_seed(0)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_keeping(failure, first, pieces),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=kind,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=16 * _PIECE_OF_TEXT,
            input_sentence_size=_MOST_PIECES,
            shuffle_input_sentence=True,
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        if failure:
            raise failure[0] from error
        reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
        raise DataError(
            f"--vocab-size: sentencepiece cannot make {vocab_size} pieces of this text: {reason}"
        ) from error
    if failure:
        raise failure[0]
    return model.getvalue()


def _keeping(failure: list[BaseException], first: str, rest: Iterator[str]) -> Iterator[str]:
    """first, then rest; an error in rest ends it and is kept, since the trainer would swallow it."""
    yield first
    try:
        yield from rest
    except Exception as error:
        failure.append(error)


def _cut(text: str) -> Iterator[str]:
    """``text`` in pieces of whole lines of about _PIECE_OF_TEXT characters; a longer line is cut anywhere."""
    start = 0
    while start < len(text):
        stop = start + _PIECE_OF_TEXT
        stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


if __name__ == "__main__":
    run_script(main)
