"""Rules on small tables: each symptom is named with its cause, and healthy numbers are left alone.

`tests/doctor` has the runs in which the faults are real.
"""

from typing import Any

import numpy as np
import pytest

from gruppo.doctor import RULES, Table, advice, sampler_gap
from gruppo.doctor.finding import Change, Finding, beyond
from gruppo.doctor.rules import applied
from gruppo.doctor.table import Rollouts, Updates
from gruppo.keys import KEYS

HEALTHY = {
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "reward/correct_frac": 0.5,
    "group/dead_frac": 0.2,
    "group/all_right_frac": 0.1,
    "completion/truncated_frac": 0.0,
    "completion/empty_frac": 0.0,
    "completion/len_mean": 10.0,
    "rollout/entropy": 0.4,
    "optim/grad_norm": 0.5,
    "live/approx_kl": 0.01,
    "sampler/logp_gap_max": 1e-6,
}


def lines(num: int = 20, first: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """Lines of healthy metrics; a change is a value, or a function of the place among the lines, 0 to 1."""
    return [
        {"step": first + i}
        | HEALTHY
        | {name: change(i / (num - 1)) if callable(change) else change for name, change in changes.items()}
        for i in range(num)
    ]


def only(table: Table) -> Finding:
    (found,) = applied(table)
    return found


def rollouts(step: int = 1, **columns: Any) -> Rollouts:
    """Two groups of two rows; the second row of each is right and earns 1."""
    given: dict[str, Any] = {
        "prompts": ["1+1=", "1+1=", "2+2=", "2+2="],
        "columns": ["{}"] * 4,
        "group_N": np.array([1, 1, 2, 2]),
        "reward_N": np.array([0.0, 1.0, 0.0, 1.0]),
        "correct_N": np.array([0.0, 1.0, 0.0, 1.0]),
        "credit_N": np.ones(4),
        "length_N": np.array([3, 4, 3, 4]),
        "distinct_N": np.ones(4),
        "gap_T": np.zeros(0),
        "errors": {},
    }
    return Rollouts(step=step, **given | columns)


def test_a_healthy_run_has_no_finding() -> None:
    assert applied(Table(metrics=lines(60), rollouts=[rollouts(step) for step in range(1, 9)])) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"completion/truncated_frac": 0.6},
            "completion/truncated_frac is 0.6, above 0.5: raise max_new_tokens",
        ),
        ({"group/dead_frac": 1.0, "reward/mean": 0.0}, "all groups are dead with a reward of 0"),
        (
            {"group/dead_frac": 0.9},
            "90% of the groups are dead since step 1: raise group_size",
        ),
        (
            {"completion/empty_frac": 0.6},
            "completion/empty_frac is 0.6, above 0.5: the model ends at once",
        ),
        (
            {"live/approx_kl": 1.5},
            "live/approx_kl is 1.5, above 1: the policy moves far",
        ),
        (
            {"sampler/logp_gap_max": 2.0},
            "sampler/logp_gap_max is 2, above 1: sampler and trainer disagree",
        ),
    ],
)
def test_each_symptom_is_named_with_its_cause(changes: dict[str, float], sentence: str) -> None:
    (said,) = advice(lines(**changes))
    assert said.startswith(sentence)


def test_every_healthy_range_of_the_registry_has_its_remedy_said() -> None:
    for key in KEYS:
        if key.alarm is not None:
            (said,) = advice(lines(**{key.name: key.alarm[1] + 0.25}))
            assert said.startswith(key.name) and said.endswith(key.remedy)


def test_groups_that_became_all_right_are_no_finding_and_those_that_were_are_too_easy() -> None:
    right = {"group/dead_frac": 0.95, "group/all_right_frac": 0.9, "reward/mean": 0.97}
    assert advice(lines(first=181, **right)) == []
    assert only(Table(metrics=lines(**right))).rule == "too_easy"


def test_a_few_steps_are_too_few() -> None:
    assert advice(lines(4, **{"completion/truncated_frac": 1.0})) == []


def test_a_number_is_judged_by_its_mean_over_a_window() -> None:
    cut = iter((1.0, 0.0, 0.0, 0.0, 1.0))
    assert advice(lines(5, **{"completion/truncated_frac": lambda _: next(cut)})) == []


def test_a_run_in_which_nothing_is_scored_is_told_so_and_no_more() -> None:
    unscored = [{k: v for k, v in line.items() if k != "reward/mean"} for line in lines(**{"group/dead_frac": 1.0})]
    (said,) = advice(unscored)
    assert said.startswith("no reward function scored any completion")


@pytest.mark.parametrize("value", [float("nan"), None])
def test_numbers_that_are_not_finite_are_not_judged(value: float | None) -> None:
    assert advice(lines(**{"live/approx_kl": value})) == []


def test_a_stretch_begins_at_its_first_bad_step_and_ends_with_its_last_window() -> None:
    """By hand: 40 values, 1 in steps 16 to 25, windows of 20: the mean is above 0.4 from window
    5 to 24 on, until window 17 to 36."""
    found = beyond([(step, float(16 <= step <= 25)) for step in range(1, 41)], 0.4)
    assert found is not None
    assert (found.begin, found.last, found.worst, found.is_now) == (16, 36, 0.5, False)
    assert found.mean == pytest.approx(10 / 21)  # ten of the steps 16 to 36


def test_values_that_are_the_bound_are_not_beyond_it_however_their_mean_is_rounded() -> None:
    assert beyond([(step, 0.2) for step in range(20)], 0.2) is None


def test_of_two_stretches_the_last_is_told() -> None:
    """By hand: 1 in steps 1 to 20 and 61 to 80. Windows above 0.9 end at step 21, and begin again with 60 to 79."""
    found = beyond([(step, float(step <= 20 or step > 60)) for step in range(1, 81)], 0.9)
    assert found is not None and (found.begin, found.last, found.mean, found.is_now) == (61, 80, 1.0, True)


def test_a_change_is_one_when_it_exceeds_two_standard_errors() -> None:
    """By hand: means 1 and 2 over five values each, variances 0.5 and 0.5: error sqrt((0.5 + 0.5) / 5) = 0.4472."""
    first, last = (0.0, 1.0, 1.0, 1.0, 2.0), (1.0, 2.0, 2.0, 2.0, 3.0)
    change = Change.of(list(enumerate(first + last)))
    assert change is not None and change.error == pytest.approx(0.2**0.5)
    assert change.rises() and not change.rises(by=1.0) and not change.falls()


def test_a_constant_reward_is_a_fault_of_the_reward() -> None:
    table = Table(metrics=lines(**{"reward/mean": 1.0, "reward/std": 0.0, "group/dead_frac": 1.0}))
    assert (only(table).rule, only(table).evidence) == ("constant_reward", "all completions of 20 steps earned 1")


def test_wrong_answers_that_earn_more_are_counted_by_group() -> None:
    against = rollouts(reward_N=np.array([3.0, 1.0, 3.0, 1.0]))
    table = Table(metrics=lines(), rollouts=[against] * 5)
    assert only(table).rule == "contradicted_reward"
    assert only(table).evidence.startswith("wrong answers earn more in 10 of 10 groups that have both kinds, by 2")
    assert applied(Table(metrics=lines(), rollouts=[against] * 4)) == []  # 8 groups are too few


def test_a_part_that_rises_while_answers_get_worse_is_named() -> None:
    parts = {f"reward/{name}/abstain_frac": 0.0 for name in ("right", "nines")}
    moves = {"reward/mean": lambda x: 1 + x, "reward/correct_frac": lambda x: 0.5 - x / 2}
    moves |= {"reward/right/mean": lambda x: 0.5 - x / 2, "reward/nines/mean": lambda x: x}
    found = only(Table(metrics=lines(40, **parts, **moves)))
    assert (found.rule, found.metric) == ("reward_hacking", "reward/nines/mean")
    better = moves | {"reward/correct_frac": lambda x: 0.5 + x / 4}
    assert applied(Table(metrics=lines(40, **parts, **better))) == []


def test_length_that_pays_is_found_and_length_that_serves_is_not() -> None:
    grows = {"completion/len_mean": lambda x: 10 + 20 * x}
    assert only(Table(metrics=lines(40, **grows), rollouts=[rollouts()] * 5)).rule == "length_exploitation"
    unpaid = rollouts(length_N=np.array([4, 3, 3, 4]))
    assert applied(Table(metrics=lines(40, **grows), rollouts=[unpaid] * 5)) == []
    assert applied(Table(metrics=lines(40), rollouts=[rollouts()] * 5)) == []


def test_repetition_needs_long_texts_with_few_distinct_pieces() -> None:
    long, few = np.array([30, 30, 30, 3]), np.array([0.1, 0.1, 1.0, np.nan])
    looping = [rollouts(step, length_N=long, distinct_N=few) for step in range(1, 7)]
    assert only(Table(metrics=lines(), rollouts=looping)).evidence.startswith("50% of the completions")
    short = [rollouts(step, distinct_N=few) for step in range(1, 7)]
    assert applied(Table(metrics=lines(), rollouts=short)) == []


def test_entropy_may_go_where_the_answers_are_right() -> None:
    falls = {"rollout/entropy": lambda x: 0.4 * (1 - x) ** 4, "group/dead_frac": lambda x: 0.9 if x > 0.5 else 0.3}
    assert [each.rule for each in applied(Table(metrics=lines(60, **falls)))] == ["entropy_collapse", "no_signal"]
    right = {"reward/correct_frac": lambda x: 0.5 + 0.5 * min(2 * x, 1)}
    assert "entropy_collapse" not in [each.rule for each in applied(Table(metrics=lines(60, **falls, **right)))]


def test_entropy_may_go_where_a_form_is_found_and_groups_still_differ() -> None:
    """SmolLM2 on sums: 2.03 -> 0.12 nats, 72 % right and rising, 55 % of the groups dead in the last steps."""
    found = {"rollout/entropy": lambda x: max(2.03 * (1 - x) ** 4, 0.12), "group/dead_frac": lambda x: 0.55}
    found |= {"reward/correct_frac": lambda x: 0.72 * x, "reward/mean": lambda x: 0.72 * x}
    assert applied(Table(metrics=lines(40, **found))) == []


def test_a_collapse_does_not_depend_on_the_zero_of_the_reward() -> None:
    falls = {"reward/std": 0.4, "group/dead_frac": 0.99, "group/all_wrong_frac": 0.99}
    for zero in (0.0, -1.0, 5.0):
        found = applied(
            Table(metrics=lines(60, **falls, **{"reward/mean": lambda x, zero=zero: zero + (0.7 if x < 0.5 else 0.01)}))
        )
        assert [each.rule for each in found] == ["collapse"], zero  # and not that the task is too hard
        assert found[0].evidence == f"reward/mean fell from {zero + 0.7:.3g} in the steps up to 5 to {zero + 0.01:.3g}"


def test_a_reward_that_rose_and_fell_back_a_little_has_not_collapsed() -> None:
    rises = {"reward/mean": lambda x: -1 + 1.12 * min(2 * x, 1) - 0.08 * (x > 0.7), "reward/std": 0.9}
    assert applied(Table(metrics=lines(60, **rises))) == []
    solved = {"reward/mean": lambda x: 0.96 - 0.06 * x, "reward/std": 0.25}
    assert applied(Table(metrics=lines(60, **solved))) == []


def test_what_is_never_right_although_the_reward_rises_is_told_and_nothing_else() -> None:
    """A reward whose best is 0.9, where correct_at is 1."""
    risen = {"reward/mean": lambda x: 0.3 + 0.6 * min(2 * x, 1), "reward/correct_frac": 0.0}
    risen |= {"rollout/entropy": lambda x: 0.4 * (1 - x) ** 4, "group/dead_frac": lambda x: min(2 * x, 1)}
    risen |= {"group/all_right_frac": 0.0, "group/all_wrong_frac": lambda x: min(2 * x, 1)}
    found = [each.rule for each in applied(Table(metrics=lines(60, **risen)))]
    assert found == ["no_signal", "never_right"]


def test_the_share_of_dead_groups_is_that_of_the_steps_it_is_told_of() -> None:
    """By hand: 0.5 dead up to step 30, then 0.9: the first window above 0.8 is 26 to 45, with 5 and 15 of them."""
    later = {"group/dead_frac": lambda x: 0.5 if x < 0.5 else 0.9, "group/all_wrong_frac": lambda x: 0.8 * (x >= 0.5)}
    assert only(Table(metrics=lines(60, **later))).evidence == (
        "90% of the groups are dead since step 31, 80% all wrong"
    )


def test_groups_that_are_equal_because_the_reward_has_risen_are_no_finding_without_a_judge() -> None:
    """A graded reward that has reached its best: 83 % of the groups are dead since step 88 of 120."""
    unjudged = {k: v for k, v in HEALTHY.items() if k not in ("reward/correct_frac", "group/all_right_frac")}
    rises = {"reward/mean": lambda x: -0.15 + 0.15 * min(1.4 * x, 1), "group/dead_frac": lambda x: 0.9 * (x > 0.7)}
    metrics = [{k: v for k, v in line.items() if k == "step" or k in unjudged} for line in lines(120, **rises)]
    assert applied(Table(metrics=metrics)) == []
    still = [line | {"reward/mean": -0.15} for line in metrics]
    assert only(Table(metrics=still)).rule == "no_signal"


def test_a_first_step_of_little_entropy_is_no_lack_of_exploration_where_groups_die_later() -> None:
    """A demo that learned: 0.048 nats in its first step, and 85 % of the groups dead since step 60."""
    metrics = lines(
        100,
        **{
            "group/dead_frac": lambda x: 0.3 if x < 0.6 else 0.85,
            "group/all_right_frac": lambda x: 0.2 if x < 0.6 else 0.85,
            "reward/correct_frac": lambda x: 0.5 + 0.45 * min(x / 0.6, 1),
        },
    )
    metrics[0]["rollout/entropy"] = 0.048
    assert applied(Table(metrics=metrics)) == []


def test_a_spike_is_far_above_the_median_and_above_the_limit() -> None:
    metrics = lines()
    metrics[6]["optim/grad_norm"] = 60.0
    found = only(Table(metrics=metrics))
    assert (found.rule, found.step, found.severity) == ("gradient_spike", 7, "warning")
    assert applied(Table(metrics=metrics, config={"max_grad_norm": 100.0})) == []
    metrics[6]["optim/grad_norm"], metrics[8]["optim/skipped"] = 4.0, 1.0
    assert (only(Table(metrics=metrics)).rule, only(Table(metrics=metrics)).step) == ("gradient_not_finite", 9)


def test_a_rare_wrong_answer_of_a_solved_task_is_no_spike() -> None:
    """Two adapters: 2.61 in step 56 at 94 % right answers, and 2.2 in step 35 at 88 %, where steps that are solved have
    a median of 0.1 and the others one of 0.5."""
    solved = {"reward/correct_frac": lambda x: 0.5 if x < 0.5 else 0.97}
    metrics = lines(60, **solved, **{"optim/grad_norm": lambda x: 0.5 if x < 0.5 else 0.1})
    metrics[55] |= {"optim/grad_norm": 2.61, "reward/correct_frac": 0.94}
    metrics[34] |= {"optim/grad_norm": 2.2, "reward/correct_frac": 0.88}
    assert applied(Table(metrics=metrics)) == []
    metrics[34]["optim/grad_norm"] = 11.0
    assert only(Table(metrics=metrics)).evidence.startswith(
        "in 1 of 31 steps; optim/grad_norm is 11 in step 35, the med"
    )


def test_the_gap_of_an_unsynced_sampler_grows_and_comes_from_the_completions_where_no_metric_has_it() -> None:
    metrics = [{k: v for k, v in line.items() if not k.startswith("sampler/")} for line in lines()]
    growing = [rollouts(step, gap_T=np.array([0.0, 0.1 * step])) for step in range(1, 9)]
    found = only(Table(metrics=metrics, rollouts=growing))
    assert (found.rule, found.step) == ("stale_sampler", 3) and "do not arrive" in found.text
    steady = [rollouts(step, gap_T=np.array([0.0, 0.5])) for step in range(1, 9)]
    assert "from the start" in only(Table(metrics=metrics, rollouts=steady)).text
    ahead = Table(metrics=metrics, rollouts=steady, config={"max_staleness": 2})
    assert (only(ahead).severity, only(ahead).remedy) == ("warning", "lower max_staleness, or lr")


def test_updates_below_half_the_distance_to_the_next_number_are_lost() -> None:
    """By hand: of 2 updates x 4 weights, the update 1e-9 is lost at the three weights whose half distance is above it,
    and 1e-7 at none."""
    spacing = np.array([1e-9, 4e-9, 4e-9, 6e-8])
    table = Table(metrics=lines(), updates=Updates(step=20, update=np.array([1e-9, 1e-9]), spacing=spacing))
    assert only(table).evidence.startswith("at the highest lr of the run, 75% of the updates in step 20")
    half = Updates(step=20, update=np.array([1e-9, 1e-7]), spacing=spacing)
    assert applied(Table(metrics=lines(), updates=half)) == []
    none = Updates(step=20, update=np.zeros(2), spacing=spacing)  # all completions are left out of the loss
    assert applied(Table(metrics=lines(), updates=none)) == []


def test_a_prompt_dominates_by_its_share_of_the_credit() -> None:
    steps = [
        rollouts(step, prompts=[f"{step}+1="] * 2 + ["2+2="] * 2, credit_N=np.array([1.0, 1.0, 1.0, 1.0]))
        for step in range(1, 21)
    ]
    found = only(Table(metrics=lines(), rollouts=steps))
    assert found.rule == "dominating_prompt"
    assert found.evidence.startswith("it has 50% of the credit (|advantage| x tokens) with 20 of 40 groups")
    fair = [rollouts(step, prompts=[f"{step}+1="] * 2 + [f"{step}+2="] * 2) for step in range(1, 21)]
    assert applied(Table(metrics=lines(), rollouts=fair)) == []


def test_held_out_prompts_among_the_training_prompts_leak() -> None:
    held_out = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "3+3=", "answer": "6"}]
    found = only(Table(metrics=lines(), rollouts=[rollouts()], held_out=held_out))
    assert found.rule == "leaking_evaluation" and found.evidence.startswith("1 of 2 held-out prompts")
    assert applied(Table(metrics=lines(), rollouts=[rollouts()], held_out=held_out[1:])) == []


def test_a_chat_prompt_leaks_when_its_message_stands_in_a_rendered_prompt_of_the_same_row() -> None:
    message = "How many eggs are in the basket?"
    row = {"prompt": [{"role": "user", "content": message}], "answer": "4"}
    rendered = rollouts(prompts=[f"<user>{message}<end>"] * 4, columns=['{"answer": "4"}'] * 4)
    assert only(Table(metrics=lines(), rollouts=[rendered], held_out=[row])).rule == "leaking_evaluation"
    other_row = rollouts(prompts=[f"<user>{message}<end>"] * 4, columns=['{"answer": "5"}'] * 4)
    assert applied(Table(metrics=lines(), rollouts=[other_row], held_out=[row])) == []


@pytest.mark.parametrize("frame", ["{}", "<system>Think.<user>{}<end><bot>"])
def test_a_held_out_prompt_inside_a_longer_one_does_not_leak(frame: str) -> None:
    def table(number: int, *before: str) -> Table:
        texts = [f"Is this number even, yes or no: {n}" for n in (150, 151, 152, 153)]
        prompts = [
            frame.format("".join([*before[:-1], f"Premise {i}."] if before else []) + t) for i, t in enumerate(texts)
        ]
        steps = rollouts(prompts=prompts, columns=['{"answer": "no"}'] * 4)
        asked = [{"role": "user", "content": c} for c in (*before, f"Is this number even, yes or no: {number}")]
        return Table(metrics=lines(), rollouts=[steps], held_out=[{"prompt": asked, "answer": "no"}])

    assert applied(table(15)) == []
    assert only(table(151)).rule == "leaking_evaluation"
    assert applied(table(151, "Premise 7.")) == []  # the same question after another message
    assert only(table(151, "Premise 1.")).rule == "leaking_evaluation"


# --- turns ------------------------------------------------------------------------------------------------------------

TURNS = {
    "turns/mean": 2.5,
    "turns/max": 4.0,
    "turns/calls": 1.5,
    "turns/call_error_frac": 0.1,
    "turns/unparsed_frac": 0.05,
    "turns/lost_frac": 0.01,
    "turns/cut_frac": 0.05,
    "turns/given_tokens": 30.0,  # of 40: the policy writes 10
}


def episodes(num: int = 20, **changes: Any) -> list[dict[str, Any]]:
    return lines(num, **(TURNS | changes))


def test_healthy_episodes_have_no_finding() -> None:
    assert applied(Table(metrics=episodes(60), config={"tools": ["calculator:multiply"]})) == []
    game = {"turns/calls": 0.0, "turns/mean": 3.0}
    assert applied(Table(metrics=episodes(**game))) == []  # it has no tools


@pytest.mark.parametrize(
    ("config", "turns"), [({"tools": ["calculator:multiply"]}, 2.0), ({"environment": "shop:Shop"}, 1.0)]
)
def test_tools_that_are_never_called_are_told(config: dict[str, Any], turns: float) -> None:
    table = Table(metrics=episodes(**{"turns/calls": 0.0, "turns/mean": turns}), config=config)
    assert (only(table).rule, only(table).evidence) == ("tools_never_called", "0 calls per episode since step 1")
    rarely = episodes(**{"turns/calls": 0.02, "turns/mean": turns})
    assert applied(Table(metrics=rarely, config=config)) == []


def test_tools_that_a_solved_task_does_not_need_are_no_finding() -> None:
    solved = episodes(**{"turns/calls": 0.0, "turns/mean": 1.0, "reward/correct_frac": 0.97})
    assert applied(Table(metrics=solved)) == []


def test_calls_that_cannot_be_read_are_told_above_a_fifth() -> None:
    found = only(Table(metrics=episodes(**{"turns/unparsed_frac": 0.25})))
    assert (found.rule, found.evidence) == ("unreadable_calls", "turns/unparsed_frac is 0.25, above 0.2")
    assert applied(Table(metrics=episodes(**{"turns/unparsed_frac": 0.2}))) == []


def test_lost_episodes_are_told_with_what_failed() -> None:
    failed = rollouts(errors={"environment": "Traceback ...\nKeyError: 'door\x1b'", "exact_match": "no"})
    found = only(Table(metrics=episodes(**{"turns/lost_frac": 0.06}), rollouts=[failed]))
    assert (found.rule, found.severity) == ("lost_episodes", "problem")
    assert found.text == "episodes are lost because the environment fails: KeyError: 'door\\x1b'"
    assert applied(Table(metrics=episodes(**{"turns/lost_frac": 0.05}), rollouts=[failed])) == []


def test_episodes_that_are_cut_are_told_once_with_the_limit() -> None:
    """By hand: 9 of 12 cut ones by the limit of turns. The same number is `completion/truncated_frac`."""
    ended = rollouts(stops={"stop": 8, "turns": 9, "length": 2, "context": 1})
    cut = episodes(**{"turns/cut_frac": 0.6, "completion/truncated_frac": 0.6})
    found = only(Table(metrics=cut, rollouts=[ended]))
    assert (found.rule, found.evidence) == ("cut_episodes", "turns/cut_frac is 0.6, above 0.3")
    assert found.text == "many episodes are cut before they end, 75% of them by turns"
    assert only(Table(metrics=cut)).text == "many episodes are cut before they end"
    assert applied(Table(metrics=episodes(**{"turns/cut_frac": 0.3}))) == []


def test_episodes_that_are_mostly_the_environments_text_are_told() -> None:
    """By hand: the policy writes 10 tokens of 50, and of 51."""
    found = only(Table(metrics=episodes(**{"turns/given_tokens": 41.0})))
    assert (found.rule, found.severity) == ("mostly_given", "warning")
    assert found.evidence == "80% of the tokens after the prompt since step 1"
    assert applied(Table(metrics=episodes(**{"turns/given_tokens": 40.0}))) == []


def test_each_rule_is_under_its_own_name() -> None:
    assert {name: rule.__name__ for name, rule in RULES.items()} == {name: name for name in RULES}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"sampler/logp_gap_mean": 0.11}, "sampler/logp_gap_mean is 0.11, above 0.1"),
        ({"sampler/logp_gap_max": 1.1}, "sampler/logp_gap_max is 1.1, above 1"),
        ({"sampler/logp_gap_mean": 3.0, "rollout/staleness": 0.0}, "sampler/logp_gap_mean is 3, above 0.1"),
        ({"sampler/logp_gap_mean": 3.0, "rollout/staleness": 1.0}, None),  # older weights have other log-probs
        ({"sampler/logp_gap_mean": 0.09, "sampler/logp_gap_max": 0.9}, None),
        ({}, None),
    ],
)
def test_the_gap_of_one_step_is_judged_by_the_bounds_of_stale_sampler(
    changes: dict[str, float], name: str | None
) -> None:
    said = sampler_gap(HEALTHY | changes)
    assert (said is None) == (name is None) and (said or "").startswith(name or "")
    if changes and "rollout/staleness" not in changes:
        found = [f for f in applied(Table(metrics=lines(**changes))) if f.rule == "stale_sampler"]
        assert len(found) == (name is not None)
