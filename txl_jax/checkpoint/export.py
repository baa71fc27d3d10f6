"""Exports a trained model as programs that run without this library (docs/export.md).

The folder has the files of :func:`~txl_jax.checkpoint.saving.save`, a file ``NAME.jax`` for each
program, which ``jax.export`` reads, and README.md and run.py, which show how to run the programs.
The programs take memory and cache as dicts of arrays, so they need no class of this library.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
from flax.traverse_util import unflatten_dict

from txl_jax import __version__
from txl_jax.checkpoint import run_exported
from txl_jax.checkpoint.saving import require_empty_folder, save
from txl_jax.checkpoint.tensors import flat_params
from txl_jax.checkpoint.trained_model import TrainedModel, memory_shapes
from txl_jax.checkpoint.workdir_files import EXPORT
from txl_jax.config import ConfigError, ExportConfig
from txl_jax.config.folders import expanded_text
from txl_jax.files import atomic_write, write_json
from txl_jax.messages import shown_path
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.paths import is_remote, local_folder, make_folder, names
from txl_jax.progress import waiting_for

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms on which every program runs, as ``jax.export`` names them."""

_README = pathlib.Path(__file__).with_name("exported_readme.md")
_VOCABULARY = {
    "byte": "a byte of UTF-8 text is a token, and a symbol is its value in decimal",
    "char": "a character is a token",
    "letter": "text is in lower case, a character is a token, and `_` is white space",
    "word": "a word between white space is a token, and the end of a line is `<eos>`",
    "sentence": "a word between white space is a token, and `<S>` is before and after a line",
    "subword": "by `tokenizer.json`, without special tokens around a text",
    "tokenizer": "by `tokenizer.json`, without special tokens around a text",
    "id": "the ids are the user's own",
}
"""How each kind of vocabulary turns text into ids."""


class Program(NamedTuple):
    """A function of arrays and dicts of arrays, and the shapes of its arguments."""

    function: Callable
    arguments: tuple[Any, ...]


def run(trained: TrainedModel, workdir: str) -> str:
    """Exports the model as the settings say; returns the line to print (``--mode=export``)."""
    c = trained.config.export
    folder = c.folder or os.path.join(workdir, EXPORT)
    export(trained, folder, c)
    return f"exported to {shown_path(folder)}; its README.md says how to run it"


def export(trained: TrainedModel, folder: str | os.PathLike[str], c: ExportConfig) -> None:
    """Writes the programs of a model, its parameters and its vocabulary to a folder.

    Raises ModelFormatError for a folder that is not new or empty, and ConfigError for a segment
    that is longer than the model allows. A failed export leaves no files in a local folder.
    """
    folder, cfg = expanded_text(folder, "folder"), trained.model.cfg
    require_empty_folder(folder)
    if cfg.segment_limit is not None and c.seg_len > cfg.segment_limit:
        why = f"must be at most model.n_positions {cfg.n_positions}, the number of learnt positions"
        raise ConfigError(f"config key export.seg_len = {c.seg_len}: {why}")
    with waiting_for(f"exporting to {shown_path(folder)}"), _complete(folder) as made:
        save(trained, made)
        found = programs(trained.model, trained.params, c)
        with _without_source_paths():
            for name, one in found.items():
                exported = jax.export.export(jax.jit(one.function), platforms=PLATFORMS)
                program = exported(*one.arguments).serialize()
                atomic_write(os.path.join(made, f"{name}.jax"), bytes(program))
        if trained.vocab.tokenizer is not None:
            write_json(os.path.join(made, "tokenizer.json"), trained.vocab.tokenizer)
        script = pathlib.Path(run_exported.__file__).read_bytes()
        atomic_write(os.path.join(made, "run.py"), script)
        atomic_write(os.path.join(made, "README.md"), _readme(trained, c, found).encode())


def programs(model: TransformerXL, params: Any, c: ExportConfig) -> dict[str, Program]:
    """Returns the programs of a model by name: ``logits``, ``nll``, ``cache`` and ``step``.

    The programs compute attention without fused kernels, because StableHLO has no such kernels. A
    model without memory has no cache, and therefore only ``logits`` and ``nll``.
    """
    model = TransformerXL(dataclasses.replace(model.cfg, kernel="xla", remat="none"))
    cfg, shape = model.cfg, jax.ShapeDtypeStruct
    apply = lambda params, *inputs, **options: model.apply(
        {"params": unflatten_dict(params, sep="/")}, *inputs, **options
    )
    rows = c.batch_size or jax.export.symbolic_shape("B")[0]
    arrays = {name: shape(x.shape, x.dtype) for name, x in flat_params(params).items()}
    row, ids = shape((rows,), np.int32), shape((rows, c.seg_len), np.int32)
    hidden = memory_shapes(cfg, 1, c.mem_len).hidden
    layers, _, slots, width = hidden.shape
    mems = {"hidden": shape((layers, rows, slots, width), hidden.dtype), "filled": row}

    def logits(params, tokens, lengths, mems):
        found, after = apply(params, tokens, Memory(**mems), lengths=lengths)
        return found, vars(after)

    def nll(params, tokens, targets, lengths, mems):
        of_targets = {"method": "nll", "lengths": lengths}
        found, after = apply(params, tokens, targets, Memory(**mems), **of_targets)
        return found, vars(after)

    project = lambda params, mems: apply(params, Memory(**mems), seg_len=1, method="init_cache")

    def cache(params, mems):
        return _named(project(params, mems))

    def step(params, token, cache):
        given = jax.tree.unflatten(tree, [cache[name] for name in names])
        found, after = apply(params, token[:, None], given)
        return found[:, 0], _named(after)

    found = {
        "logits": Program(logits, (arrays, ids, row, mems)),
        "nll": Program(nll, (arrays, ids, ids, row, mems)),
    }
    if cfg.memory_free:
        return found
    first = jax.eval_shape(project, arrays, mems)
    tree, names = jax.tree.structure(first), list(_named(first))
    found["cache"] = Program(cache, (arrays, mems))
    found["step"] = Program(step, (arrays, row, _named(first)))
    return found


def _named(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by path, such as ``near/layers/0/keys``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


@contextlib.contextmanager
def _without_source_paths() -> Iterator[None]:
    """Leaves the paths of this machine's source files out of lowered programs."""
    name = "jax_traceback_in_locations_limit"
    kept = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, kept)


@contextlib.contextmanager
def _complete(folder: str) -> Iterator[str]:
    """Yields a temporary folder to write in, and at the end moves its files to ``folder``."""
    if is_remote(folder):
        with local_folder(folder) as made:
            yield made
        return
    # an existing empty folder is kept: it may be a mounted disk or a shell's current folder
    exists, whole = os.path.isdir(folder), os.path.realpath(folder)
    parent = whole if exists else os.path.dirname(whole)
    make_folder(parent)
    with tempfile.TemporaryDirectory(".tmp", dir=parent) as temporary:
        made = os.path.join(temporary, "exported")
        os.mkdir(made)
        yield made
        if not exists:
            os.replace(made, whole)
        for name in names(made):
            os.replace(os.path.join(made, name), os.path.join(whole, name))


def _readme(trained: TrainedModel, c: ExportConfig, found: dict[str, Program]) -> str:
    """Returns the text of README.md."""
    import jinja2  # not needed to run a model

    cfg, vocab = trained.model.cfg, trained.vocab
    arrays = lambda name: found[name].arguments[-1] if name in found else {}
    shown = lambda x: f"{x.dtype} [{','.join(map(str, x.shape))}]"
    of_first = lambda name: not re.search(r"/[1-9]", name)  # in layer 0, or in no layer
    kind = _VOCABULARY[vocab.kind] + ("; text is in lower case" if vocab.lower_case else "")
    template = jinja2.Template(_README.read_text("utf-8"), keep_trailing_newline=True)
    return template.render(
        name=trained.config.name,
        version=__version__,
        jax=jax.__version__,
        cfg=cfg,
        c=c,
        tokenizer=vocab.tokenizer,
        log_probs=bool(cfg.cutoffs) or cfg.mixtures > 1,
        vocabulary=kind + (f"; other words are `{vocab.unknown}`" if vocab.unknown else ""),
        mems={name: shown(x) for name, x in arrays("nll").items()},
        cache={name: shown(x) for name, x in arrays("step").items() if of_first(name)},
    )
