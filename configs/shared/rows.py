"""Reads the variant of a config with several rows."""


def row_of(variant, rows):
    """The row that ``ROW``, ``ROW-smoke`` or ``smoke`` names (none: the first), and if it is small.

    Raises:
      ValueError: there is no such row; names those there are.
    """
    row, small = variant.removesuffix("smoke").removesuffix("-"), variant.endswith("smoke")
    row = row or next(iter(rows))
    if row not in rows:
        raise ValueError(f"there is no row {row!r}; rows: {', '.join(rows)}")
    return row, small
