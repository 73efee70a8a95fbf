"""Results as bar charts in SVG: one group of bars per row; its longest bar is as wide as the plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from .cases import Row
from .figures import median_of, number

__all__ = ['plot']

_COLOURS = ('#c0392b', '#7f8c8d', '#2980b9', '#27ae60', '#e67e22', '#8e44ad')
_WIDTH, _BAR, _LEFT, _LABELS = 900, 16, 110, 160


def plot(rows: Mapping[Row, Mapping[str, Sequence[float]]], systems: Sequence[str], titles: Mapping[str, str]) -> str:
    """Return an SVG image. `titles` maps a measure to its headline. A system has the same colour in all groups."""
    colours = dict(zip(systems, _COLOURS, strict=False))
    parts: list[str] = []
    y, measure = 0, ''
    for row, values in rows.items():
        medians = {system: found for system in systems if (found := median_of(values.get(system, ()))) is not None}
        if not medians:
            continue
        if row.measure != measure:
            measure = row.measure
            y += 40
            parts.append(f'<text x="10" y="{y}" class="title">{escape(titles.get(measure, measure))}</text>')
        y += 26
        better = 'more is better' if row.more_is_better else 'less is better'
        parts.append(f'<text x="10" y="{y}">{escape(row.label)} ({escape(row.unit)}, {better})</text>')
        y += 6
        parts += _bars(medians, colours, y)
        y += _BAR * len(medians)
    height = y + 20
    style = 'text { font: 12px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 16px }'
    return '\n'.join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}">',
            f'<style>{style}</style>',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            *parts,
            '</svg>',
            '',
        ]
    )


def _bars(medians: Mapping[str, float], colours: Mapping[str, str], top: int) -> Iterator[str]:
    longest = max(medians.values()) or 1.0
    for place, (system, value) in enumerate(medians.items()):
        y, width = top + place * _BAR, max(1.0, value / longest * (_WIDTH - _LEFT - _LABELS))
        yield f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(system)}</text>'
        yield f'<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="{_BAR - 4}" fill="{colours[system]}"/>'
        yield f'<text x="{_LEFT + width + 6:.1f}" y="{y + 12}">{number(value)}</text>'
