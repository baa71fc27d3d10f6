"""Outputs, gradients and stored states equal those of the program ``transformerXL_PPO_JAX``.

Each recording holds that program's parameters (drawn from N(0, 0.2)), a memory, a window of
observations and the program's results. Recordings are in ``recorded/ppo_jax``, and the shared
folder can have more. The test itself applies the observation encoder, which is a dense layer.
Tolerance: 1e-5 of the largest entry, in float32.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shared_files
from places import RECORDED

import txl_jax
from txl_jax.convert import ModelFormatError, config_from_ppo_jax, params_from_ppo_jax

pytestmark = pytest.mark.usefixtures("float32_products")

FOLDERS = (
    RECORDED / "ppo_jax",
    shared_files.FOLDER / "fixtures" / "rl",
)
FILES = {file.stem: file for folder in reversed(FOLDERS) for file in sorted(folder.glob("*.npz"))}
TOLERANCE = 1e-5


class Recorded:
    """One recorded run: arrays by key, the model, its parameters and its first memory."""

    def __init__(self, name):
        with np.load(FILES[name]) as arrays:
            self.arrays = dict(arrays)
        self.settings = json.loads(bytes(self.arrays["settings"]))
        self.params = self.under("param/")
        self.cfg = config_from_ppo_jax(self.settings)
        self.model = txl_jax.TransformerXL(self.cfg)
        hidden = jnp.asarray(self.arrays["memory"].transpose(2, 0, 1, 3))  # layers first
        self.mems = txl_jax.Memory(hidden, jnp.asarray(self.arrays["filled"], jnp.int32))

    def under(self, prefix):
        return {k[len(prefix) :]: v for k, v in self.arrays.items() if k.startswith(prefix)}

    def outputs(self, params, obs):
        """Returns the model's outputs for the window ``obs``.

        ``params`` have the names and shapes of the recorded program.
        """
        embedded = obs @ params["encoder/kernel"] + params["encoder/bias"]
        variables = {"params": params_from_ppo_jax(params, self.cfg)}
        begins = self.arrays["begins"]
        args = (variables, embedded, self.mems)
        return self.model.apply(*args, method="core", reset=begins)[0]


recorded = functools.cache(Recorded)


def assert_close(got, want, what):
    bound = TOLERANCE * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=what)


def test_the_recordings_of_this_repository_are_found():
    assert {"plain", "gated", "gated_long_window"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_outputs_and_gradients_of_a_window_are_the_recorded_ones(name):
    run = recorded(name)
    out, pull = jax.vjp(jax.jit(run.outputs), run.params, run.arrays["obs"])
    assert_close(out, run.arrays["out"], "out")
    of_params, of_obs = pull(jnp.asarray(run.arrays["cotangent"]))
    assert_close(of_obs, run.arrays["grad/obs"], "obs")
    want = run.under("grad/")
    del want["obs"]
    assert of_params.keys() == want.keys()
    largest = max(np.abs(x).max() for x in want.values())
    for key, value in want.items():
        # The bias of keys cancels in the softmax. Its recorded gradient is only rounding errors.
        if key.endswith("key/bias"):
            assert np.abs(value).max() < TOLERANCE * largest
            assert not np.asarray(of_params[key]).any()
        else:
            assert_close(of_params[key], value, key)


@pytest.mark.parametrize("name", FILES)
def test_steps_from_a_cache_and_what_they_store_are_the_recorded_ones(name):
    run, p = recorded(name), recorded(name).params
    variables = {"params": params_from_ppo_jax(p, run.cfg)}
    cache = run.model.apply(variables, run.mems, seg_len=1, method="init_cache")
    embedded = run.arrays["obs"] @ p["encoder/kernel"] + p["encoder/bias"]

    @jax.jit
    def step(cache, x, begins):
        args = (variables, x[:, None], cache)
        return run.model.apply(*args, method="core_and_inputs", reset=begins)

    for t in range(embedded.shape[1]):
        out, kept, cache = step(cache, embedded[:, t], run.arrays["begins"][:, t])
        assert_close(out[:, 0], run.arrays["acting/out"][:, t], f"step {t}")
        want = run.arrays["acting/kept"][:, t].swapaxes(0, 1)
        assert_close(kept[:, :, 0], want, f"stored at step {t}")


# --------------------------------------------------------------------------------------
# Settings and parameters.

SETTINGS = {"d_model": 8, "n_head": 2, "n_layer": 1, "gating": True, "gating_bias": 1.5}


def test_settings_become_a_configuration():
    cfg = config_from_ppo_jax({**SETTINGS, "mem_len": 5, "window": 3, "rows": 2})
    assert (cfg.d_head, cfg.d_inner, cfg.vocab_size) == (4, 8, None)
    assert (cfg.gate, cfg.gate_bias, cfg.same_length) == ("gru", 1.5, "tf")
    assert config_from_ppo_jax(json.dumps(SETTINGS)) == cfg
    plain = config_from_ppo_jax({**SETTINGS, "gating": False})
    assert (plain.gate, plain.gate_bias) == (None, 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 8}, "are missing: 'n_head', 'n_layer', 'gating'"),
        ({**SETTINGS, "depth": 3}, "these are no settings of transformerXL_PPO_JAX: 'depth'"),
        ({**SETTINGS, "n_head": 3}, "n_head = 3 must divide d_model = 8"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(settings, message):
    with pytest.raises(ModelFormatError, match=message):
        config_from_ppo_jax(settings)


def test_parameters_that_do_not_fit_are_refused_by_name():
    run = recorded("gated")
    wrong = {**run.params, "tf_layers_1/ln1/scale": np.zeros(7), "head/kernel": np.zeros(3)}
    del wrong["tf_layers_0/gate2/Dense_3/kernel"]
    with pytest.raises(ModelFormatError, match="do not fit") as error:
        params_from_ppo_jax(wrong, run.cfg)
    for part in (
        "tf_layers_1/ln1/scale is [7], expected [32]",
        "tf_layers_0/gate2/Dense_3/kernel [32, 32] is missing",
        "head/kernel is not known",
    ):
        assert part in str(error.value)
    other = txl_jax.TransformerXLConfig(d_model=32, n_head=4, d_head=8, d_inner=32)
    with pytest.raises(ModelFormatError, match=r"model\.untie_r = False: .* has True; use the"):
        params_from_ppo_jax(run.params, other)


def test_the_tree_is_that_of_the_model():
    run = recorded("gated")
    args = np.zeros((1, 1, 32), np.float32), run.model.init_mems(1, 1)
    init = lambda key: run.model.init(key, *args, method="core")
    want = jax.eval_shape(init, jax.random.key(0))["params"]
    got = params_from_ppo_jax(run.params, run.cfg)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.shape, b.shape), got, want)
