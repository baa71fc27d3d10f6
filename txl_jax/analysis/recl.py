"""Relative effective context length: how much context a model still gains from (paper, appendix C).

Models of a group are compared on one text, so that a weak model, for which every token is hard,
does not look as if it used more context. With l_i(c, t) = -log P_i(x_t | the c tokens before it):

    b(c, t)      min over i of l_i(c, t)                        the group's baseline
    T            the share r of positions with the largest b(c, t)          the hard tokens
    f_i(c, c')   mean over T of min(b(c, t), l_i(c', t))        relative loss of model i
    g_i(c, c')   (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)       relative gain

Starting at the shortest c, as long as the gain from c to the next length is at least the
threshold (1%), go on to that length; the length that is left is the RECL.
"""

import dataclasses
import io
import os
import zipfile
from collections.abc import Sequence

import numpy as np

from txl_jax.evaluation.errors import AnalysisError
from txl_jax.files import atomic_write


class LossesError(AnalysisError):
    """Losses that cannot be compared; the text says whose and why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Losses:
    """What a model lost on each token of a text, for each length of its context.

    Attributes:
      name: of the model.
      contexts: C lengths in tokens, rising.
      nll: float [C,N], nats, of the same N targets at every length.
      targets: sha256 of the targets' symbols joined by newlines (UTF-8), in hexadecimal: what
        was predicted, so that other text is never compared; "": not known.
    """

    name: str
    contexts: tuple[int, ...]
    nll: np.ndarray
    targets: str = ""

    def __post_init__(self):
        rising = all(a < b for a, b in zip(self.contexts, self.contexts[1:], strict=False))
        if len(self.contexts) < 2 or not rising:
            raise LossesError(f"{self.name}: contexts {self.contexts} must be two or more, rising")
        if self.nll.ndim != 2 or self.nll.shape[0] != len(self.contexts) or not self.nll.size:
            raise LossesError(
                f"{self.name}: losses {self.nll.shape} must be [{len(self.contexts)},N], a row for"
                " each context length"
            )
        if not np.isfinite(self.nll).all():
            raise LossesError(f"{self.name}: a loss is not a finite number")

    def mean(self) -> np.ndarray:
        """Nats per target at each length, float64 [C]."""
        return self.nll.mean(axis=1, dtype=np.float64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an .npz: ``name``, ``contexts`` int [C], ``nll`` float32 [C,N], ``targets``.

        Another program writes the same to be compared, an LSTM's for example. For every length
        c and every target t it runs the LSTM from its zero state over the c tokens before t
        alone, and keeps -log p(token t) in nats:

            np.savez("lstm.npz", name="LSTM", contexts=[100, 200], nll=nll)

        The targets are those of ``--mode=recl``: tokens ``longest`` to ``longest + max_tokens``
        of the split, counted from 0. ``targets`` may be left out; then nothing but their number
        is compared.
        """
        data = io.BytesIO()
        np.savez_compressed(
            data,
            name=np.array(self.name),
            contexts=np.array(self.contexts),
            nll=self.nll.astype(np.float32),
            targets=np.array(self.targets),
        )
        atomic_write(os.fspath(path), data.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Losses":
        """What :meth:`save` wrote, or another program in its form (no pickled objects).

        Raises:
          LossesError: it is no such file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                contexts = tuple(int(c) for c in file["contexts"])
                targets = str(file["targets"]) if "targets" in file else ""
                nll = np.asarray(file["nll"], np.float32)
                return cls(str(file["name"]), contexts, nll, targets)
        except (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
            raise LossesError(
                f"{os.fspath(path)}: must be an .npz of name, contexts [C] and nll [C,N]: {error}"
            ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class Gains:
    """What a model of a group gains from longer contexts, on the group's hard tokens.

    Attributes:
      name: of the model.
      contexts: C lengths.
      absolute: float64 [C,C], exp f(c,c) - exp f(c,c'), in perplexity; row c, column c'.
      relative: float64 [C,C], the same over exp f(c,c).
    """

    name: str
    contexts: tuple[int, ...]
    absolute: np.ndarray
    relative: np.ndarray

    def recl(self, threshold: float = 0.01) -> int:
        """The RECL in tokens; the longest length where the gain never falls below the threshold."""
        place = 0
        while place + 1 < len(self.contexts) and self.relative[place, place + 1] >= threshold:
            place += 1
        return self.contexts[place]


def gains(group: Sequence[Losses], r: float) -> list[Gains]:
    """Gains of every model of a group.

    Args:
      group: models with equal contexts, on the same targets.
      r: share of the targets that are hard, above 0 and at most 1.

    Raises:
      LossesError: an empty group, models that do not compare, or r out of range.
    """
    _check(group, r)
    contexts, n = group[0].contexts, group[0].nll.shape[1]
    count = max(1, round(r * n))
    found = {losses.name: np.zeros((len(contexts), len(contexts))) for losses in group}
    floor = np.zeros(len(contexts))  # exp f(c,c), the same for all models
    for c in range(len(contexts)):
        baseline = np.min([losses.nll[c] for losses in group], axis=0).astype(np.float64)
        hard = np.argsort(-baseline, kind="stable")[:count]
        floor[c] = np.exp(baseline[hard].mean())
        for losses in group:
            relative = np.minimum(baseline[hard], losses.nll[:, hard]).mean(axis=1)
            found[losses.name][c] = floor[c] - np.exp(relative)
    return [
        Gains(name, contexts, absolute, absolute / floor[:, None])
        for name, absolute in found.items()
    ]


def _check(group: Sequence[Losses], r: float) -> None:
    if not group:
        raise LossesError("a group needs at least one model")
    if not 0 < r <= 1:
        raise LossesError(f"r = {r}: must be above 0 and at most 1")
    first = group[0]
    for losses in group[1:]:
        if losses.contexts != first.contexts or losses.nll.shape != first.nll.shape:
            raise LossesError(
                f"{losses.name} ({len(losses.contexts)} contexts, {losses.nll.shape[1]} targets)"
                f" and {first.name} ({len(first.contexts)}, {first.nll.shape[1]}) were not measured"
                " at the same contexts on the same targets"
            )
        if losses.targets and first.targets and losses.targets != first.targets:
            raise LossesError(
                f"{losses.name} and {first.name} were not measured on the same text: the symbols"
                " of their targets differ"
            )
    names = [losses.name for losses in group]
    if len(set(names)) < len(names):
        raise LossesError(f"two models of the group have one name: {', '.join(names)}")
