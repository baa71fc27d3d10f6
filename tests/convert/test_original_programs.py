"""Other programs load the models written for them, and compute the same losses within 1e-5.

Tests are skipped without torch or the program's code; see ``helpers/original_programs.py``.
"""

import dataclasses
import json

import numpy as np
import original_programs
import pytest
import tiny_runs
from places import RECORDED
from recorded_models import Recorded, recordings

import txl_jax
from txl_jax import convert
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import ExperimentConfig
from txl_jax.data.vocab import Vocab

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float32_products")]

TOLERANCE = 1e-5  # programs sum in another order, so float32 rounds differently
OTHERS = RECORDED / "others"


def written(cfg, params, args, folder, to):
    """Writes a model for the program ``to``; returns the folder.

    ``args`` gives the lengths of segments, memory and context.
    """
    lengths = {"seg_len": args.get("tgt_len", 5), "mem_len": args["mem_len"]}
    lengths["context_len"] = args.get("ext_len", 0)
    settings: dict = {section: lengths for section in ("train", "validate", "evaluate")}
    settings["generate"] = {"mem_len": max(args["mem_len"], 1)}
    exp = ExperimentConfig.from_dict({**settings, "model": dataclasses.asdict(cfg)})
    vocab = Vocab.from_ids(cfg.vocab_size)
    convert.save_as(TrainedModel(txl_jax.TransformerXL(cfg), params, vocab, exp, 0), folder, to)
    return folder


@pytest.mark.parametrize(("name", "where"), recordings())
def test_the_pytorch_programs_load_a_recorded_model(name, where, tmp_path):
    run = Recorded(name, where)
    if run.meta["extras"].get("untie_r"):
        pytest.skip("the program has no untie_r: it was added for the recording")
    cfg = convert.config_from_pytorch(run.constructor_args())
    params = convert.params_from_pytorch(run.under("param/"), cfg)
    program = {"kimiyoung": "pytorch", "nvidia": "nvidia"}[run.meta["impl"]]
    folder = written(cfg, params, run.meta["constructor"], tmp_path / "out", program)
    model = original_programs.model(program, folder)
    if lengths := run.meta["extras"].get("reset_length"):
        model.reset_length(**lengths)
    import torch

    first = [torch.tensor(state) for _, state in sorted(run.under("init_mem/").items())]
    of = lambda key: [run.arrays[f"seg{i}/{key}"] for i in range(run.n_segments)]
    segments = [(x.T, y.T) for x, y in zip(of("inp"), of("tgt"), strict=True)]
    got = original_programs.losses(program, model, segments, first or None)
    for i, (loss, want) in enumerate(zip(got, of("loss"), strict=True)):
        np.testing.assert_allclose(loss.T, want, rtol=0, atol=TOLERANCE, err_msg=f"segment {i}")


@pytest.mark.parametrize("path", sorted(OTHERS.glob("hf_*.json")), ids=lambda path: path.stem)
def test_huggingfaces_library_loads_a_recorded_model(path, tmp_path):
    args, arrays = json.loads(path.read_text())["args"], np.load(path.with_suffix(".npz"))
    state = {k.removeprefix("param/"): arrays[k] for k in arrays if k.startswith("param/")}
    cfg = convert.config_from_huggingface(args)
    params = convert.params_from_huggingface(state, cfg)
    model = original_programs.model(
        "huggingface", written(cfg, params, args, tmp_path / "out", "huggingface")
    )
    segments = [(arrays[f"seg{i}/inp"],) * 2 for i in range(3)]
    got = original_programs.losses("huggingface", model, segments)
    for i, (tokens, loss) in enumerate(zip(segments, got, strict=True)):
        logp = np.take_along_axis(arrays[f"seg{i}/logp"], tokens[0][..., None], 2)[..., 0]
        np.testing.assert_allclose(-loss, logp, rtol=0, atol=TOLERANCE, err_msg=f"segment {i}")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Returns a word model with an adaptive softmax that this project trained."""
    folder = tmp_path_factory.mktemp("words")
    model = {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (False, True, True), "clamp_len": 20}
    changes = {f"model.{key}": value for key, value in model.items()}
    tiny_runs.run_in_workdir(folder, folder / "run", **{"data.vocab": "word", **changes})
    return txl_jax.load(str(folder / "run"))


@pytest.mark.parametrize("to", ["pytorch", "nvidia", "huggingface"])
@pytest.mark.parametrize("of", ["letters", "words"])
def test_a_model_trained_here_has_its_losses_there(of, to, trained_run, words, tmp_path):
    trained = words if of == "words" else txl_jax.load(str(trained_run.workdir))
    convert.save_as(trained, tmp_path / "out", to)
    theirs = original_programs.model(to, tmp_path / "out")
    tokens = np.asarray(trained.vocab.encode(tiny_runs.text(40, seed=1)))[:98].reshape(2, 49)
    segments = [(tokens[:, s : s + 16], tokens[:, s + 1 : s + 17]) for s in (0, 16, 32)]
    mems = trained.model.init_mems(2, trained.config.evaluate.mem_len)
    if to == "huggingface":  # it begins with a memory of zeros, and queries attend to it
        mems = mems.replace(filled=np.full_like(mems.filled, mems.mem_len))
    for got, (inputs, targets) in zip(
        original_programs.losses(to, theirs, segments), segments, strict=True
    ):
        want, mems = trained.model.apply(
            {"params": trained.params}, inputs, targets, mems, method="nll"
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
