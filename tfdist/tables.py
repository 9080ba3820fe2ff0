"""Tables in plain text, and the sizes that stand in them."""

from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Returns a line for each row of cells; `sides` has a "<" or ">" for each column: its cells stand left or right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def size_text(count: float, unit: str = "B") -> str:
    """Returns "1.50 MB" for a number of bytes, or of another `unit`."""
    for prefix, scale in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= scale:
            return f"{count / scale:.2f} {prefix}{unit}"
    return f"{count:.0f} {unit}"
