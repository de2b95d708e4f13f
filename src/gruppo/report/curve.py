"""Learning curves: a few lines of text for the terminal, a PNG for everything else."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


def terminal_chart(points: Sequence[tuple[float, float]], *, title: str, width: int = 60, height: int = 10) -> str:
    """A chart in block characters; y from 0 to 1.

    >>> print(terminal_chart([(0, 0.0), (1, 1.0)], title="score", width=4, height=2))
    score
    1.0 ┤  ▄█
    0.5 ┤▄███
        └────
         0  1
    """
    if not points:
        return title
    first, last = points[0][0], points[-1][0]
    columns = [_interpolate(points, first + (last - first) * i / max(width - 1, 1)) for i in range(width)]
    lines = [title]
    for row in range(height, 0, -1):
        cells = "".join(_cell(value * height - (row - 1)) for value in columns)
        label = f"{row / height:.1f} ┤" if row % 2 == 0 or height <= 4 else "    │"
        lines.append(label + cells)
    lines.append("    └" + "─" * width)
    start, end = f"{first:g}", f"{last:g}"
    lines.append("     " + start + " " * max(width - len(start) - len(end), 1) + end)
    return "\n".join(lines)


def save_png(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out accuracy with its interval, and the reward of the training prompts."""
    import altair as alt
    import vl_convert as vlc

    accuracy, samples = "held-out accuracy (greedy)", "reward of training samples"
    held_out = [
        {"step": m["step"], "value": m["eval/accuracy"], "low": m["eval/accuracy_low"], "high": m["eval/accuracy_high"]}
        | {"curve": accuracy}
        for m in metrics
        if "eval/accuracy" in m
    ]
    reward = [{"step": m["step"], "value": m["reward/mean"], "curve": samples} for m in metrics if "reward/mean" in m]
    x = alt.X("step:Q", title="step")
    y = alt.Y("value:Q", title=None, scale=alt.Scale(domain=[0, 1]))
    colors = alt.Scale(domain=[accuracy, samples], range=["#1f5fa8", "#b8bfc9"])
    color = alt.Color("curve:N", title=None, scale=colors, legend=alt.Legend(orient="bottom-right"))
    band = alt.Chart(alt.Data(values=held_out)).mark_area(opacity=0.18, color="#1f5fa8")
    band = band.encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q")
    noisy = alt.Chart(alt.Data(values=reward)).mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color)
    smooth = alt.Chart(alt.Data(values=held_out)).mark_line(strokeWidth=3, point=True).encode(x=x, y=y, color=color)
    chart = alt.layer(noisy, band, smooth).properties(width=640, height=340, title="Learning curve")
    chart = chart.configure_axis(gridColor="#eeeeee").configure_view(strokeWidth=0)
    path.write_bytes(vlc.vegalite_to_png(chart.to_dict(), scale=2))


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def _cell(fill: float) -> str:
    """One character filled from below: nothing, an eighth, ... all of it."""
    return " ▁▂▃▄▅▆▇█"[round(min(max(fill, 0.0), 1.0) * 8)]
