"""The update does not depend on how it is cut: micro-batches, dispatches, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shared_files
from tiny_runs import arrays, corpus_and_experiment

import txl_jax
from txl_jax.config import ConfigError, override
from txl_jax.convert.pytorch import config_from_pytorch, params_from_pytorch
from txl_jax.data.feed import training_batch, training_feed
from txl_jax.data.streams import Streams
from txl_jax.training.loop import training_streams
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.sharding import Placement, make_mesh
from txl_jax.training.state import init_state
from txl_jax.training.step import compiled_step, train_step

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


def train_steps(folder, **changes):
    """State and per-step metrics after a few steps under some settings."""
    changes = {"train.batch_size": 8, "model.n_layer": 1, **changes}
    corpus, exp = corpus_and_experiment(folder, **changes)
    t = exp.train
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp.optimizer, t.steps)
    placement = Placement(make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches))
    init = lambda: init_state(exp, model, optimizer)
    abstract = jax.eval_shape(init)
    state = jax.jit(init, out_shardings=placement.state(abstract))()
    step = compiled_step(exp, model, optimizer, placement, abstract)
    streams = training_streams(exp, corpus)
    several = t.steps_per_dispatch > 1
    feed = training_feed(
        streams, 0, STEPS, t.epoch_memory, t.steps_per_dispatch, placement.batch(several)
    )
    history = []
    for batch in feed:
        state, metrics = step(state, batch)
        history.append({k: np.atleast_1d(v) for k, v in metrics.items()})
    joined = {k: np.concatenate([m[k] for m in history]) for k in history[0]}
    return state, joined


def assert_same_training(a, b, tolerance):
    (state_a, metrics_a), (state_b, metrics_b) = a, b
    for key in metrics_a:
        np.testing.assert_allclose(
            metrics_a[key], metrics_b[key], rtol=tolerance, atol=1e-9, err_msg=key
        )
    for key, value in arrays(state_a.mems).items():
        np.testing.assert_allclose(value, arrays(state_b.mems)[key], rtol=0, atol=1e-4, err_msg=key)


def test_micro_batches_give_the_whole_batch_and_each_row_its_own_memory(folder):
    whole = train_steps(folder)
    for parts in (2, 4):
        cut = train_steps(folder, **{"train.micro_batches": parts})
        assert_same_training(whole, cut, 1e-4)


def test_several_steps_per_dispatch_give_the_same_as_one(folder):
    one = train_steps(folder)
    for per_dispatch in (2, 4):
        several = train_steps(
            folder,
            **{
                "train.steps_per_dispatch": per_dispatch,
                "train.log_every": 4,
                "train.eval_every": 4,
                "train.steps": 12,
            },
        )
        assert_same_training(one, several, 1e-4)


def test_eight_devices_give_the_same_as_one(folder):
    one = train_steps(folder)
    eight = train_steps(folder, **{"mesh.data": 8})
    assert len(eight[0].mems.hidden.sharding.device_set) == 8
    assert_same_training(one, eight, 1e-4)


def test_lamb_on_two_devices_and_in_micro_batches_gives_the_same_as_on_one(folder):
    """Norms are of whole tensors, wherever their gradients were computed."""
    lamb = {"optimizer.name": "lamb", "optimizer.eps": 1e-6}
    cut = {"mesh.data": 2, "train.micro_batches": 4}
    assert_same_training(train_steps(folder, **lamb), train_steps(folder, **lamb, **cut), 1e-4)


WITHOUT_MEMORY = {
    "model.attention": "absolute",
    **{f"{section}.mem_len": 0 for section in ("train", "validate", "evaluate")},
    "train.context_len": 9,
}


@pytest.mark.parametrize("positions", ["full", "half"])
def test_context_is_given_to_a_model_without_memory_however_a_step_is_cut(folder, positions):
    changes = {**WITHOUT_MEMORY, "loss.positions": positions}
    one = train_steps(folder, **changes)
    tokens = 8 * 16 // (2 if positions == "half" else 1)
    assert np.all(one[1]["count"] == tokens)
    cut = {"mesh.data": 2, "train.micro_batches": 4}
    assert_same_training(one, train_steps(folder, **changes, **cut), 1e-4)
    if positions == "full":
        blind = train_steps(folder, **{**changes, "train.context_len": 0})[1]["nll_sum"]
        seeing = one[1]["nll_sum"]
        assert blind[0] == pytest.approx(seeing[0], rel=1e-5)  # nothing is before it
        assert np.all(np.abs(blind[1:] / seeing[1:] - 1) > 1e-6)


def test_context_of_a_training_batch_is_the_text_before_it(folder):
    corpus, exp = corpus_and_experiment(folder, **WITHOUT_MEMORY)
    streams = training_streams(exp, corpus)
    n = streams.n_segments
    first, second, again = (training_batch(streams, s, "reset") for s in (0, 1, n))
    assert first.context_len == 9
    np.testing.assert_array_equal(second.inputs[:, :9], first.inputs[:, -9:])
    assert np.argwhere(first.reset).tolist() == [[row, 9] for row in range(4)]
    assert not second.reset.any()
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_context_longer_than_a_stream_is_refused(folder):
    corpus, exp = corpus_and_experiment(folder, **WITHOUT_MEMORY)
    longest = len(corpus.train) // 4
    fits = override(exp, {"train.context_len": longest})
    assert training_streams(fits, corpus).context_len == longest
    with pytest.raises(ConfigError) as caught:
        training_streams(override(exp, {"train.context_len": longest + 1}), corpus)
    assert str(caught.value) == (
        f"config key train.context_len = {longest + 1}: a stream of the train split has only"
        f" {longest} tokens at train.batch_size 4; use a shorter context or fewer streams"
    )


def test_dropout_depends_on_seed_and_step_alone(folder):
    drop = {"model.dropout": 0.3, "model.dropatt": 0.3}
    again = [train_steps(folder, **drop)[1]["nll_sum"] for _ in range(2)]
    np.testing.assert_array_equal(again[0], again[1])
    other = train_steps(folder, seed=1, **drop)[1]["nll_sum"]
    assert np.all(other != again[0])
    assert np.all(train_steps(folder)[1]["nll_sum"] != again[0])


def test_dropout_differs_from_step_to_step_on_the_same_batch(folder):
    corpus, exp = corpus_and_experiment(folder, **{"model.dropout": 0.3, "model.n_layer": 1})
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp.optimizer, exp.train.steps)
    state = init_state(exp, model, optimizer)
    streams = Streams(corpus.train, exp.train.batch_size, exp.train.seg_len, cut="authors")
    batch = training_batch(streams, 0, "reset")
    step = jax.jit(lambda s, b: train_step(s, b, exp, model, optimizer)[1]["nll_sum"])
    sums = [float(step(state.replace(step=np.int32(t)), batch)) for t in range(3)]
    assert len(set(sums)) == 3


def test_padded_targets_count_for_nothing(folder):
    corpus, exp = corpus_and_experiment(folder)
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp.optimizer, exp.train.steps)
    state = init_state(exp, model, optimizer)
    streams = Streams(corpus.train, exp.train.batch_size, exp.train.seg_len, cut="authors")
    batch = training_batch(streams, 0, "reset")
    weights = batch.weights.copy()
    weights[:, 10:] = 0
    targets = batch.targets.copy()
    targets[:, 10:] = 0
    step = jax.jit(lambda s, b: train_step(s, b, exp, model, optimizer))
    a, metrics = step(state, batch.replace(weights=weights))
    b, _ = step(state, batch.replace(weights=weights, targets=targets))
    assert float(metrics["count"]) == exp.train.batch_size * 10
    short = jax.tree.map(lambda x: x[:, :10] if x.ndim == 2 else x, batch)
    _, alone = step(state, short)
    for key in ("nll_sum", "grad_norm"):
        np.testing.assert_allclose(metrics[key], alone[key], rtol=1e-4)
    for key, value in arrays(a.params).items():
        np.testing.assert_array_equal(value, arrays(b.params)[key], err_msg=key)


def test_memory_is_emptied_at_an_epoch_or_carried_by_name(folder):
    corpus, exp = corpus_and_experiment(folder)
    streams = Streams(corpus.train, exp.train.batch_size, exp.train.seg_len, cut="authors")
    n = streams.n_segments
    for step, first in ((0, True), (1, False), (n - 1, False), (n, True), (2 * n, True)):
        assert np.all(training_batch(streams, step, "reset").reset == first)
        assert not np.any(training_batch(streams, step, "carry").reset)
        np.testing.assert_array_equal(
            training_batch(streams, step, "carry").inputs, streams.segment(step % n).inputs
        )


def test_thirty_adam_steps_equal_the_published_code():
    """Losses to 1e-4 and gradient norms to 1e-3 relative, at the original's own rates."""
    recorded = np.load(shared_files.path("fixtures/train/adam.npz"))
    about = shared_files.json_of("fixtures/train/adam.json")
    cfg = config_from_pytorch(about["constructor"])
    state = {k.removeprefix("init/"): recorded[k] for k in recorded.files if k[:5] == "init/"}
    params = params_from_pytorch(state, cfg)
    model = txl_jax.TransformerXL(cfg)
    rates = jnp.asarray(recorded["lr_used"])
    tx = optax.chain(
        optax.clip_by_global_norm(about["clip"]),
        optax.scale_by_adam(),
        optax.scale_by_learning_rate(lambda t: rates[t]),
    )
    mems = model.init_mems(about["batch_size"], about["constructor"]["mem_len"])

    @jax.jit
    def step(params, opt_state, mems, inputs, targets):
        def loss(params):
            nll, after = model.apply({"params": params}, inputs, targets, mems, method="nll")
            return nll.mean(), after

        (value, mems), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(gradient, opt_state, params)
        norm = optax.tree.norm(gradient)
        return optax.apply_updates(params, updates), opt_state, mems, value, norm

    opt_state = tx.init(params)
    losses, norms, data = [], [], recorded["data"]
    for t in range(about["steps"]):
        inputs, targets = data[8 * t : 8 * t + 8].T, data[8 * t + 1 : 8 * t + 9].T
        params, opt_state, mems, value, norm = step(params, opt_state, mems, inputs, targets)
        losses.append(float(value))
        norms.append(float(norm))
    np.testing.assert_allclose(losses, recorded["loss"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(norms, recorded["gnorm_before_clip"], rtol=1e-3)
