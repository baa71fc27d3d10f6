"""Measures how a score depends on the number of streams into which the text is cut.

    python -m benchmarks.cold_start --workdir=RUN [--data-path=DATA] [--streams=1,4,10] \
        [--out=FILE.json]

``--workdir`` is a finished run of a model with memory. The ``evaluate`` section of its config gives
the protocol of scoring, and the complete split is scored. There are three series, which differ in
the attention window and in the memory at the start. Each is scored with every number of streams:

| series | window | before a stream's first segment |
|---|---|---|
| own protocol | the recipe's | nothing, or the tokens of the recipe's ``warm_start`` |
| window, cold | ``pytorch`` | nothing |
| window, warm | ``pytorch`` | the n_layer * mem_len tokens of text before it |

A cold stream starts with an empty memory, so it predicts its first tokens with little context, and
scores get worse with more streams. With the window ``pytorch``, a prediction depends on at most the
last n_layer * mem_len tokens, so several warm streams score like a single stream, up to rounding.
The output has the difference from the score of a single stream in the same series, in percent of
perplexity or of bits. The warm series is compared with a single stream of the cold series, because
a single stream has no text before it.
"""

import dataclasses
import json
import sys

from benchmarks.scoring import Row, Scorer, checked, command, parser_of, write
from txl_jax.config import ProtocolConfig


def main(argv: list[str] | None = None) -> None:
    """Scores every series as the flags say, prints a table and writes the report."""
    argv = sys.argv[1:] if argv is None else argv
    parser = parser_of(__doc__ or "")
    parser.add_argument("--streams", default="1,4,10", help="how many streams, with commas")
    flags = parser.parse_args(argv)
    streams = [int(n) for n in flags.streams.split(",")]
    if 1 not in streams:
        parser.error(f"--streams={flags.streams}: 1 must be among them, it is what is compared to")
    scorer = Scorer.of(flags)
    report = {"command": command("cold_start", argv), **scorer.about()}
    report["results"] = measure(scorer, streams)
    print(table(report["results"], scorer.unit), flush=True)
    write(json.dumps(report, indent=1), flags.out)


def measure(scorer: Scorer, streams: list[int]) -> list[Row]:
    """Returns the scores of all series, a row for each number of streams.

    ``difference_percent`` compares a row with the single stream of its series; rows of ``window,
    warm`` are compared with the single stream of ``window, cold``.
    """
    own = scorer.trained.config.evaluate
    rows = []
    base: dict[str, float] = {}
    for name, protocol in series(own, scorer.trained.config.model.n_layer):
        for n in sorted(streams):
            if name == "window, warm" and n == 1:
                continue
            chosen = checked(dataclasses.replace(protocol, batch_size=n), scorer)
            row = {"series": name, "streams": n, **scorer.row(f"{name}, {n} streams", chosen)}
            value = row[scorer.unit]
            if n == 1:
                base[name] = value
            one = base.get(name, base.get("window, cold", value))
            rows.append({**row, "difference_percent": 100 * (value / one - 1)})
    return rows


def series(own: ProtocolConfig, n_layer: int) -> list[tuple[str, ProtocolConfig]]:
    """Returns the three protocols by name; the caller sets their number of streams."""
    cold = dataclasses.replace(own, same_length="pytorch", warm_start=0, first_memory="empty")
    warm = dataclasses.replace(cold, warm_start=n_layer * own.mem_len)
    return [("own protocol", own), ("window, cold", cold), ("window, warm", warm)]


def table(rows: list[Row], unit: str) -> str:
    """Returns the rows as text, a line for each."""
    return "\n".join(
        f"{r['series']:<14} {r['streams']:>4} streams  {r[unit]:9.4f} {unit}"
        f"  {r['difference_percent']:+8.4f} %  {r['seconds']:7.1f} s"
        for r in rows
    )


if __name__ == "__main__":
    main()
