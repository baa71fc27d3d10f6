"""Training gives the same result on every mesh, and devices exchange only what is needed."""

import collections
import dataclasses
import re
import types
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs
from jax.sharding import Mesh
from mesh_runs import (
    MESHES,
    OUTPUTS,
    B,
    M,
    V,
    assert_close,
    batches,
    experiment,
    gradient,
    of_output,
    on_one_device,
    prepared,
    training,
)
from run_records import StopAt
from tiers import rest_slow
from tiny_runs import train

import txl_jax
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import (
    ConfigError,
    MeshConfig,
    TransformerXLConfig,
    override,
)
from txl_jax.model.kernels import choice
from txl_jax.parallel.mesh import idle_devices, make_mesh, scoring_mesh
from txl_jax.records import read_counted
from txl_jax.training.plan import StepSetup
from txl_jax.training.state import init_state, state_shardings

FIRST = ("2x2x2", "adaptive")
REST = [(mesh, output) for mesh in MESHES for output in OUTPUTS if (mesh, output) != FIRST]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("shape", "output"),
    rest_slow(1, [FIRST, *REST]),
)
def test_gradients_and_losses_are_one_devices_on_every_mesh(shape, output):
    exp = experiment(MESHES[shape], **of_output(output))
    want_gradient, want_losses = on_one_device(output)
    assert_close(gradient(exp), want_gradient, 1e-5)
    np.testing.assert_allclose(training(exp)[0], want_losses, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "products", "layer"])
def test_scanned_layers_train_as_unrolled_ones_on_a_mesh(remat):
    rule = "muon" if remat == "layer" else "adam"
    form = {"model.attention": "shaw", "model.n_positions": 9}
    one = experiment(**form, **{"optimizer.name": rule})
    many = override(
        one,
        {
            "mesh.data": 2,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "model.scan_layers": True,
            "model.remat": remat,
        },
    )
    assert_close(gradient(many), gradient(one), 1e-5)
    np.testing.assert_allclose(training(many)[0], training(one)[0], rtol=1e-4)


@pytest.mark.slow
def test_dropout_is_the_same_on_every_mesh():
    changes = {"model.dropout": 0.2, "model.dropatt": 0.1}
    one, many = experiment(**changes), experiment((2, 2, 2), **changes)
    np.testing.assert_allclose(training(many)[0], training(one)[0], rtol=1e-4)


@pytest.mark.slow
def test_micro_batches_on_a_mesh_give_the_whole_batch():
    many = experiment((2, 1, 2), **{"train.micro_batches": 4})
    np.testing.assert_allclose(training(many)[0], on_one_device("plain")[1], rtol=1e-4)


# ------------------------------------------------------------------ where arrays are placed


def test_parameters_and_optimizer_are_sharded_and_memory_is_sharded_by_rows():
    # L layers, B rows, M states of memory, N heads of width H, model width D, vocabulary size V
    state = prepared(experiment((2, 2, 2), **{"model.scan_layers": True}))[-1]
    adam = state.opt_state[1]
    piece = lambda x: x.sharding.shard_shape(x.shape)
    for tree in (state.params, adam.mu, adam.nu):
        layer = tree["layers"]
        assert piece(layer["attention"]["query"]) == (2, 16, 4, 4)  # [L, D/fsdp, N/tensor, H]
        assert piece(layer["attention"]["output"]) == (2, 4, 4, 16)
        assert piece(layer["feed_forward"]["inner"]["kernel"]) == (2, 16, 24)
        assert piece(layer["feed_forward"]["outer"]["kernel"]) == (2, 24, 16)
        assert piece(tree["embedding"]) == (48, 16)  # [V/tensor, D/fsdp]
        assert piece(tree["u"]) == (4, 4)
    assert piece(state.mems.hidden) == (2, 2, M, 32)  # [L, B/(data fsdp), M, D]
    assert piece(state.mems.filled) == (2,)


def test_the_momentum_of_muon_is_sharded_as_its_parameters():
    state = prepared(experiment((2, 2, 2), **{"optimizer.name": "muon"}))[-1]
    moments = {
        jax.tree_util.keystr(path[-3:]): x.sharding.shard_shape(x.shape)
        for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state[1].inner_states["muon"])
    }
    assert moments["['layer_0']['attention']['query']"] == (16, 4, 4)  # [D/fsdp, N/tensor, H]
    assert moments["['feed_forward']['inner']['kernel']"] == (16, 24)


@pytest.mark.integration
def test_the_state_is_made_in_pieces_never_whole():
    exp = experiment((1, 4, 2))
    model, optimizer, shardings, state = prepared(exp)
    init = jax.jit(
        lambda: init_state(exp, model, optimizer), out_shardings=state_shardings(shardings, state)
    )
    compiled = init.lower().compile()
    largest = state.params["embedding"]
    sizes = [int(np.prod(s)) for _, s in all_shapes(str(compiled.as_text())) if s]
    assert 0 < max(sizes) < largest.size


def test_an_axis_that_devices_do_not_divide_is_whole():
    changes = {"model.vocab_size": 95, "model.d_embed": 31}
    params = prepared(experiment((1, 2, 2), **changes))[-1].params
    assert params["embedding"].sharding.shard_shape((95, 31)) == (95, 31)


def test_the_data_axis_takes_the_devices_that_rows_and_the_other_axes_leave():
    cfg = TransformerXLConfig()
    for rows, fsdp, data in ((4, 2, 2), (8, 2, 4), (6, 2, 3), (3, 1, 3), (8, 1, 8)):
        assert make_mesh(MeshConfig(fsdp=fsdp), cfg, rows).shape["data"] == data


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": 9}, "mesh = data 9 x fsdp 1 x tensor 1 = 9: must be at most 8, the number"),
        ({"data": 4, "fsdp": 2, "tensor": 2}, "= 16: must be at most 8, the number of devices"),
        ({"data": 3}, "data x fsdp = 3 must divide train.batch_size = 8"),
        ({"data": 1, "tensor": 3}, "mesh.tensor = 3: must divide model.n_head 8"),
    ],
)
def test_an_impossible_mesh_is_refused_with_the_reason(settings, words):
    with pytest.raises(ConfigError) as error:
        make_mesh(MeshConfig(**settings), experiment().model, B)
    assert words in str(error.value)


def test_rows_of_a_micro_batch_must_be_divided_too():
    with pytest.raises(
        ConfigError, match=r"must divide train\.batch_size / train\.micro_batches = 2"
    ):
        make_mesh(MeshConfig(data=4), experiment().model, B, micro_batches=4)


@pytest.mark.parametrize(("settings", "data"), [({}, 8), ({"fsdp": 2}, 4), ({"tensor": 4}, 2)])
def test_all_devices_are_used_by_default(settings, data):
    assert make_mesh(MeshConfig(**settings), experiment().model, B).shape["data"] == data


def test_no_more_devices_are_taken_than_the_batch_has_rows_for():
    assert make_mesh(MeshConfig(), experiment().model, 6).shape["data"] == 6


class Chip:
    """A stand-in for a TPU chip of one host, with the attributes that ``make_mesh`` reads."""

    platform, process_index = "tpu", 0


def slice_of(n: int, monkeypatch) -> list[Any]:
    """Returns n fake chips of a TPU slice.

    Also replaces ``jax.make_mesh`` by a function that returns (shape, number of devices).
    """
    monkeypatch.setattr(jax, "make_mesh", lambda shape, *_, devices: (shape, len(devices)))
    return [Chip() for _ in range(n)]


@pytest.mark.parametrize(
    ("chips", "batch", "settings", "shape"),
    [
        (4, 3, {}, (1, 1, 1)),
        (4, 6, {}, (2, 1, 1)),
        (8, 10, {}, (2, 1, 1)),
        (8, 60, {}, (4, 1, 1)),
        (8, 60, {"fsdp": 2}, (2, 2, 1)),
        (8, 6, {"tensor": 2}, (2, 1, 2)),
        (8, 64, {}, (8, 1, 1)),
    ],
)
def test_of_a_tpu_slice_a_part_that_divides_it_is_taken(chips, batch, settings, shape, monkeypatch):
    """If a run uses only some chips of a slice, their number divides the number of all chips.

    For any other number, libtpu compiles no program and JAX makes no mesh.
    """
    devices = slice_of(chips, monkeypatch)
    got = make_mesh(MeshConfig(**settings), experiment().model, batch, devices=devices)
    assert got == (shape, np.prod(shape))


GPUS, CHIPS, OF_TWO_HOSTS = ("gpu", (8,)), ("tpu", (8,)), ("gpu", (8, 8))


@pytest.mark.parametrize(
    ("recipe", "kind", "settings", "shape"),
    [
        ("enwik8_24l", GPUS, {}, (1, 8, 1)),
        ("enwik8_24l", CHIPS, {}, (8, 1, 1)),
        ("lm1b_large", CHIPS, {}, (1, 8, 1)),
        ("enwik8_24l", OF_TWO_HOSTS, {}, (2, 8, 1)),
        ("lm1b_large", ("tpu", (32,)), {}, (2, 16, 1)),
        ("enwik8_24l", GPUS, {"data": 8}, (8, 1, 1)),
        ("enwik8_24l", GPUS, {"fsdp": 1}, (8, 1, 1)),
        ("enwik8_24l", GPUS, {"fsdp": 2}, (4, 2, 1)),
        ("enwik8_24l", GPUS, {"tensor": 2}, (1, 4, 2)),
        ("enwik8_24l", ("gpu", (4, 4, 4, 4)), {"tensor": 8}, (2, 1, 8)),
        ("enwik8_24l", ("cpu", (8,)), {}, (8, 1, 1)),
        ("wt103_base", GPUS, {}, (8, 1, 1)),  # d_model 410: no multiple of 8
        ("ptb", GPUS, {}, (8, 1, 1)),  # a small model, like quickstart
        ("quickstart", GPUS, {}, (8, 1, 1)),
    ],
)
def test_large_models_are_shared_within_a_host_or_slice(recipe, kind, settings, shape, monkeypatch):
    platform, hosts = kind
    monkeypatch.setattr(jax, "make_mesh", lambda shape, *_, devices: shape)
    gpus = [
        types.SimpleNamespace(platform=platform, process_index=0, slice_index=host)
        for host, count in enumerate(hosts)
        for _ in range(count)
    ]
    model = txl_jax.load_config(recipe).model
    assert make_mesh(MeshConfig(**settings), model, 64, devices=gpus) == shape
    assert scoring_mesh(MeshConfig(**settings), model, 64, gpus) == shape


@pytest.mark.parametrize(
    ("batch", "settings", "fix"),
    [
        (60, {"data": 6}, "mesh.data 4 works"),
        (60, {"data": 3}, "mesh.data 4 works"),
        (10, {"data": 5}, "mesh.data 2 works"),
        (60, {"data": 3, "fsdp": 2}, "mesh.data 2 works"),
        (60, {"fsdp": 3}, "fsdp x tensor = 3 must divide 8"),
    ],
)
def test_a_part_that_does_not_divide_a_tpu_slice_is_refused_with_the_fix(
    batch, settings, fix, monkeypatch
):
    devices = slice_of(8, monkeypatch)
    with pytest.raises(
        ConfigError, match="on TPUs the number in use must divide the number"
    ) as error:
        make_mesh(MeshConfig(**settings), experiment().model, batch, devices=devices)
    assert str(error.value).endswith(fix)
    with pytest.raises(ConfigError, match="on TPUs the number in use must divide the number"):
        scoring_mesh(MeshConfig(**settings), experiment().model, batch, devices=devices)


def test_scoring_takes_the_fewest_devices_that_are_as_fast_as_all(monkeypatch):
    cfg = experiment().model
    for rows, data in ((1, 1), (5, 5), (8, 8), (10, 5), (16, 8), (17, 6), (60, 8)):
        assert scoring_mesh(MeshConfig(), cfg, rows).shape["data"] == data
    chips = slice_of(8, monkeypatch)
    for rows, data in ((1, 1), (5, 8), (10, 8), (4, 4), (60, 8)):
        assert scoring_mesh(MeshConfig(), cfg, rows, chips) == ((data, 1, 1), data)
    assert scoring_mesh(MeshConfig(data=2, fsdp=2), cfg, 1, chips) == ((2, 2, 1), 4)


@pytest.mark.parametrize(
    ("batch", "parts", "settings", "words"),
    [
        (6, 1, {}, "6 of 8 devices are in use, and the others stay idle; train.batch_size = 8"),
        (22, 1, {}, "2 of 8 devices are in use, and the others stay idle; train.batch_size = 16 or"
         " 24 uses all"),
        (24, 4, {}, "6 of 8 devices are in use, and the others stay idle; train.batch_size = 32"),
        (22, 1, {"tensor": 2}, "train.batch_size = 20 or 24 uses all"),
        (60, 1, {"fsdp": 3}, "mesh.fsdp x mesh.tensor = 3 must divide 8 to use all"),
        (24, 1, {}, None),
        (22, 1, {"data": 2}, None),
    ],
)  # fmt: skip
def test_idle_devices_are_reported_with_the_nearest_batch_sizes(batch, parts, settings, words):
    c = MeshConfig(**settings)
    mesh = make_mesh(c, experiment().model, batch, parts)
    found = idle_devices(mesh, c, batch, parts)
    assert (found is None) == (words is None)
    assert (words or "") in (found or "")


@pytest.mark.slow
def test_a_run_that_leaves_devices_idle_says_so_once(tmp_path, capsys):
    """There are eight devices, but training has only 6 rows, and evaluation only 1 stream."""
    changes = {"train.batch_size": 6, "train.steps": 3, "mesh.data": -1}
    tiny_runs.run_in_workdir(tmp_path, tmp_path / "run", **changes)
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("6 of 8 devices are in use") == 1
    txl_jax.load(str(tmp_path / "run")).evaluate(batch_size=1)
    assert (
        capsys.readouterr().err.count(
            "1 of 8 devices are in use, and the others stay idle; evaluate.batch_size = 8 uses all"
        )
        == 1
    )


# ------------------------------------------------------------------ what devices exchange


def all_shapes(text: str, kinds: str = r"[\w-]+") -> list[tuple[str, tuple[int, ...]]]:
    """Lists (kind, shape) of each result of the instructions in a compiled program's text.

    ``kinds`` is a regular expression for the kinds of instructions to list.
    """
    found = []
    for result, kind in re.findall(rf"= (\S.*?) ({kinds})(?:-start)?\(", text):
        for shape in re.findall(r"\w+\[([\d,]*)\]", result):
            found.append((kind, tuple(int(n) for n in shape.split(",") if n)))
    return found


def exchanges(mesh, **changes) -> list[tuple[str, tuple[int, ...]]]:
    """Lists (kind, shape) of every array that devices exchange in a compiled training step."""
    exp = experiment(mesh, **changes)
    _, _, shardings, state = prepared(exp)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batches()[0]))
    step = StepSetup.on(shardings.mesh, exp).update()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return all_shapes(step.lower(*shapes).compile().as_text(), kinds)


@pytest.mark.integration
@pytest.mark.parametrize("output", ["plain", "adaptive"])
@pytest.mark.few(1)
def test_with_data_alone_devices_only_add_up_gradients(output):
    found = exchanges((8, 1, 1), **of_output(output))
    assert {kind for kind, _ in found} == {"all-reduce"}
    counted = collections.Counter(shape for _, shape in found)
    tables = [s for s in counted if len(s) == 2 and s[0] in (V, 16, 24, 56)]  # V, cluster sizes
    assert tables
    for shape in tables:  # once for the embedding, once for the softmax, not for each block of rows
        assert counted[shape] <= 2


@pytest.mark.integration
@pytest.mark.parametrize("shape", ["8x1x1", "2x2x2", "1x4x2"])
@pytest.mark.few(1)
def test_memory_never_moves_between_devices(shape):
    rows = B // (MESHES[shape][0] * MESHES[shape][1])
    moved = [s for _, s in exchanges(MESHES[shape]) if len(s) >= 3 and M in s and 32 in s]
    assert not moved, f"rows {rows}"
    exp = experiment(MESHES[shape])
    _, _, shardings, state = prepared(exp)
    step = StepSetup.on(shardings.mesh, exp).update()
    after = step(state, jax.device_put(batches()[0], shardings.rows()))[0]
    assert after.mems.hidden.sharding.is_equivalent_to(state.mems.hidden.sharding, 4)


def test_with_fsdp_parameters_are_gathered_and_no_rows():
    gathered = {shape for kind, shape in exchanges((1, 8, 1)) if kind == "all-gather"}
    flat = {(32, 32), (32, 48), (48, 32), (V, 32)}  # whole parameters, heads concatenated
    assert gathered <= flat, gathered - flat
    assert (V, 32) in gathered


# ------------------------------------------------------------------ resuming on another mesh


MANY = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "model.scan_layers": True}
MUON = {"optimizer.name": "muon"}
OPTAX = {"optimizer.name": "optax.adafactor", "optimizer.arguments.min_dim_size_to_factor": 8}


def one_by_one(model):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = param_shapes(dataclasses.replace(model, scan_layers=False))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)


def losses_of(workdir):
    return [r["loss"] for r in read_counted(workdir / "metrics.jsonl")[0] if r["kind"] == "train"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, MANY),
        pytest.param(MANY, {}, marks=pytest.mark.slow),
        pytest.param(MUON, MANY | MUON, marks=pytest.mark.slow),
        pytest.param(OPTAX, MANY | OPTAX, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_on_another_mesh_and_in_the_other_layout(tmp_path, first, then):
    """The run is stopped and saved at step 8 of 12, then resumed on the other mesh."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny_runs.run(tmp_path, whole, **first)
    corpus, exp = tiny_runs.corpus_and_experiment(tmp_path, **first)
    train(exp, corpus, str(parts), StopAt(9))
    with Checkpoints(str(parts)) as checkpoints:
        step = checkpoints.choose("latest")
        checkpoints.restore_params(step, one_by_one(exp.model))  # on disk, layers are unstacked
    tiny_runs.run(tmp_path, parts, **then)
    assert len(losses_of(parts)) == 4
    np.testing.assert_allclose(losses_of(parts), losses_of(whole), rtol=1e-4)


def test_the_kernel_choice_sees_the_device_of_a_mesh_of_one(monkeypatch):
    """A program that is compiled ahead of time for one absent TPU must use the kernel for TPUs."""
    seen: list[Mesh | None] = []

    def choose(name, form, mesh=None):
        seen.append(mesh)
        return choice.Choice("xla")

    monkeypatch.setattr(choice, "choose", choose)
    model, _, shardings, state = prepared(experiment((1, 1, 1)))
    seen.clear()
    jax.eval_shape(lambda: model.apply({"params": state.params}, batches()[0].inputs, state.mems))
    assert seen
    assert all(mesh is shardings.mesh for mesh in seen)
