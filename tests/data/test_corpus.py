"""A corpus is prepared once and then read from its cache folder; damaged files are detected."""

import concurrent.futures
import multiprocessing
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import shared_files
from corpus_files import PTB, ptb_archive, refused, write_folder

from txl_jax import progress
from txl_jax.config import ConfigError, DataConfig
from txl_jax.data import corpus as corpus_module
from txl_jax.data import prepare
from txl_jax.data.corpus import corpus_from_config, load_corpus
from txl_jax.data.pieces import flat_tokens
from txl_jax.data.sources import cache as cache_files
from txl_jax.data.sources import source
from txl_jax.data.sources.source import BLOCK, SPLITS

BOOK = "".join(f"line {i % 7} of the boók\n" for i in range(200))


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    return path


def folders(cache: Path) -> list[Path]:
    others = ("downloads", "unpacked")
    return sorted(p for p in cache.iterdir() if p.is_dir() and p.name not in others)


def text_of(corpus) -> str:
    """Returns the decoded text of all three splits, one after another."""
    whole = np.concatenate([flat_tokens(getattr(corpus, split)) for split in SPLITS])
    return corpus.vocab.decode(whole)


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_the_tokens_are_the_text(book, tmp_path, kind):
    corpus = load_corpus("text", book, vocab=kind, cache_dir=tmp_path / "cache")
    assert text_of(corpus) == BOOK
    for split in SPLITS:
        tokens = getattr(corpus, split)
        assert isinstance(tokens, np.memmap)
        assert tokens.dtype == corpus.vocab.dtype == np.uint8
        assert corpus.info["tokens"][split] == len(tokens)
        decoded = corpus.vocab.decode(tokens)
        assert corpus.info["bytes"][split] == len(decoded.encode())
        if kind == "word":
            assert corpus.info["lines"][split] == decoded.count("\n")
            assert corpus.info["words"][split] == len(decoded.split())
    assert sum(corpus.info["bytes"].values()) == len(BOOK.encode())
    assert sum(corpus.info["words"].values()) == len(BOOK.split())
    assert corpus.vocab.kind == corpus.info["protocol"]["vocab"] == kind
    assert corpus.info["label"] == str(book)
    assert corpus.info["published"] is False


def test_text_of_many_blocks_keeps_its_order(tmp_path):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 5 * BLOCK + 77, np.uint8)
    (tmp_path / "noise.bin").write_bytes(data.tobytes())
    corpus = load_corpus("text", tmp_path / "noise.bin", vocab="byte", cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.valid, corpus.test]), data)
    assert corpus.info["words"]["train"] == len(corpus.train.tobytes().split())


def test_ptb_as_published(tmp_path):
    folder = shared_files.path("data/ptb")
    corpus = load_corpus("ptb", folder, cache_dir=tmp_path)
    assert [len(getattr(corpus, split)) for split in SPLITS] == [929_589, 73_760, 82_430]
    assert len(corpus.vocab) == 10_000
    assert corpus.vocab.symbols[:4] == ["<eos>", "the", "<unk>", "n"]
    assert corpus.vocab.unit == "ppl"
    assert corpus.info["published"] is True
    text = (folder / "ptb.test.txt").read_text()
    assert corpus.vocab.decode(corpus.test).split() == text.lower().split()
    assert corpus.info["counts_as_published"] is True
    assert corpus.info["bytes"]["test"] == len(text.encode())


def test_ptb_in_other_tokens_has_other_counts(tmp_path):
    corpus = load_corpus("ptb", shared_files.path("data/ptb"), vocab="byte", cache_dir=tmp_path)
    assert len(corpus.test) == 449_945
    assert corpus.info["published"] is True
    assert corpus.info["counts_as_published"] is None


def test_what_takes_long_is_shown(book, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "DELAY", 0)
    load_corpus("text", book, vocab="word", cache_dir=tmp_path / "cache")
    shown = capsys.readouterr()
    for what in ("counting train", "counting test", "encoding valid"):
        assert f"text: {what}" in shown.err
    assert shown.out == ""


def test_ptb_counts_all_splits_and_labels_other_data(tmp_path):
    corpus = load_corpus("ptb", ptb_archive(tmp_path / "a.tgz"), cache_dir=tmp_path / "cache")
    assert corpus.vocab.symbols == ["<eos>", "the", "<unk>", "dog", "cat", "a"]
    assert corpus.test.tolist() == [5, 3, 0]
    assert corpus.info["published"] is False
    assert "not the published data" in corpus.info["label"]


def test_the_last_line_of_a_word_corpus_is_ended(tmp_path):
    folder = write_folder(tmp_path / "t", "{}.txt", {**PTB, "test": b"the dog\nthe dog"})
    corpus = load_corpus("ptb", folder, cache_dir=tmp_path)
    assert corpus.vocab.decode(corpus.test) == "the dog\nthe dog\n"
    assert corpus.info["bytes"]["test"] == 15
    assert corpus.info["lines"]["test"] == 2


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_stdlib(tmp_path, kind):
    corpus = load_corpus("stdlib", vocab=kind, cache_dir=tmp_path)
    start = corpus.vocab.decode(corpus.train[:100])
    assert len(start) == 100
    assert corpus.info["python"] == sys.version.split()[0]
    assert corpus.vocab.unit == ("bpb" if kind == "byte" else "bpc")


# --------------------------------------------------------------------------------------
# The cache.


def test_a_prepared_corpus_is_read_again_and_not_prepared_again(book, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    one = load_corpus("text", book, cache_dir=cache)
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*")}

    def not_now(*args):
        raise AssertionError("prepared again")

    monkeypatch.setattr(corpus_module, "prepare", not_now)
    two = corpus_from_config(DataConfig(name="text", path=str(book), cache_dir=str(cache)))
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == before
    assert text_of(one) == text_of(two)
    assert one.vocab == two.vocab
    assert one.source_hash == two.source_hash
    assert one.info == two.info


def test_other_text_or_another_protocol_is_another_folder(book, tmp_path):
    cache = tmp_path / "cache"
    other = tmp_path / "other.txt"
    other.write_text(BOOK.replace("line 3", "line 4"))
    copy = tmp_path / "copy.txt"
    copy.write_text(BOOK)
    settings: list[tuple[Path, dict]] = [
        (book, {}),
        (other, {}),
        (book, {"vocab": "char"}),
        (book, {"vocab": "word"}),
        (book, {"valid_fraction": 0.1}),
        (book, {"test_fraction": 0.1}),
    ]
    loaded = [load_corpus("text", path, cache_dir=cache, **more) for path, more in settings]
    assert len(folders(cache)) == len(settings)
    assert text_of(loaded[0]) == BOOK
    assert text_of(loaded[1]) == other.read_text()
    assert loaded[0].source_hash != loaded[1].source_hash
    load_corpus("text", copy, cache_dir=cache)
    assert len(folders(cache)) == len(settings)
    book.write_text(other.read_text() + "more\n")
    assert text_of(load_corpus("text", book, cache_dir=cache)) == other.read_text() + "more\n"


def test_another_version_of_this_code_is_another_folder(book, tmp_path, monkeypatch):
    load_corpus("text", book, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(corpus_module, "CODE_VERSION", 10**6)
    load_corpus("text", book, cache_dir=tmp_path / "cache")
    assert len(folders(tmp_path / "cache")) == 2


def test_where_the_cache_is(book, tmp_path, monkeypatch):
    monkeypatch.setenv("TXL_DATA_DIR", str(tmp_path / "variable"))
    load_corpus("text", book)
    assert len(folders(tmp_path / "variable")) == 1
    monkeypatch.delenv("TXL_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    load_corpus("text", book)
    assert len(folders(tmp_path / ".cache" / "txl_jax")) == 1


def test_an_error_while_preparing_leaves_nothing(book, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with monkeypatch.context() as broken:
        broken.setattr(cache_files, "rename_folder", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_corpus("text", book, cache_dir=cache)
    assert not folders(cache)
    assert text_of(load_corpus("text", book, cache_dir=cache)) == BOOK


def killed_while_preparing(book, cache, ready):
    def wait(*args):
        ready.set()
        time.sleep(60)

    cache_files.rename_folder = wait
    load_corpus("text", book, cache_dir=cache)


def test_a_killed_preparation_is_never_used(book, tmp_path):
    cache = tmp_path / "cache"
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=killed_while_preparing, args=(book, cache, ready))
    process.start()
    assert ready.wait(60)
    process.kill()
    process.join()
    (left,) = folders(cache)
    assert left.suffix == ".unfinished"
    assert (left / "corpus.json").exists()
    (left / "train.npy").write_bytes(b"rubbish")
    assert text_of(load_corpus("text", book, cache_dir=cache)) == BOOK
    assert len(folders(cache)) == 1
    assert not left.exists()


def test_what_another_process_is_preparing_is_waited_for(book, tmp_path):
    cache = tmp_path / "cache"
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=killed_while_preparing, args=(book, cache, ready))
    process.start()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            assert ready.wait(60)
            (working,) = folders(cache)
            waiting = pool.submit(load_corpus, "text", book, cache_dir=cache)
            time.sleep(0.5)
            assert not waiting.done()
            assert (working / "corpus.json").exists()
        finally:
            process.kill()
            process.join()
        assert text_of(waiting.result(60)) == BOOK
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("name", ["thesis.unfinished", "text-byte-0123.tmp", "thesis.part"])
@pytest.mark.parametrize("inside", [".", "unpacked", "downloads"])
def test_a_folder_of_the_users_in_the_cache_is_never_removed(book, tmp_path, inside, name):
    mine = tmp_path / "cache" / inside / name
    mine.mkdir(parents=True)
    (mine / "chapter.tex").write_text("mine")
    load_corpus("text", book, cache_dir=tmp_path / "cache")
    assert (mine / "chapter.tex").read_text() == "mine"


def prepare_together(book, cache, start):
    start.wait()
    load_corpus("text", book, vocab="word", cache_dir=cache)


@pytest.mark.integration
def test_two_processes_may_prepare_at_once(book, tmp_path):
    cache = tmp_path / "cache"
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(2)
    both = [spawn.Process(target=prepare_together, args=(book, cache, start)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert len(folders(cache)) == 1
    assert text_of(load_corpus("text", book, vocab="word", cache_dir=cache)) == BOOK


def test_text_that_changes_while_it_is_prepared_is_refused(book, tmp_path, monkeypatch):
    write = prepare._write

    def slow_write(*args):
        book.write_text("other " + BOOK)
        return write(*args)

    monkeypatch.setattr(prepare, "_write", slow_write)
    message = refused(lambda: load_corpus("text", book, cache_dir=tmp_path / "cache"))
    assert message == f"{book}: changed while it was being prepared; try again"


# --------------------------------------------------------------------------------------
# Damage and errors.


def flipped(content):
    return content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]


DAMAGES = {
    "one flipped byte": flipped,
    "truncated": lambda content: content[:-1],
    "missing": lambda content: None,
}


def damage(path, how):
    content = DAMAGES[how](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["train.npy", "vocab.json", "corpus.json"])
def test_a_damaged_file_is_found_and_the_corpus_prepared_again(book, tmp_path, name, how, capsys):
    cache = tmp_path / "cache"
    load_corpus("text", book, vocab="char", cache_dir=cache)
    (folder,) = folders(cache)
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    if name == "corpus.json":  # corpus.json has hashes of the other files, but not of itself
        (folder / name).write_text("{" if how == "truncated" else "[]")
    else:
        damage(folder / name, how)
    capsys.readouterr()

    assert text_of(load_corpus("text", book, vocab="char", cache_dir=cache)) == BOOK
    told = capsys.readouterr().err
    if name == "corpus.json":
        assert told.startswith(f"{folder}: the prepared corpus is damaged (")
    else:
        assert f"{folder / name}" in told
    assert ": preparing it again\n" in told
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good
    assert folders(cache) == [folder]


def test_damage_that_cannot_be_removed_is_an_error(book, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    load_corpus("text", book, cache_dir=cache)
    (folder,) = folders(cache)
    damage(folder / "train.npy", "truncated")

    def read_only(path, is_damaged):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(corpus_module, "remove_damaged", read_only)
    message = refused(lambda: load_corpus("text", book, cache_dir=cache))
    assert message.startswith(f"cannot write in the cache folder {cache} (Permission denied); set ")


def test_what_another_process_has_prepared_again_meanwhile_is_used(book, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    load_corpus("text", book, cache_dir=cache)
    (folder,) = folders(cache)
    damage(folder / "train.npy", "truncated")
    remove, made = corpus_module.remove_damaged, []

    def second(*arguments):
        monkeypatch.setattr(corpus_module, "remove_damaged", remove)
        load_corpus("text", book, cache_dir=cache)
        made.append(folder.stat().st_ino)
        remove(*arguments)

    monkeypatch.setattr(corpus_module, "remove_damaged", second)
    assert text_of(load_corpus("text", book, cache_dir=cache)) == BOOK
    assert made == [folder.stat().st_ino]


def test_a_damaged_corpus_of_a_foreign_vocabulary_is_prepared_again_with_it(book, tmp_path):
    cache, longer = tmp_path / "cache", tmp_path / "longer.txt"
    longer.write_text(BOOK + "~" * 50)
    vocab = load_corpus("text", longer, vocab="char", cache_dir=cache).vocab
    config = DataConfig(name="text", path=str(book), vocab="char", cache_dir=str(cache))
    first = corpus_from_config(config, vocab)
    assert first.info["foreign_vocab"]
    for path in folders(cache):
        damage(path / "train.npy", "truncated")
    again = corpus_from_config(config, vocab)
    assert again.vocab.symbols == vocab.symbols
    np.testing.assert_array_equal(again.train, first.train)


def test_text_that_is_not_utf8_needs_bytes_and_says_that_it_has_them(tmp_path, capsys):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"abc\n" * 100 + "é\n".encode("latin-1") + b"abc\n" * 100)
    for kind in ("char", "word"):
        assert refused(lambda k=kind: load_corpus("text", path, vocab=k, cache_dir=tmp_path)) == (
            f"{path}, byte 400: not UTF-8 (invalid continuation byte); convert the text to UTF-8,"
            " for example by  iconv -f CP1252 -t UTF-8 FILE > NEW, or use"
            " data.vocab='byte' for any bytes"
        )
    mixed = tmp_path / "mixed.txt"  # mostly UTF-8: converting it from CP1252 would damage it
    mixed.write_bytes("cafés\n".encode() * 100 + b"caf\xe9\n")
    message = refused(lambda: load_corpus("text", mixed, vocab="char", cache_dir=tmp_path))
    assert "remove such bytes, for example by  iconv -c -f UTF-8 -t UTF-8 FILE > NEW, or" in message
    for _ in range(2):  # the second time, the cache is read
        source.say_once.cache_clear()  # notes are printed again, as in a new process
        assert load_corpus("text", path, cache_dir=tmp_path).train[400] == 0xE9
        (note,) = capsys.readouterr().err.splitlines()[1:]
        place = "train split, byte 400 is 0xe9"
        assert note.startswith(f"note: {path}: is not UTF-8 ({place}), and is read as bytes; ")
        assert note.endswith("FILE > NEW, or give data.vocab=byte")
    load_corpus("text", path, vocab="byte", cache_dir=tmp_path)
    assert "note" not in capsys.readouterr().err


@pytest.mark.parametrize("at", [0, 3, BLOCK - 1, BLOCK, BLOCK + 1])
def test_characters_between_blocks_are_utf8_and_the_first_wrong_byte_is_named(at, tmp_path, capsys):
    text = "é" * BLOCK
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    load_corpus("text", tmp_path / "x.txt", cache_dir=tmp_path)
    assert "note" not in capsys.readouterr().err
    raw = bytearray(text.encode())
    raw[at] = 0xFF
    (tmp_path / "x.txt").write_bytes(raw)
    load_corpus("text", tmp_path / "x.txt", cache_dir=tmp_path)
    wrong = at if at % 2 == 0 else at - 1  # offset of the damaged character's first byte
    assert f"byte {wrong} is 0x{raw[wrong]:02x}" in capsys.readouterr().err


def test_what_is_said_of_a_text_does_not_depend_on_the_cache(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"text": "a cat\\r\\n"}\n' * 40 + '{"text": "x"}\n')
    said = []
    for _ in range(2):
        source.say_once.cache_clear()  # notes are printed again, as in a new process
        load_corpus("text", tmp_path, cache_dir=tmp_path / "c")
        load_corpus("text", tmp_path, cache_dir=tmp_path / "c")  # a second load prints nothing
        said.append(capsys.readouterr().err.splitlines())
    assert said[0] == said[1]
    files, sizes, crlf, short = said[0]
    assert files.startswith(f"{tmp_path}: train = train.jsonl")
    assert sizes.endswith("256 symbols; held out from the end: 5% valid, 5% test")
    assert crlf.endswith(
        "40 line ends are CRLF (Windows); \\r is a part of the text, and prompts need it too"
    )
    assert short.endswith(
        "test split: documents of one token, which has no target, are left out: 1"
    )


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("form", ["file", "folder", "splits", "files"])
@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_a_text_with_byte_order_marks_is_the_text_without_them(tmp_path, kind, form):
    """A byte order mark at the start of each file changes neither the text nor the corpus hash."""
    folders = [tmp_path / "plain", tmp_path / "marked"]
    names = ("train", "valid", "test") if form == "splits" else ("1", "2", "3", "4")
    for folder, mark in zip(folders, (b"", BOM), strict=True):
        folder.mkdir()
        for n, name in enumerate(names[: 1 if form == "file" else 9]):
            (folder / f"{name}.txt").write_bytes(mark + BOOK[n:].encode())
        (folder / "0.txt").write_bytes(mark)  # an empty file
    paths = [folder / ("1.txt" if form == "file" else "") for folder in folders]
    if form in ("file", "splits"):
        [(folder / "0.txt").unlink() for folder in folders]
    settings = {"vocab": kind, "document_files": form == "files", "cache_dir": tmp_path / "cache"}
    plain, marked = (load_corpus("text", path, **settings) for path in paths)
    assert "\ufeff" not in text_of(marked)
    assert text_of(marked) == text_of(plain)
    assert marked.vocab == plain.vocab
    assert marked.source_hash == plain.source_hash
    assert marked.info["bytes"] == plain.info["bytes"]


def test_a_benchmark_with_a_byte_order_mark_has_no_word_with_it(tmp_path):
    texts = {split: BOM + text for split, text in PTB.items()}
    folder = write_folder(tmp_path / "t", "ptb.{}.txt", texts)
    vocab = load_corpus("ptb", folder, cache_dir=tmp_path).vocab
    assert not any("\ufeff" in symbol for symbol in vocab.symbols)


WIDE = {
    "utf-16-le": "UTF-16 (little-endian)",
    "utf-16-be": "UTF-16 (big-endian)",
    "utf-32-le": "UTF-32 (little-endian)",
    "utf-32-be": "UTF-32 (big-endian)",
}
LANGUAGES = {
    "English": "The cat sat on the mat.\n",
    "Russian": "Кот сидел на ковре, и пёс тоже.\n",
    "Hindi": "बिल्ली चटाई पर बैठी थी।\n",
    "Chinese": "猫坐在垫子上，狗也坐在垫子上。\r\n",
    "Japanese": "猫がマットの上に座った。\n",
}


@pytest.mark.parametrize("form", ["file", "splits", "documents"])
@pytest.mark.parametrize("kind", ["char", "word"])
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("encoding", WIDE)
def test_utf_16_and_32_without_a_mark_are_refused_by_name(tmp_path, encoding, language, kind, form):
    content = (LANGUAGES[language] * 50).encode(encoding)
    names = ("train.txt", "valid.txt", "test.txt") if form == "splits" else ("wide.txt",)
    folder = write_folder(tmp_path / "t", "{}", dict.fromkeys(names, content))
    settings = DataConfig(
        name="text",
        path=str(folder),
        vocab=kind,
        cache_dir=str(tmp_path),
        document_separator="<end>" if form == "documents" else None,
    )
    message = refused(lambda: corpus_from_config(settings))
    text = f"is {WIDE[encoding]} text without a byte order mark; save it as UTF-8"
    assert message == f"{folder / names[0]}: {text}"


def test_a_nul_character_is_in_no_text_but_may_be_among_bytes(tmp_path):
    path = tmp_path / "zeros.txt"
    path.write_bytes(BOOK.encode() + b"\0" + BOOK.encode())
    n = len(BOOK.encode())
    for kind in ("char", "word"):
        message = refused(lambda k=kind: load_corpus("text", path, vocab=k, cache_dir=tmp_path))
        assert message == (
            f"{path}, byte {n}: the character U+0000 (NUL), which no text has; remove it, for"
            r" example by  tr -d '\000' < FILE > NEW, or use data.vocab='byte' for any bytes"
        )
    path.write_bytes(bytes(range(256)) * 8)
    corpus = load_corpus("text", path, vocab="byte", cache_dir=tmp_path)
    assert corpus.train[:256].tolist() == list(range(256))


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_text_is_read_with_its_line_ends_and_a_note_says_that_they_are_symbols(
    tmp_path, capsys, kind
):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"a cat\r\nsat\n" * 40)
    corpus = load_corpus("text", path, vocab=kind, cache_dir=tmp_path)
    told = capsys.readouterr().err
    text = text_of(corpus)
    if kind == "word":
        assert "\r" not in text
        assert "note" not in told
        return
    assert text == "a cat\r\nsat\n" * 40
    kept = "\\r is a part of the text, and prompts need it too"
    assert told.splitlines()[-1] == f"note: {path}: 40 line ends are CRLF (Windows); {kept}"
    source.say_once.cache_clear()  # notes are printed again, as in a new process
    load_corpus("text", path, vocab=kind, cache_dir=tmp_path)
    assert capsys.readouterr().err == told
    path.write_bytes(b"a cat\nsat\n" * 30)
    load_corpus("text", path, vocab=kind, cache_dir=tmp_path)
    assert "note" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a [1]*?.txt", "naïve 猫.txt", " two  spaces .txt", "line\n.txt"])
def test_a_text_may_have_any_name(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / name).write_text(BOOK, encoding="utf-8")
    for path in (tmp_path / name / name, tmp_path / name):
        corpus = load_corpus("text", path, vocab="char", cache_dir=tmp_path)
        assert text_of(corpus) == BOOK


@pytest.mark.parametrize("content", [b"", b"\r\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_a_text_without_text_is_refused(tmp_path, kind, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    message = refused(lambda: load_corpus("text", path, vocab=kind, cache_dir=tmp_path))
    assert message.startswith(f"{path}")
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_text_in_utf_16_or_32_is_refused_by_name(tmp_path, kind, encoding):
    path = tmp_path / "wide.txt"
    path.write_bytes(BOOK.encode(encoding))
    for given in (path, tmp_path):
        message = refused(lambda p=given: load_corpus("text", p, vocab=kind, cache_dir=tmp_path))
        assert message.startswith(f"{path}: is {encoding.upper()} text, not UTF-8 (it begins")
        assert message.endswith("save it as UTF-8")


def test_the_place_of_a_wrong_byte_counts_from_the_start_of_the_file(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(BOM + b"abc\n" * 100 + b"\xe9\n" + b"abc\n" * 100)
    message = refused(lambda: load_corpus("text", path, vocab="char", cache_dir=tmp_path))
    assert message.startswith(f"{path}, byte 403: not UTF-8")


def test_symbols_that_training_has_not_are_in_the_vocabulary_of_a_users_text(tmp_path):
    texts = {"train": b"a b\nb\n", "valid": b"a b\n", "test": b"a\na q\n"}
    folder = write_folder(tmp_path / "t", "{}.txt", texts)
    for kind in ("word", "char"):
        corpus = load_corpus("text", folder, vocab=kind, cache_dir=tmp_path)
        assert corpus.vocab.decode(corpus.test) == "a\na q\n"
        assert "q" in corpus.vocab.symbols


def test_a_cache_that_cannot_be_written_is_refused(book, tmp_path):
    (tmp_path / "file").write_text("")
    message = refused(lambda: load_corpus("text", book, cache_dir=tmp_path / "file" / "cache"))
    assert message == (
        f"cannot write in the cache folder {tmp_path}/file/cache (Not a directory); set"
        " data.cache_dir or $TXL_DATA_DIR to a folder that can be written"
    )


def test_impossible_settings_are_refused(book, tmp_path):
    def message(*args, **more):
        return refused(lambda: load_corpus(*args, cache_dir=tmp_path, **more))

    assert message("stdlib", book) == (
        "data.path: stdlib is the source code of the running Python; give no path"
    )
    assert message("text", book, hash="md5:" + "0" * 32) == (
        "data.hash: needs data.url, whose download it checks"
    )
    missing = str(tmp_path / "nowhere")
    assert message("text", missing) == f"data.path = {missing!r}: there is no such file or folder"
    short = write_folder(tmp_path / "short", "{}.txt", {**PTB, "valid": b"x"})
    assert message("text", short) == (
        f"{short}, its own splits, valid split: has 1 token, and at least 2 are needed; give a"
        " longer text"
    )
    with pytest.raises(ConfigError, match=r"data\.name = 'nothing': must be one of"):
        load_corpus("nothing", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"data\.valid_fraction = 0\.7: must be above 0"):
        load_corpus("text", book, valid_fraction=0.7, cache_dir=tmp_path)
