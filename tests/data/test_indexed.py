"""Reading and writing .bin/.idx: bytes on disk, and damage of every kind."""

import json
import os

import numpy as np
import pytest

from data.indexed import IndexedDataset, token_dtype
from data.indexed_writer import DatasetWriter
from data.sources import build_sources
from megazero.errors import DataError
from tests.data.helpers import settings, snapshot, write_dataset

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def test_bytes_of_the_index(tmp_path):
    write_dataset(tmp_path / "d", [[1, 2, 3], [7]])
    expected = b"MMIDIDX\0\0" + bytes([1, 0, 0, 0, 0, 0, 0, 0]) + bytes([8])  # version 1, uint16
    expected += np.array([2, 3], "<u8").tobytes() + np.array([3, 1], "<i4").tobytes()
    expected += np.array([0, 6], "<i8").tobytes() + np.array([0, 1, 2], "<i8").tobytes()
    assert (tmp_path / "d.idx").read_bytes() == expected
    assert (tmp_path / "d.bin").read_bytes() == np.array([1, 2, 3, 7], "<u2").tobytes()


def test_read_back(tmp_path):
    dataset = IndexedDataset(write_dataset(tmp_path / "d", DOCUMENTS))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset[-1].tolist() == [5, 6, 7, 8]
    with pytest.raises(IndexError):
        dataset[4]
    assert (dataset.num_tokens, dataset.num_documents, dataset.metadata, dataset.mask) == (8, 4, {}, None)
    assert dataset.verify() == 8
    assert not dataset.tokens.flags.writeable


def test_documents_of_tokens_skip_empty_documents(tmp_path):
    dataset = IndexedDataset(write_dataset(tmp_path / "d", [[], [1, 2, 3], [], [], [4], [5, 6], []]))
    assert dataset.documents_of(np.arange(6)).tolist() == [1, 1, 1, 4, 5, 5]
    assert dataset.document_starts(np.arange(8)).tolist() == [0, 0, 3, 3, 3, 4, 6, 6]


def test_a_prefix_with_dots_and_spaces(tmp_path):
    prefix = write_dataset(tmp_path / "new folder" / "my data.v1.2", [[1]])
    assert sorted(snapshot(tmp_path)) == ["new folder/my data.v1.2.bin", "new folder/my data.v1.2.idx"]
    assert IndexedDataset(prefix)[0].tolist() == [1]


def test_mask_and_metadata_lie_beside(tmp_path):
    prefix = write_dataset(tmp_path / "d", [[1, 2], [3]], masks=[[0, 1], [1]], metadata={"vocab_size": 1000})
    dataset = IndexedDataset(prefix)
    assert dataset.mask.tolist() == [0, 1, 1]
    assert dataset.metadata == {"vocab_size": 1000, "documents": 2, "tokens": 3}


def test_shards_are_merged(tmp_path):
    first = write_dataset(tmp_path / "a", DOCUMENTS, masks=[[0] * len(d) for d in DOCUMENTS])
    second = write_dataset(tmp_path / "b", [[], [9]], masks=[[], [1]])
    nothing = write_dataset(tmp_path / "c", [], masks=[])
    with DatasetWriter(tmp_path / "whole", token_dtype(1000), masked=True) as writer:
        for shard in (first, nothing, second):
            writer.add_dataset(shard)
        writer.commit({})
    once = write_dataset(tmp_path / "once", [*DOCUMENTS, [], [9]], masks=[*([0] * len(d) for d in DOCUMENTS), [], [1]])
    for suffix in ("bin", "idx", "mask"):
        assert (tmp_path / f"whole.{suffix}").read_bytes() == (tmp_path / f"once.{suffix}").read_bytes()
    assert IndexedDataset(once).verify() == 9
    with DatasetWriter(tmp_path / "wide", token_dtype(10**6), masked=True) as writer:
        with pytest.raises(DataError, match="uint16"):
            writer.add_dataset(first)


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with DatasetWriter(tmp_path / "made" / "for it" / "d", token_dtype(10), masked=True) as writer:
            writer.add_document([1, 2])
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_commit_cut_off_anywhere_leaves_no_dataset_or_a_whole_one(tmp_path, monkeypatch):
    """The .idx goes first and comes last, so what is between has none."""
    import os

    prefix = write_dataset(tmp_path / "d", [[1, 2]], masks=[[1, 1]], metadata={})
    replaced = []

    def stop_at(count):
        def replace(source, target, real=os.replace):
            if len(replaced) == count:
                raise OSError("cut off")
            replaced.append(target)
            real(source, target)

        return replace

    for count in range(3):
        monkeypatch.undo()
        replaced.clear()
        monkeypatch.setattr(os, "replace", stop_at(count))
        with pytest.raises(DataError, match="cut off"):
            write_dataset(tmp_path / "d", [[7]] * (count + 1), metadata={})
        with pytest.raises(DataError, match="d.idx does not exist"):
            IndexedDataset(prefix)
        assert not [name for name in snapshot(tmp_path) if "tmp" in name]
    monkeypatch.undo()
    write_dataset(tmp_path / "d", [[8]])
    assert IndexedDataset(prefix).tokens.tolist() == [8]
    assert sorted(snapshot(tmp_path)) == ["d.bin", "d.idx"], "mask and metadata of the earlier build stayed"


def overwrite(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda p: (p / "d.idx").unlink(), "d.idx does not exist"),
        (lambda p: (p / "d.bin").unlink(), "d.bin does not exist"),
        (lambda p: (p / "d.idx").write_bytes(b""), "0 bytes, fewer than its header's 34"),
        (lambda p: (p / "d.idx").write_bytes(b"x" * 200), "not an MMIDIDX index"),
        (lambda p: overwrite(p / "d.idx", 9, b"\x02"), "version 1"),
        (lambda p: overwrite(p / "d.idx", 17, b"\x06"), "dtype code 6"),
        (lambda p: (p / "d.idx").write_bytes((p / "d.idx").read_bytes()[:-1]), "take 122"),
        (lambda p: overwrite(p / "d.idx", 122 - 8, b"\x09"), "do not run from 0 to its 4 sequences"),
        (lambda p: (p / "d.bin").write_bytes(b"\0" * 15), "has 15 bytes, but .* describes 16"),
        (lambda p: (p / "d.bin").write_bytes(b"\0" * 18), "has 18 bytes, but .* describes 16"),
        (lambda p: (p / "d.mask").write_bytes(b"\1" * 7), "7 bytes, but .* holds 8 tokens"),
        (lambda p: (p / "d.json").write_text('{"tokens": 9}'), "describes 9 tokens, but .* holds 8"),
        (lambda p: (p / "d.json").write_text("{"), "not a dataset description"),
        (lambda p: (p / "d.json").write_text("[]"), "not a dataset description"),
        (lambda p: (p / "d.json").write_text("[" * 100_000), "not a dataset description"),
        (lambda p: (p / "d.json").write_text('{"tokens": Infinity}'), "not a dataset description.*tokens is inf"),
        (lambda p: (p / "d.json").write_text('{"tokens": 8, "vocab_size": "9"}'), "vocab_size is '9'"),
        (lambda p: (p / "d.json").write_text('{"tokens": 8, "eod_id": -1}'), "eod_id is -1"),
        (lambda p: os.truncate(p / "d.json", 2**40), "not a dataset description"),
    ],
)
def test_damage_is_an_error_at_open(tmp_path, damage, message):
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)
    (tmp_path / "d.json").write_text('{"tokens": 8}')
    assert (tmp_path / "d.idx").stat().st_size == 122
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_giving_a_file_for_a_prefix_is_explained(tmp_path):
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)
    with pytest.raises(DataError, match="give the prefix, without .bin"):
        IndexedDataset(f"{prefix}.bin")
    text = tmp_path / "text.jsonl"
    text.touch()
    with pytest.raises(DataError, match=f"preprocess.py --input {text} --output PREFIX makes a dataset of it"):
        IndexedDataset(text)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda p: overwrite(p / "d.idx", 34, b"\x02\0\0\0\x01\0\0\0"), "sequence 1 does not begin"),
        (lambda p: overwrite(p / "d.idx", 34 + 16 + 8, b"\x04"), "sequence 1 does not begin"),
        (lambda p: overwrite(p / "d.idx", 34 + 48 + 8, b"\x03"), "document 1 ends before it begins"),
        (lambda p: overwrite(p / "d.bin", 2, b"\xff\xff"), "token id 65535 is outside the vocabulary of 1000"),
        (lambda p: overwrite(p / "d.mask", 1, b"\x02"), "other than 0 and 1"),
    ],
)
def test_verify_finds_what_opening_cannot_see(tmp_path, damage, message):
    masks = [[1] * len(document) for document in DOCUMENTS]
    prefix = write_dataset(tmp_path / "d", DOCUMENTS, masks=masks, metadata={"vocab_size": 1000})
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix).verify()


@pytest.mark.parametrize(
    "name, at, number, message",
    [
        ("idx", 34 + 16 + 16, b"\xff" * 8, "a document begins outside its 8 tokens"),
        ("idx", 34 + 16 + 17, b"\x01", "a document begins outside its 8 tokens"),
        ("idx", 34 + 48 + 16, b"\x07", "a document begins outside its 4 sequences"),
        ("idx", 34 + 16 + 16, b"\x04", "documents do not follow each other"),
        ("mask", 5, b"\xff", "d.mask holds values other than 0 and 1"),
    ],
)
def test_damage_that_is_met_while_reading(tmp_path, name, at, number, message):
    masks = [[1] * len(document) for document in DOCUMENTS]
    prefix = write_dataset(tmp_path / "d", DOCUMENTS, masks=masks)
    overwrite(tmp_path / f"d.{name}", at, number)
    source, _ = build_sources(settings(prefix, seq_length=3, reset_at_document=True))
    with pytest.raises(DataError, match=message):
        source.read(0, 0, 1, 2, 1)
    source.close()


def test_a_sequence_outside_the_tokens(tmp_path):
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)
    overwrite(tmp_path / "d.idx", 34, b"\xff\xff\xff\xff")
    with pytest.raises(DataError, match="sequence 0 is not inside its 8 tokens"):
        IndexedDataset(prefix)[0]


@pytest.mark.parametrize("ids", [[1, -1], [1, 1000], [2**40]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, ids):
    with pytest.raises(DataError, match="token id"):
        write_dataset(tmp_path / "d", [ids])
    assert list(tmp_path.iterdir()) == []


def test_a_document_past_the_formats_lengths_takes_several_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("data.indexed_writer.LONGEST_SEQUENCE", 3)
    documents = [[1, 2], [3, 4, 5], [], [6, 7, 8, 9], list(range(10, 19))]
    dataset = IndexedDataset(write_dataset(tmp_path / "d", documents))
    assert dataset.lengths.tolist() == [2, 3, 0, 3, 1, 3, 3, 3]
    starts = dataset.document_starts(np.arange(6))
    assert [dataset.tokens[a:b].tolist() for a, b in zip(starts[:-1], starts[1:])] == documents
    dataset.verify()


def test_metadata_is_plain_json(tmp_path):
    write_dataset(tmp_path / "d", [[1]], metadata={"tokenizer": "byte", "eod_id": None})
    assert json.loads((tmp_path / "d.json").read_text()) == {
        "tokenizer": "byte",
        "eod_id": None,
        "documents": 1,
        "tokens": 1,
    }
