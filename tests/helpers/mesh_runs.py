"""A small training run on any mesh of devices: its gradient, losses and compiled step."""

import dataclasses
import functools

import jax
import numpy as np
import tiny_models

import txl_jax
from txl_jax.config import ExperimentConfig, override
from txl_jax.data.batch import Batch
from txl_jax.model.layout import stack_layers, unstack_layers
from txl_jax.parallel.mesh import make_mesh
from txl_jax.parallel.shardings import Shardings
from txl_jax.training.loss import batch_loss, denominators
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.plan import StepSetup
from txl_jax.training.state import init_state, state_shardings

B, T, M, V, STEPS = 8, 12, 10, 96, 20
MESHES = {"8x1x1": (8, 1, 1), "2x2x2": (2, 2, 2), "1x4x2": (1, 4, 2), "1x1x8": (1, 1, 8)}
OUTPUTS: dict[str, dict] = {
    "plain": {},
    "untied": {"tie_weight": False, "untie_r": True},
    "adaptive": {"cutoffs": (16, 40), "div_val": 2, "tie_projs": (False, True, True)},
    "adaptive, one width": {"cutoffs": (16, 40), "d_embed": 24},
    "sampled": {"sample_softmax": 20, "dropout": 0.1},
    "gtrxl": {**tiny_models.GTRXL, "untie_r": True},
    "adaptive, odd sizes": {"cutoffs": (17, 41), "div_val": 2, "vocab_size": 95},
}


def experiment(mesh=(1, 1, 1), **changes) -> ExperimentConfig:
    settings = {
        "model": {
            "vocab_size": V,
            "n_layer": 2,
            "d_model": 32,
            "n_head": 8,
            "d_head": 4,
            "d_inner": 48,
            "init_std": 0.1,
        },
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
        "train": {"steps": STEPS, "batch_size": B, "seg_len": T, "mem_len": M},
        "mesh": dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)),
    }
    return override(ExperimentConfig.from_dict(settings), changes)


def batches(vocab_size=V) -> list[Batch]:
    rng = np.random.default_rng(0)
    weights = np.ones((B, T), np.float32)
    weights[0, T // 2 :] = 0  # row 0 has fewer targets than the other rows
    made = []
    for step in range(STEPS):
        tokens = np.minimum(rng.geometric(0.05, (B, T + 1)), vocab_size) - 1  # from all clusters
        tokens = tokens.astype(np.int32)
        made.append(Batch(tokens[:, :-1], tokens[:, 1:], weights, np.full(B, step == 0)))
    return made


def prepared(exp: ExperimentConfig):
    """Model, optimizer, shardings, and the initial state, which is the same on every mesh."""
    t = exp.train
    shardings = Shardings(make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches))
    plain = dataclasses.replace(exp, model=dataclasses.replace(exp.model, scan_layers=False))
    optimizer = make_optimizer(exp)
    state = init_state(plain, txl_jax.TransformerXL(plain.model), optimizer)
    state = stack_layers(state) if exp.model.scan_layers else state
    state = jax.device_put(state, state_shardings(shardings, state))
    return txl_jax.TransformerXL(exp.model, shardings.mesh), optimizer, shardings, state


def gradient(exp: ExperimentConfig):
    """The gradient of the first step, on the host, with separate arrays for each layer."""
    model, _, shardings, state = prepared(exp)
    batch = jax.device_put(batches(exp.model.vocab_size)[0], shardings.rows())

    def loss(params, batch, mems):
        key = jax.random.key(0)
        return batch_loss(params, model, batch, mems, key, exp.loss, denominators(batch.weights))[0]

    out = shardings.parameters(state.params)
    found = jax.jit(jax.grad(loss), out_shardings=out)(state.params, batch, state.mems)
    return jax.device_get(unstack_layers(found))


def training(exp: ExperimentConfig):
    """Losses of all steps, the last state, and the compiled step."""
    _, _, shardings, state = prepared(exp)
    step = StepSetup.on(shardings.mesh, exp).update()
    losses = []
    for batch in batches(exp.model.vocab_size):
        state, metrics = step(state, jax.device_put(batch, shardings.rows()))
        losses.append(float(metrics["nll_sum"] / metrics["count"]))
    return losses, state, step


def assert_close(got, want, rtol):
    """Asserts that each leaf differs by at most ``rtol`` times its largest entry."""
    for (path, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree_util.tree_leaves_with_path(want),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(), err_msg=name)


@functools.cache
def on_one_device(output):
    """First gradient and all losses on one device, with which other meshes are compared."""
    exp = experiment(**of_output(output))
    return gradient(exp), training(exp)[0]


def of_output(output):
    return {f"model.{key}": value for key, value in OUTPUTS[output].items()}
