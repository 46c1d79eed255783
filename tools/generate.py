"""Continues prompts with a megazero checkpoint or a Hugging Face directory, and prints the text as it comes.

    python tools/generate.py --checkpoint DIR --tokenizer SPEC --prompt TEXT [--prompt TEXT ...]
    megazero launch --nproc 4 tools/generate.py --tp 2 --pp 2 --checkpoint DIR --tokenizer SPEC --prompt-file FILE

Any layout runs any checkpoint; tp x pp is the number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from data.tokenizer import KINDS, Tokenizer, load_tokenizer
from megazero.convert import open_weights
from megazero.errors import CommandLine, ConfigError
from megazero.generation import Sampling, TextStream, build_generator, check_prompts, inference_config, longest
from megazero.launch.environment import process_environment
from megazero.launch.errors import report_errors
from megazero.models.config import ModelConfig

DEFAULT_MAX_TOKENS = 128


class _Parser(CommandLine):
    def error(self, message: str) -> NoReturn:
        told = self.hinted(message)
        raise ConfigError.single(self.prog, told if told.endswith("?") else f"{told}; --help lists what there is")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="tools/generate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    checkpoint = "megazero checkpoint, a directory of some (its newest), or a Hugging Face directory"
    add("--checkpoint", required=True, metavar="DIR", help=checkpoint)
    add("--tokenizer", required=True, metavar="SPEC", help=KINDS)
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated; - is standard input, whole")
    add("--prompt-file", action="append", default=[], metavar="FILE", help="a prompt per line; - is standard input")
    fewer = f"{DEFAULT_MAX_TOKENS}, fewer where learned positions end"
    add("--max-tokens", type=int, metavar="N", help=f"new tokens per prompt at most (default: {fewer})")
    add("--temperature", type=float, default=1.0, help="divides the logits; 0: always the likeliest (default: 1)")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: all)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this probability (default: 1)")
    add("--seed", type=int, default=0, help="same seed and prompt, same text, in any batch and layout (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--batch-size", type=int, default=16, metavar="N", help="prompts that run together (default: 16)")
    add("--tp", "--parallel.tp", type=int, default=1, help="processes that share each matrix (default: 1)")
    add("--pp", "--parallel.pp", type=int, default=1, help="pipeline stages (default: 1)")
    precisions = ("auto", "bf16", "fp16", "fp32")
    add("--dtype", choices=precisions, default="auto", help="auto: bf16 on a GPU, fp32 on a CPU (default: auto)")
    arguments = parser.parse_args(argv)
    if not arguments.prompt and not arguments.prompt_file:
        parser.error("one of --prompt and --prompt-file is needed")
    if "" in arguments.stop:
        parser.error("--stop: an empty text stops everything; leave it out")
    if arguments.batch_size < 1:
        parser.error(f"--batch-size: {arguments.batch_size} must be at least 1")
    return arguments


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Those of --prompt, then those of --prompt-file. Raises ConfigError."""
    prompts = [_read("--prompt", "-").removesuffix("\n") if text == "-" else text for text in arguments.prompt]
    for file in arguments.prompt_file:
        lines = _read("--prompt-file", file).replace("\r\n", "\n").split("\n")
        if lines[-1] == "":
            lines.pop()
        if not lines:
            raise ConfigError.single("--prompt-file", f"{file} is empty; give it a prompt per line")
        prompts += lines
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ConfigError.single(f"prompt {number}", "is empty; give at least a letter to continue from")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError.single(f"prompt {number}", "is not valid UTF-8") from error
    return prompts


def _read(flag: str, file: str) -> str:
    """A file's text, or standard input's where it is called -."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError.single(flag, f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError.single(flag, f"{file} is not valid UTF-8") from error


def encode(
    prompts: Sequence[str], tokenizer: Tokenizer, model: ModelConfig, max_tokens: int | None
) -> tuple[list[list[int]], int]:
    """(ids of each prompt, new tokens per prompt). Raises ConfigError where the model cannot continue one."""
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if max_tokens is None:
        room = longest(model)
        max_tokens = DEFAULT_MAX_TOKENS
        if room is not None:
            max_tokens = max(1, min(max_tokens, room - max(map(len, encoded))))
    elif max_tokens < 1:
        raise ConfigError.single("--max-tokens", f"{max_tokens} must be at least 1")
    check_prompts(model, encoded, max_tokens)
    return encoded, max_tokens


class Output:
    """Prints each prompt with its continuation, in their order, each as it comes once those before it are done."""

    def __init__(self, prompts: Sequence[str], streams: Sequence[TextStream], shown: bool) -> None:
        self._prompts, self._streams, self._shown = prompts, streams, shown
        self._texts = [""] * len(prompts)
        self._done = [False] * len(prompts)
        self._current = -1
        self._next_prompt()

    def token(self, index: int, token: int | None, last: bool) -> bool:
        """Take a prompt's next token, None for one without text; whether a stop string ends it."""
        stream = self._streams[index]
        text = "" if token is None else stream.push(token)
        ended = last or stream.stopped
        if ended:
            text += stream.finish()
            self._done[index] = True
        if index == self._current:
            self._print(text)
        else:
            self._texts[index] += text
        while self._current < len(self._prompts) and self._done[self._current]:
            self._print("\n")
            self._next_prompt()
        return ended

    def _next_prompt(self) -> None:
        self._current += 1
        if self._current < len(self._prompts):
            if len(self._prompts) > 1:
                self._print(f"--- {self._current + 1} of {len(self._prompts)} ---\n")
            self._print(self._prompts[self._current] + self._texts[self._current])

    def _print(self, text: str) -> None:
        if self._shown and text:
            print(text, end="", flush=True)


def main(argv: Sequence[str]) -> None:
    arguments = parse_arguments(argv)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    environment = process_environment()
    tokenizer = load_tokenizer(arguments.tokenizer)
    weights = open_weights(arguments.checkpoint)
    model = weights.config
    config = inference_config(model, arguments.tp, arguments.pp, environment.world_size)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError.single(
            "--tokenizer",
            f"{arguments.tokenizer} has {tokenizer.vocab_size} tokens and the model's vocabulary {model.vocab_size}; "
            "give the one that the model was trained with",
        )
    # Standard input can be read once: rank 0 reads the prompts and finds what is wrong with them.
    request = None
    if environment.rank == 0:
        prompts = read_prompts(arguments)
        request = (prompts, *encode(prompts, tokenizer, model, arguments.max_tokens))
    generator = build_generator(weights, config, environment, arguments.dtype)
    if environment.world_size > 1:
        shared = [request]
        dist.broadcast_object_list(shared, src=0)
        request = shared[0]
    assert request is not None
    prompts, encoded, max_tokens = request
    streams = [TextStream(tokenizer.decode, ids, arguments.stop) for ids in encoded]
    output = Output(prompts, streams, shown=environment.rank == 0)
    end = tokenizer.eod_id
    generator.generate(
        encoded,
        max_tokens,
        sampling,
        stop_tokens=() if end is None else (end,),
        vocab_size=tokenizer.vocab_size,
        batch_size=arguments.batch_size,
        on_token=lambda index, token, last: output.token(index, None if token == end else token, last),
    )
    if environment.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # whatever the terminal can show
    with report_errors():
        try:
            main(sys.argv[1:])
        except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
