"""The authors' PyTorch model, trained and scored exactly as a txl_jax experiment says.

This module needs torch and numpy, but not JAX. It imports the authors' code
(github.com/kimiyoung/transformer-xl, folder ``pytorch/``) from a folder that the caller names. With
a current PyTorch, this code needs two edits. ``utils/proj_adaptive_softmax.py`` must not parse
``torch.version.cuda`` (the two constants that it computes are unused). The masks in
``mem_transformer.py`` must be bool instead of byte. NVIDIA's code
(github.com/NVIDIA/DeepLearningExamples, folder ``PyTorch/LanguageModeling/Transformer-XL/pytorch``)
needs no edits. Only the model comes from their code. This module has its own streams, schedule and
loops, so that data order, learning rates and scored targets are those of the experiment. An
experiment is the nested dict of ``txl_jax.config.ExperimentConfig.to_dict()``.

B is the batch size, T the segment length, V the vocabulary size. The authors' arrays are [T,B];
arrays here are [B,T] until the model is called.
"""

import importlib
import math
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

Section = Mapping[str, Any]

PLAIN_MODEL = {
    "attention": "relative",
    "untie_r": False,
}
"""Model settings that are not passed to the authors' code, each with its only allowed value."""


class UnsupportedError(ValueError):
    """A setting that the authors' code does not have; the message names key and value."""


def build(folder: str, experiment: Section, vocab_size: int, code: str = "authors") -> Any:
    """Returns the authors' ``MemTransformerLM`` with the experiment's sizes and random weights.

    Args:
      folder: the authors' ``pytorch/`` folder.
      experiment: nested settings; ``seed`` is given to torch, which draws weights and dropout.
      vocab_size: V.
      code: ``authors``, or ``nvidia`` for NVIDIA's version of the model.

    Raises:
      UnsupportedError: the experiment has a setting that their code does not support.
    """
    shape, train = experiment["model"], experiment["train"]
    _require(experiment, "model", PLAIN_MODEL)
    _require(experiment, "optimizer", {"name": "adam"})
    window = _window("model.same_length", shape["same_length"])
    same_names = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "dropout", "dropatt")
    words = {name: shape[name] for name in ("tie_weight", "d_embed", "div_val")}
    torch.manual_seed(experiment["seed"])
    own: dict[str, Any] = {"dtype": torch.float32} if code == "nvidia" else {}
    model = _import_model(folder, code)(
        vocab_size,
        **own,
        **{name: shape[name] for name in same_names},
        **words,
        cutoffs=list(shape["cutoffs"]),
        tie_projs=list(shape["tie_projs"]),
        pre_lnorm=shape["pre_lnorm"],
        clamp_len=shape["clamp_len"],
        same_length=window,
        tgt_len=train["seg_len"],
        ext_len=0,
        mem_len=train["mem_len"],
    )
    initialise(model, shape["init_std"])
    return model


def initialise(model: Any, std: float) -> None:
    """Draws the weights as the authors' ``train.py`` does.

    Matrices, embeddings, u and v are drawn from N(0, std), and LayerNorm gains from N(1, std).
    Biases are 0.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.zeros_(parameter)
        else:
            gain = name.endswith("layer_norm.weight")
            torch.nn.init.normal_(parameter, float(gain), std)


def learning_rate(update: float, optimizer: Section, steps: int, warmup: int) -> float:
    """Returns the learning rate of an update; ``update`` counts from 1 and can be a fraction.

    The rate rises linearly during the first ``warmup`` updates. Then it follows the schedule of the
    optimizer settings, as in ``txl_jax/training/optimizer.py``. The cosine schedule has the peak
    rate at the first update after warm-up, and would reach ``min_ratio`` times the peak one update
    after the last.
    """
    peak, low = optimizer["learning_rate"], optimizer["min_ratio"]
    if update <= warmup:
        return peak * update / warmup
    if optimizer["schedule"] == "constant":
        return peak
    if optimizer["schedule"] == "inverse_sqrt":
        return peak * math.sqrt(warmup / update)
    done = min(max(update - 1 - warmup, 0) / max(steps - warmup, 1), 1.0)
    return peak * (low + (1 - low) * (1 + math.cos(math.pi * done)) / 2)


def train_epoch(
    tokens: np.ndarray, batch_size: int, seg_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields inputs and targets [B,<=T] of one pass over the training text, as the authors cut it.

    The text is cut into B streams of ``len(tokens) // B`` tokens, and the remaining tokens are
    dropped. The first token of a stream is never a target. The last segment can be shorter.
    """
    length = len(tokens) // batch_size
    streams = tokens[: length * batch_size].reshape(batch_size, length)
    for start in range(0, length - 1, seg_len):
        stop = min(start + seg_len, length - 1)
        yield streams[:, start:stop], streams[:, start + 1 : stop + 1]


def scored_segments(
    tokens: np.ndarray, batch_size: int, seg_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields inputs, targets and weights [B,<=T], which score every target of the text once.

    The ``len(tokens) - 1`` targets are cut into B streams of equal length, rounded up. Targets
    of the text have weight 1. The padding at the end of the last streams has weight 0.
    """
    length = -(-(len(tokens) - 1) // batch_size)
    place = np.arange(batch_size * length).reshape(batch_size, length)
    real = place < len(tokens) - 1
    place = np.where(real, place, 0)
    for start in range(0, length, seg_len):
        part = np.s_[:, start : start + seg_len]
        yield tokens[place[part]], tokens[place[part] + 1], real[part]


def updates(
    model: Any, tokens: np.ndarray, experiment: Section, rate: Callable[[int], float]
) -> Iterator[tuple[float, int]]:
    """Trains without end; yields the mean loss in nats and the number of tokens of each update.

    Args:
      model: trained in place, with dropout, Adam and clipping as the experiment says.
      tokens: integer training text, 1-D.
      experiment: nested settings.
      rate: returns the learning rate of update number 1, 2, …; called just before the update.
    """
    train, optimizer = experiment["train"], experiment["optimizer"]
    betas = (optimizer["b1"], optimizer["b2"])
    adam = torch.optim.Adam(model.parameters(), betas=betas, eps=optimizer["eps"])
    model.train()
    model.reset_length(train["seg_len"], 0, train["mem_len"])
    update = 0
    memory: list[torch.Tensor] = []
    while True:
        if train["epoch_memory"] == "reset":
            memory = []
        for inputs, targets in train_epoch(tokens, train["batch_size"], train["seg_len"]):
            update += 1
            for group in adam.param_groups:
                group["lr"] = rate(update)
            model.zero_grad()
            loss, *memory = model(_time_first(inputs), _time_first(targets), *memory)
            loss = loss.mean()
            loss.backward()
            if optimizer["clip_norm"]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer["clip_norm"])
            adam.step()
            yield loss.item(), targets.size


def score(model: Any, tokens: np.ndarray, protocol: Section, model_settings: Section) -> dict:
    """Returns the score of a text: ``bpc`` in bits per token, and the number of ``targets``.

    Args:
      model: left in evaluation mode, with the protocol's lengths.
      tokens: integer text, 1-D. Every target is scored, unless ``max_segments`` ends the scoring
        earlier.
      protocol: ``batch_size, seg_len, mem_len, clamp_len, same_length, max_segments``.
      model_settings: the model's own ``clamp_len`` and ``same_length``, used where the
        protocol's are ``None``. Without memory, no attention window is used.
    """
    clamp, window = protocol["clamp_len"], protocol["same_length"]
    window = model_settings["same_length"] if window is None else window
    model.clamp_len = model_settings["clamp_len"] if clamp is None else clamp
    model.same_length = protocol["mem_len"] > 0 and _window("same_length", window)
    model.reset_length(protocol["seg_len"], 0, protocol["mem_len"])
    model.eval()
    nats, count = 0.0, 0
    memory: list[torch.Tensor] = []
    segments = scored_segments(tokens, protocol["batch_size"], protocol["seg_len"])
    with torch.no_grad():
        for i, (inputs, targets, weights) in enumerate(segments, 1):
            loss, *memory = model(_time_first(inputs), _time_first(targets), *memory)
            nats += float(loss.double()[torch.from_numpy(weights.T)].sum())
            count += int(weights.sum())
            if i == protocol["max_segments"]:
                break
    return {"bpc": nats / count / math.log(2), "targets": count}


def _time_first(segment: np.ndarray) -> torch.Tensor:
    """Returns the segment [B,T] as int64 [T,B]."""
    return torch.from_numpy(np.ascontiguousarray(segment.T, dtype=np.int64))


def _import_model(folder: str, code: str) -> Any:
    root = pathlib.Path(folder).resolve()
    if not (root / "mem_transformer.py").is_file():
        raise FileNotFoundError(f"{folder!r} has no mem_transformer.py: not the authors' pytorch/")
    if code == "nvidia":  # NVIDIA's utils/__init__.py imports what only training needs
        utils = sys.modules["utils"] = types.ModuleType("utils")
        utils.__path__ = [str(root / "utils")]
    for path in (root / "utils", root):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    return importlib.import_module("mem_transformer").MemTransformerLM


def _window(key: str, window: Any) -> bool:
    if window == "tf":
        raise UnsupportedError(f"{key} = 'tf': the authors' PyTorch code has 'pytorch' only")
    return window == "pytorch"


def _require(experiment: Section, section: str, values: Section) -> None:
    """Raises UnsupportedError if a setting of the section differs from its value in ``values``."""
    for key, value in values.items():
        given = experiment[section].get(key, value)
        if given != value:
            raise UnsupportedError(f"{section}.{key} = {given!r}: only {value!r} here")
