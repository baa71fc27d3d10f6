"""Draws images/model.svg: the model from tokens to losses, and the attention of one layer.

python docs/draw_model.py
"""

import pathlib

from draw_memory import COLOURS, text

WIDTH, HEIGHT = 900, 580
BLACK, GREY = "#222222", "#777777"
TERMS = (  # terms of the score of query i and key j, with the letters of model/scores.py
    ("(a)", "q_i · k_j", "what i asks of the content of j"),
    ("(b)", "q_i · r_(i-j)", "what i asks of the distance to j"),
    ("(c)", "u · k_j", "the content of j, for every query"),
    ("(d)", "v · r_(i-j)", "the distance to j, for every query"),
)


def box(x: int, y: int, width: int, *lines: str, colour: str = BLACK, height: int = 44) -> str:
    """Returns a rounded box with lines of words in its middle."""
    sides = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="7"'
    first = y + height // 2 + 5 - 9 * (len(lines) - 1)
    words = [text(x + width // 2, first + 18 * n, line) for n, line in enumerate(lines)]
    shape = f'<rect {sides} fill="white" stroke="{colour}" stroke-width="1.6"/>'
    return "\n".join([shape, *words])


def arrow(*points: tuple[int, int], colour: str = BLACK, dashed: bool = False) -> str:
    """Returns a line through points, with an arrow head at the last one."""
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    (x, y), (to_x, to_y) = points[-2:]
    right, down = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    sides = [(to_x - 8 * right + 4 * s * down, to_y - 8 * down + 4 * s * right) for s in (1, -1)]
    path, head = (" ".join(f"{a},{b}" for a, b in way) for way in (points, [(to_x, to_y), *sides]))
    style = f'fill="none" stroke="{colour}" stroke-width="1.6"{dashes}'
    return f'<polyline points="{path}" {style}/><polygon points="{head}" fill="{colour}"/>'


def frame(x: int, y: int, width: int, height: int) -> str:
    """Returns a pale area that lies behind boxes."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="12" fill="#f2f2f2"/>'


def model() -> list[str]:
    """Returns the left half: from tokens at the bottom to losses, with the memory of a layer."""
    memory, middle = COLOURS["memory"], 275
    return [
        frame(165, 130, 220, 316),
        text(177, 154, "layer n of L", "start"),
        box(190, 500, 170, "embedding × √D"),
        text(middle, 572, "tokens [B,T]"),
        arrow((middle, 560), (middle, 544)),
        arrow((middle, 500), (middle, 424)),
        text(middle + 10, 470, "h [B,T,D]", "start", GREY),
        box(190, 380, 170, "attention"),
        arrow((middle, 380), (middle, 354)),
        box(190, 310, 170, "add h, LayerNorm"),
        arrow((middle, 310), (middle, 284)),
        box(190, 240, 170, "feed-forward"),
        arrow((middle, 240), (middle, 214)),
        box(190, 170, 170, "add h, LayerNorm"),
        arrow((middle, 170), (middle, 94)),
        box(190, 50, 170, "adaptive softmax"),
        arrow((middle, 50), (middle, 28)),
        text(middle, 20, "losses [B,T]"),
        box(10, 370, 118, "memory of n", "m [B,M,D]", colour=memory, height=64),
        arrow((128, 402), (190, 402), colour=memory, dashed=True),
        text(69, 456, "no gradient", colour=memory),
        box(10, 240, 118, "next memory", "[B,M,D]", colour=memory, height=64),
        arrow((middle, 462), (146, 462), (146, 272), (128, 272), colour=memory, dashed=True),
        text(69, 224, "last M of [m; h]", colour=memory),
    ]


def attention() -> list[str]:
    """Returns the right half: the four terms of the scores, and the steps after them."""
    left, width = 480, 400
    rows = []
    for n, (letter, product, meaning) in enumerate(TERMS):
        y = 252 + 30 * n
        rows.append(text(left + 16, y, letter, "start", COLOURS["segment"]))
        rows.append(text(left + 52, y, product, "start"))
        rows.append(text(left + 150, y, meaning, "start", GREY))
    inputs = (("q from h", 480, 90), ("k, v from [m; h]", 590, 140), ("r from distances", 750, 130))
    return [
        frame(left - 20, 10, width + 30, 540),
        text(left + width // 2, 34, "attention of one head"),
        *(box(x, 490, wide, name) for name, x, wide in inputs),
        *(arrow((x + wide // 2, 490), (x + wide // 2, 394)) for _, x, wide in inputs),
        box(left, 200, width, height=194, colour=COLOURS["segment"]),
        text(left + 16, 221, "score of query i and key j: the sum of", "start"),
        *rows,
        text(left + 16, 374, "r: projected sinusoids of i - j; u, v: learnt", "start", GREY),
        arrow((left + width // 2, 200), (left + width // 2, 174)),
        box(left + 60, 130, width - 120, "/ √H, mask of later keys, softmax"),
        arrow((left + width // 2, 130), (left + width // 2, 104)),
        box(left + 60, 60, width - 120, "mean of v, heads joined, projection"),
    ]


def draw() -> str:
    """Returns the picture as SVG."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, paper, *model(), *attention(), "</svg>\n"])


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "images" / "model.svg").write_text(draw())
