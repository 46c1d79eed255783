"""A folder in place of the Hub: small models with random weights, a data set and a metric, under the Hub's names.

For run_hf_deepspeed_tests.py: every process that is started with `environment` finds them there, and asks nobody.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REVISION = "0" * 40
VOCABULARY = 1024

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_BERT = {**_SIZES, "max_position_embeddings": 520}
_BART = {"d_model": 32, "max_position_embeddings": 512} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 48))
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
_PROPHETNET = {
    "hidden_size": 32,
    "max_position_embeddings": 512,
    **{f"num_{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_WINDOW = {"attention_window": [8, 8]}
_CAUSAL, _MASKED, _ANSWERS = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForQuestionAnswering"
_CLASSES, _SEQUENCES = "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM"

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (_CAUSAL, "gpt2", _GPT),
    "sshleifer/tiny-gpt2": (_CAUSAL, "gpt2", _GPT),
    "hf-internal-testing/tiny-random-gpt2": (_CAUSAL, "gpt2", _GPT),
    "hf-internal-testing/tiny-random-gptj": (_CAUSAL, "gptj", {**_GPT, "rotary_dim": 8}),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": (_CAUSAL, "qwen2", {**_SIZES, "num_key_value_heads": 1}),
    "patrickvonplaten/t5-tiny-random": (_SEQUENCES, "t5", _T5),
    "bert-base-cased": (_CLASSES, "bert", {**_BERT, "hidden_size": 128}),
    "distilbert-base-uncased": (_CLASSES, "distilbert", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}),
    # those of transformers' test of many models alone
    "hf-internal-testing/tiny-albert": (_MASKED, "albert", {**_BERT, "embedding_size": 16}),
    "sshleifer/bart-tiny-random": (_SEQUENCES, "bart", _BART),
    "hf-internal-testing/tiny-bert": (_CLASSES, "bert", _BERT),
    "hf-internal-testing/tiny-random-bigbird_pegasus": (_CAUSAL, "bigbird_pegasus", _BART),
    "hf-internal-testing/tiny-random-blenderbot": (_CAUSAL, "blenderbot", _BART),
    "bigscience/bigscience-small-testing": (_CAUSAL, "bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "hf-internal-testing/tiny-random-deberta": (_MASKED, "deberta", {**_BERT, "relative_attention": True}),
    "hf-internal-testing/tiny-random-deberta-v2": (_MASKED, "deberta-v2", {**_BERT, "relative_attention": True}),
    "sshleifer/tiny-distilbert-base-cased": (
        _MASKED,
        "distilbert",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    ),
    "hf-internal-testing/tiny-electra": (_MASKED, "electra", {**_BERT, "embedding_size": 16}),
    "hf-internal-testing/tiny-random-gpt_neo": (
        _CAUSAL,
        "gpt_neo",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    "hf-internal-testing/tiny-layoutlm": (_MASKED, "layoutlm", _BERT),
    "hf-internal-testing/tiny-random-led": (
        _ANSWERS,
        "led",
        {**_BART, **_WINDOW, "max_encoder_position_embeddings": 512, "max_decoder_position_embeddings": 512},
    ),
    "hf-internal-testing/tiny-random-longformer": (_ANSWERS, "longformer", {**_BERT, **_WINDOW}),
    "stas/tiny-m2m_100": (_SEQUENCES, "m2m_100", _BART),
    "hf-internal-testing/tiny-random-mobilebert": (
        _ANSWERS,
        "mobilebert",
        {**_BERT, "embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    ),
    "hf-internal-testing/tiny-random-mpnet": (_ANSWERS, "mpnet", _BERT),
    "hf-internal-testing/tiny-random-prophetnet": (_CAUSAL, "prophetnet", _PROPHETNET),
    "sshleifer/tiny-distilroberta-base": (_ANSWERS, "roberta", _BERT),
    "hf-internal-testing/tiny-random-squeezebert": (
        _ANSWERS,
        "squeezebert",
        {**_BERT, "embedding_size": 32, **{f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention")}},
    ),
    "hf-internal-testing/tiny-random-t5-v1.1": (_SEQUENCES, "t5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "hf-internal-testing/tiny-random-vit": (
        "AutoModelForImageClassification",
        "vit",
        {**_SIZES, "image_size": 32, "patch_size": 8},
    ),
    "hf-internal-testing/tiny-xlm-roberta": (_CAUSAL, "xlm-roberta", {**_BERT, "is_decoder": True}),
    "sshleifer/tiny-xlnet-base-cased": (_CLASSES, "xlnet", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48}),
}
"""Name on the Hub → auto class, kind, and the sizes in its config."""

_METRIC = '''"""What scripts need of the package of this name: accuracy."""


class Accuracy:
    def __init__(self):
        self.right, self.seen = 0, 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.seen += len(references)

    def compute(self, predictions=None, references=None):
        if predictions is not None:
            self.add_batch(predictions, references)
        found, self.right, self.seen = self.right / self.seen, 0, 0
        return {"accuracy": found}


def load(*names, **options):
    return Accuracy()
'''
_CARD = "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: train.csv\n  - split: validation\n    path: validation.csv\n---\n"  # noqa: E501


def environment(folder: Path) -> dict[str, str]:
    """The variables with which a process takes ``folder`` for the Hub."""
    return {
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


def fill(folder: Path) -> None:
    """Write the models, a package `evaluate`, and the data set nyu-mll/glue for processes that run in ``folder``."""
    for name, (auto, kind, sizes) in MODELS.items():
        _write_model(folder / "hub" / f"models--{name.replace('/', '--')}", auto, kind, sizes)
    (folder / "evaluate.py").write_text(_METRIC)
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    (glue / "README.md").write_text(_CARD)
    for split, count in (("train", 512), ("validation", 64)):
        # A label that a small model learns in a few steps: which of two sentences the first one is.
        lines = ["sentence1,sentence2,label,idx"]
        lines += [f"{('no', 'aye')[i % 2] * 8},{i % 7} of {i % 5},{i % 2},{i}" for i in range(count)]
        (glue / f"{split}.csv").write_text("\n".join(lines) + "\n")


def _write_model(place: Path, auto: str, kind: str, sizes: dict[str, Any]) -> None:
    """In the layout of huggingface_hub's cache."""
    import torch
    import transformers

    snapshot = place / "snapshots" / REVISION
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(REVISION)
    tokens = {f"{name}_token_id": number for number, name in enumerate(("pad", "eos", "bos", "decoder_start"))}
    words = {} if kind == "vit" else {"vocab_size": VOCABULARY, **tokens}
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **{**words, **sizes}))
    model.save_pretrained(snapshot)
    if kind == "t5":
        characters = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?:", "\u2581"]
        pieces = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")] + [(piece, -2.0) for piece in characters]
        transformers.T5Tokenizer(vocab=pieces).save_pretrained(snapshot)
    elif kind != "vit":
        _tokenizer().save_pretrained(snapshot)
        described = snapshot / "tokenizer_config.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | {"model_max_length": 512}))


def _tokenizer() -> Any:
    """Of bytes, with every special token that a family may ask for; pairs come with separators."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "unk_token": "<unk>",
        "cls_token": "<cls>",
        "sep_token": "<sep>",
        "mask_token": "<mask>",
    }
    tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    numbers = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[(token, numbers[token]) for token in ("<cls>", "<sep>")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
