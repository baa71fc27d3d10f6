"""Times the PyTorch model of the authors or of NVIDIA; reads jobs from standard input.

``benchmarks/interleaved.py`` runs this program with a Python that has torch and numpy; JAX is not
needed. The first line of the input is a job, and each later line asks for one call of this job.
Every answer is a line of JSON.

    {"what": "train" | "evaluate" | "generate", "experiment": {...}, "vocab_size": V,
     "code": "authors" | "nvidia", "form": "eager" | "compile", "steps": n}

A call makes n updates, scores n segments or generates n tokens. Training and evaluation read random
tokens, and carry memory from segment to segment. With ``model.dtype`` bfloat16, torch's autocast is
used. Adam, clipping, loss and memory are as in the authors' ``train.py`` and ``eval.py``. The
authors have no code for generation, so this program generates tokens one at a time from the hidden
state of their forward pass.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import original


def main() -> None:
    """Reads a job, and answers each request for a call until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", required=True)
    folder = parser.parse_args().original
    answers, sys.stdout = sys.stdout, sys.stderr  # the authors' code prints to stderr
    job = json.loads(sys.stdin.readline())
    call = JOBS[job["what"]](folder, job)
    about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(about), file=answers, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        for _ in range(job["steps"]):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began}), file=answers, flush=True)


def training(folder: str, job: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that makes one update."""
    experiment = job["experiment"]
    t, c = experiment["train"], experiment["optimizer"]
    model = _model(folder, job)
    model.train()
    model.reset_length(t["seg_len"], 0, t["mem_len"])
    adam = torch.optim.Adam(model.parameters(), lr=c["learning_rate"])
    draw = _tokens(job, t["seg_len"], t["batch_size"])
    forward, mems = _forward(model, job), None

    def update() -> None:
        nonlocal mems
        data, target = draw()
        model.zero_grad()
        with _autocast(job):
            loss, mems = forward(data, target, mems)
        loss.float().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c["clip_norm"] or float("inf"))
        adam.step()

    return update


def evaluation(folder: str, job: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that scores one segment; the memory is full from the start."""
    p = job["experiment"]["evaluate"]
    model = _model(folder, job)
    model.eval()
    model.clamp_len = -1 if p["clamp_len"] is None else p["clamp_len"]
    model.same_length = p["same_length"] == "pytorch"
    model.reset_length(p["seg_len"], 0, p["mem_len"])
    draw = _tokens(job, p["seg_len"], p["batch_size"])
    forward, mems = _forward(model, job), _full_memory(model, job, p["mem_len"], p["batch_size"])
    total = 0.0

    def segment() -> None:
        nonlocal mems, total
        with torch.no_grad(), _autocast(job):
            loss, mems = forward(*draw(), mems)
        total += float(loss.float().sum())

    return segment


def generation(folder: str, job: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that draws one token; the memory is full from the start."""
    g, rows = job["experiment"]["generate"], job.get("batch_size", 1)
    model = _model(folder, job)
    model.eval()
    model.same_length = True
    model.reset_length(1, 0, g["mem_len"])
    mems = _full_memory(model, job, g["mem_len"], rows)
    token, _ = _tokens(job, 1, rows)()

    def step() -> None:
        nonlocal mems, token
        with torch.no_grad(), _autocast(job):
            hidden, mems = model._forward(token, mems=mems)
            logits = torch.nn.functional.linear(hidden[-1], *_softmax(model, job))
        token = torch.multinomial(torch.softmax(logits.float(), -1), 1).T

    return step


JOBS = {"train": training, "evaluate": evaluation, "generate": generation}


def _model(folder: str, job: dict[str, Any]) -> Any:
    code = job["code"]
    return original.build(folder, job["experiment"], job["vocab_size"], code).to(_device())


def _forward(model: Any, job: dict[str, Any]) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that maps data, target and memory (or ``None``) to loss and memory."""
    forward = torch.compile(model) if job["form"] == "compile" else model
    if job["code"] == "nvidia":
        return forward

    def call(data: Any, target: Any, mems: Any) -> tuple[Any, Any]:
        loss, *mems = forward(data, target, *(mems or []))
        return loss, mems

    return call


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _autocast(job: dict[str, Any]) -> Any:
    if job["experiment"]["model"]["dtype"] == "float32":
        return contextlib.nullcontext()
    return torch.autocast(_device(), torch.bfloat16)


def _tokens(job: dict[str, Any], seg_len: int, rows: int) -> Callable[[], tuple]:
    """Returns a function that draws inputs and targets [T,B] of random tokens."""
    rng, vocab_size = np.random.default_rng(0), job["vocab_size"]

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        rank = np.exp(rng.uniform(0, np.log(vocab_size), (seg_len + 1, rows))).astype(np.int64)
        tokens = torch.from_numpy(np.minimum(rank, vocab_size - 1)).to(_device())
        return tokens[:-1], tokens[1:]

    return draw


def _softmax(model: Any, job: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weight and bias of the softmax, which has no clusters."""
    if job["code"] == "nvidia":
        return model.crit.out_layers_weights[0], model.crit.out_layers_biases[0]
    return model.crit.out_layers[0].weight, model.crit.out_layers[0].bias


def _full_memory(model: Any, job: dict[str, Any], mem_len: int, rows: int) -> Any:
    shape = (mem_len, rows, model.d_model)
    if job["code"] == "nvidia":  # one tensor, without the last layer's output
        return torch.randn((model.n_layer, *shape), device=_device())
    return [torch.randn(shape, device=_device()) for _ in range(model.n_layer + 1)]


if __name__ == "__main__":
    main()
