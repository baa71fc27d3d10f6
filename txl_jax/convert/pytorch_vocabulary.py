"""Embedding and softmax of the PyTorch codes: clusters, projections, and what is tied to what.

    theirs                                    ours
    word_emb.emb_layers.i.weight [size_i,d_i] embedding or embedding_i
    word_emb.emb_projs.i   [D,d_i]            embedding_projection or embedding_projection_i [d_i,D]
    crit.out_layers.i.bias [size_i]           softmax_bias or softmax_bias_i
    crit.out_layers.i.weight                  softmax_weight or .._i; absent when tied
    crit.out_projs.i       [D,d_i]            softmax_projection_i [d_i,D]; absent when tied
    crit.cluster_weight, cluster_bias [C,..]  the same, rows reversed: there tail i's logit is
                                              column -i of the head, here column cutoffs[0]+i-1

With ``div_val`` 1 there is one embedding, and only output projections are counted by cluster.
NVIDIA's names: ``crit.out_layers_biases.i``, ``crit.out_layers_weights.i`` where untied, and
``crit.shared_out_projs.i`` for the embedding's projections once more. A model trained with a
sampled softmax has ``out_layer`` in place of ``crit``.
"""

import numpy as np

from txl_jax.checkpoint.tensors import Tensors
from txl_jax.config import TransformerXLConfig
from txl_jax.convert.tensors import parameter_clusters, tied
from txl_jax.model.adaptive import clusters


def vocabulary(tensors: Tensors, c: TransformerXLConfig) -> dict[str, np.ndarray]:
    """All parameters that belong to words, by their names here."""
    bias, weight = _output_names(tensors, c)
    found: dict[str, np.ndarray] = {}
    for i, (end, part) in enumerate(parameter_clusters(c)):
        name, shape = f"word_emb.emb_layers.{i}.weight", (part.size, part.width)
        embedding = found["embedding" + end] = tensors.take(name, shape)
        found["softmax_bias" + end] = tensors.take(bias.format(i), (part.size,))
        if c.tie_weight:
            tensors.alias(weight.format(i), name, embedding, "tie_weight is True")
        else:
            found["softmax_weight" + end] = tensors.take(weight.format(i), shape)
        if part.projected:
            name = f"word_emb.emb_projs.{i}"
            matrix = tensors.take(name, (c.d_model, part.width))
            found["embedding_projection" + end] = matrix.T
            tensors.alias(f"crit.shared_out_projs.{i}", name, matrix, "is another name of it")
    return found | _output_projections(tensors, c, found) | _cluster_logits(tensors, c)


def _output_names(tensors: Tensors, c: TransformerXLConfig) -> tuple[str, str]:
    """Names of output bias and weight of cluster {}."""
    if "crit.out_layers_biases.0" in tensors:
        return "crit.out_layers_biases.{}", "crit.out_layers_weights.{}"
    if c.sample_softmax and "out_layer.bias" in tensors:
        return "out_layer.bias", "out_layer.weight"
    return "crit.out_layers.{}.bias", "crit.out_layers.{}.weight"


def _output_projections(
    tensors: Tensors, c: TransformerXLConfig, found: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    own = {}
    for i, part in enumerate(clusters(c)):
        if not part.projected:
            continue
        name = f"crit.out_projs.{i}"
        if tied(c, i):
            k, end = (i, f"_{i}") if c.div_val > 1 else (0, "")
            matrix = found["embedding_projection" + end].T
            tensors.alias(name, f"word_emb.emb_projs.{k}", matrix, f"tie_projs[{i}] is True")
        else:
            own[f"softmax_projection_{i}"] = tensors.take(name, (c.d_model, part.width)).T
    return own


def _cluster_logits(tensors: Tensors, c: TransformerXLConfig) -> dict[str, np.ndarray]:
    n = len(c.cutoffs)
    if not n:
        return {}
    shape = (n, clusters(c)[0].width)
    return {
        "cluster_weight": tensors.take("crit.cluster_weight", shape)[::-1],
        "cluster_bias": tensors.take("crit.cluster_bias", (n,))[::-1],
    }
