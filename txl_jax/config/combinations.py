"""The settings of a run, and the rules for combinations of them.

Each rule names the key to change.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import field
from operator import attrgetter

from txl_jax.config import optax_rules, training
from txl_jax.config.bounds import SEED
from txl_jax.config.data import DataConfig
from txl_jax.config.errors import refusal
from txl_jax.config.evaluation import ProtocolConfig
from txl_jax.config.export import ExportConfig
from txl_jax.config.fields import Section, at_least, free_text
from txl_jax.config.generation import GenerateConfig
from txl_jax.config.model import TransformerXLConfig
from txl_jax.messages import argument, short_repr

_ONLY_FOR = {
    "url": ("text",),
    "field": ("text",),
    "tokenizer": ("text",),
    "vocab": ("stdlib", "ptb", "text"),
    "dtype": ("tokens",),
    "document_separator": ("text", "tokens"),
    "document_files": ("text", "tokens"),
    "cross_documents": ("text", "tokens"),
}
"""The values of ``data.name`` for which a setting of the text may be given."""

Broken = Iterator[tuple[str, str]]
"""Pairs of a dotted key whose value breaks a rule, and the text of the rule."""

PROTOCOLS = {"enwik8": ("authors", "bytes"), "lm1b": ("authors", "double")}
"""The values of ``data.protocol`` for the corpora with several; the first one is the default."""

ALTERNATIVES = (
    ("generate.prompt", "generate.prompt_file", "generate.prompts_file"),
    ("data.path", "data.url"),
    ("data.vocab", "data.tokenizer"),
)
"""Groups of keys; only one key of a group may be given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The settings of training, evaluation and generation, checked against one another."""

    name: str = free_text("experiment")
    """Name of the experiment in tables and reports."""
    seed: int = at_least(0, 0, SEED)
    """Seed of the initial weights, of dropout, and of random orders and segment lengths of text."""
    model: TransformerXLConfig = field(default_factory=TransformerXLConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: training.LossConfig = field(default_factory=training.LossConfig)
    optimizer: training.OptimizerConfig = field(default_factory=training.OptimizerConfig)
    average: training.AverageConfig = field(default_factory=training.AverageConfig)
    distil: training.DistilConfig = field(default_factory=training.DistilConfig)
    train: training.TrainConfig = field(default_factory=training.TrainConfig)
    validate: ProtocolConfig = dataclasses.field(
        default_factory=lambda: ProtocolConfig(split="valid")
    )
    evaluate: ProtocolConfig = field(default_factory=ProtocolConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    checkpoint: training.CheckpointConfig = field(default_factory=training.CheckpointConfig)
    mesh: training.MeshConfig = field(default_factory=training.MeshConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_combinations(self)


def _steps_and_seeds(c: RunConfig) -> Broken:
    t, m = c.train, c.mesh
    if t.batch_size % t.micro_batches:
        yield "train.micro_batches", f"must divide train.batch_size {t.batch_size}"
    for key in ("train.steps", "train.log_every", "train.eval_every", "checkpoint.every"):
        if attrgetter(key)(c) % t.steps_per_dispatch:
            yield key, f"must be a multiple of train.steps_per_dispatch {t.steps_per_dispatch}"
    if t.profiled_steps and t.profiled_steps[1] > t.steps:
        yield "train.profile", f"must stop at train.steps {t.steps} or before"
    if t.num_seeds > 1 and max(m.fsdp, 1) * m.tensor * max(m.data, 1) > 1:
        rule = f"all seeds run on one device, not on a mesh of {m.data} x {m.fsdp} x {m.tensor}"
        yield "train.num_seeds", f"{rule}; set mesh.data, mesh.fsdp and mesh.tensor to 1"


def _schedule(c: RunConfig) -> Broken:
    o, steps = c.optimizer, c.train.steps
    if o.warmup_steps > steps:
        flag = argument("config.optimizer.warmup_steps", max(steps // 10, 1))
        rule = f"is more than train.steps {steps}: use fewer, for example {flag}"
        yield "optimizer.warmup_steps", rule
    if o.schedule == "inverse_sqrt" and not o.warmup_steps:
        yield "optimizer.warmup_steps", "must be at least 1 for schedule 'inverse_sqrt'"


def _optimizer(c: RunConfig) -> Broken:
    o = c.optimizer
    constant = o.schedule == "constant" and not o.warmup_steps and c.average.swa_lr_ratio is None
    optax_rules.check(o.name, o.arguments, constant)  # raises an error for one of the arguments
    if not optax_rules.is_optax(o.name):
        return
    for key in ("b1", "b2", "eps", "momentum"):
        if getattr(o, key) != getattr(type(o), key):
            rule = f"has no effect on optimizer.name {o.name!r}; leave the key out, and give"
            yield f"optimizer.{key}", f"{rule} arguments of {o.name} as optimizer.arguments.NAME"
    if o.weight_decay and optax_rules.has_argument(o.name, "weight_decay"):
        rule = f"{o.name} has an argument of this name"
        yield "optimizer.weight_decay", f"{rule}; set optimizer.arguments.weight_decay instead"


def _weight_averaging(c: RunConfig) -> Broken:
    a, o, steps, ratio = c.average, c.optimizer, c.train.steps, "average.swa_lr_ratio"
    if a.swa_start >= steps:
        yield "average.swa_start", f"must be below train.steps {steps}"
    if a.swa_lr_ratio is not None:
        if not a.swa_start:
            rule = "is for the steps after average.swa_start, which is 0 (off)"
            yield ratio, f"{rule}; set average.swa_start too"
        if o.schedule == "cosine" and not o.min_ratio:
            yield ratio, "multiplies the schedule's last rate, which is 0; set optimizer.min_ratio"
        if o.warmup_steps > a.swa_start:
            rule = f"is more than average.swa_start {a.swa_start}, where the schedule ends"
            yield "optimizer.warmup_steps", f"{rule}; use fewer steps"
    for use, needed in (("swa", "swa_start"), ("ema", "ema_decay")):
        if a.use == use and not getattr(a, needed):
            yield "average.use", f"needs average.{needed} above 0"


def _training_loss(c: RunConfig) -> Broken:
    t, drawn = c.train, c.model.sample_softmax
    if c.loss.positions == "half" and t.seg_len < 2:
        yield "loss.positions", f"needs train.seg_len of at least 2, not {t.seg_len}"
    if c.loss.past_decode and not c.model.past_decode:
        yield "loss.past_decode", "needs model.past_decode=True too"
    if c.distil.teachers and not t.text_on_device:
        yield "distil.teachers", "needs train.text_on_device=True"
    for key in ("loss.r_drop", "loss.past_decode", "distil.teachers"):
        if drawn and attrgetter(key)(c):
            rule = f"needs scores of all words, and model.sample_softmax {drawn} computes only some"
            yield key, f"{rule}; set model.sample_softmax to 0"


def _lengths(c: RunConfig) -> Broken:
    model, t = c.model, c.train
    if t.seg_len_std and t.seg_len < 10:
        rule = f"needs train.seg_len of at least 10, not {t.seg_len}"
        yield "train.seg_len_std", f"{rule}, because some segments have about half that length"
    for name, part in (("train", t), ("validate", c.validate), ("evaluate", c.evaluate)):
        yield from lengths_of(model, name, part)


def lengths_of(
    model: TransformerXLConfig, name: str, part: training.TrainConfig | ProtocolConfig
) -> Broken:
    """Yields settings of lengths in ``part``, the section ``name``, that do not fit a model."""
    if model.memory_free and part.mem_len:
        rule = f"must be 0, because attention {model.attention!r} has no memory"
        yield f"{name}.mem_len", f"{rule}; use {name}.context_len instead"
    longest = getattr(part, "longest_seg_len", part.seg_len)
    total = part.context_len + longest
    if model.segment_limit is not None and total > model.segment_limit:
        drawn = " (train.seg_len_std)" if longest > part.seg_len else ""
        rule = f"a segment with its context has up to {total} tokens{drawn}"
        fix = "use shorter segments or more positions"
        yield f"{name}.seg_len", f"{rule}, and model.n_positions is {model.n_positions}; {fix}"
    own = getattr(part, "same_length", None)
    window = model.same_length if own is None else own
    if window == "pytorch" and not part.mem_len:
        rule = "same_length='pytorch' allows only distances below the memory length, which is 0"
        yield f"{name}.mem_len", f"{rule}; use a longer memory, or same_length='tf'"
    if window == "tf" and part.context_len and not part.mem_len:
        rule = "same_length='tf' allows only distances up to the memory length, which is 0"
        yield f"{name}.context_len", f"{rule}; use same_length=False, or context_len 0"


def _scoring(c: RunConfig) -> Broken:
    for name, p in (("validate", c.validate), ("evaluate", c.evaluate)):
        warm = f"{name}.warm_start"
        if p.warm_start and not p.mem_len:
            yield warm, f"is read into memory, and {name}.mem_len is 0; use a longer memory"
        if p.warm_start and p.context_len:
            rule = f"needs segments without context, and {name}.context_len is {p.context_len}"
            yield warm, f"{rule}; set one of the two to 0"
        if p.warm_start and p.first_memory == "zeros":
            rule = f"starts from an empty memory, and {name}.first_memory is 'zeros'"
            yield warm, f"{rule}; use first_memory 'empty'"
        if p.first_memory == "zeros" and p.context_len and p.mem_len:
            rule = f"has no effect with {name}.context_len {p.context_len}"
            yield f"{name}.first_memory", f"{rule}; use first_memory 'empty', or context_len 0"
        if p.dynamic.rule != "none" and p.temperature != 1:
            rule = f"needs fixed parameters, and {name}.dynamic.rule is {p.dynamic.rule!r}"
            yield f"{name}.temperature", f"{rule}; use temperature 1, or dynamic.rule 'none'"


def _text(c: RunConfig) -> Broken:
    d, p = c.data, c.data.probe
    if d.url and not d.hash:
        yield "data.url", "needs data.hash (md5:… or sha256:…) to check the download"
    for key, names in _ONLY_FOR.items():
        if d.name not in names and getattr(d, key) != getattr(type(d), key):
            known = " or ".join(map(repr, names))
            rule = f"is only for data.name={known}, not {d.name!r}"
            yield f"data.{key}", f"{rule}; leave the key out"
    if d.protocol and d.protocol not in PROTOCOLS.get(d.name, ()):
        both = lambda known: " and ".join(map(repr, known))
        allowed = ", ".join(f"{name!r} has {both(known)}" for name, known in PROTOCOLS.items())
        yield "data.protocol", f"is no protocol of data.name={d.name!r}; {allowed}"
    for key in ("train.seg_len_std", "train.partial_shuffle", "train.text_on_device"):
        if d.name == "lm1b" and attrgetter(key)(c):
            yield key, "needs one continuous text, and data.name='lm1b' has shuffled sentences"
    if p.longest < p.shortest:
        yield "data.probe.longest", f"must be at least data.probe.shortest {p.shortest}"
    if p.tokens < (least := 10 * (p.longest + 2)):
        rule = f"must be at least {least}, so that the valid and test splits can have an answer"
        yield "data.probe.tokens", f"{rule} {p.longest} tokens back (data.probe.longest)"


def _documents(c: RunConfig) -> Broken:
    d = c.data
    if d.document_files and (d.name == "tokens" or d.url):
        rule = "is only for data.name='text' with a folder of text files in data.path"
        yield "data.document_files", f"{rule}; leave the key out"
    if d.document_files and d.document_separator:
        yield "data.document_separator", "data.document_files=True is given too; give one of them"
    has_documents = d.document_separator or d.document_files
    if has_documents and c.distil.teachers:
        rule = "needs a text without documents"
        yield "distil.teachers", f"{rule}; leave out data.document_separator and document_files"


def _tokens(c: RunConfig) -> Broken:
    d = c.data
    if d.vocab == "subword" and d.name != "text":
        yield "data.vocab", f"is only for data.name='text', not {d.name!r}; leave the key out"
    if d.vocab_size is not None and d.name != "tokens" and d.vocab != "subword":
        rule = "is only for data.vocab='subword' and data.name='tokens'"
        yield "data.vocab_size", f"{rule}; leave the key out, and the text decides the size"
    if d.vocab == "subword" and (d.vocab_size or 256) < 256:
        rule = "must be at least 256 for subwords, because their first symbols are the 256 bytes"
        yield "data.vocab_size", rule


def _alternatives(c: RunConfig) -> Broken:
    for group in ALTERNATIVES:
        given = [key for key in group if attrgetter(key)(c)]
        for key in given[1:]:
            other = f"{given[0]} = {short_repr(attrgetter(given[0])(c))}"
            yield key, f"{other} is given too; give one of them"


def check_combinations(exp: RunConfig) -> None:
    """Raises ConfigError if settings of an experiment contradict each other."""
    training = (_steps_and_seeds, _schedule, _optimizer, _weight_averaging, _training_loss)
    for rule in (*training, _lengths, _scoring, _text, _documents, _tokens, _alternatives):
        for key, why in rule(exp):
            raise refusal(key, attrgetter(key)(exp), why)
