"""These tests fail if the model changes but its formulas or the reference do not."""

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.extend.core
import model_settings
import numpy as np
import optax
import pytest
import reference
import tiny_models as tiny
from jax.interpreters import partial_eval

import txl_jax
from benchmarks.products import segment_products, update_products
from txl_jax.analysis import attention_weights, speed
from txl_jax.config import ExperimentConfig, TrainConfig
from txl_jax.data.batch import Batch
from txl_jax.model import flops
from txl_jax.model.attention import FORMS, Attention, projection_flops
from txl_jax.model.layout import stack_layers
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.model.precision import resolved
from txl_jax.parallel.shardings import Shardings
from txl_jax.training.loss import batch_loss, denominators

B, T, M = 3, 8, 16
SPREAD = list(model_settings.models())
FORMULAS = [name for name in SPREAD if name.partition("=")[0] not in reference.UNUSED]


# ------------------------------------------------------------------ matrix products


def products(function, *inputs) -> float:
    """Counts the operations of a program's matrix products and convolutions; a multiply-add is 2.

    A conditional counts as its largest branch. ``while`` loops are not counted: they process the
    blocks of rows after the first one, and these short texts fit into one block.
    """
    program = jax.make_jaxpr(function)(*inputs).jaxpr
    needed, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return count(needed)


def count(jaxpr: Any) -> float:
    total = 0.0
    for step in jaxpr.eqns:
        if step.primitive.name == "dot_general":
            contracted = step.params["dimension_numbers"][0][0]
            depth = math.prod(step.invars[0].aval.shape[i] for i in contracted)
            total += 2.0 * step.outvars[0].aval.size * depth
        elif step.primitive.name == "conv_general_dilated":
            shape = step.invars[1].aval.shape
            depth = math.prod(shape) / shape[step.params["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * step.outvars[0].aval.size * depth
        elif step.primitive.name == "cond":
            total += max(count(branch.jaxpr) for branch in step.params["branches"])
        elif step.primitive.name != "while":
            times = step.params["length"] if step.primitive.name == "scan" else 1
            total += times * sum(map(count, inside(step)))
    return total


def inside(step: Any) -> Iterator[Any]:
    """Yields the programs that one operation of a program calls."""
    params = step.params
    if step.primitive.name == "call_with_derivative":  # model/derivatives.py
        types = (jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in step.invars)
        yield jax.make_jaxpr(params["function"])(*types).jaxpr
        return
    kinds = (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr)
    for found in jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(found, kinds):
            yield getattr(found, "jaxpr", found)


def model(name: str, **changes) -> txl_jax.TransformerXLConfig:
    """The settings of a model in ``SPREAD``, in float32 and with all attention scores at once."""
    same = {"kernel": "reference", "dtype": "float32", "matmul_precision": None, **changes}
    return resolved(dataclasses.replace(model_settings.models()[name], **same), None)


def shapes(cfg) -> tuple:
    """The parameters, and the tokens, embeddings and memory of a batch."""
    params = tiny.variables(dataclasses.replace(cfg, scan_layers=False))["params"]
    params = stack_layers(params) if cfg.scan_layers else params
    mems = tiny.memory(cfg, (0, 2, M), M)
    return params, tiny.tokens(cfg, B, T), tiny.embeddings(cfg, B, T), mems


def sizes(cfg) -> TrainConfig:
    return TrainConfig(batch_size=B, seg_len=T, mem_len=0 if cfg.memory_free else M)


@pytest.fixture
def every_tail(monkeypatch):
    """Makes the formula score every row with every cluster, as :func:`products` counts it."""
    monkeypatch.setattr(flops, "zipf_share", lambda *about: 1.0)


@pytest.mark.parametrize("name", SPREAD)
def test_a_forward_pass_has_the_products_of_the_formula(name, every_tail):
    """This fails for a new kind of layer until ``model/flops.py`` counts its matrix products."""
    check_forward_pass(model(name))


@pytest.mark.parametrize("attention", tiny.ATTENTION)
def test_a_forward_pass_normalised_first_has_the_products_of_the_formula(attention):
    check_forward_pass(model(f"attention={attention}", pre_lnorm=True))


def check_forward_pass(cfg):
    params, tokens, _, mems = shapes(cfg)
    apply = txl_jax.TransformerXL(cfg).apply
    nll = lambda p, mems: apply({"params": p}, tokens, tokens, mems, method="nll")
    expected = flops.layer_flops(cfg, sizes(cfg), B) + flops.vocabulary_flops(cfg, sizes(cfg), B)
    assert products(nll, params, mems) == pytest.approx(expected, rel=1e-12)


@pytest.mark.integration
@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.few(15)
def test_a_segment_with_projected_memory_has_the_products_of_the_formula(name, every_tail):
    cfg = model(name, scan_layers=False)
    if cfg.memory_free:
        pytest.skip("has no memory")
    params, tokens, _, mems = shapes(cfg)
    apply = txl_jax.TransformerXL(cfg).apply
    cache = apply({"params": params}, mems, seg_len=T, method="init_cache")
    score = lambda p, cache: apply({"params": p}, tokens, tokens, cache, method="nll")
    expected = flops.layer_flops(cfg, sizes(cfg), B, cached=True)
    expected += flops.vocabulary_flops(cfg, sizes(cfg), B)
    padding = 2 * B * 2 * (M + T) * cfg.n_head * cfg.d_head  # two zero rows in q (model/ring.py)
    padding *= FORMS[cfg.attention].position_vectors
    found = products(score, params, cache)
    assert found - padding * cfg.n_layer == pytest.approx(expected, rel=1e-12)


def of_an_update(cfg, **loss) -> tuple[float, ExperimentConfig, float]:
    """Returns an update's operations, its settings, and operations that only the formula counts.

    The formula also counts the gradients of memory and of sinusoids, which an update does not need.
    """
    t = sizes(cfg)
    same = {"seg_len": t.seg_len, "mem_len": t.mem_len, "batch_size": B}
    parts = {name: same for name in ("train", "validate", "evaluate")}
    exp = ExperimentConfig.from_dict({**parts, "loss": loss, "model": dataclasses.asdict(cfg)})
    params, tokens, _, mems = shapes(cfg)
    batch = Batch(tokens, tokens, np.ones((B, T), np.float32), np.zeros(B, bool))
    network, whole = txl_jax.TransformerXL(cfg), denominators(batch.weights)

    def of_batch(params, mems):
        key = jax.random.key(0)
        return batch_loss(params, network, batch, mems, key, exp.loss, whole)[0]

    k, width = t.mem_len + T, cfg.n_head * cfg.d_head
    sinusoids = {"relative": k, "shared_projection": k + 1}.get(cfg.attention, 0)
    unneeded = 2 * cfg.d_model * width * sinusoids + projection_flops(cfg, 0, B * t.mem_len)
    unneeded *= cfg.n_layer
    return products(jax.grad(of_batch), params, mems), exp, unneeded


@pytest.mark.integration
@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.few(15)
def test_an_update_has_the_products_of_the_formula(name, every_tail):
    cfg = model(name)
    found, exp, unneeded = of_an_update(cfg)
    once, again = flops.update_flops(exp)
    if not cfg.sample_softmax:  # the softmax has one block of rows: no scores are recomputed
        head = len(cfg.cutoffs) + (cfg.cutoffs or (cfg.vocab_size or 0,))[0]
        again -= 2 * B * T * head * (cfg.d_embed or cfg.d_model) * cfg.mixtures
    assert found + unneeded == pytest.approx(once + again, rel=1e-12)


def test_decoding_the_past_adds_the_products_of_the_formula():
    found, exp, unneeded = of_an_update(model("past_decode=True"), past_decode=0.5)
    assert found + unneeded == flops.update_flops(exp)[0]


def test_the_benchmarks_products_are_those_of_the_programs():
    """The benchmark times each product of a model that has relative attention and one softmax."""
    cfg = model("attention=relative")
    found, exp, _ = of_an_update(cfg)
    assert sum(p.operations for p in update_products(exp)) == found
    cached = flops.layer_flops(cfg, exp.train, B, cached=True)
    words = flops.vocabulary_flops(cfg, exp.train, B)
    assert sum(p.operations for p in segment_products(exp)) == cached + words


@pytest.mark.integration
@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.few(15)
def test_windows_without_memory_have_the_products_of_their_formula(name, every_tail):
    """The mode ``speed`` runs such windows in a model with the trained model's other settings."""
    cfg = model(name, attention="relative", same_length=False, n_positions=None)
    length = 20
    windows = speed.vanilla(dataclasses.replace(cfg, untie_r=False, scan_layers=False), True)
    params = tiny.variables(windows.cfg)["params"]
    text = tiny.tokens(cfg, 1, length + 1)
    run = lambda p: speed.window_nll(windows, True)(p, text[:, :-1], text[:, -1:])
    assert products(run, params) == pytest.approx(speed.window_flops(cfg, length), rel=1e-12)


# ------------------------------------------------------------------ kernels and analyses


def gathered(cfg) -> list:
    """Returns the inputs and the output of each layer's attention."""
    found = []

    def intercept(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if isinstance(context.module, Attention) and context.method_name == "gather":
            found.append((args[0].joined(), out))
        return out

    inputs = tiny.variables(cfg), tiny.embeddings(cfg, B, T), tiny.memory(cfg, (0, 2, M), M)
    with nn.intercept_methods(intercept):
        tiny.apply(cfg, "core")(*inputs)
    return found


def of_four_terms(x) -> np.ndarray:
    """Computes attention as fused kernels do, from the four terms of a score and the mask."""
    arrays = (x.q, x.k, x.val, x.positions)
    q, k, val, p = jax.tree.map(lambda a: np.asarray(a, np.float64), arrays)
    biased = lambda bias: q if bias is None else q + bias[:, None, None]
    scores = np.einsum("nbth,nbkh->nbtk", biased(p.u), k)
    key, own = np.arange(k.shape[2]), x.mask.mem_len + np.arange(q.shape[2])
    distance = own[:, None] - key
    seen = (distance >= 0) & (distance <= x.mask.reach)
    seen = seen & (key >= x.mask.mem_len - np.asarray(x.mask.filled)[:, None, None])
    row = k.shape[2] - 1 - np.maximum(distance, 0)
    if p.r is not None:
        scores = scores + np.einsum("nbth,ntkh->nbtk", biased(p.v), p.r[:, row])
    if p.b is not None:
        scores = scores + p.b[:, row][:, None]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) * seen
    return np.einsum("nbtk,nbkh->nbth", weights / weights.sum(axis=-1, keepdims=True), val)


@pytest.mark.integration
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.few(10)
def test_a_changed_softmax_or_mask_is_one_that_fused_kernels_refuse_and_the_analysis_shows(name):
    """Fused kernels and the analysis have their own code for scores, which must have all terms."""
    cfg = model(name, scan_layers=False)
    found = gathered(cfg)
    assert len(found) == cfg.n_layer
    for x, out in found:
        shown = np.einsum("nbtk,nbkh->nbth", attention_weights.probabilities(x), x.val)
        np.testing.assert_allclose(shown, out, atol=1e-5, err_msg="the analysis")
        if type(x.positions) is Positions and type(x.mask) is AttentionMask:
            np.testing.assert_allclose(of_four_terms(x), out, atol=1e-5, err_msg="fused kernels")


# ------------------------------------------------------------------ shardings and formulas


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("layer_0/feed_forward/gate/kernel", (8, 10), ("fsdp", None)),
        ("layers/feed_forward/gate/kernel", (2, 8, 10), (None, "fsdp", None)),
        ("layer_0/feed_forward/gate/kernel", (7, 10), (None, None)),  # 2 does not divide 7
        ("layer_0/attention/sharpness", (2,), ()),
        ("layers/attention/sharpness", (2, 2), (None, None)),
    ],
)
def test_a_new_matrix_and_its_moments_are_sharded_by_their_first_axis(name, shape, axes):
    mesh_axes = ("data", "fsdp", "tensor")
    mesh = jax.make_mesh((1, 2, 2), mesh_axes, (jax.sharding.AxisType.Auto,) * 3)
    params: Any = np.zeros(shape)
    for part in reversed(name.split("/")):
        params = {part: params}
    wanted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    (found,) = jax.tree.leaves(Shardings(mesh).parameters(params))
    count, *moments = jax.tree.leaves(Shardings(mesh).parameters(optax.adam(0.1).init(params)))
    assert count.is_fully_replicated
    assert len(moments) == 2
    for sharding in (found, *moments):
        assert sharding.is_equivalent_to(wanted, len(shape))


def test_the_reference_knows_every_setting_and_the_values_it_lacks_are_named():
    fields = {field.name for field in dataclasses.fields(txl_jax.TransformerXLConfig)}
    assert set(reference.KNOWN) == fields
    lacking = {"past_decode=True", "dtype=bfloat16", "dtype=float16"}
    lacking |= {name for name in SPREAD if model_settings.models()[name].mixtures > 1}
    for name in SPREAD:
        cfg = model_settings.models()[name]
        params = tiny.variables(model(name, scan_layers=False))["params"]
        if name in lacking:
            with pytest.raises(NotImplementedError, match=r"no model\."):
                reference.check_known(params, cfg)
        else:
            reference.check_known(params, cfg)


def test_the_reference_refuses_a_setting_a_value_and_a_parameter_that_it_does_not_know():
    @dataclasses.dataclass(frozen=True)
    class Wider(txl_jax.TransformerXLConfig, key="model"):
        experts: int = 1

    cfg = tiny.config()
    params = reference.float64(jax.tree.map(np.asarray, tiny.variables(cfg)["params"]))
    run = lambda params, cfg: reference.core(params, cfg, [np.zeros(8)], [[], []], 0)
    run(params, cfg)
    with pytest.raises(NotImplementedError, match=r"no model\.experts = 1"):
        run(params, Wider(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}))
    unknown = copy.copy(cfg)
    object.__setattr__(unknown, "activation", "tanh")
    with pytest.raises(NotImplementedError, match=r"no model\.activation = 'tanh'"):
        run(params, unknown)
    wider = {**params["layer_0"]["feed_forward"], "extra": {"kernel": np.zeros((8, 10))}}
    more = {**params, "layer_0": {**params["layer_0"], "feed_forward": wider}}
    with pytest.raises(NotImplementedError, match="parameter layer_0/feed_forward/extra/kernel"):
        run(more, cfg)
