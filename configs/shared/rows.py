"""Reads the name of a variant in a config whose variants are the rows of a table."""


def row_of(variant, rows):
    """Returns the name of the row that a variant selects, and whether its small version is meant.

    A variant is ``ROW``, or ``ROW-smoke`` for the small version. An empty variant or ``smoke``
    names the first row.

    Raises:
      ValueError: there is no such row; the message names all rows.
    """
    row, small = variant.removesuffix("smoke").removesuffix("-"), variant.endswith("smoke")
    row = row or next(iter(rows))
    if row not in rows:
        raise ValueError(f"there is no row {row!r}; rows: {', '.join(rows)}")
    return row, small
