"""Tensors and vocabularies in files of other programs are read, and no code in the files runs."""

import argparse
import collections
import json
import sys
import types

import numpy as np
import pytest
from safetensors.numpy import save_file

from txl_jax.convert import ModelFormatError, files
from txl_jax.data.errors import DataError
from txl_jax.messages import UserError

STATE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.c": np.ones(2, np.float32)}


def assert_state(found):
    assert found.keys() == STATE.keys()
    for name, array in STATE.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array)


# --------------------------------------------------------------------------------------
# Tensors.


def test_safetensors_are_read(tmp_path):
    path = str(tmp_path / "state.safetensors")
    save_file(STATE, path)
    assert_state(files.read(path).tensors)


def test_a_cut_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    save_file(STATE, str(path))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ModelFormatError, match="is not a complete safetensors file"):
        files.read(str(path))


SHARDS = {"m-1-of-2.safetensors": ["a"], "m-2-of-2.safetensors": ["b.c"]}
WEIGHTS = {"a": "m-1-of-2.safetensors", "b.c": "m-2-of-2.safetensors"}


def sharded(folder, index, shards=SHARDS):
    for file, names in shards.items():
        save_file({name: STATE[name] for name in names}, str(folder / file))
    path = folder / "m.safetensors.index.json"
    path.write_text(index if isinstance(index, str) else json.dumps({"weight_map": index}))
    return str(path)


def test_the_shards_of_an_index_are_read_as_one_state(tmp_path):
    assert_state(files.read(sharded(tmp_path, WEIGHTS)).tensors)
    for shard in SHARDS:  # given one shard, the other shards are read too
        assert_state(files.read(str(tmp_path / shard)).tensors)


def test_torch_shards_are_read_as_one_state(tmp_path, monkeypatch):
    shards = {"m-1-of-2.bin": ["a"], "m-2-of-2.bin": ["b.c"]}
    of_file = lambda path: {name: STATE[name] for name in shards[path.rpartition("/")[2]]}
    monkeypatch.setattr(files, "load_torch", of_file)
    for shard in shards:
        (tmp_path / shard).touch()
    index = tmp_path / "m.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1-of-2.bin", "b.c": "m-2-of-2.bin"}}))
    assert_state(files.read(str(index)).tensors)


def test_the_only_shard_needs_no_index(tmp_path):
    save_file(STATE, str(tmp_path / "m-1-of-1.safetensors"))
    assert_state(files.read(str(tmp_path / "m-1-of-1.safetensors")).tensors)


TWO = {"m-1-of-2.safetensors": ["a"], "m-2-of-2.safetensors": ["a", "b.c"]}
FIRST = {"m-1-of-2.safetensors": ["a"]}


@pytest.mark.parametrize(
    ("index", "shards", "message"),
    [
        (WEIGHTS, FIRST, r"listed files are missing beside it \(m-2-of-2.saf"),
        (WEIGHTS, TWO, r"m-2-of-2\.safetensors: has other tensors than .* lists for it \(a\)"),
        ({"a": WEIGHTS["a"]}, {"m-1-of-2.safetensors": ["a", "b.c"]}, r"lists for it \(b\.c\)"),
        (WEIGHTS | {"d": WEIGHTS["a"]}, SHARDS, r"m-1-of-2.safetensors: has other .* it \(d\)"),
        ({"a": "../m-1-of-2.safetensors"}, SHARDS, r"'\.\./m-1-of-2\.safetensors' is not the name"),
        ({"a": "/etc/passwd"}, SHARDS, "'/etc/passwd' is not the name of a file beside"),
        ({"a": "in\\m.safetensors"}, SHARDS, r"listed files are missing beside it \(in"),
        ({"a": ".."}, SHARDS, r"listed files are missing beside it \(\.\.\)"),
        ({"a": 3}, SHARDS, "3 is not the name"),
        ({}, SHARDS, "has no weight_map"),
        ("[]", SHARDS, "is JSON, but not an object {...}"),
        ("{", SHARDS, "is not JSON"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path, index, shards, message):
    with pytest.raises(UserError, match=message) as caught:
        files.read(sharded(tmp_path, index, shards))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", ["faiss.index.json", "b.safetensors.index.json"])
def test_a_json_file_that_is_no_index_does_not_hinder_a_whole_model(tmp_path, other):
    save_file(STATE, str(tmp_path / "model.safetensors"))
    (tmp_path / other).write_text('{"dimension": 128}')
    for path in (tmp_path / "model.safetensors", tmp_path):
        assert_state(files.read(str(path)).tensors)


def test_a_shard_without_its_index_is_refused(tmp_path):
    save_file(STATE, str(tmp_path / "m-1-of-2.safetensors"))
    with pytest.raises(
        ModelFormatError, match=r"is one of 2 files, and no index \(\*\.index\.json\) beside it"
    ):
        files.read(str(tmp_path / "m-1-of-2.safetensors"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("gone.safetensors", "there is no such file"), ("model.pkl", r"must end in one of \.safet")],
)
def test_what_cannot_be_a_state_is_refused(tmp_path, name, message):
    (tmp_path / "model.pkl").write_bytes(b"x")
    with pytest.raises(ModelFormatError, match=message):
        files.read(str(tmp_path / name))


def test_a_missing_torch_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing torch now raises ImportError
    (tmp_path / "state.pt").write_bytes(b"x")
    with pytest.raises(
        ModelFormatError, match=r"needs torch; run pip install 'txl_jax\[convert-torch\]'"
    ):
        files.read(str(tmp_path / "state.pt"))


def test_a_missing_tensorflow_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    (tmp_path / "model.ckpt-0.index").write_bytes(b"x")
    with pytest.raises(ModelFormatError, match=r"pip install 'txl_jax\[convert-tf\]'"):
        files.read(str(tmp_path / "model.ckpt-0"))


def test_a_state_is_found_in_the_checkpoint_around_it():
    for around in (lambda state: state, lambda state: {"state_dict": state, "epoch": 3}):
        assert_state(files.stored(around(STATE), "x").tensors)
    parallel = {f"module.{name}": array for name, array in STATE.items()}
    assert_state(files.stored(parallel, "x").tensors)


def test_nvidias_checkpoint_has_arguments_vocabulary_and_step():
    vocab = files.Attributes()
    vocab.__dict__["idx2sym"] = ["<eos>", "a"]
    loaded = {
        "model_state": STATE,
        "model_config": {"n_layer": 2},
        "vocab": vocab,
        "train_step": 40,
        "args": argparse.Namespace(),
    }
    found = files.stored(loaded, "x")
    assert_state(found.tensors)
    assert (found.args, found.symbols, found.step) == ({"n_layer": 2}, ["<eos>", "a"], 40)


def test_arguments_and_a_step_of_other_types_are_not_those_of_nvidia():
    other = {"model_config": argparse.Namespace(n_layer=2), "train_step": np.ones(1)}
    found = files.stored({"model_state": STATE, **other}, "x")
    assert (found.args, found.step) == (None, 0)


@pytest.mark.parametrize("loaded", [{}, [1], {"epoch": 3}, {"state_dict": {"a": "text"}}, None])
def test_a_file_without_a_state_is_refused(loaded):
    with pytest.raises(ModelFormatError, match="is not a state_dict"):
        files.stored(loaded, "x")


# --------------------------------------------------------------------------------------
# Tests that need torch or tensorflow.


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def test_torch_states_are_read_as_float32(torch, tmp_path):
    path = str(tmp_path / "state.pt")
    halves = {name: torch.tensor(array).to(torch.bfloat16) for name, array in STATE.items()}
    torch.save(halves, path)
    assert_state(files.read(path).tensors)


def nvidia_vocab():
    """Returns a module and an object of its class Vocab, named as in NVIDIA's checkpoints."""
    module = types.ModuleType("utils.vocabulary")
    module.Vocab = type("Vocab", (), {"__module__": "utils.vocabulary"})  # type: ignore[attr-defined]
    vocab = module.Vocab()
    vocab.idx2sym = ["<eos>", "the", "cat"]
    vocab.sym2idx = collections.OrderedDict((s, i) for i, s in enumerate(vocab.idx2sym))
    vocab.counter = collections.Counter({"the": 2})
    vocab.special, vocab.min_freq, vocab.delimiter = ["<eos>"], 0, None
    return module, vocab


def test_nvidias_checkpoint_is_read_without_its_classes(torch, tmp_path, monkeypatch):
    module, vocab = nvidia_vocab()
    monkeypatch.setitem(sys.modules, "utils", types.ModuleType("utils"))
    monkeypatch.setitem(sys.modules, "utils.vocabulary", module)
    path = str(tmp_path / "checkpoint_best.pt")
    state = {name: torch.tensor(array) for name, array in STATE.items()}
    content = {
        "args": argparse.Namespace(lr=0.01, batch_size=256),
        "model_config": {"n_layer": 2, "dtype": torch.float16, "cutoffs": [5], "same_length": True},
        "model_state": collections.OrderedDict(state),
        "optimizer_state": {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.01}]},
        "rng_states": [torch.get_rng_state()],
        "memory": [[torch.zeros(2, 3)]],
        "vocab": vocab,
        "amp_state": None,
        "train_step": 7,
        "best_val_loss": 3.5,
    }
    torch.save(content, path)
    monkeypatch.delitem(sys.modules, "utils.vocabulary")
    monkeypatch.delitem(sys.modules, "utils")
    found = files.read(path)
    assert_state(found.tensors)
    assert found.args is not None
    assert (found.args["n_layer"], found.args["cutoffs"], found.step) == (2, [5], 7)
    assert found.symbols == ["<eos>", "the", "cat"]


class Harmful:
    """Unpickling an object of this class would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_what_a_torch_file_would_run_is_not_run(torch, tmp_path):
    trace, path = tmp_path / "trace", str(tmp_path / "model.pt")
    torch.save({"model_state": Harmful(str(trace))}, path)
    with pytest.raises(ModelFormatError, match="has more than tensors"):
        files.read(path)
    assert not trace.exists()


def test_a_whole_pickled_model_is_refused_with_the_way_out(torch, tmp_path):
    path = str(tmp_path / "model.pt")
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(ModelFormatError, match=r"state_dict\(\), 'state.pt'\)"):
        files.read(path)


def test_a_torch_file_that_cannot_be_read_or_is_empty_says_so(torch, tmp_path):
    with pytest.raises(ModelFormatError, match=r"none.pt: cannot be read \(.*No such file"):
        files.load_torch(str(tmp_path / "none.pt"))
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(ModelFormatError, match=r"is damaged .* \(EOFError\)"):
        files.read(str(tmp_path / "empty.pt"))


def test_huggingfaces_vocabulary_is_read_with_torch(torch, tmp_path):
    path = str(tmp_path / "vocab.bin")
    torch.save({"idx2sym": ["<eos>", "a"], "counter": collections.Counter("a")}, path)
    assert files.vocab_from_file(path).symbols == ["<eos>", "a"]
    torch.save({"counter": collections.Counter("a")}, path)
    with pytest.raises(ModelFormatError, match="has no idx2sym"):
        files.vocab_from_file(path)


def test_a_tensorflow_checkpoint_is_read_without_the_optimizers_variables(tmp_path):
    tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    prefix = str(tmp_path / "model.ckpt-0")
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        for name in ("transformer/a", "transformer/a/Adam"):
            v1.get_variable(name, initializer=STATE["a"])
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, prefix, write_meta_graph=False)
    for source in (prefix, str(tmp_path)):
        tensors = files.read(source).tensors
        assert list(tensors) == ["transformer/a"]
        np.testing.assert_array_equal(tensors["transformer/a"], STATE["a"])


# --------------------------------------------------------------------------------------
# Vocabularies.


@pytest.mark.parametrize(
    ("name", "content", "kind", "symbols"),
    [
        ("words.txt", "<eos>\nthe\ncat\n", "word", ["<eos>", "the", "cat"]),
        ("counted.txt", "<eos> 12\nthe 7\r\n", "word", ["<eos>", "the"]),
        ("no_end.txt", "<eos>\nthe", "word", ["<eos>", "the"]),
        ("chars.txt", "a\n \nb\n", "char", ["a", " ", "b"]),
        ("dos.txt", "a\r\n \r\n", "char", ["a", " "]),
        ("bytes.txt", "".join(f"{i}\n" for i in range(256)), "byte", [str(i) for i in range(256)]),
        ("own.json", json.dumps({"kind": "char", "symbols": ["\n", "a"]}), "char", ["\n", "a"]),
        ("list.json", '["<eos>", "a b"]', "word", ["<eos>", "a b"]),
        ("ids.json", '{"the": 1, "<eos>": 0}', "word", ["<eos>", "the"]),
    ],
)
def test_a_vocabulary_is_read_in_the_order_of_ids(tmp_path, name, content, kind, symbols):
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    vocab = files.vocab_from_file(str(tmp_path / name))
    assert (vocab.kind, vocab.symbols) == (kind, symbols)
    (tmp_path / name).write_text("\ufeff" + content, encoding="utf-8", newline="")
    assert files.vocab_from_file(str(tmp_path / name)) == vocab


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.pkl", b"x", "unpickling a file could run any code"),
        ("v.json", b"[1, 2]", "must be a list of symbols"),
        ("v.json", b'{"a": 1, "b": 2}', "ids must be 0 to 1, each once"),
        ("v.json", b"{", "cannot be read"),
        ("v.txt", b"\xff\xfe", "cannot be read"),
        ("v.txt", "a\nb\n".encode("utf-16-le"), "is UTF-16 .* save it as UTF-8"),
        ("v.json", "[]".encode("utf-16-be"), "is UTF-16 .* save it as UTF-8"),
        (None, b"", "there is no such file"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused(tmp_path, name, content, message):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFormatError, match=message):
        files.vocab_from_file(str(tmp_path / (name or "gone.txt")))


def test_a_symbol_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "v.txt").write_text("<eos>\nthe\nthe\n")
    with pytest.raises(DataError, match="'the' occurs 2 times"):
        files.vocab_from_file(str(tmp_path / "v.txt"))


def test_the_safest_vocabulary_of_a_folder_is_taken(tmp_path):
    assert files.vocab_in_folder(str(tmp_path)) is None
    (tmp_path / "vocab.bin").write_bytes(b"")
    (tmp_path / "vocab.txt").write_text("")
    assert files.vocab_in_folder(str(tmp_path)) == str(tmp_path / "vocab.txt")


# --------------------------------------------------------------------------------------
# Names of files and shards.

VARIANTS = [
    ("m.safetensors.index.fp16.json", "m.fp16-0000{}-of-00002.safetensors"),
    ("m.safetensors.index.fp16.json", "m-0000{}-of-00002.fp16.safetensors"),
    ("a.b.safetensors.index.json", "a.b-0000{}-of-00002.safetensors"),
    ("m.safetensors.index.json", "m ({}).safetensors"),
    ("m.safetensors.index.json", "größe{}~!.safetensors"),
]


@pytest.mark.parametrize(("index", "shard"), VARIANTS)
def test_an_index_is_read_with_shards_of_every_name(tmp_path, index, shard):
    listed = {name: shard.format(n) for n, name in enumerate(STATE, 1)}
    for name, file in listed.items():
        save_file({name: STATE[name]}, str(tmp_path / file))
    (tmp_path / index).write_text(json.dumps({"weight_map": listed}))
    assert_state(files.read(str(tmp_path / index)).tensors)
    assert files.model_in(str(tmp_path)) == str(tmp_path / index)
    if "-of-" in shard:
        assert_state(files.read(str(tmp_path / listed["a"])).tensors)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["model.fp16.safetensors"], 0),
        (["model.safetensors", "model.fp16.safetensors", "model.bf16.safetensors"], 0),
        (["model.safetensors", "model.safetensors.index.json", "other.pt"], 0),
        (["pytorch_model.fp16.bin", "vocab.bin", "training_args.bin"], 0),
        (["pytorch_model.bin", "model.fp16.safetensors"], 0),
        (["model-00001-of-00001.safetensors", "config.json"], 0),
        (["model.safetensors.index.json", "model-00001-of-00002.safetensors"], 0),
        (["state.pt", "vocab.json", "args.json", "vocab.bin"], 0),
        (["model.fp16.safetensors", "model.bf16.safetensors"], None),
        (["state.pt", "best.pt"], None),
        (["vocab.bin", "config.json"], None),
    ],
)
def test_of_several_files_the_model_is_taken_or_none(tmp_path, names, taken):
    for name in names:
        (tmp_path / name).touch()
    find = lambda: files.model_in(str(tmp_path))
    if taken is not None:
        assert find() == str(tmp_path / names[taken])
        return
    with pytest.raises(ModelFormatError, match=r"has 2 models \(.* name the file|has no file with"):
        find()


def test_a_tokenizer_file_and_a_stored_vocabulary_of_one_are_vocabularies(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = tokenizers.models.WordLevel({"the": 0, "cat": 1, "?": 2}, unk_token="?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    vocab = files.vocab_from_file(str(tmp_path / "tokenizer.json"))
    assert (vocab.kind, vocab.symbols) == ("tokenizer", ["the", "cat", "?"])
    (tmp_path / "vocab.json").write_text(json.dumps(vocab.to_json()))
    assert files.vocab_from_file(str(tmp_path / "vocab.json")).to_json() == vocab.to_json()
