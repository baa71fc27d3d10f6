"""Draws images/memory.svg: the segments of a text, and the memory that the third one reads.

python docs/draw_memory.py
"""

import pathlib

T, SEGMENTS, LAYERS = 4, 3, 2
STEP, SIDE, TOP, ROW = 62, 120, 70, 80
COLOURS = {"old": "#d4d4d4", "memory": "#e08214", "segment": "#2b6cb0"}
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="14"'


def place(position: int, layer: int) -> tuple[int, int]:
    """Returns where the state of a position is drawn; layer 0, the tokens, is at the bottom."""
    return SIDE + STEP * position + 30 * (position // T), TOP + ROW * (LAYERS - layer)


def line(start: tuple[int, int], end: tuple[int, int], colour: str, dashed: bool) -> str:
    """Returns a straight line as SVG."""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    ends = f'x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"'
    return f'<line {ends} stroke="{colour}" stroke-width="1.4"{dashes}/>'


def text(x: int, y: int, words: str, anchor: str = "middle", colour: str = "#222222") -> str:
    """Returns words at a place as SVG."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" {FONT}>{words}</text>'


def draw() -> str:
    """Returns the picture as SVG; each state attends to T + 1 states of the layer below it."""
    lines, states, labels = [], [], []
    first = T * (SEGMENTS - 1)  # position of the current segment
    for position in range(T * SEGMENTS):
        current, memory = position >= first, first - T <= position < first
        for layer in range(LAYERS + 1):
            x, y = place(position, layer)
            of_memory = memory and layer < LAYERS
            kind = "segment" if current else "memory" if of_memory else "old"
            states.append(f'<circle cx="{x}" cy="{y}" r="11" fill="{COLOURS[kind]}"/>')
            if layer:
                for key in range(max(position - T, 0), position + 1):
                    from_memory = current and key < first
                    way = "memory" if from_memory else "segment" if current else "old"
                    end = place(key, layer - 1)
                    lines.append((not current, line(end, (x, y), COLOURS[way], from_memory)))
    ordered = [shaft for _, shaft in sorted(lines, key=lambda pair: not pair[0])]
    for segment in range(SEGMENTS):
        middle = (place(segment * T, 0)[0] + place(segment * T + T - 1, 0)[0]) // 2
        name = f"segment {segment + 1}" + (" (current)" if segment == SEGMENTS - 1 else "")
        labels.append(text(middle, TOP + ROW * LAYERS + 42, name))
    for layer in range(LAYERS + 1):
        name = f"layer {layer}" if layer else "embeddings"
        labels.append(text(12, place(0, layer)[1] + 5, name, "start"))
    width, height = place(T * SEGMENTS - 1, 0)[0] + 40, TOP + ROW * LAYERS + 64
    legend = "memory: states of earlier segments, read without a gradient"
    labels.append(text(SIDE - 10, 28, legend, "start", COLOURS["memory"]))
    labels.append(
        text(width - 30, 28, "states of this segment, trained", "end", COLOURS["segment"])
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, paper, *ordered, *states, *labels, "</svg>\n"])


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "images" / "memory.svg").write_text(draw())
