"""Conditions that broke other frameworks, each with the right outcome. The numbers are those of the list of cases."""

import gc
import math
import shutil
import sys
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch

from data.indexed import CODES, IndexedDataset, companion, token_dtype
from data.indexed_writer import DatasetWriter, index_bytes
from data.sample_order import Blend, SampleOrder, samples_in
from data.sources import build_sources
from megazero.errors import ConfigError, DataError
from tests.data.helpers import AUSTEN, FIXTURES, ROOT, run_script, settings, write_dataset

UINT16, INT32 = np.dtype("<u2"), np.dtype("<i4")


@pytest.mark.parametrize("shares", [(10000, 0.002), (0.002, 10000), (1, 1)])
def test_case_01_a_split_without_tokens_is_named(tmp_path, shares):
    documents = [[1] * 30] if shares == (1, 1) else [[1] * 30] * 40
    prefix = write_dataset(tmp_path / "d", documents)
    name = "train" if shares[0] < shares[1] or (shares == (1, 1)) else "valid"
    with pytest.raises(
        DataError, match=rf"data.split: the split '{name}' has 0 tokens of .*/d \({30 * len(documents)} in"
    ):
        build_sources(settings(prefix, split=shares))


def test_case_01_in_a_blend(tmp_path):
    large = write_dataset(tmp_path / "large", [[1] * 30] * 40)
    small = write_dataset(tmp_path / "small", [[1] * 30])
    with pytest.raises(DataError, match="data.split: the split 'valid' has 0 tokens of .*small"):
        build_sources(settings([0.9, large, 0.1, small], split=(95, 5)))
    train, valid = build_sources(settings([0.9, large, 0, small], split=(95, 5)))
    assert (train.length, valid.length) == ((38 * 30 - 1) // 4, (2 * 30 - 1) // 4)


def test_case_02_pointers_past_two_to_the_31(tmp_path):
    lengths = np.array([2**31 - 100, 123])
    (tmp_path / "d.idx").write_bytes(b"".join(index_bytes(INT32, lengths, np.array([0, 1, 2]))))
    with (tmp_path / "d.bin").open("wb") as file:  # a sparse file: 8.6 GB that take no room
        file.truncate(4 * int(lengths.sum()))
        file.seek(8_589_934_192)
        file.write(np.arange(123, dtype="<i4").tobytes())
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.pointers.tolist() == [0, 8_589_934_192]
    assert dataset[1].tolist() == list(range(123))
    assert dataset.documents_of(np.array([2**31 - 101, 2**31 - 100, 2**31])).tolist() == [0, 1, 1]
    assert dataset.document_starts(np.array([1, 2])).tolist() == [2**31 - 100, 2**31 + 23]
    train, _ = build_sources(settings(str(tmp_path / "d"), seq_length=2**20))
    assert train.length == (2**31 + 22) // 2**20
    (batch,) = build_sources(settings(str(tmp_path / "d"), seq_length=11))[0].read((2**31 + 11) // 11, 0, 1, 1, 1)
    start = (2**31 + 11) // 11 * 11 - (2**31 - 100)
    assert batch["tokens"].tolist() == [list(range(start, start + 12))]


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_case_02_the_index_is_64_bit_for_every_dtype(tmp_path, dtype):
    lengths = np.full(6, 2**31 - 1)
    (tmp_path / "d.idx").write_bytes(b"".join(index_bytes(dtype, lengths, np.arange(7))))
    with (tmp_path / "d.bin").open("wb") as file:
        file.truncate(6 * (2**31 - 1) * dtype.itemsize)
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.num_tokens == 12_884_901_882
    assert dataset.pointers.tolist() == [k * (2**31 - 1) * dtype.itemsize for k in range(6)]
    assert dataset.documents_of(np.array([12_884_901_881])).tolist() == [5]


def test_case_02_numpy_does_not_narrow_the_order():
    order = SampleOrder([2**45, 2**45], [0.5, 0.5], 1024, 0, True)
    located = order.locate(np.array([2**35, 2**36 - 1, 2**36, 2**40], np.int64))
    assert located.index.tolist() == [2**34, 2**35 - 1, 2**35, 2**39]
    assert located.offset.min() >= 0 and located.offset.max() + 1025 <= 2**45
    assert {array.dtype for array in (located.dataset, located.offset, located.index)} == {np.dtype(np.int64)}


def test_case_03_samples_are_counted_in_integers():
    assert samples_in(16_780_290, 1024) == 16_387
    for samples in (2**24 + 1, 2**53 + 1, 3 * 10**15 + 1):  # floats of 32 and 64 bits round these
        assert samples_in(samples * 1024, 1024) == samples - 1
        assert samples_in(samples * 1024 + 1, 1024) == samples
        assert SampleOrder([samples * 1024 + 1], [1.0], 1024, 0, True).length == samples


@pytest.mark.parametrize("kept", [0, 1, 199, 398, 399])
def test_case_04_a_truncated_copy_gives_both_sizes(tmp_path, kept):
    prefix = write_dataset(tmp_path / "d", [[1] * 150, [2] * 50])
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(kept)
    with pytest.raises(DataError, match=f"d.bin has {kept} bytes, but .*d.idx describes 400"):
        IndexedDataset(prefix)


def test_case_05_an_id_too_large_for_the_file_is_an_error(tmp_path):
    with DatasetWriter(tmp_path / "d", UINT16) as writer:
        with pytest.raises(DataError, match="token id 70000 does not fit the file's uint16"):
            writer.add_document([1, 70000])
    assert list(tmp_path.iterdir()) == []
    prefix = write_dataset(tmp_path / "wide", [[1, 70000]], vocab_size=70001)
    assert IndexedDataset(prefix)[0].tolist() == [1, 70000]


@pytest.mark.parametrize("vocab_size", [65499, 65500, 65501, 65535, 65536, 65537])
def test_case_05_one_dtype_for_a_vocabulary_everywhere(tmp_path, vocab_size):
    dtype = UINT16 if vocab_size < 65500 else INT32
    assert token_dtype(vocab_size) == dtype
    prefix = write_dataset(tmp_path / "d", [[0, vocab_size - 1]], vocab_size=vocab_size)
    assert (IndexedDataset(prefix).dtype, IndexedDataset(prefix)[0].tolist()) == (dtype, [0, vocab_size - 1])


def test_case_06_what_was_read_outlives_the_dataset(tmp_path):
    prefix = write_dataset(tmp_path / "d", [list(range(100)), [7] * 5], masks=[[1] * 100, [0] * 5])
    read = IndexedDataset(prefix)[0]
    mask = IndexedDataset(prefix).mask
    gc.collect()
    junk = [bytearray(4096) for _ in range(100)]
    assert read.tolist() == list(range(100)) and mask.sum() == 100
    del junk


@pytest.mark.parametrize("eod", [True, False])
@pytest.mark.parametrize("texts", [[], [""], ["", "ab", "c"], ["ab", "", "c"], ["ab", "c", ""], ["", "", ""], ["a"]])
def test_case_07_empty_documents(tmp_path, texts, eod):
    import json

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ["--append-eod"] if eod else []
    done = run_script(
        "data/preprocess.py", "--input", tmp_path / "a.jsonl", "--tokenizer", "byte", "--output", tmp_path / "o", *flags
    )
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(tmp_path / "o")
    expected = [[*text.encode(), *([256] if eod else [])] for text in texts]
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected
    assert dataset.num_documents == len(texts)
    stream = [token for document in expected for token in document]
    dataset.verify()
    if len(stream) <= 2:
        with pytest.raises(DataError, match=f"the split 'train' has {len(stream)} tokens"):
            build_sources(settings(str(tmp_path / "o"), seq_length=2))
        return
    train, _ = build_sources(settings(str(tmp_path / "o"), seq_length=2, reset_at_document=True))
    (batch,) = train.read(0, 0, 1, 1, 1)
    assert batch["tokens"].tolist() == [stream[:3]]
    train.close()


BLENDS = [[0.001, 0.999], [3, 1], [0.2, 0.2, 0.2], [0, 0.4, 0.6], [1e-3, 5, 2.5]]


@pytest.mark.parametrize("weights", BLENDS, ids=str)
def test_case_08_a_blend_keeps_its_proportions_at_every_prefix(tmp_path, weights):
    prefixes = [write_dataset(tmp_path / str(k), [[k] * 500]) for k in range(len(weights))]
    blend = [part for pair in zip(weights, prefixes, strict=True) for part in pair]
    train, _ = build_sources(settings(blend, shuffle=True))
    (batch,) = train.read(0, 0, 1, 4000, 4000)
    train.close()
    drawn = batch["tokens"][:, 0].numpy()
    used = sum(weight > 0 for weight in weights)
    for k, weight in enumerate(weights):
        share = float(Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights))
        excess = np.cumsum(drawn == k) - share * np.arange(1, 4001)
        assert np.abs(excess).max() <= (used + 1) / 2 + 1e-6
        assert weight > 0 or not (drawn == k).any()


def test_case_08_one_dataset_twice_is_two_streams(tmp_path):
    prefix = write_dataset(tmp_path / "d", [list(range(401))])
    train, _ = build_sources(settings([0.5, prefix, 0.5, prefix], shuffle=True))
    (batch,) = train.read(0, 0, 1, 200, 200)
    train.close()
    firsts = batch["tokens"][:, 0].numpy()
    assert np.array_equal(np.sort(firsts), np.repeat(np.arange(0, 400, 4), 2))
    assert firsts[0::2].tolist() != firsts[1::2].tolist()


def test_case_08_a_negative_weight_is_an_error(tmp_path):
    prefix = write_dataset(tmp_path / "d", [[1] * 50])
    with pytest.raises(ConfigError, match="data.train: weight -1.0 of .*/d must be a number of at least 0"):
        build_sources(settings([2, prefix, -1, prefix]))


def test_case_09_more_steps_change_nothing_that_was_seen(tmp_path):
    """Epochs of 100 samples. A run stops at 90 % of the first and goes on, past the second."""
    prefix = write_dataset(tmp_path / "d", [list(range(401))])

    def samples(first, count):
        train, _ = build_sources(settings(prefix, shuffle=True))
        (batch,) = train.read(first, 0, 1, count, count)
        train.close()
        return batch["tokens"][:, 0].tolist()

    one_run = samples(0, 250)
    assert samples(0, 90) + samples(90, 160) == one_run
    assert sorted(one_run[:100]) == sorted(one_run[100:200]) == list(range(0, 400, 4))
    assert one_run[:100] != one_run[100:200]


def test_case_10_rebuilt_data_is_read_fresh(tmp_path):
    prefix = write_dataset(tmp_path / "d", [[1] * 9], masks=[[0] * 9], metadata={"vocab_size": 1000, "eod_id": 1})
    old, _ = build_sources(settings(prefix, mask_eod=True))
    files = set(tmp_path.iterdir())
    write_dataset(tmp_path / "d", [[2] * 13])
    new, _ = build_sources(settings(prefix))
    assert (old.length, new.length) == (2, 3)
    (batch,) = new.read(0, 0, 1, 1, 1)
    assert batch["tokens"].tolist() == [[2] * 5] and batch["weights"].tolist() == [[1] * 4]
    (batch,) = old.read(1, 0, 1, 1, 1)  # a run that is under way keeps what it opened
    assert batch["tokens"].tolist() == [[1] * 5]
    assert set(tmp_path.iterdir()) < files, "training leaves no file beside the data"


def test_case_11_a_copy_on_another_disk_is_all_a_node_needs(tmp_path):
    prefix = write_dataset(tmp_path / "here" / "d", [list(range(400))])
    (tmp_path / "there").mkdir()
    for suffix in ("bin", "idx"):
        shutil.copy(companion(prefix, suffix), tmp_path / "there")
    sources = [build_sources(settings(str(tmp_path / node / "d"), shuffle=True))[0] for node in ("here", "there")]
    batches = [source.read(32, rank, 2, 16, 4) for rank, source in enumerate(sources)]
    alone = sources[0].read(32, 0, 1, 16, 16)[0]["tokens"]
    together = torch.cat([batches[rank][j]["tokens"] for j in range(2) for rank in range(2)])
    assert torch.equal(together, alone)
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["d.bin", "d.idx"]


def test_case_12_the_order_does_not_know_the_number_of_ranks(tmp_path):
    prefix = write_dataset(tmp_path / "d", [list(range(900))])
    train, _ = build_sources(settings(prefix, shuffle=True))

    def batch(first, ranks):
        parts = [train.read(first, rank, ranks, 16, 2) for rank in range(ranks)]
        return torch.cat(
            [parts[rank][j]["samples"] for j in range(16 // (2 * ranks)) for rank in range(ranks)]
        ), torch.cat([parts[rank][j]["tokens"] for j in range(16 // (2 * ranks)) for rank in range(ranks)])

    saved = [batch(first, 4) for first in (0, 16, 32)]
    for ranks in (2, 8):
        for first, (samples, tokens) in zip((0, 16, 32), saved, strict=True):
            resumed = batch(first, ranks)
            assert torch.equal(resumed[0], samples) and torch.equal(resumed[1], tokens)


GPU_PACKAGES = ("torch", "triton", "transformers", "jax", "tensorflow", "cupy")


@pytest.mark.parametrize("workers", [1, 2])
def test_case_13_tokenising_imports_no_gpu_package(tmp_path, workers):
    """Each of them is replaced by one that fails, in this process and the workers."""
    for name in GPU_PACKAGES:
        (tmp_path / "traps" / name).mkdir(parents=True)
        (tmp_path / "traps" / name / "__init__.py").write_text(f"raise SystemExit('imported {name}')\n")
    (tmp_path / "a.txt").write_text("Some text.\n")
    model = FIXTURES / "sentencepiece/botchan_en_unigram_1000.model"
    code = f"""
import runpy, sys
sys.path.insert(1, {str(tmp_path / "traps")!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    (tmp_path / "run.py").write_text(f"if __name__ == '__main__':{code}".replace("\n", "\n    "))
    import subprocess

    for script, *flags in [
        ("data/preprocess.py", "--tokenizer", f"sentencepiece:{model}", "--workers", str(workers), "--output", "o"),
        ("data/train_tokenizer.py", "--input", str(AUSTEN / "austen.jsonl"), "--vocab-size", "400", "--output", "m"),
    ]:
        command = [sys.executable, "run.py", str(ROOT / script), "--input", "a.txt", *flags]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert IndexedDataset(tmp_path / "o").num_tokens > 0


def test_a_billion_documents_are_ready_at_once(tmp_path):
    """An index of 20 GB (sparse) is opened, ordered and read without building anything of its size."""
    documents, tokens = 10**9, 10**6
    header = index_bytes(UINT16, np.zeros(0, np.int64), np.zeros(0, np.int64))[0]
    lengths_at, pointers_at = len(header), len(header) + 4 * documents
    boundaries_at = pointers_at + 8 * documents
    with (tmp_path / "d.idx").open("wb") as file:
        file.write(header[:18] + np.array([documents, documents + 1], "<u8").tobytes())
        file.truncate(boundaries_at + 8 * (documents + 1))
        file.seek(pointers_at - 4)  # all documents are empty but the last
        file.write(np.array([tokens], "<i4").tobytes())
        file.seek(boundaries_at + 8 * (documents - 1))
        file.write(np.array([documents - 1, documents], "<i8").tobytes())
    assert lengths_at == 34
    with (tmp_path / "d.bin").open("wb") as file:
        file.truncate(2 * tokens)
    tracemalloc.start()
    train, _ = build_sources(settings(str(tmp_path / "d"), shuffle=True, seq_length=100, reset_at_document=True))
    (batch,) = train.read(0, 0, 1, 64, 64)
    train.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert batch["documents"].unique().tolist() == [documents - 1]
    assert train.length == (tokens - 1) // 100


def test_position_i_is_as_cheap_far_out_as_near():
    """Counted in units of the blend's search, which do not grow with the position."""
    blend = Blend([0.5, 0.3, 0.2])
    for first in (0, 10**6, 10**12):
        calls = 0
        given = Blend._given

        def counting(self, time, given=given):
            nonlocal calls
            calls += 1
            return given(self, time)

        Blend._given = counting
        try:
            blend.locate(np.arange(first, first + 100))
        finally:
            Blend._given = given
        assert calls <= 2 + math.ceil(math.log2(2 * (3 // 2 + 1) + 1))
