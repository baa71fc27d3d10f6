"""Configuration: every setting is checked, and an error names key, value, rule and nearest key."""

import copy
import dataclasses
import json
import pathlib
import re
import shutil
import sys
import typing
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.config import (
    FREE_TO_CHANGE,
    ConfigError,
    DynamicConfig,
    ExperimentConfig,
    OptimizerConfig,
    ProbeTextConfig,
    ProtocolConfig,
    TrainConfig,
    TransformerXLConfig,
    config_rows,
    describe_settings,
    differing_keys,
    flatten,
    format_settings,
    load_config,
    override,
    with_absolute_paths,
)
from txl_jax.config.changes import from_record, is_free, set_all, without_paths
from txl_jax.config.combinations import ALTERNATIVES
from txl_jax.config.nested import SYNONYMS

FLAGS = (sys.pycache_prefix, sys.dont_write_bytecode)
MD5 = "md5:" + "0" * 32


@pytest.fixture
def config_file(tmp_path):
    """Returns a function that writes a config file and returns its path.

    The function's arguments are the lines of ``get_config``.
    """

    def write(*lines, args="", name="config.py"):
        path = tmp_path / name
        body = "\n    ".join(lines)
        path.write_text(f"import ml_collections\n\ndef get_config({args}):\n    {body}\n")
        return str(path)

    return write


def build(**dotted):
    """Returns the default experiment with overrides; ``__`` in a keyword stands for a dot."""
    nested: dict[str, object] = {}
    set_all(nested, {key.replace("__", "."): value for key, value in dotted.items()})
    return ExperimentConfig.from_dict(nested)


def refusal(**dotted):
    with pytest.raises(ConfigError) as error:
        build(**dotted)
    return str(error.value)


def leaves(cls=ExperimentConfig, prefix=""):
    """Yields ``(dotted key, type)`` of every setting."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


# --------------------------------------------------------------------------------------
# Unknown keys.


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.step", "train.steps"),
        ("trian.steps", "train.steps"),
        ("modle.n_layer", "model.n_layer"),
        ("n_layers", "model.n_layer"),
        ("model.steps", "train.steps"),
        ("train..steps", "train.steps"),
    ],
)
def test_unknown_key_is_refused_and_the_nearest_named(key, nearest):
    expected = f"unknown config key {key!r}; the nearest key is {nearest!r}"
    assert refusal(**{key: 3}) == expected


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("train.foo", "the keys of train are steps, batch_size, "),
        ("data.encoding", "the keys of data are name, path, "),
        ("logdir", "docs/settings.md lists the keys of model, data, loss"),
        ("data.text_column", "the nearest key is 'data.field'"),
        ("optimizer.beta1", "the nearest key is 'optimizer.b1'"),
        ("recl.groups", "the keys of recl are models, shares"),  # not suggested: speed.rounds
        ("train.batchsize", "the nearest key is 'train.batch_size'"),
    ],
)
def test_a_far_key_is_answered_by_the_keys_that_there_are(key, says):
    assert refusal(**{key: 3}).startswith(f"unknown config key {key!r}; {says}")


def test_unknown_section_is_refused_with_its_first_key():
    expected = "unknown config key 'optimiser.b1'; the nearest key is 'optimizer.b1'"
    assert refusal(optimiser={"b1": 0.5}) == expected


def test_a_key_below_a_setting_of_the_file_is_refused(config_file):
    path = config_file("return ml_collections.ConfigDict({'model': {'n_layer': 3}})")
    with pytest.raises(
        ConfigError, match=r"^unknown config key 'model.n_layer.x'; the keys of model "
    ):
        load_config(path, {"model.n_layer.x": 3})


def test_a_section_cannot_be_a_value():
    rule = "is a section of settings, not one setting; set model.NAME"
    assert refusal(model=3) == f"config key model = 3: {rule}"


# --------------------------------------------------------------------------------------
# Types.

WINDOW = "must be one of False, 'pytorch', 'tf'"
VOCAB = "must be one of 'byte', 'char', 'word', 'subword'"
BASELINES = "must be one of 'unigram', 'bigram', 'xz'"
RULES = "must be 'adam', 'lamb', 'muon', or an optimizer of optax, such as 'optax.lion'"
ATTENTION = (
    "must be one of 'relative', 'shaw', 'absolute', 'absolute_per_layer', 'shared_projection'"
)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("train.steps", "many", "'many': must be of type int"),
        ("train.steps", 1.5, "1.5: must be of type int"),
        ("train.steps", "1.5", "1.5: must be of type int"),
        ("train.steps", True, "True: must be of type int"),
        ("train.steps", None, "None: must be of type int"),
        ("train.steps", "", "'': must be of type int"),
        ("train.steps", " ", "' ': must be of type int"),
        ("model.pre_lnorm", "", "'': must be of type bool"),
        ("optimizer.name", "", "'': must name an update rule"),
        ("model.d_embed", "", "'': a value is missing; give one, or the word none"),
        ("data.path", "", "'': a value is missing; give one, or the word none"),
        ("data.cache_dir", " ", "' ': a value is missing; give one, or the word none"),
        ("train.steps", "²", "'²': must be of type int"),
        ("train.steps", "٣", "'٣': must be of type int"),
        ("model.dropout", "٠.١", "'٠.١': must be of type float"),
        ("model.dropout", "nan", "nan: must be a finite number"),
        ("generate.stop", "[1]", "1: must be of type str"),
        (
            "sweep.grid.optimizer.name",
            "[adam,muon]",
            "'[adam,muon]': is no complete list; write 1,2 or a,b or ['a', 'b']",
        ),
        (
            "sweep.grid.model.dropout",
            "[0.1,",
            "'[0.1,': is no complete list; write 1,2 or a,b or ['a', 'b']",
        ),
        ("train.steps", "{[]: 1}", "'{[]: 1}': must be of type int"),
        ("model.n_layer", {}, "{}: must be of type int"),
        ("model.n_layer", [3], "[3]: must be of type int"),
        ("model.dropout", True, "True: must be of type float"),
        ("model.dropout", "high", "'high': must be of type float"),
        ("optimizer.learning_rate", float("inf"), "inf: must be a finite number"),
        ("optimizer.clip_norm", float("nan"), "nan: must be a finite number"),
        ("optimizer.clip_norm", "1e999", "inf: must be a finite number"),
        ("model.pre_lnorm", 1, "1: must be of type bool"),
        ("model.pre_lnorm", "1", "'1': must be of type bool"),
        ("name", 3, "3: must be of type str"),
        ("data.path", 3, "3: must be of type str"),
        ("data.name", "enwik", "'enwik': must be one of "),
        ("data.vocab", "bytes", f"'bytes': {VOCAB}; the nearest is 'byte'"),
        ("model.same_length", True, f"True: {WINDOW}"),
        ("model.same_length", 0, f"0: {WINDOW}"),
        ("model.same_length", None, f"None: {WINDOW}"),
        ("evaluate.same_length", "torch", f"'torch': {WINDOW}; the nearest is 'pytorch'"),
        ("evaluate.baselines", "trigram", f"'trigram': {BASELINES}; the nearest is 'bigram'"),
        ("evaluate.baselines", ["xz", 3], f"3: {BASELINES}"),
        ("evaluate.baselines", 3, "3: must be a list"),
        ("evaluate.baselines", None, "None: must be a list"),
        ("evaluate.first_memory", "full", "'full': must be one of 'empty', 'zeros'"),
        ("loss.positions", "last", "'last': must be one of 'full', 'half'"),
        ("optimizer.name", "sgd", f"'sgd': {RULES}; the nearest name is 'optax.sgd'"),
        ("model.attention", "vanilla", f"'vanilla': {ATTENTION}"),
        ("model.dropout_mask", "rows", "'rows': must be one of 'independent', 'locked'"),
        ("model.cutoffs", [5, "many"], "'many': must be of type int"),
        ("model.cutoffs", [5, True], "True: must be of type int"),
        ("model.cutoffs", 5, "5: must be a list"),
        ("model.tie_projs", [False, 1], "1: must be of type bool"),
        ("model.tie_projs", True, "True: must be a list"),
    ],
)
def test_wrong_type_is_refused_with_key_value_and_type(key, value, rule):
    message = refusal(**{key: value})
    # One message ends with the list of corpora. That list can grow, so it is not compared.
    same = message.startswith if rule.endswith(" ") else message.__eq__
    assert same(f"config key {key} = {rule}")


def test_an_integer_too_large_for_a_float_is_refused():
    assert refusal(**{"optimizer.clip_norm": 10**400}).endswith("must be a finite number")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "300", 300),
        ("train.steps", "1e3", 1000),
        ("train.steps", "1_000", 1000),
        ("model.clamp_len", "-1", -1),
        ("model.vocab_size", "None", None),
        ("model.vocab_size", "204", 204),
        ("optimizer.learning_rate", "2.5e-4", 2.5e-4),
        ("optimizer.clip_norm", "1", 1.0),
        ("model.pre_lnorm", "true", True),
        ("model.pre_lnorm", "False", False),
        ("model.same_length", "false", False),
        ("model.same_length", "tf", "tf"),
        ("model.dtype", "BFloat16", "bfloat16"),
        ("generate.stop", "the end", ("the end",)),
        ("generate.stop", ")", (")",)),
        ("generate.stop", "[", ("[",)),
        ("generate.stop", "(a) b", ("(a) b",)),
        ("generate.stop", "'a'", ("'a'",)),
        ("generate.stop", " a, b ", (" a", " b ")),
        ("generate.stop", '["\\n\\n", "a, b"]', ("\n\n", "a, b")),
        ("generate.stop", "('a', 'b')", ("a", "b")),
        ("distil.teachers", "runs/my runs/a,runs/b", ("runs/my runs/a", "runs/b")),
        ("distil.teachers", "('runs/my runs/a', 'runs/b')", ("runs/my runs/a", "runs/b")),
        ("distil.teachers", "['runs/a']", ("runs/a",)),
        ("distil.teachers", "()", ()),
        ("distil.teachers", "", ()),
        ("evaluate.same_length", "none", None),
        ("evaluate.same_length", "False", False),
        ("evaluate.clamp_len", "400", 400),
        ("evaluate.clamp_len", "none", None),
        ("data.path", "none", None),
        ("data.path", "~/text.txt", "~/text.txt"),
        ("data.vocab", "word", "word"),
        ("generate.prompt", "none", "none"),
        ("generate.prompt", "300", "300"),
        ("evaluate.baselines", "xz", ("xz",)),
        ("evaluate.baselines", "unigram,xz", ("unigram", "xz")),
        ("evaluate.baselines", "('unigram', \"xz\")", ("unigram", "xz")),
        ("evaluate.baselines", "[bigram]", ("bigram",)),
        ("evaluate.baselines", "()", ()),
        ("evaluate.first_memory", "zeros", "zeros"),
        ("model.cutoffs", "(2000, 4000)", (2000, 4000)),
        ("model.cutoffs", "20", (20,)),
        ("model.tie_projs", "[true]", (True,)),
        ("model.d_embed", "none", None),
        ("model.dropout_input", "0", 0.0),
        ("model.dropout_input", "none", None),
        ("loss.tar", "1", 1.0),
    ],
)
def test_command_line_text_is_read_as_the_type_of_its_key(config_file, key, text, value):
    on_device = "{'train': {'text_on_device': True}}"  # distil.teachers needs this setting
    path = config_file(f"return ml_collections.ConfigDict({on_device})")
    section, _, name = key.rpartition(".")
    got = getattr(getattr(load_config(path, {key: text}), section), name)
    assert (got, type(got)) == (value, type(value))


def test_numbers_that_mean_the_same_are_converted_and_lists_become_tuples():
    exp = build(train__steps=1e3, model__dropout=0, evaluate__baselines=["xz", "unigram"])
    assert (exp.train.steps, type(exp.train.steps)) == (1000, int)
    assert (exp.model.dropout, type(exp.model.dropout)) == (0.0, float)
    assert exp.evaluate.baselines == ("xz", "unigram")


def test_every_default_survives_being_written_on_a_command_line():
    flat = flatten(ExperimentConfig().to_dict())
    assert flat.keys() == dict(leaves()).keys()
    texts = {key: str(value) for key, value in flat.items()}
    assert build(**texts) == ExperimentConfig.from_dict({})


# --------------------------------------------------------------------------------------
# Ranges.

OUT_OF_RANGE = [
    ("seed", -1, "must be at least 0"),
    ("model.vocab_size", 0, "must be at least 1"),
    ("model.n_layer", 0, "must be at least 1"),
    ("model.d_model", 1, "must be at least 2"),
    ("model.n_head", 0, "must be at least 1"),
    ("model.d_head", -4, "must be at least 1"),
    ("model.d_inner", 0, "must be at least 1"),
    ("model.d_embed", 0, "must be at least 1"),
    ("model.dropout", 1.0, "must be from 0 to 0.999999"),
    ("model.dropout_input", 1.0, "must be from 0 to 0.999999"),
    ("model.dropout_output", -0.1, "must be from 0 to 0.999999"),
    ("model.dropout_qkv", 1.5, "must be from 0 to 0.999999"),
    ("model.dropout_embedding", 1.0, "must be from 0 to 0.999999"),
    ("model.dropatt", -0.1, "must be from 0 to 0.999999"),
    ("model.clamp_len", 0, "must be -1 (never) or at least 1"),
    ("model.n_positions", 0, "must be at least 1"),
    ("model.cutoffs", (5, 5), "must be increasing numbers, each at least 1"),
    ("model.cutoffs", (7, 5), "must be increasing numbers, each at least 1"),
    ("model.cutoffs", (0, 5), "must be increasing numbers, each at least 1"),
    ("model.div_val", 0, "must be at least 1"),
    ("model.sample_softmax", -1, "must be at least 0"),
    ("model.mixtures", 0, "must be at least 1"),
    ("model.dropout_latent", 1.0, "must be from 0 to 0.999999"),
    ("model.gate_bias", 101.0, "must be from -100 to 100"),
    ("model.init_std", 0.0, "must be above 0 and finite in float32"),
    ("model.proj_init_std", 0.0, "must be above 0 and finite in float32"),
    ("model.norm_epsilon", 0.0, "must be above 0 and finite in float32"),
    ("data.valid_fraction", 0.0, "must be above 0 and below 0.5"),
    ("data.test_fraction", 0.5, "must be above 0 and below 0.5"),
    ("optimizer.learning_rate", 0.0, "must be above 0 and finite in float32"),
    ("optimizer.warmup_steps", -1, "must be at least 0"),
    ("optimizer.min_ratio", 1.5, "must be from 0 to 1"),
    ("optimizer.clip_norm", -1.0, "must be at least 0"),
    ("optimizer.b1", 1.0, "must be from 0 to 0.999999"),
    ("optimizer.b2", 1.0, "must be from 0 to 0.999999"),
    ("optimizer.momentum", 1.0, "must be from 0 to 0.999999"),
    ("optimizer.eps", 0.0, "must be above 0 and finite in float32"),
    ("optimizer.eps", 1e-60, "must be above 0 and finite in float32"),
    ("optimizer.eps", 1e39, "must be above 0 and finite in float32"),
    ("loss.r_drop", -1.0, "must be at least 0"),
    ("loss.past_decode", -1.0, "must be at least 0"),
    ("optimizer.l2", -1.0, "must be at least 0"),
    ("optimizer.weight_decay", -1.0, "must be at least 0"),
    ("optimizer.embedding_ratio", 0.0, "must be above 0 and finite in float32"),
    ("average.swa_start", -1, "must be at least 0"),
    ("average.swa_lr_ratio", 0.0, "must be above 0 and finite in float32"),
    ("average.ema_decay", 1.0, "must be from 0 to 0.999999"),
    ("train.num_seeds", 0, "must be at least 1"),
    ("sweep.seeds", 0, "must be at least 1"),
    ("loss.ar", -0.1, "must be at least 0"),
    ("loss.tar", -0.1, "must be at least 0"),
    ("train.steps", 0, "must be at least 1"),
    ("train.batch_size", 0, "must be at least 1"),
    ("train.seg_len", 0, "must be at least 1"),
    ("train.mem_len", -1, "must be at least 0"),
    ("train.context_len", -1, "must be at least 0"),
    ("distil.teachers", ("",), "must not have an empty path"),
    ("distil.weight", 0.0, "must be above 0 and at most 1"),
    ("distil.weight", 1.1, "must be above 0 and at most 1"),
    ("distil.words", 0, "must be at least 1"),
    ("validate.temperature", 0.0, "must be from 1e-06 to 100"),
    ("evaluate.temperature", 1e-7, "must be from 1e-06 to 100"),
    ("train.seg_len_std", -1.0, "must be at least 0"),
    ("train.reset_every", -1, "must be at least 0"),
    ("train.micro_batches", 0, "must be at least 1"),
    ("train.steps_per_dispatch", 0, "must be at least 1"),
    ("train.log_every", 0, "must be at least 1"),
    ("train.eval_every", -1, "must be at least 0"),
    ("train.skip_spikes", 0.5, "must be 0 (off) or above 1"),
    ("train.max_skipped", 0, "must be at least 1"),
    ("validate.batch_size", 0, "must be at least 1"),
    ("evaluate.seg_len", 0, "must be at least 1"),
    ("evaluate.mem_len", -1, "must be at least 0"),
    ("evaluate.context_len", -1, "must be at least 0"),
    ("evaluate.clamp_len", 0, "must be -1 (never) or at least 1"),
    ("evaluate.warm_start", -1, "must be at least 0"),
    ("evaluate.max_segments", -1, "must be at least 0"),
    ("evaluate.dynamic.learning_rate", 0.0, "must be above 0 and finite in float32"),
    ("evaluate.dynamic.decay", -0.1, "must be at least 0"),
    ("evaluate.dynamic.epsilon", 0.0, "must be above 0 and finite in float32"),
    ("evaluate.dynamic.statistics", 0, "must be at least 1"),
    ("generate.length", -1, "must be at least 0"),
    ("generate.mem_len", 0, "must be at least 1"),
    ("generate.temperature", -0.5, "must be 0 (greedy) or from 1e-06 to 100"),
    ("generate.temperature", 1e-7, "must be 0 (greedy) or from 1e-06 to 100"),
    ("generate.batch_size", 0, "must be at least 1"),
    ("generate.samples", 0, "must be at least 1"),
    ("export.batch_size", 0, "must be at least 1"),
    ("export.seg_len", 0, "must be at least 1"),
    ("export.mem_len", 0, "must be at least 1"),
    ("generate.min_p", 1.0, "must be from 0 to 0.999999"),
    ("generate.repetition_penalty", 0.5, "must be at least 1"),
    ("generate.stop", ("",), "must not have an empty text"),
    ("generate.stop", ("a", ""), "must not have an empty text"),
    ("context.lengths", (3,), "must be two or more increasing numbers, each at least 1"),
    ("context.stride", 0, "must be at least 1"),
    ("context.max_tokens", -1, "must be at least 0"),
    ("context.batch_size", 0, "must be at least 1"),
    ("context.threshold", 1.0, "must be at least 0 and below 1"),
    ("recl.shares", (0.5, 0.0), "must be one or more numbers above 0 and at most 1"),
    ("recl.shares", (), "must be one or more numbers above 0 and at most 1"),
    ("recl.first", 0, "must be at least 1"),
    ("recl.delta", 0, "must be at least 1"),
    ("recl.longest", 1, "must be at least 2"),
    ("recl.threshold", 0.0, "must be above 0 and below 1"),
    ("attention.seg_len", 0, "must be at least 1"),
    ("attention.mem_len", -1, "must be at least 0"),
    ("attention.max_tokens", -1, "must be at least 0"),
    ("attention.batch_size", 0, "must be at least 1"),
    ("attention.widest", 0, "must be at least 1"),
    ("attention.position", -1, "must be at least 0"),
    ("ablation.lengths", (2, 2), "must be one or more increasing numbers, each at least 1"),
    ("ablation.max_tokens", -1, "must be at least 0"),
    ("ablation.seeds", (1, 1), "must be one or more different numbers from 0 on"),
    ("ablation.seeds", (-1,), "must be one or more different numbers from 0 on"),
    ("score.mem_len", 0, "must be at least 1"),
    ("score.seg_len", 0, "must be at least 1"),
    ("score.batch_size", 0, "must be at least 1"),
    ("speed.lengths", (1,), "must be one or more increasing numbers, each at least 2"),
    ("speed.seg_len", 0, "must be at least 1"),
    ("speed.windows", 0, "must be at least 1"),
    ("speed.rounds", 0, "must be at least 1"),
    ("probe.distances", (1, 2), "must be one or more increasing numbers, each at least 2"),
    ("probe.mem_lens", (4, 0), "must be increasing numbers, each at least 0"),
    ("probe.answers", 0, "must be at least 1"),
    ("probe.seed", -1, "must be at least 0"),
    ("data.vocab_size", 1, "must be from 2 to 10000000"),
    ("data.probe.shortest", 1, "must be at least 2"),
    ("data.probe.longest", 1, "must be at least 2"),
    ("data.probe.symbols", 27, "must be from 2 to 26"),
    ("data.probe.noise", 0, "must be from 1 to 26"),
    ("data.probe.tokens", 10, "must be at least 1000"),
    ("data.probe.seed", -1, "must be at least 0"),
    ("generate.top_k", -1, "must be at least 0"),
    ("generate.top_p", 0.0, "must be from 1e-06 to 1"),
    ("generate.top_p", 1e-40, "must be from 1e-06 to 1"),
    ("generate.seed", -1, "must be at least 0"),
    ("checkpoint.every", 0, "must be at least 1"),
    ("checkpoint.keep_last", 0, "must be at least 1"),
    ("checkpoint.keep_best", -1, "must be at least 0"),
    ("mesh.data", 0, "must be -1 (all devices) or at least 1"),
    ("mesh.fsdp", 0, "must be -1 (chosen with data) or at least 1"),
    ("mesh.tensor", 0, "must be at least 1"),
    (
        "data.hash",
        "md5:12",
        "must be 'md5:' and 32 or 'sha256:' and 64 lower-case hexadecimal digits",
    ),
]


@pytest.mark.parametrize(("key", "value", "rule"), OUT_OF_RANGE)
def test_value_out_of_range_is_refused_with_its_rule(key, value, rule):
    assert refusal(**{key: value}) == f"config key {key} = {value!r}: {rule}"


def bounds_of(kinds, cls=ExperimentConfig, prefix=""):
    """Yields key, type and largest value of each setting whose type is in ``kinds``.

    A list counts if the type of its items is in ``kinds``. The largest value is None if the setting
    states none.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from bounds_of(kinds, hint, f"{key}.")
        elif kinds & {hint, *typing.get_args(hint)}:
            stated = re.search(r"from -?\d+ to (\d+)$", field.metadata.get("rule", ""))
            yield key, hint, int(stated[1]) if stated else field.metadata.get("most")


INTEGERS = list(bounds_of({int}))


def with_item(hint, value):
    """Returns the value, or (2, value) if ``hint`` is the type of a list."""
    return (2, value) if typing.get_origin(hint) is tuple else value


@pytest.mark.parametrize(("key", "hint", "most"), INTEGERS)
def test_every_integer_has_an_upper_bound(key, hint, most):
    assert most is not None, f"{key} has no upper bound: give it one of config/bounds.py"
    for value in (most + 1, 10**12 * most, 10**30):
        message = refusal(**{key: with_item(hint, value)})
        assert re.fullmatch(rf"config key {key} = .*: must be (at most|from \d+ to) .*", message)
        assert f"must be at most {most}" in message or str(most) in message


@pytest.mark.parametrize("key", ["model.dropout", "optimizer.b2", "average.ema_decay"])
def test_a_probability_that_float32_rounds_to_1_is_refused(key):
    assert refusal(**{key: 1 - 1e-12}).endswith(": must be from 0 to 0.999999")


def test_large_settings_of_real_use_are_accepted():
    """The settings have a memory of 64k, a vocabulary of a million, 96 layers and many steps."""
    large = {
        "seed": 2**32 - 1,
        "model.vocab_size": 1_000_000,
        "model.n_layer": 96,
        "model.d_model": 12_288,
        "model.n_head": 96,
        "model.d_inner": 4 * 12_288,
        "train.steps": 10_000_000,
        "train.batch_size": 4096,
        "train.mem_len": 65_536,
        "evaluate.mem_len": 65_536,
        "evaluate.warm_start": 65_536 * 96,
        "generate.length": 100_000,
        "generate.temperature": 1e-3,
        "generate.top_p": 1e-3,
        "evaluate.temperature": 0.01,
        "average.ema_decay": 0.99999,
    }
    build(**large)


def test_every_number_has_a_range_that_is_tested_above():
    numbers = {k for k, hint in leaves() if {int, float} & {hint, *typing.get_args(hint)}}
    tested = {key.replace("validate", "evaluate") for key, _, _ in OUT_OF_RANGE}
    assert {key.replace("validate", "evaluate") for key in numbers} <= tested


@pytest.mark.parametrize("digits", ["md5:" + "a" * 32, "sha256:" + "0" * 64])
def test_a_well_formed_hash_is_accepted(digits):
    assert build(data__hash=digits).data.hash == digits


@pytest.mark.parametrize("digits", ["a" * 32, "sha256:" + "0" * 32, "md5:" + "g" * 32, "sha1:00"])
def test_a_malformed_hash_is_refused(digits):
    assert refusal(data__hash=digits).startswith(f"config key data.hash = {digits!r}: must be ")


# --------------------------------------------------------------------------------------
# Combinations.

NO_MEMORY = {"train.mem_len": 0, "validate.mem_len": 0, "evaluate.mem_len": 0}
MEMORY_FREE = {"model.attention": "absolute", **NO_MEMORY}
PER_LAYER = {**MEMORY_FREE, "model.attention": "absolute_per_layer", "model.n_positions": 128}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train.batch_size": 8, "train.micro_batches": 3},
            "train.micro_batches = 3: must divide train.batch_size 8",
        ),
        (
            {"train.steps": 1001, "train.steps_per_dispatch": 2},
            "train.steps = 1001: must be a multiple of train.steps_per_dispatch 2",
        ),
        (
            {"train.log_every": 25, "train.steps_per_dispatch": 10},
            "train.log_every = 25: must be a multiple of train.steps_per_dispatch 10",
        ),
        (
            {"train.eval_every": 25, "train.steps_per_dispatch": 10},
            "train.eval_every = 25: must be a multiple of train.steps_per_dispatch 10",
        ),
        (
            {"checkpoint.every": 25, "train.steps_per_dispatch": 10},
            "checkpoint.every = 25: must be a multiple of train.steps_per_dispatch 10",
        ),
        (
            {"optimizer.warmup_steps": 20, "train.steps": 10},
            "optimizer.warmup_steps = 20: is more than train.steps 10: use fewer, for example"
            " optimizer.warmup_steps=1",
        ),
        (
            {"optimizer.schedule": "inverse_sqrt"},
            "optimizer.warmup_steps = 0: must be at least 1 for schedule 'inverse_sqrt'",
        ),
        (
            {"model.same_length": "pytorch", "train.mem_len": 0},
            "train.mem_len = 0: same_length='pytorch' allows only distances below the memory"
            " length, which is 0; use a longer memory, or same_length='tf'",
        ),
        (
            {"model.same_length": "pytorch", "validate.mem_len": 0},
            "validate.mem_len = 0: same_length='pytorch' allows only distances below the memory"
            " length, which is 0; use a longer memory, or same_length='tf'",
        ),
        (
            {"evaluate.same_length": "pytorch", "evaluate.mem_len": 0},
            "evaluate.mem_len = 0: same_length='pytorch' allows only distances below the memory"
            " length, which is 0; use a longer memory, or same_length='tf'",
        ),
        (
            {"data.url": "http://u"},
            "data.url = 'http://u': needs data.hash (md5:… or sha256:…) to check the download",
        ),
        (
            {"data.url": "http://u", "data.hash": MD5, "data.name": "ptb"},
            "data.url = 'http://u': is only for data.name='text', not 'ptb'; leave the key out",
        ),
        (
            {"data.url": "http://u", "data.hash": MD5, "data.path": "p"},
            "data.url = 'http://u': data.path = 'p' is given too; give one of them",
        ),
        (
            {"generate.prompt": "Once", "generate.prompt_file": "f"},
            "generate.prompt_file = 'f': generate.prompt = 'Once' is given too; give one of them",
        ),
        (
            {"model.d_model": 33},
            "model.d_model = 33: must be even, because half of a position encoding is sines and"
            " half cosines (paper, section 3.3)",
        ),
        (
            {"loss.positions": "half", "train.seg_len": 1},
            "loss.positions = 'half': needs train.seg_len of at least 2, not 1",
        ),
        (
            {"validate.warm_start": 8, "validate.context_len": 4},
            "validate.warm_start = 8: needs segments without context, and validate.context_len"
            " is 4; set one of the two to 0",
        ),
        (
            {"validate.warm_start": 8, "validate.mem_len": 0},
            "validate.warm_start = 8: is read into memory, and validate.mem_len is 0; use a longer"
            " memory",
        ),
        (
            {"evaluate.first_memory": "zeros", "evaluate.context_len": 8, "evaluate.mem_len": 4},
            "evaluate.first_memory = 'zeros': has no effect with evaluate.context_len 8; use"
            " first_memory 'empty', or context_len 0",
        ),
        (
            {"evaluate.warm_start": 8, "evaluate.first_memory": "zeros"},
            "evaluate.warm_start = 8: starts from an empty memory, and evaluate.first_memory is"
            " 'zeros'; use first_memory 'empty'",
        ),
        (
            {"evaluate.context_len": 8, "evaluate.mem_len": 0, "evaluate.same_length": "tf"},
            "evaluate.context_len = 8: same_length='tf' allows only distances up to the memory"
            " length, which is 0; use same_length=False, or context_len 0",
        ),
        (
            {"model.same_length": "tf", "train.context_len": 8, "train.mem_len": 0},
            "train.context_len = 8: same_length='tf' allows only distances up to the memory"
            " length, which is 0; use same_length=False, or context_len 0",
        ),
        (
            {**MEMORY_FREE, "train.mem_len": 4},
            "train.mem_len = 4: must be 0, because attention 'absolute' has no memory; use"
            " train.context_len instead",
        ),
        (
            {**MEMORY_FREE, "validate.mem_len": 4},
            "validate.mem_len = 4: must be 0, because attention 'absolute' has no memory; use"
            " validate.context_len instead",
        ),
        (
            {**PER_LAYER, "evaluate.mem_len": 4},
            "evaluate.mem_len = 4: must be 0, because attention 'absolute_per_layer' has no"
            " memory; use evaluate.context_len instead",
        ),
        (
            {**PER_LAYER, "train.seg_len": 129},
            "train.seg_len = 129: a segment with its context has up to 129 tokens, and"
            " model.n_positions is 128; use shorter segments or more positions",
        ),
        (
            {**PER_LAYER, "train.seg_len": 120, "train.seg_len_std": 3.0},
            "train.seg_len = 120: a segment with its context has up to 129 tokens"
            " (train.seg_len_std), and model.n_positions is 128; use shorter segments or more"
            " positions",
        ),
        (
            {"train.steps": 10, "average.swa_start": 10},
            "average.swa_start = 10: must be below train.steps 10",
        ),
        (
            {"average.swa_lr_ratio": 0.5},
            "average.swa_lr_ratio = 0.5: is for the steps after average.swa_start, which is 0"
            " (off); set average.swa_start too",
        ),
        (
            {"average.swa_start": 5, "average.swa_lr_ratio": 0.5},
            "average.swa_lr_ratio = 0.5: multiplies the schedule's last rate, which is 0; set"
            " optimizer.min_ratio",
        ),
        (
            {
                "average.swa_start": 5,
                "average.swa_lr_ratio": 0.5,
                "optimizer.min_ratio": 0.1,
                "optimizer.warmup_steps": 6,
            },
            "optimizer.warmup_steps = 6: is more than average.swa_start 5, where the schedule ends;"
            " use fewer steps",
        ),
        (
            {"loss.r_drop": 0.5, "model.sample_softmax": 9},
            "loss.r_drop = 0.5: needs scores of all words, and model.sample_softmax 9 computes"
            " only some; set model.sample_softmax to 0",
        ),
        (
            {"loss.past_decode": 0.1},
            "loss.past_decode = 0.1: needs model.past_decode=True too",
        ),
        (
            {"loss.past_decode": 0.1, "model.past_decode": True, "model.sample_softmax": 9},
            "loss.past_decode = 0.1: needs scores of all words, and model.sample_softmax 9 computes"
            " only some; set model.sample_softmax to 0",
        ),
        (
            {"distil.teachers": ("runs/a",)},
            "distil.teachers = ('runs/a',): needs train.text_on_device=True",
        ),
        (
            {
                "distil.teachers": ("runs/a",),
                "train.text_on_device": True,
                "model.sample_softmax": 9,
            },
            "distil.teachers = ('runs/a',): needs scores of all words, and model.sample_softmax"
            " 9 computes only some; set model.sample_softmax to 0",
        ),
        (
            {"data.name": "lm1b", "train.text_on_device": True},
            "train.text_on_device = True: needs one continuous text, and data.name='lm1b' has"
            " shuffled sentences",
        ),
        (
            {"evaluate.temperature": 1.1, "evaluate.dynamic.rule": "sgd"},
            "evaluate.temperature = 1.1: needs fixed parameters, and evaluate.dynamic.rule is"
            " 'sgd'; use temperature 1, or dynamic.rule 'none'",
        ),
        ({"average.use": "swa"}, "average.use = 'swa': needs average.swa_start above 0"),
        (
            {"average.swa_start": 5, "average.use": "ema"},
            "average.use = 'ema': needs average.ema_decay above 0",
        ),
        (
            {"train.num_seeds": 2, "mesh.tensor": 2},
            "train.num_seeds = 2: all seeds run on one device, not on a mesh of -1 x -1 x 2; set"
            " mesh.data, mesh.fsdp and mesh.tensor to 1",
        ),
        (
            {"train.seg_len": 9, "train.seg_len_std": 1.0},
            "train.seg_len_std = 1.0: needs train.seg_len of at least 10, not 9, because some"
            " segments have about half that length",
        ),
        (
            {"data.name": "lm1b", "train.seg_len_std": 1.0},
            "train.seg_len_std = 1.0: needs one continuous text, and data.name='lm1b' has"
            " shuffled sentences",
        ),
        (
            {"data.name": "lm1b", "train.partial_shuffle": True},
            "train.partial_shuffle = True: needs one continuous text, and data.name='lm1b' has"
            " shuffled sentences",
        ),
        (
            {**PER_LAYER, "validate.context_len": 1},
            "validate.seg_len = 128: a segment with its context has up to 129 tokens, and"
            " model.n_positions is 128; use shorter segments or more positions",
        ),
        (
            {**PER_LAYER, "evaluate.seg_len": 64, "evaluate.context_len": 65},
            "evaluate.seg_len = 64: a segment with its context has up to 129 tokens, and"
            " model.n_positions is 128; use shorter segments or more positions",
        ),
        (
            {**PER_LAYER, "model.n_positions": None},
            "model.n_positions = None: must be the number of rows of the position table of"
            " attention 'absolute_per_layer'",
        ),
        (
            {"model.attention": "shaw"},
            "model.n_positions = None: must be the number of rows of the position table of"
            " attention 'shaw'",
        ),
        (
            {**PER_LAYER, "model.d_head": 63},
            "model.d_head = 63: attention 'absolute_per_layer' needs n_head * d_head = d_model 512",
        ),
        (
            {"model.vocab_size": 20, "model.cutoffs": (5, 20)},
            "model.cutoffs = (5, 20): must be below the vocabulary's size 20",
        ),
        (
            {"model.d_embed": 15, "model.div_val": 4, "model.cutoffs": (5, 20)},
            "model.div_val = 4: leaves no width for the last of 3 clusters, because the first has"
            " 15; use a smaller div_val or fewer cutoffs",
        ),
        (
            {"model.tie_projs": (False, True, True), "model.cutoffs": (5,)},
            "model.tie_projs = (False, True, True): has more entries than there are clusters (2)",
        ),
        (
            {"model.final_norm": True},
            "model.final_norm = True: needs model.pre_lnorm=True; with pre_lnorm=False the output"
            " is normalised already",
        ),
        (
            {"model.mixtures": 3, "model.cutoffs": (5,)},
            "model.mixtures = 3: mixes softmaxes over all words, and model.cutoffs is (5,);"
            " leave model.cutoffs out, or use mixtures 1",
        ),
        (
            {"model.mixtures": 3, "model.sample_softmax": 9},
            "model.mixtures = 3: mixes softmaxes over all words, and model.sample_softmax is 9;"
            " leave model.sample_softmax out, or use mixtures 1",
        ),
        (
            {"model.mixtures": 3, "model.d_embed": 256, "model.tie_projs": (True,)},
            "model.mixtures = 3: mixed softmaxes have no output projection to tie; set"
            " model.tie_projs to (False,)",
        ),
        *(
            (
                {"model.past_decode": True, **more},
                "model.past_decode = True: needs one embedding for all words; use no cutoffs and"
                " div_val 1",
            )
            for more in ({"model.cutoffs": (5,)}, {"model.div_val": 2})
        ),
        *(
            (
                {"model.sample_softmax": 9, **more},
                "model.sample_softmax = 9: needs one cluster of width d_model (no cutoffs, div_val"
                " or d_embed)",
            )
            for more in ({"model.cutoffs": (5,)}, {"model.div_val": 2}, {"model.d_embed": 256})
        ),
    ],
)
def test_combination_that_cannot_work_is_refused_with_its_rule(settings, message):
    assert refusal(**settings) == f"config key {message}"


@pytest.mark.parametrize(
    "settings",
    [
        {"train.batch_size": 8, "train.micro_batches": 4},
        {"train.steps_per_dispatch": 10, "train.eval_every": 0},
        {"optimizer.schedule": "inverse_sqrt", "optimizer.warmup_steps": 1},
        {"average.swa_start": 5, "average.swa_lr_ratio": 0.5, "optimizer.schedule": "constant"},
        {"average.swa_start": 5, "average.swa_lr_ratio": 0.5, "optimizer.min_ratio": 0.1},
        {"average.ema_decay": 0.5, "average.use": "ema"},
        {"train.num_seeds": 2, "mesh.data": 1},
        {"model.same_length": "tf", "train.mem_len": 0},
        {"model.same_length": "pytorch", "evaluate.same_length": False, "evaluate.mem_len": 0},
        {"data.url": "http://u", "data.hash": MD5},
        {"loss.positions": "half", "train.seg_len": 2},
        {"train.context_len": 8, "train.mem_len": 0, "model.same_length": False},
        {"evaluate.context_len": 8, "evaluate.mem_len": 0},
        {"evaluate.warm_start": 8, "evaluate.mem_len": 1},
        {**MEMORY_FREE, "train.context_len": 600, "evaluate.context_len": 600},
        {**PER_LAYER, "train.seg_len": 64, "train.context_len": 64},
        {**PER_LAYER, "train.seg_len": 119, "train.seg_len_std": 3.0},
        {"train.seg_len": 10, "train.seg_len_std": 1.0, "train.partial_shuffle": True},
        {"distil.teachers": ("runs/a",), "train.text_on_device": True, "distil.weight": 1.0},
        {"evaluate.temperature": 1.1, "validate.dynamic.rule": "sgd"},
        {"train.context_len": 8, "train.mem_len": 4, "evaluate.context_len": 8},
        {"data.name": "lm1b", "data.protocol": "double", "train.reset_every": 5},
        {"model.attention": "shaw", "model.n_positions": 1},
        {"model.vocab_size": 21, "model.cutoffs": (1, 20)},
        {"model.d_embed": 16, "model.div_val": 4, "model.cutoffs": (5, 20)},
        {"model.tie_projs": (False, True), "model.cutoffs": (5,)},
        {"model.sample_softmax": 9, "model.d_embed": 512},
        {"model.mixtures": 3, "model.dropout_latent": 0.1, "model.d_embed": 256},
        {"model.mixtures": 3, "model.past_decode": True, "loss.past_decode": 0.1},
        {"model.past_decode": True, "model.sample_softmax": 9},
        {"model.final_norm": True, "model.pre_lnorm": True},
        {"model.gate": "gru", "model.gate_bias": -2.0},
    ],
)
def test_combination_next_to_a_refused_one_is_accepted(settings):
    build(**settings)


# --------------------------------------------------------------------------------------
# The model's configuration by itself, and immutability.


def test_model_config_is_checked_when_built_directly():
    with pytest.raises(ConfigError, match=r"^config key model\.n_layer = 0: must be at least 1$"):
        TransformerXLConfig(n_layer=0)
    with pytest.raises(ConfigError, match=r"^config key model\.d_model = 33: must be even, "):
        TransformerXLConfig(d_model=33)
    with pytest.raises(ConfigError, match=r"^config key model\.untie_r = 1: must be of type bool"):
        TransformerXLConfig(untie_r=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="n_layers"):
        TransformerXLConfig(n_layers=3)  # type: ignore[call-arg]


def test_configs_cannot_be_changed_and_can_be_keys():
    exp = build(evaluate__baselines=["xz"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        exp.model.n_layer = 3
    assert hash(exp) == hash(copy.deepcopy(exp))


# --------------------------------------------------------------------------------------
# Dictionaries.


def test_json_round_trip_gives_the_same_experiment():
    exp = build(
        name="x",
        model__same_length="tf",
        model__vocab_size=204,
        evaluate__baselines=("unigram", "xz"),
        evaluate__same_length=False,
        data__hash=MD5,
    )
    text = json.dumps(exp.to_dict(), allow_nan=False)
    assert ExperimentConfig.from_dict(json.loads(text)) == exp


def test_missing_keys_take_their_defaults_and_validate_scores_the_valid_split():
    assert ExperimentConfig.from_dict({}) == ExperimentConfig()
    exp = ExperimentConfig.from_dict({"validate": {"batch_size": 3}})
    assert exp.validate == ProtocolConfig(split="valid", batch_size=3)
    assert exp.evaluate == ProtocolConfig(split="test")


def test_differing_keys_lists_what_decides_the_trained_state():
    old = build(evaluate__baselines=["xz"]).to_dict()
    new = build(model__n_layer=3, train__seg_len=64, model__same_length="tf").to_dict()
    assert differing_keys(old, new) == [
        "model.n_layer: 12 -> 3",
        "model.same_length: False -> 'tf'",
        "train.seg_len: 128 -> 64",
    ]


def test_differing_keys_takes_a_setting_that_came_later_for_its_default():
    new = ExperimentConfig().to_dict()
    old = copy.deepcopy(new)
    del old["model"]["untie_r"], old["loss"]
    assert differing_keys(old, new) == differing_keys(new, old) == []
    new["model"]["untie_r"], new["loss"]["tar"] = True, 0.5
    assert differing_keys(old, new) == ["loss.tar: 0.0 -> 0.5", "model.untie_r: False -> True"]
    assert differing_keys(new, old) == ["loss.tar: 0.5 -> 0.0", "model.untie_r: True -> False"]


def test_differing_keys_sees_a_setting_that_this_program_does_not_have():
    new = ExperimentConfig().to_dict()
    old = copy.deepcopy(new)
    old["model"]["segments"] = 3
    assert differing_keys(old, new) == ["model.segments: 3 -> 'absent'"]
    assert differing_keys(new, old) == ["model.segments: 'absent' -> 3"]


def test_differing_keys_does_not_tell_a_tuple_from_a_list():
    exp = ExperimentConfig()
    assert differing_keys(dataclasses.asdict(exp), json.loads(json.dumps(exp.to_dict()))) == []


def test_a_resumed_run_may_change_what_is_free_and_nothing_else():
    known = dict(leaves())
    for free in FREE_TO_CHANGE:
        assert any(key == free or key.startswith(free + ".") for key in known), free
    old = flatten(ExperimentConfig().to_dict())
    for key in known:
        changed = differing_keys(old, {**old, key: "something else"})
        assert bool(changed) != is_free(key), key
    assert not is_free("train.log_every_other")
    fixed = {key for key in known if not is_free(key)}
    assert fixed >= {"seed", "data.name", "data.vocab", "train.steps", "train.batch_size"}
    decides = {key for key in known if key.startswith(("model.", "optimizer.", "loss."))}
    how_it_is_run = {"model.scan_layers", "model.remat", "model.kernel"}
    assert decides - fixed == how_it_is_run


# --------------------------------------------------------------------------------------
# Files.


def test_a_file_names_only_what_differs_and_overrides_win(config_file):
    path = config_file(
        "c = ml_collections.ConfigDict({'name': 'mine'})",
        "c.train = ml_collections.ConfigDict({'steps': 7, 'seg_len': 9})",
        "return c",
    )
    exp = load_config(path, {"train.steps": "70", "model.n_layer": 2})
    assert (exp.name, exp.train.steps, exp.train.seg_len, exp.model.n_layer) == ("mine", 70, 9, 2)
    assert exp.train.batch_size == ExperimentConfig().train.batch_size


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        ({"generate.prompt": "Once"}, {"generate.prompts_file": "f"}),
        ({"generate.prompt": "Once"}, {"generate.prompt_file": "-"}),
        ({"generate.prompts_file": "f"}, {"generate.prompt": ""}),
        ({"generate.prompt_file": "f"}, {"generate.prompt": "None", "generate.prompts_file": None}),
        ({"data.name": "text", "data.url": "http://u", "data.hash": MD5}, {"data.path": "p"}),
    ],
)
def test_an_override_replaces_a_stored_alternative(stored, given, config_file):
    """Of alternatives, such as ``prompt`` and ``prompt_file``, only one is used.

    ``stored`` are settings of a run or a config file. An override of one alternative resets the
    stored one, but an override with ``none`` changes nothing.
    """
    defaults = flatten(ExperimentConfig().to_dict())
    run = override(ExperimentConfig(), stored)
    path = config_file(f"return ml_collections.ConfigDict({run.to_dict()!r})")
    for exp in (override(run, given), load_config(path, given)):
        flat = flatten(exp.to_dict())
        (group,) = [g for g in ALTERNATIVES if set(g) & set(given)]
        assert {key: flat[key] for key in group} == {
            key: given.get(key, defaults[key]) for key in group
        }
    (key,) = set(stored) & {key for group in ALTERNATIVES for key in group}
    for other in set(group) - {key, "generate.prompt"}:
        assert override(run, {other: "none"}) == run


def test_frozen_config_dicts_and_field_references_are_read(config_file):
    path = config_file(
        "steps = ml_collections.FieldReference(5)",
        "c = ml_collections.ConfigDict({'train': {'steps': steps * 2},",
        "                               'evaluate': {'baselines': ['xz']}})",
        "return ml_collections.FrozenConfigDict(c)",
    )
    exp = load_config(path)
    assert (exp.train.steps, exp.evaluate.baselines) == (10, ("xz",))


def test_the_text_after_the_colon_goes_to_get_config(config_file):
    path = config_file(
        "steps = {'smoke': 3, '': 5}[variant]",
        "return ml_collections.ConfigDict({'train': {'steps': steps}})",
        args="variant=''",
    )
    assert load_config(path).train.steps == 5
    assert load_config(path + ":smoke").train.steps == 3
    with pytest.raises(ConfigError, match=r"cannot be run: KeyError: 'tiny' \(line 4\)$"):
        load_config(path + ":tiny")


def test_reading_a_file_leaves_nothing_beside_it_and_sees_every_edit(config_file, tmp_path):
    for steps in (10, 20):
        line = f"return ml_collections.ConfigDict({{'train': {{'steps': {steps}}}}})"
        assert load_config(config_file(line)).train.steps == steps
    assert [p.name for p in tmp_path.iterdir()] == ["config.py"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("return (", "SyntaxError: '(' was never closed (config.py, line 4)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (line 4)"),
        ("raise ValueError('variants: a, b')", "ValueError: variants: a, b (line 4)"),
        ("raise ValueError('two\\n  lines')", "ValueError: two lines (line 4)"),
        ("return get_config()", "RecursionError: maximum recursion depth exceeded (line 4)"),
        ("exit('no such text')", "SystemExit: no such text (line 4)"),
    ],
)
def test_a_file_that_fails_says_what_and_where(config_file, line, error):
    path = config_file(line)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"config={path}: {path!r} cannot be run: {error}"


def test_a_variant_that_the_file_does_not_take_is_refused(config_file):
    path = config_file("return ml_collections.ConfigDict()")
    with pytest.raises(ConfigError) as error:
        load_config(path + ":smoke")
    message = f"config={path}:smoke: there is no variant 'smoke'; the file has no variants"
    assert str(error.value) == message


def test_a_variant_that_the_file_does_not_list_is_refused_and_the_listed_ones_are_named(
    config_file,
):
    path = config_file("return ml_collections.ConfigDict({'name': kind})", args="kind='one'")
    assert [load_config(f"{path}:{v}").name for v in ("two", "three")] == ["two", "three"]
    with open(path, "a") as file:
        file.write("\nVARIANTS = ('two', 'three')\n")
    assert [load_config(f"{path}:{v}").name for v in ("two", "three")] == ["two", "three"]
    with pytest.raises(ConfigError) as error:
        load_config(path + ":twoo")
    message = f"config={path}:twoo: there is no variant 'twoo'; variants: two, three"
    assert str(error.value) == message


def test_a_file_that_is_no_config_is_refused_with_the_reason(config_file, tmp_path):
    def message(path):
        with pytest.raises(ConfigError) as error:
            load_config(path)
        return str(error.value)

    missing = str(tmp_path / "none.py")
    assert message(missing) == f"config={missing}: there is no file {missing!r}"
    assert message(f"{missing}:a") == f"config={missing}:a: there is no file {missing!r}"
    assert message(str(tmp_path)) == f"config={tmp_path}: there is no file {str(tmp_path)!r}"
    text = config_file("return 3", name="config.txt")
    assert message(text) == f"config={text}: {text!r} is not a Python file (*.py)"
    bare = tmp_path / "bare.py"
    bare.write_text("x = 3\n")
    assert message(str(bare)) == f"config={bare}: {str(bare)!r} has no function get_config()"
    plain = config_file("return {'train': {}}")
    expected = f"config={plain}: get_config() must return an ml_collections.ConfigDict"
    assert message(plain) == expected


def test_errors_in_a_file_are_those_of_the_same_override(config_file):
    path = config_file("return ml_collections.ConfigDict({'train': {'steps': 'many'}})")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == refusal(train__steps="many")


def test_ctrl_c_in_a_config_file_is_no_error_of_the_file(config_file):
    with pytest.raises(KeyboardInterrupt):
        load_config(config_file("raise KeyboardInterrupt"))


def test_values_that_no_file_should_have_are_refused_in_a_line(config_file):
    def message(*lines):
        with pytest.raises(ConfigError) as error:
            load_config(config_file(*lines))
        return str(error.value)

    numbered = "ml_collections.ConfigDict({3: {4: 5}}, convert_dict=False)"
    assert message(f"return {numbered}").startswith("unknown config key '3.4'; ")


def test_long_values_and_keys_are_shortened(config_file):
    path = config_file("return ml_collections.ConfigDict()")
    for overrides in (
        {"train.steps": "x" * 5000},
        {"train.steps": "so many " * 600},
        {"train." + "x" * 5000: 1},
        {"y" * 5000: 1},
        {"evaluate.baselines": "z" * 5000},
        {"model.cutoffs": ",".join(["7"] * 2500)},
        {"generate.stop": ["a"] * 1000 + [""]},
    ):
        with pytest.raises(ConfigError) as error:
            load_config(path, overrides)
        message = str(error.value)
        assert "characters left out]" in message
        assert len(message) < 600  # the longest message lists all keys of a section
        assert message.startswith(("config key ", "unknown config key "))
    with pytest.raises(ConfigError) as error:
        load_config(f"{path}:{'x' * 5000}")
    assert len(str(error.value)) < 1000
    line = config_file(f"raise ValueError({'a b ' * 5000!r})")
    with pytest.raises(ConfigError) as error:
        load_config(line)
    assert len(str(error.value)) < 3000
    exp = ExperimentConfig()
    changed = {"seed": "s" * 5000}
    (line,) = differing_keys(exp.to_dict(), {**exp.to_dict(), **changed})
    assert len(line) < 500


def all_settings(cls=ExperimentConfig, prefix=""):
    """Yields (dotted key, type, dataclass field) of every setting."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from all_settings(hint, key + ".")
        else:
            yield key, hint, field


def test_every_setting_of_text_says_whether_it_names_a_path():
    """Each text setting is declared by ``file_path`` or ``free_text``; exports omit file paths."""
    texts = {key: field for key, hint, field in all_settings() if _holds_text(hint)}
    assert {"data.path", "recl.models", "train.start_from", "generate.prompt"} <= texts.keys()
    undeclared = [key for key, field in texts.items() if "path" not in field.metadata]
    assert undeclared == []
    named = {"path", "file", "dir", "folder", "json", "models", "teachers", "from", "workdirs"}
    for key, field in texts.items():
        if key.rpartition(".")[2].rpartition("_")[2] in named:
            assert field.metadata["path"], key


def _holds_text(hint):
    return hint is str or any(_holds_text(inner) for inner in _inner_types(hint))


def _inner_types(hint):
    return () if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)


def test_paths_are_made_absolute_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    given = {
        "data.path": "a//b/",
        "data.cache_dir": "~/x",
        "distil.teachers": ["runs/lr=0.1", "./runs/../b"],
        "train.text_on_device": True,
        "recl.models": ["a=runs/lr=0.1", "g:b=~/x", "c=/y", "d="],
        "ablation.workdirs": ["row=r"],
        "score.path": "-",
    }
    stored = flatten(with_absolute_paths(override(ExperimentConfig(), given)).to_dict())
    here = str(tmp_path)
    assert {key: stored[key] for key in given} == given | {
        "data.path": f"{here}/a/b",
        "data.cache_dir": "/home/me/x",
        "distil.teachers": [f"{here}/runs/lr=0.1", f"{here}/b"],
        "recl.models": [f"a={here}/runs/lr=0.1", "g:b=/home/me/x", "c=/y", "d="],
        "ablation.workdirs": [f"row={here}/r"],
    }
    assert with_absolute_paths(ExperimentConfig()) == ExperimentConfig()


def test_the_same_path_written_in_another_way_is_no_difference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    of = lambda start, *teachers: {"train": {"start_from": start}, "distil": {"teachers": teachers}}
    old = of("run", "run", "a")
    for same in ("run", "./run/", "link", str(tmp_path / "run")):
        assert differing_keys(old, of(same, same, "./a")) == []
    assert differing_keys(old, of("a", "run", "a")) == ["train.start_from: 'run' -> 'a'"]
    assert differing_keys(old, of(None, "run", "a")) == ["train.start_from: 'run' -> None"]
    assert len(differing_keys(old, of("run", "run"))) == 1


def test_settings_without_paths_have_the_defaults_of_those_and_keep_all_others():
    paths = {key: hint for key, hint, field in all_settings() if field.metadata.get("path")}
    given = {
        key: ["/a/b"] if typing.get_origin(hint) is tuple else "/a/b" for key, hint in paths.items()
    }
    nested = ExperimentConfig().to_dict()
    for key, value in given.items():
        section, _, leaf = key.rpartition(".")
        nested[section][leaf] = value
    nested["generate"]["prompt"] = "kept"
    cleared = without_paths(nested)
    assert "/a/b" not in json.dumps(cleared)
    assert cleared["generate"]["prompt"] == "kept"
    cleared["generate"]["prompt"] = ""
    assert cleared == ExperimentConfig().to_dict()
    assert without_paths({"data": {"path": "x"}}) == {"data": {"path": None}}


@pytest.mark.parametrize("key", ["train.side_by_side", "average.start", "context.max_segments"])
def test_a_record_of_an_earlier_version_is_refused_in_one_line(key):
    record = {**ExperimentConfig(seed=4).to_dict(), "corpus": {}, "provenance": {"a": 1}}
    del record["context"]
    assert from_record(record) == ExperimentConfig(seed=4)
    section, _, name = key.partition(".")
    record.setdefault(section, {})[name] = 1
    with pytest.raises(ConfigError) as error:
        from_record(record)
    assert str(error.value).startswith(
        f"was written by another version of txl_jax (unknown config key {key!r}; "
    )
    assert str(error.value).endswith("; train or export the model again with this version")


# --------------------------------------------------------------------------------------
# Sections built alone, and the list of all settings.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(steps=-5), "train.steps = -5: must be at least 1"),
        (lambda: TrainConfig(steps="many"), "train.steps = 'many': must be of type int"),  # type: ignore[arg-type]
        (lambda: ProbeTextConfig(noise=0), "data.probe.noise = 0: must be from 1 to 26"),
        (lambda: ProtocolConfig(mem_len=-1), "mem_len = -1: must be at least 0"),
        (lambda: DynamicConfig(rule="adam"), "rule = 'adam': must be one of 'none', "),  # type: ignore[arg-type]
        (
            lambda: dataclasses.replace(ExperimentConfig().train, seg_len=0),
            "train.seg_len = 0: must be at least 1",
        ),
        (lambda: ExperimentConfig(train=3), "train = 3: must be a TrainConfig, because"),  # type: ignore[arg-type]
        (lambda: ExperimentConfig(seed=-1), "seed = -1: must be at least 0"),
        (
            lambda: ExperimentConfig(train=TrainConfig(batch_size=8, micro_batches=3)),
            "train.micro_batches = 3: must divide train.batch_size 8",
        ),
        (
            lambda: dataclasses.replace(
                ExperimentConfig(), optimizer=OptimizerConfig(warmup_steps=2000)
            ),
            "optimizer.warmup_steps = 2000: is more than train.steps 1000",
        ),
    ],
)
def test_a_section_and_an_experiment_check_themselves_when_built(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(f"config key {message}")


def test_a_section_built_alone_converts_its_values():
    assert TrainConfig(steps=1e3, seg_len="64") == TrainConfig(steps=1000, seg_len=64)  # type: ignore[arg-type]


def test_all_settings_are_listed_with_type_default_rule_and_one_sentence():
    listed = list(describe_settings())
    assert {s.key: s.default for s in listed} == {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in flatten(ExperimentConfig().to_dict()).items()
    }
    assert [s.key for s in listed[:4]] == ["name", "seed", "model.vocab_size", "model.n_layer"]
    assert listed[3] == (
        "model.n_layer",
        "int",
        12,
        "must be at least 1, at most 1000",
        "L, the number of layers.",
    )
    by_key = {s.key: s for s in listed}
    assert by_key["validate.split"].default == "valid"
    assert by_key["data.path"].type == "str | None"


def values(section, prefix=""):
    """Yields (dotted key, value) from the fields of a settings class and of its sections."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from values(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def test_the_list_of_settings_shows_values_that_differ_and_refuses_an_unknown_prefix():
    exp = ExperimentConfig.from_dict({"train": {"steps": 7}})
    assert format_settings(exp, "train.s").splitlines()[:2] == [
        "train.steps = 7  (default: 1000)",
        "    int; must be at least 1, at most 1000000000; Number of updates.",
    ]
    listed = re.findall(r"^(\S+) = (.*)$", format_settings(None), flags=re.MULTILINE)
    assert listed == [(key, repr(value)) for key, value in values(ExperimentConfig())]
    with pytest.raises(ConfigError, match=r"unknown config key 'trian'; docs/settings.md lists"):
        format_settings(None, "trian")


def test_names_of_other_programs_lead_to_settings_that_exist():
    assert set(SYNONYMS.values()) <= set(flatten(ExperimentConfig().to_dict()))
    pairs = (("decay", "optimizer.weight_decay"), ("evaluate.decay", "dynamic.decay"))
    for wrong, nearest in pairs:
        with pytest.raises(ConfigError, match=rf"the nearest key is '[\w.]*{nearest}'"):
            override(ExperimentConfig(), {wrong: 1})


@pytest.mark.parametrize("setting", [*describe_settings()], ids=lambda setting: setting.key)
def test_every_setting_is_documented_in_one_sentence(setting):
    doc = setting.doc
    assert doc[0].isalnum() or doc[0] in "$'"
    assert doc.endswith(".")
    assert not re.search(r"(?<!et al)\. [A-Z]", doc), "more than one sentence"
    assert len(doc) < 320


# --------------------------------------------------------------------------------------
# Config files in packages.


def write_package(folder, seg_len):
    """Writes base.py and mine.py, a config that imports base.py; returns the path of mine.py."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner").mkdir()
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "base.py").write_text(
        "import ml_collections\n\ndef get_config():\n"
        f"    return ml_collections.ConfigDict({{'train': {{'seg_len': {seg_len}}}}})\n"
    )
    (folder / "inner" / "mine.py").write_text(
        "from .. import base\n\nROWS = ('a', 'b')\n\ndef get_config():\n"
        "    config = base.get_config()\n    config.name = 'mine'\n    return config\n"
    )
    return str(folder / "inner" / "mine.py")


def test_a_file_of_a_package_imports_its_neighbours_from_any_folder(tmp_path, monkeypatch):
    """The import works with two packages of the same name, and after an edit of the base config."""
    one, two = (write_package(tmp_path / part / "configs", n) for part, n in (("a", 16), ("b", 32)))
    before = set(sys.modules)
    for _ in range(2):
        assert load_config(one).train.seg_len == 16
        assert load_config(two).train.seg_len == 32
    monkeypatch.chdir(tmp_path / "a" / "configs" / "inner")
    assert load_config("mine.py").train.seg_len == 16
    shutil.copy("mine.py", "mine_0.1.py")
    assert load_config("mine_0.1.py").train.seg_len == 16
    base = tmp_path / "a" / "configs" / "base.py"
    base.write_text(base.read_text().replace("16", "17"))
    assert load_config("mine.py").train.seg_len == 17
    assert config_rows(one) == ("a", "b")
    assert set(sys.modules) == before
    assert not list(tmp_path.rglob("__pycache__"))
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == FLAGS


def test_a_file_may_have_any_name_that_ends_in_py(config_file):
    line = "return ml_collections.ConfigDict({'train': {'steps': 10}})"
    for name in ("my.own-config.py", "json.py", "txl_jax.py"):
        assert load_config(config_file(line, name=name)).train.steps == 10
    assert json.loads("1") == 1


# --------------------------------------------------------------------------------------
# Values of NumPy, JAX and pathlib.


def test_a_config_of_numpy_values_is_that_of_pythons_values():
    numpy: dict[str, Any] = {
        "vocab_size": np.int64(11),
        "n_layer": jnp.int32(3),
        "d_model": np.array(8),
        "dropout": np.float32(0.1),
        "dropatt": np.float64(0.2),
        "pre_lnorm": np.bool_(True),
        "same_length": np.False_,
        "cutoffs": np.array([2, 5], np.uint8),
        "tie_projs": np.array([True, False]),
        "attention": np.str_("relative"),
        "dtype": jnp.bfloat16,
    }
    python: dict[str, Any] = {
        **{"vocab_size": 11, "n_layer": 3, "d_model": 8, "dropout": 0.1, "dropatt": 0.2},
        **{"pre_lnorm": True, "same_length": False, "cutoffs": (2, 5)},
        **{"tie_projs": (True, False), "attention": "relative", "dtype": "bfloat16"},
    }
    cast, plain = TransformerXLConfig(**numpy), TransformerXLConfig(**python)
    assert (cast, hash(cast)) == (plain, hash(plain))
    assert json.dumps(dataclasses.asdict(cast)) == json.dumps(dataclasses.asdict(plain))
    values = zip(dataclasses.astuple(cast), dataclasses.astuple(plain), strict=True)
    assert all(type(a) is type(b) for a, b in values)
    assert type(cast.cutoffs[0]) is int


def test_overrides_may_be_numpy_values_and_paths():
    overrides = {
        "train.steps": np.int32(7),
        "data.path": pathlib.Path("a.txt"),
        "generate.prompt_file": b"b.txt",
        "generate.stop": np.array(["x", "y"]),
        "report.workdirs": [pathlib.Path("runs/a")],
        "data.dtype": np.uint16,
    }
    exp = load_config({}, overrides)
    assert (exp.train.steps, exp.data.path, exp.generate.prompt_file) == (7, "a.txt", "b.txt")
    assert (exp.generate.stop, exp.data.dtype) == (("x", "y"), "uint16")
    assert exp.report.workdirs == ("runs/a",)
    assert ExperimentConfig.from_dict(exp.to_dict()) == exp


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("vocab_size", np.float64(11.5), r"11\.5: must be of type int"),
        ("vocab_size", np.True_, "True: must be of type int"),
        ("vocab_size", np.array([11]), r"array\(\[11\]\): must be of type int"),
        ("pre_lnorm", np.int64(1), "1: must be of type bool"),
        ("dropout", np.float32("nan"), "nan: must be a finite number"),
        ("dropout", np.datetime64("2020-01-01"), r"np\.datetime64.*: must be of type float"),
        ("cutoffs", np.array([[1, 2]]), r"array.*: must be a list"),
        ("cutoffs", np.array([1.5]), r"1\.5: must be of type int"),
        ("dtype", np.complex64, r".*: must be one of 'auto', 'float32'"),
    ],
)
def test_other_numpy_values_are_refused_as_what_they_are(key, value, rule):
    with pytest.raises(ConfigError, match=rf"^config key model\.{key} = {rule}"):
        TransformerXLConfig(**{key: value})


def test_a_path_is_no_text_and_a_list_is_no_override():
    for value in (pathlib.Path("a"), b"a"):
        with pytest.raises(ConfigError, match=r"generate\.prompt = .*: must be of type str"):
            load_config({}, {"generate.prompt": value})
    with pytest.raises(ConfigError, match=r"^overrides=\['a'\]: must be a dict"):
        load_config({}, ["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [lambda b: b"\xef\xbb\xbf" + b, lambda b: b.replace(b"\n", b"\r\n")]
)
def test_a_file_of_a_windows_editor_is_read(tmp_path, change):
    path = tmp_path / "dos.py"
    source = "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict()\n"
    path.write_bytes(change(source.encode()))
    assert load_config(str(path)) == ExperimentConfig()
