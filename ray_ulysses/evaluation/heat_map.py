"""Draws retrieval grids, length by depth, as an SVG picture (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_ulysses.evaluation.results import RetrievalCell

_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _TOP, _GAP = 64, 28, 96, 64, 48
_NONE, _ALL = (178, 24, 43), (26, 152, 80)


def heat_map(grids: Mapping[tuple[str, int], Sequence[RetrievalCell]], *, title: str) -> str:
    """Return a picture with a grid for each kind, lengths from left to right and depths from top to bottom.

    Args:
        grids: The cells of each kind and length, in the order of depths.
        title: A line above.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in grids))
    lengths = list(dict.fromkeys(length for _, length in grids))
    most = max(len(cells) for cells in grids.values())
    width = _LEFT + len(kinds) * (len(lengths) * _CELL_WIDTH + _GAP)
    height = _TOP + most * _CELL_HEIGHT + _GAP
    shapes = [_text(_GAP // 3, 20, f"Share of right answers: {title}", "start", 14)]
    shapes.append(_text(_GAP // 3, _TOP - 8, "depth", "start"))
    depths = next(iter(grids.values()))
    for row, cell in enumerate(depths):
        shapes.append(_text(_LEFT - 10, _TOP + row * _CELL_HEIGHT + 19, f"{cell.depth:.0%}", "end"))
    for place, kind in enumerate(kinds):
        left = _LEFT + place * (len(lengths) * _CELL_WIDTH + _GAP)
        shapes.append(_text(left, _TOP - 24, kind, "start", 13))
        for column, length in enumerate(lengths):
            x = left + column * _CELL_WIDTH
            shapes.append(_text(x + _CELL_WIDTH // 2, _TOP - 8, f"{length:,}", "middle"))
            for row, cell in enumerate(grids.get((kind, length), ())):
                shapes += _cell(x, _TOP + row * _CELL_HEIGHT, cell)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _cell(x: int, y: int, cell: RetrievalCell) -> list[str]:
    share = cell.accuracy
    color = ",".join(str(round(low + (high - low) * share)) for low, high in zip(_NONE, _ALL, strict=True))
    words = f"{cell.kind}, {cell.length:,} tokens, depth {cell.depth:.0%}: {cell.correct} of {cell.cases}"
    return [
        f'<rect x="{x}" y="{y}" width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}" fill="rgb({color})">'
        f"<title>{escape(words)}</title></rect>",
        _text(x + _CELL_WIDTH // 2, y + 18, f"{share:.0%}", "middle", 12, "white"),
    ]


def _text(x: int, y: int, words: str, anchor: str, size: int = 12, color: str = "black") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(words)}</text>'
