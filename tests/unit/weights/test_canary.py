"""The canary's verdicts on numbers written by hand."""

import numpy as np
import pytest
import torch

from gruppo.model import TransformersModel
from gruppo.weights.canary import Canary, CanaryCheck, Verdict, canary_rows

FIRST = np.array([-1.0, -2.0, -3.0])


def canary() -> CanaryCheck:
    return CanaryCheck(bound=0.01)


def test_it_scores_each_token_but_the_first_of_a_row_at_temperature_1() -> None:
    model = TransformersModel("builtin", device="cpu", temperature=0.5)
    rows = ((4, 5), (6, 7, 8))
    expected = []
    for row in rows:
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([row])).logits[0].double()
        expected += [logits[j - 1].log_softmax(-1)[row[j]].item() for j in range(1, len(row))]
    assert Canary.score(rows, model).logps == pytest.approx(expected, abs=1e-5)


def test_the_same_tokens_are_drawn_for_every_run_and_lie_in_the_vocabulary() -> None:
    assert canary_rows(1000) == canary_rows(1000)
    assert [len(row) for row in canary_rows(13)] == [12, 12, 12, 12]
    assert {token for row in canary_rows(3) for token in row} == {0, 1, 2}
    assert [len(row) for row in canary_rows(13, length=1)] == [2, 2, 2, 2]  # one to score, whatever is asked for


def test_the_gap_is_the_largest_difference_and_passes_up_to_the_bound() -> None:
    good = canary().judge(FIRST, [[-1.0], [-2.0078125, -3.0]])
    assert (good.gap, good.fault) == (0.0078125, None)
    bad = canary().judge(FIRST, [[-1.0], [-2.0, -3.25]])
    assert bad.gap == 0.25
    assert bad.fault == "log-probs of 3 fixed tokens differ by up to 0.25; at most 0.01 is right"


def test_one_wrong_token_of_many_is_enough() -> None:
    expected = np.full(44, -5.0)
    answered = [[-5.0] * 43 + [-4.9]]
    assert canary().judge(expected, answered).fault is not None


@pytest.mark.parametrize(
    "answered",
    [[], [[-1.0], [-2.0]], [[-1.0], [-2.0, -3.0, -4.0]], [[-1.0], [-2.0, float("nan")]], [[-1.0], [-2.0, -np.inf]]],
)
def test_too_few_too_many_or_no_numbers_at_all_are_a_fault(answered: list[list[float]]) -> None:
    fault = canary().judge(FIRST, answered).fault
    assert fault == f"{sum(map(len, answered))} numbers came for 3, or not finite ones"


def test_an_engine_that_did_not_move_when_the_trainer_did_is_at_fault_though_the_gap_is_small() -> None:
    judge = canary()
    stale = [[-1.0], [-2.0, -3.0]]
    assert judge.judge(FIRST, stale).fault is None
    verdict = judge.judge(FIRST + 0.001953125, stale)  # a fifth of the bound
    assert (verdict.gap, verdict.moved) == (0.001953125, 0.0)
    assert verdict.fault == "its log-probs did not move at all, the trainer's by up to 0.002"


def test_a_trainer_that_moved_less_than_a_hundredth_of_the_bound_asks_for_no_movement() -> None:
    judge = canary()
    assert judge.judge(FIRST, [[-1.0], [-2.0, -3.0]]).fault is None
    assert judge.judge(FIRST + 0.00009, [[-1.0], [-2.0, -3.0]]).fault is None


def test_movement_is_counted_from_the_last_good_answer_of_the_same_engine() -> None:
    judge = canary()
    first = judge.judge(FIRST, [[-1.0], [-2.0, -3.0]])
    assert np.isnan(first.moved)
    assert judge.judge(FIRST - 0.5, [[-9.0], [-9.0, -9.0]]).fault is not None  # not remembered
    assert judge.judge(FIRST - 0.5, [[-1.5], [-2.5, -3.5]]) == Verdict(gap=0.0, moved=0.5, fault=None)
    assert judge.judge(FIRST - 0.75, [[-1.75], [-2.75, -3.75]]).moved == 0.25
    assert np.isnan(canary().judge(FIRST - 0.5, [[-1.5], [-2.5, -3.5]]).moved)


def test_an_engine_that_was_restarted_need_not_have_moved() -> None:
    judge = canary()
    assert judge.judge(FIRST, [[-1.0], [-2.0, -3.0]]).fault is None
    judge.forget()
    judge.forget()
    assert judge.judge(FIRST + 0.001953125, [[-1.0], [-2.0, -3.0]]).fault is None
