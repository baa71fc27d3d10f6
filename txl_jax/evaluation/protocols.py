"""Describes evaluation protocols, and lists simpler protocols to compare a protocol with."""

import dataclasses
import re
from typing import Any

import numpy as np
from jax.sharding import Mesh

from txl_jax.config import DynamicConfig, ProtocolConfig, TransformerXLConfig
from txl_jax.data.pieces import Split, as_pieces
from txl_jax.data.streams import Streams, ordered_streams
from txl_jax.model.precision import rounding
from txl_jax.model.ring import slots_of


def under_protocol(model: TransformerXLConfig, protocol: ProtocolConfig) -> TransformerXLConfig:
    """Returns the model's config with ``clamp_len`` and ``same_length`` of the protocol, if set."""
    keys = ("clamp_len", "same_length")
    changes = {key: x for key in keys if (x := getattr(protocol, key)) is not None}
    return dataclasses.replace(model, **changes)


def with_window(model: TransformerXLConfig) -> TransformerXLConfig:
    """Returns the model's config with attention limited to a window of M positions."""
    if model.memory_free:
        return model
    return dataclasses.replace(model, same_length=model.same_length or "pytorch")


def keeps_cache(model: TransformerXLConfig, protocol: ProtocolConfig) -> bool:
    """Tells whether memory holds projected keys and values, so that states are projected once."""
    return (
        not (model.scan_layers or model.memory_free)
        and protocol.mem_len > 0
        and not protocol.context_len  # the context is computed again in each segment
        and protocol.dynamic.rule == "none"  # new parameters would project differently
    )


def memory_slots(model: TransformerXLConfig, protocol: ProtocolConfig) -> int:
    """Returns the number of memory slots that attention reads: M, or the slots of a cache."""
    clamp_len = under_protocol(model, protocol).clamp_len
    if not keeps_cache(model, protocol):
        return protocol.mem_len
    return sum(slots_of(protocol.mem_len, protocol.seg_len, clamp_len))


def describe_history(protocol: ProtocolConfig) -> str:
    """Describes the history that a segment can see, such as ``memory 640`` or ``context 512``."""
    parts = [f"context {protocol.context_len}"] if protocol.context_len else []
    if protocol.mem_len or not parts:
        parts.append(f"memory {protocol.mem_len}")
    return " and ".join(parts)


def describe(protocol: ProtocolConfig, model: TransformerXLConfig, mesh: Mesh | None = None) -> str:
    """Describes the protocol in one line, without settings that have no effect on ``model``.

    The line ends with the model's arithmetic on the devices of ``mesh`` if it is not float32.
    """
    c, dynamic = under_protocol(model, protocol), protocol.dynamic
    parts = [f"{protocol.split} split", *_shape(protocol), describe_history(protocol)]
    # With a context, no query attends to positions before the text.
    if protocol.first_memory == "zeros" and protocol.mem_len and not protocol.context_len:
        parts.append("zeros before the first segment")
    if protocol.warm_start and protocol.batch_size > 1:  # no text precedes the first stream
        parts.append(f"warm start {protocol.warm_start}")
    if c.same_length:
        parts.append(f"window {c.same_length}")
    if c.clamp_len > 0 and c.segment_limit is None:  # absolute_per_layer has no clamp
        parts.append(f"clamp {c.clamp_len}")
    if protocol.temperature != 1:
        parts.append(f"temperature {protocol.temperature:g}")
    parts += _limit(protocol)
    if dynamic.rule != "none":
        parts.append(f"dynamic evaluation {dynamic.rule}, rate {dynamic.learning_rate:g}")
    if dynamic.rule == "rms":
        parts.append(f"decay {dynamic.decay:g}, epsilon {dynamic.epsilon:g}")
        parts.append(f"statistics of {dynamic.statistics} segments")
    return ", ".join(filter(None, [*parts, rounding(model, mesh)]))


def describe_targets(protocol: ProtocolConfig) -> str:
    """Describes the targets of a protocol in one line. Baselines depend only on the targets."""
    parts = [*_shape(protocol), *_limit(protocol)] if protocol.max_segments else []
    return ", ".join([f"{protocol.split} split", *parts])


def is_part(description: str) -> bool:
    """Tells whether a described protocol scores only a part of its split."""
    return re.search(r"first \d+ segments? only", description) is not None


def _shape(protocol: ProtocolConfig) -> list[str]:
    streams = "1 stream" if protocol.batch_size == 1 else f"{protocol.batch_size} streams"
    return [streams, f"segment {protocol.seg_len}"]


def _limit(protocol: ProtocolConfig) -> list[str]:
    n = protocol.max_segments
    return [f"first {n} segment{'s' * (n != 1)} only"] if n else []


def compared_protocols(protocol: ProtocolConfig) -> list[tuple[str, ProtocolConfig]]:
    """Returns the protocols that are compared, each with its name.

    They are the given protocol, this protocol without dynamic evaluation, and the latter without
    memory and context. A protocol that is equal to an earlier one is left out.
    """
    static = dataclasses.replace(protocol, dynamic=DynamicConfig())
    history, rule = describe_history(protocol), protocol.dynamic.rule
    named = [(f"{history}, dynamic {rule}", protocol)] if rule != "none" else []
    named.append((history, static))
    lengths = {"context": protocol.context_len, "memory": protocol.mem_len}
    if kinds := " and ".join(name for name, length in lengths.items() if length):
        none: dict[str, Any] = {"mem_len": 0, "context_len": 0, "warm_start": 0}
        named.append((f"no {kinds}", dataclasses.replace(static, same_length=False, **none)))
    return named


def drop_unused_limit(protocol: ProtocolConfig, split: Split) -> ProtocolConfig:
    """Removes ``max_segments`` from the protocol if the split does not have more segments."""
    if protocol.max_segments < _streams(protocol, split).n_segments:
        return protocol
    return dataclasses.replace(protocol, max_segments=0)


def target_indices(protocol: ProtocolConfig, split: Split) -> np.ndarray | None:
    """Returns the increasing indices of a split's targets, int [N].

    ``None`` stands for all tokens except the first one. Indices count from the first token of
    :func:`~txl_jax.data.pieces.flat_tokens`.
    """
    limit, pieces = protocol.max_segments, as_pieces(split)
    if not limit and pieces.shared:
        return None
    numbers = np.arange(len(pieces.ids), dtype=np.int32)
    streams = _streams(protocol, pieces.with_ids(numbers))
    n = streams.n_segments
    segments = map(streams.segment, range(min(limit or n, n)))
    return np.sort(np.concatenate([x.targets[x.weights > 0] for x in segments]))


def _streams(protocol: ProtocolConfig, split: Split) -> Streams:
    name = f"the {protocol.split} split"
    key = "config key evaluate.batch_size"
    return ordered_streams(split, protocol.batch_size, protocol.seg_len, name=name, key=key)
