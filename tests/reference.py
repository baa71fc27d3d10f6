"""The model once more, slow and obvious: loops over heads, queries and keys, in float64.

Written from the formulas of the paper (section 3.3, appendix B is not used: every position
projection is computed for every pair). No code of the package is used. One row at a time:

  params  the package's parameters as nested dicts of numpy arrays
  cfg     only attributes are read: n_layer, d_head, pre_lnorm, untie_r, same_length, clamp_len, …
  memory  for each layer the list of its past inputs, oldest first, as long as it is: no padding
"""

import math

import numpy as np


def float64(tree):
    """The same nested dict with float64 arrays."""
    if isinstance(tree, dict):
        return {name: float64(value) for name, value in tree.items()}
    return np.asarray(tree, dtype=np.float64)


def sinusoid(distance, d_model):
    """R_d: D/2 sines, then D/2 cosines, of d / 10000^(2k/D)."""
    angles = [distance / 10000 ** (2 * k / d_model) for k in range(d_model // 2)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def layer_norm(x, p):
    """(x - mean) / sqrt(variance + 1e-5), with gain and bias."""
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return p["scale"] * (x - mean) / math.sqrt(variance + 1e-5) + p["bias"]


def feed_forward(x, p):
    """W2 relu(W1 x + b1) + b2."""
    hidden = np.maximum(x @ p["inner"]["kernel"] + p["inner"]["bias"], 0.0)
    return hidden @ p["outer"]["kernel"] + p["outer"]["bias"]


def visible(i, n_past, mem_len, same_length, starts):
    """Positions of [memory; segment] that query i of the segment may attend to, as a list.

    ``starts``: positions of the segment where a new episode begins.
    """
    here = n_past + i
    first = 0
    for start in starts:
        if start <= i:
            first = n_past + start
    reachable = []
    for j in range(first, here + 1):
        distance = here - j
        if same_length == "pytorch" and distance >= mem_len:
            continue
        if same_length == "tf" and distance > mem_len:
            continue
        reachable.append(j)
    return reachable


def attention(queries, past_and_present, p, u, v, cfg, mem_len, starts):
    """What each query gathers: a list of T vectors [D]."""
    n_past = len(past_and_present) - len(queries)
    gathered = []
    for i, h_i in enumerate(queries):
        total = np.zeros(cfg.d_model)
        for n in range(cfg.n_head):
            q = h_i @ p["query"][:, n]
            keys = visible(i, n_past, mem_len, cfg.same_length, starts)
            scores = []
            for j in keys:
                distance = n_past + i - j
                if cfg.clamp_len > 0:
                    distance = min(distance, cfg.clamp_len)
                k = past_and_present[j] @ p["key"][:, n]
                r = sinusoid(distance, cfg.d_model) @ p["position"][:, n]
                terms = q @ k + q @ r + u[n] @ k + v[n] @ r  # (a) + (b) + (c) + (d)
                scores.append(terms / math.sqrt(cfg.d_head))
            exponentials = [math.exp(score - max(scores)) for score in scores]
            for j, e in zip(keys, exponentials, strict=True):
                value = past_and_present[j] @ p["value"][:, n]
                total = total + e / sum(exponentials) * (value @ p["output"][n])
        gathered.append(total)
    return gathered


def core(params, cfg, inputs, memory, mem_len, starts=()):
    """Output states (list of T vectors) and new memory of one row.

    Args:
      inputs: list of T vectors [D], real tokens only.
      memory: L lists of vectors [D].
      mem_len: M, the most that memory keeps.
      starts: positions where a new episode begins; nothing is seen or remembered across.
    """
    states, new_memory = list(inputs), []
    for n in range(cfg.n_layer):
        p = params[f"layer_{n}"]
        u, v = (params["u"][n], params["v"][n]) if cfg.untie_r else (params["u"], params["v"])
        kept = memory[n] + states
        if starts:
            kept = states[max(starts) :]
        new_memory.append(kept[-mem_len:] if mem_len else [])

        if cfg.pre_lnorm:
            everything = [layer_norm(h, p["norm_attention"]) for h in memory[n] + states]
            queries = everything[len(memory[n]) :]
        else:
            everything, queries = memory[n] + states, states
        a = attention(queries, everything, p["attention"], u, v, cfg, mem_len, starts)
        after = []
        for h, a_i in zip(states, a, strict=True):
            h = h + a_i
            if cfg.pre_lnorm:
                h = h + feed_forward(layer_norm(h, p["norm_feed_forward"]), p["feed_forward"])
            else:
                h = layer_norm(h, p["norm_attention"])
                h = layer_norm(h + feed_forward(h, p["feed_forward"]), p["norm_feed_forward"])
            after.append(h)
        states = after
    return states, new_memory


def logits(params, cfg, tokens, memory, mem_len, starts=()):
    """Logits (list of T vectors [V]) and new memory of one row of token ids."""
    embedded = [math.sqrt(cfg.d_model) * params["embedding"][token] for token in tokens]
    states, memory = core(params, cfg, embedded, memory, mem_len, starts)
    weight = params["embedding"] if cfg.tie_weight else params["softmax_weight"]
    return [weight @ h + params["softmax_bias"] for h in states], memory


def nll(params, cfg, tokens, targets, memory, mem_len, starts=()):
    """-log p(target) in nats (list of T numbers) and new memory of one row."""
    scores, memory = logits(params, cfg, tokens, memory, mem_len, starts)
    losses = []
    for z, target in zip(scores, targets, strict=True):
        losses.append(math.log(np.exp(z - z.max()).sum()) + z.max() - z[target])
    return losses, memory
