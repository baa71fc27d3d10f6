"""The result of scoring a split in Python."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from txl_jax.evaluation.scoring_run import table
from txl_jax.units import Unit, format_value


@dataclasses.dataclass(frozen=True)
class SplitScore:
    """The score of one model, or of one baseline, on a split.

    Attributes:
      name: what was scored, such as ``memory 640``, ``no memory`` or ``bigram``.
      protocol: the evaluation protocol in words.
      loss: the mean loss of a target in nats.
      unit, value: ``bpb``, ``bpc`` or ``ppl``, and the mean loss in this unit.
      targets: the number of targets.
      bits_per_byte, word_ppl: the loss of a byte and of a word of the text, or ``None`` if the
        tokens do not determine them.
      seconds: the duration in seconds with compilation, or ``None`` for a baseline.
      documents, document_loss: the number of documents, and the mean of their losses in nats; or
        ``None`` without documents.
    """

    name: str
    protocol: str
    loss: float
    unit: Unit
    value: float
    targets: int
    bits_per_byte: float | None = None
    word_ppl: float | None = None
    seconds: float | None = None
    documents: int | None = None
    document_loss: float | None = None


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Evaluation(SplitScore):
    """The score of a split under the protocol of the settings, and the scores beside it.

    ``str()`` gives the table that ``--mode=evaluate`` prints.

    Attributes:
      results: all scores: this one, then the model without memory, other weights and baselines.
      record: the JSON object that the mode writes to ``evaluation.json``.
    """

    results: tuple[SplitScore, ...]
    record: Mapping[str, Any]

    def __str__(self) -> str:
        return table(self.record)

    def __repr__(self) -> str:
        value = f"{self.unit} {format_value(self.value, self.unit)}"
        return f"Evaluation({value}, {self.protocol}, and {len(self.results) - 1} more)"
