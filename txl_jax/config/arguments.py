"""Names of settings in other programs, and arguments that have the values of a run by default."""

from collections.abc import Iterable
from typing import Any

from txl_jax.config.errors import ConfigError
from txl_jax.messages import nearest_or_all

_NAMES = {
    "model.d_inner": "d_ff ffn_dim ffn_size intermediate_size mlp_dim",
    "model.d_model": "hidden hidden_dim hidden_size n_embd width",
    "model.dropatt": "attention_dropout attn_dropout",
    "model.dtype": "amp bf16 fp16 half mixed_precision precision",
    "model.matmul_precision": "allow_tf32 float32_matmul_precision tf32",
    "model.n_head": "heads n_heads num_heads",
    "model.n_layer": "depth layers n_layers num_layers",
    "model.remat": "checkpointing gradient_checkpointing rematerialisation",
    "optimizer.b1": "beta1 beta_1",
    "optimizer.b2": "beta2 beta_2",
    "optimizer.clip_norm": "clip grad_clip gradient_clip max_grad_norm",
    "optimizer.learning_rate": "alpha lr rate",
    "optimizer.name": "optim optimizer",
    "optimizer.weight_decay": "decay wd",
    "optimizer.warmup_steps": "warmup",
    "train.batch_size": "batch bs minibatch n_batch",
    "train.mem_len": "mem mem_length memory memory_len memory_length",
    "train.micro_batches": "accumulation accumulate_steps grad_accum gradient_accumulation",
    "train.num_seeds": "seeds",
    "train.seg_len": "block_size bptt chunk context_length seq_len sequence_length tgt_len",
    "train.steps": "epochs iterations iters max_step max_steps n_steps num_steps",
    "evaluate.baselines": "baseline",
    "generate.length": "max_new_tokens max_tokens n_tokens num_tokens",
    "data.field": "column text_column text_field text_key",
    "data.path": "corpus dataset file folder text",
    "data.vocab": "token tokens tokenizer",
}
SYNONYMS = {name: key for key, names in _NAMES.items() for name in names.split()}
"""The settings by their names in other programs, for the error of an unknown key."""


class ArgumentError(ConfigError, TypeError):
    """A keyword that a function does not have; the message names the nearest one."""


class Unset:
    """The default of an argument that then has the run's value; ``None`` may be a value itself."""

    def __repr__(self) -> str:
        return "<the run's>"


RUN: Any = Unset()


def given(arguments: dict[str, Any], *without: str) -> dict[str, Any]:
    """Returns the arguments in ``locals()`` that the caller gave; others have the run's value."""
    return {k: v for k, v in arguments.items() if v is not RUN and k not in ("self", *without)}


def check_names(function: str, names: Iterable[str], known: list[str]) -> None:
    """Raises ArgumentError for a name that is not known."""
    for name in names:
        if name not in known:
            meant = SYNONYMS.get(name.lower(), "").rpartition(".")[2]
            fix = nearest_or_all(meant if meant in known else name, known)
            raise ArgumentError(f"{function}() has no argument {name!r}; {fix}")
