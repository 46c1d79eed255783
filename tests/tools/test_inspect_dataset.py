"""inspect_dataset.py: what it shows, what it finds."""

from tests.data.helpers import run_script, snapshot, write_dataset


def test_it_shows_what_is_there(tmp_path):
    prefix = write_dataset(
        tmp_path / "d",
        [[1, 2, 3], [], [4]],
        masks=[[0, 1, 1], [], [1]],
        metadata={"tokenizer": "x", "vocab_size": 1000},
    )
    before = snapshot(tmp_path)
    done = run_script("tools/inspect_dataset.py", prefix, "--verify")
    assert (done.returncode, done.stderr) == (0, "")
    shown = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    shown = {name.strip(): value.strip() for name, value in shown.items()}
    assert shown == {
        "tokens": "4",
        "documents": "3",
        "sequences": "3",
        "dtype": "uint16",
        "bytes of .bin": "8",
        "loss mask": "yes",
        "tokenizer": "x",
        "vocab size": "1000",
        "first ids": "1 2 3 4",
        "largest id": "4",
        "document lengths": "0 to 3 tokens, 1.3 on average, 1 empty",
        "in the loss": "3 tokens",
        "verified": "yes",
    }
    assert snapshot(tmp_path) == before


def test_an_empty_dataset(tmp_path):
    done = run_script("tools/inspect_dataset.py", write_dataset(tmp_path / "d", []), "--verify")
    assert (done.returncode, done.stderr) == (0, "")


def test_damage_is_one_line(tmp_path):
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3], [4]], metadata={"vocab_size": 3})
    assert run_script("tools/inspect_dataset.py", prefix).returncode == 0
    done = run_script("tools/inspect_dataset.py", prefix, "--verify")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {prefix}.bin, tokens from 0: token id 4 is outside the vocabulary of 3 entries\n"
    done = run_script("tools/inspect_dataset.py", tmp_path / "none")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
