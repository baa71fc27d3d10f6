"""Learning-rate schedules and the optimizer, built from the config by name."""

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import OptimizerConfig


def schedule(c: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of update t = 0, 1, .. ``steps`` - 1.

    With w = ``warmup_steps`` and the rate r:

        t < w           r (t+1) / w
        cosine          r (m + (1-m) (1 + cos(pi (t-w) / (steps-w))) / 2),  m = ``min_ratio``
        inverse_sqrt    r sqrt(w / (t+1))
        constant        r

    The cosine is counted from the end of warm-up (TF, NVIDIA). The authors' PyTorch code makes
    its first update at the full rate even with warm-up; that is not copied.
    """
    peak, w = c.learning_rate, c.warmup_steps

    def rate(t):
        t = jnp.asarray(t, jnp.float32)
        if c.schedule == "cosine":
            progress = jnp.clip((t - w) / max(steps - w, 1), 0.0, 1.0)
            shape = c.min_ratio + (1 - c.min_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif c.schedule == "inverse_sqrt":
            shape = jnp.sqrt(w / jnp.maximum(t + 1, w))
        else:
            shape = jnp.ones_like(t)
        warm = (t + 1) / max(w, 1)
        return peak * jnp.where(t < w, warm, shape)

    return rate


def make_optimizer(c: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip to a global norm, then Adam under :func:`schedule`; no weight decay."""
    clip = optax.clip_by_global_norm(c.clip_norm) if c.clip_norm else optax.identity()
    return optax.chain(
        clip,
        optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps),
        optax.scale_by_learning_rate(schedule(c, steps)),
    )


def gradient_norm(gradient) -> jax.Array:
    """Global L2 norm of a gradient before clipping, float32 []."""
    return optax.tree.norm(gradient)
