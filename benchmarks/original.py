"""The authors' PyTorch model, trained and scored exactly as a txl_jax experiment says.

Needs torch and numpy, not JAX. The authors' code (github.com/kimiyoung/transformer-xl, folder
``pytorch/``) is imported from a folder that the caller names. A current PyTorch needs two
edits there: ``utils/proj_adaptive_softmax.py`` must not parse ``torch.version.cuda`` (the
two constants are unused), and the masks in ``mem_transformer.py`` must be bool where they are
byte. NVIDIA's code (github.com/NVIDIA/DeepLearningExamples, folder
``PyTorch/LanguageModeling/Transformer-XL/pytorch``) needs no edits. Only their model is used.
Streams, schedule and loops are written here, so that data order, learning rates and scored targets
are those of the experiment. An experiment is the nested dict of
``txl_jax.config.ExperimentConfig.to_dict()``.

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
"""Model settings that are not passed to the authors' code, with the only value that is allowed."""


class UnsupportedError(ValueError):
    """A setting that the authors' code does not have; the text names key and value."""


def build(folder: str, experiment: Section, vocab_size: int, code: str = "authors") -> Any:
    """Returns the authors' ``MemTransformerLM`` in the experiment's shape, with random weights.

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

    Matrices, embeddings, u and v are from N(0, std), LayerNorm gains from N(1, std); biases are 0.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.zeros_(parameter)
        else:
            gain = name.endswith("layer_norm.weight")
            torch.nn.init.normal_(parameter, float(gain), std)


def learning_rate(update: float, optimizer: Section, steps: int, warmup: int) -> float:
    """Returns the learning rate of update ``update``, counted from 1, which may be a fraction.

    It rises linearly up to ``warmup`` updates and then follows the schedule that is named, as in
    ``txl_jax/training/optimizer.py``: a cosine starts at the full rate with the first update
    after warm-up and would reach ``min_ratio`` one update after the last.
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

    B streams of ``len(tokens) // B`` tokens lie side by side; the rest is dropped, and a stream's
    first token is no target. The last segment has the tokens that are left.
    """
    length = len(tokens) // batch_size
    streams = tokens[: length * batch_size].reshape(batch_size, length)
    for start in range(0, length - 1, seg_len):
        stop = min(start + seg_len, length - 1)
        yield streams[:, start:stop], streams[:, start + 1 : stop + 1]


def scored_segments(
    tokens: np.ndarray, batch_size: int, seg_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields inputs, targets and weights [B,<=T]; every target of the text has weight 1 once.

    The ``len(tokens) - 1`` targets are cut into B streams of equal length, rounded up. The last
    streams are padded at their ends, with weight 0.
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
    """Scores a text under a protocol; returns bits per token, ``bpc``, and the number ``targets``.

    Args:
      model: left in evaluation mode, with the protocol's lengths.
      tokens: integer text, 1-D; every target is scored unless ``max_segments`` stops before.
      protocol: ``batch_size, seg_len, mem_len, clamp_len, same_length, max_segments``.
      model_settings: the model's own ``clamp_len`` and ``same_length``, used where the
        protocol's are ``None``. Without memory there is no window.
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
    """Raises UnsupportedError if the experiment has one of these settings with another value."""
    for key, value in values.items():
        given = experiment[section].get(key, value)
        if given != value:
            raise UnsupportedError(f"{section}.{key} = {given!r}: only {value!r} here")
