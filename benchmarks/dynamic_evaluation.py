"""Measures the gain of dynamic evaluation, in which the model also learns from the scored text.

    python -m benchmarks.dynamic_evaluation --workdir=RUN [--data-path=DATA] [--rule=rms] \
        [--rates=1e-5,3e-5,1e-4] [--decay=0] [--epsilon=1e-4] [--statistics=100] \
        [--valid-segments=N] [--out=FILE.json]

``--workdir`` is a finished run. The ``evaluate`` section of its config is the protocol, except that
there is one stream, as in Krause et al. 2019. The program scores the validation split (or its first
N segments) without dynamic evaluation and with every learning rate. Then it scores the test split
without dynamic evaluation and with the best rate.
"""

import dataclasses
import json
import sys

from benchmarks.scoring import Row, Scorer, checked, command, numbers, parser_of, write
from txl_jax.config import DynamicConfig


def main(argv: list[str] | None = None) -> None:
    """Scores as the flags say, prints a table and writes the report."""
    argv = sys.argv[1:] if argv is None else argv
    parser = parser_of(__doc__ or "")
    add = parser.add_argument
    add("--rule", default="rms", choices=["sgd", "rms"], help="what learns")
    add("--rates", type=numbers, default=[1e-5, 3e-5, 1e-4], help="learning rates, with commas")
    add("--decay", type=float, default=0.0, help="of the pull to the trained parameters")
    add("--epsilon", type=float, default=1e-4, help="added to the root of the statistics")
    add("--statistics", type=int, default=100, help="training segments of the statistics")
    add("--valid-segments", type=int, default=0, help="of the validation split; 0: all")
    flags = parser.parse_args(argv)
    rules = [
        DynamicConfig(
            rule=flags.rule,
            learning_rate=rate,
            decay=flags.decay,
            epsilon=flags.epsilon,
            statistics=flags.statistics,
        )
        for rate in flags.rates
    ]
    scorer = Scorer.of(flags)
    report = {"command": command("dynamic_evaluation", argv), **scorer.about()}
    report["results"] = measure(scorer, rules, flags.valid_segments)
    unit = scorer.unit
    for r in report["results"]:
        print(f"{r['split']:<5}  {r['name']:<16} {r[unit]:9.4f} {unit}  {r['seconds']:7.1f} s")
    write(json.dumps(report, indent=1), flags.out)


def measure(scorer: Scorer, rules: list[DynamicConfig], valid_segments: int) -> list[Row]:
    """Returns rows of scores, first of the validation split, and then of the test split.

    The validation split is scored without learning and with each rule, and the test split without
    learning and with the rule that is best on validation.
    """
    own = dataclasses.replace(scorer.trained.config.evaluate, batch_size=1)

    def row(split, rule: DynamicConfig, segments: int) -> Row:
        name = "static" if rule.rule == "none" else f"{rule.rule} {rule.learning_rate:g}"
        protocol = dataclasses.replace(own, split=split, dynamic=rule, max_segments=segments)
        return {"split": split, **scorer.row(name, checked(protocol, scorer))}

    static = DynamicConfig()
    valid = [row("valid", rule, valid_segments) for rule in (static, *rules)]
    best = min(range(len(rules)), key=lambda i: valid[1 + i]["loss"])
    test = [row("test", rule, own.max_segments) for rule in (static, rules[best])]
    return [*valid, *test]


if __name__ == "__main__":
    main()
