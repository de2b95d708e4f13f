"""Two gloo processes report exactly what one process reports on their data joined: sums, maxima and top-K."""

import json
import subprocess

import pytest
import two_ranks
from warm_process import Command

pytestmark = pytest.mark.slow
TIMEOUT = 250


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each rank reported in each scenario: [{scenario: ...}, {scenario: ...}]."""
    folder = tmp_path_factory.mktemp("ranks")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [Command([two_ranks.__file__, str(rank), folder], **pipes) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def alone(scenario, parts=(slice(None),)):
    """These parts of the data in one process."""
    cls, options, _, _ = two_ranks.SCENARIOS[scenario]
    metric = cls(**options)
    for part in parts:
        two_ranks.accumulate(metric, {name: value[part] for name, value in two_ranks.data().items()})
    return metric.calculate()


@pytest.mark.parametrize("scenario", two_ranks.SCENARIOS)
def test_two_ranks_report_exactly_the_numbers_of_one(answers, scenario):
    expected = alone(scenario)
    assert [rank[scenario]["results"] for rank in answers] == [expected, expected]


@pytest.mark.parametrize("scenario", two_ranks.SCENARIOS)
def test_a_report_in_between_changes_nothing(answers, scenario):
    # After its first report rank 0 accumulated its sequences a second time.
    share = two_ranks.SCENARIOS[scenario][3]
    expected = alone(scenario, [slice(share), slice(share), slice(share, None)])
    assert [rank[scenario]["later"] for rank in answers] == [expected, expected]


@pytest.mark.parametrize("scenario", [name for name, s in two_ranks.SCENARIOS.items() if "two axes" not in s[2]])
def test_one_all_reduce_for_sums_and_one_for_maxima(answers, scenario):
    assert [rank[scenario]["calls"]["all_reduce"] for rank in answers] == [2, 2]


@pytest.mark.parametrize("scenario", [name for name, s in two_ranks.SCENARIOS.items() if "two axes" not in s[2]])
def test_one_all_gather_when_there_is_a_top_k(answers, scenario):
    expected = 1 if two_ranks.SCENARIOS[scenario][1].get("top_k_kl") else 0
    assert [rank[scenario]["calls"]["all_gather"] for rank in answers] == [expected, expected]


def test_the_data_has_ties_across_the_ranks():
    # Without them the tie-break of the global top-K would not be tested.
    records = alone("more K than tokens")["train/top_k_kl"]
    on_rank = {0: set(), 1: set()}
    for record in records:
        on_rank[int(record["sequence"] >= 4)].add(record["kl"])
    assert len(on_rank[0] & on_rank[1]) > 3
