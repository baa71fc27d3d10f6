"""Losses and memories equal those of the authors' TensorFlow code and Hugging Face's TransfoXL.

``recorded/others`` holds both programs' variables, inputs and results (see its README). Both
programs begin with a memory of zeros, and queries attend to it. Tolerance: 1e-5, in float32.
"""

import json

import jax
import numpy as np
import pytest
import tiny_models as tiny
from places import RECORDED

import txl_jax
from txl_jax import convert

pytestmark = pytest.mark.usefixtures("float32_products")

FOLDER = RECORDED / "others"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
TOLERANCE = 1e-5

CONFIG = {
    "tensorflow": convert.config_from_tensorflow,
    "huggingface": convert.config_from_huggingface,
}
PARAMS = {
    "tensorflow": convert.params_from_tensorflow,
    "huggingface": convert.params_from_huggingface,
}


def test_recordings_of_both_programs_are_found():
    assert {name[:2] for name in NAMES} == {"tf", "hf"}
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_memories_equal_the_other_program(name):
    about = json.loads((FOLDER / f"{name}.json").read_text())
    arrays = np.load(FOLDER / f"{name}.npz")
    program, args = about["program"], about["args"]
    cfg = CONFIG[program](args)
    state = {k.removeprefix("param/"): arrays[k] for k in arrays if k.startswith("param/")}
    variables = {"params": PARAMS[program](state, cfg)}
    model = txl_jax.TransformerXL(cfg)
    mems = model.init_mems(2, args["mem_len"])
    mems = mems.replace(filled=np.full_like(mems.filled, args["mem_len"]))
    call = tiny.quick(model.apply, static_argnames="method")
    for i in range(3):
        inputs = arrays[f"seg{i}/inp"]
        if program == "tensorflow":
            nll, mems = call(variables, inputs, arrays[f"seg{i}/tgt"], mems, method="nll")
            assert_close(nll.mean(), arrays[f"seg{i}/loss"], f"loss, segment {i}")
        else:
            logits, mems = call(variables, inputs, mems)
            got = jax.nn.log_softmax(logits)
            assert_close(got, arrays[f"seg{i}/logp"], f"log-probabilities, segment {i}")
        for n in range(cfg.n_layer):
            want = arrays[f"seg{i}/mem/{n}"].swapaxes(0, 1)
            assert_close(mems.hidden[n], want, f"memory of layer {n}, segment {i}")


def assert_close(got, want, what):
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE, err_msg=what)
