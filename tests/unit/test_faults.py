"""Planned faults: which strikes at which site, and plans that are refused."""

import errno
import time

import pytest

from gruppo import faults
from gruppo.errors import InputError
from gruppo.faults import Fault, parse, reach


def test_there_is_no_plan_unless_one_is_set() -> None:
    assert faults.PLAN == []


def test_faults_of_a_site_strike_in_their_order_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = parse(
        '[{"site": "train", "step": 2, "action": "sleep", "seconds": 0.1}, '
        '{"site": "train", "step": 2, "action": "full"}, {"site": "eval", "step": 2, "action": "raise"}]'
    )
    monkeypatch.setattr(faults, "PLAN", plan)
    assert plan[0] == Fault("train", 2, "sleep", 0.1)
    reach("train", 1)
    reach("sample", 2)
    start = time.monotonic()
    with pytest.raises(OSError, match="No space left on device") as caught:
        reach("train", 2)
    assert caught.value.errno == errno.ENOSPC and time.monotonic() - start >= 0.1
    with pytest.raises(RuntimeError, match="fault planned at eval of step 2"):
        reach("eval", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "must be a JSON list of objects with site, step, action, seconds"),
        ('{"site": "train"}', "must be a JSON list"),
        ('[{"site": "train", "step": 1}]', "must be a JSON list .* missing .* 'action'"),
        ('[{"site": "trian", "step": 1, "action": "kill"}]', "site='trian' is unknown; use one of sync, sample"),
        ('[{"site": "train", "step": 1, "action": "nan"}]', "action='nan' is unknown; use one of kill, term"),
    ],
)
def test_a_plan_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text)
