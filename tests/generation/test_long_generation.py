"""Generating thousands of tokens adds no device memory, and compiles nothing again."""

import dataclasses
import json
from typing import Any

import jax
import pytest
import tiny_models

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import ExperimentConfig, GenerateConfig
from txl_jax.data.vocab import Vocab
from txl_jax.generation.write import write_continuations
from txl_jax.model.transformer_xl import TransformerXL

LENGTH = 5000
"""Number of tokens; they are made in 79 pieces, of which the last is the shortest."""
SETTLED = 3
"""After this number of pieces, generation must add no memory and compile nothing."""

FORMS: dict[str, dict[str, Any]] = {
    "with memory": {},
    "without memory": {"attention": "absolute", "n_positions": 8},
}


@pytest.fixture
def compiled():
    """A list that collects the names of JAX's events of tracing, lowering and compiling."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
def test_five_thousand_tokens_take_no_more_memory_than_a_few(form, compiled, tmp_path, capsys):
    """``write_continuations`` calls a function after each piece; here it measures memory."""
    cfg = tiny_models.config(vocab_size=256, **FORMS[form])
    c = GenerateConfig(
        prompt="the", length=LENGTH, mem_len=8, temperature=1.0, repetition_penalty=1.2
    )
    lengths = {"mem_len": 0 if cfg.memory_free else 8}
    sections = {key: lengths for key in ("train", "validate", "evaluate")}
    exp = ExperimentConfig.from_dict({"model": dataclasses.asdict(cfg), **sections})
    exp = dataclasses.replace(exp, generate=c)
    params = tiny_models.variables(cfg)["params"]
    trained = TrainedModel(TransformerXL(cfg), params, Vocab.all_bytes(), exp, 0)
    in_use: list[int] = []
    compiled_by: list[int] = []

    def after_each_piece():
        in_use.append(sum(array.nbytes for array in jax.live_arrays()))
        compiled_by.append(len(compiled))
        return False

    write_continuations(trained, str(tmp_path), after_each_piece)
    (record,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(record)["tokens"] == LENGTH
    assert len(in_use) == len(compiled_by) == 79
    assert max(in_use) <= max(in_use[:SETTLED])
    assert compiled_by[0] > 0
    assert compiled_by[-1] == compiled_by[SETTLED - 1], compiled[compiled_by[SETTLED - 1] :]
