"""Prints the last validation loss of a run in bits per byte, beside n-gram models of the same text."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from data.indexed import IndexedDataset  # noqa: E402
from data.ngram import bits_per_byte  # noqa: E402


def last_validation(metrics: Path) -> tuple[int, float] | None:
    """(step, loss in nats per token) of the last evaluation in a metrics.jsonl; None where there was none."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    found = [(line["step"], line["valid_loss"]) for line in lines if line.get("valid_loss") is not None]
    return found[-1] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics", type=Path, required=True, help="the run's metrics.jsonl")
    parser.add_argument("--train", required=True, help="prefix of the training tokens")
    parser.add_argument("--valid", required=True, help="prefix of the held-out tokens")
    arguments = parser.parse_args()

    train, valid = IndexedDataset(arguments.train), IndexedDataset(arguments.valid)
    text_bytes, vocab_size = valid.metadata["bytes"], valid.metadata["vocab_size"]
    found = last_validation(arguments.metrics)
    unigram, bigram = bits_per_byte(train.tokens, valid.tokens, vocab_size, text_bytes)
    print(f"\nbits per byte of the held-out text ({text_bytes:,} bytes, {valid.num_tokens:,} tokens)")
    print(f"  unigram model    {unigram:.3f}\n  bigram model     {bigram:.3f}")
    if found is None:
        print("  this model       not evaluated: train.eval_interval is 0 or above train.steps\n")
        return
    step, loss = found
    model = loss / math.log(2) * valid.num_tokens / text_bytes
    print(f"  this model       {model:.3f}   (step {step}, validation loss {loss:.4f} nats per token)\n")


if __name__ == "__main__":
    main()
