"""The assembled model, which maps tokens and memory to scores and new memory."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import ConfigError, TransformerXLConfig
from txl_jax.model import initializers, masks
from txl_jax.model import inputs as inputs_lib
from txl_jax.model import memory as memory_lib
from txl_jax.model.adaptive import Vocabulary
from txl_jax.model.attention import FORMS, fuses_cache
from txl_jax.model.block import Block, LayerNorm, SharedInputs, dropout
from txl_jax.model.inputs import SegmentOptions
from txl_jax.model.memory import Cache, Memory
from txl_jax.model.positions import clamped, positions_from_end, sinusoids
from txl_jax.model.precision import at_precision, resolved
from txl_jax.model.ring import slots_of
from txl_jax.parallel.shardings import replicate, shard_rows


class TransformerXL(nn.Module):
    """The Transformer-XL model (Dai et al. 2019) over tokens, or over the caller's own embeddings.

    Example:
      >>> import jax, txl_jax
      >>> cfg = txl_jax.TransformerXLConfig(vocab_size=11, n_layer=2, d_model=8)
      >>> model = txl_jax.TransformerXL(cfg)
      >>> mems, tokens = model.init_mems(batch_size=1, mem_len=4), jax.numpy.array([[3, 1, 4]])
      >>> variables = model.init(jax.random.key(0), tokens, mems)
      >>> logits, mems = model.apply(variables, tokens, mems)
      >>> logits.shape, mems.hidden.shape, int(mems.filled[0])
      ((1, 3, 11), (2, 1, 4, 8), 3)

    Every method takes these options as keywords. ``train=True`` applies dropout and needs
    ``rngs={"dropout": key}``. If ``reset`` is bool [B], it empties the memory of the marked streams
    before this segment. If it is bool [B,T], a new episode starts at each marked position, and no
    query in an episode sees earlier episodes. ``lengths``, int32 [B] from 0 to T, is the number of
    real tokens in each row, which is padded on the right. The memory keeps the last M real states.
    Rows are independent. Arguments are NumPy or JAX arrays.

    Every method raises a ValueError that names the argument, for a wrong dtype or shape, for
    ``lengths`` outside of 0 to T, and for ``tokens`` and ``targets`` outside of 0 to V-1. Under
    ``jax.jit`` these values are unknown: lengths are clipped, and a wrong id gives a wrong result
    without an error. So check the ids of your own text once, before the compiled loop.

    Attributes:
      cfg: the settings of the model, in which ``auto`` is replaced by its value on these devices.
      mesh: the devices over which a compiled program splits its rows (parallel/mesh.py).
    """

    cfg: TransformerXLConfig
    mesh: Mesh | None = None

    def __post_init__(self):
        """Replaces settings ``auto`` by their values on the devices."""
        object.__setattr__(self, "cfg", resolved(self.cfg, self.mesh))
        super().__post_init__()

    def setup(self):
        """Declares the parameters."""
        c = self.cfg
        if c.vocab_size is not None:
            self.vocabulary = Vocabulary(c, self.mesh)
            nn.share_scope(self, self.vocabulary)  # its parameters have no scope of their own
        if FORMS[c.attention].global_biases:
            init = initializers.normal(c.init_std)
            shape = (*[c.n_layer] * c.untie_r, c.n_head, c.d_head)
            self.u, self.v = self.param("u", init, shape), self.param("v", init, shape)
        block: type[Block] = Block
        if c.remat != "none":  # the policy says which results are stored for the gradient
            products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            nothing = jax.checkpoint_policies.nothing_saveable
            policy = products if c.remat == "products" else nothing
            block = nn.remat(Block, policy=policy, prevent_cse=not c.scan_layers, methods=["step"])
        if c.scan_layers:
            self.scanned = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, 0, nn.broadcast),
                length=c.n_layer,
                methods=["step"],
            )(c, self.mesh, name="layers")
        else:
            self.layers = [block(c, self.mesh, name=f"layer_{n}") for n in range(c.n_layer)]
        self.norm_output = LayerNorm(c, self.mesh) if c.final_norm else lambda h: h
        rate = lambda own: c.dropout if own is None else own
        self.drop_input = dropout(c, rate(c.dropout_input))
        self.drop_output = dropout(c, rate(c.dropout_output))

    def init_mems(self, batch_size: int | np.integer, mem_len: int | np.integer) -> Memory:
        """Returns an empty memory of M slots for B streams; this needs no parameters."""
        c = self.cfg
        batch_size = inputs_lib.size("batch_size", batch_size, 0)
        mem_len = inputs_lib.size("mem_len", mem_len, 0)
        hidden = jnp.zeros((c.n_layer, batch_size, mem_len, c.d_model), c.dtype)
        return Memory(hidden, jnp.zeros((batch_size,), jnp.int32))

    @at_precision
    def init_cache(self, mems: Memory, seg_len: int | np.integer) -> Cache:
        """Returns the projected memory for inference, which other methods take as ``mems``.

        The cache starts with the states of ``mems``, which may be empty, and takes segments of at
        most ``seg_len`` tokens. The model's results with the cache equal those with ``mems``, up to
        rounding. Raises ValueError for ``scan_layers`` and for forms of attention without memory.
        """
        c = self.cfg
        if c.scan_layers:
            use = "scan_layers=False, with parameters from txl_jax.model.layout.unstack_layers"
            raise ValueError(f"a cache is not possible with scan_layers=True; use {use}")
        if c.memory_free:
            none = "has no memory, so a cache is not possible; call the model without a cache"
            raise ValueError(f"model.attention = {c.attention!r} {none}")
        mems = inputs_lib.memory(c, inputs_lib.any_memory(mems))
        seg_len = inputs_lib.size("seg_len", seg_len, 1)
        past = [layer.project_memory(mems.hidden[n]) for n, layer in enumerate(self.layers)]
        sizes = mems.hidden.shape[1], seg_len, mems.mem_len
        one_ring = fuses_cache(c, *sizes, self.mesh)
        slots = slots_of(mems.mem_len, seg_len, -1 if one_ring else c.clamp_len)
        n_keys = slots[0] + seg_len
        encodings, biases = self._encodings(n_keys, False), self._biases()
        positions = tuple(
            layer.attention.positions(n_keys, encodings, *_of_layer(biases, n))
            for n, layer in enumerate(self.layers)
        )
        positions = jax.tree.map(lambda x: jnp.asarray(x, c.dtype), positions)
        near, far = memory_lib.in_slots(past, slots)
        return Cache(near, far, positions, mems.filled, mems.mem_len, seg_len)

    def __call__(
        self, tokens, mems, *, train: bool = False, reset=None, lengths=None, context_len=0
    ):
        """Returns logits, float32 [B,T,V], and the new memory (a :class:`Cache` if given a cache).

        With an adaptive softmax or a mixture, the logits are log-probabilities.

        Args:
          tokens: int32 [B,C+T].
          mems: the memory of M slots from :meth:`init_mems` or from the segment before, or a cache
            from :meth:`init_cache`.
          train, reset, lengths: the options that :class:`TransformerXL` describes.
          context_len: C. The first C tokens are run again as context and get no logits (``ext_len``
            of the authors' PyTorch code). The given memory ends before these C tokens. The new
            memory ends C tokens before the end of the segment.
        """
        options = SegmentOptions(train, reset, lengths, context_len)._asdict()
        logits, _, mems = self.logits_and_states(tokens, mems, **options)
        return logits, mems

    @at_precision
    def logits_and_states(self, tokens, mems, **options):
        """Returns logits, the last layer's states [B,T,D] before dropout, and new memory."""
        given = SegmentOptions(**options)
        states, _, mems = self._encode(tokens, mems, given)
        logits = self.vocabulary.logits(self.drop_output(states, given.train), given.train)
        return logits, states, mems

    def nll(
        self, tokens, targets, mems, *, train: bool = False, reset=None, lengths=None, context_len=0
    ):
        """Returns the targets' negative log-likelihood in nats, float32 [B,T], and new memory.

        Args:
          tokens, targets: int32 [B,C+T] and [B,T]; the target of a token is the next token.
          mems and the options: as in :meth:`__call__`; the C tokens of context are not scored.
        """
        options = SegmentOptions(train, reset, lengths, context_len)._asdict()
        nll, _, mems = self.nll_and_states(tokens, targets, mems, **options)
        return nll, mems

    @at_precision
    def nll_and_states(self, tokens, targets, mems, **options):
        """Returns losses as :meth:`nll`, the last states [B,T,D] before dropout, and new memory."""
        given = SegmentOptions(**options)
        states, targets, mems = self._encode(tokens, mems, given, targets)
        dropped = self.drop_output(states, given.train)
        return self.vocabulary.nll(dropped, targets, given.train), states, mems

    @at_precision
    def past_nll(self, log_p, inputs):
        """Returns the loss of decoding each input word from the next word's prediction: nats [B,T].

        The loss is a regulariser (Brahma 2019). ``log_p`` of the next token is float32 [B,T,V], and
        ``inputs`` are int32 [B,T].
        """
        if not self.cfg.past_decode:
            raise ValueError("past_nll needs the parameters that model.past_decode=True adds")
        inputs = inputs_lib.token_ids("inputs", inputs, self.cfg.vocab_size or 0)
        shape = (*inputs.shape, self.cfg.vocab_size or "V")
        inputs_lib.check_array("log_p", log_p, "floats", shape)
        return self.vocabulary.past_nll(jnp.asarray(log_p, jnp.float32), inputs)

    @at_precision
    def core(self, embeddings, mems, *, train: bool = False, reset=None, lengths=None):
        """Runs the layers on embeddings [B,T,D], and returns states [B,T,D] and new memory.

        The embeddings are not multiplied by sqrt(D), unlike those of tokens. With ``absolute``
        attention, the sinusoids of their positions are added.

        For an agent, acting and learning give equal outputs only with a ``same_length`` window.
        Without this window, a step in acting sees M earlier steps, but the last step of a segment
        of T steps in learning sees M + T - 1. The outputs then differ as soon as the memory is
        full. See :mod:`txl_jax.agents`.
        """
        states, _, mems = self._run(embeddings, mems, SegmentOptions(train, reset, lengths))
        return self.drop_output(states, train), mems

    @at_precision
    def core_and_inputs(self, embeddings, mems, *, train=False, reset=None, lengths=None):
        """Runs :meth:`core`, and returns states, the input of every layer [L,B,T,D], new memory.

        The inputs, in the compute dtype, are the states that a memory stores for these positions.
        """
        options = SegmentOptions(train, reset, lengths)
        states, inputs, mems = self._run(embeddings, mems, options)
        return self.drop_output(states, train), jax.lax.stop_gradient(inputs), mems

    def _encode(self, tokens, mems, options: SegmentOptions, targets=None):
        """Returns states after the context (before dropout), int32 targets and new memory."""
        size, cached = self.cfg.vocab_size, isinstance(mems, Cache)
        if size is None:
            fix = "set a size to use tokens, or call method='core' with embeddings"
            raise ConfigError(f"model.vocab_size is None: {fix}")
        tokens = inputs_lib.segment_tokens(tokens, options.context_len, cached, size)
        options = options._replace(context_len=int(options.context_len))
        if targets is not None:
            targets = inputs_lib.segment_targets(targets, tokens, options.context_len, size)
        embeddings = self.vocabulary.embed(tokens, options.train)
        states, _, mems = self._run(embeddings, mems, options)
        return states[:, options.context_len :], targets, mems

    def _run(self, embeddings, mems, options: SegmentOptions):
        """Returns states [B,C+T,D] before dropout, each layer's input [L,B,C+T,D], new memory."""
        c = self.cfg
        mems, options = inputs_lib.segment(c, embeddings, mems, options)
        train, reset, lengths, context_len = options
        seg_len, mem_len, since_reset = embeddings.shape[1], mems.mem_len, None
        if reset is not None and reset.ndim == 1:
            mems, reset = mems.replace(filled=jnp.where(reset, 0, mems.filled)), None
        elif reset is not None:
            since_reset = masks.since_reset(reset, lengths, context_len)
        mask = masks.attention_mask(seg_len, mems.filled, mem_len, c.same_length, reset)
        places = positions_from_end(seg_len, lengths)
        h = jnp.asarray(embeddings, c.dtype)
        if FORMS[c.attention].input_sinusoids:
            h = h + sinusoids(clamped(places, c.clamp_len), c.d_model).astype(c.dtype)
        h = self.drop_input(h, train)
        if isinstance(mems, Cache):
            h, inputs, projected = self._layers_cached(h, mems, mask, places)
            mems = memory_lib.update_cache(mems, projected, h, lengths, since_reset, self.mesh)
            return self.norm_output(h), inputs, mems
        encodings = self._encodings(mem_len + seg_len, train)
        h, inputs = self._layers(h, mems, SharedInputs(encodings, mask, places, train))
        kept = inputs[:, :, : seg_len - context_len]  # the rest is run again with the next segment
        if context_len and lengths is not None:
            lengths = jnp.maximum(lengths - context_len, 0)
        mems = memory_lib.update(mems, kept, lengths, since_reset)
        return self.norm_output(shard_rows(h, self.mesh)), inputs, mems

    def _layers(self, h, mems: Memory, shared: SharedInputs):
        """Returns the last layer's output [B,T,D], and the input of every layer [L,B,T,D]."""
        memory, biases = jax.lax.stop_gradient(mems.hidden), self._biases()
        if self.cfg.scan_layers:
            return self.scanned.step(h, memory, biases, shared)
        inputs = []
        for n, layer in enumerate(self.layers):
            h, layer_input = layer.step(h, memory[n], _of_layer(biases, n), shared)
            inputs.append(layer_input)
        return h, jnp.stack(inputs)

    def _layers_cached(self, h, cache: Cache, mask, places):
        """Returns the output [B,T,D], each layer's input [L,B,T,D], and its keys and values."""
        mask = mask.replace(mem_len=cache.slots)
        inputs, projected = [], []
        for n, layer in enumerate(self.layers):
            positions = cache.positions[n].nearest(cache.near.count + mask.seg_len)
            inputs.append(h)
            h, present = layer(h, cache.rings(n), positions, mask, places)
            projected.append(present)
        return h, jnp.stack(inputs), projected

    def _encodings(self, n_keys: int, train: bool) -> jax.Array:
        """Returns the sinusoids of the distances K-1 .. 0, limited to ``clamp_len``: [K,D]."""
        c = self.cfg
        distances = clamped(jnp.arange(n_keys - 1, -1, -1), c.clamp_len)
        encodings = sinusoids(distances, c.d_model).astype(c.dtype)
        return replicate(self.drop_input(encodings[None], train)[0], self.mesh)

    def _biases(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns u and v of every layer, [L,N,H] each, or ``None`` if the form has none."""
        c, shape = self.cfg, (self.cfg.n_layer, self.cfg.n_head, self.cfg.d_head)
        if not FORMS[c.attention].global_biases:
            return None, None
        return jnp.broadcast_to(self.u, shape), jnp.broadcast_to(self.v, shape)


def _of_layer(layers, n: int):
    """Selects layer n of arrays [L,...]."""
    return jax.tree.map(lambda x: x[n], layers)
