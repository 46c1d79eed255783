"""generate.py: the text transformers gives, however it is asked for, and what is refused before anything starts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from data.tokenizer import ByteTokenizer
from megazero.convert import import_checkpoint
from megazero.errors import ConvertError, DataError, MegazeroError
from megazero.generation import TextStream
from tests.data.helpers import FIXTURES
from tests.forked_scripts import run_forked
from tests.generation.models import expected
from tests.models.hf_reference import randomize
from tools.generate import Output, main

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["She was", "Ünï", "a\tb  c", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=300, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    randomize(model)
    model.directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(model.directory)
    # What the tokenizer does not know is never chosen; transformers needs to be told, and that 256 ends a text.
    model.generation_config.suppress_tokens = [*range(257, 300)]
    return model


def continuation(model: GPT2LMHeadModel, prompt: str, new_tokens: int = 20) -> str:
    (tokens,) = expected(model, [list(prompt.encode())], new_tokens)
    if 256 in tokens:
        tokens = tokens[: tokens.index(256)]
    stream = TextStream(ByteTokenizer().decode, list(prompt.encode()))
    return "".join(map(stream.push, tokens)) + stream.finish()


def generate(model: GPT2LMHeadModel, *arguments: object) -> None:
    main(["--checkpoint", str(model.directory), "--tokenizer", "byte", *map(str, arguments)])


GREEDY = ("--temperature", 0, "--max-tokens", 20)


def test_the_text_is_that_of_transformers(model, capsys) -> None:
    generate(model, "--prompt", PROMPTS[0], *GREEDY)
    assert capsys.readouterr().out == PROMPTS[0] + continuation(model, PROMPTS[0]) + "\n"


def test_many_prompts_come_out_in_order(model, capsys, tmp_path, monkeypatch) -> None:
    """From the command line, standard input and a file, in batches of three."""
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS[2:]))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPTS[1]}\n".encode())))
    ways = ("--prompt", PROMPTS[0], "--prompt", "-", "--prompt-file", tmp_path / "prompts.txt")
    generate(model, *ways, *GREEDY, "--batch-size", 3)
    wanted = [
        f"--- {number} of 4 ---\n{prompt}{continuation(model, prompt)}\n"
        for number, prompt in enumerate(PROMPTS, start=1)
    ]
    assert capsys.readouterr().out == "".join(wanted)


def test_an_imported_checkpoint_gives_the_same_text(model, capsys, tmp_path) -> None:
    import_checkpoint(model.directory, tmp_path / "imported")
    drawn = ("--prompt", "x", "--top-k", 40, "--seed", 3)
    generate(model, *drawn)
    text = capsys.readouterr().out
    generate(model, "--checkpoint", tmp_path / "imported", *drawn)
    assert capsys.readouterr().out == text
    generate(model, *drawn[:-1], 4)
    assert capsys.readouterr().out != text


def test_a_stop_string_ends_the_text(model, capsys) -> None:
    text = continuation(model, "x")
    stop = text[5:7]
    generate(model, "--prompt", "x", *GREEDY, "--stop", stop, "--stop", "never there")
    assert capsys.readouterr().out == "x" + text[: text.index(stop)] + "\n"


def test_the_end_of_document_ends_the_text_and_is_not_shown(capsys) -> None:
    streams = [TextStream(ByteTokenizer().decode, [97]) for _ in range(2)]
    output = Output(["a", "b"], streams, shown=True)
    assert not output.token(1, ord("y"), False)
    assert not output.token(0, ord("x"), False)
    assert capsys.readouterr().out == "--- 1 of 2 ---\nax"  # at once
    assert output.token(1, None, True)
    assert capsys.readouterr().out == ""  # its turn has not come
    assert output.token(0, 0xE2, True)
    assert capsys.readouterr().out == "\ufffd\n--- 2 of 2 ---\nby\n"


def test_by_default_the_text_ends_where_learned_positions_do(model, capsys) -> None:
    generate(model, "--prompt", "a" * 60, "--temperature", 0, "--tokenizer", "byte")
    assert capsys.readouterr().out == "a" * 60 + continuation(model, "a" * 60, 4) + "\n"


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ([], MegazeroError, "one of --prompt and --prompt-file is needed"),
        (["--prompt", ""], MegazeroError, "prompt 1: is empty"),
        (["--prompt", "a", "--prompt-file", "{}/lines"], MegazeroError, "prompt 3: is empty"),
        (["--prompt-file", "{}/empty"], MegazeroError, "--prompt-file: .*empty is empty"),
        (["--prompt-file", "{}/none"], MegazeroError, "--prompt-file: cannot read .*none: No such file"),
        (["--prompt-file", "{}/latin"], MegazeroError, "--prompt-file: .*latin is not valid UTF-8"),
        (["--prompt", "a\udcff"], MegazeroError, "prompt 1: is not valid UTF-8"),
        (["--prompt", "a" * 64], MegazeroError, "prompt 1: its 64 tokens fill the model's 64 positions"),
        (["--prompt", "a", "--max-tokens", "64"], MegazeroError, "positions; ask for at most 63"),
        (["--prompt", "a", "--max-tokens", "0"], MegazeroError, "--max-tokens: 0 must be at least 1"),
        (["--prompt", "a", "--temperature", "-1"], MegazeroError, "temperature: -1 must be at least 0"),
        (["--prompt", "a", "--temperature", "warm"], MegazeroError, "--temperature: invalid float value: 'warm'"),
        (["--prompt", "a", "--top-p", "1.5"], MegazeroError, "top_p: 1.5 must be above 0 and at most 1"),
        (["--prompt", "a", "--top-k", "0"], MegazeroError, "top_k: 0 must be at least 1"),
        (["--prompt", "a", "--stop", ""], MegazeroError, "--stop: an empty text"),
        (["--prompt", "a", "--batch-size", "0"], MegazeroError, "--batch-size: 0 must be at least 1"),
        (["--prompt", "a", "--prompts", "b"], MegazeroError, "unrecognized arguments: --prompts b"),
        (["--prompt", "a", "--tokenizer", "bytes"], DataError, "'bytes' is none of byte"),
        (
            ["--prompt", "a", "--tokenizer", f"sentencepiece:{FIXTURES}/sentencepiece/botchan_en_bpe_1000.model"],
            MegazeroError,
            "--tokenizer: .* has 1000 tokens and the model's vocabulary 300",
        ),
        (["--prompt", "a", "--checkpoint", "{}"], MegazeroError, "holds no megazero checkpoint"),
        (["--prompt", "a", "--checkpoint", "{}/none"], MegazeroError, "none: no such checkpoint directory"),
        (["--prompt", "a", "--checkpoint", "{}/broken"], ConvertError, "config.json: cannot be read"),
        (["--prompt", "a", "--tp", "3"], MegazeroError, "parallel.tp: .* number of processes is 1; start 3"),
        (["--prompt", "a", "--parallel.pp", "0"], MegazeroError, "parallel.pp: 0 must be at least 1"),
    ],
)
def test_mistakes_are_named(model, tmp_path, arguments, error, message) -> None:
    (tmp_path / "lines").write_text("b\n\n")
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes(b"\xe9\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(error, match=message):
        generate(model, *(argument.replace("{}", str(tmp_path)) for argument in arguments))


@pytest.mark.parametrize(
    "world_size, layout, message",
    [
        (3, ["--tp", "3"], "parallel.tp: 3 does not divide model.num_attention_heads = 4; use 1, 2 or 4"),
        (4, ["--pp", "4"], "parallel.pp: 4 stages are more than model.num_layers = 3"),
        (2, [], "parallel.tp: .*1 x 1 = 1, but the number of processes is 2"),
    ],
)
def test_a_layout_that_cannot_be_is_named_before_there_is_a_group(
    model, monkeypatch, world_size, layout, message
) -> None:
    def no_group(*_: object, **__: object) -> None:
        raise AssertionError("a process group")

    monkeypatch.setattr(torch.distributed, "init_process_group", no_group)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MegazeroError, match=message):
        generate(model, "--prompt", "a", *layout)


def launch(model: GPT2LMHeadModel, *arguments: object, text: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "megazero", "launch", "--nproc", "2", "tools/generate.py", "--tp", "2"]
    command += ["--checkpoint", model.directory, "--tokenizer", "byte", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return run_forked(*command, directory=ROOT, environment=environment, text=text)


def test_two_processes_print_one_text(model) -> None:
    done = launch(model, "--prompt", "-", *GREEDY, text="She was\n")
    assert (done.returncode, done.stdout) == (0, f"She was{continuation(model, 'She was')}\n"), done.stderr


@pytest.mark.whole
def test_two_processes_print_one_error(model) -> None:
    """Only rank 0 reads standard input; the other does not wait for it for ever."""
    done = launch(model, "--prompt", "-", text="")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: prompt 1: is empty; give at least a letter to continue from",
        "megazero launch: rank 0 failed: prompt 1: is empty; give at least a letter to continue from",
    ]
