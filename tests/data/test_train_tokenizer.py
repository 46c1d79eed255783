"""Training a vocabulary: size, round trips, repeatability, errors."""

import json

import pytest
from sentencepiece import SentencePieceProcessor

from data.train_tokenizer import _cut
from tests.data.helpers import AUSTEN, FIXTURES, run_script, snapshot

TEXTS = [
    "a  b   ",
    "\n\n \n",
    " lead",
    "漢字🎉 ﬁ ① Å",
    "\x00\x01\x7f",
    "tab\tx\r\n",
    "</s><s><unk><0x0A>",
    "    def f():\n        pass\n",
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """Two chapters of Austen."""
    path = tmp_path_factory.mktemp("corpus") / "sample.jsonl"
    lines = (AUSTEN / "austen.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:6]))
    return path


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_any_text_comes_back(sample, tmp_path, kind):
    output = tmp_path / "made" / "m.model"
    arguments = ("--input", sample, "--vocab-size", 600, "--output", output, "--type", kind)
    done = run_script("data/train_tokenizer.py", *arguments)
    assert done.returncode == 0, done.stderr
    processor = SentencePieceProcessor(model_file=str(output))
    assert processor.get_piece_size() == 600
    texts = [*TEXTS, *(json.loads(line)["text"] for line in sample.read_text().splitlines())]
    texts.append((FIXTURES / "gpt2/vectors.inp").read_text())
    for text in texts:
        assert processor.decode(processor.encode(text)) == text
    assert processor.eos_id() == 2
    first = output.read_bytes()
    assert run_script("data/train_tokenizer.py", *arguments).returncode == 0
    assert output.read_bytes() == first


def test_text_is_given_whole():
    texts = ["", "x", "\n" * 5000, "long" * 3000, "a line\n" * 900 + "no end"]
    for text in texts:
        assert "".join(_cut(text)) == text
        assert all(0 < len(piece) <= 2000 for piece in _cut(text))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--vocab-size", 259], "error: --vocab-size: is 259; it must be above 259"),
        (["--vocab-size", 10**6], "error: --vocab-size: sentencepiece cannot make 1000000 pieces of this text"),
        (["--vocab-size", 300, "--json-key", "body"], "line 1 has no field 'body'"),
    ],
)
def test_errors_are_one_line(sample, tmp_path, arguments, message):
    done = run_script("data/train_tokenizer.py", "--input", sample, "--output", tmp_path / "m.model", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert snapshot(tmp_path) == {}


def test_a_fault_in_the_middle_of_the_text_is_not_swallowed(sample, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(sample.read_text() + "{\n")
    done = run_script("data/train_tokenizer.py", "--input", broken, "--output", tmp_path / "m", "--vocab-size", 400)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {broken}, line 6 is not JSON")
    assert sorted(snapshot(tmp_path)) == ["broken.jsonl"]


def test_no_text(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    done = run_script(
        "data/train_tokenizer.py", "--input", tmp_path / "empty.txt", "--output", tmp_path / "m", "--vocab-size", 400
    )
    assert (done.returncode, done.stderr) == (2, "error: --input: there is no text to learn from\n")


def test_a_directory_in_the_place_of_the_model(sample, tmp_path):
    done = run_script("data/train_tokenizer.py", "--input", sample, "--output", tmp_path, "--vocab-size", 400)
    message = f"error: --output: {tmp_path} is a directory; give the name of a file\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
