"""Every shipped config is a valid experiment, and so is its smoke variant."""

import pathlib

import jax
import pytest

import txl_jax
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import init_state

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.py"))
VOCAB = {"byte": 256, "char": 100, "word": 10_000}
OWN = {"stdlib": "byte", "ptb": "word"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
@pytest.mark.parametrize("variant", ["", ":smoke"])
def test_config_is_valid_and_its_state_has_a_shape(path, variant):
    exp = txl_jax.load_config(f"{path}{variant}")
    assert exp.name == path.stem
    size = exp.model.vocab_size or VOCAB[exp.data.vocab or OWN[exp.data.name]]
    exp = txl_jax.config.override(exp, {"model.vocab_size": size})
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp.optimizer, exp.train.steps)
    state = jax.eval_shape(lambda: init_state(exp, model, optimizer))
    assert state.mems.mem_len == exp.train.mem_len


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_header_has_the_command(path):
    assert f"--config=configs/{path.name}" in path.read_text().split('"""')[1]
