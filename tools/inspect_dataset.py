"""Shows what a dataset PREFIX.bin/.idx holds; with --verify, reads all of it and checks it."""

from __future__ import annotations

import os
import sys

if not __package__:  # run as a script: the checkout's root takes this folder's place, whose names hide others
    _here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [os.path.dirname(_here), *(entry for entry in sys.path if os.path.realpath(entry) != _here)]

import numpy as np

from data.command_line import run_script
from data.indexed import IndexedDataset
from megazero.errors import CommandLine

_SHOWN = 16
"""Ids of the first document that are printed."""


def facts(dataset: IndexedDataset) -> dict[str, str]:
    """Name and value of what the index and PREFIX.json say, without reading the tokens."""
    shown = {
        "tokens": f"{dataset.num_tokens:,}",
        "documents": f"{dataset.num_documents:,}",
        "sequences": f"{dataset.num_sequences:,}",
        "dtype": str(dataset.dtype),
        "bytes of .bin": f"{dataset.tokens.nbytes:,}",
        "loss mask": "none" if dataset.mask is None else "yes",
    }
    for name, value in dataset.metadata.items():
        if name not in ("tokens", "documents"):
            shown[name.replace("_", " ")] = str(value)
    if dataset.num_tokens:
        shown["first ids"] = " ".join(map(str, dataset.tokens[:_SHOWN]))
    return shown


def lengths_of_documents(dataset: IndexedDataset) -> str:
    """Shortest, mean and longest document, and how many are empty; reads the whole index."""
    if dataset.num_documents == 0:
        return "no documents"
    lengths = np.diff(dataset.document_starts(np.arange(dataset.num_documents + 1)))
    empty = np.count_nonzero(lengths == 0)
    return f"{lengths.min():,} to {lengths.max():,} tokens, {lengths.mean():,.1f} on average, {empty:,} empty"


def main() -> None:
    parser = CommandLine(description=__doc__)
    parser.add_argument("prefix", metavar="PREFIX", help="path without .bin or .idx")
    parser.add_argument("--verify", action="store_true", help="read everything and check it")
    arguments = parser.parse_args()
    dataset = IndexedDataset(arguments.prefix)
    shown = facts(dataset)
    if arguments.verify:
        shown["largest id"] = str(dataset.verify())
        shown["document lengths"] = lengths_of_documents(dataset)
        if dataset.mask is not None:
            shown["in the loss"] = f"{np.count_nonzero(dataset.mask):,} tokens"
        shown["verified"] = "yes"
    width = max(map(len, shown))
    for name, value in shown.items():
        print(f"{name:{width}}  {value}")


if __name__ == "__main__":
    run_script(main)
