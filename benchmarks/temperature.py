"""Chooses a trained model's softmax temperature on the validation split.

    python -m benchmarks.temperature WORKDIR [--data=FOLDER] [--temperatures=0.96,1.0,1.04] [--test]

Every temperature is scored on the validation split, with the memory and segment lengths of the
config's ``evaluate`` section. With ``--test`` the test split is scored too, at temperature 1 and at
the temperature with the least validation loss; use this flag once, for a finished candidate. The
scores are printed and written to WORKDIR/temperature.json.
"""

import argparse
import dataclasses
import math
import os
from typing import Any

import txl_jax
from txl_jax.config import ExperimentConfig, override
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.evaluation.evaluator import split_evaluator
from txl_jax.evaluation.protocols import describe
from txl_jax.files import write_json
from txl_jax.parallel.mesh import scoring_mesh

TEMPERATURES = (0.92, 0.96, 1.0, 1.04, 1.08, 1.12, 1.16)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the command; returns the contents of temperature.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workdir")
    parser.add_argument("--data", help="folder of the text, if it is elsewhere by now")
    numbers = lambda text: tuple(float(part) for part in text.split(","))
    parser.add_argument("--temperatures", type=numbers, default=TEMPERATURES)
    parser.add_argument("--test", action="store_true", help="score the test split too")
    flags = parser.parse_args(argv)
    trained = txl_jax.load(flags.workdir)
    exp = (
        trained.config
        if flags.data is None
        else override(trained.config, {"data.path": flags.data})
    )
    corpus = corpus_from_config(exp.data)

    def scored(split: str, temperature: float) -> float:
        loss, protocol = _loss(exp, corpus, trained.params, split, temperature)
        print(f"{protocol}: loss {loss:.4f}, perplexity {math.exp(loss):.2f}", flush=True)
        return loss

    valid = {t: scored("valid", t) for t in sorted({1.0, *flags.temperatures})}
    best = min(valid, key=lambda t: valid[t])
    result: dict[str, Any] = {"step": trained.step, "weights": trained.weights, "chosen": best}
    result["valid"] = [{"temperature": t, "loss": loss} for t, loss in valid.items()]
    if flags.test:
        of_test = {t: scored("test", t) for t in sorted({1.0, best})}
        result["test"] = [{"temperature": t, "loss": loss} for t, loss in of_test.items()]
    print(f"temperature {best:g} has the least validation loss")
    write_json(os.path.join(flags.workdir, "temperature.json"), result)
    return result


def _loss(
    exp: ExperimentConfig, corpus: Corpus, params: Any, split: Any, temperature: float
) -> tuple[float, str]:
    """Returns the loss in nats per target, and the protocol in words."""
    protocol = dataclasses.replace(exp.evaluate, split=split, temperature=temperature)
    mesh = scoring_mesh(exp.mesh, exp.model, protocol.batch_size)
    score = split_evaluator(exp.model, protocol, corpus, mesh).run(params)
    assert score is not None  # None would mean that scoring was stopped
    return score.loss, describe(protocol, exp.model)


if __name__ == "__main__":
    main()
