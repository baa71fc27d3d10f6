"""Converts nested dicts of settings to sections, and to flat dicts with dotted keys."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from txl_jax.config.errors import UnknownKeyError, refusal
from txl_jax.config.fields import NAMED, Section, checked
from txl_jax.config.folders import expanded_paths, path_text
from txl_jax.messages import argument, names_flags, nearest, truncate

S = TypeVar("S", bound=Section)

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
"""The keys of settings by their names in other programs, for the error of an unknown key."""


def replace_nested(section: S, nested: Mapping[str, Any], prefix: str = "", root: Any = None) -> S:
    """Returns the section with the values of a nested mapping; converts text to a setting's type.

    In every ``file_path``, ``~`` becomes the home folder. Errors are those of
    :meth:`ExperimentConfig.from_dict`, and name the key with the section's ``prefix``. The error of
    an unknown key names the nearest key in ``root``, the section of all settings.
    """
    root, values = root or section, {}
    fields = {field.name: field for field in dataclasses.fields(cast(Any, section))}
    for name, value in nested.items():
        key, own = f"{prefix}{name}", getattr(section, name) if name in fields else None
        if isinstance(own, Section):
            if not isinstance(value, Mapping):
                rule = f"is a section of settings, not one setting; set {key}.NAME"
                raise refusal(key, value, rule)
            values[name] = replace_nested(own, value, f"{key}.", root)
        elif name not in fields:
            while isinstance(value, Mapping) and value:  # to the first leaf
                inner, value = next(iter(value.items()))
                key = f"{key}.{inner}"
            raise unknown_key(key, root)
        else:
            values[name] = checked(fields[name], key, value)
            if path := fields[name].metadata.get("path"):
                where, remote = f"config key {key}", fields[name].metadata["remote"]
                if prefix != "data.":
                    values[name] = expanded_paths(values[name], where, path == NAMED, remote)
                elif values[name]:  # stays as given, because the label of the corpus shows it
                    path_text(values[name], where, remote)
    return dataclasses.replace(section, **values)  # type: ignore[type-var]


def unknown_key(key: str, root: Any) -> UnknownKeyError:
    """Returns the error for a key that ``root``, the section of all settings, does not have."""
    known = list(flatten(dataclasses.asdict(root)))
    leaves = {name: name.rpartition(".")[2] for name in known}
    short = truncate(key)
    leaf = short.rpartition(".")[2]
    first = short.partition(".")[0]
    inside = [name for name in known if name.startswith(f"{first}.")]
    synonym = SYNONYMS.get(leaf.lower())
    if synonym and not ("." in short and leaf in leaves.values()):
        near = [synonym]
    else:
        among = known if leaf in leaves.values() else inside or known
        like = nearest(leaf, [leaves[name] for name in among])
        same_leaf = [name for name in among if leaves[name] == like]
        near = difflib.get_close_matches(short, same_leaf, n=1, cutoff=0.0)
    if near:
        fix = f"the nearest key is {near[0]!r}"
    elif inside:
        names = [name.removeprefix(f"{first}.") for name in inside]
        fix = f"the keys of {first} are {', '.join(names)}"
    else:
        sections = dict.fromkeys(k.partition(".")[0] for k in known if "." in k)
        everywhere = argument("mode", "settings") if names_flags() else "docs/settings.md"
        fix = f"{everywhere} lists the keys of {', '.join(sections)}"
    return UnknownKeyError(f"unknown config key {short!r}; {fix}")


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted key, with lists in place of tuples.

    Each item of a dict gets a key of its own. An empty dict inside a section is kept as a value.
    """
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and (value or not prefix):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat


def path_fields(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Yields every ``file_path`` of the section ``cls``, with its dotted key."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from path_fields(cast(type, field.type), f"{prefix}{field.name}.")
        elif field.metadata.get("path"):
            yield f"{prefix}{field.name}", field
