"""Plain text tables: columns aligned, nothing a pipe could not take."""

from collections.abc import Mapping, Sequence


def printable(text: str) -> str:
    """Return text without what a terminal could obey: names in a file may come from a stranger. Line ends stay."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with aligned columns; numbers to the right, a rule below the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(_aligned(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def facts_table(facts: Mapping[str, str]) -> str:
    """Return name -> value as two aligned columns."""
    width = max(len(name) for name in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def _aligned(cell: str, width: int) -> str:
    return cell.rjust(width) if cell.replace(",", "").replace(".", "").isdigit() else cell.ljust(width)
