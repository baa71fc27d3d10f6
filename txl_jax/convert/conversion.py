"""Converts a model of another program into a workdir for evaluation and generation."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.loading import load_exported
from txl_jax.checkpoint.provenance import provenance
from txl_jax.checkpoint.saving import require_empty_folder
from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.checkpoint.workdir import describe_corpus, read_json, read_record, write_record
from txl_jax.checkpoint.workdir_files import CONFIG, check_path
from txl_jax.config import (
    CheckpointConfig,
    ExperimentConfig,
    TransformerXLConfig,
    override,
    with_absolute_paths,
)
from txl_jax.config.folders import path_text
from txl_jax.convert import files
from txl_jax.convert.huggingface import (
    config_from_huggingface,
    is_huggingface_name,
    params_from_huggingface,
)
from txl_jax.convert.pytorch import config_from_pytorch, is_nvidia, params_from_pytorch
from txl_jax.convert.tensorflow import config_from_tensorflow, is_parameter, params_from_tensorflow
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.vocab import Vocab
from txl_jax.parallel.device_memory import Work, check_arrays
from txl_jax.paths import make_folder

Format = Literal["pytorch", "nvidia", "huggingface", "tensorflow", "txl_jax"]
_WORK = Work("the converted model", "convert it on a machine with more memory")
WT103_SYMBOLS = 267_735
"""The vocabulary size of WikiText-103, with ``<eos>``."""


class Program(NamedTuple):
    """Functions that convert the models of another program, and its defaults for evaluation.

    ``first_memory`` says whether its memory is empty or zeros before the first segment.
    ``mem_len`` is the memory length if the source has none.
    """

    config: Callable[[Mapping[str, Any]], TransformerXLConfig]
    params: Callable[[Mapping[str, Any], TransformerXLConfig], dict[str, Any]]
    first_memory: Literal["empty", "zeros"]
    mem_len: int = 128


PYTORCH = Program(config_from_pytorch, params_from_pytorch, "empty")
PROGRAMS = {
    "pytorch": PYTORCH,
    "nvidia": PYTORCH._replace(config=lambda args: config_from_pytorch({**args, "impl": "nvidia"})),
    "huggingface": Program(config_from_huggingface, params_from_huggingface, "zeros", 1600),
    "tensorflow": Program(config_from_tensorflow, params_from_tensorflow, "zeros"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request to convert a model and to write it into a workdir.

    A path can be a string or a ``pathlib.Path``. It is stored as a string.

    Attributes:
      source: a file with tensors, the prefix of a TF checkpoint, a Hugging Face folder, or a folder
        with an exported model.
      workdir: a new or empty folder.
      format: the program that wrote the source; ``None`` detects it.
      args: constructor arguments, which override those in the source. ``tgt_len``, ``mem_len``,
        ``ext_len``, ``clamp_len`` and ``same_length`` determine the evaluation protocol.
      vocab: a file for :func:`~txl_jax.convert.files.vocab_from_file`.
      data: settings of the corpus for evaluation, whose vocabulary replaces a missing ``vocab``.
      overrides: other settings of the experiment by dotted key, except settings of the model.
    """

    source: str
    workdir: str
    format: Format | None = None
    args: Mapping[str, Any] | None = None
    vocab: str | None = None
    data: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("source", "workdir", "vocab"):
            if (path := getattr(self, name)) is not None or name != "vocab":
                object.__setattr__(self, name, path_text(path, name, name == "workdir"))


def to_workdir(request: Request) -> TransformerXLConfig:
    """Converts a model into a workdir for :func:`txl_jax.load`. Returns the model's configuration.

    Raises:
      ModelFormatError, ConfigError, DataError, WorkdirError: the request, a file, a tensor, a
        setting, the corpus or the vocabulary cannot be used. Nothing is written.
      CheckpointError: the workdir cannot be written. It then has no ``config.json``.
    """
    r = request
    require_empty_folder(r.workdir)
    check_path(r.workdir)
    for key in r.overrides:
        if key.partition(".")[0] == "model":
            fix = "leave the key out, or change the constructor args of another program's model"
            raise ModelFormatError(f"{key}: the source defines the model; {fix}")
    if r.format not in (None, *get_args(Format)):
        raise ModelFormatError(f"format {r.format!r}: must be one of {', '.join(get_args(Format))}")
    folder = r.source if os.path.isdir(r.source) else os.path.dirname(r.source)
    if r.format == "txl_jax" or (r.format is None and "model" in _settings_in(r.source)):
        return _exported_to_workdir(r)
    stored = files.read(r.source)
    name = r.format or _program(stored.tensors)
    args = _arguments(r, name, stored, folder)
    corpus = None
    if r.data is not None:
        data = {k: v for k, v in r.overrides.items() if k.startswith("data.")}
        exp = override(ExperimentConfig.from_dict({"data": r.data}), data)
        corpus = corpus_from_config(exp.data)
    beside = files.vocab_in_folder(folder) if name == "huggingface" else None
    if corpus and r.vocab is None:
        vocab = corpus.vocab
    elif file := r.vocab or beside:
        vocab = files.vocab_from_file(file)
    elif stored.symbols is not None:
        vocab = Vocab.from_symbols(stored.symbols)
    else:
        raise ModelFormatError(
            f"{r.source}: has no readable vocabulary; name a vocabulary file or a corpus"
        )
    exp = _experiment(r, PROGRAMS[name], args, vocab)
    params = PROGRAMS[name].params(stored.tensors, exp.model)
    origin = {"format": name, "step": stored.step}
    _write(r.workdir, exp, vocab, params, describe_corpus(corpus) if corpus else {}, origin)
    return exp.model


def _settings_in(folder: str) -> dict[str, Any]:
    config = os.path.join(folder, CONFIG)
    return read_json(config) if os.path.isfile(config) else {}


def _program(tensors: Mapping[str, Any]) -> Format:
    """Detects the program that wrote a state by the names of the tensors."""
    if any(map(is_huggingface_name, tensors)):
        return "huggingface"
    if any(map(is_parameter, tensors)):
        return "tensorflow"
    return "nvidia" if is_nvidia(tensors) else "pytorch"


def _arguments(r: Request, name: str, stored: files.Stored, folder: str) -> dict[str, Any]:
    """Returns the constructor's arguments in the source and in the request."""
    found = _program(stored.tensors)
    if name != found != "pytorch":
        raise ModelFormatError(
            f"{r.source}: has the tensor names of {found}; give the format {found}"
        )
    own = _settings_in(folder) if name == "huggingface" else stored.args
    if own or r.args:
        return {**(own or {}), **(r.args or {})}
    if name == "huggingface":
        why = f"the tensors are Hugging Face's, and their {CONFIG} is missing"
        raise ModelFormatError(f"{r.source}: {why}; get that file too, or give its content as args")
    raise ModelFormatError(
        f"{r.source}: format {name} needs args, the constructor's arguments: n_token, n_layer,"
        " n_head, d_model, d_head, d_inner and all that differ from the constructor's defaults"
    )


def _experiment(
    r: Request, program: Program, args: Mapping[str, Any], vocab: Vocab
) -> ExperimentConfig:
    """Returns the experiment of a converted model, with the protocol of the original program."""
    # With float32 matrix products on every device, the scores equal the original's.
    model = dataclasses.replace(program.config(args), matmul_precision="highest")
    if len(vocab) != model.vocab_size:
        raise ModelFormatError(
            f"the vocabulary has {len(vocab)} symbols, but the model has {model.vocab_size}; name"
            " the vocabulary with which the model was trained"
        )
    given = args.get("mem_len")
    mem_len = 0 if model.memory_free else program.mem_len if given is None else given
    lengths = {"mem_len": mem_len, "context_len": args.get("ext_len") or 0}
    lengths["seg_len"] = args.get("tgt_len") or 128
    scored = {**lengths, "first_memory": program.first_memory if mem_len else "empty"}
    exp = ExperimentConfig.from_dict(
        {
            "name": os.path.basename(os.path.normpath(r.workdir)),
            "model": dataclasses.asdict(model),
            "data": r.data or _likely_corpus(vocab),
            "train": lengths,
            "validate": scored,
            "evaluate": scored,
            "generate": {"mem_len": max(mem_len, 1)},
        }
    )
    check_arrays(_WORK, param_shapes(model))
    return with_absolute_paths(override(exp, r.overrides))


def _likely_corpus(vocab: Vocab) -> dict[str, Any]:
    """Guesses the corpus of a vocabulary, and returns its settings or those of a user's text."""
    if vocab.kind == "word" and len(vocab) == WT103_SYMBOLS:
        return {"name": "wt103"}
    if vocab.kind == "byte" and len(vocab) < 256:
        newline = str(ord("\n")) in vocab.symbols
        return {"name": "enwik8", "protocol": "bytes" if newline else "authors"}
    names = {"letter": "text8", "sentence": "lm1b", "id": "tokens", "tokenizer": "text"}
    name = names.get(vocab.kind)
    return {"name": name} if name else {"name": "text", "vocab": vocab.kind}


def _exported_to_workdir(r: Request) -> TransformerXLConfig:
    if r.args is not None or r.vocab is not None:
        own = "an exported model has settings and a vocabulary of its own"
        raise ModelFormatError(f"{r.source}: {own}; leave args and vocab out")
    trained = load_exported(r.source)
    exp = trained.config
    if r.data is not None:
        exp = ExperimentConfig.from_dict({**exp.to_dict(), "data": r.data})
    exp = with_absolute_paths(override(exp, r.overrides))
    described = read_record(r.source).get("corpus", {})
    if r.data is not None:  # not the text of training
        described = describe_corpus(corpus_from_config(exp.data, trained.vocab))
    origin = {"format": "txl_jax", "step": trained.step}
    _write(r.workdir, exp, trained.vocab, trained.params, described, origin)
    return exp.model


def _write(
    workdir: str, exp: ExperimentConfig, vocab: Vocab, params: Any, described: Any, origin: Any
) -> None:
    """Writes the workdir. ``config.json`` is last, because a folder without it is not a workdir."""
    config = exp.to_dict()
    make_folder(workdir)
    with Checkpoints(workdir, CheckpointConfig()) as checkpoints:
        on_device = jax.tree.map(jax.numpy.asarray, params)
        checkpoints.save_params(origin["step"], on_device, {"config": config})
    made = {"corpus": described, "provenance": {**provenance(), "converted": origin}}
    write_record(workdir, {**config, **made}, vocab)
