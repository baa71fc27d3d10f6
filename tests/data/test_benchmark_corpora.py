"""Each published file format of a benchmark corpus gives the token ids of the authors' code.

A corpus whose text differs from the published text gets a label that says so.
"""

import hashlib
import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import shared_files
from corpus_files import files_in, publish, refused, write_archive, write_folder

from txl_jax.config import ConfigError
from txl_jax.data import prepare
from txl_jax.data.corpus import load_corpus
from txl_jax.data.pieces import Pieces, flat_tokens
from txl_jax.data.sources import lm1b
from txl_jax.data.sources.source import SPLITS, say_once
from txl_jax.data.streams import segments


def ids(split) -> list:
    return [s.tolist() for s in split] if isinstance(split, Pieces) else split.tolist()


def splits_of(corpus) -> dict[str, list]:
    return {split: ids(getattr(corpus, split)) for split in SPLITS}


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, data in members.items():
            whole.writestr(name, data)
    return path


@pytest.mark.parametrize("name", ["wt103", "enwik8", "lm1b"])
def test_vocabulary_and_encodings_are_the_authors(name, tmp_path):
    recorded = shared_files.json_of(f"fixtures/data/{name}.json")
    folder = shared_files.path(f"fixtures/data/{name}")
    corpus = load_corpus(name, folder, cache_dir=tmp_path)
    assert corpus.vocab.symbols == recorded["idx2sym"]
    found = splits_of(corpus)
    for split in SPLITS if name != "lm1b" else ("valid", "test"):
        assert found[split] == recorded[split]
    assert corpus.info["published"] is False
    assert corpus.info["counts_as_published"] is False
    assert "not the published data" in corpus.info["label"]


@pytest.mark.parametrize("name", ["wt103", "enwik8"])
def test_prepared_splits_give_the_authors_batches(name, tmp_path):
    recorded = shared_files.json_of(f"fixtures/data/{name}.json")
    folder = shared_files.path(f"fixtures/data/{name}")
    corpus = load_corpus(name, folder, cache_dir=tmp_path)
    for split in SPLITS:
        batches = recorded[f"{split}_batches_bsz3_bptt5"]
        got = list(segments(getattr(corpus, split), 3, 5, True))
        assert len(got) == len(batches)
        for seg, batch in zip(got, batches, strict=True):
            np.testing.assert_array_equal(seg.inputs[:, : batch["seq_len"]].T, batch["data"])
            np.testing.assert_array_equal(seg.targets[:, : batch["seq_len"]].T, batch["target"])


# --------------------------------------------------------------------------------------
# enwik8.


def wiki_bytes(n=2000) -> bytes:
    rng = np.random.default_rng(3)
    return bytes(rng.choice(np.frombuffer("<page>\né wörld, AB\n".encode(), np.uint8), n).tolist())


def slow_byte_vocab(raw: bytes, dropped: bytes) -> list[str]:
    counts: dict[int, int] = {}
    for value in raw:
        if value not in dropped:
            counts[value] = counts.get(value, 0) + 1
    return [str(v) for v, _ in sorted(counts.items(), key=lambda item: -item[1])]


@pytest.mark.parametrize(("protocol", "dropped"), [("authors", b"\n"), ("bytes", b"")])
def test_enwik8_is_cut_90_5_5_and_keeps_or_drops_newlines(tmp_path, protocol, dropped):
    raw = wiki_bytes()
    (tmp_path / "enwik8").write_bytes(raw)
    corpus = load_corpus("enwik8", tmp_path / "enwik8", protocol=protocol, cache_dir=tmp_path / "c")
    assert corpus.vocab.symbols == slow_byte_vocab(raw, dropped)
    parts = {"train": raw[:1800], "valid": raw[1800:1900], "test": raw[1900:]}
    for split, part in parts.items():
        values = [int(corpus.vocab.symbols[i]) for i in getattr(corpus, split)]
        assert values == [v for v in part if v not in dropped]
        assert corpus.info["bytes"][split] == len(part)
    assert corpus.info["protocol"]["protocol"] == protocol
    assert ("newline bytes left out" in corpus.info["label"]) == (protocol == "authors")
    assert corpus.vocab.unit == ("bpc" if dropped else "bpb")


def test_enwik8_protocol_is_the_authors_unless_named_and_they_share_no_cache(tmp_path):
    (tmp_path / "enwik8").write_bytes(wiki_bytes())
    load = lambda **more: load_corpus("enwik8", tmp_path / "enwik8", cache_dir=tmp_path, **more)
    assert load().vocab == load(protocol="authors").vocab
    assert "10" not in load().vocab.symbols
    assert "10" in load(protocol="bytes").vocab.symbols
    assert len(list(tmp_path.glob("enwik8-byte-*"))) == 2


def as_numbers(part: bytes) -> bytes:
    """Returns the text that the authors' script for enwik8 makes of these bytes.

    Each byte is written as a decimal number, but a line feed stays a line feed.
    """
    return " ".join("\n" if v == 10 else str(v) for v in part).encode()


@pytest.mark.parametrize("protocol", ["authors", "bytes"])
def test_enwik8_is_the_same_from_every_form(tmp_path, protocol):
    raw = wiki_bytes(600_000)  # as numbers, this text is read in several blocks
    parts = {"train": raw[:540_000], "valid": raw[540_000:570_000], "test": raw[570_000:]}
    forms = {
        "file": tmp_path / "a" / "enwik8",
        "folder": tmp_path / "a",
        "zip": zipped(tmp_path / "z" / "enwik8.zip", {"enwik8": raw}),
        "zip folder": tmp_path / "z",
        "raw": write_folder(tmp_path / "r", "{}.txt.raw", parts),
        "raw, short names": write_folder(tmp_path / "s", "{}.raw", parts),
    }
    forms["file"].parent.mkdir()
    forms["file"].write_bytes(raw)
    numbers = {split: as_numbers(part) for split, part in parts.items()}
    forms["prepared"] = write_folder(tmp_path / "p", "{}.txt", numbers)
    write_folder(tmp_path / "p", "{}.txt.raw", dict.fromkeys(SPLITS, b"not read"))
    loaded = {
        form: load_corpus("enwik8", path, protocol=protocol, cache_dir=tmp_path / "c")
        for form, path in forms.items()
    }
    first = loaded["file"]
    for form, corpus in loaded.items():
        assert corpus.vocab == first.vocab, form
        for split in SPLITS:
            np.testing.assert_array_equal(getattr(corpus, split), getattr(first, split), form)
        assert corpus.info["bytes"] == first.info["bytes"], form
    assert loaded["zip"].source_hash == first.source_hash


def test_enwik8_says_what_is_wrong(tmp_path):
    load = lambda path: refused(lambda: load_corpus("enwik8", path, cache_dir=tmp_path / "c"))
    folder = write_folder(tmp_path / "p", "{}.txt", {s: b"104 105 \n 106 300 " for s in SPLITS})
    assert load(folder) == (
        "enwik8: train.txt, valid.txt or test.txt has not only decimal numbers of bytes and white"
        " space, as the authors' script writes them; name the raw file or enwik8.zip in data.path"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert load(empty) == (
        "enwik8: there is none of enwik8, enwik8.zip, train.txt, train.txt.raw, train.raw in"
        f" {empty}; name one of these files, or its folder"
    )
    (empty / "train.txt").write_text("1 2")
    assert load(empty) == f"enwik8: {empty} has train.txt but no valid.txt"


# --------------------------------------------------------------------------------------
# text8.


def test_text8_is_the_same_from_every_form_and_strips_each_split(tmp_path):
    rng = np.random.default_rng(0)
    raw = bytes(rng.choice(np.frombuffer(b"the cat sat on a mat ", np.uint8), 4000).tolist())
    raw = b" " + raw[1:3599] + b"  " + raw[3601:3800] + b" " + raw[3801:-1] + b" "
    parts = {"train": raw[:3600], "valid": raw[3600:3800], "test": raw[3800:]}
    spaced = {s: " ".join(p.strip().decode().replace(" ", "_")).encode() for s, p in parts.items()}
    (tmp_path / "text8").write_bytes(raw)
    forms = [
        tmp_path / "text8",
        zipped(tmp_path / "text8.zip", {"text8": raw}),
        write_folder(tmp_path / "p", "{}.txt", spaced),
        write_folder(tmp_path / "r", "{}.txt.raw", parts),
    ]
    counts: dict[str, int] = {}
    for symbol in " ".join(t.decode() for t in spaced.values()).split():
        counts[symbol] = counts.get(symbol, 0) + 1
    expected = sorted(counts, key=lambda symbol: -counts[symbol])
    for form in forms:
        corpus = load_corpus("text8", form, cache_dir=tmp_path / "c")
        assert corpus.vocab.symbols == expected
        for split, text in spaced.items():
            got = [corpus.vocab.symbols[i] for i in getattr(corpus, split)]
            assert got == text.decode().split()
            assert corpus.vocab.decode(getattr(corpus, split)) == parts[split].strip().decode()
        assert corpus.vocab.unit == "bpc"
    assert corpus.vocab.decode(corpus.vocab.encode("The cat\n")) == "the cat "


def test_text8_that_is_not_in_symbols_is_refused(tmp_path):
    folder = write_folder(tmp_path / "p", "{}.txt", {s: b"a b cat d" for s in SPLITS})
    assert refused(lambda: load_corpus("text8", folder, cache_dir=tmp_path)) == (
        "text8: train.txt, valid.txt or test.txt has not only single characters and white space,"
        " as the authors' script writes them; name the raw file or text8.zip in data.path"
    )
    (tmp_path / "text8").write_text("the café " * 30)
    message = refused(lambda: load_corpus("text8", tmp_path / "text8", cache_dir=tmp_path))
    assert message.startswith("the text has the byte 195, and a letter vocabulary only ASCII")


# --------------------------------------------------------------------------------------
# WikiText.

WIKI = {
    "train": b" \n = The title = \n the <unk> The \n",
    "valid": b" the title \n",
    "test": b" <unk> = \n",
}
OWN_WORD = {**WIKI, "valid": b" the title the \n", "test": b" new = \n"}


def test_wikitext_2_as_published(tmp_path):
    folder = shared_files.path("data/wikitext2")
    for split in ("valid", "test"):
        os.symlink(folder / f"wiki.{split}.tokens", tmp_path / f"wiki.{split}.tokens")
    os.symlink(folder / "wiki.valid.tokens", tmp_path / "wiki.train.tokens")
    corpus = load_corpus("wt2", tmp_path, cache_dir=tmp_path / "cache")
    assert [len(corpus.valid), len(corpus.test)] == [217_646, 245_569]
    assert corpus.vocab.symbols[0] == "<eos>"
    text = (folder / "wiki.test.tokens").read_text()
    assert corpus.vocab.decode(corpus.test).split() == text.split()
    assert corpus.info["lines"]["test"] == 4358
    assert "not the published data" in corpus.info["label"]  # train is a link to the valid file


def test_wikitext_vocabulary_is_of_training_for_103_and_of_all_for_2(tmp_path):
    folder = write_folder(tmp_path / "t", "wiki.{}.tokens", OWN_WORD)
    small = load_corpus("wt2", folder, cache_dir=tmp_path)
    assert small.vocab.symbols == ["<eos>", "=", "the", "The", "title", "<unk>", "new"]
    large = load_corpus("wt103", folder, cache_dir=tmp_path)
    assert large.vocab.symbols == ["<eos>", "=", "The", "title", "the", "<unk>"]
    assert large.train.tolist() == [0, 1, 2, 3, 1, 0, 4, 5, 2, 0]
    assert large.test.tolist() == [5, 1, 0]


@pytest.mark.parametrize("name", ["wt103", "wt2"])
def test_wikitext_is_the_same_from_every_form(name, tmp_path):
    inner = {"wt103": "wikitext-103", "wt2": "wikitext-2"}[name]
    members = {f"{inner}/wiki.{split}.tokens": text for split, text in WIKI.items()}
    forms = [
        zipped(tmp_path / "a.zip", members),
        write_folder(tmp_path / "b" / inner, "wiki.{}.tokens", WIKI),
        write_folder(tmp_path / "c", "{}.txt", WIKI),
    ]
    forms[1] = tmp_path / "b"
    loaded = [load_corpus(name, form, cache_dir=tmp_path / "cache") for form in forms]
    assert len({corpus.source_hash for corpus in loaded}) == 1
    assert [corpus.info["published"] for corpus in loaded] == [False] * 3
    assert "the archive's md5 differs" in loaded[0].info["label"]


def test_a_folder_with_the_published_counts_is_labelled_so(tmp_path, monkeypatch):
    counts = {("tokens", "train"): 9, ("tokens", "valid"): 3, ("tokens", "test"): 3}
    publish(monkeypatch, "wt2", counts=counts)
    folder = write_folder(tmp_path / "t", "{}.txt", WIKI)
    corpus = load_corpus("wt2", folder, cache_dir=tmp_path)
    assert corpus.info["tokens"] == {"train": 10, "valid": 3, "test": 3}
    counts["tokens", "train"] = 10
    corpus = load_corpus("wt2", folder, cache_dir=tmp_path / "other")
    assert corpus.info["counts_as_published"] is True
    assert corpus.info["label"].endswith("for which no hash is published; counts as published")


def test_published_files_with_other_counts_are_refused(tmp_path, monkeypatch):
    archive = zipped(tmp_path / "a.zip", {f"wiki.{s}.tokens": text for s, text in WIKI.items()})
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    publish(monkeypatch, "wt2", counts={("tokens", "valid"): 4}, archive_md5=md5)
    message = refused(lambda: load_corpus("wt2", archive, cache_dir=tmp_path / "c"))
    assert "has 3 tokens in valid instead of 4, though its files are the published ones" in message
    assert not list((tmp_path / "c").glob("wt2-*"))


def test_the_counts_are_told(tmp_path, capsys):
    say_once.cache_clear()  # say_once would omit a text that another test has printed
    load_corpus("wt2", write_folder(tmp_path / "t", "{}.txt", WIKI), cache_dir=tmp_path)
    told = capsys.readouterr().err
    assert (
        "10 / 3 / 3 tokens (train / valid / test), 6 symbols; not as published: 10 tokens" in told
    )


# --------------------------------------------------------------------------------------
# One Billion Word.

SHARDS = {"00001": b"the cat\na zebra sat\n", "00002": b"\xc2\xa0 cat the .\nthe"}
HELD_OUT = b"the .\ncat cat zebra\n"
VOCAB = "the 9\n<S> 8\n<UNK> 7\n. 6\ncat 5\nthe 4\nsat 3\na 2\n"
SYMBOLS = ["the", "<S>", "<UNK>", ".", "cat", "sat", "a"]


def lm1b_members() -> dict[str, bytes]:
    shards = {f"{lm1b.BASE}/{lm1b.TRAIN}/news.en-{n}-of-00100": t for n, t in SHARDS.items()}
    other = f"{lm1b.BASE}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050"
    return {**shards, f"{lm1b.BASE}/{lm1b.HELD_OUT}": HELD_OUT, other: b"not read\n"}


def lm1b_folder(folder: Path) -> Path:
    for name, data in lm1b_members().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / lm1b.VOCAB).write_text(VOCAB)
    return folder


def test_lm1b_is_the_same_from_every_form(tmp_path):
    outer = lm1b_folder(tmp_path / "outer")
    authors = lm1b_folder(tmp_path / "authors")
    for split in ("valid", "test"):
        (authors / f"{split}.txt").write_bytes(HELD_OUT)
    (tmp_path / lm1b.VOCAB).write_text(VOCAB)
    archive = write_archive(tmp_path / "lm1b.tar.gz", lm1b_members())
    forms = [outer, outer / lm1b.BASE, authors, archive]
    loaded = [load_corpus("lm1b", form, cache_dir=tmp_path / "cache") for form in forms]
    assert len({corpus.source_hash for corpus in loaded}) == 1
    corpus = loaded[0]
    assert corpus.vocab.symbols == SYMBOLS
    assert ids(corpus.train) == [[1, 0, 4, 1], [1, 6, 2, 5, 1], [1, 4, 0, 3, 1], [1, 0, 1]]
    assert ids(corpus.valid) == ids(corpus.test) == [[1, 0, 3, 1], [1, 4, 4, 2, 1]]
    assert corpus.info["tokens"] == {"train": 13, "valid": 7, "test": 7}
    assert corpus.info["lines"]["train"] == 4
    assert "valid and test are the same held-out file" in corpus.info["label"]
    assert "the archive's sha256 differs" in loaded[-1].info["label"]
    assert corpus.vocab.unit == "ppl"


def test_the_double_protocol_of_lm1b_is_tfs_stream(tmp_path):
    folder = lm1b_folder(tmp_path / "lm")
    load = lambda **more: load_corpus("lm1b", folder, cache_dir=tmp_path / "cache", **more)
    corpus = load(protocol="double")
    assert corpus.vocab.symbols == SYMBOLS
    assert ids(corpus.train) == [
        [1, 0, 4, 1, 1],
        [1, 6, 2, 5, 1, 1],
        [1, 4, 0, 3, 1, 1],
        [1, 0, 1, 1],
    ]
    assert ids(corpus.valid) == ids(corpus.test) == [[1, 0, 3, 1, 1], [1, 4, 4, 2, 1, 1]]
    text = [1, 0, 4, 1, 1, 6, 2, 5, 1, 1, 4, 0, 3, 1, 1, 0, 1]  # by hand, without the last <S>
    assert flat_tokens(corpus.train).tolist() == [*text, 1]
    assert corpus.info["tokens"] == {"train": 17, "valid": 9, "test": 9}
    assert corpus.info["protocol"]["protocol"] == "double"
    assert "TF's stream (two <S> between sentences" in corpus.info["label"]
    single = load()
    assert single.info["protocol"]["protocol"] == "authors"
    assert "the authors' protocol (one <S> between" in single.info["label"]
    assert ids(load(protocol="authors").train) == ids(single.train) != ids(corpus.train)
    assert len(list((tmp_path / "cache").glob("lm1b-sentence-*"))) == 2


def slow_tf_stream(text: bytes, symbols: list[str]) -> list[int]:
    """Returns the ids of a text in the form in which the authors' TensorFlow code reads sentences.

    That code (``encode_sents`` with ``add_double_eos``) puts ``<S>`` before and after a sentence,
    and then joins all sentences. ``symbols[i]`` is the word of id i; other words are ``<UNK>``.
    """
    stream = []
    for line in text.decode().split("\n"):
        for word in ["<S>", *line.strip(" ").split(" "), "<S>"]:
            stream.append(symbols.index(word if word in symbols else "<UNK>"))
    return stream


def test_the_double_protocol_is_tfs_rule_over_many_blocks_of_text(tmp_path):
    rng = np.random.default_rng(0)
    lines = [
        " ".join(rng.choice(["the", "cat", "sat", "<S>", "zebra"], n)) for n in [1, *[7] * 9999]
    ]
    text = "\n".join(lines).encode()
    assert len(text) > 1 << 18
    folder = lm1b_folder(tmp_path / "lm")
    for split in ("valid", "test"):
        (folder / f"{split}.txt").write_bytes(text)
    corpus = load_corpus("lm1b", folder, protocol="double", cache_dir=tmp_path / "cache")
    assert flat_tokens(corpus.valid).tolist() == [*slow_tf_stream(text, SYMBOLS), 1]
    sizes = [len(line.split()) + 3 for line in lines]
    assert [len(sentence) for sentence in corpus.valid] == sizes


def test_lm1b_is_a_lazy_sequence_over_a_memory_map(tmp_path):
    corpus = load_corpus("lm1b", lm1b_folder(tmp_path), cache_dir=tmp_path / "c")
    assert isinstance(corpus.train.ids, np.memmap)
    assert isinstance(corpus.train.starts, np.memmap)
    assert corpus.train[1].base is not None
    assert corpus.train[-1].tolist() == [1, 0, 1]
    assert ids(corpus.train[1:3]) == ids(corpus.train)[1:3]
    assert [s.tolist() for s in corpus.train[::2]] == ids(corpus.train)[::2]
    assert len(corpus.train[3:1]) == 0
    with pytest.raises(IndexError, match="sentence 4: there are 4 sentences"):
        corpus.train[4]


def test_lm1b_says_what_is_missing(tmp_path):
    load = lambda path: refused(lambda: load_corpus("lm1b", path, cache_dir=tmp_path / "c"))
    folder = lm1b_folder(tmp_path / "lm")
    (folder / lm1b.VOCAB).unlink()
    message = load(folder)
    assert message.startswith(f"lm1b: there is no 1b_word_vocab.txt in {folder} and none in")
    assert message.endswith(lm1b.VOCAB_URL)
    (folder / lm1b.VOCAB).write_text("<S>\n<UNK>\n\nthe\n")
    assert load(folder) == f"{folder / lm1b.VOCAB}: line 3 has no symbol; write one there"
    (folder / lm1b.VOCAB).write_text("<S>\nthe\n")
    message = load(folder)
    assert message == f"{folder / lm1b.VOCAB}: a sentence vocabulary must have the symbol <UNK>"
    (folder / lm1b.VOCAB).write_text(VOCAB)
    (folder / lm1b.BASE / lm1b.HELD_OUT).unlink()
    assert load(folder).startswith("lm1b: there is no valid.txt and no heldout-")


# --------------------------------------------------------------------------------------
# Downloads and archives.


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_a_raw_file_is_downloaded_once_and_checked(name, tmp_path, served, monkeypatch):
    folder, url = served
    raw = b"the cat sat on a mat " * 40
    zipped(folder / f"{name}.zip", {name: raw})
    at = f"{url}/{name}.zip"
    publish(monkeypatch, name, url=at, md5={name: "0" * 32})
    load = lambda: load_corpus(name, cache_dir=tmp_path / "c")
    md5 = hashlib.md5(raw).hexdigest()
    assert refused(load) == (
        f"{at}: the md5 of {name} in it is not the published one; the download was deleted; get"
        " the file from elsewhere for data.path"
    )
    assert not files_in(tmp_path / "c")
    publish(monkeypatch, name, md5={name: md5})
    # The md5 now agrees with the published one, but the token counts do not.
    assert "though its files are the published ones" in refused(load)
    monkeypatch.setattr(prepare, "_wrong_counts", lambda *args: [])
    assert load().info["published"] is True
    (folder / f"{name}.zip").unlink()
    assert load().info["label"].endswith("published data (md5 checked)")
    (tmp_path / "c" / "downloads" / name / name).write_bytes(raw + b"more")
    fix = f"delete the folder {tmp_path}/c/downloads/{name}, and the next run downloads it again"
    assert refused(load).endswith(fix)
    origin = tmp_path / "c" / "downloads" / name / "origin.json"
    for damage in (lambda: origin.write_text("{"), origin.unlink):
        damage()
        message = refused(load)
        assert message.startswith(f"{origin}: cannot be read (")
        assert message.endswith(fix)


def test_wikitext_is_downloaded_once_and_its_hash_is_enforced(tmp_path, served, monkeypatch):
    folder, url = served
    archive = zipped(folder / "w.zip", {f"w/wiki.{s}.tokens": text for s, text in WIKI.items()})
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    known = lambda md5: publish(monkeypatch, "wt2", counts={}, archive_md5=md5, url=f"{url}/w.zip")
    load = lambda: load_corpus("wt2", cache_dir=tmp_path / "c")
    known("0" * 32)
    assert refused(load) == (
        f"{url}/w.zip: its hash is md5:{md5}, and must be md5:{'0' * 32}; the download was deleted"
    )
    assert not files_in(tmp_path / "c")
    known(md5)
    assert load().info["published"] is True
    archive.unlink()
    assert load().info["published"] is True
    damaged = tmp_path / "c" / "downloads" / "wt2" / "wiki.test.tokens"
    damaged.write_bytes(b" = = \n")
    message = refused(load)
    fault = "has changed since it was downloaded"
    fix = f"delete the folder {damaged.parent}, and the next run downloads it again"
    assert message == f"{damaged}: {fault}; {fix}"


def test_lm1b_is_downloaded_with_its_vocabulary(tmp_path, served, monkeypatch):
    folder, url = served
    archive = write_archive(folder / "l.tar.gz", lm1b_members())
    (folder / lm1b.VOCAB).write_text(VOCAB)
    monkeypatch.setattr(lm1b, "URL", f"{url}/l.tar.gz")
    monkeypatch.setattr(lm1b, "VOCAB_URL", f"{url}/{lm1b.VOCAB}")
    monkeypatch.setattr(lm1b, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(lm1b, "COUNTS", {})
    load = lambda: load_corpus("lm1b", cache_dir=tmp_path / "c")
    corpus = load()
    assert corpus.vocab.symbols == SYMBOLS
    assert corpus.info["published"] is True
    assert "no hash of the vocabulary is published" in corpus.info["label"]
    archive.unlink()
    (folder / lm1b.VOCAB).unlink()
    assert ids(load().valid) == ids(corpus.valid)
    (tmp_path / "c" / "downloads" / "lm1b-vocab" / lm1b.VOCAB).write_text(VOCAB + "more\n")
    assert "has changed since it was downloaded" in refused(load)


@pytest.mark.parametrize("name", ["../enwik8", "/tmp/enwik8"])
def test_a_file_of_a_zip_is_never_written_outside_of_the_cache(tmp_path, name):
    (tmp_path / "in").mkdir()
    zipped(tmp_path / "in" / "e.zip", {name: wiki_bytes()})
    load_corpus("enwik8", tmp_path / "in" / "e.zip", cache_dir=tmp_path / "a" / "c")
    written = {p for p in files_in(tmp_path) if p.name == "enwik8"}
    assert written == set((tmp_path / "a" / "c" / "unpacked").rglob("enwik8"))


def test_a_link_in_a_zip_is_not_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "e.zip", "w") as whole:
        member = zipfile.ZipInfo("a/enwik8")
        member.external_attr = (stat.S_IFLNK | 0o644) << 16
        whole.writestr(member, b"target")
    message = refused(lambda: load_corpus("enwik8", tmp_path / "e.zip", cache_dir=tmp_path / "c"))
    assert message == f"{tmp_path / 'e.zip'}: there is no enwik8 in this archive"


def test_a_damaged_zip_is_refused(tmp_path):
    path = zipped(tmp_path / "e.zip", {"enwik8": wiki_bytes()})
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)
    message = refused(lambda: load_corpus("enwik8", path, cache_dir=tmp_path / "c"))
    assert message.startswith(f"{path}: cannot be unpacked (")


def test_only_the_files_that_are_needed_are_taken_of_an_archive(tmp_path):
    members = {**lm1b_members(), "secrets/passwd": b"x"}
    with tarfile.open(tmp_path / "l.tar.gz", "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    (tmp_path / lm1b.VOCAB).write_text(VOCAB)
    load_corpus("lm1b", tmp_path / "l.tar.gz", cache_dir=tmp_path / "c")
    taken = sorted(p.name for p in files_in(tmp_path / "c" / "unpacked"))
    assert taken == [*(f"news.en-{n}-of-00100" for n in SHARDS), os.path.basename(lm1b.HELD_OUT)]


# --------------------------------------------------------------------------------------
# Settings.


@pytest.mark.parametrize("name", ["enwik8", "text8", "wt103", "wt2", "lm1b"])
def test_a_benchmark_has_one_vocabulary(name, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"data\.vocab = 'char': is only for .* or 'text', not '{name}'"
    ):
        load_corpus(name, tmp_path, vocab="char")


@pytest.mark.parametrize(
    ("name", "protocol"),
    [("text8", "bytes"), ("text8", "authors"), ("lm1b", "bytes"), ("enwik8", "double")],
)
def test_a_protocol_is_for_the_corpora_that_have_it(name, protocol, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_corpus(name, tmp_path, protocol=protocol)
    assert str(caught.value) == (
        f"config key data.protocol = {protocol!r}: is no protocol of data.name={name!r};"
        " 'enwik8' has 'authors' and 'bytes', 'lm1b' has 'authors' and 'double'"
    )
