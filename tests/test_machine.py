"""What cannot fit the memory is refused before anything is allocated; what may fit is not."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import tiny_models
import tiny_runs

from txl_jax import modes
from txl_jax.analysis import ablation, attention_maps, context, probe, speed
from txl_jax.checkpoint.trained_model import TrainedModel, param_shapes
from txl_jax.config import ConfigError, ExperimentConfig, GenerateConfig, override
from txl_jax.convert import Request, conversion
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation import score
from txl_jax.generation.text import continuations
from txl_jax.model import footprint
from txl_jax.parallel import device_memory as machine
from txl_jax.parallel.device_memory import GIB
from txl_jax.training.preparation import check_evaluation_memory, check_training_memory

of_this_host: Any = machine.host_memory
MODEL = {"vocab_size": 50, "n_layer": 2, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
BASE = ExperimentConfig.from_dict({"model": MODEL, "mesh": {"data": 1}})


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """A machine of 16 GiB, whatever this one has."""
    monkeypatch.setattr(machine, "host_memory", lambda: 16 * GIB)


def trained(**changes) -> Any:
    """What the checks of the analyses read of a trained model."""
    return SimpleNamespace(config=override(BASE, changes), vocab=Vocab.from_chars(["abc\n"]))


# The figures.

SHAPES: list[dict[str, Any]] = [
    *(tiny_models.attention(name) for name in tiny_models.ATTENTION),
    {"untie_r": True},
    {"scan_layers": True},
    {"tie_weight": False},
    {"d_embed": 5, "tie_projs": (True,)},
    {"cutoffs": (4, 8)},
    {"cutoffs": (4, 8), "d_embed": 5, "tie_projs": (True, False, True)},
    {"cutoffs": (4, 8), "div_val": 2, "proj_same_dim": False},
    {"cutoffs": (4, 8), "div_val": 2, "tie_projs": (False, True, True), "tie_weight": False},
    {"mixtures": 3, "d_embed": 5},
    {"past_decode": True, "d_embed": 4},
    {"gate": "gru"},
    {"attention_bias": True, "d_head": 5},
    {"pre_lnorm": True, "final_norm": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parameters_are_counted_without_the_model(shape):
    c = tiny_models.config(**shape)
    assert sum(footprint.parameter_counts(c)) == sum(
        x.size for x in jax.tree.leaves(param_shapes(c))
    )


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


# What is refused.

TOO_LARGE = [
    ({"model.d_inner": 1_000_000, "model.d_model": 100_000}, "training", "model.d_inner (1000000)"),
    ({"model.n_head": 10_000, "model.d_head": 10_000}, "training", "model.n_head (10000)"),
    ({"model.vocab_size": 10_000_000, "model.d_model": 1000}, "training", "model.vocab_size"),
    ({"model.mixtures": 1000, "train.batch_size": 4096}, "training", "model.mixtures (1000)"),
    ({"train.mem_len": 1_000_000, "train.batch_size": 64}, "training", "train.mem_len (1000000)"),
    ({"train.seg_len": 1_000_000}, "training", "train.seg_len (1000000)"),
    ({"train.batch_size": 1_000_000}, "training", "train.batch_size (1000000)"),
    ({"train.steps_per_dispatch": 10**7, "train.steps": 10**7}, "training", "steps_per_dispatch"),
    ({"train.num_seeds": 1000, "model.d_model": 1000}, "training", "train.num_seeds (1000)"),
    ({"model.sample_softmax": 10**7}, "training", "model.sample_softmax (10000000)"),
    (
        {"loss.r_drop": 1.0, "model.vocab_size": 10**6, "train.batch_size": 64},
        "training",
        "scores of all words",
    ),
    ({"validate.mem_len": 10**6, "validate.batch_size": 100}, "validation", "validate.mem_len"),
    ({"evaluate.mem_len": 10**6, "evaluate.batch_size": 100}, "evaluation", "evaluate.mem_len"),
    ({"evaluate.seg_len": 10**6}, "evaluation", "evaluate.seg_len (1000000)"),
    ({"generate.samples": 10**6}, "generation", "generate.samples (1000000)"),
]


@pytest.mark.parametrize(("changes", "what", "lower"), TOO_LARGE, ids=str)
def test_settings_beyond_the_memory_are_refused_at_once(changes, what, lower):
    every = changes.get("train.steps_per_dispatch", 1)
    multiples = {"train.log_every": every, "checkpoint.every": every} if every > 1 else {}
    exp = override(BASE, {**changes, **multiples})
    start = time.thread_time()
    with pytest.raises(ConfigError) as error:
        check_training_memory(exp)
    assert time.thread_time() - start < 1
    message = str(error.value)
    assert message.startswith(f"{what} needs at least ")
    assert "on each device, which has 16.0 GiB; " in message
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
    check_training_memory(override(BASE, changes))


def test_devices_share_what_they_divide_and_a_host_its_memory(monkeypatch):
    large = {"model.d_inner": 100_000, "model.d_model": 4096, "train.batch_size": 8}
    alone = override(BASE, {**large, "model.n_layer": 1})
    of_mesh = override(alone, {"mesh.data": 1, "mesh.fsdp": 8})
    whole, part = (
        sum(need.size for need in footprint.of_parameters(alone.model, footprint.Shares(*shares)))
        for shares in ((1, 1), (8, 8))
    )
    assert whole == pytest.approx(8 * part, rel=1e-6)
    for exp in (alone, of_mesh):  # on one host eight parts are as much as the whole
        check_training_memory(exp)
    monkeypatch.setattr(machine, "host_memory", lambda: 10 * GIB)
    for exp in (alone, of_mesh):
        with pytest.raises(ConfigError, match=r"^training needs at least"):
            check_training_memory(exp)


def test_a_machine_of_unknown_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: None)
    check_training_memory(override(BASE, {"train.mem_len": 1_000_000, "train.batch_size": 64}))


# Where it is refused.


def test_training_is_refused_before_its_text_is_read(tmp_path):
    large = {"model.d_inner": 1_000_000, "model.d_model": 100_000}
    exp = override(tiny_runs.experiment(tmp_path), {**large, "data.path": str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match=r"^training needs at least"):
        modes.train(exp, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_compiling_ahead_is_not_refused_by_this_machine(monkeypatch):
    asked: list[Any] = []

    def compile_ahead(*about):
        asked.append(about)
        return 0

    monkeypatch.setattr(modes, "compile_ahead", compile_ahead)
    exp = override(BASE, {"model.d_inner": 1_000_000, "model.d_model": 100_000})
    assert modes.compile_programs(exp, "v5e:4x4") == 0
    assert asked == [(exp, "v5e:4x4")]


def test_an_attention_kernel_for_other_devices_is_refused_with_the_settings():
    with pytest.raises(ConfigError, match=r"^model.kernel = 'triton' is for a gpu and this runs"):
        check_training_memory(override(BASE, {"model.kernel": "triton"}))


@pytest.mark.parametrize(
    ("check", "changes", "lower"),
    [
        (
            lambda t: check_evaluation_memory(t.config),
            {"evaluate.seg_len": 10**6},
            "evaluate.seg_len",
        ),
        (
            lambda t: context.check_size(t, t.config.context),
            {"context.lengths": (100, 10**6), "context.batch_size": 10},
            "context.lengths (up to 1000000)",
        ),
        (
            attention_maps.check_size,
            {"attention.mem_len": 10**6, "attention.batch_size": 100},
            "attention.mem_len (1000000)",
        ),
        (
            speed.check_size,
            {"speed.lengths": (10**5,), "speed.windows": 1},
            "speed.lengths (up to 100000)",
        ),
        (
            speed.check_size,
            {"speed.windows": 10**6, "speed.lengths": (100,)},
            "speed.windows (1000000)",
        ),
        (
            speed.check_size,
            {"speed.seg_len": 10**6, "speed.lengths": (1000,)},
            "speed.seg_len (1000000)",
        ),
        (probe.check_size, {"probe.mem_lens": (0, 10**6)}, "probe.mem_lens (up to 1000000)"),
        (probe.check_size, {"train.mem_len": 10**6}, "probe.answers (200)"),
        (
            lambda t: score.check_score_memory(t, n_lines=10**6),
            {"score.memory": "line", "score.batch_size": 10**6},
            "score.batch_size (1000000)",
        ),
        (
            lambda t: ablation.check_size(t.config, list(t.config.ablation.lengths)),
            {"ablation.lengths": (100, 10**6)},
            "evaluate.mem_len (1000000)",
        ),
    ],
)
def test_every_analysis_is_refused_before_it_works(check, changes, lower):
    check(trained())
    with pytest.raises(ConfigError, match="needs at least ") as error:
        check(trained(**changes))
    assert lower in str(error.value)


@pytest.mark.parametrize("module", [context, attention_maps, speed, probe, score])
def test_an_analysis_checks_the_memory_before_it_uses_the_model(module, monkeypatch, tmp_path):
    """These have no parameters, so that any use of them fails with another error."""

    def refuse(*_, **__):
        raise ConfigError("too large")

    (tmp_path / "text.txt").write_text("abc\n")
    about = trained(**{"score.path": str(tmp_path / "text.txt"), "speed.lengths": (2,)})
    without = TrainedModel(None, None, about.vocab, about.config, 0)  # type: ignore[arg-type]
    name = "check_score_memory" if module is score else "check_size"
    monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(probe, "check", lambda _: None)  # it asks for the text of its own corpus
    with pytest.raises(ConfigError, match=r"^too large$"):
        module.run(without, str(tmp_path))


def test_evaluation_is_refused_before_its_text_is_read(monkeypatch, tmp_path):
    exp = override(BASE, {"evaluate.seg_len": 10**6})
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
    c = dataclasses.replace(GenerateConfig(), **changes)
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
