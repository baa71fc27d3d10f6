"""The programs of docs/own_program.md carry memory, and compute what the library computes."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
import tiny_models as tiny
from places import DOCS

import txl_jax
from txl_jax.config import ExperimentConfig
from txl_jax.data.batch import Batch
from txl_jax.data.vocab import Vocab
from txl_jax.training.loss import batch_loss, denominators

TEXT = (DOCS / "own_program.md").read_text(encoding="utf-8")
FIRST, *PARTS = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)
SECTIONS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
CARRIED = {
    "flax.nnx": ("nll, mems = losses_of(", "nll, _ = losses_of("),
    "equinox": ("grads, (nll, mems) = grads_and", "grads, (nll, _) = grads_and"),
    "jax.shard_map": ("nll, mems = sharded(", "nll, _ = sharded("),
    "Save the memory": ('{"params": params, "mems": mems}', '{"params": params, "mems": empty}'),
}
"""For each section, code that carries memory, and the same code without carrying it."""


def run(text, names):
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "own_program.md", "exec"), names)


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Variables that the page's first block defines, for a small model whose memory matters."""
    cfg = tiny.config(vocab_size=256)
    exp = ExperimentConfig.from_dict({"model": dataclasses.asdict(cfg), "name": "tiny"})
    vocab = Vocab("byte", [str(value) for value in range(256)])
    params = jax.tree.map(np.asarray, tiny.variables(cfg)["params"])
    model = txl_jax.LanguageModel(txl_jax.TransformerXL(cfg), params, vocab, exp, step=1)
    txl_jax.save(model, tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    run(FIRST, found)
    found["empty"] = found["model"].init_mems(batch_size=found["B"], mem_len=found["M"])
    return found


@pytest.mark.integration
def test_all_programs_but_that_of_equinox_run(names):
    for title, section in SECTIONS.items():
        if title != "equinox":
            run(section, names)


@pytest.mark.integration
def test_the_program_of_equinox_runs(names):
    pytest.importorskip("equinox", reason="not installed: equinox (pip install equinox)")
    run(SECTIONS["equinox"], names)


@pytest.mark.integration
def test_the_loop_of_optax_makes_the_updates_of_the_library(names):
    run(SECTIONS["Plain JAX and optax"], names)
    network, params, mems = names["model"], names["params"], names["empty"]
    optimizer, ones = optax.adam(1e-3), np.ones(names["inputs"].shape[1:], np.float32)
    state, key = optimizer.init(params), jax.random.key(0)

    def of_batch(params, batch, mems):
        loss, whole = ExperimentConfig().loss, denominators(ones)
        return batch_loss(params, network, batch, mems, key, loss, whole)

    for inputs, targets in zip(names["inputs"], names["targets"], strict=True):
        batch = Batch(inputs, targets, ones, np.zeros(len(ones), bool))
        grads, (_, mems) = tiny.quick(jax.grad(of_batch, has_aux=True))(params, batch, mems)
        change, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, change)
    # Adam divides by the size of the gradient, so rounding of small gradients is enlarged.
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4)
    jax.tree.map(close, names["learnt"], params)
    jax.tree.map(close, names["mems"], mems)


@pytest.mark.integration
@pytest.mark.parametrize("title", CARRIED)
def test_memory_that_is_not_carried_is_noticed(title, names):
    if title == "equinox":
        pytest.importorskip("equinox", reason="not installed: equinox (pip install equinox)")
    carried, forgotten = CARRIED[title]
    section = SECTIONS[title].partition("An `nnx.Optimizer`")[0]
    assert carried in section
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(section.replace(carried, forgotten, 1), names)
