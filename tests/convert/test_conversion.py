"""The convert command makes a workdir from other programs' files; exported models convert back."""

import json
import os
import subprocess
import sys

import foreign_states
import jax
import numpy as np
import pytest
import tiny_models as tiny
import tiny_runs
from foreign_runs import ARGS, CUT, SHAPE, SYMBOLS, command, prepare
from places import ROOT
from safetensors.numpy import load_file, save_file

import txl_jax
from txl_jax import convert
from txl_jax.checkpoint import tensors
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError, WorkdirError
from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.convert import ModelFormatError, Request


@pytest.fixture
def files(tmp_path):
    return prepare(tmp_path)


def request(folder, **changes):
    given = {
        "source": str(folder / "state.safetensors"),
        "workdir": str(folder / "run"),
        "args": ARGS,
        "vocab": str(folder / "vocab.txt"),
    }
    return Request(**{**given, **changes})


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# --------------------------------------------------------------------------------------
# From a source to a workdir, with its scores and samples.


@pytest.mark.integration
def test_a_converted_model_is_scored_and_sampled_from(files):
    run = f"--workdir={files / 'run'}"
    done = command(
        files / "state.safetensors",
        run,
        f"--args={files / 'args.json'}",
        "--corpus=text",
        f"--path={files / 'text.txt'}",
        "--config.data.vocab=word",
        "--config.evaluate.batch_size=2",
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    scored = tiny_runs.call(run, "--mode=evaluate")
    assert scored.returncode == 0, scored.stderr
    assert "2 streams, segment 8, memory 12, window pytorch" in scored.stdout
    flags = ("--config.generate.length=5", "--config.generate.prompt=the cat")
    sampled = tiny_runs.call(run, "--mode=generate", *flags)
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("the cat")
    assert len(sampled.stdout) > len("the cat\n")
    out = command(str(files / "run"), "--to=safetensors", str(files / "out"))
    assert out.returncode == 0, out.stderr
    assert sorted(os.listdir(files / "out")) == ["config.json", "model.safetensors", "vocab.json"]
    assert str(files) not in (files / "out" / "config.json").read_text()


def test_the_workdir_has_parameters_vocabulary_and_protocol_of_the_source(files):
    model = convert.to_workdir(request(files))
    trained = txl_jax.load(str(files / "run"))
    assert trained.config.model == model
    assert trained.vocab.symbols == SYMBOLS
    want = convert.params_from_pytorch(foreign_states.pytorch(model), model)
    assert_same(trained.params, want)
    # With this precision, scores equal those of the source program.
    assert trained.config.model.matmul_precision == "highest"
    e = trained.config.evaluate
    assert (e.seg_len, e.mem_len, e.context_len, e.first_memory) == (8, 12, 0, "empty")
    record = json.loads((files / "run" / "config.json").read_text())
    assert record["provenance"]["converted"] == {"format": "pytorch", "step": 0}


@pytest.mark.parametrize("attn_type", [0, 2, 3])
def test_a_model_without_memory_is_scored_with_context(tmp_path, attn_type):
    args = {**SHAPE, "n_token": 16, "tgt_len": 8, "ext_len": 4, "mem_len": 0}
    args["attn_type"] = attn_type
    prepare(tmp_path, args=args)
    convert.to_workdir(request(tmp_path, args=args))
    e = txl_jax.load(str(tmp_path / "run")).config.evaluate
    assert (e.seg_len, e.mem_len, e.context_len) == (8, 0, 4)


def test_a_tensorflow_model_starts_from_zeros_that_are_attended_to(tmp_path):
    args = {**SHAPE, **CUT, "n_token": 16, "same_length": True, "mem_len": 6}
    prepare(tmp_path, foreign_states.tensorflow, convert.config_from_tensorflow, args)
    convert.to_workdir(request(tmp_path, args=args, format="tensorflow"))
    exp = txl_jax.load(str(tmp_path / "run")).config
    assert (exp.evaluate.first_memory, exp.evaluate.mem_len) == ("zeros", 6)
    assert (exp.model.same_length, exp.model.norm_epsilon) == ("tf", 1e-12)


def test_a_huggingface_folder_has_all_that_is_needed(tmp_path):
    c = {**SHAPE, **CUT, "vocab_size": 16, "model_type": "transfo-xl", "tgt_len": 128}
    prepare(tmp_path, foreign_states.huggingface, convert.config_from_huggingface, c)
    os.rename(tmp_path / "state.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(c))
    convert.to_workdir(request(tmp_path, source=str(tmp_path), args=None, vocab=None))
    trained = txl_jax.load(str(tmp_path / "run"))
    e = trained.config.evaluate
    assert (e.first_memory, e.mem_len, e.seg_len) == ("zeros", 1600, 128)
    assert (trained.config.model.same_length, trained.config.model.clamp_len) == ("pytorch", 1000)
    assert trained.vocab.symbols == SYMBOLS


def test_a_huggingface_folder_of_shards_gives_the_model_of_one_file(tmp_path):
    c = {**SHAPE, **CUT, "vocab_size": 16, "model_type": "transfo-xl"}
    prepare(tmp_path, foreign_states.huggingface, convert.config_from_huggingface, c)
    (tmp_path / "config.json").write_text(json.dumps(c))
    one, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    os.rename(tmp_path / "state.safetensors", one)
    asked = {"args": None, "vocab": None}
    convert.to_workdir(request(tmp_path, source=str(tmp_path), **asked))
    want = txl_jax.load(str(tmp_path / "run")).params
    listed: dict[str, dict] = {}
    for n, (name, tensor) in enumerate(load_file(str(one)).items()):
        listed.setdefault(f"model-{n % 3 + 1:05}-of-00003.safetensors", {})[name] = tensor
    for file, state in listed.items():
        save_file(state, str(tmp_path / file))
    weight_map = {name: file for file, state in listed.items() for name in state}
    os.remove(one)
    with pytest.raises(
        ModelFormatError, match=r"of-00003.safetensors: is one of 3 files, and no index"
    ):
        convert.to_workdir(request(tmp_path, source=str(tmp_path), workdir="no", **asked))
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    for n, source in enumerate((tmp_path, index, tmp_path / next(iter(listed)))):
        workdir = str(tmp_path / f"run_{n}")
        convert.to_workdir(request(tmp_path, source=str(source), workdir=workdir, **asked))
        assert_same(txl_jax.load(workdir).params, want)


def huggingface(folder, **config):
    """Writes a Hugging Face model as state.safetensors and config.json; returns its config."""
    c = {**SHAPE, **CUT, "vocab_size": 16, "model_type": "transfo-xl", **config}
    prepare(folder, foreign_states.huggingface, convert.config_from_huggingface, c)
    (folder / "config.json").write_text(json.dumps(c))
    return c


def in_shards(folder, name, index):
    """Replaces state.safetensors by two shards and their index; returns the first shard.

    ``name`` is the pattern of the shards' names, with ``{}`` for the number. ``index`` is the name
    of the index file, which says for each tensor in which shard it is.
    """
    state = load_file(str(folder / "state.safetensors"))
    os.remove(folder / "state.safetensors")
    weight_map = {key: name.format(n % 2 + 1) for n, key in enumerate(state)}
    for file in set(weight_map.values()):
        part = {key: state[key] for key, own in weight_map.items() if own == file}
        save_file(part, str(folder / file))
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    return folder / name.format(1)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00001.safetensors", "model.fp16.safetensors", "mine.safetensors"]
)
def test_a_lone_huggingface_file_is_recognised_by_its_tensors(tmp_path, name):
    c = huggingface(tmp_path)
    os.rename(tmp_path / "state.safetensors", tmp_path / name)
    asked = {"args": None, "vocab": None}
    for n, source in enumerate((tmp_path / name, tmp_path)):
        workdir = str(tmp_path / f"run_{n}")
        convert.to_workdir(request(tmp_path, source=str(source), workdir=workdir, **asked))
        assert txl_jax.load(workdir).config.evaluate.first_memory == "zeros"
    os.remove(tmp_path / "config.json")
    with pytest.raises(ModelFormatError, match=r"config\.json is missing; get that file too, or"):
        convert.to_workdir(request(tmp_path, source=str(tmp_path / name), args=None))
    convert.to_workdir(request(tmp_path, source=str(tmp_path / name), args=c))
    wrong = {"format": "pytorch", "workdir": str(tmp_path / "no")}
    with pytest.raises(ModelFormatError, match="the tensor names of huggingface; give the format"):
        convert.to_workdir(request(tmp_path, source=str(tmp_path / name), **wrong))


@pytest.mark.parametrize("form", [None, "pytorch", "nvidia"])
def test_the_authors_state_in_shards_is_read_with_args(tmp_path, form):
    prepare(tmp_path, foreign_states.nvidia if form == "nvidia" else foreign_states.pytorch)
    convert.to_workdir(request(tmp_path, format=form))
    want = txl_jax.load(str(tmp_path / "run")).params
    folder = tmp_path / "parts"
    folder.mkdir()
    os.rename(tmp_path / "state.safetensors", folder / "state.safetensors")
    index = "m.safetensors.index.json"
    shard = in_shards(folder, "m-{}-of-2.safetensors", index)
    for n, source in enumerate((folder, folder / index, shard)):
        workdir = str(tmp_path / f"run_{n}")
        convert.to_workdir(request(tmp_path, source=str(source), workdir=workdir, format=form))
        assert_same(txl_jax.load(workdir).params, want)
        missing = {"workdir": "no", "format": form, "args": None}
        with pytest.raises(ModelFormatError, match="needs args"):
            convert.to_workdir(request(tmp_path, source=str(source), **missing))


def test_a_converted_tokenizer_vocabulary_names_no_file(files):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    ids = {word: n for n, word in enumerate(SYMBOLS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<eos>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(files / "tokenizer.json"))
    convert.to_workdir(request(files, vocab=str(files / "tokenizer.json")))
    os.remove(files / "tokenizer.json")
    trained = txl_jax.load(str(files / "run"))
    assert (trained.vocab.kind, trained.config.data.tokenizer) == ("tokenizer", None)
    data = {"path": str(files / "text.txt")}
    assert trained.evaluate(data=data, batch_size=1, mem_len=8).targets > 0


def test_an_nvidia_state_is_recognised_and_gets_its_window(tmp_path):
    prepare(tmp_path, foreign_states.nvidia)
    with pytest.raises(ModelFormatError, match="has the tensor names of nvidia; give the format"):
        convert.to_workdir(request(tmp_path, format="pytorch"))
    convert.to_workdir(request(tmp_path))
    assert txl_jax.load(str(tmp_path / "run")).config.model.same_length == "tf"


def test_an_nvidia_checkpoint_has_its_own_arguments_and_vocabulary(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    state = foreign_states.nvidia(convert.config_from_pytorch(ARGS))
    content = {
        "model_state": {name: torch.tensor(np.array(array)) for name, array in state.items()},
        "model_config": {**ARGS, "dropout": 0.1, "dropatt": 0.0},
        "vocab": {"idx2sym": SYMBOLS},
        "train_step": 40,
    }
    torch.save(content, tmp_path / "best.pt")
    source = str(tmp_path / "best.pt")
    r = request(tmp_path, source=source, format="nvidia", args={"mem_len": 20}, vocab=None)
    convert.to_workdir(r)
    trained = txl_jax.load(str(tmp_path / "run"))
    assert (trained.step, trained.config.evaluate.mem_len) == (40, 20)
    assert trained.vocab.symbols == SYMBOLS


def test_training_does_not_go_on_from_parameters_alone(files):
    convert.to_workdir(request(files))
    exp = txl_jax.load(str(files / "run")).config
    with (
        Checkpoints(str(files / "run")) as checkpoints,
        pytest.raises(CheckpointError, match="has parameters but no optimizer"),
    ):
        checkpoints.restore(None, exp.to_dict())


@pytest.mark.parametrize(
    ("symbols", "data"),
    [
        ([*"etaoin_"], {"name": "text8"}),
        (["<S>", "<UNK>", "the"], {"name": "lm1b"}),
        (["101", "32", "10"], {"name": "enwik8", "protocol": "bytes"}),
        (["101", "32"], {"name": "enwik8", "protocol": "authors"}),
        (["<eos>", "the"], {"name": "text", "vocab": "word"}),
        (["<eos>", *map(str, range(267_734))], {"name": "wt103"}),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_without_a_corpus_the_vocabulary_tells_which_it_is_of(files, symbols, data):
    (files / "symbols.json").write_text(json.dumps(symbols))
    args = {**SHAPE, "n_token": len(symbols)}
    if len(symbols) > 10:
        args |= {"d_model": 2, "d_head": 1, "d_inner": 2, "n_layer": 1}
    model = convert.config_from_pytorch(args)
    state = {name: np.array(array) for name, array in foreign_states.pytorch(model).items()}
    save_file(state, str(files / "state.safetensors"))
    convert.to_workdir(request(files, args=args, vocab=str(files / "symbols.json")))
    found = txl_jax.load(str(files / "run")).config.data
    assert {key: getattr(found, key) for key in data} == data


# --------------------------------------------------------------------------------------
# Export.


def test_the_record_of_an_exported_model_describes_the_text_that_is_given(files):
    convert.to_workdir(request(files))
    convert.export(str(files / "run"), str(files / "out"))
    symbols = txl_jax.load(str(files / "run")).vocab.symbols
    (files / "other.txt").write_text(f"{' '.join(symbols[1:])}\n" * 40)
    data = {"name": "text", "vocab": "word", "path": str(files / "other.txt")}
    again = convert.Request(source=str(files / "out"), workdir=str(files / "again"), data=data)
    convert.to_workdir(again)
    record = json.loads((files / "again" / "config.json").read_text())
    corpus = txl_jax.load(str(files / "again")).evaluate(batch_size=1, mem_len=8)
    assert record["corpus"]["source_hash"] == corpus.about["source_hash"]


def test_an_exported_model_comes_back_bit_for_bit(files):
    convert.to_workdir(request(files))
    want = txl_jax.load(str(files / "run"))
    out = str(files / "out")
    assert convert.export(str(files / "run"), out) == 0
    copy = str(files / "copy")
    assert convert.export(out, copy, step="latest") == 0
    for got in (convert.load_exported(out), txl_jax.load(copy, step=0), _reconverted(files, out)):
        assert_same(got.params, want.params)
        assert got.vocab == want.vocab
        assert got.config.model == want.config.model
        assert got.config.evaluate == want.config.evaluate


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (
            {"step": 3},
            "step=3: {} is an exported model, with step 0 and one set of parameters only",
        ),
        (
            {"step": "newest"},
            "step=newest: {} is an exported model, with step 0 and one set of parameters only",
        ),
        (
            {"weights": "ema"},
            "weights=ema: {} is an exported model, with step 0 and one set of parameters only",
        ),
    ],
)
def test_an_exported_model_is_not_that_of_another_step_or_of_other_weights(asked, fault, files):
    convert.to_workdir(request(files))
    convert.export(files / "run", files / "out")
    with pytest.raises(WorkdirError) as caught:
        txl_jax.load(files / "out", **asked)
    assert str(caught.value) == fault.format(files / "out")


def _reconverted(files, source):
    convert.to_workdir(Request(source=source, workdir=str(files / "again")))
    return txl_jax.load(str(files / "again"))


def test_parameters_survive_the_file_however_they_lie_in_memory(tmp_path):
    cfg = tiny.config(attention="shaw", n_positions=5, cutoffs=(4,), div_val=2)
    rng = np.random.default_rng(0)
    transposed = lambda leaf: rng.standard_normal(leaf.shape[::-1], np.float32).T
    params = jax.tree.map(transposed, tiny.shapes(cfg))
    path = str(tmp_path / "model.safetensors")
    save_file(tensors.flat_params(params), path)
    flat = convert.files.read(path).tensors
    assert_same(tensors.params_from_flat(flat, param_shapes(cfg)), params)
    del flat["layer_0/attention/distance"]
    flat["layer_2/attention/u"] = np.zeros(3)
    with pytest.raises(
        ModelFormatError, match=r"layer_0/attention/distance \[5, 2, 3\] is missing"
    ):
        tensors.params_from_flat(flat, param_shapes(cfg))
    with pytest.raises(ModelFormatError, match="layer_2/attention/u is not known"):
        tensors.params_from_flat(flat, param_shapes(cfg))


def test_a_damaged_export_is_refused(files):
    convert.to_workdir(request(files))
    out = files / "out"
    convert.export(str(files / "run"), str(out))
    (out / "config.json").write_text("{")
    with pytest.raises(WorkdirError, match=r"config\.json: is not JSON"):
        convert.load_exported(str(out))
    (out / "config.json").unlink()
    with pytest.raises(WorkdirError, match=r"config\.json: cannot be read"):
        convert.load_exported(str(out))


# --------------------------------------------------------------------------------------
# Errors: no workdir is written.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "gone.safetensors"}, "there is no such file, folder or TF checkpoint"),
        ({"args": None}, "format pytorch needs args"),
        ({"args": {**ARGS, "n_layer": 0}}, r"model\.n_layer = 0"),
        ({"args": {**ARGS, "n_token": 17}}, "has 16 symbols, but the model has 17; name the"),
        (
            {"args": {**ARGS, "same_length": True, "mem_len": 0}},
            "allows only distances below the memory",
        ),
        ({"vocab": None}, "has no readable vocabulary"),
        ({"vocab": "gone.txt"}, "there is no such file"),
        ({"format": "keras"}, "format 'keras': must be one of pytorch, nvidia"),
        ({"overrides": {"model.n_layer": "3"}}, "the source defines the model; leave the key"),
        ({"overrides": {"evaluate.seg_lenn": "3"}}, "nearest key is 'evaluate.seg_len'"),
    ],
)
def test_a_request_that_cannot_work_leaves_no_workdir(files, changes, message):
    with pytest.raises(ValueError, match=message):
        convert.to_workdir(request(files, **changes))
    assert not (files / "run").exists()


def test_a_state_that_does_not_fit_leaves_no_workdir(files):
    with pytest.raises(ModelFormatError, match="do not fit"):
        convert.to_workdir(request(files, args={**ARGS, "n_layer": 3}))
    assert not (files / "run").exists()


def test_a_folder_with_something_in_it_is_left_as_it_is(files):
    (files / "run").mkdir()
    (files / "run" / "notes.txt").write_text("mine")
    for call in (
        lambda: convert.to_workdir(request(files)),
        lambda: convert.export(str(files / "nothing"), str(files / "run")),
    ):
        with pytest.raises(ModelFormatError, match="is not empty"):
            call()
    assert os.listdir(files / "run") == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--workdir"),
        (("--workdir=w",), "SOURCE or --workdir is missing"),
        (("s", "--workdir=w", "--vocab=v", "--corpus=text"), "both name a vocabulary"),
        (("s", "--workdir=w", "--path=p"), "--path needs a --corpus"),
        (("s", "--workdir=w", "--format=keras"), "invalid choice: 'keras'"),
        (("s", "--to=safetensors", "o", "--vocab=v"), "allows no other flag than --step"),
    ],
)
def test_flags_that_make_no_sense_are_refused(arguments, message, capsys):
    from txl_jax.convert.__main__ import main

    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_errors_of_the_command_are_one_line(files, capsys):
    from txl_jax.convert.__main__ import main

    (files / "args.json").write_text("[1]")
    source = str(files / "state.safetensors")
    args = f"--args={files / 'args.json'}"
    assert main([source, args, f"--vocab={files / 'vocab.txt'}", f"--workdir={files / 'run'}"]) == 2
    assert "args.json: is JSON, but not an object {...}" in capsys.readouterr().err


@pytest.mark.integration
def test_a_failed_save_is_one_line_and_the_folder_is_no_workdir(files):
    code = """
import resource, sys
from txl_jax.convert.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # bytes, so that a save fails
sys.exit(main(sys.argv[1:]))
"""
    flags = (f"--args={files / 'args.json'}", f"--vocab={files / 'vocab.txt'}")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            files / "state.safetensors",
            f"--workdir={files / 'run'}",
            *flags,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
        # JAX writes programs that take long to compile to a cache. Here, this would fail and warn.
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "cannot be written" in line
    assert "File too large" in line
    assert not (files / "run" / "config.json").exists()
