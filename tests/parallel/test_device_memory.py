"""A program is refused before it runs if it cannot fit into memory, and only then."""

import dataclasses
import gc
import os
import shutil
import time
import weakref
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_runs
from tiers import rest_integration

import txl_jax
from txl_jax import modes
from txl_jax.analysis import ablation
from txl_jax.checkpoint.checkpoint_folder import CheckpointFolder
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import TrainedModel, param_shapes
from txl_jax.config import ConfigError, ExperimentConfig, GenerateConfig, override
from txl_jax.convert import Request, conversion
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation import any_text
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.generation import generate
from txl_jax.generation.text import continuations
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel import device_memory as machine
from txl_jax.parallel.device_memory import GIB, TRAINING, Checked, Work, array_bytes, check_program
from txl_jax.parallel.mesh import make_mesh
from txl_jax.parallel.shardings import Shardings
from txl_jax.training import trainer
from txl_jax.training.plan import StepSetup, build_meshes, check_training_memory
from txl_jax.training.state import init_state

of_this_host: Any = machine.host_memory
MODEL: dict[str, Any] = {
    "vocab_size": 50,
    "n_layer": 2,
    "d_model": 32,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 64,
}
BASE = ExperimentConfig.from_dict({"model": MODEL, "mesh": {"data": 1}})
MIB = 2**20


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """Makes this machine appear to have 16 GiB of memory."""
    monkeypatch.setattr(machine, "host_memory", lambda: 16 * GIB)


def check_memory_of(exp):
    """Runs the memory check that training does before it reads its text."""
    check_training_memory(exp, *build_meshes(exp))


def trained(**changes) -> Any:
    """A stand-in for a trained model, with the attributes that the checks read."""
    return SimpleNamespace(config=override(BASE, changes), vocab=Vocab.from_chars(["abc\n"]))


# The memory of hosts and devices.


def test_the_memory_of_this_host_is_known():
    assert of_this_host() > GIB
    assert machine.memory_of_each() == 16 * GIB


def test_a_container_has_its_own_limit(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{GIB}\n")
    monkeypatch.setattr(machine, "_CONTAINER_LIMITS", (str(tmp_path / "gone"), str(limit)))
    monkeypatch.setattr(machine, "_SWAP", str(tmp_path / "gone"))
    assert of_this_host.__wrapped__() == GIB
    limit.write_text("max\n")
    assert of_this_host.__wrapped__() > GIB


class Unlike(txl_jax.TransformerXLConfig, key="model"):
    """The config of a changed model whose layers are not alike (docs/change.md)."""

    def __post_init__(self):
        super().__post_init__()
        if self.scan_layers is True:
            raise ConfigError("layers are not alike")


def test_a_model_whose_layers_cannot_be_scanned_is_checked_too(monkeypatch):
    exp = dataclasses.replace(BASE, model=Unlike(**MODEL))
    check_memory_of(exp)
    monkeypatch.setattr(machine, "host_memory", lambda: 1024)
    with pytest.raises(ConfigError, match="memory"):
        check_memory_of(exp)


def test_each_device_has_its_part_of_sharded_arrays():
    mesh = make_mesh(override(BASE, {"mesh.fsdp": 8, "mesh.data": 1}).mesh, BASE.model, 16)
    shapes = param_shapes(BASE.model)
    place = lambda x, sharding: x.update(sharding=sharding)
    of_each = jax.tree.map(place, shapes, Shardings(mesh).parameters(shapes))
    assert array_bytes(shapes) == sum(4 * x.size for x in jax.tree.leaves(shapes))
    assert array_bytes(shapes) / 8 < array_bytes(of_each) < array_bytes(shapes) / 4


# Programs.

WORK = Work.sized_by("the work", "score.batch_size", "score.seg_len", "score.mem_len")


def squares(n):
    """A jitted function with a large intermediate array, and arguments for it."""
    return jax.jit(lambda x: jnp.sort(x[:, None] * x[None, :], axis=0).sum(axis=1)), jnp.ones(n)


def test_a_program_that_does_not_fit_is_refused_before_it_runs(monkeypatch):
    ran = []
    jitted, x = squares(2048)

    class Noted:
        lower = staticmethod(jitted.lower)

        def __call__(self, x):
            ran.append(x)
            return jitted(x)

    checked = Checked(Noted(), WORK)
    monkeypatch.setattr(machine, "host_memory", lambda: 8 * MIB)
    with pytest.raises(ConfigError) as error:
        checked(x)
    assert str(error.value).startswith("the work needs 0.0 GiB of memory on each device, which has")
    assert str(error.value).endswith("lower score.batch_size, score.seg_len or score.mem_len")
    assert not ran
    monkeypatch.setattr(machine, "host_memory", lambda: 64 * MIB)
    assert checked(x).shape == (2048,)
    assert len(ran) == 1


def test_a_program_is_compiled_once_and_compared_again_for_other_shapes(monkeypatch):
    jitted, x = squares(100)
    checked, compared = Checked(jitted, WORK), []
    compare = machine.check_program

    def noted(*args):
        compared.append(args)
        return compare(*args)

    monkeypatch.setattr(machine, "check_program", noted)
    for argument in (x, x + 1, jnp.ones(200), x):
        checked(argument)
    assert len(compared) == 2
    assert jitted._cache_size() == 2


def test_a_function_in_a_program_of_its_caller_is_not_compared(monkeypatch):
    jitted, x = squares(100)
    monkeypatch.setattr(machine, "host_memory", lambda: 1)
    assert jax.eval_shape(Checked(jitted, WORK), x).shape == (100,)


class Accelerator:
    """A stand-in for a device whose memory already holds arrays."""

    platform, process_index = "gpu", 0

    def __init__(self, in_use, limit):
        self.stats = {"bytes_in_use": in_use, "bytes_limit": limit}

    def memory_stats(self):
        """Returns the statistics as a ``jax.Device`` does."""
        return self.stats


@pytest.mark.parametrize(("resident", "spare"), [(True, 0), (False, 2**22)])
def test_what_an_accelerator_holds_is_counted_once(monkeypatch, resident, spare):
    jitted, x = jax.jit(lambda x: 2 * x), jax.ShapeDtypeStruct((2**20,), jnp.float32)
    held, result = 3 * 2**22, 2**22  # bytes; if resident, the argument's 4 MiB are in ``held``
    limit = held + result + spare
    for limit_, fits in ((limit + 4096, True), (limit - 1, False)):
        device = Accelerator(held, limit_)
        monkeypatch.setattr(machine, "_devices_of", lambda _, device=device: [device])
        if fits:
            check_program(WORK, jitted.lower(x), resident)
            continue
        with pytest.raises(ConfigError, match=r"^the work needs"):
            check_program(WORK, jitted.lower(x), resident)


def test_a_device_that_runs_out_of_memory_names_the_settings_that_help():
    with pytest.raises(ConfigError) as error, machine.explained(TRAINING):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 12.50GiB.")
    message = str(error.value)
    assert message == (f"training ran out of the memory of a device of 16.0 GiB: {TRAINING.advice}")
    for name in ("train.micro_batches", "model.remat", "mesh.fsdp", "train.batch_size"):
        assert name in message


@pytest.mark.parametrize("share", [None, "0.5"])
@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_command_uses_most_of_a_gpu_unless_told_how_much(name, share, monkeypatch):
    for each in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(each, "")  # restored after the test
    if share:
        monkeypatch.setenv(name, share)
    machine.use_most_memory()
    given = {each: os.environ[each] for each in os.environ if each.endswith("CLIENT_MEM_FRACTION")}
    assert given[name if share else "XLA_CLIENT_MEM_FRACTION"] == (share or "0.9")
    assert sum(map(bool, given.values())) == 1  # JAX refuses both names at once
    assert machine.gpu_share() == float(share or 0.9)


@pytest.mark.parametrize("where", ["init_cache", "score", "add_squares"])
def test_memory_that_ends_in_any_program_of_scoring_names_the_settings(where):
    changes: dict[str, Any] = {"evaluate.batch_size": 2, "evaluate.seg_len": 8}
    changes |= {"evaluate.mem_len": 8}
    if where == "add_squares":
        changes |= {"evaluate.dynamic.rule": "rms", "evaluate.dynamic.statistics": 2}
    exp, text = override(BASE, changes), np.arange(40) % 50
    mesh = make_mesh(exp.mesh, exp.model, 2)
    evaluator: Any = Evaluator(exp.model, exp.evaluate, text, mesh, training=text)

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9.00GiB")

    evaluator._programs = evaluator._programs._replace(**{where: full})
    evaluator._score = full if where == "score" else evaluator._score
    params = init_state(exp, TransformerXL(exp.model), optax.sgd(0.1)).params
    with pytest.raises(ConfigError, match=r"evaluation ran out of the memory.*evaluate.mem_len"):
        evaluator.run(params)


def test_another_error_of_a_device_stays_itself():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), machine.explained(TRAINING):
        raise jax.errors.JaxRuntimeError("INTERNAL: failed")


# What is refused.

TOO_LARGE = [
    ({"model.d_inner": 1_000_000, "model.d_model": 100_000}, "training", "model.d_inner"),
    ({"model.n_head": 10_000, "model.d_head": 10_000}, "training", "model.n_head"),
    ({"model.vocab_size": 10_000_000, "model.d_model": 1000}, "training", "model.vocab_size"),
    ({"train.mem_len": 1_000_000, "train.batch_size": 128}, "training", "train.mem_len"),
    ({"train.num_seeds": 1000, "model.d_model": 1000}, "training", "train.num_seeds"),
    ({"validate.mem_len": 10**6, "validate.batch_size": 100}, "validation", "validate.mem_len"),
    ({"evaluate.mem_len": 10**6, "evaluate.batch_size": 100}, "evaluation", "evaluate.mem_len"),
]


@pytest.mark.parametrize(("changes", "what", "lower"), TOO_LARGE, ids=str)
def test_settings_beyond_the_memory_are_refused_at_once(changes, what, lower):
    start = time.thread_time()
    with pytest.raises(ConfigError) as error:
        check_memory_of(override(BASE, changes))
    assert time.thread_time() - start < 10
    message = str(error.value)
    assert message.startswith(f"{what} needs at least ")
    assert "on each device, which has 16.0 GiB: " in message
    assert lower in message
    assert "\n" not in message
    assert len(message) < 500


LARGE = {
    "model.n_layer": 16,
    "model.d_model": 512,
    "model.d_inner": 2048,
    "model.vocab_size": 100_000,
    "train.mem_len": 8192,
    "evaluate.mem_len": 65_536,
    "evaluate.batch_size": 1,
}


@pytest.mark.parametrize("changes", [{}, LARGE, {"generate.length": 10**7}], ids=str)
def test_settings_that_may_fit_are_not_refused(changes):
    check_memory_of(override(BASE, changes))


def test_devices_share_what_they_divide_and_a_host_its_memory(monkeypatch):
    large = {"model.d_inner": 100_000, "model.d_model": 4096, "train.batch_size": 8}
    alone = override(BASE, {**large, "model.n_layer": 1})
    of_mesh = override(alone, {"mesh.data": 1, "mesh.fsdp": 8})
    for exp in (alone, of_mesh):  # on one host, eight parts need as much as the whole
        check_memory_of(exp)
    monkeypatch.setattr(machine, "host_memory", lambda: 10 * GIB)
    for exp in (alone, of_mesh):
        with pytest.raises(ConfigError, match=r"^training needs at least"):
            check_memory_of(exp)


def test_a_machine_of_unknown_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: None)
    check_memory_of(override(BASE, {"train.mem_len": 1_000_000, "train.batch_size": 64}))


# Refusals come before texts are read and arrays are made.


def test_training_is_refused_before_its_text_is_read(tmp_path):
    large = {"model.d_inner": 1_000_000, "model.d_model": 100_000}
    exp = override(tiny_runs.experiment(tmp_path), {**large, "data.path": str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match=r"^training needs at least"):
        modes.train(exp, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_vocabulary_that_does_not_fit_is_refused_before_the_workdir_is_made(
    tmp_path, monkeypatch
):
    """The size of the vocabulary is known only once the text is read."""
    lines = [" ".join(f"word{i + n}" for i in range(10)) + "\n" for n in range(0, 5000, 10)]
    (tmp_path / "text.txt").write_text("".join(lines))
    changes = {"data.vocab": "word", "generate.length": 0, "generate.prompt": "word1"}
    exp = tiny_runs.experiment(tmp_path, **changes)
    monkeypatch.setattr(machine, "host_memory", lambda: MIB)
    check_memory_of(exp)
    with pytest.raises(ConfigError, match=r"^training needs at least .* make it smaller"):
        modes.train(exp, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_attention_kernel_for_other_devices_is_refused_with_the_settings():
    with pytest.raises(
        ConfigError, match=r"^model.kernel = 'triton' needs an NVIDIA GPU, but the program runs"
    ):
        check_memory_of(override(BASE, {"model.kernel": "triton"}))


LONG = {"train.batch_size": 64, "train.seg_len": 128, "train.mem_len": 128, "generate.length": 0}


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_an_update_that_does_not_fit_is_refused_before_its_state_is_made(
    num_seeds, monkeypatch, tmp_path
):
    made = []
    monkeypatch.setattr(StepSetup, "initial_state", lambda *_: made.append("state"))
    monkeypatch.setattr(machine, "host_memory", lambda: 16 * MIB)
    exp = tiny_runs.experiment(tmp_path, **LONG, **{"train.num_seeds": num_seeds})
    with pytest.raises(ConfigError, match=r"^training needs \d.* raise train\.micro_batches"):
        modes.train(exp, str(tmp_path / "run"))
    assert not made


@pytest.mark.integration
def test_an_update_in_parts_needs_less_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "host_memory", lambda: 16 * MIB)
    parts = {"train.micro_batches": 64, "train.steps": 1, "optimizer.warmup_steps": 0}
    outcome = tiny_runs.run(tmp_path, tmp_path / "run", **LONG, **parts)
    assert int(outcome.state.step) == 1


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.integration
@pytest.mark.few(1)
def test_a_resumed_state_is_in_memory_once_and_counted_once(scanned, monkeypatch, tmp_path):
    """A checkpoint has unstacked layers. They are freed once the run's own layers are made."""
    settings = {"model.scan_layers": scanned, "checkpoint.every": 6}
    tiny_runs.run(tmp_path, tmp_path / "run", **settings, **{"train.steps": 12})
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    kept: list[Any] = []
    resident: list[bool] = []
    left: list[int] = []
    restore, compare, done = Checkpoints.restore, trainer.check_program, trainer.Trainer.step_done

    def restored(self, *args):
        found: Any = restore(self, *args)
        kept.extend(weakref.ref(x) for x in jax.tree.leaves(found[0]))
        return found

    def compared(work, lowered, counted, options):
        resident.append(counted)
        return compare(work, lowered, counted, options)

    def counted_step(self, *args):
        gc.collect()
        left.append(sum(x() is not None and not x().is_deleted() for x in kept))
        done(self, *args)

    monkeypatch.setattr(Checkpoints, "restore", restored)
    monkeypatch.setattr(trainer, "check_program", compared)
    monkeypatch.setattr(trainer.Trainer, "step_done", counted_step)
    outcome = tiny_runs.run(tmp_path, tmp_path / "run", **settings, **{"train.steps": 12})
    assert int(outcome.state.step) == 12
    assert kept
    assert left == [0] * 6
    assert resident == [True]


@pytest.mark.integration
def test_a_run_whose_validation_does_not_fit_is_saved_before_it_stops(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise ConfigError("validation needs too much")

    workdir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "run", refuse)
        with pytest.raises(ConfigError, match=r"^validation needs too much$"):
            tiny_runs.run(tmp_path, workdir)
    assert CheckpointFolder(str(workdir)).steps() == [4, 6]
    whole = tiny_runs.run(tmp_path, tmp_path / "whole")
    resumed = tiny_runs.run(tmp_path, workdir)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)


@pytest.fixture(scope="module")
def own_run(trained_run, tmp_path_factory):
    """The workdir of a trained model."""
    return trained_run.copied(tmp_path_factory.mktemp("own") / "run")


MODES = [
    ("evaluate", {}, "evaluation", "evaluate.batch_size"),
    ("generate", {}, "generation", "generate.samples"),
    ("score", {}, "scoring", "score.batch_size"),
    ("evaluate", {"evaluate.dynamic.rule": "rms"}, "evaluation", "evaluate.batch_size"),
    ("context", {"context.lengths": (8, 16)}, "measuring contexts", "context.lengths"),
    (
        "context",
        {"context.lengths": (8, 16), "context.kind": "memory"},
        "measuring contexts",
        "context.lengths",
    ),
    (
        "attention",
        {"attention.seg_len": 8, "attention.mem_len": 8, "attention.position": 100},
        "reading attention",
        "attention.seg_len",
    ),
    ("speed", {"speed.lengths": (16,), "speed.windows": 2}, "measuring speed", "speed.windows"),
]


@pytest.mark.parametrize(("mode", "changes", "what", "lower"), rest_integration(3, MODES), ids=str)
@pytest.mark.few(3)
def test_the_program_of_every_mode_is_compared_with_the_memory(
    mode, changes, what, lower, own_run, monkeypatch
):
    exp = override(load(str(own_run)).config, changes)
    (own_run / "lines.txt").write_text("the cat saw\n")
    exp = override(exp, {"score.path": str(own_run / "lines.txt")})
    compare = machine._compare
    for programs in (generate._programs, any_text._program):
        programs.cache_clear()  # a program that fits is not compared again
    of_programs = lambda *args: None if "at least " in args else compare(*args)
    monkeypatch.setattr(machine, "_compare", of_programs)
    monkeypatch.setattr(machine, "host_memory", lambda: 1000)
    with pytest.raises(ConfigError) as error:
        modes.use_model(mode, exp, {}, str(own_run), "best")
    assert str(error.value).startswith(f"{what} needs 0.0 GiB of memory on each device")
    assert lower in str(error.value)


def test_evaluation_is_refused_before_its_text_is_read(monkeypatch, tmp_path):
    exp = override(BASE, {"evaluate.mem_len": 10**6, "evaluate.batch_size": 100})
    without = TrainedModel(None, None, Vocab.from_chars(["abc\n"]), exp, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(modes, "load", lambda *_: without)
    with pytest.raises(ConfigError, match=r"^evaluation needs at least"):
        modes.use_model("evaluate", exp, {}, str(tmp_path), "best")


def test_an_ablation_is_refused_before_it_trains(tmp_path):
    asked = {"ablation.lengths": "100,1000000", "data.path": str(tmp_path / "gone")}
    with pytest.raises(ConfigError, match=r"^evaluation at ablation\.lengths 1000000 needs at"):
        ablation.run("configs/table6.py", asked, str(tmp_path), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"samples": 10**6}, {"mem_len": 10**6, "samples": 1000}])
def test_continuations_are_refused_before_a_row_is_made(changes):
    c = GenerateConfig(**changes)
    with pytest.raises(ConfigError, match=r"^generation needs at least .*generate\.samples"):
        next(continuations(trained(), ["a"], c))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"n_layer": 10**12}, r"^config key model\.n_layer = 1000000000000: must be at most 1000$"),
        ({"d_inner": 10**6, "d_model": 10**5}, "^the converted model needs at least "),
    ],
)
def test_a_converted_model_is_refused_before_its_tensors_are_read(shape, message):
    args = {"n_token": 4, "n_layer": 1, "n_head": 2, "d_model": 8, "d_head": 4, "d_inner": 8}
    with pytest.raises(ConfigError, match=message):
        conversion._experiment(
            Request(source="state", workdir="run"),
            conversion.PROGRAMS["pytorch"],
            {**args, **shape},
            Vocab.from_chars(["abc\n"]),
        )
