"""The least memory that a model, its training and its scoring need, by formula.

Every figure is a lower bound: what must be in memory at one time whatever the compiler does. A
program that needs more than a device has by these figures cannot run; one that needs less may
still not fit (``--mode=compile`` compiles it and knows). Nothing is traced or allocated here.

Letters as everywhere, K = M + T. Sizes are bytes.
"""

import dataclasses
from collections.abc import Iterable

from txl_jax.config import ExperimentConfig, GenerateConfig, ProtocolConfig, TransformerXLConfig
from txl_jax.model.adaptive import clusters
from txl_jax.model.cross_entropy import ROWS_AT_LEAST
from txl_jax.model.kernels.xla import group_size
from txl_jax.parallel.device_memory import ALONE, Need, Spread

FLOAT32 = 4
GRADIENT_AND_MOMENTS = 3
"""Copies of the parameters beside themselves while they are updated; both optimizers have two
moments, and the norm of the whole gradient is known before any parameter changes."""


HEADS = ("model.n_head", "model.d_head")
LAYERS = tuple(f"model.{key}" for key in ("n_layer", "d_model", "n_head", "d_head", "d_inner"))
WORDS = ("model.vocab_size", "model.d_model", "model.d_embed", "model.mixtures")


def layer_parameters(c: TransformerXLConfig) -> int:
    """How many numbers the parameters of all layers are, u and v of the model among them."""
    d, nh, rows = c.d_model, c.n_head * c.d_head, c.n_positions or 0
    attention = {
        "relative": 5 * d * nh,
        "shaw": 4 * d * nh + nh + rows * (nh + c.n_head),
        "absolute": 4 * d * nh,
        "absolute_per_layer": 4 * d * nh + rows * d,
        "shared_projection": 4 * d * nh,
    }[c.attention]
    feed_forward = 2 * d * c.d_inner + c.d_inner + d
    biases = (c.n_layer if c.untie_r else 1) * 2 * nh if c.attention == "relative" else 0
    return c.n_layer * (attention + feed_forward + 4 * d) + biases


def word_parameters(c: TransformerXLConfig) -> int:
    """How many numbers the parameters of embedding and softmax are; 0 if V is not known."""
    if c.vocab_size is None:
        return 0
    parts, d = clusters(c), c.d_model
    tables = parts if c.div_val > 1 else [dataclasses.replace(parts[0], stop=parts[-1].stop)]
    total = c.vocab_size
    for part in tables:
        total += part.size * part.width * (1 if c.tie_weight else 2)
        total += part.width * d if part.projected else 0
    tied = (*c.tie_projs, *[False] * len(parts))
    for part, shared in zip(parts, tied, strict=False):
        own = part.projected and not shared and c.mixtures == 1
        total += part.width * d if own else 0
    width = parts[0].width
    total += len(c.cutoffs) * (width + 1)
    if c.mixtures > 1:
        total += c.mixtures * (d + d * width + width)
    if c.past_decode:
        total += width * width + width + c.vocab_size
    return total


def of_parameters(
    c: TransformerXLConfig, spread: Spread = ALONE, copies: int = 1, what: str = "parameters"
) -> list[Need]:
    """So many ``copies`` of the parameters, float32."""
    size = lambda count: copies * FLOAT32 * count // spread.parameters
    positions = ("model.n_positions",) if c.n_positions else ()
    return [
        Need(f"the layers' {what}", size(layer_parameters(c)), (*LAYERS, *positions)),
        Need(f"the vocabulary's {what}", size(word_parameters(c)), WORDS),
    ]


def of_training(exp: ExperimentConfig, spread: Spread = ALONE) -> list[Need]:
    """One update: the whole training state, its gradient, and what is kept for the gradient."""
    c, t = exp.model, exp.train
    rows = _share(t.batch_size, spread.rows)
    scored = t.longest_seg_len
    length = t.context_len + scored
    part = _share(rows, t.micro_batches)
    fed = 0 if t.text_on_device else t.steps_per_dispatch * rows * (4 * length + 8 * scored)
    lengths = ("train.batch_size", "train.seg_len", "train.context_len", "train.seg_len_std")
    about = ("train.batch_size", "train.seg_len", "train.mem_len", "train.micro_batches")
    draws = c.sample_softmax
    every = exp.loss.r_drop or exp.loss.past_decode or exp.distil.teachers
    needs = [
        *of_state(exp, spread, GRADIENT_AND_MOMENTS),
        Need("the inputs of every layer", c.n_layer * part * length * _states(c), lengths),
        Need("the batches of a dispatch", fed, (*lengths, "train.steps_per_dispatch")),
        _largest(
            *_of_a_layer(c, part, length, t.mem_len, spread, about),
            _of_logits(c, part * scored, spread, about, every=bool(every)),
            Need("sampled words", 8 * draws * part * scored, ("model.sample_softmax", *about)),
            _of_latents(c, part * scored, about),
        ),
    ]
    return _times(needs, t.num_seeds, "train.num_seeds")


def of_validating(exp: ExperimentConfig, spread: Spread = ALONE) -> list[Need]:
    """One segment of the validation split, beside the state of training."""
    state = _times(of_state(exp, spread), exp.train.num_seeds, "train.num_seeds")
    return [*state, *_of_segment(exp.model, exp.validate, "validate", spread)]


def of_state(exp: ExperimentConfig, spread: Spread = ALONE, copies: int = 2) -> list[Need]:
    """Parameters with ``copies`` more of their size, averages, and the memory of every stream.

    With the default these are an optimizer's moments: what is on the device between two updates.
    """
    c, t, a = exp.model, exp.train, exp.average
    copies += 1 + bool(a.swa_start) + bool(a.ema_decay)
    memory = c.n_layer * _share(t.batch_size, spread.rows) * t.mem_len * _states(c)
    about = ("train.batch_size", "train.mem_len", "model.n_layer", "model.d_model")
    return [
        *of_parameters(c, spread, copies, "parameters, optimizer state and gradient"),
        Need("the memory of the training streams", memory, about),
    ]


def of_scoring(
    c: TransformerXLConfig, p: ProtocolConfig, section: str, spread: Spread = ALONE
) -> list[Need]:
    """One segment scored under a protocol; its settings are those of ``section``."""
    copies = {"none": 1, "sgd": 2, "rms": 3}[p.dynamic.rule]
    return [*of_parameters(c, spread, copies), *_of_segment(c, p, section, spread)]


def _of_segment(
    c: TransformerXLConfig, p: ProtocolConfig, section: str, spread: Spread
) -> list[Need]:
    """What scoring a segment needs beside the parameters."""
    key = lambda *names: tuple(f"{section}.{name}" for name in names)
    window = c.same_length if p.same_length is None else p.same_length
    c = dataclasses.replace(c, same_length=window) if window != c.same_length else c
    rows, length = _share(p.batch_size, spread.rows), p.context_len + p.seg_len
    frozen = p.dynamic.rule == "none"
    cached = frozen and not (c.scan_layers or c.memory_free or p.context_len or not p.mem_len)
    about = key("batch_size", "seg_len", "mem_len", "context_len")
    return [
        _of_past(c, rows, p.mem_len, cached, spread, key("batch_size", "mem_len")),
        _largest(
            *_of_a_layer(c, rows, length, p.mem_len, spread, about, cached),
            _of_logits(c, rows * p.seg_len, spread, about, every=p.temperature != 1),
            _of_latents(c, rows * p.seg_len, about),
        ),
    ]


def of_generating(c: TransformerXLConfig, g: GenerateConfig, prompts: int = 1) -> list[Need]:
    """So many prompts continued at a time, each ``samples`` times, on one device."""
    rows, vocab_size = prompts * g.samples, c.vocab_size or 0
    about = ("generate.samples", "generate.batch_size", "generate.mem_len")
    if c.memory_free:
        width = min(g.mem_len, c.n_positions or g.mem_len)
        past = Need("the text that is run again", rows * width * _states(c), about)
    else:  # the states that were read, and what the layers project them to
        size = rows * c.n_layer * g.mem_len * (_states(c) + 2 * _heads(c))
        past = Need("the memory of the texts", size, about)
    seen = rows * vocab_size if g.repetition_penalty > 1 else 0
    return [
        *of_parameters(c),
        past,
        Need("scores of all words", 4 * rows * vocab_size + seen, about[:2]),
    ]


def of_reading(
    c: TransformerXLConfig, rows: int, length: int, mem_len: int, keys: tuple[str, ...]
) -> list[Need]:
    """``rows`` segments of ``length`` tokens read with a memory of ``mem_len``, on one device."""
    return [
        *of_parameters(c),
        _of_past(c, rows, mem_len, False, ALONE, keys),
        _largest(*_of_a_layer(c, rows, length, mem_len, ALONE, keys)),
    ]


def _of_past(c, rows: int, mem_len: int, cached: bool, spread: Spread, keys) -> Need:
    """The memory of so many rows: states, or what the layers project them to."""
    of_slot = 2 * _heads(c) // spread.heads if cached else _states(c)
    keys = (*keys, "model.n_layer")
    return Need("the memory of the streams", c.n_layer * rows * mem_len * of_slot, keys)


def _of_a_layer(
    c: TransformerXLConfig,
    rows: int,
    length: int,
    mem_len: int,
    spread: Spread,
    keys: tuple[str, ...],
    cached: bool = False,
) -> list[Need]:
    """What one layer computes: its inner activations, its keys and values, its scores."""
    inner = rows * length * c.d_inner * _width(c) // spread.heads
    read = length if cached else mem_len + length
    projected = 2 * rows * read * _heads(c) // spread.heads
    n_head = -(-c.n_head // spread.heads)
    if cached or c.kernel == "reference":
        queries, n_keys = length, mem_len + length
    elif spread.fused and c.kernel != "xla":
        queries, n_keys = 0, 0
    else:
        queries = min(length, group_size(length, 64))
        n_keys = mem_len + (queries if c.same_length else length)
    scores = FLOAT32 * rows * n_head * queries * n_keys
    return [
        Need("the inner activations of a layer", inner, (*keys, "model.d_inner")),
        Need("keys, values and attention scores of a layer", projected + scores, (*keys, *HEADS)),
    ]


def _of_logits(c, positions: int, spread: Spread, keys, every: bool) -> Need:
    """Scores of words: of ``every`` position at once, or of a block of rows."""
    rows = positions if every else min(positions, ROWS_AT_LEAST)
    if c.vocab_size is None or (c.cutoffs and not every):
        return Need("scores of words", 0, ())
    shared = 1 if every else spread.heads
    return Need("scores of all words", FLOAT32 * rows * c.vocab_size // shared, (*keys, WORDS[0]))


def _of_latents(c, positions: int, keys) -> Need:
    width = c.d_embed or c.d_model
    size = positions * c.mixtures * width * _width(c) if c.mixtures > 1 else 0
    return Need("the latents of a mixture of softmaxes", size, ("model.mixtures", *keys))


def _largest(*needs: Need) -> Need:
    """Of things that need not be in memory together, the largest."""
    return max(needs, key=lambda need: need.size)


def _times(needs: Iterable[Need], n: int, key: str) -> list[Need]:
    if n == 1:
        return list(needs)
    return [dataclasses.replace(x, size=n * x.size, keys=(key, *x.keys)) for x in needs]


def _share(count: int, n: int) -> int:
    return -(-count // n)


def _width(c: TransformerXLConfig) -> int:
    """Bytes of a number in the compute type."""
    return 4 if c.dtype == "float32" else 2


def _states(c: TransformerXLConfig) -> int:
    """Bytes of the states of one position in one layer."""
    return c.d_model * _width(c)


def _heads(c: TransformerXLConfig) -> int:
    """Bytes of the keys, or of the values, of one position in one layer."""
    return c.n_head * c.d_head * _width(c)
