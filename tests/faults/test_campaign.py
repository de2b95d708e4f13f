"""R-01, R-03 and R-11: a short campaign; `make campaign` is the long one."""

from collections import Counter
from pathlib import Path

import pytest
from campaign import campaign, table

pytestmark = pytest.mark.slow


@pytest.mark.long
@pytest.mark.row("R-01", "runs killed and stopped several times")
@pytest.mark.row("R-03", "SIGKILL at random moments and sites; 200 of them by make campaign")
@pytest.mark.row("R-11", "SIGTERM at random moments and sites; 50 of them by make campaign")
def test_runs_that_are_killed_and_stopped_end_in_the_bits_of_those_that_are_not(tmp_path: Path) -> None:
    tallies = campaign(tmp_path, kills=3, terms=1, runs=1, seed=3)
    assert [fault for tally in tallies.values() for fault in tally.faults] == [], table(tallies)
    total = sum((tally.counts for tally in tallies.values()), Counter())
    assert (total["kill"], total["term"]) == (3, 1)
    assert total["equal"] == total["runs"] >= 1
