"""Timelines as pictures: SVG, and an HTML page with the same picture, tooltips and a zoom. Pure.

Ranks are rows and time runs to the right. A box is one operation with its micro-batch's number; a box cut in two is a
pair, its forward above its backward. Several timelines, say the predicted and the measured one of a step, stand one
above the other on one time axis.
"""

from __future__ import annotations

import math
from html import escape

from megarl.pipeline.schedule import Op, Pair, parts
from megarl.pipeline.simulate import Timeline
from megarl.pipeline.trace import Span, spans

_ROW, _GAP, _PANEL_HEAD, _LEGEND, _AXIS = 26, 5, 44, 40, 46  # px
_LEFT, _RIGHT, _MARGIN = 66, 140, 14
_DIGIT = 6.2  # px of a digit at the font size of the numbers
_NARROWEST, _WIDEST = 900, 6000  # px of the time axis

# kind -> (fill of a rank's first stage, of its later stages), told apart by the text's colour too
_COLOURS = {"F": ("#a9c9f2", "#2f66ad"), "B": ("#b5dfae", "#31803a"), "I": ("#a5e3dc", "#14786f"),
            "W": ("#ffd48a", "#b46b00")}
_MEANING = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def svg(lines: dict[str, Timeline], unit: str = "", tooltips: bool = False) -> str:
    """One SVG of all timelines.

    Args:
        lines: title of each timeline, in the order from top to bottom.
        unit: of the time axis, "s" for instance.
        tooltips: whether each box tells its operation and times when pointed at (the file is twice as large).
    """
    longest = max(line.makespan for line in lines.values()) or 1.0
    axis = _axis_width(lines, longest)
    scale = axis / longest
    body, top = [_legend(_MARGIN, lines)], _MARGIN + _LEGEND
    tops = []
    for title, line in lines.items():
        body.append(_panel(title, line, top, scale, unit, tooltips))
        tops.append((top + _PANEL_HEAD, top + _PANEL_HEAD + line.schedule.ranks * (_ROW + _GAP)))
        top = tops[-1][1] + _GAP
    grid = _axis(tops, longest, scale, unit)
    width, height = round(_LEFT + axis + _RIGHT), top + _AXIS
    style = "".join(f".{kind}0{{fill:{light}}}.{kind}1{{fill:{dark}}}" for kind, (light, dark) in _COLOURS.items())
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="12">\n'
            f"<style>{style}rect{{stroke:#fff;stroke-width:.7}}.n{{font-size:10px;text-anchor:middle}}"
            ".d{fill:#fff}.t{font-size:14px;font-weight:bold}.m{fill:#555}.g{stroke:#ddd}</style>\n"
            f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + grid + "\n".join(body) + "\n</svg>\n")


def html(lines: dict[str, Timeline], unit: str = "") -> str:
    """A page that needs nothing from elsewhere: the picture with tooltips, and a slider that stretches it."""
    picture = svg(lines, unit, tooltips=True)
    width = picture.split('width="', 1)[1].split('"', 1)[0]
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(", ".join(lines))}</title>
<style>body{{font-family:sans-serif;margin:12px}}#view{{overflow-x:auto}}svg{{height:auto}}</style>
<label>zoom <input type="range" min="0.25" max="4" step="0.05" value="1"
 oninput="document.querySelector('svg').style.width = this.value * {width} + 'px'"></label>
<div id="view">
{picture}</div>
</html>
"""


def _axis_width(lines: dict[str, Timeline], longest: float) -> float:
    """Wide enough for the numbers in all but the shortest twentieth of the boxes."""
    wanted = sorted((span.end - span.start) / (_DIGIT * max(len(str(op.microbatch)) for op in parts(span.item)) + 3)
                    for line in lines.values() for span in spans(line) if span.end - span.start > 1e-12)
    if not wanted:
        return _NARROWEST
    return min(max(longest / wanted[len(wanted) // 20], _NARROWEST), _WIDEST)


def _legend(top: int, lines: dict[str, Timeline]) -> str:
    items = [item for line in lines.values() for items in line.schedule.items for item in items]
    kinds = {op.kind for item in items for op in parts(item)}
    several = any(line.schedule.stages > line.schedule.ranks or line.schedule.copies > 1 for line in lines.values())
    drawn, x = [], _LEFT
    for kind in (kind for kind in _COLOURS if kind in kinds):
        text = f"{kind} {_MEANING[kind]}"
        drawn.append(f'<rect class="{kind}0" x="{x}" y="{top}" width="18" height="14"/>')
        if several:
            drawn.append(f'<rect class="{kind}1" x="{x + 18}" y="{top}" width="18" height="14"/>')
        x += 24 + 18 * several
        drawn.append(f'<text x="{x}" y="{top + 11}">{text}</text>')
        x += 7 * len(text) + 16
    if any(isinstance(item, Pair) for item in items):
        drawn.append(f'<rect class="F0" x="{x}" y="{top - 3}" width="26" height="10"/>'
                     f'<rect class="B1" x="{x}" y="{top + 7}" width="26" height="10"/>'
                     f'<text x="{x + 32}" y="{top + 11}">F&amp;B pair</text>')
        x += 110
    if several:
        drawn.append(f'<text class="m" x="{x}" y="{top + 11}">light: first stage of a rank, dark: later ones</text>')
    return "\n".join(drawn)


def _panel(title: str, line: Timeline, top: int, scale: float, unit: str, tooltips: bool) -> str:
    schedule = line.schedule
    copies = f", {schedule.copies} parameter copies" if schedule.copies > 1 else ""
    facts = (f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches{copies}; "
             f"makespan {line.makespan:.4g}{unit and ' ' + unit}, bubble {100 * line.bubble_fraction:.1f} %, "
             f"peak memory {max(line.peak_memory):g} (micro-batches' activations of 1/{schedule.ranks} of the model)")
    right = _LEFT + line.makespan * scale + 10
    drawn = [f'<text class="t" x="{_LEFT}" y="{top + 16}">{escape(title)}</text>',
             f'<text x="{_LEFT}" y="{top + 34}">{facts}</text>',
             f'<text class="m" x="{right:.0f}" y="{top + 34}">bubble</text>',
             f'<text class="m" x="{right + 60:.0f}" y="{top + 34}">memory</text>']
    for rank in range(schedule.ranks):
        middle = top + _PANEL_HEAD + rank * (_ROW + _GAP) + _ROW / 2 + 4
        drawn += [f'<text x="{_LEFT - 10}" y="{middle:g}" text-anchor="end">rank {rank}</text>',
                  f'<text x="{right:.0f}" y="{middle:g}">{100 * line.bubble[rank]:.1f} %</text>',
                  f'<text x="{right + 60:.0f}" y="{middle:g}">{line.peak_memory[rank]:g}</text>']
    first = [min((op.stage for op in schedule.ops(rank)), default=0) for rank in range(schedule.ranks)]
    if schedule.copies > 1:  # mirrored: the first stage is the one nearer to this rank's own end
        first = list(range(schedule.ranks))
    drawn += [_box(span, first[span.rank], top + _PANEL_HEAD + span.rank * (_ROW + _GAP), scale, tooltips)
              for span in spans(line)]
    return "\n".join(drawn)


def _box(span: Span, first_stage: int, y: float, scale: float, tooltips: bool) -> str:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    ops = parts(span.item)
    height = _ROW / len(ops)
    drawn = [_half(op, op.stage != first_stage, x, y + i * height, width, height) for i, op in enumerate(ops)]
    if not tooltips:
        return "".join(drawn)
    return f"<g><title>{escape(str(span.item))}: {span.start:.6g} to {span.end:.6g}</title>{''.join(drawn)}</g>"


def _half(op: Op, dark: bool, x: float, y: float, width: float, height: float) -> str:
    number = str(op.microbatch)
    box = f'<rect class="{op.kind}{dark:d}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"/>'
    if _DIGIT * len(number) > width:
        return box
    return (f'{box}<text class="n{" d" if dark else ""}" x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:g}">'
            f"{number}</text>")


def _axis(tops: list[tuple[int, int]], longest: float, scale: float, unit: str) -> str:
    """Grid lines through all panels at round times, and their labels below the last one."""
    rough = longest / 12
    step = 10 ** math.floor(math.log10(rough))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= rough)
    drawn = []
    for tick in range(math.floor(longest / step) + 1):
        x = _LEFT + tick * step * scale
        drawn += [f'<path class="g" d="M{x:.1f} {top}V{bottom}"/>' for top, bottom in tops]
        drawn.append(f'<text class="m" x="{x:.1f}" y="{tops[-1][1] + 16}" text-anchor="middle">{tick * step:g}</text>')
    drawn.append(f'<text class="m" x="{_LEFT}" y="{tops[-1][1] + 34}">time{unit and f" in {unit}"}</text>')
    return "\n".join(drawn) + "\n"
