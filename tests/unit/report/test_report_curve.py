"""Learning curves: block characters that can be counted, and a picture of the right size."""

import struct
from pathlib import Path

from gruppo.report.curve import save_png, terminal_chart


def test_a_rising_line_fills_from_the_right() -> None:
    chart = terminal_chart([(0, 0.0), (10, 1.0)], title="score", width=5, height=4)
    assert chart.splitlines() == [
        "score",
        "1.0 ┤    █",
        "0.8 ┤   ██",
        "0.5 ┤  ███",
        "0.2 ┤ ████",
        "    └─────",
        "     0  10",
    ]


def test_eighths_of_a_cell_are_shown() -> None:
    chart = terminal_chart([(0, 1 / 8), (1, 1 / 8)], title="t", width=3, height=1)
    assert chart.splitlines()[1] == "1.0 ┤▁▁▁"


def test_values_outside_0_and_1_stay_inside_the_chart() -> None:
    chart = terminal_chart([(0, -3.0), (1, 7.0)], title="t", width=2, height=2)
    assert chart.splitlines()[1:3] == ["1.0 ┤ █", "0.5 ┤ █"]


def test_points_are_joined_by_straight_lines() -> None:
    # Between (0, 0) and (4, 1), then flat: the columns at 0, 2, 4, 6, 8 are 0, 1/2, 1, 1, 1.
    chart = terminal_chart([(0, 0.0), (4, 1.0), (8, 1.0)], title="t", width=5, height=2)
    assert chart.splitlines()[1:3] == ["1.0 ┤  ███", "0.5 ┤ ████"]


def test_one_point_is_a_bar_and_none_a_title() -> None:
    assert terminal_chart([(3, 1.0)], title="t", width=2, height=1).splitlines()[1] == "1.0 ┤██"
    assert terminal_chart([], title="nothing yet") == "nothing yet"


def test_every_row_of_a_chart_is_equally_wide() -> None:
    rows = terminal_chart([(0, 0.3), (200, 0.97)], title="t").splitlines()[1:]
    assert {len(row) for row in rows} == {65}
    assert len(rows) == 12


def test_the_picture_is_a_png_of_the_curve(tmp_path: Path) -> None:
    metrics = [{"step": s, "reward/mean": s / 10} for s in range(1, 6)]
    metrics += [{"step": s, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6} for s in (0, 5)]
    save_png(metrics, tmp_path / "curve.png")
    data = (tmp_path / "curve.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 2 * 640 and height > 2 * 340  # the plot at scale 2, and the axes around it


def test_a_run_without_evaluations_has_a_picture_too(tmp_path: Path) -> None:
    save_png([{"step": s, "reward/mean": 0.5} for s in (1, 2)], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
