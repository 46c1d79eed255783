"""build_sources: what the settings mean, and an error before any work for what cannot be."""

import pytest

from data.indexed import IndexedDataset
from data.sources import build_sources
from data.splits import split_at_document
from megazero.config import load_config
from megazero.errors import ConfigError, DataError
from tests.data.helpers import settings, write_dataset


@pytest.fixture
def prefix(tmp_path):
    return write_dataset(
        tmp_path / "d", [list(range(100)), list(range(60)), list(range(40))], metadata={"vocab_size": 200, "eod_id": 7}
    )


def first_tokens(source, count):
    (batch,) = source.read(0, 0, 1, count, count)
    source.close()
    return batch["tokens"][:, 0].tolist()


@pytest.mark.parametrize("form", ["{0}", ["{0}"], [2, "{0}"], [(2, "{0}")], ((1.0, "{0}"), (0.0, "{0}"))])
def test_forms_of_a_blend(prefix, form):
    def fill(part):
        return part.format(prefix) if isinstance(part, str) else part

    blend = (
        fill(form)
        if isinstance(form, str)
        else [tuple(map(fill, p)) if isinstance(p, tuple) else fill(p) for p in form]
    )
    if form == ["{0}"]:
        with pytest.raises(ConfigError, match="neither a prefix nor weights and prefixes"):
            build_sources(settings(blend))
        return
    train, valid = build_sources(settings(blend), vocab_size=200)
    assert valid is None
    assert first_tokens(train, 3) == [0, 4, 8]


def test_the_config_tree_is_what_we_take(prefix):
    flags = ["--data.train", "0.5", prefix, "0.5", prefix, "--data.valid", prefix, "--data.seq_length", "8"]
    config = load_config([*flags, "--model.preset", "gpt2-124m", "--data.shuffle", "false"], world_size=1)
    train, valid = build_sources(config.data, vocab_size=50257)
    assert first_tokens(train, 4) == [0, 0, 8, 8]
    assert (train.length, valid.length) == (2 * 24, 24)
    assert first_tokens(valid, 2) == [0, 8]


def test_a_file_that_may_not_be_read_is_named(prefix, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("data.indexed.map_file", refused)
    with pytest.raises(DataError, match=rf"^data\.train: {prefix}\.idx cannot be read: Permission denied"):
        build_sources(settings(prefix))


def test_nothing_is_taken_from_train_unless_asked(prefix):
    train, valid = build_sources(settings(prefix))
    assert (train.length, valid) == (49, None)


@pytest.mark.parametrize("shares, border", [((80, 20), 160), ((0.5, 0.5), 100), ((0.6, 0.4), 100), ((0.7, 0.3), 160)])
def test_a_split_cuts_at_the_nearest_document(prefix, shares, border):
    first, second = split_at_document(IndexedDataset(prefix), shares)
    assert (first.start, first.stop, second.start, second.stop) == (0, border, border, 200)
    train, valid = build_sources(settings(prefix, split=shares))
    assert (train.length, valid.length) == ((border - 1) // 4, (199 - border) // 4)
    assert first_tokens(valid, 2) == [0, 4]


def test_documents_are_numbered_from_the_file_in_a_split(prefix):
    _, valid = build_sources(settings(prefix, split=(0.5, 0.5), reset_at_document=True, seq_length=50))
    (batch,) = valid.read(0, 0, 1, 1, 1)
    assert batch["documents"].unique().tolist() == [1]
    assert batch["positions"][0].tolist() == list(range(50))
    valid.close()


def test_end_of_document_is_the_first_that_is_known(prefix, tmp_path):
    def weights(**changes):
        train, _ = build_sources(settings(prefix, mask_eod=True, seq_length=10, **changes), vocab_size=300)
        (batch,) = train.read(0, 0, 1, 1, 1)
        train.close()
        return batch["weights"][0].tolist()

    assert weights().index(0) == 7
    assert weights(eod_id=3).index(0) == 3
    bare = write_dataset(tmp_path / "bare", [list(range(100))])
    with pytest.raises(ConfigError, match="data.mask_eod: needs the end-of-document id"):
        build_sources(settings(bare, mask_eod=True))
    train, _ = build_sources(settings(bare, mask_eod=True, tokenizer="byte"), vocab_size=300)
    train.close()


def test_errors_before_work(prefix, tmp_path):
    short = write_dataset(tmp_path / "short", [[1, 2, 3, 4]])
    byte = write_dataset(tmp_path / "byte", [[1] * 50], metadata={"vocab_size": 257, "eod_id": 256})
    raw = write_dataset(tmp_path / "raw", [[1] * 50, [999]])
    one = write_dataset(tmp_path / "one", [list(range(50))])
    (tmp_path / "cut.idx").write_bytes((tmp_path / "d.idx").read_bytes())
    (tmp_path / "cut.bin").write_bytes(b"\0" * 10)
    cases = [
        (settings(None), ConfigError, "data.train: nothing to train on"),
        (settings(f"{tmp_path}/none"), DataError, r"data.train: .*none.idx does not exist"),
        (settings(prefix, valid=f"{tmp_path}/none"), DataError, "data.valid: .*none.idx does not exist"),
        (settings(f"{tmp_path}/cut"), DataError, "data.train: .*cut.bin has 10 bytes, but .* describes 400"),
        (settings(short), DataError, r"data.train: the split 'train' has 4 tokens of .*short .* = 5"),
        (settings(prefix, valid=short), DataError, "data.valid: the split 'valid' has 4 tokens"),
        (settings(prefix, seq_length=200), DataError, "has 200 tokens"),
        (settings([0.5, prefix, 0.5, short]), DataError, "has 4 tokens of .*short"),
        (settings(one, split=(90, 10)), DataError, "'valid' has 0 tokens of .*one .50 in all.*between documents"),
        (settings([1, prefix, -0.1, short]), ConfigError, "data.train: weight -0.1 of .*short must be"),
        (settings([float("nan"), prefix]), ConfigError, "data.train: weight nan"),
        (settings([0, prefix, 0, short]), ConfigError, "data.train: no dataset has a weight above 0"),
        (settings([prefix, 0.5]), ConfigError, "neither a prefix nor weights and prefixes"),
        (settings(prefix, valid=short, split=(1, 1)), ConfigError, "data.split: would split data.train"),
        (settings(prefix, tokenizer="sentencepiece:no.model"), DataError, "data.tokenizer: .*no.model does not exist"),
        (settings(prefix, tokenizer="byte"), DataError, "data.tokenizer .byte. has a vocabulary of 257 entries, the"),
        (settings([1, prefix, 1, byte]), DataError, "of a new model to at least 257, or preprocess with the model's"),
        (
            settings(raw),
            DataError,
            "raw.bin: token id 999 is outside the vocabulary of 256 entries; set model.vocab_size of a new",
        ),
    ]
    for given, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            build_sources(given, vocab_size=256)
        assert "\n" not in str(caught.value)


def test_vocabularies_must_agree_even_where_the_model_has_room(prefix, tmp_path):
    byte = write_dataset(tmp_path / "byte", [[1] * 50], metadata={"vocab_size": 257, "eod_id": 256})
    with pytest.raises(DataError, match="byte.json has a vocabulary of 257 entries, .*d.json one of 200"):
        build_sources(settings([1, prefix, 1, byte]), vocab_size=50257)
    with pytest.raises(DataError, match="d.json has a vocabulary of 200 entries, data.tokenizer .byte. one of 257"):
        build_sources(settings(prefix, tokenizer="byte"), vocab_size=50257)
