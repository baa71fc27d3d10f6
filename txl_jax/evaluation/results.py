"""The result of scoring a split. ``write_evaluation`` in split.py converts it to JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any

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
      bits_per_byte, word_ppl: the loss in bits per byte, and the perplexity per word of the text.
        They are ``None`` if the tokens do not determine them.
      seconds: the duration in seconds with compilation, or ``None`` for a baseline.
      documents, document_loss: the number of documents, and the mean over documents of the total
        loss of a document in nats. They are ``None`` without documents.
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

    def to_row(self) -> dict[str, Any]:
        """Returns the JSON object of the score, with ``value`` under the name of its unit."""
        row = {"name": self.name, "loss": self.loss, self.unit: self.value, "targets": self.targets}
        names = ("seconds", "documents", "document_loss", "bits_per_byte", "word_ppl")
        more = {name: getattr(self, name) for name in names}
        known = {name: value for name, value in more.items() if value is not None}
        return {**row, "protocol": self.protocol, **known}


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Evaluation(SplitScore):
    """The score of a split under the protocol of the settings, and other scores for comparison.

    ``str()`` gives the table that ``--mode=evaluate`` prints.

    Attributes:
      results: all scores: this one, then the model without memory, other weights and baselines.
      about: the model, the text and the precision, as JSON.
    """

    results: tuple[SplitScore, ...]
    about: Mapping[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        """The JSON object that is written to ``evaluation.json``."""
        return {**self.about, "results": [score.to_row() for score in self.results]}

    def __str__(self) -> str:
        width = max(len(score.name) for score in self.results)
        lines = [f"{self.protocol}:"]
        for score in self.results:
            more = ""
            # A perplexity per subword cannot be compared with the loss of other kinds of tokens.
            if self.unit == "ppl" and score.bits_per_byte is not None:
                more = f"  ({score.bits_per_byte:.4f} bits per byte)"
            if score.document_loss is not None:
                more += f"  ({score.document_loss:.2f} nats per document"
                more += f", {score.documents:,} documents)"
            lines.append(f"  {score.name:<{width}}  {score.value:9.4f} {self.unit}{more}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        value = f"{self.unit} {format_value(self.value, self.unit)}"
        return f"Evaluation({value}, {self.protocol}, and {len(self.results) - 1} more)"
