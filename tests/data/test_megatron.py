"""Files go both ways between us and Megatron-LM's own IndexedDataset."""

import warnings

import numpy as np
import pytest
import torch

from data.indexed import IndexedDataset, token_dtype
from tests.data.helpers import write_dataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import indexed_dataset as megatron

DOCUMENTS = [[], [1, 2, 3], [4], [], [5, 6, 7, 8, 9], []]


@pytest.mark.parametrize("vocab_size", [500, 70000])
@pytest.mark.parametrize("mmap", [True, False])
def test_megatron_reads_ours(tmp_path, vocab_size, mmap):
    documents = [*DOCUMENTS, [vocab_size - 1]]
    prefix = write_dataset(tmp_path / "ours", documents, vocab_size=vocab_size, metadata={})
    dataset = megatron.IndexedDataset(prefix, mmap=mmap)
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
    assert dataset.index.dtype == token_dtype(vocab_size)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_we_read_megatrons(tmp_path, dtype):
    prefix = str(tmp_path / "theirs")
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.add_document(torch.arange(7), [3, 0, 4])
    builder.finalize(f"{prefix}.idx")
    dataset = IndexedDataset(prefix)
    sequences = [*DOCUMENTS, [0, 1, 2], [], [3, 4, 5, 6]]
    assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
    assert (dataset.num_documents, dataset.dtype) == (len(DOCUMENTS) + 1, dtype)
    assert dataset.documents_of(np.array([0, 3, 4, 8, 9, 15])).tolist() == [1, 2, 4, 4, 6, 6]
    assert dataset.verify() == 9


def test_the_bytes_are_the_same(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_dataset(ours, DOCUMENTS, vocab_size=500)
    builder = megatron.IndexedDatasetBuilder(f"{theirs}.bin", dtype=megatron.DType.optimal_dtype(500))
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.finalize(f"{theirs}.idx")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.parametrize("vocab_size", [1, 65499, 65500, 65535, 65536, 65537, 10**6])
def test_one_rule_for_the_dtype(vocab_size):
    assert token_dtype(vocab_size) == megatron.DType.optimal_dtype(vocab_size)
