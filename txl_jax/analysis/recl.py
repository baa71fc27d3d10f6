"""Computes the relative effective context length (RECL) of a group of models (paper, appendix C).

The models are compared on the same hard tokens, because a weak model, for which every token is
hard, would seem to use more context. With l_i(c, t) = -log P_i(x_t | the c preceding tokens):

    b(c, t)      min over i of l_i(c, t)                        the group's baseline
    T            the share r of positions with the largest b(c, t)          the hard tokens
    f_i(c, c')   mean over T of min(b(c, t), l_i(c', t))        relative loss of model i
    g_i(c, c')   (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)       relative gain

The RECL is the shortest length c whose gain to the next length is below the threshold (1%).
"""

import dataclasses
import os
import zipfile
from collections.abc import Sequence

import numpy as np

from txl_jax import paths
from txl_jax.analysis.results import AnalysisError, write_arrays
from txl_jax.config.folders import expanded_text
from txl_jax.messages import fields_repr


@dataclasses.dataclass(frozen=True, eq=False)
class Losses:
    """A model's loss on each token of a text, for each context length.

    ``contexts`` are C increasing lengths in tokens. ``nll`` has the losses of the same N targets at
    all lengths, float [C,N], in nats. ``targets`` is the hexadecimal SHA-256 of the targets'
    symbols, joined by newlines (UTF-8), or "" if unknown. Losses of different texts cannot be
    compared.
    """

    __repr__ = fields_repr

    name: str
    contexts: tuple[int, ...]
    nll: np.ndarray
    targets: str = ""

    def __post_init__(self):
        object.__setattr__(self, "contexts", tuple(self.contexts))  # also if given as a list
        rising = len(self.contexts) > 1 and self.contexts == tuple(sorted(set(self.contexts)))
        fits = self.nll.ndim == 2 and self.nll.shape[0] == len(self.contexts) and self.nll.size
        if not rising or not fits or not np.isfinite(self.nll).all():
            raise AnalysisError(
                f"{self.name}: losses {self.nll.shape} at contexts {self.contexts} must be finite"
                " numbers [C,N], a row for each of two or more rising lengths"
            )

    def mean(self) -> np.ndarray:
        """Returns the mean loss at each length in nats per target, float64 [C]."""
        return self.nll.mean(axis=1, dtype=np.float64)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that :meth:`save` writes, by name."""
        return {
            "name": np.array(self.name),
            "contexts": np.array(self.contexts),
            "nll": self.nll.astype(np.float32),
            "targets": np.array(self.targets),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an .npz: ``name``, ``contexts`` int [C], ``nll`` float32 [C,N], and ``targets``.

        The losses of another program can be compared if it writes such a file:
        ``np.savez("lstm.npz", name="LSTM", contexts=[100, 200], nll=nll)``. For every length c and
        target t, the LSTM reads the c tokens before t from its zero state, and ``nll`` has
        -log p(token t). Targets are the tokens ``recl.longest`` to ``recl.longest + max_tokens`` of
        the split, counted from 0. Without ``targets``, only the number of targets is compared.
        """
        write_arrays(expanded_text(path, "path"), self.arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Losses":
        """Reads a file of :meth:`save` without unpickling, or raises AnalysisError."""
        path = expanded_text(path, "path")
        try:
            with paths.path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                contexts = tuple(int(c) for c in file["contexts"])
                targets = str(file.get("targets", ""))
                nll = np.asarray(file["nll"], np.float32)
                return cls(str(file["name"]), contexts, nll, targets)
        except (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
            raise AnalysisError(
                f"{path}: must be an .npz file with name, contexts [C] and nll [C,N] ({error})"
            ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class Gains:
    """The gains of one model from longer contexts, on the hard tokens of its group."""

    __repr__ = fields_repr

    name: str
    contexts: tuple[int, ...]
    absolute: np.ndarray  # exp f(c,c) - exp f(c,c') in perplexity, float64 [C,C]; row c, column c'
    relative: np.ndarray  # absolute gain divided by exp f(c,c), float64 [C,C]

    def recl(self, threshold: float = 0.01) -> int:
        """Returns the RECL in tokens, or the longest length if no gain is below the threshold."""
        enough = np.append(np.diagonal(self.relative, 1) >= threshold, False)
        return self.contexts[int(np.argmin(enough))]


def gains(group: Sequence[Losses], r: float) -> list[Gains]:
    """Computes the gains of every model of a group.

    ``r`` is the share of hard targets, above 0 and at most 1. Raises AnalysisError for another
    share, or if the models have losses at different lengths or on different targets.
    """
    if not 0 < r <= 1:
        raise AnalysisError(f"r = {r}: must be above 0 and at most 1")
    shapes = {(losses.contexts, losses.nll.shape) for losses in group}
    if len(shapes) != 1 or len({losses.targets for losses in group} - {""}) > 1:
        names = ", ".join(losses.name for losses in group)
        raise AnalysisError(f"{names}: must have losses of the same targets at the same contexts")
    ((contexts, (_, n)),) = shapes
    count = max(1, round(r * n))
    absolute = np.zeros((len(group), len(contexts), len(contexts)))
    floor = np.zeros((len(contexts), 1))  # exp f(c,c), the same for all models
    for c in range(len(contexts)):
        baseline = np.min([losses.nll[c] for losses in group], axis=0).astype(np.float64)
        hard = np.argsort(-baseline, kind="stable")[:count]
        floor[c] = np.exp(baseline[hard].mean())
        for i, losses in enumerate(group):
            relative_loss = np.minimum(baseline[hard], losses.nll[:, hard]).mean(axis=1)
            absolute[i, c] = floor[c] - np.exp(relative_loss)
    named = zip(group, absolute, strict=True)
    return [Gains(losses.name, contexts, own, own / floor) for losses, own in named]
