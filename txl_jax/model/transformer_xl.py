"""The assembled model: tokens and memory in, scores and new memory out."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ConfigError, TransformerXLConfig
from txl_jax.model import masks
from txl_jax.model import memory as memory_lib
from txl_jax.model.block import Block
from txl_jax.model.memory import Memory
from txl_jax.model.positions import distance_encodings


class TransformerXL(nn.Module):
    """Transformer-XL (Dai et al. 2019) over tokens, or over embeddings of the caller's own.

    Example:
      >>> import jax, txl_jax
      >>> cfg = txl_jax.TransformerXLConfig(
      ...     vocab_size=11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16)
      >>> model = txl_jax.TransformerXL(cfg)
      >>> mems = model.init_mems(batch_size=1, mem_len=4)
      >>> tokens = jax.numpy.array([[3, 1, 4]])
      >>> variables = model.init(jax.random.key(0), tokens, mems)
      >>> logits, mems = model.apply(variables, tokens, mems)
      >>> logits.shape, mems.hidden.shape, int(mems.filled[0])
      ((1, 3, 11), (2, 1, 4, 8), 3)

    Every method takes ``train=True`` with ``rngs={"dropout": key}`` for dropout, ``reset``
    (bool [B]: this stream starts anew with this segment; bool [B,T]: a new episode starts at
    this position and nothing attends across it) and ``lengths`` (int32 [B]: real tokens of
    right-padded rows; memory takes the last M real states). Rows never touch one another.
    """

    cfg: TransformerXLConfig

    def setup(self):
        """Declares the parameters."""
        c = self.cfg
        init = nn.initializers.normal(c.init_std)
        if c.vocab_size is not None:
            self.embedding = self.param("embedding", init, (c.vocab_size, c.d_model))
            if not c.tie_weight:
                self.softmax_weight = self.param("softmax_weight", init, (c.vocab_size, c.d_model))
            self.softmax_bias = self.param("softmax_bias", nn.initializers.zeros, (c.vocab_size,))
        biases = (c.n_layer,) if c.untie_r else ()
        self.u = self.param("u", init, (*biases, c.n_head, c.d_head))
        self.v = self.param("v", init, (*biases, c.n_head, c.d_head))
        self.layers = [Block(c, name=f"layer_{n}") for n in range(c.n_layer)]
        self.dropout = nn.Dropout(c.dropout)

    def init_mems(self, batch_size: int, mem_len: int) -> Memory:
        """An empty memory of M slots for B streams; needs no parameters, works unbound."""
        c = self.cfg
        return memory_lib.make(c.n_layer, batch_size, mem_len, c.d_model, c.dtype)

    def __call__(self, tokens, mems, *, train: bool = False, reset=None, lengths=None):
        """Logits and new memory: float32 [B,T,V], :class:`Memory`.

        Args:
          tokens: int32 [B,T].
          mems: from :meth:`init_mems` or from the segment before; its M is the memory length.

        Raises:
          ValueError: shapes that do not fit one another.
        """
        hidden, mems = self._encode(tokens, mems, train, reset, lengths)
        return self._logits(hidden), mems

    def nll(self, tokens, targets, mems, *, train: bool = False, reset=None, lengths=None):
        """Negative log-likelihood of the targets in nats, float32 [B,T], and new memory.

        Args:
          tokens, targets: int32 [B,T]; the target of a token is the one that follows it.
          mems: as in :meth:`__call__`.
        """
        if targets.shape != tokens.shape:
            raise ValueError(f"targets {targets.shape} and tokens {tokens.shape} differ in shape")
        hidden, mems = self._encode(tokens, mems, train, reset, lengths)
        logits = self._logits(hidden)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen, mems

    def core(self, embeddings, mems, *, train: bool = False, reset=None, lengths=None):
        """The layers alone, no vocabulary: [B,T,D] in, [B,T,D] out, and new memory.

        Embeddings are used as they are (the token path multiplies its own by sqrt(D)).
        """
        c = self.cfg
        self._check(embeddings, mems, reset, lengths)
        seg_len, mem_len = embeddings.shape[1], mems.mem_len
        since_reset = None
        if reset is not None and reset.ndim == 1:
            mems, reset = memory_lib.forget(mems, reset), None
        elif reset is not None:
            since_reset = masks.since_reset(reset, lengths)
        allowed = masks.allowed(seg_len, mems.filled, mem_len, c.same_length, reset)
        r = distance_encodings(mem_len + seg_len, c.d_model, c.clamp_len).astype(c.dtype)
        r = self.dropout(r, deterministic=not train)
        h = self.dropout(embeddings.astype(c.dtype), deterministic=not train)
        remembered = jax.lax.stop_gradient(mems.hidden)  # SG(m) of the paper, section 3.2
        layer_inputs = []
        for n, layer in enumerate(self.layers):
            layer_inputs.append(h)
            u, v = (self.u[n], self.v[n]) if c.untie_r else (self.u, self.v)
            h = layer(h, remembered[n], r, u, v, allowed, train)
        h = self.dropout(h, deterministic=not train)
        return h, memory_lib.update(mems, layer_inputs, lengths, since_reset)

    def _encode(self, tokens, mems, train, reset, lengths):
        c = self.cfg
        if c.vocab_size is None:
            raise ConfigError("model.vocab_size is None: tokens need it; method='core' does not")
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers [B,T], not {tokens.dtype} {tokens.shape}")
        embeddings = jnp.asarray(self.embedding)[tokens].astype(c.dtype) * c.d_model**0.5
        return self.core(embeddings, mems, train=train, reset=reset, lengths=lengths)

    def _logits(self, hidden):
        weight = self.embedding if self.cfg.tie_weight else self.softmax_weight
        logits = jnp.einsum(
            "btd,vd->btv", hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32
        )
        return logits + self.softmax_bias

    def _check(self, embeddings, mems, reset, lengths):
        b, t = embeddings.shape[:2]
        n_layer, rows, _, width = mems.hidden.shape
        want = (self.cfg.n_layer, b, self.cfg.d_model)
        if (n_layer, rows, width) != want or mems.filled.shape != (b,):
            raise ValueError(
                f"mems.hidden {mems.hidden.shape} and filled {mems.filled.shape} do not fit a batch"
                f" of {b}: expected [{want[0]},{b},M,{want[2]}] and [{b}], as init_mems makes them"
            )
        if reset is not None and reset.shape not in ((b,), (b, t)):
            raise ValueError(f"reset must be bool [{b}] or [{b},{t}], not {reset.shape}")
        if lengths is not None and lengths.shape != (b,):
            raise ValueError(f"lengths must be int32 [{b}], not {lengths.shape}")
