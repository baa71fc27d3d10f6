"""The embedding of words and the softmax over words: adaptive or plain, tied or untied.

``cutoffs`` split the vocabulary, sorted by frequency, into a shortlist and C tail clusters:

    cutoffs = (c1, c2)      0 .. c1-1     c1 .. c2-1    c2 .. V-1
                            shortlist       tail 1        tail 2
    head softmax over       shortlist + one logit for each tail           [c1 + C]
    p(word of tail i)     = p_head(tail i) * p_i(word)

(Grave et al. 2017; Baevski and Auli 2019.) Without cutoffs, all words are in one cluster with a
plain softmax, or with a mixture of K softmaxes if ``mixtures`` K > 1 (mixture.py). To compute the
loss, rows are sorted by the cluster of their target. A tail cluster then processes only its own
rows, in blocks (cross_entropy.py).
"""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.config import TransformerXLConfig
from txl_jax.model import initializers
from txl_jax.model import mixture as mixture_lib
from txl_jax.model.block import dropout
from txl_jax.model.cross_entropy import cross_entropy, full_einsum, searchsorted
from txl_jax.model.kernels.choice import platform_of
from txl_jax.model.lookup import table_rows
from txl_jax.model.mixture import Table
from txl_jax.model.wide_products import apply_to, matmul, products_of_rows
from txl_jax.parallel.shardings import replicate, shard_words, sharded_over_rows


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The words ``start`` to ``stop`` - 1 of the vocabulary, with embeddings of the same width.

    ``projected`` says whether matrices project these embeddings from ``width`` to the model's D.
    """

    start: int
    stop: int
    width: int
    projected: bool

    @property
    def size(self) -> int:
        """The number of words in this cluster."""
        return self.stop - self.start


def clusters(c: TransformerXLConfig) -> tuple[Cluster, ...]:
    """Returns the shortlist and the tail clusters; ``c.vocab_size`` must not be ``None``."""
    assert c.vocab_size is not None
    d_embed, always = c.d_embed or c.d_model, c.div_val > 1 and c.proj_same_dim
    bounds = itertools.pairwise((0, *c.cutoffs, c.vocab_size))
    widths = (d_embed // c.div_val**i for i in itertools.count())
    return tuple(
        Cluster(start, stop, width, width != c.d_model or always)
        for (start, stop), width in zip(bounds, widths, strict=False)
    )


class Vocabulary(nn.Module):
    """The embedding of input words, and the output scores of words.

    Parameters if ``div_val`` is 1, where d is ``d_embed`` or D: ``embedding`` [V,d],
    ``softmax_bias`` [V], ``softmax_weight`` [V,d] (if untied), ``embedding_projection`` [d,D] (if d
    is not D). If ``div_val`` > 1, each cluster i has its own parameters of its own width d_i:
    ``embedding_i`` [size,d_i] and so on. A cluster whose output projection is not tied to its input
    projection also has ``softmax_projection_i`` [d_i,D]. ``cluster_weight`` [C,d] and
    ``cluster_bias`` [C] give the logits of the tails in the head. Their first row is for tail 1; in
    the authors' PyTorch code, their last row is for tail 1.

    If ``mixtures`` K > 1, ``mixture_prior`` [D,K], ``mixture_latent`` [D,K,d] and
    ``mixture_latent_bias`` [K,d] replace an output projection. ``past_decode`` adds
    ``past_weight`` [d,d] (input, output), ``past_weight_bias`` [d] and ``past_bias`` [V].
    """

    cfg: TransformerXLConfig
    mesh: Mesh | None = None

    def setup(self):
        """Declares the parameters."""
        c, zeros = self.cfg, initializers.zeros
        init, init_projection = map(initializers.normal, (c.init_std, c.proj_init_std))
        parts = self.clusters = clusters(c)
        if c.div_val == 1:
            parts = (dataclasses.replace(parts[0], stop=parts[-1].stop),)

        def params(kind, init, shape_of):
            """Declares a parameter for each part; it is ``None`` for a part without a shape."""
            name = lambda i: kind if c.div_val == 1 else f"{kind}_{i}"
            shapes = enumerate(map(shape_of, parts))
            return [shape and self.param(name(i), init, shape) for i, shape in shapes]

        table = lambda part: (part.size, part.width)
        projection = lambda part: (part.width, c.d_model) if part.projected else None
        self.embeddings = params("embedding", init, table)
        self.projections = params("embedding_projection", init_projection, projection)
        self.weights = self.embeddings if c.tie_weight else params("softmax_weight", init, table)
        self.biases = params("softmax_bias", zeros, lambda part: (part.size,))
        tied = (*c.tie_projs, *[False] * len(self.clusters))
        self.output_projections = [  # [d_i,D]; ``None`` without projection
            self.param(f"softmax_projection_{i}", init_projection, (part.width, c.d_model))
            if part.projected and not tied[i] and c.mixtures == 1
            else self.projections[0 if c.div_val == 1 else i]
            for i, part in enumerate(self.clusters)
        ]
        if c.cutoffs:
            shape = (len(c.cutoffs), self.clusters[0].width)
            self.cluster_weight = self.param("cluster_weight", init, shape)
            self.cluster_bias = self.param("cluster_bias", zeros, shape[:1])
        words, d, k = self.clusters[-1].stop, self.clusters[0].width, c.mixtures
        if k > 1:
            self.mixture_prior = self.param("mixture_prior", init, (c.d_model, k))
            self.mixture_latent = self.param("mixture_latent", init, (c.d_model, k, d))
            self.mixture_latent_bias = self.param("mixture_latent_bias", zeros, (k, d))
            self.drop_latent = dropout(c, c.dropout_latent)
        if c.past_decode:
            self.past_weight = self.param("past_weight", init, (d, d))
            self.past_weight_bias = self.param("past_weight_bias", zeros, (d,))
            self.past_bias = self.param("past_bias", zeros, (words,))

    def embed(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Returns the embeddings of tokens times sqrt(D), [B,T,D] in the compute dtype.

        ``tokens`` are int32 [B,T]. ``train`` applies ``dropout_embedding`` (``dropout`` rng). With
        ``div_val`` > 1 every cluster looks up every token, with a clipped id, and projects zeros
        for the words of other clusters. This costs little compared with a layer.
        """
        c, platform = self.cfg, self._platform()
        table = lambda i: shard_words(jnp.asarray(self.embeddings[i]), self.mesh)
        if c.div_val == 1:
            x = _project(
                table_rows(table(0), tokens, c.dtype, self.mesh), self.projections[0], platform
            )
        else:
            x = jnp.zeros((*tokens.shape, c.d_model), c.dtype)
            for i, cluster in enumerate(self.clusters):
                own = (tokens >= cluster.start) & (tokens < cluster.stop)
                row = jnp.clip(tokens - cluster.start, 0, cluster.size - 1)
                part = table_rows(table(i), row, c.dtype, self.mesh)
                part = jnp.where(own[..., None], part, 0)
                x = x + _project(part, self.projections[i], platform)
        if train and c.dropout_embedding:
            keep = jnp.float32(1.0 - c.dropout_embedding)
            shape = (self.clusters[-1].stop,)
            kept = jax.random.bernoulli(self.make_rng("dropout"), keep, shape)
            x = x * (kept[tokens] / keep).astype(c.dtype)[..., None]
        return x * c.d_model**0.5

    def logits(self, h: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits, float32 [B,T,V]; with cutoffs or mixtures they are log-probabilities."""
        tables = self._tables()
        if self.cfg.mixtures > 1:
            return mixture_lib.mixture_log_probs(self._mixture(h, train), tables[0])
        head = self._scores(h, 0, tables[0])
        if not self.cfg.cutoffs:
            return head
        head, shortlist = jax.nn.log_softmax(head, axis=-1), self.clusters[0].size
        scores = [head[..., :shortlist]]
        for i in range(1, len(self.clusters)):
            cluster = head[..., shortlist + i - 1, None]
            scores.append(cluster + jax.nn.log_softmax(self._scores(h, i, tables[i])))
        return jnp.concatenate(scores, axis=-1)

    def nll(self, h: jax.Array, targets: jax.Array, train: bool = False) -> jax.Array:
        """Returns the negative log-likelihood of the targets in nats, float32 [B,T].

        ``train`` applies ``sample_softmax`` and ``dropout_latent``; both need the ``dropout`` rng.
        """
        if not isinstance(targets.shape[0], int):  # a symbolic size of jax.export: row by row
            row = lambda x: self.nll(x[0][None], x[1][None], train)[0]
            return jax.lax.map(row, (h, targets))
        c, tables = self.cfg, self._tables()
        if c.mixtures > 1:
            log_prior, latents = self._mixture(h, train)
            rows = (_rows(x) for x in (latents, log_prior, targets))
            of_mixture = functools.partial(mixture_lib.mixture_nll, platform=self._platform())
            score = sharded_over_rows(of_mixture, self.mesh, n_rows=3)
            return score(*rows, tables[0]).reshape(targets.shape)
        shape, h, targets = targets.shape, _rows(h), _rows(targets)
        if train and c.sample_softmax:
            n, words = 2 * c.sample_softmax, self.clusters[-1].stop
            drawn = _log_uniform_draws(self.make_rng("dropout"), n, words)
            score = sharded_over_rows(_sampled_nll, self.mesh, n_rows=2)
            return score(h, targets, (drawn, *tables[0])).reshape(shape)
        of_clusters = functools.partial(_cluster_nll, self.clusters, self._platform())
        score = sharded_over_rows(of_clusters, self.mesh, n_rows=2)
        return score(h, targets, (self.output_projections, tables)).reshape(shape)

    def past_nll(self, log_p: jax.Array, inputs: jax.Array) -> jax.Array:
        """Returns the loss of decoding each input word from the next word's prediction: nats [B,T].

        ``log_p`` [B,T,V] are the log-probabilities of the next word, and p are its probabilities.
        E [V,d] are the output embeddings, so e = E^T p is the expected embedding of the next word.
        With f = tanh(e W + b), the loss is -log softmax(E f + b') of the input word (Brahma 2019,
        "decoding the past"). W, b and b' are ``past_weight``, ``past_weight_bias``, ``past_bias``.
        """
        dtype, weight = self.cfg.dtype, shard_words(jnp.asarray(self.weights[0]), self.mesh)
        p = jnp.exp(log_p).astype(dtype)
        expected = full_einsum("btv,vd->btd", p, weight.astype(dtype)).astype(dtype)
        past_weight = replicate(self.past_weight, self.mesh).astype(dtype)
        decoded = full_einsum("btd,de->bte", expected, past_weight) + self.past_weight_bias
        f = _rows(jnp.tanh(decoded).astype(dtype))
        platform = self._platform()
        of_table = lambda f, words, table: cross_entropy(
            f, table[0], table[1], words, None, platform
        )
        score = sharded_over_rows(of_table, self.mesh, n_rows=2)
        return score(f, _rows(inputs), (weight, self.past_bias)).reshape(inputs.shape)

    def _platform(self) -> str:
        """Returns the platform for which block sizes are chosen; empty if words are sharded."""
        shared = self.mesh is not None and self.mesh.shape["tensor"] > 1
        return "" if shared else platform_of(self.mesh)

    def _mixture(self, h: jax.Array, train: bool) -> mixture_lib.Mixture:
        latent = replicate(self.mixture_latent, self.mesh)
        m = mixture_lib.mixture(h, self.mixture_prior, latent, self.mixture_latent_bias)
        return m._replace(latents=self.drop_latent(m.latents, train))

    def _tables(self) -> list[Table]:
        """Returns each cluster's float32 weights and bias; the head's include a row per tail."""
        c, float32 = self.cfg, functools.partial(jnp.asarray, dtype=jnp.float32)
        tables = list(zip(map(float32, self.weights), map(float32, self.biases), strict=True))
        if c.div_val == 1:  # the gradient of one split is one concatenation
            split = (jax.lax.split(table, [p.size for p in self.clusters]) for table in tables[0])
            tables = list(zip(*split, strict=True))
        if c.cutoffs:
            weight = jnp.concatenate([tables[0][0], float32(self.cluster_weight)])
            tables[0] = weight, jnp.concatenate([tables[0][1], float32(self.cluster_bias)])
        return tables

    def _scores(self, h: jax.Array, i: int, table: Table) -> jax.Array:
        x, (weight, bias) = _inner(h, self.output_projections[i], self._platform()), table
        weight = weight.astype(x.dtype)
        if apply_to(self._platform(), x, weight):
            rows = products_of_rows(x.reshape(-1, x.shape[-1]), weight)
            return rows.reshape(*x.shape[:-1], -1) + bias
        return full_einsum("...d,vd->...v", x, weight) + bias


def _cluster_nll(
    clusters: tuple[Cluster, ...], platform, h, targets, parts: tuple[list, list[Table]]
) -> jax.Array:
    """Returns -log p of targets [S] given states h [S,D]; ``parts`` are projections and tables."""
    projections, tables = parts
    score = functools.partial(cross_entropy, platform=platform)
    head = _inner(h, projections[0], platform)
    if len(clusters) == 1:
        return score(head, *tables[0], targets)
    starts = jnp.array([p.start for p in clusters])
    cluster = searchsorted(starts, targets, side="right") - 1
    in_head = jnp.where(cluster == 0, targets, clusters[0].size + cluster - 1)
    nll = score(head, *tables[0], in_head)
    sorted_rows = jnp.argsort(cluster, stable=True)
    first = searchsorted(cluster[sorted_rows], jnp.arange(len(clusters) + 1))
    for i, p in enumerate(clusters[1:], start=1):
        members = jnp.roll(sorted_rows, -first[i]), first[i + 1] - first[i]
        inside, x = jnp.clip(targets - p.start, 0, p.size - 1), _inner(h, projections[i], platform)
        nll = nll + score(x, *tables[i], inside, members)
    return nll


def _log_uniform_draws(key: jax.Array, n: int, vocab_size: int) -> jax.Array:
    """Draws n words, word k with P(k) = log((k+2)/(k+1)) / log(V+1); sorted int32 [n]."""
    uniform = jax.random.uniform(key, (n,), jnp.float32)
    place = jnp.exp(uniform * jnp.log(jnp.float32(vocab_size + 1.0))) - 1
    return jnp.sort(jnp.minimum(place, vocab_size - 1)).astype(jnp.int32)


def _sampled_nll(h: jax.Array, targets: jax.Array, parts) -> jax.Array:
    """Returns the loss of a softmax over the target and drawn words, float32 [S], for h [S,D].

    ``parts`` are the n sorted draws (repeats are ignored), the weights and the bias. If one draw
    gives a word with probability P, n draws contain the word with probability 1 - (1-P)^n. The log
    of this number is subtracted from the word's logit. A draw of the target is masked. The authors'
    PyTorch code has (1+P)^-n in place of (1-P)^n, and a factor sqrt(D).
    """
    drawn, weight, bias = parts
    v, n_draws = len(weight), len(drawn)
    repeated = jnp.concatenate([jnp.zeros(1, bool), drawn[1:] == drawn[:-1]])
    x = h.astype(jnp.float32)
    true = jnp.einsum("sd,sd->s", x, weight[targets]) + bias[targets]
    true = true - _log_expected(targets, n_draws, v)
    negatives = x @ weight[drawn].T + bias[drawn] - _log_expected(drawn, n_draws, v)
    negatives = jnp.where(repeated | (drawn == targets[:, None]), -1e30, negatives)
    logits = jnp.concatenate([true[:, None], negatives], axis=1)
    return jax.nn.logsumexp(logits, axis=1) - true


def _rows(x: jax.Array) -> jax.Array:
    """Reshapes [B,T,...] to rows [S,...]."""
    return x.reshape(-1, *x.shape[2:])


def _inner(h: jax.Array, projection: jax.Array | None, platform: str) -> jax.Array:
    """Projects states [...,D] to the width of a cluster's words: [...,d_i]."""
    return h if projection is None else matmul(h, projection.astype(h.dtype).T, platform)


def _project(x: jax.Array, projection: jax.Array | None, platform: str) -> jax.Array:
    return x if projection is None else matmul(x, projection.astype(x.dtype), platform)


def _log_expected(words: jax.Array, n_draws: int, vocab_size: int) -> jax.Array:
    """Returns the log of the chance that a word is among ``n_draws`` log-uniform draws."""
    p = jnp.log1p(1.0 / (words.astype(jnp.float32) + 1.0)) / jnp.log(jnp.float32(vocab_size + 1.0))
    return jnp.log(-jnp.expm1(n_draws * jnp.log1p(-p)))
