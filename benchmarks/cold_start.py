"""Measures how a score depends on the number of streams, with cold and warm starts.

    python -m benchmarks.cold_start --workdir=RUN [--data-path=DATA] [--streams=1,4,10] \
        [--out=FILE.json]

``--workdir`` is a finished run with a memory; its ``evaluate`` section is the protocol, and its
whole split is scored. There are three series, each with every number of streams:

| series | window | before a stream's first segment |
|---|---|---|
| own protocol | the recipe's | nothing (its own ``warm_start``, if it has one) |
| window, cold | ``pytorch`` | nothing |
| window, warm | ``pytorch`` | the n_layer * mem_len tokens of text before it |

A cold stream predicts its first tokens without a past, so more streams score worse. With the
window no token sees further back than n_layer * mem_len tokens, so several warm streams score as
one stream does, up to rounding. The output has the difference from one stream of the same series,
in percent of perplexity or of bits. The warm series is compared with one stream of the cold series,
for the first stream has nothing before it.
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
    """Returns rows of all series; ``difference_percent`` is the difference from one stream."""
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
    """Returns the rows as text."""
    return "\n".join(
        f"{r['series']:<14} {r['streams']:>4} streams  {r[unit]:9.4f} {unit}"
        f"  {r['difference_percent']:+8.4f} %  {r['seconds']:7.1f} s"
        for r in rows
    )


if __name__ == "__main__":
    main()
