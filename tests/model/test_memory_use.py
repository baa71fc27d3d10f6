"""The loss and its gradient for a large vocabulary use too little memory to hold [B,T,V] logits.

The programs are compiled but not run. XLA reports the memory that they need in addition to inputs
and results.
"""

import jax
import jax.numpy as jnp
import pytest
import tiny_models as tiny
from tiers import rest_slow

import txl_jax

B, T = 8, 512

VOCABULARIES = {
    "wt103": (267_735, (20_000, 40_000, 200_000)),
    "wt103_without_clusters": (267_735, ()),
    "lm1b": (793_471, (60_000, 100_000, 640_000)),
}


def temporary_bytes(cfg, function):
    """Bytes of temporary memory of ``function(params, tokens)``, compiled for tokens [8,512]."""
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    compiled = tiny.quick(function).lower(tiny.shapes(cfg), tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


CASES = [
    ("wt103", 4, "gradient"),
    ("wt103_without_clusters", 1, "gradient"),
    ("lm1b", 4, "gradient"),
    ("wt103", 1, "gradient"),
    ("wt103", 4, "loss"),
    ("lm1b", 1, "loss"),
    ("lm1b", 1, "gradient"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "div_val", "what"), rest_slow(3, CASES))
def test_a_segment_needs_less_than_a_tenth_of_its_logits(name, div_val, what):
    """The measured memory can include gradients as large as the weights.

    On a CPU, it is 4 to 7% of the bytes of the logits.
    """
    vocab_size, cutoffs = VOCABULARIES[name]
    cfg = tiny.config(
        vocab_size=vocab_size, cutoffs=cutoffs, n_layer=1, d_model=64, div_val=div_val
    )
    model = txl_jax.TransformerXL(cfg)

    def loss(params, tokens):
        mems = model.init_mems(B, 0)
        return model.apply({"params": params}, tokens, tokens, mems, method="nll")[0].mean()

    function = loss if what == "loss" else jax.value_and_grad(loss)
    assert temporary_bytes(cfg, function) < B * T * vocab_size * 4 / 10
