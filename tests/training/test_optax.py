"""An optimizer of optax, chosen by name, trains as in optax; unusable ones are refused."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_steps import assert_same_training, train_steps

from txl_jax.config import ConfigError, ExperimentConfig, load_config, optax_rules, override
from txl_jax.model.layout import stack_layers
from txl_jax.training.optimizer import make_optimizer, schedule

CONSTANT = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
FACTORED = {"optimizer.name": "optax.adafactor", "optimizer.arguments.min_dim_size_to_factor": 8}


def experiment(name, **settings):
    return override(ExperimentConfig(), {"optimizer.name": name, **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "lion"}, "'lion': must be 'adam', 'lamb', 'muon', or an optimizer of optax"),
        ({"name": "adamw"}, "the nearest name is 'optax.adamw'"),
        (
            {"name": "optax.adamw", "arguments": {"b1": 2}},
            "arguments.b1 = 2: must be at least 0 and below 1: each update",
        ),
        (
            {"name": "optax.adam", "arguments": {"b2": -0.5}},
            "must be at least 0 and below 1: each update keeps this share of",
        ),
        (
            {"name": "optax.adamw", "arguments": {"mask": 3}},
            "mask = 3: must be a function, which no setting",
        ),
        ({"name": "optax.adam", "arguments": {"eps": -1e-8}}, "must be at least 0"),
        ({"name": "optax.sgd", "arguments.nesterov": "no"}, "'no': must be true or false"),
        ({"name": "AdamW"}, "the nearest name is 'optax.adamw'"),
        ({"name": "sgdd"}, "the nearest name is 'optax.sgd'"),
        ({"name": "optax.Adam"}, "the nearest name is 'optax.adam'"),
        ({"name": "optax.loin"}, "the nearest name is 'optax.lion'"),
        ({"name": "optax.muon"}, "the nearest name is 'optax.contrib.muon'"),
        ({"name": "os.system"}, "must be 'adam', 'lamb', 'muon', or an optimizer of optax"),
        ({"name": "optax.lion.__globals__"}, "must be 'adam', 'lamb', 'muon', or an optimizer"),
        ({"name": "optax.scale_by_adam"}, "must be 'adam', 'lamb', 'muon', or an optimizer"),
        ({"name": "optax.contrib.sam"}, "must be 'adam', 'lamb', 'muon', or an optimizer"),
        ({"name": "optax.lbfgs"}, "cannot be used with a schedule of the learning"),
        ({"name": "optax.contrib.momo"}, "cannot be used with a schedule of the learning"),
        ({"name": "optax.contrib.sophia"}, "cannot be used with a schedule of the learning"),
        ({"name": "optax.contrib.schedule_free_adamw"}, "trains other parameters than those to"),
        ({"name": "optax.noisy_sgd"}, "keeps a random generator"),
        ({"name": "optax.contrib.dpsgd"}, "missing 3 required positional arguments: 'l2_norm"),
        ({"name": "optax.rprop"}, "cannot be used with a schedule of the learning"),
        ({"name": "optax.lion", "arguments.b3": 0.9}, "arguments.b3 = 0.9: optax.lion has no such"),
        ({"name": "optax.lion", "arguments.foo": 1}, "there are b1, b2, mu_dtype, weight_decay, "),
        ({"name": "optax.lion", "arguments.weigth_decay": 1}, "the nearest is 'weight_decay'"),
        (
            {"name": "optax.lion", "arguments.b1": "fast"},
            "cannot be used with a schedule of the learning",
        ),
        (
            {"name": "optax.contrib.prodigy", "arguments.betas": 0.9},
            "cannot be used with a schedule of the learning",
        ),
        ({"name": "optax.lion", "arguments.b1": {"x": 1}}, "b1.x = 1: optax.lion has no such"),
        ({"name": "optax.lion", "arguments.b1": float("nan")}, "must be a finite number"),
        ({"name": "optax.lion", "arguments": "b1=1"}, "optimizer.arguments.NAME=VALUE"),
        (
            {"name": "optax.lion", "arguments.learning_rate": 1},
            "set optimizer.learning_rate instead",
        ),
        (
            {"name": "optax.lion", "arguments.mu_dtype": "fast"},
            "cannot be used with a schedule of the learning",
        ),
        ({"name": "optax.adam", "b1": 0.8}, "optimizer.b1 = 0.8: has no effect on optimizer.name"),
        (
            {"name": "optax.adamw", "weight_decay": 0.1},
            "set optimizer.arguments.weight_decay instead",
        ),
        (
            {"name": "adam", "arguments.b1": 0.8},
            "is for optimizers of optax, and optimizer.name is",
        ),
    ],
)
def test_what_training_cannot_use_is_refused_in_one_line(settings, words, recwarn):
    with pytest.raises(ConfigError) as error:
        override(ExperimentConfig(), {f"optimizer.{k}": v for k, v in settings.items()})
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "rate", "note"),
    [
        (
            "optax.contrib.prodigy",
            8e-3,
            "is 0.008, and the default of optax.contrib.prodigy is 1",
        ),
        ("optax.contrib.dadapt_adamw", 1.0, None),
        ("optax.lion", 8e-3, None),
        ("optax.adafactor", 8e-3, None),
        ("adam", 8e-3, None),
    ],
)
def test_a_rate_other_than_the_default_of_the_optimizer_is_noted(name, rate, note):
    said = optax_rules.own_rate(name, rate)
    assert said is None if note is None else note in str(said)


def test_arguments_are_read_from_text_and_kept_in_json():
    text = {"b1": "0.95", "nesterov": "True", "mu_dtype": "bfloat16", "eps_root": "1e-9"}
    given = {f"optimizer.arguments.{name}": value for name, value in text.items()}
    exp = load_config("quickstart", {"optimizer.name": "optax.adam", **given})
    want = {"b1": 0.95, "nesterov": True, "mu_dtype": "bfloat16", "eps_root": 1e-9}
    assert exp.optimizer.arguments == want
    assert ExperimentConfig.from_dict(exp.to_dict()) == exp
    assert override(exp, {"optimizer.arguments": {"b1": 0.5}}).optimizer.arguments == {"b1": 0.5}
    betas = {"optimizer.arguments.betas": "0.9,0.99"}
    assert experiment("optax.contrib.prodigy", **betas).optimizer.arguments["betas"] == [0.9, 0.99]


def test_the_check_starts_no_device():
    script = (
        "import txl_jax; from jax._src import xla_bridge as x\n"
        "txl_jax.load_config('quickstart', {'optimizer.name': 'optax.contrib.muon'})\n"
        "assert not x._backends"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def steps_by_hand(optimizer, params, gradients):
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_clipping_schedule_decay_and_embedding_rate_are_as_for_the_own_rules():
    """The rule is SGD with momentum, which is easily written out in NumPy."""
    settings = {"warmup_steps": 2, "clip_norm": 0.5, "embedding_ratio": 0.3, "learning_rate": 0.1}
    exp = experiment("optax.sgd", **{f"optimizer.{k}": v for k, v in settings.items()})
    exp = override(exp, {"optimizer.weight_decay": 0.2, "optimizer.arguments.momentum": 0.9})
    start = {"embedding": jnp.ones((3, 2)), "layer_0": {"outer": {"kernel": jnp.full((2, 2), 2.0)}}}
    gradients = [jax.tree.map(lambda x, n=n: x * n, start) for n in (0.01, 3.0, -2.0)]
    got = steps_by_hand(make_optimizer(exp), start, gradients)
    w = {"e": np.ones((3, 2)), "k": np.full((2, 2), 2.0)}
    trace = {name: np.zeros_like(x) for name, x in w.items()}
    for t, n in enumerate((0.01, 3.0, -2.0)):
        g = {"e": np.full((3, 2), n), "k": np.full((2, 2), 2 * n)}
        norm = np.sqrt(sum(np.sum(x**2) for x in g.values()))
        for name, ratio in (("e", 0.3), ("k", 1.0)):
            trace[name] = 0.9 * trace[name] + g[name] * min(1, 0.5 / norm)
            rate = float(schedule(exp.optimizer, exp.train.steps, ratio=ratio)(t))
            w[name] = w[name] - rate * (trace[name] + 0.2 * w[name])
    np.testing.assert_allclose(got["embedding"], w["e"], rtol=1e-5)
    np.testing.assert_allclose(got["layer_0"]["outer"]["kernel"], w["k"], rtol=1e-5)


@pytest.mark.integration
def test_adam_of_optax_trains_as_adam(folder):
    assert_same_training(train_steps(folder), train_steps(folder, **optax_name("adam")), 1e-5)


def optax_name(name, **changes):
    return {"optimizer.name": f"optax.{name}", **changes}


@pytest.mark.integration
@pytest.mark.parametrize("name", ["lion", "contrib.muon", "contrib.ademamix"])
@pytest.mark.few(1)
def test_a_rule_of_optax_lowers_the_loss(folder, name):
    losses = train_steps(folder, **optax_name(name))[1]
    loss = losses["nll_sum"] / losses["count"]
    assert loss[-1] < loss[0]


@pytest.mark.integration
def test_a_number_for_the_rate_is_given_where_an_optimizer_takes_no_schedule(folder):
    for name in ("rprop", "sm3"):
        state, _ = train_steps(folder, **optax_name(name), **CONSTANT)
        assert int(state.step) > 0


@pytest.mark.slow
def test_adafactor_is_the_same_on_a_mesh_whose_devices_share_its_state(folder):
    """Adafactor's state has other axes than the parameters; its norms are over unsharded arrays."""
    cut = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.micro_batches": 2}
    layers = {"model.n_layer": 2, "model.scan_layers": True}
    one = train_steps(folder, **FACTORED, **layers)
    several = train_steps(folder, **FACTORED, **layers, **cut)
    assert_same_training(one, several, 1e-4)
    factors = [x for x in jax.tree.leaves(several[0].opt_state) if x.ndim == 1 and x.size > 1]
    assert any(not x.sharding.is_fully_replicated for x in factors)


def test_stacked_layers_are_updated_as_single_ones():
    """Given stacked layers, Adafactor would treat the axis of layers as a matrix axis."""
    exp = override(experiment("optax.adafactor"), FACTORED)
    draw = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape)
    apart: dict[str, Any] = {
        f"layer_{n}": {"inner": {"kernel": draw(n, (8, 12))}} for n in range(9)
    }
    apart["embedding"] = draw(9, (10, 8))
    gradients = [jax.tree.map(lambda x, n=n: jnp.sin(n * x), apart) for n in (1, 2, 3)]
    single = steps_by_hand(make_optimizer(exp), apart, gradients)
    as_one = steps_by_hand(make_optimizer(exp), stack_layers(apart), map(stack_layers, gradients))
    for a, b in zip(*map(jax.tree.leaves, (stack_layers(single), as_one)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_an_update_of_several_seeds_is_that_of_each():
    optimizer = make_optimizer(override(experiment("optax.adafactor"), FACTORED))
    draw = lambda seed: {"layer_0": {"kernel": jax.random.normal(jax.random.key(seed), (8, 12))}}
    params, gradient = ([draw(seed) for seed in seeds] for seeds in ((1, 2), (3, 4)))
    step = lambda params, gradient: steps_by_hand(optimizer, params, [gradient] * 2)
    stacked = [jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (params, gradient)]
    together = jax.vmap(step)(*stacked)["layer_0"]["kernel"]
    for n in range(2):
        alone = step(params[n], gradient[n])["layer_0"]["kernel"]
        np.testing.assert_allclose(together[n], alone, rtol=1e-5)
