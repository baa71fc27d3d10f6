"""With ``data.name=tokens``, an array of token ids is checked and memory-mapped without a copy."""

import bz2
import collections
import gzip
import json
import os
import pathlib
import pickle
import resource
import subprocess
import sys

import numpy as np
import pytest
from token_files import IDS, llm_c, save

import txl_jax
from txl_jax.config import ConfigError, DataConfig
from txl_jax.data.corpus import corpus_from_config, load_corpus
from txl_jax.data.errors import DataError
from txl_jax.data.sources import tokens
from txl_jax.data.symbols import check_ids
from txl_jax.data.vocab import Vocab


def splits(corpus):
    return [np.asarray(getattr(corpus, split)) for split in ("train", "valid", "test")]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", ">u2", "int32", "uint64", "int64"])
def test_an_array_of_any_integer_type_is_cut_in_order(tmp_path, dtype):
    corpus = load_corpus("tokens", save(tmp_path / "ids.npy", dtype=dtype), valid_fraction=0.2)
    train, valid, test = splits(corpus)
    assert (len(train), len(valid), len(test)) == (150, 40, 10)
    np.testing.assert_array_equal(np.concatenate([train, valid, test]), IDS)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.vocab.symbols == list("0123456")
    (segment, *_) = txl_jax.segments(corpus.train, batch_size=2, seg_len=5)
    np.testing.assert_array_equal(segment.inputs[0], IDS[:5])


def test_nothing_is_written_into_the_cache(tmp_path):
    cache = tmp_path / "cache"
    load_corpus("tokens", save(tmp_path / "ids.npy"), cache_dir=cache)
    assert not cache.exists()


def test_a_raw_file_is_read_in_the_type_of_the_setting(tmp_path):
    found = load_corpus("tokens", save(tmp_path / "ids.bin"))
    np.testing.assert_array_equal(np.concatenate(splits(found)), IDS)
    large = IDS + 70_000
    found = load_corpus("tokens", save(tmp_path / "large.bin", large, "uint32"), dtype="uint32")
    np.testing.assert_array_equal(np.concatenate(splits(found)), large)


def test_a_folder_has_a_file_for_each_split(tmp_path):
    for n, name in enumerate(("train.npy", "valid.bin", "test.npy")):
        save(tmp_path / name, IDS[: 20 + n])
    sizes = [len(split) for split in splits(load_corpus("tokens", tmp_path))]
    assert sizes == [20, 21, 22]


def test_a_folder_of_nanogpt_scores_its_val_file_and_says_so(tmp_path, capsys):
    save(tmp_path / "train.bin")
    save(tmp_path / "val.bin", IDS[:31])
    corpus = load_corpus("tokens", tmp_path)
    assert len(corpus.valid) == len(corpus.test) == 31
    assert "there is no test file, so the test split is the valid split" in corpus.info["label"]
    assert "200 / 31 / 31 tokens (train / valid / test), 7 ids" in capsys.readouterr().err


def test_the_vocabulary_has_the_ids_of_the_setting_or_up_to_the_largest(tmp_path):
    path = save(tmp_path / "ids.npy")
    assert len(load_corpus("tokens", path).vocab) == 7
    assert len(load_corpus("tokens", path, vocab_size=50).vocab) == 50
    with pytest.raises(DataError, match=r"ids.npy: token 6 \(byte 140\) is 6: .* from 0 to 5"):
        load_corpus("tokens", path, vocab_size=6)


def test_symbols_are_for_display_and_prompts(tmp_path):
    path, names = save(tmp_path / "ids.npy"), [f"n{i}" for i in range(9)]
    (tmp_path / "symbols.json").write_text(json.dumps(names))
    vocab = load_corpus("tokens", path).vocab
    assert vocab.decode([8, 0, 3]) == "n8 n0 n3"
    assert vocab.encode("n8 0\nn3").tolist() == [8, 0, 3]
    (tmp_path / "symbols.json").write_text("\ufeff" + json.dumps(names), "utf-8")
    assert load_corpus("tokens", path).vocab == vocab
    for encoding in ("utf-16", "utf-16-le", "utf-32-be"):
        (tmp_path / "symbols.json").write_bytes(json.dumps(names).encode(encoding))
        with pytest.raises(
            DataError, match=rf"symbols.json: is {encoding[:6].upper()} .* as UTF-8"
        ):
            load_corpus("tokens", path)
    (tmp_path / "symbols.json").write_text(json.dumps(names))
    assert vocab.unit == "ppl"
    with pytest.raises(DataError, match="'n9' is no symbol of this model; write symbols, or ids"):
        vocab.encode("n9")
    with pytest.raises(DataError, match=r"data.vocab_size = 8: .*symbols.json has 9 symbols"):
        load_corpus("tokens", path, vocab_size=8)


@pytest.mark.parametrize(
    ("symbols", "fault"),
    [
        ("{}", "must be a list of texts"),
        ("[1, 2]", "must be a list of texts"),
        ("[", "is not JSON"),
        (
            '["", "c", "d", "e", "f", "g", "h"]',
            "the symbol '' is empty; each symbol must have a character",
        ),
        (r'["\n", "\\n", "d", "e", "f", "g", "h"]', "two symbols differ only in how white space"),
        ('["a", "a", "d", "e", "f", "g", "h"]', "'a' occurs 2 times"),
        ('["a", "b"]', r"token 2 \(byte 132\) is 2"),
    ],
)
def test_unusable_symbols_are_refused(tmp_path, symbols, fault):
    (tmp_path / "symbols.json").write_text(symbols)
    with pytest.raises(DataError, match=fault):
        load_corpus("tokens", save(tmp_path / "ids.npy"))


def test_white_space_may_be_in_symbols(tmp_path):
    path = save(tmp_path / "ids.npy")
    for symbols, text in (
        (["a", "b c", "\n", "\t\u3000", "d", "e", "f"], r"b\x20c \n a \t\u3000 f"),
        (["a", "b", "\n", " ", "7", "e", "f"], "b\na f"),  # one-character symbols: no spaces added
    ):
        (tmp_path / "symbols.json").write_text(json.dumps(symbols))
        vocab = load_corpus("tokens", path).vocab
        assert vocab.symbols == symbols
        assert vocab.decode([1, 2, 0, 3, 6]) == text
        assert vocab.encode(text).tolist() == [1, 2, 0, 3, 6]
    assert vocab.encode("7\n7").tolist() == [4, 2, 4]
    with pytest.raises(DataError, match="'x' is no symbol of this model; write only the 7 ch"):
        vocab.encode("ax")


SHAKESPEARE = ["\n", " ", "!", "3", "A", "b", "é"]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_the_symbols_of_nanogpt_are_read_without_unpickling(tmp_path, protocol, monkeypatch):
    save(tmp_path / "train.bin")
    save(tmp_path / "val.bin")
    itos = dict(enumerate(SHAKESPEARE))
    meta = {"vocab_size": 7, "itos": itos, "stoi": {s: i for i, s in itos.items()}}
    meta |= {"lower_case": False, "normalized": True, "source": None, "bytes": 1 << 40}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    vocab = load_corpus("tokens", tmp_path).vocab
    assert vocab.symbols == SHAKESPEARE
    assert vocab.decode(vocab.encode("Ab é\n!3")) == "Ab é\n!3"
    (tmp_path / "symbols.json").write_text(json.dumps(list("abcdefg")))  # wins over meta.pkl
    assert load_corpus("tokens", tmp_path).vocab.symbols == list("abcdefg")


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    "content",
    [
        b"no pickle",
        b"",
        pickle.dumps({"itos": dict(enumerate(SHAKESPEARE))})[:-9],
        pickle.dumps({"itos": Harmful()}),
        pickle.dumps({"itos": collections.OrderedDict(enumerate(SHAKESPEARE))}),
        pickle.dumps({"vocab_size": 7}),
        pickle.dumps({"itos": {1: "a", 2: "b"}}),
        pickle.dumps({"itos": {0: 1}}),
        pickle.dumps([1, 2]),
        b"\x80\x04h\x05.",
        b"\x80\x04}}s.",
        b"I" + b"1" * 5000 + b"\n.",
    ],
)
def test_another_pickle_is_refused_with_the_lines_that_make_symbols_json(
    tmp_path, content, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "ids.npy")
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(
        DataError, match=r"meta.pkl: is not unpickled, because .*, and .*json.dump"
    ) as caught:
        load_corpus("tokens", "ids.npy")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harmed").exists()


def test_the_lines_that_make_symbols_json_make_it(tmp_path):
    save(tmp_path / "ids.npy")
    meta = {"itos": collections.OrderedDict(enumerate(SHAKESPEARE))}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(DataError) as caught:
        load_corpus("tokens", tmp_path / "ids.npy")
    lines = str(caught.value).partition("in its folder: ")[2].partition("  -- or")[0]
    subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, check=True)
    assert load_corpus("tokens", tmp_path / "ids.npy").vocab.symbols == SHAKESPEARE


def raw(path, content):
    path.write_bytes(content)
    return str(path)


def saved(path, array):
    np.save(path, array)
    return str(path)


def cut_off(path):
    pathlib.Path(path).write_bytes(pathlib.Path(path).read_bytes()[:-8])
    return path


FAULTS = {
    "floats": (lambda d: saved(d / "x.npy", IDS * 1.5), "x.npy: has numbers of type float64"),
    "bools": (lambda d: saved(d / "x.npy", IDS > 2), "x.npy: has numbers of type bool"),
    "axes": (
        lambda d: saved(d / "x.npy", IDS.reshape(20, 10)),
        r"has the shape \(20, 10\), not one axis",
    ),
    "no axis": (lambda d: saved(d / "x.npy", np.int32(3)), r"has the shape \(\), not one axis"),
    "objects": (
        lambda d: saved(d / "x.npy", np.array([{}], object)),
        "is not a NumPy array of numbers",
    ),
    "empty array": (lambda d: saved(d / "x.npy", IDS[:0]), "x.npy: "),
    "empty file": (lambda d: raw(d / "x.npy", b""), "x.npy: is not a NumPy array"),
    "empty raw": (lambda d: raw(d / "x.bin", b""), "x.bin: has no token; name a file of ids"),
    "half": (lambda d: raw(d / "x.bin", b"abc"), "3 bytes, no multiple of the size of uint16"),
    "cut off": (lambda d: cut_off(saved(d / "x.npy", IDS)), "is not a NumPy array of numbers"),
    "negative": (lambda d: saved(d / "x.npy", IDS - 1), r"token 0 \(byte 128\) is -1: an id must"),
    "huge": (lambda d: saved(d / "x.npy", IDS + 2**40), "from 0 to 9999999"),
    "wider": (lambda d: save(d / "x.bin", IDS, "uint32"), "every second number is 0 .*=uint32"),
    "short": (
        lambda d: saved(d / "x.npy", IDS[:20]),
        "valid split needs at least 2 tokens, and has 1",
    ),
    "text": (lambda d: raw(d / "x.txt", b"1 2 3"), "must be a .npy or .bin file of ids; .*=text"),
    "nothing": (lambda d: str(d / "x"), "there is no such file or folder"),
    "no file": (lambda d: str(d), r"there is no \*.npy and no \*.bin file in this folder"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_unusable_arrays_are_refused_in_one_line(tmp_path, name):
    make, fault = FAULTS[name]
    with pytest.raises(DataError, match=fault) as caught:
        load_corpus("tokens", make(tmp_path))
    assert "\n" not in str(caught.value)


def test_two_files_for_one_split_are_refused(tmp_path):
    for name in ("train.npy", "val.npy", "valid.bin"):
        save(tmp_path / name)
    with pytest.raises(
        DataError, match=r": val.npy and valid.bin seem, .* the same text; remove one of them"
    ):
        load_corpus("tokens", tmp_path)


def test_raw_ids_may_begin_with_the_largest(tmp_path):
    (tmp_path / "x.bin").write_bytes(np.array([65535] * 4 + [*range(99)], "<u2").tobytes())
    corpus = load_corpus("tokens", tmp_path / "x.bin", vocab_size=1 << 16, cache_dir=tmp_path / "c")
    assert corpus.train[:5].tolist() == [65535] * 4 + [0]


def test_a_text_is_not_read_as_raw_ids(tmp_path):
    (tmp_path / "train.bin").write_text("Gr\u00fc\u00dfe von hier.\n" * 9, encoding="utf-8")
    save(tmp_path / "val.npy", IDS)
    fault = "train.bin: is text, not raw ids; name it .txt and use data.name=text"
    with pytest.raises(DataError, match=fault):
        load_corpus("tokens", tmp_path, cache_dir=tmp_path / "c")


def test_a_folder_with_one_array_is_this_array(tmp_path):
    save(tmp_path / "ids.npy", IDS)
    save(tmp_path / "ids.starts.npy", [0, 10, 20, 30])
    train = load_corpus("tokens", tmp_path, cache_dir=tmp_path / "c").train
    assert [len(document) for document in train] == [10, 10]


def test_an_array_given_as_text_names_the_setting_for_arrays(tmp_path):
    path = save(tmp_path / "ids.npy")
    with pytest.raises(DataError, match=r"is an array of ids, not a text; use data.name=tok"):
        load_corpus("text", path)
    with pytest.raises(DataError, match=r"no \*.txt file, .*; for its arrays use data.name=tok"):
        load_corpus("text", tmp_path)


def test_settings_of_arrays_are_refused_for_texts():
    for settings in ({"dtype": "int32"}, {"vocab_size": 300}):
        with pytest.raises(ConfigError, match="is only for"):
            txl_jax.ExperimentConfig.from_dict({"data": {"name": "text", **settings}})
    with pytest.raises(ConfigError, match="at least 256 for subwords"):
        txl_jax.ExperimentConfig.from_dict({"data": {"vocab": "subword", "vocab_size": 255}})


def test_the_vocabulary_of_a_model_checks_other_arrays(tmp_path):
    data = DataConfig(name="tokens", path=save(tmp_path / "ids.npy"))
    assert corpus_from_config(data, Vocab.from_ids(40)).vocab == Vocab.from_ids(40)
    with pytest.raises(DataError, match="is 6: an id must be from 0 to 5"):
        corpus_from_config(data, Vocab.from_ids(6))
    with pytest.raises(DataError, match="kind 'byte'"):
        corpus_from_config(data, Vocab.all_bytes())


def test_the_hash_is_of_the_content_and_not_of_time_or_name(tmp_path):
    first = load_corpus("tokens", save(tmp_path / "a.npy")).source_hash
    os.utime(tmp_path / "a.npy", (0, 0))
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    assert load_corpus("tokens", tmp_path / "b.npy").source_hash == first
    assert load_corpus("tokens", save(tmp_path / "b.npy", IDS[::-1])).source_hash != first


def test_a_large_file_is_identified_by_its_size_and_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "HASHED_WHOLE", 100)
    monkeypatch.setattr(tokens, "SAMPLES", 3)
    monkeypatch.setattr(tokens, "SAMPLE", 10)
    path = pathlib.Path(raw(tmp_path / "x.bin", bytes(range(200))))
    first = tokens.fingerprint(path)
    for at, noticed in ((0, True), (50, False), (95, True), (199, True)):
        content = bytearray(range(200))
        content[at] ^= 1
        path.write_bytes(content)
        assert (tokens.fingerprint(path) != first) == noticed, at
    path.write_bytes(bytes(range(199)))
    assert tokens.fingerprint(path) != first


def test_ids_of_a_memory_map_are_checked_in_every_part(tmp_path):
    ids = np.zeros((1 << 20) + 10, np.int32)
    ids[-2] = 9
    mapped = np.load(save(tmp_path / "x.npy", ids, "int32"), mmap_mode="r")
    check_ids("x", mapped, 10)
    with pytest.raises(DataError, match=r"x\[1048584\] = 9"):
        check_ids("x", mapped, 9)
    assert mapped[-2] == 9  # the memory map is still open


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_the_header_of_llm_c_is_no_part_of_the_ids(tmp_path, magic, version, dtype):
    ids = IDS + (100_000 if dtype == "<u4" else 0)
    path = llm_c(tmp_path / "ids.bin", ids, magic, version, dtype)
    corpus = load_corpus("tokens", path, dtype="int64")  # ignored: the header gives the type
    np.testing.assert_array_equal(np.concatenate(splits(corpus)), ids)
    assert len(corpus.vocab) == ids.max() + 1
    with pytest.raises(DataError, match=rf"token 5 \(byte {1024 + 5 * int(dtype[2])}\)"):
        load_corpus("tokens", path, vocab_size=int(ids[5]))
    with pytest.raises(DataError, match=r"is an array of ids, not a text"):
        load_corpus("text", path)


def test_shards_of_llm_c_are_documents(tmp_path):
    for n in range(4):
        llm_c(tmp_path / f"part_{n}.bin", IDS[: 50 + n])
    corpus = load_corpus("tokens", tmp_path, cache_dir=tmp_path / "cache")
    assert sum(corpus.info["tokens"].values()) == 50 + 51 + 52 + 53
    assert len(corpus.vocab) == 7


def test_more_arrays_than_files_may_be_open_are_joined(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for n in range(150):
        save(tmp_path / f"{n:03}.bin", IDS[: 2 + n])
    with open(os.devnull) as lowest:  # other tests may have left files open
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 90, limits[1]))
    try:
        corpus = load_corpus("tokens", tmp_path, cache_dir=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sum(corpus.info["documents"].values()) == 150
    assert sum(corpus.info["tokens"].values()) == sum(range(2, 152))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"count": 300},
            r"400 bytes of ids, and its header says 300 ids of uint16",
        ),
        ({"count": 100}, "400 bytes of ids, and its header says 100 ids"),
        ({"version": 2}, "has version 2 of llm.c's format 20240520, not version 1"),
        ({"ids": IDS[:0]}, "has no token; name a file of ids"),
        (
            {"ids": np.tile(IDS, 10), "magic": 77_123_456, "count": 0},
            "seems to begin with a header",
        ),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path, changes, fault):
    with pytest.raises(DataError, match=fault):
        load_corpus("tokens", llm_c(tmp_path / "ids.bin", **{"ids": IDS, **changes}))


@pytest.mark.parametrize("size", [4, 500, 1000])
def test_a_file_of_llm_c_that_ends_in_its_header_is_refused(tmp_path, size):
    path = tmp_path / "ids.bin"
    llm_c(path, ids=IDS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"ids\.bin: has 0 bytes of ids|has version 0"):
        load_corpus("tokens", path)


@pytest.mark.parametrize("name", ["", "ids.bin"])
def test_a_compressed_file_is_not_read_as_raw_ids(tmp_path, name):
    path = tmp_path / "ids.bin"
    with open(path, "wb") as file, gzip.GzipFile(name, "wb", fileobj=file) as packed:
        packed.write(np.arange(5000, dtype=np.uint16).tobytes())
    with pytest.raises(DataError, match=r"ids\.bin: is a gzip file, not raw ids"):
        load_corpus("tokens", path)
    path.write_bytes(bz2.compress(path.read_bytes()))
    with pytest.raises(DataError, match=r"ids\.bin: is a bzip2 file, not raw ids"):
        load_corpus("tokens", path)


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_pickle_is_not_read_as_raw_ids(tmp_path, protocol):
    path = tmp_path / "ids.bin"
    path.write_bytes(pickle.dumps(list(range(5000)), protocol) + b"." * 8)
    with pytest.raises(DataError, match=r"ids\.bin: is a Python pickle, not raw ids"):
        load_corpus("tokens", path)


def test_ids_that_begin_like_a_pickle_are_read(tmp_path):
    ids = np.frombuffer(b"\x80\x04\x95\1" * 2000, np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    corpus = load_corpus("tokens", tmp_path / "ids.bin")
    np.testing.assert_array_equal(corpus.train[:10], ids[:10])


@pytest.mark.parametrize("write", ["save", "savez"])
def test_a_numpy_file_named_bin_is_refused(tmp_path, write):
    with open(tmp_path / "ids.bin", "wb") as file:
        getattr(np, write)(file, np.arange(50_000).astype(np.uint16))
    with pytest.raises(DataError, match=r"ids\.bin: is a (NumPy array|zip archive), not raw ids"):
        load_corpus("tokens", tmp_path / "ids.bin")


@pytest.mark.parametrize("header", [np.arange(50_000, 51_000, 10), np.array([0, 51_000, 3, 0])])
@pytest.mark.parametrize(("n", "largest"), [(1200, 100), (60_000, 25_000)])
def test_ids_far_above_the_rest_at_the_start_are_taken_for_a_header(tmp_path, header, n, largest):
    ids = np.random.default_rng(0).integers(0, largest, n)
    path = save(tmp_path / "ids.bin", np.concatenate([header, ids]))
    with pytest.raises(DataError, match=rf"{header.max():,}, over twice every id after byte 1024"):
        load_corpus("tokens", path)
    assert len(load_corpus("tokens", path, vocab_size=60_000).vocab) == 60_000


@pytest.mark.parametrize("largest", [2, 256, 50_257, 65_536])
@pytest.mark.parametrize("n", [40, 600, 3_000, 30_000])
def test_ordinary_ids_are_not_taken_for_a_header(tmp_path, largest, n):
    """Ids are drawn uniformly, or log-uniformly so that large ids are rare."""
    rng = np.random.default_rng(largest + n)
    even, rare = rng.integers(0, largest, n), (largest ** rng.random(n)).astype(int) - 1
    for name, ids in (("even", even), ("rare", rare)):
        path = save(tmp_path / f"{name}.bin", ids)
        assert len(load_corpus("tokens", path, valid_fraction=0.1, test_fraction=0.1).train) > 30


@pytest.mark.slow
def test_a_model_of_ids_trains_scores_and_continues(tmp_path):
    save(tmp_path / "train.bin", np.arange(2000) % 11)
    save(tmp_path / "val.bin", np.arange(200) % 11)
    trained = txl_jax.train(
        "my_tokens:smoke",
        tmp_path / "run",
        {"data.path": str(tmp_path), "model.n_layer": 1, "train.steps": 40, "generate.length": 0},
    )
    record = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert record["results"][0]["ppl"] < 5  # a uniform guess has a perplexity of 11
    assert "there is no test file" in record["label"]
    generated = trained.generate("3 4", length=6, temperature=0)
    assert generated.text.split() == [str(i) for i in generated[0].ids.tolist()]
    score = trained.score("3 4 5\n6 7")
    assert (score.tokens, score.unit, score.bits_per_byte) == (5, "ppl", None)
