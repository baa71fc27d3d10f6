"""Draws images/program.svg: a token's way through the packages, and who imports whom.

python docs/draw_program.py
"""

import pathlib

from draw_memory import COLOURS, text
from draw_model import BLACK, GREY, arrow, box, frame

WIDTH, HEIGHT = 900, 556
STATIONS = (  # stations of a token: a package or file, and what it makes
    ("data/corpus.py", "text → ids"),
    ("data/streams.py", "segments [B,T]"),
    ("model/", "losses [B,T]"),
    ("training/step.py", "an update"),
    ("checkpoint/", "a saved state"),
)
LAYERS = (
    ("main, library", "the command; Python functions"),
    ("modes", "what each mode prints and returns"),
    ("analysis | planning", "context, RECL, sweeps; memory and FLOPs before a run"),
    ("training | agents", "plan, loop, step, optimizer; acting with memory"),
    ("generation | convert", "samples; weights of other programs"),
    ("evaluation", "scores of a split or a text"),
    ("checkpoint", "saved states and models"),
    ("model | data", "the module and its kernels; sources, streams"),
    ("parallel, config, records, files, …", "meshes, settings, logs, paths"),
)


def way() -> list[str]:
    """Returns the stations in a row, the memory above the model, and what reads a checkpoint."""
    memory, width, step, y = COLOURS["memory"], 140, 176, 70
    drawn = []
    for n, station in enumerate(STATIONS):
        x = 28 + step * n
        drawn.append(box(x, y, width, *station, height=58))
        if n:
            drawn.append(arrow((x - step + width, y + 29), (x, y + 29)))
    middle, update = 28 + 2 * step + width // 2, 28 + 3 * step + width // 2
    loop = ((middle + 30, y), (middle + 30, 34), (middle - 30, 34), (middle - 30, y))
    drawn.append(arrow(*loop, colour=memory, dashed=True))
    drawn.append(text(middle, 22, "mems [L,B,M,D], to the next segment", colour=memory))
    under = y + 84
    drawn.append(arrow((update, y + 58), (update, under), (middle, under), (middle, y + 58)))
    drawn.append(text(update - 88, y + 102, "parameters", colour=GREY))
    last = 28 + 4 * step + width // 2
    drawn.append(arrow((last, y + 58), (last, y + 84)))
    drawn.append(text(last, y + 102, "evaluation/, generation/"))
    return drawn


def layers() -> list[str]:
    """Returns the packages in rows; each imports only from the rows below it."""
    top, row = 212, 37
    drawn = [frame(20, top - 8, WIDTH - 40, row * len(LAYERS) + 12)]
    for n, (names, job) in enumerate(LAYERS):
        y = top + row * n
        drawn.append(box(90, y, 300, names, colour=COLOURS["segment"], height=30))
        drawn.append(text(408, y + 20, job, "start"))
    drawn.append(arrow((55, top + 4), (55, top + row * len(LAYERS) - 10), colour=BLACK))
    drawn.append(text(40, top - 18, "imports go down", "start", GREY))
    return drawn


def draw() -> str:
    """Returns the picture as SVG."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, paper, *way(), *layers(), "</svg>\n"])


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "images" / "program.svg").write_text(draw(), "utf-8")
