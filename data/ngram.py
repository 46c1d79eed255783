"""What counting alone achieves: bits per byte of a text under unigram and bigram models of another.

    data/ngram.py --train PREFIX --heldout PREFIX

Both are smoothed by Witten and Bell's rule ("The zero-frequency problem", IEEE Trans. Inf. Theory 37, 1991): after a
context seen n times with t different successors, a token seen c times has probability (c + t * lower) / (n + t), where
``lower`` is the unigram's probability for the bigram and the uniform one for the unigram. The bits of the held-out
tokens are divided by the bytes of the text they stand for, so different vocabularies compare.
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np

if not __package__:  # run as a script: the checkout's root takes this folder's place, whose names hide others
    _here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [os.path.dirname(_here), *(entry for entry in sys.path if os.path.realpath(entry) != _here)]

from data.command_line import run_script
from data.indexed import IndexedDataset, check_ids
from megazero.errors import CommandLine, DataError


class UnigramModel:
    """Probabilities of single tokens, learnt from ``tokens`` (N,) of ``vocab_size`` entries."""

    def __init__(self, tokens: np.ndarray, vocab_size: int) -> None:
        counts = np.bincount(tokens, minlength=vocab_size)
        types = np.count_nonzero(counts)
        self.probabilities = (counts + types / vocab_size) / (len(tokens) + types)

    def bits(self, tokens: np.ndarray) -> float:
        """Bits that ``tokens`` (M,) take."""
        return float(-np.log2(self.probabilities[tokens]).sum())


class BigramModel:
    """Probabilities of a token after the one before, falling back on the unigram. Memory follows the distinct pairs."""

    def __init__(self, tokens: np.ndarray, vocab_size: int) -> None:
        self.unigram = UnigramModel(tokens, vocab_size)
        self._vocab_size = vocab_size
        self._pairs, self._counts = np.unique(self._pair_ids(tokens), return_counts=True)
        contexts = self._pairs // vocab_size
        self._seen = np.bincount(contexts, weights=self._counts, minlength=vocab_size)
        self._successors = np.bincount(contexts, minlength=vocab_size)

    def _pair_ids(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:-1].astype(np.int64) * self._vocab_size + tokens[1:]

    def bits(self, tokens: np.ndarray) -> float:
        """Bits that ``tokens`` (M,) take; the first one has no context and goes by the unigram."""
        if len(tokens) < 2:
            return self.unigram.bits(tokens)
        pairs = self._pair_ids(tokens)
        if len(self._pairs) == 0:
            return self.unigram.bits(tokens)
        place = np.minimum(np.searchsorted(self._pairs, pairs), len(self._pairs) - 1)
        count = np.where(self._pairs[place] == pairs, self._counts[place], 0)
        context = tokens[:-1]
        lower = self.unigram.probabilities[tokens[1:]]
        mass = self._seen[context] + self._successors[context]
        smoothed = (count + self._successors[context] * lower) / np.maximum(mass, 1)
        probability = np.where(mass > 0, smoothed, lower)
        return self.unigram.bits(tokens[:1]) + float(-np.log2(probability).sum())


def bits_per_byte(train: np.ndarray, heldout: np.ndarray, vocab_size: int, text_bytes: int) -> tuple[float, float]:
    """(unigram, bigram) bits per byte of ``heldout`` (M,), which stands for ``text_bytes``, given ``train``."""
    bigram = BigramModel(train, vocab_size)
    return bigram.unigram.bits(heldout) / text_bytes, bigram.bits(heldout) / text_bytes


def main() -> None:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, metavar="PREFIX", help="dataset to learn from")
    parser.add_argument("--heldout", required=True, metavar="PREFIX", help="dataset to measure")
    arguments = parser.parse_args()
    train, heldout = IndexedDataset(arguments.train), IndexedDataset(arguments.heldout)
    vocab_size, text_bytes = (heldout.metadata.get(name) for name in ("vocab_size", "bytes"))
    if heldout.num_tokens == 0 or text_bytes == 0:
        raise DataError(f"{arguments.heldout} has no text to measure")
    if not vocab_size or not text_bytes:
        raise DataError(f"{arguments.heldout}.json gives no vocabulary size and bytes of text; use data/preprocess.py")
    if train.num_tokens == 0:
        raise DataError(f"{arguments.train} has no tokens to learn from")
    check_ids(train.tokens, vocab_size, f"{arguments.train}.bin")
    check_ids(heldout.tokens, vocab_size, f"{arguments.heldout}.bin")
    unigram, bigram = bits_per_byte(train.tokens, heldout.tokens, vocab_size, text_bytes)
    print(f"unigram  {unigram:.3f} bits per byte")
    print(f"bigram   {bigram:.3f} bits per byte")


if __name__ == "__main__":
    run_script(main)
