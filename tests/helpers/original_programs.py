"""Runs the published PyTorch programs; a test is skipped if its program or torch is missing.

The environment variables ``TXL_AUTHORS_CODE`` and ``TXL_NVIDIA_CODE`` name the folders with the
authors' and NVIDIA's code. For ``tests/recorded/record.py``, the flags ``--original`` and
``--nvidia`` name these folders. Hugging Face's library has the model up to transformers 4.35.
"""

import functools
import importlib.util
import json
import os
import pathlib
import sys
import tempfile

import numpy as np
import pytest
from places import RECORDED

FOLDERS = {"pytorch": "TXL_AUTHORS_CODE", "nvidia": "TXL_NVIDIA_CODE"}


def model(program, folder):
    """Loads the program's model from ``folder``, whose files must have exactly its tensors."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if program == "huggingface":
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        if not hasattr(transformers, "TransfoXLLMHeadModel"):
            pytest.skip(f"transformers {transformers.__version__} has no TransfoXLLMHeadModel")
        made, found = transformers.TransfoXLLMHeadModel.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(found.values()), found
        return made.eval()
    from safetensors.torch import load_file

    if not os.environ.get(FOLDERS[program]):
        pytest.skip(f"{FOLDERS[program]} does not name the program's folder")
    arguments = json.loads((folder / "args.json").read_text())
    made = code(program).MemTransformerLM(**arguments).eval()
    with torch.no_grad():
        made.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    made.crit.keep_order = True
    return made


@functools.cache
def code(program):
    """The program's module, from a copy that a current PyTorch can run."""
    spec = importlib.util.spec_from_file_location("record", RECORDED / "record.py")
    assert spec is not None
    assert spec.loader is not None
    record = sys.modules["record"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    files = {"pytorch": record.KIMIYOUNG_FILES, "nvidia": record.NVIDIA_FILES}[program]
    source = pathlib.Path(os.environ[FOLDERS[program]])
    copied = pathlib.Path(tempfile.mkdtemp()) / program
    return record.load_code(source, copied, files, "mem_transformer")["mem_transformer"]


def losses(program, made, segments, mems=None):
    """For each segment, the losses of its targets in nats [B,T]; memory is carried along."""
    import torch

    found = []
    for inputs, targets in segments:
        x, y = (torch.tensor(np.asarray(ids), dtype=torch.long) for ids in (inputs, targets))
        with torch.no_grad():
            if program == "huggingface":
                result = made(input_ids=x, mems=mems)
                mems = result.mems
                found.append(-result.prediction_scores.gather(2, y[..., None])[..., 0].numpy())
                continue
            x, y = x.T.contiguous(), y.T.contiguous()
            if program == "nvidia":
                loss, mems = made(x, y, mems)
            else:
                loss, *mems = made(x, y, *(mems or ()))
        found.append(loss.T.numpy())
    return found
