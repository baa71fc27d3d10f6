"""How a score depends on the number of streams, started cold and warm.

    python -m benchmarks.cold_start --workdir=RUN [--data-path=DATA] [--streams=1,4,10] \
        [--out=FILE.json]

``--workdir`` is a finished run with a memory; its ``evaluate`` section is the protocol, and what
is scored is all of its split. Three series, each at every number of streams:

| series | window | before a stream's first segment |
|---|---|---|
| own protocol | the recipe's | nothing (its own ``warm_start``, if it has one) |
| window, cold | ``pytorch`` | nothing |
| window, warm | ``pytorch`` | the n_layer * mem_len tokens of text before it |

A cold stream predicts its first tokens without a past, so more streams score worse. With the
window no token sees further back than n_layer * mem_len tokens, so warm streams score as one
does: a difference that is left is rounding. The difference is to one stream of the same series
(the warm series: of the cold one, for the first stream has nothing before it), in percent of
perplexity or of bits.
"""

import dataclasses
import json
import sys

from benchmarks.scoring import Row, Scorer, checked, command, parser_of, write
from txl_jax.config import ProtocolConfig


def main(argv: list[str] | None = None) -> None:
    """Score every series as the flags say, print a table and write the report."""
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
    """Rows of all series, each with ``difference_percent`` to its one stream."""
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
    """The three protocols by name; their number of streams is still to be set."""
    cold = dataclasses.replace(own, same_length="pytorch", warm_start=0, first_memory="empty")
    warm = dataclasses.replace(cold, warm_start=n_layer * own.mem_len)
    return [("own protocol", own), ("window, cold", cold), ("window, warm", warm)]


def table(rows: list[Row], unit: str) -> str:
    """The rows as text."""
    return "\n".join(
        f"{r['series']:<14} {r['streams']:>4} streams  {r[unit]:9.4f} {unit}"
        f"  {r['difference_percent']:+8.4f} %  {r['seconds']:7.1f} s"
        for r in rows
    )


if __name__ == "__main__":
    main()
