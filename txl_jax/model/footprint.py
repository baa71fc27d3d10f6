"""Formulas for the least memory that a model, its training and its scoring need.

Every figure is a lower bound in bytes of the memory in use at one time, whatever the compiler does.
A program that fits by these figures may still not fit; ``--mode=compile`` compiles the program and
finds out. The functions of this module allocate nothing and trace at most one layer.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax

from txl_jax.config import ExperimentConfig, GenerateConfig, ProtocolConfig, TransformerXLConfig
from txl_jax.model.adaptive import Vocabulary
from txl_jax.model.cross_entropy import MIN_ROWS, TILE_WORDS
from txl_jax.model.kernels.xla import HALVED_FROM, group_size
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.compile_cache import compiled_rows
from txl_jax.parallel.device_memory import ONE_DEVICE, Need, Shares

FLOAT32 = 4
LAYERS = tuple(f"model.{key}" for key in ("n_layer", "d_model", "n_head", "d_head", "d_inner"))
WORDS = ("model.vocab_size", "model.d_model", "model.d_embed", "model.mixtures")


@functools.cache
def parameter_counts(c: TransformerXLConfig) -> tuple[int, int]:
    """Returns the numbers of parameters of all layers and of the vocabulary, 0 if V is unknown."""
    of_layers = _layer_parameters(dataclasses.replace(c, vocab_size=None))
    if c.vocab_size is None:
        return of_layers, 0
    token = jax.ShapeDtypeStruct((1, 1), "int32")
    return of_layers, _size(Vocabulary(c), token, method="embed")


@functools.cache
def _layer_parameters(c: TransformerXLConfig) -> int:
    model = TransformerXL(dataclasses.replace(c, scan_layers=True))  # so only one layer is traced
    mems = jax.eval_shape(lambda: model.init_mems(1, 0 if c.memory_free else 1))
    return _size(model, jax.ShapeDtypeStruct((1, 1, c.d_model), c.dtype), mems, method="core")


def _size(module: nn.Module, *inputs: Any, method: str) -> int:
    """Returns the number of a module's parameters."""
    init = functools.partial(module.init, method=method)
    shapes = jax.eval_shape(init, jax.random.key(0), *inputs)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@dataclasses.dataclass(frozen=True)
class Segment:
    """The ``rows`` segments, with context, that one device computes at one time.

    ``keys`` name the settings that decide these sizes. ``cached``: the memory is already projected.
    """

    c: TransformerXLConfig
    rows: int
    length: int
    mem_len: int
    keys: tuple[str, ...]
    shares: Shares = ONE_DEVICE
    cached: bool = False

    def memory(self, keys: tuple[str, ...]) -> Need:
        """Returns the size of the memory: states, or the keys and values of every layer."""
        slot = 2 * _heads(self.c) // self.shares.heads if self.cached else _states(self.c)
        size = self.c.n_layer * self.rows * self.mem_len * slot
        return Need("the memory of the streams", size, (*keys, "model.n_layer"))

    def layer(self) -> list[Need]:
        """Returns the memory needs of one layer: activations, keys, values and scores."""
        c, t, m, heads = self.c, self.length, self.mem_len, self.shares.heads
        inner = self.rows * t * c.d_inner * _width(c) // heads
        projected = 2 * self.rows * (t if self.cached else m + t) * _heads(c) // heads
        queries = min(t, group_size(t, HALVED_FROM["cpu"]))
        cells = queries * (m + (queries if c.same_length else t))  # scores of one row and one head
        if self.cached or c.kernel == "reference":
            cells = t * (m + t)
        elif self.shares.fused and c.kernel != "xla":
            cells = 0
        size = projected + FLOAT32 * self.rows * _share(c.n_head, heads) * cells
        what = "keys, values and attention scores of a layer"
        return [
            Need("the inner activations of a layer", inner, (*self.keys, "model.d_inner")),
            Need(what, size, (*self.keys, "model.n_head", "model.d_head")),
        ]

    def outputs(self, scored: int, all_logits: bool) -> list[Need]:
        """Returns the memory needs of logits and mixture latents at ``scored`` positions."""
        c, positions, logits = self.c, self.rows * scored, Need("scores of words", 0, ())
        if c.vocab_size is not None and (all_logits or not c.cutoffs):
            n = positions if all_logits else min(positions, MIN_ROWS)
            words = c.vocab_size if all_logits else min(c.vocab_size, TILE_WORDS["cpu"])
            size = FLOAT32 * n * words // (1 if all_logits else self.shares.heads)
            logits = Need("scores of all words", size, (*self.keys, "model.vocab_size"))
        latents = (c.mixtures if c.mixtures > 1 else 0) * positions * (c.d_embed or c.d_model)
        keys = ("model.mixtures", *self.keys)
        return [logits, Need("the latents of a mixture of softmaxes", latents * _width(c), keys)]


def of_parameters(
    c: TransformerXLConfig, shares: Shares = ONE_DEVICE, copies: int = 1, what: str = "parameters"
) -> list[Need]:
    """Returns the memory needs of ``copies`` copies of the float32 parameters."""
    size = lambda count: copies * FLOAT32 * count // shares.parameters
    keys = (*LAYERS, "model.n_positions") if c.n_positions else LAYERS
    of_layers, of_words = parameter_counts(c)
    return [
        Need(f"the layers' {what}", size(of_layers), keys),
        Need(f"the vocabulary's {what}", size(of_words), WORDS),
    ]


def of_training(exp: ExperimentConfig, shares: Shares = ONE_DEVICE) -> list[Need]:
    """Returns the memory needs of one update: training state, gradient and activations."""
    c, t = exp.model, exp.train
    rows, scored = _share(t.batch_size, shares.rows), t.longest_seg_len
    length, part = t.context_len + scored, _share(rows, t.micro_batches)
    batches = 0 if t.text_on_device else t.steps_per_dispatch * rows * (4 * length + 8 * scored)
    lengths = ("train.batch_size", "train.seg_len", "train.context_len", "train.seg_len_std")
    keys = ("train.batch_size", "train.seg_len", "train.mem_len", "train.micro_batches")
    segment = Segment(c, part, length, t.mem_len, keys, shares)
    all_logits = bool(exp.loss.r_drop or exp.loss.past_decode or exp.distil.teachers)
    logits, latents = segment.outputs(scored, all_logits)
    sampled = 8 * c.sample_softmax * part * scored
    words = Need("sampled words", sampled, ("model.sample_softmax", *keys))
    needs = [
        *of_state(exp, shares, copies=3),  # clipping by norm needs the whole gradient at once
        Need("the inputs of every layer", c.n_layer * part * length * _states(c), lengths),
        Need("the batches of a dispatch", batches, (*lengths, "train.steps_per_dispatch")),
        _largest(*segment.layer(), logits, words, latents),
    ]
    return _times(needs, t.num_seeds)


def of_validating(exp: ExperimentConfig, shares: Shares = ONE_DEVICE) -> list[Need]:
    """Returns the memory needs of scoring a validation segment while the training state is held."""
    state = _times(of_state(exp, shares), exp.train.num_seeds)
    return [*state, *_of_segment(exp.model, exp.validate, "validate", shares)]


def of_state(exp: ExperimentConfig, shares: Shares = ONE_DEVICE, copies: int = 2) -> list[Need]:
    """Returns the memory needs of the training state; ``copies`` counts moments and gradient."""
    c, t = exp.model, exp.train
    copies += 1 + bool(exp.average.swa_start) + bool(exp.average.ema_decay)
    memory = c.n_layer * _share(t.batch_size, shares.rows) * t.mem_len * _states(c)
    keys = ("train.batch_size", "train.mem_len", "model.n_layer", "model.d_model")
    return [
        *of_parameters(c, shares, copies, "parameters, optimizer state and gradient"),
        Need("the memory of the training streams", memory, keys),
    ]


def of_scoring(
    c: TransformerXLConfig, p: ProtocolConfig, section: str, shares: Shares = ONE_DEVICE
) -> list[Need]:
    """Returns the memory needs of scoring a segment under the protocol of a ``section``."""
    copies = {"none": 1, "sgd": 2, "rms": 3}[p.dynamic.rule]
    return [*of_parameters(c, shares, copies), *_of_segment(c, p, section, shares)]


def _of_segment(
    c: TransformerXLConfig, p: ProtocolConfig, section: str, shares: Shares
) -> list[Need]:
    """Returns the memory needs of scoring a segment, without those of the parameters."""
    settings = lambda *names: tuple(f"{section}.{name}" for name in names)
    if p.same_length is not None:
        c = dataclasses.replace(c, same_length=p.same_length)
    plain = c.scan_layers or c.memory_free or p.context_len or not p.mem_len
    cached = p.dynamic.rule == "none" and not plain
    keys = settings("batch_size", "seg_len", "mem_len", "context_len")
    rows, length = _share(p.batch_size, shares.rows), p.context_len + p.seg_len
    segment = Segment(c, rows, length, p.mem_len, keys, shares, cached)
    outputs = segment.outputs(p.seg_len, all_logits=p.temperature != 1)
    memory = segment.memory(settings("batch_size", "mem_len"))
    return [memory, _largest(*segment.layer(), *outputs)]


def of_generating(c: TransformerXLConfig, g: GenerateConfig, prompts: int = 1) -> list[Need]:
    """Returns the memory needs of continuing ``prompts`` prompts ``samples`` times each."""
    rows, vocab_size = compiled_rows(prompts * g.samples), c.vocab_size or 0
    keys = ("generate.samples", "generate.batch_size", "generate.mem_len")
    if c.memory_free:
        width = min(g.mem_len, c.n_positions or g.mem_len)
        past = Need("the text that is run again", rows * width * _states(c), keys)
    else:  # the memory of the prompts, and its keys and values in every layer
        size = rows * c.n_layer * g.mem_len * (_states(c) + 2 * _heads(c))
        past = Need("the memory of the texts", size, keys)
    logits = Need("scores of all words", 5 * rows * vocab_size, keys[:2])  # a byte: whether seen
    return [*of_parameters(c), past, logits]


def of_reading(
    c: TransformerXLConfig, rows: int, length: int, mem_len: int, keys: tuple[str, ...]
) -> list[Need]:
    """Returns the memory needs of reading ``rows`` segments of ``length`` tokens on one device."""
    segment = Segment(c, rows, length, mem_len, keys)
    return [*of_parameters(c), segment.memory(keys), _largest(*segment.layer())]


def _largest(*needs: Need) -> Need:
    """Returns the largest of needs that may exist one after the other."""
    return max(needs, key=lambda need: need.size)


def _times(needs: list[Need], seeds: int) -> list[Need]:
    keys = ("train.num_seeds",) if seeds > 1 else ()
    return [Need(x.what, seeds * x.size, (*keys, *x.keys)) for x in needs]


def _share(count: int, n: int) -> int:
    return -(-count // n)


def _width(c: TransformerXLConfig) -> int:
    """Returns the bytes of a number in the compute dtype."""
    return 4 if c.dtype == "float32" else 2


def _states(c: TransformerXLConfig) -> int:
    """Returns the bytes of the states of one position in one layer."""
    return c.d_model * _width(c)


def _heads(c: TransformerXLConfig) -> int:
    """Returns the bytes of the keys, or of the values, of one position in one layer."""
    return c.n_head * c.d_head * _width(c)
