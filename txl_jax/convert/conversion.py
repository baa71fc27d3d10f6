"""A model of another program as a workdir, ready to be scored and sampled from.

    check what was asked for ──▶ read the tensors ──▶ convert ──▶ write

What can be known to be wrong without the tensors is said before they are read.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.loading import load_exported
from txl_jax.checkpoint.provenance import provenance
from txl_jax.checkpoint.saving import require_empty_folder
from txl_jax.checkpoint.workdir import read_json
from txl_jax.checkpoint.workdir_files import CONFIG, VOCAB
from txl_jax.config import (
    CheckpointConfig,
    DataConfig,
    ExperimentConfig,
    TransformerXLConfig,
    override,
)
from txl_jax.convert import huggingface, pytorch, tensorflow
from txl_jax.convert.files import TORCH, is_tensorflow, read
from txl_jax.convert.vocabulary import vocab_from_file, vocab_in_folder
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.data.vocab import Vocab
from txl_jax.files import write_json
from txl_jax.model.footprint import of_parameters
from txl_jax.parallel.device_memory import check_memory

Format = Literal["pytorch", "nvidia", "huggingface", "tensorflow", "txl_jax"]

WT103_SYMBOLS = 267_735
"""Of WikiText-103's training text, ``<eos>`` included."""

HUGGINGFACE_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclasses.dataclass(frozen=True)
class Program:
    """How a program's models are converted.

    Attributes:
      config: its arguments to a configuration.
      params: its tensors and that configuration to parameters.
      first_memory: what its memory is before the first segment, see ``ProtocolConfig``.
      mem_len: M of its evaluation where the arguments do not say.
    """

    config: Callable[[Mapping[str, Any]], TransformerXLConfig]
    params: Callable[[Mapping[str, Any], TransformerXLConfig], dict[str, Any]]
    first_memory: Literal["empty", "zeros"]
    mem_len: int = 128


def _nvidia_config(args: Mapping[str, Any]) -> TransformerXLConfig:
    return pytorch.config_from_pytorch({**args, "impl": "nvidia"})


PROGRAMS: dict[str, Program] = {
    "pytorch": Program(pytorch.config_from_pytorch, pytorch.params_from_pytorch, "empty"),
    "nvidia": Program(_nvidia_config, pytorch.params_from_pytorch, "empty"),
    "huggingface": Program(
        huggingface.config_from_huggingface, huggingface.params_from_huggingface, "zeros", 1600
    ),
    "tensorflow": Program(
        tensorflow.config_from_tensorflow, tensorflow.params_from_tensorflow, "zeros"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to convert, and into what.

    Attributes:
      source: a file with tensors, a TF checkpoint's prefix, or a folder of Hugging Face's or of
        :func:`~txl_jax.checkpoint.saving.export`.
      workdir: new or empty.
      format: whose it is; ``None``: told by what a folder or a prefix looks like, else
        ``pytorch``.
      args: arguments of the program's constructor; they go over those that the source has
        itself. ``tgt_len``, ``mem_len``, ``ext_len``, ``clamp_len`` and ``same_length`` among them
        decide how the model is evaluated.
      vocab: file with the vocabulary, see :func:`~txl_jax.convert.vocabulary.vocab_from_file`.
      data: settings of a corpus to evaluate on (``DataConfig``); its vocabulary is the model's
        where ``vocab`` is ``None``.
      overrides: dotted keys of the experiment to values, over everything but the model.
    """

    source: str
    workdir: str
    format: Format | None = None
    args: Mapping[str, Any] | None = None
    vocab: str | None = None
    data: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def to_workdir(request: Request) -> TransformerXLConfig:
    """Converts, and writes a workdir that :func:`txl_jax.load` opens; the model's shape.

    Raises:
      ModelFormatError: what is asked for, a file or a tensor cannot be used; nothing is written.
      ConfigError, DataError: a setting, the corpus or the vocabulary cannot be used.
    """
    r = request
    require_empty_folder(r.workdir)
    for key in r.overrides:
        if key.partition(".")[0] == "model":
            raise ModelFormatError(f"{key}: the model is the source's; use args of its program")
    if r.format not in (None, *get_args(Format)):
        raise ModelFormatError(f"format {r.format!r}: must be one of {', '.join(get_args(Format))}")
    name = r.format or detect(r.source)
    if name == "txl_jax":
        return _exported_to_workdir(r)
    program, args = PROGRAMS[name], _known_args(r, name)
    corpus = None if r.data is None else corpus_from_config(_data(r))
    vocab = _known_vocab(r, name, corpus)
    if args is not None:
        _experiment(r, program, args, vocab)  # for its errors
    found = read(_weights(r.source, name), wanted=tensorflow.is_parameter)
    if args is None:
        if found.args is None:
            raise ModelFormatError(f"{r.source}: has no model_config; give args, the constructor's")
        args = {**found.args, **(r.args or {})}
    if name == "pytorch" and "impl" not in args and pytorch.is_nvidia(found.tensors):
        raise ModelFormatError(f"{r.source}: has the names of NVIDIA's program: format nvidia")
    if vocab is None:
        if found.symbols is None:
            raise ModelFormatError(f"{r.source}: has no vocabulary in it; name a file or a corpus")
        vocab = Vocab.from_symbols(found.symbols)
    exp = _experiment(r, program, args, vocab)
    params = program.params(found.tensors, exp.model)
    record = {"corpus": {} if corpus is None else _described(corpus)}
    _write(r, name, exp, vocab, params, record, found.step)
    return exp.model


def detect(source: str) -> Format:
    """Whose the source is, by its outside. Raises ModelFormatError where there is nothing."""
    if is_tensorflow(source):
        return "tensorflow"
    if os.path.isdir(source):
        return "txl_jax" if "model" in read_json(os.path.join(source, CONFIG)) else "huggingface"
    if not os.path.exists(source):
        raise ModelFormatError(f"{source}: there is no such file, folder or TF checkpoint")
    return "pytorch"


def _known_args(r: Request, name: str) -> dict[str, Any] | None:
    """The constructor's arguments; ``None`` where the file with the tensors has them."""
    if name == "huggingface":
        folder = r.source if os.path.isdir(r.source) else os.path.dirname(r.source)
        return {**read_json(os.path.join(folder, CONFIG)), **(r.args or {})}
    if name == "nvidia" and r.source.endswith(TORCH):
        return None
    if r.args is None:
        raise ModelFormatError(
            f"{r.source}: format {name} needs args, the arguments of its constructor: n_token,"
            " n_layer, n_head, d_model, d_head, d_inner and those that differ from its defaults"
        )
    return dict(r.args)


def _known_vocab(r: Request, name: str, corpus: Corpus | None) -> Vocab | None:
    """The vocabulary; ``None`` where only the file with the tensors can have it."""
    if r.vocab is not None:
        return vocab_from_file(r.vocab)
    if corpus is not None:
        return corpus.vocab
    beside = vocab_in_folder(r.source) if name == "huggingface" else None
    if beside is not None:
        return vocab_from_file(beside)
    if name == "nvidia" and r.source.endswith(TORCH):
        return None
    raise ModelFormatError(
        f"{r.source}: has no vocabulary that can be read; name a file or a corpus"
    )


def _weights(source: str, name: str) -> str:
    """The file with the tensors."""
    if name != "huggingface" or not os.path.isdir(source):
        return source
    paths = [os.path.join(source, file) for file in HUGGINGFACE_FILES]
    found = [path for path in paths if os.path.isfile(path)]
    if not found:
        raise ModelFormatError(f"{source}: has none of {', '.join(HUGGINGFACE_FILES)}")
    return found[0]


def _data(r: Request) -> DataConfig:
    exp = ExperimentConfig.from_dict({"data": r.data or {}})
    return override(exp, {k: v for k, v in r.overrides.items() if k.startswith("data.")}).data


def _experiment(
    r: Request, program: Program, args: Mapping[str, Any], vocab: Vocab | None
) -> ExperimentConfig:
    """The experiment of a converted model: evaluated as its own program would do it."""
    model = program.config(args)
    if vocab is not None and len(vocab) != model.vocab_size:
        raise ModelFormatError(
            f"the vocabulary has {len(vocab)} symbols, and the model is of {model.vocab_size}"
        )
    mem_len = args.get("mem_len")
    if model.memory_free:
        mem_len = 0
    elif mem_len is None:
        mem_len = program.mem_len
    lengths = {"seg_len": args.get("tgt_len") or 128, "mem_len": mem_len}
    lengths["context_len"] = args.get("ext_len") or 0
    scored = {**lengths, "first_memory": program.first_memory if mem_len else "empty"}
    exp = ExperimentConfig.from_dict(
        {
            "name": os.path.basename(os.path.normpath(r.workdir)),
            "model": dataclasses.asdict(model),
            "data": r.data or ({} if vocab is None else _likely_corpus(vocab)),
            "train": lengths,
            "validate": scored,
            "evaluate": scored,
            "generate": {"mem_len": max(mem_len, 1)},
        }
    )
    check_memory("the converted model", of_parameters(model), exp)
    return override(exp, r.overrides)


def _described(corpus: Corpus) -> dict[str, Any]:
    return {"name": corpus.name, "source_hash": corpus.source_hash, **dict(corpus.info)}


def _likely_corpus(vocab: Vocab) -> dict[str, Any]:
    """Settings of the corpus that a vocabulary looks to be of; the user's own text otherwise."""
    if vocab.kind == "letter":
        return {"name": "text8"}
    if vocab.kind == "sentence":
        return {"name": "lm1b"}
    if vocab.kind == "word" and len(vocab) == WT103_SYMBOLS:
        return {"name": "wt103"}
    if vocab.kind == "byte" and len(vocab) < 256:
        newline = str(ord("\n")) in vocab.symbols
        return {"name": "enwik8", "protocol": "bytes" if newline else "authors"}
    return {"name": "text", "vocab": vocab.kind}


def _exported_to_workdir(r: Request) -> TransformerXLConfig:
    given = [name for name in ("args", "vocab") if getattr(r, name) is not None]
    if given:
        raise ModelFormatError(f"{given[0]}: an exported model has its own; leave it out")
    record = read_json(os.path.join(r.source, CONFIG))
    trained = load_exported(r.source)
    exp = trained.config
    if r.data is not None:
        exp = ExperimentConfig.from_dict({**exp.to_dict(), "data": r.data})
    exp = override(exp, r.overrides)
    _write(r, "txl_jax", exp, trained.vocab, trained.params, record, trained.step)
    return exp.model


def _write(
    r: Request,
    name: str,
    exp: ExperimentConfig,
    vocab: Vocab,
    params: dict[str, Any],
    record: Mapping[str, Any],
    step: int,
) -> None:
    """The workdir; its config comes last, so that half a workdir is none."""
    origin = {**provenance(), "converted": {"format": name, "step": step}}
    with Checkpoints(r.workdir, CheckpointConfig()) as checkpoints:
        on_device = jax.tree.map(jax.numpy.asarray, params)
        checkpoints.save_params(step, on_device, {"config": exp.to_dict()})
    write_json(os.path.join(r.workdir, VOCAB), vocab.to_json())
    corpus = {"corpus": record.get("corpus", {}), "provenance": origin}
    write_json(os.path.join(r.workdir, CONFIG), {**exp.to_dict(), **corpus})
