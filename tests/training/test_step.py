"""The result of a training step does not depend on micro-batches, dispatch, devices or padding.

A dispatch is one call of a compiled program, which can do several steps.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shared_files
from tiny_runs import arrays, corpus_and_experiment, run, train
from train_steps import assert_same_training, train_steps

import txl_jax
from txl_jax.config import ConfigError, override
from txl_jax.convert.pytorch import config_from_pytorch, params_from_pytorch
from txl_jax.data.feed import training_batch, training_feed
from txl_jax.data.streams import ordered_streams
from txl_jax.model.memory import Memory
from txl_jax.training import step as step_module
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.plan import training_streams
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.state import TrainState, init_state
from txl_jax.training.step import text_may_follow_padding, train_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


def test_micro_batches_give_the_whole_batch_and_each_row_its_own_memory(folder):
    whole = train_steps(folder)
    for parts in (2, 4):
        cut = train_steps(folder, **{"train.micro_batches": parts})
        assert_same_training(whole, cut, 1e-4)


@pytest.mark.parametrize(
    "average",
    [{}, {"average.swa_start": 6, "average.swa_lr_ratio": 0.5, "optimizer.min_ratio": 0.1}],
    ids=["plain", "average.swa_lr_ratio"],
)
def test_the_logged_learning_rate_is_that_of_the_update(folder, monkeypatch, average):
    """If every gradient is 1, Adam moves the parameter by the learning rate itself."""
    corpus, exp = corpus_and_experiment(folder, **average)
    optimizer = make_optimizer(exp)
    params, mems = {"w": jnp.zeros(())}, Memory(jnp.zeros(()), jnp.zeros((), jnp.int32))
    gradient = lambda state, *_: ({"w": jnp.ones(())}, jnp.ones(()), mems)
    monkeypatch.setattr(step_module, "accumulate_gradient", gradient)
    model, batch = (
        txl_jax.TransformerXL(exp.model),
        training_batch(training_streams(exp, corpus), 0, exp.train.epoch_memory),
    )
    state = TrainState(jnp.int32(0), params, optimizer.init(params), mems, {})
    rates = []
    for _ in range(exp.train.steps):
        after, metrics = train_step(state, batch, exp, model, optimizer)
        rates.append(float(metrics["learning_rate"]))
        assert float(state.params["w"] - after.params["w"]) == pytest.approx(rates[-1], rel=1e-3)
        state = after
    if average:
        last = 0.5 * 0.1 * exp.optimizer.learning_rate
        np.testing.assert_allclose(rates[6:], [last] * 6, rtol=1e-6)


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


@pytest.mark.integration
def test_eight_devices_give_the_same_as_one(folder):
    one = train_steps(folder)
    eight = train_steps(folder, **{"mesh.data": 8})
    assert len(eight[0].mems.hidden.sharding.device_set) == 8
    assert_same_training(one, eight, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["lamb", "muon"])
def test_a_rule_for_whole_tensors_is_the_same_on_two_devices_and_in_micro_batches(folder, rule):
    """LAMB's norms and Muon's singular values are of whole tensors, even if these are sharded."""
    changes = {"optimizer.name": rule, "optimizer.eps": 1e-6}
    cut = {"mesh.data": 2, "mesh.tensor": 2, "train.micro_batches": 4}
    one, several = (train_steps(folder, **changes, **more) for more in ({}, cut))
    assert_same_training(one, several, 1e-4)


WITHOUT_MEMORY = {
    "model.attention": "absolute",
    **{f"{section}.mem_len": 0 for section in ("train", "validate", "evaluate")},
    "train.context_len": 9,
}


@pytest.mark.integration
@pytest.mark.parametrize("positions", [pytest.param("full", marks=pytest.mark.slow), "half"])
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
        assert blind[0] == pytest.approx(seeing[0], rel=1e-5)  # no text precedes the first segment
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
        f" {longest} of its {len(corpus.train):,} tokens at train.batch_size 4; use a shorter"
        f" context, a lower train.batch_size, or a text with {4 * longest + 4:,} tokens or more in"
        " its train split"
    )


@pytest.mark.slow
def test_dropout_depends_on_seed_and_step_alone(folder):
    drop = {"model.dropout": 0.3, "model.dropatt": 0.3}
    again = [train_steps(folder, **drop)[1]["nll_sum"] for _ in range(2)]
    np.testing.assert_array_equal(again[0], again[1])
    other = train_steps(folder, seed=1, **drop)[1]["nll_sum"]
    assert np.all(other != again[0])
    assert np.all(train_steps(folder)[1]["nll_sum"] != again[0])


@pytest.mark.integration
def test_dropout_differs_from_step_to_step_on_the_same_batch(folder):
    corpus, exp = corpus_and_experiment(folder, **{"model.dropout": 0.3, "model.n_layer": 1})
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp)
    state = init_state(exp, model, optimizer)
    streams = ordered_streams(
        corpus.train, exp.train.batch_size, exp.train.seg_len, drop_remainder=True
    )
    batch = training_batch(streams, 0, "reset")
    step = jax.jit(lambda s, b: train_step(s, b, exp, model, optimizer)[1]["nll_sum"])
    sums = [float(step(state.replace(step=np.int32(t)), batch)) for t in range(3)]
    assert len(set(sums)) == 3


@pytest.mark.integration
def test_dropout_differs_between_micro_batches(folder):
    """Each micro-batch is one row, and all rows are equal.

    If their dropout were equal too, the mean loss would not depend on the number of rows.
    """
    means = []
    for rows in (2, 3):
        changes = {"model.dropout": 0.3, "model.n_layer": 1, "train.micro_batches": rows}
        corpus, exp = corpus_and_experiment(folder, **changes, **{"train.batch_size": rows})
        model = txl_jax.TransformerXL(exp.model)
        optimizer = make_optimizer(exp)
        state = init_state(exp, model, optimizer)
        streams = ordered_streams(corpus.train, 1, exp.train.seg_len, drop_remainder=True)
        one = training_batch(streams, 0, "reset")
        batch = jax.tree.map(functools.partial(np.repeat, repeats=rows, axis=0), one)
        _, metrics = jax.jit(train_step, static_argnums=(2, 3, 4))(
            state, batch, exp, model, optimizer
        )
        means.append(float(metrics["nll_sum"] / metrics["count"]))
    assert abs(means[0] - means[1]) > 1e-4


@pytest.mark.integration
def test_padded_targets_count_for_nothing(folder):
    corpus, exp = corpus_and_experiment(folder)
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp)
    state = init_state(exp, model, optimizer)
    streams = ordered_streams(
        corpus.train, exp.train.batch_size, exp.train.seg_len, drop_remainder=True
    )
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
    streams = ordered_streams(
        corpus.train, exp.train.batch_size, exp.train.seg_len, drop_remainder=True
    )
    n = streams.n_segments
    for step, first in ((0, True), (1, False), (n - 1, False), (n, True), (2 * n, True)):
        assert np.all(training_batch(streams, step, "reset").reset == first)
        assert not np.any(training_batch(streams, step, "carry").reset)
        np.testing.assert_array_equal(
            training_batch(streams, step, "carry").inputs, streams.segment(step % n).inputs
        )


def test_memory_is_emptied_every_so_many_steps_too(folder):
    corpus, exp = corpus_and_experiment(folder)
    streams = ordered_streams(
        corpus.train, exp.train.batch_size, exp.train.seg_len, drop_remainder=True
    )
    n = streams.n_segments
    assert n % 7
    for epoch_memory in ("carry", "reset"):
        for step in (0, 1, 6, 7, 8, 14, n - 1, n, n + 1, 7 * n, 7 * n + 7):
            emptied = step % 7 == 0 or (epoch_memory == "reset" and step % n == 0)
            assert np.all(training_batch(streams, step, epoch_memory, 7).reset == emptied)
    feed = training_feed(streams, 4, 12, "carry", 4, None, reset_every=7)
    assert [batch.reset[:, 0].tolist() for batch in feed] == [[False] * 3 + [True], [False] * 4]


@pytest.mark.integration
def test_a_run_reads_memory_that_is_emptied_as_often_as_it_says(folder):
    never, every, at_2 = (
        train_steps(folder, **{"train.reset_every": n, "train.epoch_memory": "carry"})[1]["nll_sum"]
        for n in (0, 1, 2)
    )
    without = train_steps(folder, **{"train.mem_len": 0})[1]["nll_sum"]
    np.testing.assert_allclose(every, without, rtol=1e-5)
    assert at_2[1] == pytest.approx(never[1], rel=1e-6)
    assert at_2[2] != pytest.approx(never[2], rel=1e-6)


@pytest.mark.integration
def test_the_loop_empties_memory_as_often_as_the_config_says(folder, tmp_path):
    """Memory that is emptied at the eleventh of 12 steps ends with two segments of 16 tokens."""
    changes = {"train.mem_len": 48, "train.epoch_memory": "carry", "model.n_layer": 1}
    for every, filled in ((0, 48), (5, 32)):
        done = run(folder, tmp_path / str(every), **changes, **{"train.reset_every": every})
        assert done.state.mems.filled.tolist() == [filled] * 4


# --------------------------------------------------------------------------------------
# Padded segments that more text follows: segments of random length, or at an epoch's end.

DRAWN = {"train.seg_len_std": 2.0}


def frozen_steps(exp, batches):
    """The summed nll of each training step, and the final memory; the parameters stay fixed."""
    model, still = txl_jax.TransformerXL(exp.model), optax.set_to_zero()
    state = init_state(exp, model, still)
    step = jax.jit(lambda s, b: train_step(s, b, exp, model, still))
    sums = []
    for batch in batches:
        state, metrics = step(state, batch)
        sums.append(float(metrics["nll_sum"]))
    return sums, state.mems


def scored_in_turn(exp, batches):
    """Returns what :func:`frozen_steps` returns, but from forward passes without ``lengths``.

    The training step passes ``lengths``, the numbers of tokens in each row before its padding.
    """
    model = txl_jax.TransformerXL(exp.model)
    state = init_state(exp, model, optax.set_to_zero())
    params, mems, sums = {"params": state.params}, state.mems, []
    for batch in batches:
        about = {"reset": batch.reset, "context_len": batch.context_len}
        given = batch.inputs, batch.targets
        forward = jax.jit(lambda m, a=about, g=given: model.apply(params, *g, m, **a, method="nll"))
        nll, mems = forward(mems)
        sums.append(float(np.sum(nll * batch.weights)))
    return sums, mems


def unpadded(batch):
    """The same batch with its arrays cut to the length of the longest row."""
    n, c = int(batch.weights.sum(axis=1).max()), batch.context_len
    reset = batch.reset[:, : c + n] if batch.reset.ndim == 2 else batch.reset
    arrays = batch.inputs[:, : c + n], batch.targets[:, :n], batch.weights[:, :n], reset
    return type(batch)(*arrays)


def assert_padding_changes_nothing(exp, batches):
    assert any(batch.weights.min() == 0 for batch in batches)
    padded, mems = frozen_steps(exp, batches)
    whole, bare = scored_in_turn(exp, [unpadded(batch) for batch in batches])
    np.testing.assert_allclose(padded, whole, rtol=1e-6)
    np.testing.assert_array_equal(mems.filled, bare.filled)
    np.testing.assert_allclose(mems.hidden, bare.hidden, rtol=0, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"train.mem_len": 40}, marks=pytest.mark.slow),
        pytest.param({"train.mem_len": 7, "model.same_length": "tf"}, marks=pytest.mark.slow),
        {"train.mem_len": 0, "train.context_len": 9},
        pytest.param(WITHOUT_MEMORY, marks=pytest.mark.slow),
        {**WITHOUT_MEMORY, "model.attention": "absolute_per_layer", "model.n_positions": 40},
    ],
    ids=["memory", "long memory", "window", "context", "absolute", "absolute_per_layer"],
)
@pytest.mark.few(1)
def test_padding_of_drawn_lengths_changes_neither_loss_nor_memory(folder, changes):
    corpus, exp = corpus_and_experiment(folder, **DRAWN, **changes)
    streams = training_streams(exp, corpus)
    batches = [training_batch(streams, step, "reset") for step in range(4)]
    assert_padding_changes_nothing(exp, batches)


@pytest.mark.integration
def test_padding_at_an_epochs_end_does_not_enter_memory_that_is_carried(folder):
    corpus, exp = corpus_and_experiment(folder, **{"train.epoch_memory": "carry"})
    n = training_streams(exp, corpus).n_segments
    streams = ordered_streams(corpus.train[: 4 * 16 * 4 + 25], 4, 16, True)  # over 4 segments
    assert 0 < streams.targets_per_stream % 16 < 16 < n
    batches = [training_batch(streams, step, "carry") for step in range(7)]
    assert_padding_changes_nothing(exp, batches)


def test_the_ordinary_recipe_is_spared_the_cost_of_lengths(folder):
    corpus, exp = corpus_and_experiment(folder)
    batch = training_batch(training_streams(exp, corpus), 0, "reset")
    assert "lengths" not in batch.model_kwargs(text_may_follow_padding(exp.train))
    for changes in (DRAWN, {"train.epoch_memory": "carry"}):
        assert text_may_follow_padding(override(exp, changes).train)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("positions", "parts"), [("full", 1), pytest.param("half", 2, marks=pytest.mark.slow)]
)
def test_the_rate_is_in_proportion_to_the_segments_length(folder, positions, parts):
    changes = {"loss.positions": positions, "train.micro_batches": parts}
    corpus, exp = corpus_and_experiment(folder, **DRAWN, **changes)
    fixed = override(exp, {"train.seg_len_std": 0.0})
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp)
    state = init_state(exp, model, optimizer)
    streams = training_streams(exp, corpus)
    seen = set()
    drawn_step = jax.jit(lambda b: train_step(state, b, exp, model, optimizer))
    fixed_step = jax.jit(lambda b: train_step(state, b, fixed, model, optimizer))
    for index in range(4):
        batch = training_batch(streams, index, "reset")
        after, metrics = drawn_step(batch)
        plain, usual = fixed_step(batch)
        n = int(batch.weights[0].sum())
        seen.add(n)
        assert metrics["tokens"] == usual["tokens"] == 4 * n
        np.testing.assert_allclose(metrics["learning_rate"], usual["learning_rate"] * n / 16)
        for key, value in arrays(state.params).items():
            want = (arrays(plain.params)[key] - value) * n / 16
            found = arrays(after.params)[key] - value
            np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-7, err_msg=key)
    assert len(seen) > 1


@pytest.mark.integration
def test_steps_on_drawn_lengths_do_not_depend_on_how_they_are_cut(folder):
    one = train_steps(folder, **DRAWN, **{"train.partial_shuffle": True})
    assert len(set(one[1]["tokens"].tolist())) > 1
    cut = {"train.steps_per_dispatch": 2, "train.log_every": 4, "train.eval_every": 4}
    cut |= {"mesh.data": 2, "train.micro_batches": 2}
    several = train_steps(folder, **DRAWN, **{"train.partial_shuffle": True}, **cut)
    assert_same_training(one, several, 1e-4)


@pytest.mark.slow
def test_a_run_on_drawn_lengths_tells_its_epochs_and_ends_alike_when_cut(folder, tmp_path):
    changes = {**DRAWN, "train.partial_shuffle": True, "train.reset_every": 5, "model.n_layer": 1}
    whole = run(folder, tmp_path / "whole", **changes)
    corpus, exp = corpus_and_experiment(folder, **changes)
    stop = PreemptionGuard()
    counted = iter(range(10**6))
    stop.requested = lambda: next(counted) >= 7  # type: ignore[method-assign]
    assert not train(exp, corpus, str(tmp_path / "cut"), stop).finished
    again = run(folder, tmp_path / "cut", **changes)
    for key, value in arrays(whole.state).items():
        np.testing.assert_array_equal(value, arrays(again.state)[key], err_msg=key)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    told = [record["epoch"] for record in map(json.loads, lines) if record["kind"] == "train"]
    streams = training_streams(exp, corpus)
    assert told == pytest.approx([streams.epochs(step) for step in (3, 6, 9, 12)], abs=1e-4)


def test_thirty_adam_steps_equal_the_published_code():
    """At recorded rates, losses agree within 1e-4 and gradient norms within 1e-3 (relative)."""
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
