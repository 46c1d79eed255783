"""preprocess.py as its users run it: every format, order, masks, the held-out part, errors that leave nothing."""

import gzip
import json
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

from data.corpus_reader import Document
from data.holdout import divide
from data.indexed import IndexedDataset
from tests.data.helpers import AUSTEN, FIXTURES, ROOT, run_script, snapshot

TEXTS = ["One.\nTwo.\n", "", "naïve 漢字\r\n", "end"]


def preprocess(*arguments, **options):
    return run_script("data/preprocess.py", *arguments, **options)


def documents(prefix):
    dataset = IndexedDataset(prefix)
    dataset.verify()
    return [bytes(dataset[i].tolist()).decode() for i in range(len(dataset))]


def write_inputs(folder):
    """The same texts in every format and packing."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    jsonl = "".join(json.dumps({"id": n, "text": text}) + "\n\n" for n, text in enumerate(TEXTS)).encode()
    table = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    parquet = (folder / "a.parquet").read_bytes()
    for name, content in (("a.jsonl", jsonl), ("a.parquet", parquet)):
        (folder / name).write_bytes(content)
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        middle = len(content) // 2
        frames = [zstandard.compress(content[:middle]), zstandard.compress(content[middle:])]
        (folder / f"{name}.zst").write_bytes(b"".join(frames))
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXTS[2].encode())
    (folder / "a.TXT.gz").write_bytes(gzip.compress(TEXTS[0].encode()))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.parquet.gz", "a.parquet.zst"])
def test_formats(tmp_path, name):
    write_inputs(tmp_path)
    done = preprocess("--input", tmp_path / name, "--tokenizer", "byte", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "out") == TEXTS


def test_a_txt_file_is_one_document_and_files_keep_their_order(tmp_path):
    write_inputs(tmp_path)
    inputs = [tmp_path / name for name in ("a.TXT.gz", "a.jsonl", "a.txt")]
    done = preprocess("--input", *inputs, "--tokenizer", "byte", "--output", "made here/out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "made here/out") == [TEXTS[0], *TEXTS, TEXTS[2]]
    size = sum(len(text.encode()) for text in [TEXTS[0], *TEXTS, TEXTS[2]])
    assert json.loads((tmp_path / "made here/out.json").read_text()) == {
        "tokenizer": "byte",
        "vocab_size": 257,
        "eod_id": 256,
        "append_eod": False,
        "bytes": size,
        "documents": 6,
        "tokens": size,
    }
    assert done.stdout == f"made here/out: 6 documents, {size} tokens, {size} bytes of text\n"


def test_end_of_document(tmp_path):
    write_inputs(tmp_path)
    done = preprocess(
        "--input", tmp_path / "a.jsonl", "--tokenizer", "byte", "--output", tmp_path / "o", "--append-eod"
    )
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(tmp_path / "o")
    assert [dataset[i].tolist() for i in range(4)] == [[*text.encode(), 256] for text in TEXTS]


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path):
    model = FIXTURES / "sentencepiece/botchan_en_bpe_1000.model"
    lines = (AUSTEN / "austen.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:55]))
    common = ("--input", tmp_path / "a.jsonl", "--tokenizer", f"sentencepiece:{model}", "--append-eod")
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        done = preprocess(*common, "--workers", workers, "--output", folder / "o")
        assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "1") == snapshot(tmp_path / "3")
    assert IndexedDataset(tmp_path / "1/o").num_documents == 55


def test_prompts_are_kept_out_of_the_loss(tmp_path):
    records = [{"q": "Why?", "a": "So."}, {"q": "", "a": "x"}, {"q": "é", "a": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    arguments = ("--input", tmp_path / "a.jsonl", "--tokenizer", "byte", "--append-eod", "--output", tmp_path / "o")
    done = preprocess(*arguments, "--prompt-key", "q", "--response-key", "a")
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(tmp_path / "o")
    assert [dataset[i].tolist() for i in range(3)] == [[*b"Why?So.", 256], [*b"x", 256], [195, 169, 256]]
    assert dataset.mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1]
    # A build without masks at the same place takes the mask away with the tokens.
    assert preprocess(*arguments, "--json-key", "a").returncode == 0
    assert IndexedDataset(tmp_path / "o").mask is None


def test_the_last_part_is_held_out(tmp_path):
    arguments = ("--tokenizer", "byte", "--output", tmp_path / "t", "--holdout-output", tmp_path / "v")
    done = preprocess("--input", AUSTEN / "austen.txt", *arguments, "--holdout", 0.05)
    assert done.returncode == 0, done.stderr
    text = (AUSTEN / "austen.txt").read_bytes()
    train, held = (IndexedDataset(tmp_path / name) for name in "tv")
    assert bytes(np.concatenate([train.tokens, held.tokens]).tolist()) == text
    assert bytes(train.tokens[-1:].tolist()) == b"\n"
    assert 0 <= 0.05 * len(text) - held.num_tokens < 100  # less than a line
    assert (train.metadata["bytes"], held.metadata["bytes"]) == (train.num_tokens, held.num_tokens)


@pytest.mark.parametrize(
    "kept, first, second",
    [
        (0, [], ["aaaa\n", "bb\nbb\nbb\n", "", "cccc"]),
        (1, ["aaaa\n"], ["bb\nbb\nbb\n", "", "cccc"]),
        (5, ["aaaa\n"], ["bb\nbb\nbb\n", "", "cccc"]),
        (6, ["aaaa\n", "bb\n"], ["bb\nbb\n", "", "cccc"]),
        (8, ["aaaa\n", "bb\n"], ["bb\nbb\n", "", "cccc"]),
        (9, ["aaaa\n", "bb\nbb\n"], ["bb\n", "", "cccc"]),
        (14, ["aaaa\n", "bb\nbb\nbb\n"], ["", "cccc"]),
        (15, ["aaaa\n", "bb\nbb\nbb\n", "", "cccc"], []),  # no end of line follows
    ],
)
def test_the_held_out_part_begins_after_a_line(kept, first, second):
    before, after = divide(map(Document, ["aaaa\n", "bb\nbb\nbb\n", "", "cccc"]), kept)
    assert ([d.text for d in before], [d.text for d in after]) == (first, second)


def test_a_document_with_a_prompt_is_not_cut():
    before, after = divide(iter([Document("b\nb\n", prompt="a\n"), Document("c")]), 3)
    assert (list(before), list(after)) == ([Document("b\nb\n", prompt="a\n")], [Document("c")])


BAD_INPUTS = {
    "missing.jsonl": (None, "missing.jsonl does not exist"),
    "b.csv": (b"x", "b.csv is none of .jsonl, .txt, .parquet"),
    "b.gz": (b"x", "b.gz is none of"),
    "b.jsonl": (b'{"text": "ok"}\n{"text"\n', "b.jsonl, line 2 is not JSON"),
    "c.jsonl": (b'{"text": "ok"}\n["ok"]\n', "c.jsonl, line 2 is not a JSON object"),
    "d.jsonl": (b'{"text": "ok"}\n{"body": "x"}\n', "d.jsonl, line 2 has no field 'text' (it has 'body')"),
    "e.jsonl": (b'{"text": "ok"}\n{"text": null}\n', "e.jsonl, line 2: field 'text' is NoneType, not text"),
    "f.jsonl": (b'{"text": "\\ud800"}\n', "f.jsonl, line 1: field 'text' is not valid Unicode"),
    "h.jsonl": (b'{"text": ' + b"[" * 200_000, "h.jsonl, line 1 is not JSON"),
    "g.jsonl": (b'{"text": "\xff"}\n', "g.jsonl, line 1 is not UTF-8"),
    "b.txt": (b"ok \xff", "b.txt is not UTF-8: invalid start byte at byte 3"),
    "b.txt.gz": (gzip.compress(b"some text" * 99)[:-20], "b.txt.gz is damaged or cut short"),
    "d.txt.gz": (gzip.compress(b"text")[:10] + b"\xff" * 30, "d.txt.gz is damaged or cut short"),
    "c.txt.gz": (b"no gzip", "c.txt.gz is damaged or cut short"),
    "b.txt.zst": (b"no zstandard", "b.txt.zst is damaged or cut short"),
    "b.parquet": (b"no parquet", "b.parquet is not a readable parquet file"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_input_is_one_line_and_nothing_is_written(tmp_path, name):
    content, message = BAD_INPUTS[name]
    (tmp_path / "good.txt").write_text("fine\n" * 100)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = snapshot(tmp_path)
    inputs = [tmp_path / "good.txt", tmp_path / name]
    done = preprocess("--input", *inputs, "--tokenizer", "byte", "--output", tmp_path / "new" / "o")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert snapshot(tmp_path) == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokenizer", "word"], "tokenizer 'word' is none of byte"),
        (["--tokenizer", "byte", "--workers", 0], "--workers: is 0"),
        (["--tokenizer", "byte", "--output", "new/"], "--output: 'new/' names no file"),
        (["--tokenizer", "byte", "--holdout", 0.1], "--holdout: needs --holdout-output"),
        (["--tokenizer", "byte", "--holdout", 5, "--holdout-output", "v"], "must lie between 0 and 1"),
        (["--tokenizer", "byte", "--holdout", 0.5, "--holdout-output", "o"], "must differ from --output"),
        (["--tokenizer", "byte", "--prompt-key", "q"], "--prompt-key: needs --response-key"),
        (["--tokenizer", "byte", "--prompt-key", "q", "--response-key", "a"], "prompts and responses need .jsonl"),
        (["--tokenizer", "sentencepiece:{}", "--append-eod"], "has no end-of-document token"),
    ],
)
def test_bad_flags(tmp_path, arguments, message):
    import io

    import sentencepiece

    endless = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ba"]), model_writer=endless, vocab_size=6, model_type="char", eos_id=-1, bos_id=-1,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "endless.model").write_bytes(endless.getvalue())
    (tmp_path / "a.txt").write_text("text")
    before = snapshot(tmp_path)
    arguments = [str(a).format(tmp_path / "endless.model") for a in arguments]
    done = preprocess("--input", "a.txt", "--output", "o", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("suffix", ["bin", "idx", "json"])
def test_a_directory_in_the_place_of_a_file(tmp_path, suffix):
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / f"o.{suffix}").mkdir()
    done = preprocess("--input", tmp_path / "in.txt", "--tokenizer", "byte", "--output", tmp_path / "o")
    wrong = tmp_path / f"o.{suffix}"
    message = f"error: --output: {wrong} is a directory, where a file has to go; remove it or choose another\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in.txt", wrong.name])


def test_a_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "in.txt").write_text("text")
    done = preprocess("--input", tmp_path / "in.txt", "--tokenizer", "byte", "--output", tmp_path / "in.txt" / "o")
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert f"error: {tmp_path}/in.txt/o: cannot be written: something else is there already; remove it" in done.stderr


@pytest.mark.parametrize("size", [3_000, 300_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, size):
    """``size``: the disk is full as the last of the file is written, and on the way."""
    (tmp_path / "in.txt").write_text("t" * size)
    before = snapshot(tmp_path)
    arguments = ["--input", "in.txt", "--tokenizer", "byte", "--output", "new/o"]
    script = shlex.join([sys.executable, str(ROOT / "data/preprocess.py"), *arguments])
    limited = ["bash", "-c", f"ulimit -f 2; {script}"]  # in KiB
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert "error: new/o: cannot be written: File too large" in done.stderr and "ulimit" in done.stderr
    assert snapshot(tmp_path) == before


def test_damage_found_by_a_worker_leaves_the_earlier_dataset(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    arguments = ("--tokenizer", "byte", "--output", tmp_path / "o", "--workers", 2)
    assert preprocess("--input", tmp_path / "a.jsonl", *arguments).returncode == 0
    (tmp_path / "a.jsonl").write_text('{"text": "two"}\n{"text"\n')
    before = snapshot(tmp_path)
    assert preprocess("--input", tmp_path / "a.jsonl", *arguments).returncode == 2
    assert snapshot(tmp_path) == before
    assert documents(tmp_path / "o") == ["one"]


@pytest.mark.parametrize("how, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_script_leaves_nothing(tmp_path, how, status):
    code = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever has started the tests may ignore it
sys.path[0] = {str(ROOT)!r}
from data.command_line import run_script
from data.indexed import token_dtype
from data.indexed_writer import DatasetWriter

def main():
    with DatasetWriter("new/o", token_dtype(9)) as writer:
        writer.add_document([1])
        print("ready", flush=True)
        time.sleep(60)

run_script(main)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(how)
    process.communicate()
    assert (process.returncode, list(tmp_path.iterdir())) == (status, [])


def test_a_file_that_a_script_cannot_open_is_named(tmp_path):
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; from data.command_line import run_script; "
    code += "run_script(lambda: open(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, "new/o"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: new/o: No such file or directory\n")
