"""A second, slow and simple model in float64: loops over heads, queries, keys and words.

It follows the papers' formulas and uses no code of the package. It scores the position of each
query-key pair (Transformer-XL, section 3.3) without the shortcut of appendix B, and its adaptive
softmax scores every word of every cluster. Functions compute one row of a batch at a time:

  params  the package's parameters as nested dicts of numpy arrays
  cfg     only attributes are read: n_layer, d_head, attention, pre_lnorm, cutoffs, …
  memory  for each layer the list of its past inputs, oldest first, without padding
"""

import dataclasses
import itertools
import math
import re

import numpy as np

ANY = None
"""Marks a setting for which the formulas hold with every value."""

UNUSED = {
    # Initial values, and settings that only training uses.
    *("init_std", "proj_init_std", "sample_softmax", "dropout_mask"),
    *("dropout", "dropout_input", "dropout_output", "dropout_qkv"),
    *("dropout_embedding", "dropatt", "dropout_latent"),
    # Settings of how results are computed; they change results only by rounding.
    *("matmul_precision", "scan_layers", "remat", "kernel"),
}
"""Settings that change no formula here."""

KNOWN = {
    **dict.fromkeys(("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner"), ANY),
    **dict.fromkeys(("d_embed", "n_positions", "clamp_len", "norm_epsilon", "gate_bias"), ANY),
    **dict.fromkeys(("cutoffs", "div_val", "tie_weight", "tie_projs", "proj_same_dim"), ANY),
    "attention": ("relative", "shaw", "absolute", "absolute_per_layer", "shared_projection"),
    "pre_lnorm": (False, True),
    "final_norm": (False, True),
    "activation": ("relu", "gelu"),
    "attention_bias": (False, True),
    "gate": (None, "gru"),
    "untie_r": (False, True),
    "same_length": (False, "pytorch", "tf"),
    "mixtures": (1,),
    "past_decode": (False,),
    "dtype": ("auto", "float32"),
    **dict.fromkeys(UNUSED, ANY),
}
"""All settings of the model, each with the values that the formulas here cover."""

PARAMETERS = re.compile(
    r"layer_\d+/attention/(query|key|value|output|position|u|distance|(value|output|distance)_bias)"
    r"|layer_\d+/feed_forward/(inner|outer)/(kernel|bias)"
    r"|layer_\d+/gate_(attention|feed_forward)/(from_output|from_input|bias)"
    r"|(layer_\d+/norm_(attention|feed_forward)|norm_output)/(scale|bias)"
    r"|layer_\d+/positions|u|v|cluster_(weight|bias)"
    r"|(embedding|softmax_weight|softmax_bias|(embedding|softmax)_projection)(_\d+)?"
)
"""The paths of all parameters that the formulas here read."""


def check_known(params, cfg):
    """Raises NotImplementedError for a setting, value or parameter that no formula here covers."""
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        known = KNOWN.get(field.name, ())
        if known is not ANY and value not in known:
            raise NotImplementedError(
                f"tests/helpers/reference.py has no model.{field.name} = {value!r}"
            )
    for path in paths(params):
        if not PARAMETERS.fullmatch(path):
            raise NotImplementedError(
                f"tests/helpers/reference.py does not read the parameter {path}"
            )


def paths(tree, before=""):
    """The paths of all leaves of nested dicts, with slashes."""
    for name, value in tree.items():
        yield from paths(value, f"{before}{name}/") if isinstance(value, dict) else [before + name]


def float64(tree):
    """The same nested dict with float64 arrays."""
    if isinstance(tree, dict):
        return {name: float64(value) for name, value in tree.items()}
    return np.asarray(tree, dtype=np.float64)


def sinusoid(distance, cfg):
    """R_d, the sinusoid [D] of distance d: D/2 sines, then D/2 cosines, of d / 10000^(2k/D).

    k counts the sines from 0, and the cosines likewise. A positive ``clamp_len`` limits d.
    """
    if cfg.clamp_len > 0:
        distance = min(distance, cfg.clamp_len)
    angles = [distance / 10000 ** (2 * k / cfg.d_model) for k in range(cfg.d_model // 2)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def layer_norm(x, p, cfg):
    """(x - mean) / sqrt(variance + epsilon), with gain and bias."""
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return p["scale"] * (x - mean) / math.sqrt(variance + cfg.norm_epsilon) + p["bias"]


def feed_forward(x, p, cfg):
    """W2 f(W1 x + b1) + b2, with f relu, or gelu in its tanh approximation."""
    activations = {
        "relu": lambda z: np.maximum(z, 0.0),
        "gelu": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    }
    hidden = activations[cfg.activation](x @ p["inner"]["kernel"] + p["inner"]["bias"])
    return hidden @ p["outer"]["kernel"] + p["outer"]["bias"]


def joined(x, y, p):
    """x + y if ``p`` is ``None``, else the GRU gate of x and relu(y) with the parameters ``p``."""
    if p is None:
        return x + y
    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    y, w, u = np.maximum(y, 0.0), p["from_output"], p["from_input"]
    r = sigmoid(y @ w[:, 0] + x @ u[:, 0])
    z = sigmoid(y @ w[:, 1] + x @ u[:, 1] - p["bias"])
    h = np.tanh(y @ w[:, 2] + (r * x) @ u[:, 2])
    return (1 - z) * x + z * h


def attention_mask(i, n_past, mem_len, same_length, starts):
    """Positions of [memory; segment] that query i of the segment can attend to, as a list.

    ``n_past``: number of states in memory.
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


def score(h_i, h_j, distance, n, p, u, v, cfg):
    """The score of one query and one key in head n, before the division by sqrt(H)."""
    q, k = h_i @ p["query"][:, n], h_j @ p["key"][:, n]
    if cfg.attention == "relative":
        r = sinusoid(distance, cfg) @ p["position"][:, n]
        return q @ k + q @ r + u[n] @ k + v[n] @ r  # (a) + (b) + (c) + (d)
    if cfg.attention == "shaw":
        rows = len(p["distance"])
        if cfg.clamp_len > 0:
            rows = min(rows, cfg.clamp_len)
        d = min(distance, rows - 1)
        return q @ k + q @ p["distance"][d, n] + p["u"][n] @ k + p["distance_bias"][d, n]
    if cfg.attention == "shared_projection":
        q = q + sinusoid(0, cfg) @ p["query"][:, n]
        k = k + sinusoid(distance, cfg) @ p["key"][:, n]
    return q @ k


def attention(queries, past_and_present, p, u, v, cfg, mem_len, starts):
    """The result of attention for each query: a list of T vectors [D]."""
    n_past = len(past_and_present) - len(queries)
    gathered = []
    for i, h_i in enumerate(queries):
        total = np.zeros(cfg.d_model)
        for n in range(cfg.n_head):
            keys = attention_mask(i, n_past, mem_len, cfg.same_length, starts)
            scores = []
            for j in keys:
                a = score(h_i, past_and_present[j], n_past + i - j, n, p, u, v, cfg)
                scores.append(a / math.sqrt(cfg.d_head))
            exponentials = [math.exp(a - max(scores)) for a in scores]
            for j, e in zip(keys, exponentials, strict=True):
                value = past_and_present[j] @ p["value"][:, n]
                if cfg.attention_bias:
                    value = value + p["value_bias"][n]
                total = total + e / sum(exponentials) * (value @ p["output"][n])
        gathered.append(total + (p["output_bias"] if cfg.attention_bias else 0.0))
    return gathered


def core(params, cfg, inputs, memory, mem_len, starts=()):
    """Output states (list of T vectors) and new memory of one row.

    Args:
      inputs: list of T vectors [D], without padding.
      memory: L lists of vectors [D].
      mem_len: M, the largest number of positions that memory keeps.
      starts: positions where a new episode begins; earlier positions are neither seen nor kept.
    """
    check_known(params, cfg)
    states, new_memory = list(inputs), []
    from_end = range(len(states) - 1, -1, -1)  # absolute forms count positions from the end
    if cfg.attention == "absolute":
        states = [h + sinusoid(e, cfg) for h, e in zip(states, from_end, strict=True)]
    for n in range(cfg.n_layer):
        p, u, v = params[f"layer_{n}"], params.get("u"), params.get("v")
        if cfg.attention == "relative" and cfg.untie_r:
            u, v = u[n], v[n]
        kept = memory[n] + states
        if starts:
            kept = states[max(starts) :]
        new_memory.append(kept[-mem_len:] if mem_len else [])

        if cfg.attention == "absolute_per_layer":
            table = p["positions"]
            states = [h + table[len(table) - 1 - e] for h, e in zip(states, from_end, strict=True)]
        everything, queries = memory[n] + states, states
        if cfg.pre_lnorm:
            everything = [layer_norm(h, p["norm_attention"], cfg) for h in everything]
            if cfg.attention not in ("absolute", "absolute_per_layer"):
                queries = everything[len(memory[n]) :]
        a = attention(queries, everything, p["attention"], u, v, cfg, mem_len, starts)
        after = []
        for h, a_i in zip(states, a, strict=True):
            h = joined(h, a_i, p.get("gate_attention"))
            if not cfg.pre_lnorm:
                h = layer_norm(h, p["norm_attention"], cfg)
            x = layer_norm(h, p["norm_feed_forward"], cfg) if cfg.pre_lnorm else h
            h = joined(h, feed_forward(x, p["feed_forward"], cfg), p.get("gate_feed_forward"))
            if not cfg.pre_lnorm:
                h = layer_norm(h, p["norm_feed_forward"], cfg)
            after.append(h)
        states = after
    if cfg.final_norm:
        states = [layer_norm(h, params["norm_output"], cfg) for h in states]
    return states, new_memory


def clusters(cfg):
    """(first word, last word + 1) of the head cluster and of each tail cluster."""
    edges = [0, *cfg.cutoffs, cfg.vocab_size]
    return list(itertools.pairwise(edges))


def projection(params, cfg, i, of_softmax):
    """The embedding's or softmax's projection [d_i,D] from cluster i's width to the model's."""
    width = (cfg.d_embed or cfg.d_model) // cfg.div_val**i
    if width == cfg.d_model and (cfg.div_val == 1 or not cfg.proj_same_dim):
        return np.eye(cfg.d_model)
    tied = i < len(cfg.tie_projs) and cfg.tie_projs[i]
    if of_softmax and not tied:
        return params[f"softmax_projection_{i}"]
    return params["embedding_projection" if cfg.div_val == 1 else f"embedding_projection_{i}"]


def embedding(params, cfg, token):
    """The input vector [D] of one word."""
    for i, (first, end) in enumerate(clusters(cfg)):
        if first <= token < end:
            if cfg.div_val == 1:
                row = params["embedding"][token]
            else:
                row = params[f"embedding_{i}"][token - first]
            return math.sqrt(cfg.d_model) * row @ projection(params, cfg, i, of_softmax=False)
    raise ValueError(f"no word {token}")


def words_of_cluster(params, cfg, i):
    """Output weights [size_i,d_i] and biases [size_i] of the words of cluster i."""
    name = "embedding" if cfg.tie_weight else "softmax_weight"
    if cfg.div_val == 1:
        first, end = clusters(cfg)[i]
        return params[name][first:end], params["softmax_bias"][first:end]
    return params[f"{name}_{i}"], params[f"softmax_bias_{i}"]


def log_softmax(z):
    """z - log(sum(exp(z)))."""
    return z - z.max() - math.log(np.exp(z - z.max()).sum())


def scores_of_words(params, cfg, h):
    """Scores [V] of all words after the state ``h``: logits, or log-probabilities with clusters.

    With clusters, a score is log p(cluster) + log p(word | cluster).
    """
    check_known(params, cfg)
    logits = []
    for i in range(len(cfg.cutoffs) + 1):
        weight, bias = words_of_cluster(params, cfg, i)
        projected = projection(params, cfg, i, of_softmax=True) @ h
        logits.append(weight @ projected + bias)
        if i == 0 and cfg.cutoffs:
            to_tails = params["cluster_weight"] @ projected + params["cluster_bias"]
    if not cfg.cutoffs:
        return logits[0]
    head = log_softmax(np.concatenate([logits[0], to_tails]))
    n_words = cfg.cutoffs[0]
    tails = [head[n_words + i] + log_softmax(logits[1 + i]) for i in range(len(cfg.cutoffs))]
    return np.concatenate([head[:n_words], *tails])


def logits(params, cfg, tokens, memory, mem_len, starts=()):
    """Scores of all words (list of T vectors [V]) and new memory of one row of token ids."""
    embedded = [embedding(params, cfg, token) for token in tokens]
    states, memory = core(params, cfg, embedded, memory, mem_len, starts)
    return [scores_of_words(params, cfg, h) for h in states], memory


def nll(params, cfg, tokens, targets, memory, mem_len, starts=(), context_len=0):
    """-log p(target) in nats (list of T numbers) and new memory of one row.

    The first ``context_len`` tokens are read but not scored; ``targets`` has no ids for them.
    """
    scores, memory = logits(params, cfg, tokens, memory, mem_len, starts)
    pairs = zip(scores[context_len:], targets, strict=True)
    return [-log_softmax(z)[target] for z, target in pairs], memory
