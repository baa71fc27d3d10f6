"""Which settings go together; each check names the key to change."""

from typing import TYPE_CHECKING, Any

from txl_jax.config.bounds import CLUSTERS, SEED
from txl_jax.config.fields import refusal

if TYPE_CHECKING:
    from txl_jax.config.model import TransformerXLConfig
    from txl_jax.config.settings import ExperimentConfig


PROTOCOLS = {"enwik8": ("authors", "bytes"), "lm1b": ("authors", "double")}
"""``data.protocol`` of the corpora that have more than one; the first is the default."""


def check_combinations(c: "ExperimentConfig") -> None:
    """Raises ConfigError where settings of an experiment contradict each other."""

    def refuse(key: str, value: Any, rule: str):
        raise refusal(key, value, rule)

    t = c.train
    if t.batch_size % t.micro_batches:
        refuse("train.micro_batches", t.micro_batches, f"must divide batch_size {t.batch_size}")
    m = c.mesh
    if t.num_seeds > 1 and m.fsdp * m.tensor * max(m.data, 1) > 1:
        rule = f"is for one device, not mesh {m.data} x {m.fsdp} x {m.tensor}"
        refuse("train.num_seeds", t.num_seeds, rule)
    if c.seed + t.num_seeds - 1 > SEED:
        rule = f"with train.num_seeds {t.num_seeds} the last seed is above {SEED}"
        refuse("seed", c.seed, rule)
    every = (
        ("train.steps", t.steps),
        ("train.log_every", t.log_every),
        ("train.eval_every", t.eval_every),
        ("checkpoint.every", c.checkpoint.every),
    )
    for key, value in every:
        if value % t.steps_per_dispatch:
            rule = f"must be a multiple of train.steps_per_dispatch {t.steps_per_dispatch}"
            refuse(key, value, rule)
    o = c.optimizer
    if o.warmup_steps > t.steps:
        refuse("optimizer.warmup_steps", o.warmup_steps, f"is more than train.steps {t.steps}")
    if o.schedule == "inverse_sqrt" and not o.warmup_steps:
        refuse("optimizer.warmup_steps", 0, "must be at least 1 for schedule 'inverse_sqrt'")
    a = c.average
    if a.swa_start >= t.steps:
        refuse("average.swa_start", a.swa_start, f"must be below train.steps {t.steps}")
    if a.swa_lr_ratio is not None and not a.swa_start:
        refuse(
            "average.swa_lr_ratio",
            a.swa_lr_ratio,
            "is the rate from average.swa_start on, and that is 0 (none)",
        )
    if a.swa_lr_ratio is not None and o.schedule == "cosine" and not o.min_ratio:
        rule = "is times the schedule's last rate, and that is 0: give optimizer.min_ratio too"
        refuse("average.swa_lr_ratio", a.swa_lr_ratio, rule)
    if a.swa_lr_ratio is not None and o.warmup_steps > a.swa_start:
        rule = f"is more than average.swa_start {a.swa_start}, where the schedule ends"
        refuse("optimizer.warmup_steps", o.warmup_steps, rule)
    kept = {"swa": ("average.swa_start", a.swa_start), "ema": ("average.ema_decay", a.ema_decay)}
    if a.use in kept and not kept[a.use][1]:
        refuse("average.use", a.use, f"needs {kept[a.use][0]} above 0")
    if t.seg_len_std and t.seg_len < 10:
        rule = f"needs train.seg_len of at least 10, not {t.seg_len}: half of it is a length too"
        refuse("train.seg_len_std", t.seg_len_std, rule)
    if c.loss.positions == "half" and t.seg_len < 2:
        refuse("loss.positions", "half", f"needs train.seg_len of at least 2, not {t.seg_len}")
    if c.loss.r_drop and c.model.sample_softmax:
        rule = f"compares all words, and model.sample_softmax {c.model.sample_softmax} draws some"
        refuse("loss.r_drop", c.loss.r_drop, rule)
    if c.loss.past_decode and not c.model.past_decode:
        rule = "needs the parameters that model.past_decode adds: give model.past_decode=True too"
        refuse("loss.past_decode", c.loss.past_decode, rule)
    if c.loss.past_decode and c.model.sample_softmax:
        rule = f"needs scores of all words, and model.sample_softmax {c.model.sample_softmax} draws"
        refuse("loss.past_decode", c.loss.past_decode, f"{rule} some: use sample_softmax 0")
    for section, cut in (("train", t), ("validate", c.validate), ("evaluate", c.evaluate)):
        more = int(3 * t.seg_len_std) if cut is t else 0
        _check_lengths(section, c.model, cut.mem_len, cut.seg_len, cut.context_len, more, refuse)
    for section, scored in (("validate", c.validate), ("evaluate", c.evaluate)):
        if scored.warm_start and not scored.mem_len:
            rule = f"is read into memory, and {section}.mem_len is 0"
            refuse(f"{section}.warm_start", scored.warm_start, rule)
        if scored.warm_start and scored.context_len:
            rule = f"reads segments without context, and {section}.context_len is"
            refuse(f"{section}.warm_start", scored.warm_start, f"{rule} {scored.context_len}")
        if scored.warm_start and scored.first_memory == "zeros":
            rule = f"starts from an empty memory, and {section}.first_memory is 'zeros'"
            refuse(f"{section}.warm_start", scored.warm_start, rule)
        if scored.first_memory == "zeros" and scored.context_len and scored.mem_len:
            rule = f"is not seen by segments with context, and {section}.context_len is"
            rule = f"{rule} {scored.context_len}: use first_memory 'empty', or context_len 0"
            refuse(f"{section}.first_memory", "zeros", rule)
        if scored.dynamic.rule != "none" and scored.temperature != 1:
            rule = f"is for parameters that stay as they are, not {section}.dynamic.rule"
            refuse(f"{section}.temperature", scored.temperature, rule)
    windows = (
        ("train", t, c.model.same_length),
        ("validate", c.validate, _own(c.validate.same_length, c.model.same_length)),
        ("evaluate", c.evaluate, _own(c.evaluate.same_length, c.model.same_length)),
    )
    for section, cut, window in windows:
        if window == "pytorch" and cut.mem_len == 0:
            rule = "the window same_length='pytorch' (distance < M) needs a memory; use 'tf'"
            refuse(f"{section}.mem_len", cut.mem_len, rule)
        if window == "tf" and cut.context_len and not cut.mem_len:
            rule = "the window same_length='tf' (distance <= M = 0) lets nothing of it be seen"
            refuse(f"{section}.context_len", cut.context_len, f"{rule}; use False")
    d = c.data
    if d.url and not d.hash:
        refuse("data.url", d.url, "needs data.hash (md5:… or sha256:…) to check the download by")
    if d.url and d.name != "text":
        refuse("data.url", d.url, "is for data.name='text'; other corpora know their own")
    if d.url and d.path:
        refuse("data.url", d.url, f"data.path = {d.path!r} is given too; give one of them")
    if d.vocab and d.name not in ("stdlib", "ptb", "text"):
        refuse("data.vocab", d.vocab, f"is fixed for data.name={d.name!r}; leave it out")
    if d.vocab == "subword" and d.name != "text":
        refuse("data.vocab", d.vocab, f"is for data.name='text', not {d.name!r}; leave it out")
    if d.vocab != "subword" and d.vocab_size != type(d).vocab_size:
        refuse("data.vocab_size", d.vocab_size, "is for data.vocab='subword'; others are counted")
    if d.protocol and d.protocol not in PROTOCOLS.get(d.name, ()):
        allowed = " and ".join(f"{name!r} {known}" for name, known in PROTOCOLS.items())
        refuse("data.protocol", d.protocol, f"is not for data.name={d.name!r}; there are {allowed}")
    if d.name == "lm1b" and t.seg_len_std:
        rule = "is for one text; the sentences of data.name='lm1b' have no one order"
        refuse("train.seg_len_std", t.seg_len_std, rule)
    if d.name == "lm1b" and t.partial_shuffle:
        rule = "is for one text; the sentences of data.name='lm1b' are shuffled"
        refuse("train.partial_shuffle", True, rule)
    if d.name == "lm1b" and t.text_on_device:
        rule = "is for one text; the sentences of data.name='lm1b' are shuffled"
        refuse("train.text_on_device", True, rule)
    if c.distil.teachers and not t.text_on_device:
        rule = "needs train.text_on_device, beside which lies what they teach"
        refuse("distil.teachers", c.distil.teachers, rule)
    if c.distil.teachers and c.model.sample_softmax:
        rule = f"is of all words, and model.sample_softmax {c.model.sample_softmax} draws some"
        refuse("distil.teachers", c.distil.teachers, rule)
    p = d.probe
    if p.longest < p.shortest:
        refuse(
            "data.probe.longest", p.longest, f"must be at least data.probe.shortest {p.shortest}"
        )
    if p.tokens < 10 * (p.longest + 2):
        rule = f"must be at least {10 * (p.longest + 2)}, so that a tenth holds the longest episode"
        refuse("data.probe.tokens", p.tokens, rule)
    g = c.generate
    given = [key for key in ("prompt", "prompt_file", "prompts_file") if getattr(g, key)]
    if len(given) > 1:
        rule = f"generate.{given[0]} = {getattr(g, given[0])!r} is given too; give one of them"
        refuse(f"generate.{given[1]}", getattr(g, given[1]), rule)


def _check_lengths(section, model, mem_len, seg_len, context_len, more, refuse) -> None:
    if model.memory_free and mem_len:
        rule = f"attention {model.attention!r} has no memory: it must be 0; use context_len"
        refuse(f"{section}.mem_len", mem_len, rule)
    longest = context_len + seg_len + more
    if model.attention == "absolute_per_layer" and longest > model.n_positions:
        drawn = f" and up to {more} tokens drawn above it" if more else ""
        rule = f"with context_len {context_len}{drawn} is more than model.n_positions"
        refuse(f"{section}.seg_len", seg_len, f"{rule} {model.n_positions}")


def check_model(c: "TransformerXLConfig") -> None:
    """Raises ConfigError where no model has this shape."""

    def refuse(key: str, value: Any, rule: str):
        raise refusal(f"model.{key}", value, rule)

    if c.d_model % 2:
        rule = "must be even, half of a position encoding is sines and half cosines"
        refuse("d_model", c.d_model, f"{rule} (paper, section 3.3)")
    if c.n_positions is None and c.attention in ("shaw", "absolute_per_layer"):
        rule = f"attention {c.attention!r} has a table of positions and needs its length"
        refuse("n_positions", None, rule)
    if c.attention == "absolute_per_layer" and c.n_head * c.d_head != c.d_model:
        rule = f"attention {c.attention!r} needs n_head * d_head = d_model {c.d_model}"
        refuse("d_head", c.d_head, rule)
    if c.vocab_size is not None and c.cutoffs and c.cutoffs[-1] >= c.vocab_size:
        refuse("cutoffs", c.cutoffs, f"must be below the vocabulary's size {c.vocab_size}")
    if len(c.cutoffs) > CLUSTERS:
        refuse("cutoffs", c.cutoffs, f"must have at most {CLUSTERS} items")
    width = c.d_model if c.d_embed is None else c.d_embed
    if width // c.div_val ** len(c.cutoffs) < 1:
        rule = f"leaves no width for the last of {len(c.cutoffs) + 1} clusters of d_embed {width}"
        refuse("div_val", c.div_val, rule)
    if len(c.tie_projs) > len(c.cutoffs) + 1:
        rule = f"has more entries than there are clusters ({len(c.cutoffs) + 1})"
        refuse("tie_projs", c.tie_projs, rule)
    if c.sample_softmax and (c.cutoffs or c.div_val > 1 or width != c.d_model):
        rule = "goes with one cluster of width d_model only (no cutoffs, div_val or d_embed)"
        refuse("sample_softmax", c.sample_softmax, rule)
    if c.mixtures > 1 and (c.cutoffs or c.sample_softmax):
        other = "sample_softmax" if c.sample_softmax else "cutoffs"
        rule = f"mixes plain softmaxes over all words, and model.{other} is {getattr(c, other)!r}"
        refuse("mixtures", c.mixtures, f"{rule}: leave it out, or use mixtures 1")
    if c.mixtures > 1 and any(c.tie_projs):
        rule = "has latents in place of the output projection, so model.tie_projs must be (False,)"
        refuse("mixtures", c.mixtures, rule)
    if c.dropout_latent and c.mixtures == 1:
        rule = "is on the latents of a mixture, and model.mixtures is 1: give more, or use 0"
        refuse("dropout_latent", c.dropout_latent, rule)
    if c.past_decode and (c.cutoffs or c.div_val > 1):
        rule = "decodes by one table of all words (no cutoffs, div_val 1): leave one of them out"
        refuse("past_decode", True, rule)


def _own(value: Any, default: Any) -> Any:
    return default if value is None else value
