"""Copies two figures of a run to images/: its loss curve and its attention, as small PNGs.

txl --workdir=runs/quickstart --mode=attention --config.attention.mem_len=192
python docs/draw_run.py runs/quickstart
"""

import pathlib
import sys

from PIL import Image

IMAGES, COLOURS = pathlib.Path(__file__).parent / "images", 64

if __name__ == "__main__":
    for name in ("loss", "attention"):
        with Image.open(pathlib.Path(sys.argv[1]) / f"{name}.png") as figure:
            small = figure.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            small.save(IMAGES / f"{name}.png", optimize=True)
