"""Files and folders named as splits are read as these splits; ambiguous names are refused."""

import gzip
import os
import shutil
import zipfile

import pytest
from corpus_files import content, find_text, refused
from token_files import IDS, llm_c, save

from txl_jax.checkpoint.workdir_files import FILES
from txl_jax.data.corpus import load_corpus
from txl_jax.data.sources.records import READERS
from txl_jax.data.sources.splits import splits_named

LINES = {"train": b"of train\n" * 40, "valid": b"of valid\n" * 30, "test": b"of test\n" * 20}


def write(folder, **files):
    """Writes files and returns their folder.

    ``files`` maps a file's name to a split, whose ``LINES`` are written, or to the text itself.
    """
    for name, split in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(LINES.get(split, split.encode()))
    return folder


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.txt", "train"), ("ptb.valid.txt", "valid"), ("wiki.test.tokens", "test"),
        ("train-00000-of-00002.txt", "train"), ("my_test.txt", "test"), ("Validation.TXT", "valid"),
        ("dev1.txt", "valid"), ("2val.txt", "valid"), ("TRAIN", "train"),
        ("eval.txt", "valid"), ("evaluate.txt", None),
        ("trainData.txt", "train"),
        ("PTBTest.txt", "test"), ("train/part.txt", "train"), ("dev-set/test_a.txt", "valid"),
        ("Training.txt", "train"), ("testing/a.txt", "test"), ("TESTING", "test"),
        ("contest.txt", None), ("latest.txt", None), ("training_notes.txt", None),
        ("attestation.txt", None), ("devices.txt", None), ("values.txt", None),
        ("restrain.txt", None), ("étrain.txt", None), ("invalid.txt", None),
    ],
)  # fmt: skip
def test_a_name_is_of_a_split_only_if_a_whole_word_says_so(name, split):
    assert splits_named(name) == ({split} if split else set())


@pytest.mark.parametrize(
    "names",
    [
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("train.raw", "dev.raw", "test.raw"),
        ("my_train.txt", "my_validation.txt", "my_test.txt"),
        ("train/x.txt", "dev/y.txt", "test/deep/z.txt"),
        ("test_set.train.txt", "test_set.valid.txt", "test_set.test.txt"),
        ("corpus.train", "corpus.valid", "corpus.test"),
        ("train", "val", "test"),
        ("training.txt", "valid.txt", "testing.txt"),
        ("trn.txt", "val.txt", "tst.txt"),
        ("trn/a.txt", "val/b.txt", "tst/c.txt"),
    ],
)
def test_files_named_as_splits_are_these_splits_and_this_is_printed(tmp_path, names, capsys):
    write(tmp_path, **dict(zip(names, LINES, strict=True)))
    write(tmp_path, **{"readme.md": "no", "contest.txt": "no"} if "ptb.train.txt" in names else {})
    source = find_text(tmp_path)
    assert content(source) == LINES
    assert source.label == f"{tmp_path}, its own splits"
    said = capsys.readouterr().err
    for split, name in zip(LINES, names, strict=True):
        assert f"{split} = {name} ({len(LINES[split])} bytes)" in said
    assert ("left out: contest.txt" in said) == ("ptb.train.txt" in names)


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (["a.md", "b.md", "README.md"], ["a.md", "b.md"]),
        (["a.py", "Thumbs.db", ".DS_Store"], ["a.py"]),
        (["book1", "book2", "LICENSE"], ["book1", "book2"]),
        (["train.md", "valid.md", "test.md"], ["train.md", "valid.md", "test.md"]),
        (["A.TXT", "b.text"], ["A.TXT", "b.text"]),
        (["TRAIN.TXT", "valid.txt", "Test.text"], ["TRAIN.TXT", "valid.txt", "Test.text"]),
        (["a.txt", "README.txt", "LICENSE.txt", "b.md"], ["a.txt"]),
        (["README.txt", "b.md"], ["README.txt"]),
        (["a.txt", "README_EN.txt", "requirements.txt"], ["a.txt"]),
        (["data/a.txt", "dataset_infos.json", "README.md"], ["data/a.txt"]),
        (["a.md", "b.md.gz"], ["a.md", "b.md.gz"]),
        (["x/y/z/a.txt", "__MACOSX/x/._a.txt", "notes.pdf"], ["x/y/z/a.txt"]),
        (["README.md", "x/y/a.md"], ["x/y/a.md"]),
        (["data/train/a.txt", "data/test/b.txt"], ["data/train/a.txt", "data/test/b.txt"]),
    ],
)
@pytest.mark.parametrize("form", ["folder", "zip"])
def test_text_is_read_whatever_the_end_of_its_name(tmp_path, names, used, form):
    texts = {name: f"of {name}\n".encode() * 9 for name in names}
    write(tmp_path / "in", **dict.fromkeys(names, ""))
    for name, text in texts.items():
        data = gzip.compress(text) if name.endswith(".gz") else text
        (tmp_path / "in" / name).write_bytes(data)
    path = tmp_path / "in"
    if form == "zip":
        path = shutil.make_archive(str(tmp_path / "a"), "zip", path)
    found = b"".join(content(find_text(path, tmp_path / "c")).values())
    assert [name for name in names if texts[name] in found] == used
    assert len(found) == sum(len(texts[name]) for name in used)


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ([], ".json; name one file or folder, or put"),
        (["a.tex", "b.py"], ", but a.tex, b.py; name one file or folder, or put the"),
        (["a.npy"], "for its arrays use data.name=tokens"),
        (["a.BIN"], "for its arrays use data.name=tokens"),
        (["x/a.txt", "y/b.txt", "README.md"], ", but x/, y/; name one file or folder"),
    ],
)
def test_a_folder_without_text_says_what_it_has_and_what_to_do(tmp_path, names, fault):
    write(tmp_path, **dict.fromkeys(names, "train"))
    message = refused(lambda: find_text(tmp_path))
    assert fault in message
    assert message.startswith(f"{tmp_path}: has no *.txt file, and none of .jsonl, ")


def test_files_of_another_end_are_refused_by_what_they_look_like(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jpg").write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF\0" + bytes(99))
    assert refused(lambda: find_text(tmp_path)).startswith(f"{tmp_path}/a.jpg: is binary data")


@pytest.mark.parametrize("split", LINES)
@pytest.mark.parametrize("name", ["my.{}.txt", "{}/a.txt", "{}.jsonl"])
def test_an_empty_split_is_refused(tmp_path, split, name):
    names = {of: name.format(of) for of in LINES}
    text = {**dict.fromkeys(LINES, '{"text": "ab"}\n'), split: ""}
    write(tmp_path, **{names[of]: text[of] for of in LINES})
    message = refused(lambda: find_text(tmp_path, tmp_path / "c"))
    assert message.startswith(f"{tmp_path}, its own splits: the {split} split is empty; give longe")


def test_a_folder_of_a_split_that_cannot_be_listed_is_not_an_absent_split(tmp_path):
    write(tmp_path, **{"train/a.txt": "train", "valid/b.txt": "valid"})
    (tmp_path / "valid").chmod(0)
    if os.access(tmp_path / "valid", os.R_OK):
        pytest.skip("this user may read every folder")
    expected = f"{tmp_path}/valid: cannot be read (Permission denied); check its permissions"
    assert refused(lambda: find_text(tmp_path)) == expected


def test_parts_of_a_split_are_joined_in_the_order_of_their_names(tmp_path, capsys):
    write(tmp_path, **{f"train-0000{n}-of-00002.txt": f"part {n}\n" for n in (1, 0)})
    write(tmp_path, **{"validation-00000-of-00001.txt": "valid", "test.txt": "test"})
    found = content(find_text(tmp_path))
    assert found == {**LINES, "train": b"part 0\npart 1\n"}
    order = "train = train-00000-of-00002.txt (7 bytes), train-00001-of-00002.txt (7 bytes);"
    assert order in capsys.readouterr().err


@pytest.mark.parametrize("there", [("train",), ("train", "valid"), ("train", "test")])
def test_a_missing_split_is_held_out_from_train(tmp_path, there):
    write(tmp_path, **{f"my.{split}.txt": split for split in there})
    source = find_text(tmp_path, valid_fraction=0.1, test_fraction=0.2)
    found = content(source)
    missing = [split for split in LINES if split not in there]
    for split in there[1:]:
        assert found[split] == LINES[split]
    joined = b"".join(found[split] for split in LINES if split == "train" or split in missing)
    assert joined == LINES["train"]
    shares = {"valid": 0.1, "test": 0.2}
    assert [len(found[s]) for s in missing] == [round(shares[s] * 360) for s in missing]
    assert all(f"the {split} split is held out from the train files" in source.label
               for split in missing)  # fmt: skip
    words = find_text(tmp_path, kind="word", valid_fraction=0.1, test_fraction=0.2)
    assert all(text.endswith(b"\n") for text in content(words).values())


@pytest.mark.parametrize(
    "names", [("train.txt",), ("ptb.train.txt",), ("train1.txt", "train2.txt")]
)
def test_a_train_split_beside_a_small_file_is_a_split(tmp_path, names, capsys):
    write(tmp_path, **dict.fromkeys(names, "train"), **{"training_notes.txt": "notes"})
    assert b"notes" not in b"".join(content(find_text(tmp_path)).values())
    assert "left out: training_notes.txt" in capsys.readouterr().err


def test_a_folder_with_one_folder_and_no_text_is_that_folder(tmp_path):
    write(tmp_path, **{f"data/{split}-0.txt": split for split in LINES}, **{"README.md": "no"})
    assert content(find_text(tmp_path)) == LINES
    write(tmp_path, **{"other/train.txt": "train"})
    assert ", but data/, other/; name one file or folder" in refused(lambda: find_text(tmp_path))


def test_documents_of_files_may_be_in_folders_of_splits(tmp_path):
    write(tmp_path, **{f"train/{n}.txt": f"song {n}\n" for n in range(9)})
    write(tmp_path, **{f"test/{n}.txt": f"other {n}\n" for n in range(3)})
    corpus = load_corpus("text", tmp_path, document_files=True, cache_dir=tmp_path / "c")
    whole = {s: [corpus.vocab.decode(d) for d in getattr(corpus, s)] for s in LINES}
    assert whole["train"] + whole["valid"] == [f"song {n}\n" for n in range(9)]
    assert whole["test"] == [f"other {n}\n" for n in range(3)]
    assert whole["valid"]


def test_a_folder_of_other_files_says_their_order_and_sizes(tmp_path, capsys):
    write(tmp_path, **{"contest.txt": "a" * 50, "latest.txt": "b" * 60, "training_notes.txt": "c"})
    assert content(find_text(tmp_path))["train"].startswith(b"a" * 50 + b"\nb")
    assert capsys.readouterr().err == (
        f"{tmp_path}: one text of 3 files, 111 bytes, in this order: contest.txt (50 bytes),"
        " latest.txt (60 bytes), training_notes.txt (1 byte)\n"
    )


def test_longer_words_with_other_ends_are_no_splits(tmp_path):
    names = ("contest.txt", "constraint.txt", "latest.txt", "strain.txt", "tray.txt", "tea.txt")
    write(tmp_path, **dict.fromkeys(names, "train"))
    assert len(find_text(tmp_path).files) == len(names)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.txt": "train", "b.txt": "train", "c.txt": "test"}, "a.txt and b.txt have the same"),
        ({"train.txt": "test", "test.txt": "test"}, "train.txt and test.txt have the same bytes; "),
        ({"train/a.txt": "test", "test/a.txt": "test"}, "train/a.txt and test/a.txt have the same"),
        (
            {"a.txt": "test", "b.txt": "test", "c.txt": "test", "d.txt": "test"},
            "a.txt and b.txt have the same bytes, and so have 2 more pairs; remove copies",
        ),
        ({"a.txt": "x" * 50, "b.txt": "y" * 50, "c.txt": "", "d.txt": ""}, ""),
    ],
)
def test_equal_files_of_a_text_are_noted(tmp_path, files, said, capsys):
    find_text(write(tmp_path, **files))
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == bool(said)
    assert not said or notes[0].startswith(f"note: {tmp_path}: {said}")


SAME = "seem, by their names, to be the same text; remove one of them"


@pytest.mark.parametrize("names", [("a.txt", "b.txt"), ("train.txt", "test.txt")])
def test_an_archive_beside_the_files_in_it_is_refused_and_equal_ones_are_noted(
    tmp_path, names, capsys
):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in names:
            archive.writestr(name, "train\n" * 99)
    find_text(write(tmp_path, **{"else.txt": "no", "inner/b.txt": "no"}), tmp_path / "c")
    shutil.copy(tmp_path / "data.zip", tmp_path / "data (1).zip")
    find_text(tmp_path, tmp_path / "c")
    assert "data (1).zip and data.zip have the same bytes; remove" in capsys.readouterr().err
    write(tmp_path, **{names[1]: "test"})
    fault = f"data (1).zip/{names[1]} and {names[1]} {SAME}"
    assert refused(lambda: find_text(tmp_path, tmp_path / "c")).endswith(fault)


def test_a_folder_beside_the_archive_of_its_name_is_refused(tmp_path):
    write(tmp_path, **{"train/a.txt": "train", "test/b.txt": "test"})
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.write(tmp_path / "train/a.txt", "train/a.txt")
    message = refused(lambda: find_text(tmp_path))
    assert message.endswith(f"train.zip/a.txt and train/a.txt {SAME}")


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (("a.test.txt",), "a.test.txt is named as the test split, and no file is named as"),
        (("book.txt", "dev.txt"), "dev.txt is named as the valid split, and no file is named"),
        (("train_ride.txt", "b.txt", "c.txt"), "some names say a split (train_ride.txt), and"),
        (("train.txt", "test.txt", *(f"{c}.txt" for c in "abcdef")), "and others do not (a.txt, b"),
        (("train.txt", "val.txt", "valid.txt", "test.txt"), f"val.txt and valid.txt {SAME}"),
        (("train.txt", "training.txt"), f"train.txt and training.txt {SAME}"),
        (("train.txt", "train_to_test.txt"), "named as the train and the test split; rename the"),
        (
            ("ptb.train.txt", "ptb.test.txt", "ptb.char.train.txt", "ptb.char.test.txt"),
            "ptb.char.test.txt and ptb.test.txt belong to two sets of splits",
        ),
        (("train.txt", "train/a.txt", "test.txt", "test/b.txt"), "belong to two sets of splits"),
        (("train.txt", "eval.txt", "valid.txt"), f"eval.txt and valid.txt {SAME}"),
        (("wikitrain.txt", "wikitest.txt"), "wikitest.txt, wikitrain.txt seem to be splits"),
        (("tr.txt", "va.txt", "te.txt", "x.txt"), "te.txt, tr.txt, va.txt seem to be splits"),
        (("c4_tr.txt", "c4_te.txt"), "c4_te.txt, c4_tr.txt seem to be splits"),
        (
            ("fold0_train.txt", "fold0_test.txt", "fold1_train.txt", "fold1_test.txt"),
            "fold0_test.txt and fold1_test.txt belong to two sets of splits",
        ),
        (("train.txt", "train_small.txt"), f"train.txt and train_small.txt {SAME}"),
        (("train - Copy.txt", "train.txt"), f"train - Copy.txt and train.txt {SAME}"),
        (("train (1).txt", "train.txt"), f"train (1).txt and train.txt {SAME}"),
        (("train.txt", "test.raw"), "several kinds, such as train.txt and test.raw"),
    ],
)  # fmt: skip
def test_names_that_are_vague_are_refused(tmp_path, files, fault):
    write(tmp_path, **dict.fromkeys(files, "train"))
    message = refused(lambda: find_text(tmp_path))
    assert message.startswith(f"{tmp_path}: ")
    assert fault in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
def test_a_workdir_that_is_the_folder_of_its_text_reads_only_the_text(tmp_path, name):
    text = {"a.jsonl": '{"text": "ab"}\n' * 9, "a.json": '{"text": "ab"}\n' * 9}
    write(tmp_path, **{name: text.get(name, "text\n" + "ab\n" * 9)})
    before = content(find_text(tmp_path, tmp_path / "c"))
    written = [file for file in FILES if file.endswith((".txt", *READERS))]
    write(tmp_path, **dict.fromkeys(written, "no"))
    (tmp_path / "config.json").write_text('{"model": {}, "data": {}, "train": {}}')
    assert content(find_text(tmp_path, tmp_path / "c")) == before


def test_arrays_named_as_splits_are_these_splits(tmp_path, capsys):
    for n in range(2):
        llm_c(tmp_path / f"fineweb_train_00000{n}.bin", IDS[: 50 + n])
    llm_c(tmp_path / "fineweb_val_000000.bin", IDS[:31])
    corpus = load_corpus("tokens", tmp_path, cache_dir=tmp_path / "c")
    assert corpus.info["tokens"] == {"train": 101, "valid": 31, "test": 31}
    assert len(corpus.train) == 2  # each of the two arrays is a document
    assert "train = fineweb_train_000000.bin" in capsys.readouterr().err


def test_starts_beside_one_of_several_arrays_are_not_ignored(tmp_path):
    for name in ("train-0.npy", "train-1.npy", "val.npy"):
        save(tmp_path / name, IDS[:50])
    save(tmp_path / "train-1.starts.npy", [0, 9])
    message = refused(lambda: load_corpus("tokens", tmp_path, cache_dir=tmp_path / "c"))
    assert "train-1.starts.npy: each of several arrays is one document, so none can" in message


def test_texts_of_a_split_may_have_any_other_names(tmp_path):
    names = ["train/old.txt", "train/small.txt", "train/town.txt", "train/town_old.txt"]
    write(tmp_path, **dict.fromkeys(names, "train"))
    assert sum(map(len, content(find_text(tmp_path)).values())) == 4 * len(LINES["train"])


def test_parts_that_are_missing_are_noted(tmp_path, capsys):
    write(tmp_path, **{f"train-0000{n}-of-00003.txt": "train" for n in (0, 2)})
    find_text(tmp_path)
    note = f"note: {tmp_path}: train-*-of-00003 has 2 of 3 parts; are the others missing?"
    assert note in capsys.readouterr().err
    write(tmp_path, **{"train-00001-of-00003.txt": "train", "train_old.txt": "train"})
    find_text(tmp_path)
    assert "are the others" not in capsys.readouterr().err


def test_an_array_of_ids_is_not_a_split_of_another_name(tmp_path):
    save(tmp_path / "contest.npy", IDS[:50])
    save(tmp_path / "latest.npy", IDS[:50])
    save(tmp_path / "more.npy", IDS[:50])
    corpus = load_corpus("tokens", tmp_path, cache_dir=tmp_path / "c")
    assert sum(corpus.info["tokens"].values()) == 150


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.txt", "inner/b.txt"], "the text is a.txt (500 bytes); left out: inner/"),
        (["a.txt", "b.html", "c.md"], "the text is a.txt (500 bytes); left out: b.html, c.md"),
        (["a.txt", "t.tar.gz", ".hidden"], "the text is a.txt (500 bytes); left out: t.tar.gz"),
        (["train/a.txt", "tests/b.txt"], "train = train/a.txt (500 bytes); left out: tests/"),
        (["a.txt"], ""),
    ],
)
def test_what_is_not_read_is_named(tmp_path, capsys, names, said):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("ten words\n" * 50)
    find_text(tmp_path)
    assert capsys.readouterr().err == (f"{tmp_path}: {said}\n" if said else "")
