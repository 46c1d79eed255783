"""What comes out of a source: tokens, weights, documents, and the share of each rank."""

import numpy as np
import pytest
import torch

from data.sources import build_sources
from megazero.errors import DataError
from tests.data.helpers import settings, write_dataset

EOD = 9


@pytest.fixture
def make(tmp_path):
    """Build a training source over documents; closes it afterwards."""
    sources = []

    def build(documents, masks=None, **changes):
        prefix = write_dataset(tmp_path / f"d{len(sources)}", documents, masks=masks)
        train, _ = build_sources(settings(prefix, **changes), vocab_size=1000)
        sources.append(train)
        return train

    yield build
    for source in sources:
        source.close()


def whole(source, first, count):
    (batch,) = source.read(first, 0, 1, count, count)
    return batch


def test_samples_share_one_token_and_cross_documents(make):
    source = make([[0, 1, 2], [3], [4, 5, 6, 7, 8, 10, 11]])
    batch = whole(source, 0, 2)
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert batch["weights"].tolist() == [[1, 1, 1, 1]] * 2
    assert batch["samples"].tolist() == [0, 1]
    assert source.length == 2
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "tokens": torch.int64,
        "weights": torch.float32,
        "samples": torch.int64,
    }


def test_reset_at_document(make):
    # Documents 0 [0..2], 1 [], 2 [3], 3 [4..9]; the second sample begins inside document 3.
    source = make([[0, 1, 2], [], [3], [4, 5, 6, 7, 8, 10, 11]], reset_at_document=True)
    batch = whole(source, 0, 2)
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch["documents"].tolist() == [[0, 0, 0, 2], [3, 3, 3, 3]]
    source = make([[0, 1, 2], [], [3], [4, 5, 6, 7, 8, 10, 11]], reset_at_document=True, seq_length=3)
    batch = whole(source, 0, 3)
    assert batch["positions"].tolist() == [[0, 1, 2], [0, 0, 1], [0, 1, 2]]
    assert batch["documents"].tolist() == [[0, 0, 0], [2, 3, 3], [3, 3, 3]]


def test_reset_at_document_against_a_plain_loop(make):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 9, size).tolist() for size in rng.integers(0, 12, 300)]
    of_token = np.repeat(np.arange(300), [len(document) for document in documents])
    source = make(documents, reset_at_document=True, seq_length=16, shuffle=True)
    batch = whole(source, 0, source.length)
    stream = np.concatenate([np.array(document, np.int64) for document in documents])
    found = {}
    for row in range(source.length):
        tokens = batch["tokens"][row].numpy()
        starts = [s for s in range(len(stream) - 16) if np.array_equal(stream[s : s + 17], tokens)]
        assert len(starts) == 1
        ids = of_token[starts[0] : starts[0] + 16]
        positions = [0]
        for before, now in zip(ids[:-1], ids[1:], strict=True):
            positions.append(positions[-1] + 1 if before == now else 0)
        assert batch["positions"][row].tolist() == positions
        assert batch["documents"][row].tolist() == ids.tolist()
        found[row] = starts[0]
    assert len(set(found.values())) == source.length


def test_mask_eod_takes_out_positions_whose_input_is_the_end(make):
    source = make([[1, 2, EOD], [3, EOD], [4, EOD, 5, 6]], mask_eod=True, eod_id=EOD)
    batch = whole(source, 0, 2)
    assert batch["tokens"].tolist() == [[1, 2, EOD, 3, EOD], [EOD, 4, EOD, 5, 6]]
    assert batch["weights"].tolist() == [[1, 1, 0, 1], [0, 1, 0, 1]]


def test_a_prompt_is_out_of_the_loss_as_target(make):
    source = make([[1, 2, 3, EOD], [4, 5, 6, 7, 8]], masks=[[0, 0, 1, 1], [0, 1, 0, 1, 1]])
    batch = whole(source, 0, 2)
    assert batch["tokens"].tolist() == [[1, 2, 3, EOD, 4], [4, 5, 6, 7, 8]]
    assert batch["weights"].tolist() == [[0, 1, 1, 0], [1, 0, 1, 1]]


@pytest.mark.parametrize("dp, micro", [(1, 1), (1, 8), (2, 2), (4, 1), (2, 4), (8, 1)])
def test_ranks_and_micro_batches_share_the_global_batch(make, dp, micro):
    source = make([list(range(100)) * 2], shuffle=True)
    expected = whole(source, 16, 8)
    count = 8 // (dp * micro)
    parts = [source.read(16, rank, dp, 8, micro) for rank in range(dp)]
    assert all(len(part) == count for part in parts)
    for name, tensor in expected.items():
        together = torch.cat([parts[rank][j][name] for j in range(count) for rank in range(dp)])
        assert torch.equal(together, tensor)


def test_reading_ahead_does_not_show(make):
    documents = [list(range(400)) * 2]
    source, fresh = make(documents, shuffle=True), make(documents, shuffle=True)
    for first in (0, 4, 8, 8, 100, 4, 8, 12, 16):
        fresh_copy = make(documents, shuffle=True)
        for other in (fresh, fresh_copy):
            assert torch.equal(whole(source, first, 4)["tokens"], whole(other, first, 4)["tokens"])
        whole(fresh, 0, 4)


def test_evaluation_counts_each_sample_once(tmp_path):
    prefix = write_dataset(tmp_path / "d", [list(range(14))], masks=[[1] * 14])
    _, valid = build_sources(settings(prefix, valid=prefix, shuffle=True), vocab_size=1000)
    batch = whole(valid, 0, 8)
    assert valid.length == 3
    assert batch["tokens"][:, 0].tolist()[:3] == [0, 4, 8]
    assert batch["weights"].sum(dim=1).tolist() == [4, 4, 4, 0, 0, 0, 0, 0]
    assert batch["samples"].tolist() == list(range(8))
    valid.close()


def test_evaluation_of_a_blend_counts_each_sample_once(tmp_path):
    a = write_dataset(tmp_path / "a", [list(range(100, 113))])  # 3 samples
    b = write_dataset(tmp_path / "b", [list(range(200, 221))])  # 5 samples
    _, valid = build_sources(settings(a, valid=[1, a, 1, b]), vocab_size=1000)
    batch = whole(valid, 0, 16)
    counted = batch["weights"].sum(dim=1) > 0
    assert sorted(batch["tokens"][counted][:, 0].tolist()) == [100, 104, 108, 200, 204, 208, 212, 216]
    valid.close()


def test_an_id_outside_the_vocabulary_is_found_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("data.sources._CHECKED_AT_OPEN", 8)
    prefix = write_dataset(tmp_path / "d", [[1] * 40, [700], [1] * 40])
    train, _ = build_sources(settings(prefix), vocab_size=500)
    train.read(0, 0, 1, 4, 4)
    with pytest.raises(DataError, match="token id 700 is outside the vocabulary of 500"):
        for first in range(4, 20, 4):  # the thread that reads ahead meets it first
            train.read(first, 0, 1, 4, 4)
    train.close()


def test_wide_and_narrow_files_can_be_blended(tmp_path):
    narrow = write_dataset(tmp_path / "a", [[1, 2, 3, 4, 5]], vocab_size=100)
    wide = write_dataset(tmp_path / "b", [[66000, 2, 3, 4, 5]], vocab_size=70000)
    train, _ = build_sources(settings([1, narrow, 1, wide]), vocab_size=70000)
    assert whole(train, 0, 2)["tokens"].tolist() == [[1, 2, 3, 4, 5], [66000, 2, 3, 4, 5]]
    train.close()
