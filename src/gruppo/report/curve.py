"""Learning curves: a few lines of text for the terminal, a PNG for everything else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gruppo.keys import HELD_OUT_SCORES, held_out_key, held_out_name

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Blocks filled from below, in eighths."""


def terminal_chart(points: Sequence[tuple[float, float]], *, title: str, width: int = 60, height: int = 10) -> str:
    """Chart in block characters, with y from 0 to 1.

    >>> print(terminal_chart([(0, 0.0), (1, 1.0)], title="score", width=4, height=2))
    score
    1.0 ┤  ▄█
    0.5 ┤▄███
        └────
         0  1
    """
    if not points:
        return title
    x, y = np.array(points).T
    columns = np.interp(np.linspace(x[0], x[-1], width), x, y)
    lines = [title]
    for row in range(height, 0, -1):
        cells = "".join(BLOCKS[round(fill * 8)] for fill in np.clip(columns * height - (row - 1), 0.0, 1.0))
        label = f"{row / height:.1f} ┤" if row % 2 == 0 or height <= 4 else "    │"
        lines.append(label + cells)
    lines.append("    └" + "─" * width)
    start, end = f"{x[0]:g}", f"{x[-1]:g}"
    lines.append("     " + start + " " * max(width - len(start) - len(end), 1) + end)
    return "\n".join(lines)


def save_png(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the held-out score with its interval, and the reward of the training prompts."""
    import altair as alt
    import vl_convert as vlc

    key = held_out_key({key for m in metrics for key in m}) or HELD_OUT_SCORES[0]
    score, samples = f"{held_out_name(key)} (greedy)", "reward of training samples"
    held_out = [
        {"step": m["step"], "value": m[key], "low": m.get(f"{key}_low"), "high": m.get(f"{key}_high"), "curve": score}
        for m in metrics
        if key in m
    ]
    reward = [{"step": m["step"], "value": m["reward/mean"], "curve": samples} for m in metrics if "reward/mean" in m]
    x = alt.X("step:Q", title="step")
    is_share = key == HELD_OUT_SCORES[0]
    y = alt.Y("value:Q", title=None, scale=alt.Scale(domain=[0, 1]) if is_share else alt.Scale(zero=False))
    colors = alt.Scale(domain=[score, samples], range=["#1f5fa8", "#b8bfc9"])
    color = alt.Color("curve:N", title=None, scale=colors, legend=alt.Legend(orient="bottom-right"))
    band = alt.Chart(alt.Data(values=held_out)).mark_area(opacity=0.18, color="#1f5fa8")
    band = band.encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q")
    noisy = alt.Chart(alt.Data(values=reward)).mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color)
    smooth = alt.Chart(alt.Data(values=held_out)).mark_line(strokeWidth=3, point=True).encode(x=x, y=y, color=color)
    chart = alt.layer(noisy, band, smooth).properties(width=640, height=340, title="Learning curve")
    chart = chart.configure_axis(gridColor="#eeeeee").configure_view(strokeWidth=0)
    path.write_bytes(vlc.vegalite_to_png(chart.to_dict(), scale=2))
