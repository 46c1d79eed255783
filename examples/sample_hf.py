"""Samples a sentence from an exported model, with transformers and sentencepiece alone: nothing of megazero."""

from __future__ import annotations

import argparse
from pathlib import Path

import sentencepiece
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar


def sample(model: torch.nn.Module, ids: list[int], stop: set[int], limit: int, top_k: int, seed: int) -> list[int]:
    """Continue ``ids`` token by token, among the ``top_k`` likeliest, up to a token in ``stop`` or ``limit`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    window = model.config.max_position_embeddings
    while len(ids) < limit:
        with torch.inference_mode():
            logits = model(torch.tensor([ids[-window:]])).logits[0, -1].float()
        likeliest = logits.topk(top_k)
        choice = torch.multinomial(likeliest.values.softmax(0), 1, generator=generator)
        ids = [*ids, int(likeliest.indices[choice])]
        if ids[-1] in stop:
            break
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--tokenizer", required=True, help="sentencepiece model file")
    parser.add_argument("--prompt", default="She was", help="beginning of the sentence")
    parser.add_argument("--seed", type=int, default=1, help="another seed, another sentence")
    arguments = parser.parse_args()
    if not Path(arguments.model, "config.json").is_file():  # transformers would look for it on the network
        parser.error(f"--model: {arguments.model} is no Hugging Face directory; it has a config.json")
    if not Path(arguments.tokenizer).is_file():
        parser.error(f"--tokenizer: {arguments.tokenizer} is no file; give the .model of data/train_tokenizer.py")

    pieces = sentencepiece.SentencePieceProcessor(model_file=arguments.tokenizer)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    ends = {i for i in range(pieces.get_piece_size()) if pieces.id_to_piece(i).endswith((".", "!", "?"))}
    ids = sample(model.eval(), pieces.encode(arguments.prompt), ends, limit=60, top_k=40, seed=arguments.seed)
    print(f"sampled with transformers from {arguments.model}:")
    print(" ".join(pieces.decode(ids).split()))


if __name__ == "__main__":
    main()
