"""A model that was read is written again with the same arrays, names, shapes and arguments.

test_original_programs.py tests that the other programs load such files.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable

import foreign_states
import jax
import numpy as np
import pytest
import tiny_models as tiny
from foreign_runs import ARGS, command, prepare
from places import RECORDED
from recorded_models import Recorded, recordings
from safetensors.numpy import load_file

import txl_jax
from txl_jax import convert
from txl_jax.checkpoint.trained_model import param_shapes, with_settings
from txl_jax.convert import ModelFormatError, Request, arguments, tensorflow
from txl_jax.convert.__main__ import main
from txl_jax.convert.table import write_state
from txl_jax.model.layout import stack_layers

OTHERS = RECORDED / "others"
LENGTHS = ("tgt_len", "ext_len", "mem_len")


def assert_equal_bits(got, want):
    """Asserts that two dicts of arrays have the same names, shapes, dtypes and bytes."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype), name
        assert got[name].tobytes() == np.asarray(array).tobytes(), name


# --------------------------------------------------------------------------------------
# Models that are read and written again.


@pytest.mark.parametrize(("name", "where"), recordings())
def test_a_recorded_pytorch_model_goes_out_as_it_came_in(name, where):
    run = Recorded(name, where)
    state, args, impl = run.under("param/"), run.meta["constructor"], run.meta["impl"]
    cfg = convert.config_from_pytorch(run.constructor_args())
    params = convert.params_from_pytorch(state, cfg)
    assert_equal_bits(convert.params_to_pytorch(params, cfg, impl=impl), state)
    lengths = {key: args[key] for key in LENGTHS}
    if cfg.untie_r:  # the authors' code has no untie_r; the recording added it
        with pytest.raises(ModelFormatError, match=r"untie_r = True: the authors' PyTorch code"):
            convert.config_to_pytorch(cfg, **lengths, impl=impl)
    else:
        given = {"dtype": None} if impl == "nvidia" else {}
        assert convert.config_to_pytorch(cfg, **lengths, impl=impl) == {**args, **given}


@pytest.mark.parametrize("path", sorted(OTHERS.glob("hf_*.json")), ids=lambda path: path.stem)
def test_a_recorded_huggingface_model_goes_out_as_it_came_in(path):
    args, arrays = json.loads(path.read_text())["args"], np.load(path.with_suffix(".npz"))
    state = {k.removeprefix("param/"): arrays[k] for k in arrays if k.startswith("param/")}
    cfg = convert.config_from_huggingface(args)
    params = convert.params_from_huggingface(state, cfg)
    assert_equal_bits(convert.params_to_huggingface(params, cfg), state)
    got = convert.config_to_huggingface(cfg, tgt_len=5, mem_len=args["mem_len"])
    assert {key: value for key, value in got.items() if key in args and args[key] is not None} == {
        key: args[key] for key in got if args.get(key) is not None
    }
    assert got.keys() - args.keys() == {"tgt_len", "ext_len"}
    assert convert.config_from_huggingface(got) == cfg


@pytest.mark.parametrize("path", sorted(OTHERS.glob("tf_*.json")), ids=lambda path: path.stem)
def test_the_table_of_tensorflows_names_reads_backwards_too(path):
    args, arrays = json.loads(path.read_text())["args"], np.load(path.with_suffix(".npz"))
    state = {k.removeprefix("param/"): arrays[k] for k in arrays if k.startswith("param/")}
    cfg = convert.config_from_tensorflow(args)
    params = convert.params_from_tensorflow(state, cfg)
    assert_equal_bits(write_state(tensorflow.table(cfg), params), state)


FORMS: dict[str, dict] = {
    "adaptive": {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (True, False, True)},
    "untied": {"tie_weight": False, "d_embed": 6, "cutoffs": (4,), "tie_projs": (False, False)},
    "window": {"same_length": "pytorch", "clamp_len": 5, "dropout": 0.1, "dropatt": 0.2},
    "pre_norm": {"pre_lnorm": True, "scan_layers": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_scanned_and_unrolled_models_of_this_project_come_back(form):
    cfg = tiny.config(**FORMS[form])
    unrolled = txl_jax.TransformerXLConfig(**{**vars(cfg), "scan_layers": False})
    params = tiny.variables(unrolled)["params"]
    given = stack_layers(params) if cfg.scan_layers else params
    state = convert.params_to_pytorch(given, cfg, impl="kimiyoung")
    args = convert.config_to_pytorch(cfg, tgt_len=8, mem_len=6, impl="kimiyoung")
    assert convert.config_from_pytorch(json.loads(json.dumps(args))) == unrolled
    jax.tree.map(np.testing.assert_array_equal, convert.params_from_pytorch(state, cfg), params)


def test_parameters_of_another_shape_are_all_named():
    cfg = tiny.config()
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), tiny.shapes(cfg))
    params["v"] = np.zeros((2, 2))
    params["mixture_prior"] = params.pop("softmax_bias")
    with pytest.raises(ModelFormatError, match=r"softmax_bias \[13\] is missing") as error:
        convert.params_to_pytorch(params, cfg, impl="kimiyoung")
    assert "v is [2, 2], expected [2, 3]" in str(error.value)
    assert "mixture_prior is not known" in str(error.value)


# --------------------------------------------------------------------------------------
# Arguments.


CALLS: dict[str, Callable] = {
    "pytorch": functools.partial(convert.config_to_pytorch, impl="kimiyoung"),
    "nvidia": functools.partial(convert.config_to_pytorch, impl="nvidia"),
    "huggingface": convert.config_to_huggingface,
}


@pytest.mark.parametrize(
    ("lengths", "written"),
    [
        ((4, 0, 5), (4, 0, 5)),
        ((4, 2, 5), (2, 2, 5)),
        ((4, 0, 20), (1, 0, 8)),
        ((4, 9, 9), (1, 8, 0)),
    ],
)
def test_lengths_have_the_sum_of_the_position_table(lengths, written):
    cfg = tiny.config(attention="shaw", n_positions=9)
    given = dict(zip(LENGTHS, lengths, strict=True))
    args = convert.config_to_pytorch(cfg, **given, impl="kimiyoung")
    assert tuple(args[key] for key in LENGTHS) == written
    assert convert.config_from_pytorch(args) == cfg


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        ("pytorch", {"gate": "gru"}, r"model\.gate = 'gru': the other programs have no such"),
        ("pytorch", {"mixtures": 2}, r"model\.mixtures = 2: the other"),
        (
            "pytorch",
            {"pre_lnorm": True, "final_norm": True},
            r"model\.final_norm = True: the other",
        ),
        ("pytorch", {"activation": "gelu"}, r"model\.activation = 'gelu': the other"),
        (
            "pytorch",
            {"attention": "shared_projection"},
            r"model\.attention = 'shared_projection': the authors' PyTorch code has 'relative', "
            r"'shaw', 'absolute', 'absolute_per_layer' only",
        ),
        ("pytorch", {"same_length": "tf"}, r"same_length = 'tf': .* has False, 'pytorch' only"),
        ("nvidia", {"same_length": "pytorch"}, r"= 'pytorch': NVIDIA's code has False, 'tf' only"),
        ("nvidia", {"untie_r": True}, r"model\.untie_r = True: NVIDIA's code has False only"),
        ("pytorch", {"norm_epsilon": 1e-12}, r"model\.norm_epsilon = 1e-12: .* has 1e-05 only"),
        (
            "pytorch",
            {"div_val": 2, "proj_same_dim": False},
            r"model\.proj_same_dim = False: with",
        ),
        (
            "huggingface",
            {"attention": "absolute"},
            r"model\.attention = 'absolute': Hugging Face's TransfoXL has 'relative' only; docs",
        ),
        ("huggingface", {"same_length": "tf"}, r"model\.same_length = 'tf': Hugging Face's"),
    ],
)
def test_a_setting_that_the_program_lacks_is_refused_with_what_it_has(to, changes, message):
    with pytest.raises(ModelFormatError, match=message):
        CALLS[to](tiny.config(**changes), tgt_len=4, mem_len=4)


def test_a_projection_that_is_missing_nowhere_is_no_reason_to_refuse():
    cfg = tiny.config(proj_same_dim=False)
    assert convert.config_to_pytorch(cfg, tgt_len=4, mem_len=4, impl="kimiyoung")["div_val"] == 1


@pytest.mark.parametrize("to", ["pytorch", "nvidia", "huggingface"])
def test_a_setting_that_no_program_is_known_to_have_is_refused_unless_it_is_the_default(to):
    """Writing never loses a new model setting silently, not even one without parameters."""

    @dataclasses.dataclass(frozen=True)
    class Wider(txl_jax.TransformerXLConfig, key="model"):
        layer_scale: float = 1.0

    given = vars(tiny.config())
    CALLS[to](Wider(**given), tgt_len=4, mem_len=4)
    with pytest.raises(ModelFormatError, match=r"model\.layer_scale = 0\.5: the other"):
        CALLS[to](Wider(**given, layer_scale=0.5), tgt_len=4, mem_len=4)


def test_the_settings_that_are_written_or_need_not_be_exist():
    known = arguments.CONVERTED
    assert known <= {field.name for field in dataclasses.fields(txl_jax.TransformerXLConfig)}


# --------------------------------------------------------------------------------------
# Folders.


@pytest.fixture
def workdir(tmp_path):
    """Returns the workdir of a converted word model, with the lengths of ``ARGS``."""
    prepare(tmp_path)
    run = str(tmp_path / "run")
    source, vocab = str(tmp_path / "state.safetensors"), str(tmp_path / "vocab.txt")
    convert.to_workdir(Request(source=source, vocab=vocab, workdir=run, args=ARGS))
    return run


def test_a_workdir_and_its_export_are_written_with_arguments_and_words(workdir, tmp_path):
    convert.export(workdir, tmp_path / "exported")
    want = foreign_states.pytorch(convert.config_from_pytorch(ARGS))
    for n, source in enumerate((workdir, str(tmp_path / "exported"))):
        out = tmp_path / f"out_{n}"
        assert main([source, "--to=pytorch", str(out)]) == 0
        assert sorted(os.listdir(out)) == ["args.json", "model.safetensors", "vocab.json"]
        args = json.loads((out / "args.json").read_text())
        assert {**args, **ARGS} == args
        assert json.loads((out / "vocab.json").read_text())["symbols"][0] == "<eos>"
        state = load_file(str(out / "model.safetensors"))
        frequencies = state.pop("pos_emb.inv_freq")
        np.testing.assert_allclose(frequencies, 10000 ** -(np.arange(8) / 8), rtol=1e-6)  # rounding
        assert_equal_bits(state, {k: v for k, v in want.items() if k != "pos_emb.inv_freq"})


def test_evaluation_gives_lengths_window_and_clamping(workdir, tmp_path):
    trained = txl_jax.load(workdir)
    changes = {"mem_len": 20, "seg_len": 4, "clamp_len": 9, "same_length": False}
    exp = txl_jax.config.override(
        trained.config, {f"evaluate.{key}": value for key, value in changes.items()}
    )
    convert.save_as(with_settings(trained, exp), tmp_path / "out", to="huggingface")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    named = {"mem_len": 20, "tgt_len": 4, "clamp_len": 9, "same_length": False, "eos_token_id": 0}
    assert {**config, **named} == config


def test_a_huggingface_folder_is_converted_back_as_it_is(workdir, tmp_path):
    out, again = str(tmp_path / "out"), str(tmp_path / "again")
    trained = txl_jax.load(workdir)
    convert.save_as(trained, out, to="huggingface")
    convert.to_workdir(Request(source=out, workdir=again))
    back = txl_jax.load(again)
    assert back.vocab == trained.vocab
    ties = dataclasses.replace(trained.config.model, tie_projs=(False, False, False))
    assert back.config.model == ties  # three times False has the same effect as (False,)
    jax.tree.map(np.testing.assert_array_equal, back.params, trained.params)


def test_a_refused_model_and_a_folder_with_something_in_it_leave_all_as_it_is(workdir, tmp_path):
    # The model has same_length = 'pytorch', which NVIDIA's code does not have.
    assert main([workdir, "--to=nvidia", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ModelFormatError, match="mine: is not empty"):
        convert.save_as(txl_jax.load(workdir), tmp_path / "mine", to="pytorch")
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]
    with pytest.raises(ModelFormatError, match="to = 'keras' is not supported; there are 'pyto"):
        convert.save_as(txl_jax.load(workdir), tmp_path / "out", to="keras")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--to=pytorch"), "--to needs a SOURCE and a new folder OUT"),
        (("run", "--to=pytorch", "out", "--vocab=v"), "no other flag than --step"),
        (("run", "--to=pytorch", "out", "--config.evaluate.seg_len=3"), "no other flag"),
        (("run", "--to=keras", "out"), "invalid choice: 'keras'"),
        (("run", "out", "--workdir=w"), "--step and OUT need --to"),
        (("run", "--workdir=w", "--step=latest"), "--step and OUT need --to"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pytorch", "nvidia", "huggingface"])
def test_a_model_trained_here_comes_back_with_its_losses(trained_run, tmp_path, to):
    out, again = tmp_path / "out", tmp_path / "again"
    done = command(trained_run.workdir, f"--to={to}", out)
    assert (done.returncode, done.stdout) == (0, f"step 12 is in {out}, for {to}\n"), done.stderr
    own = () if to == "huggingface" else (f"--args={out / 'args.json'}", f"--format={to}")
    own = (*own, "--config.mesh.data=1")  # one device, as in training: more round differently
    done = command(out, *own, f"--vocab={out / 'vocab.json'}", f"--workdir={again}")
    assert done.returncode == 0, done.stderr
    want, got = txl_jax.load(str(trained_run.workdir)), txl_jax.load(str(again))
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    assert param_shapes(got.config.model) == param_shapes(want.config.model)
    text = {"path": str(trained_run.folder / "text.txt")}
    again_and_before = (
        model.evaluate(data=text, first_memory="empty", batch_size=4).loss for model in (got, want)
    )
    assert len(set(again_and_before)) == 1
