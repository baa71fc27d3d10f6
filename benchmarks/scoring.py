"""Scores a trained model under changed protocols; records machine, versions and text.

The programs cold_start.py and dynamic_evaluation.py share this code.
"""

import argparse
import dataclasses
import pathlib
from typing import Any

import flax
import jax

from benchmarks.data_preparation import machine
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import ConfigError, ProtocolConfig
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.evaluation.evaluator import segment_bar, split_evaluator
from txl_jax.evaluation.protocols import describe
from txl_jax.parallel.mesh import scoring_mesh
from txl_jax.units import in_unit

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A trained model and the text that it is scored on."""

    trained: TrainedModel
    corpus: Corpus

    @classmethod
    def of(cls, flags: argparse.Namespace) -> "Scorer":
        """Loads the model of ``--workdir``, and its corpus (from ``--data-path``, if given)."""
        trained = load(flags.workdir)
        data = trained.config.data
        if flags.data_path:
            data = dataclasses.replace(data, path=flags.data_path)
        return cls(trained, corpus_from_config(data, trained.vocab))

    @property
    def unit(self) -> str:
        """The unit of scores: ``bpb``, ``bpc`` or ``ppl``."""
        return self.corpus.vocab.unit

    def row(self, name: str, protocol: ProtocolConfig) -> Row:
        """Returns the mean loss per target under a protocol, in nats and in :attr:`unit`.

        The row also has ``name``, the number of targets, the seconds, and the protocol in words.
        """
        c = self.trained.config
        mesh = scoring_mesh(c.mesh, c.model, c.evaluate.batch_size)
        evaluator = split_evaluator(c.model, protocol, self.corpus, mesh)
        with segment_bar(f"{protocol.split} split, {name}") as progress:
            score = evaluator.run(self.trained.params, progress=progress)
        assert score is not None
        return {
            "name": name,
            "loss": score.loss,
            self.unit: in_unit(score.loss, self.corpus.vocab.unit),
            "targets": score.targets,
            "seconds": round(score.seconds, 1),
            "protocol": describe(protocol, c.model),
        }

    def about(self) -> dict[str, Any]:
        """Returns model, text, machine and versions."""
        c = self.trained.config
        devices = {"platform": jax.default_backend(), "devices": jax.device_count()}
        return {
            "machine": machine() | devices,
            "versions": {"jax": jax.__version__, "flax": flax.__version__},
            "run": {"name": c.name, "step": self.trained.step},
            "text": {
                "name": self.corpus.name,
                "label": self.corpus.info["label"],
                "source_hash": self.corpus.source_hash,
            },
            "unit": self.unit,
        }


def parser_of(doc: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags that cold_start.py and dynamic_evaluation.py share.

    The first line of ``doc`` is the description in the help.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--workdir", required=True, help="a finished txl_jax run")
    parser.add_argument("--data-path", help="its corpus, if it lies elsewhere than in training")
    parser.add_argument("--out", help="JSON file to write")
    return parser


def command(program: str, argv: list[str]) -> str:
    """Returns the command line, with names in place of this machine's paths."""
    places = {"--workdir": "RUN", "--data-path": "DATA", "--out": "FILE.json"}
    words = [place.partition("=") for place in argv]
    told = [f"{key}={places.get(key, value)}" if eq else key for key, eq, value in words]
    return " ".join([f"python -m benchmarks.{program}", *told])


def checked(protocol: ProtocolConfig, scorer: Scorer) -> ProtocolConfig:
    """Returns the protocol unchanged, if its settings fit those of the run.

    Raises:
      SystemExit: the settings contradict each other; the message names the broken rule.
    """
    try:
        dataclasses.replace(scorer.trained.config, evaluate=protocol)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    return protocol


def numbers(text: str) -> list[float]:
    """Returns the numbers of a flag's value, in which they are separated by commas."""
    return [float(part) for part in text.split(",")]


def write(text: str, out: str | None) -> None:
    """Writes the text to the file ``out``, unless ``out`` is ``None``."""
    if out:
        pathlib.Path(out).write_text(text + "\n", encoding="utf-8")
