"""Programs that benchmarks compare with txl_jax compute the same values in the same dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax
from benchmarks import plain_transformer_xl
from benchmarks.sizes import experiment
from txl_jax.parallel.platforms import prefers_bfloat16


def plain_params(params, n_layer):
    """Returns parameters of txl_jax under the names of the plain Flax model."""
    plain = {name: params[name] for name in ("u", "v", "softmax_bias")}
    plain["embedding"] = {"embedding": params["embedding"]}
    for n in range(n_layer):
        layer = params[f"layer_{n}"]
        kernels = {name: {"kernel": kernel} for name, kernel in layer["attention"].items()}
        plain[f"attention_{n}"] = kernels
        for norm in ("norm_attention", "norm_feed_forward"):
            plain[f"{norm}_{n}"] = layer[norm]
        for dense in ("inner", "outer"):
            plain[f"{dense}_{n}"] = layer["feed_forward"][dense]
    return {"params": plain}


@pytest.mark.slow
def test_plain_flax_has_the_losses_the_memory_and_the_gradient_of_the_model():
    cfg, (b, t, m) = tiny.config(), (2, 5, 4)
    variables, rng = tiny.variables(cfg), np.random.default_rng(0)
    tokens, targets = rng.integers(0, cfg.vocab_size, (2, b, t))
    hidden = rng.normal(size=(cfg.n_layer, b, m, cfg.d_model)).astype(np.float32)
    model: Any = txl_jax.TransformerXL(cfg)
    plain: Any = plain_transformer_xl.PlainTransformerXL(cfg)
    mems = model.init_mems(b, m).replace(hidden=hidden, filled=jnp.full(b, m, jnp.int32))

    def ours(params):
        nll, new = model.apply({"params": params}, tokens, targets, mems, method="nll")
        return nll.sum(), (nll, new.hidden)

    def theirs(params):
        nll, new = plain.apply(plain_params(params, cfg.n_layer), tokens, targets, hidden)
        return nll.sum(), (nll, new)

    gradient, (nll, new) = jax.grad(ours, has_aux=True)(variables["params"])
    plain_gradient, (plain_nll, plain_new) = jax.grad(theirs, has_aux=True)(variables["params"])
    np.testing.assert_allclose(plain_nll, nll, atol=1e-5)
    np.testing.assert_allclose(plain_new, new, atol=1e-5)
    for mine, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain_gradient), strict=True):
        assert np.abs(mine - other).max() <= 1e-5 * max(1.0, np.abs(mine).max())


@pytest.mark.parametrize("name", ["tiny", "enwik8_12l"])
def test_peers_are_told_the_dtype_that_this_machine_computes_in(name):
    """``auto`` is resolved first, since the PyTorch programs would read it as bfloat16."""
    here = "bfloat16" if prefers_bfloat16(None) else "float32"
    assert experiment(name, {"model.dtype": "auto"}).to_dict()["model"]["dtype"] == here
    assert experiment(name, {"model.dtype": "bfloat16"}).model.dtype == "bfloat16"


@pytest.mark.slow
def test_plain_flax_learns_from_its_updates():
    exp = experiment("tiny", {"optimizer.learning_rate": 1e-2})
    state, update = plain_transformer_xl.training(exp)
    batch = np.random.default_rng(0).integers(0, exp.model.vocab_size, (2, 2, 16))
    losses = []
    for _ in range(30):
        state, loss = update(state, *batch)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
