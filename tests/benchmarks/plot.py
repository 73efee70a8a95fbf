"""Results as charts in SVG.

Bars: one group per row, whose longest bar is as wide as the plot. Lines: one panel for each figure of cases that differ
in one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from .cases import Row
from .figures import median_of, number

__all__ = ['lines', 'plot']

_COLOURS = ('#c0392b', '#7f8c8d', '#2980b9', '#27ae60', '#e67e22', '#8e44ad')
_WIDTH, _BAR, _LEFT, _LABELS = 900, 16, 110, 160
#: The panels beside each other; what is drawn in a panel is this broad and high, with this height around it for texts.
_COLUMNS, _BREADTH, _HEIGHT, _AROUND = 3, 160, 110, 80


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
    return _image(y + 20, parts)


def lines(rows: Mapping[Row, Mapping[str, Sequence[float]]], systems: Sequence[str]) -> str:
    """Return an SVG image of the rows that are points of lines: a panel for each figure, a line for each system.

    The points stand at equal distances, so that 1 and 10 are as far from each other as 10 and 100.
    """
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for row, values in rows.items():
        if row.point is None:
            continue
        figure, at = row.point
        panel = panels.setdefault(f'{figure} ({row.unit})', {})
        for system in systems:
            if (median := median_of(values.get(system, ()))) is not None:
                panel.setdefault(system, {})[at] = median
    colours = dict(zip(systems, _COLOURS, strict=False))
    parts: list[str] = []
    for nth, (title, panel) in enumerate(panels.items()):
        left, top = nth % _COLUMNS * (_WIDTH // _COLUMNS), nth // _COLUMNS * (_HEIGHT + _AROUND)
        parts.append(f'<text x="{left + 10}" y="{top + 24}" class="figure">{escape(title)}</text>')
        parts += _panel(panel, colours, left + 50, top + 44)
    return _image((_HEIGHT + _AROUND) * math.ceil(len(panels) / _COLUMNS), parts)


def _image(height: int, parts: Sequence[str]) -> str:
    style = (
        'text { font: 12px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 16px } '
        '.figure { font-weight: bold } polyline { fill: none; stroke-width: 2 } '
        '.axes { fill: none; stroke: #bbb }'
    )
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


def _panel(lines: Mapping[str, Mapping[int, float]], colours: Mapping[str, str], left: int, top: int) -> Iterator[str]:
    bottom, highest = top + _HEIGHT, max((max(line.values()) for line in lines.values()), default=0.0) or 1.0
    ticks = sorted({at for line in lines.values() for at in line})
    xs = {at: left + nth * _BREADTH / max(1, len(ticks) - 1) for nth, at in enumerate(ticks)}
    yield f'<path d="M {left} {top} V {bottom} h {_BREADTH}" class="axes"/>'
    yield f'<text x="{left - 6}" y="{top + 4}" text-anchor="end">{number(highest)}</text>'
    for at, x in xs.items():
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{at}</text>'
    ends: list[tuple[float, str]] = []
    for system, line in lines.items():
        ys = {at: bottom - value / highest * _HEIGHT for at, value in line.items()}
        points = ' '.join(f'{xs[at]:.1f},{y:.1f}' for at, y in ys.items())
        yield f'<polyline points="{points}" stroke="{colours[system]}"/>'
        ends.append((ys[max(ys)], f'{system} {number(line[max(line)])}'))
    y = -math.inf
    for end, text in sorted(ends):
        y = max(end, y + 14)  # texts at lines that end together stand below each other
        yield f'<text x="{left + _BREADTH + 6}" y="{y + 4:.1f}">{escape(text)}</text>'


def _bars(medians: Mapping[str, float], colours: Mapping[str, str], top: int) -> Iterator[str]:
    longest = max(medians.values()) or 1.0
    for place, (system, value) in enumerate(medians.items()):
        y, width = top + place * _BAR, max(1.0, value / longest * (_WIDTH - _LEFT - _LABELS))
        yield f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(system)}</text>'
        yield f'<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="{_BAR - 4}" fill="{colours[system]}"/>'
        yield f'<text x="{_LEFT + width + 6:.1f}" y="{y + 12}">{number(value)}</text>'
