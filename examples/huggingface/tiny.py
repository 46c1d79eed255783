"""What the scripts here train unless they are told: a small Llama over bytes, on Jane Austen."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as FastTokenizer

AUSTEN = Path(__file__).resolve().parents[2] / "data" / "austen" / "austen.jsonl"
END, PAD = "<|end|>", "<|pad|>"


def load(name: str | None) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """The model and tokenizer of a folder or of the Hub; None: the small ones, with random weights."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return AutoModelForCausalLM.from_pretrained(name), tokenizer
    tokenizer = _bytes()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # from_config and not the class: under stage 3 this is what cuts weights as they are made.
    return AutoModelForCausalLM.from_config(config), tokenizer


def _bytes() -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({symbol: index for index, symbol in enumerate([*alphabet, END, PAD])}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return FastTokenizer(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def texts(file: str | None, count: int | None = None) -> list[str]:
    """The ``text`` of every line of a .jsonl file, or paragraphs of Jane Austen; the first ``count``."""
    lines = (Path(file) if file else AUSTEN).read_text(encoding="utf-8").splitlines()
    found = [json.loads(line)["text"] for line in lines if line]
    if file is None:
        found = [part.strip() for text in found for part in text.split("\n\n") if len(part) > 200]
    return found[:count]


class Tokens(torch.utils.data.Dataset):
    """Each text as one sample of ``length`` tokens, cut or padded; padding is not in the loss."""

    def __init__(self, texts: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.samples = []
        for text in texts:
            ids = tokenizer(text + tokenizer.eos_token)["input_ids"][:length]
            padding = length - len(ids)
            self.samples.append(
                {
                    "input_ids": ids + [tokenizer.pad_token_id] * padding,
                    "attention_mask": [1] * len(ids) + [0] * padding,
                    "labels": ids + [-100] * padding,
                }
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.samples[index]
