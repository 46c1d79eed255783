"""n-gram models against a plain loop, and the figures of the shipped text."""

from collections import Counter, defaultdict
from math import log2

import numpy as np
import pytest

from data.ngram import BigramModel, UnigramModel, bits_per_byte
from data.tokenizer import load_tokenizer
from tests.data.helpers import AUSTEN, gpt2_folder, run_script, write_dataset


def plain_bits(train, heldout, vocab_size):
    """Witten-Bell by the book, one token at a time: (unigram, bigram)."""
    counts, after = Counter(train), defaultdict(Counter)
    for first, second in zip(train[:-1], train[1:], strict=True):
        after[first][second] += 1

    def unigram(token):
        return (counts[token] + len(counts) / vocab_size) / (len(train) + len(counts))

    def bigram(first, token):
        seen, types = sum(after[first].values()), len(after[first])
        return (after[first][token] + types * unigram(token)) / (seen + types) if seen else unigram(token)

    one = -sum(log2(unigram(token)) for token in heldout)
    two = -log2(unigram(heldout[0])) - sum(log2(bigram(a, b)) for a, b in zip(heldout[:-1], heldout[1:], strict=True))
    return one, two


def test_against_a_plain_loop():
    rng = np.random.default_rng(2)
    train, heldout = rng.integers(0, 25, 400), rng.integers(0, 30, 100)
    expected = plain_bits(train.tolist(), heldout.tolist(), 40)
    assert bits_per_byte(train, heldout, 40, 250) == pytest.approx([bits / 250 for bits in expected], rel=1e-12)


def test_probabilities_sum_to_one():
    train = np.array([0, 1, 1, 2, 0, 1])
    model = BigramModel(train, 5)
    assert UnigramModel(train, 5).probabilities.sum() == pytest.approx(1)
    for context in range(5):
        total = sum(
            2 ** (model.unigram.bits(np.array([context])) - model.bits(np.array([context, t]))) for t in range(5)
        )
        assert total == pytest.approx(1)


def test_one_token_and_none():
    model = BigramModel(np.array([3]), 5)
    assert model.bits(np.array([3, 3])) == pytest.approx(2 * -log2(1.2 / 2))
    assert model.bits(np.array([], np.int64)) == 0


def test_figures_of_austen(tmp_path):
    """The last 5 % held out: an order-1 byte model takes 3.55 bits per byte; over GPT-2 tokens a unigram takes 2.31
    and a bigram 1.72 at the whole text's bytes per token (2.34 and 1.74 by the bytes of the held-out part alone)."""
    raw = np.frombuffer((AUSTEN / "austen.txt").read_bytes(), np.uint8)
    cut = int(len(raw) * 0.95)
    assert bits_per_byte(raw[:cut], raw[cut:], 256, len(raw) - cut)[1] == pytest.approx(3.55, abs=0.005)
    tokenizer = load_tokenizer(f"gpt2:{gpt2_folder(tmp_path)}")
    tokens = np.array(tokenizer.encode(bytes(raw).decode()))
    cut = int(len(tokens) * 0.95)
    heldout = tokens[cut:]
    average = bits_per_byte(tokens[:cut], heldout, 50257, len(heldout) * len(raw) / len(tokens))
    assert average == pytest.approx([2.31, 1.72], abs=0.005)
    exact = bits_per_byte(tokens[:cut], heldout, 50257, len(tokenizer.decode(heldout.tolist()).encode()))
    assert exact == pytest.approx([2.34, 1.74], abs=0.005)


def test_script(tmp_path):
    metadata = {"vocab_size": 4, "bytes": 8}
    train = write_dataset(tmp_path / "t", [[0, 1, 2, 3] * 4], metadata=metadata)
    heldout = write_dataset(tmp_path / "v", [[0, 1, 2, 3]], metadata=metadata)
    done = run_script("data/ngram.py", "--train", train, "--heldout", heldout)
    assert done.stdout.splitlines()[0] == "unigram  1.000 bits per byte"
    bare = write_dataset(tmp_path / "b", [[0]])
    done = run_script("data/ngram.py", "--train", train, "--heldout", bare)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    empty = write_dataset(tmp_path / "e", [], metadata={"vocab_size": 4, "bytes": 0})
    done = run_script("data/ngram.py", "--train", train, "--heldout", empty)
    assert (done.returncode, done.stderr) == (2, f"error: {empty} has no text to measure\n")
