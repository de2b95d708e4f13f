"""Rules over metrics: each looks for one fault in the numbers of the steps. Thresholds stand above their rule."""

from collections.abc import Iterator, Mapping

import numpy as np

from gruppo.doctor.finding import (
    CORRECT,
    DEAD_FRAC,
    ENTROPY,
    FEWEST_STEPS,
    NORM,
    REWARD,
    SKIPPED,
    Change,
    Finding,
    Severity,
    Stretch,
    beyond,
    departure,
)
from gruppo.doctor.progress import LEAST_RISE, SOLVED, Fall, Progress, held_out_scores
from gruppo.doctor.table import Points, Table
from gruppo.keys import find
from gruppo.output import printable

# --- ranges of the registry -------------------------------------------------------------------------------------------

RANGES = {
    "live/approx_kl": ("kl_blow_up", "the policy leaves the one that sampled within a step"),
    "policy/kl": ("kl_blow_up", "the policy has left the reference"),
    "reward/<name>/error_frac": ("reward_fails", "a reward function fails"),
    "completion/truncated_frac": ("truncation", "most completions are cut off before they end"),
    "completion/empty_frac": ("empty_completions", "most completions are blank"),
}
"""Name and cause of a number that leaves its healthy range of `gruppo.keys`, which has the bounds and remedies;
causes before what follows from them."""


def out_of_range(table: Table) -> Iterator[Finding]:
    """Keys whose mean leaves the healthy range of the registry."""
    keys = [(name, key) for name in table.keys if (key := find(name)) is not None and key.name in RANGES]
    for name, key in sorted(keys, key=lambda pair: list(RANGES).index(pair[1].name)):
        assert key.alarm is not None
        low, high = key.alarm
        rule, text = RANGES[key.name]
        for bound, above in ((high, True), (low, False)):
            found = beyond(table.series(name), bound, above=above)
            if found is None:
                continue
            yield Finding(
                rule=rule,
                severity="problem" if found.is_now else "warning",
                step=found.begin,
                text=text + _failure(table, name),
                evidence=f"{name} is {found.worst:.3g}, {'above' if above else 'below'} {bound:g}",
                remedy=key.remedy,
                metric=name,
            )


def _failure(table: Table, name: str) -> str:
    """The first failure of a reward function, from the completions."""
    reward = name.split("/")[1]
    texts = [rollouts.errors[reward] for rollouts in table.rollouts if reward in rollouts.errors]
    last_line = printable(texts[0].rstrip().rpartition("\n")[2])[:200] if texts else ""
    return f": {last_line}" if name.endswith("/error_frac") and last_line else ""


# --- sampler and precision --------------------------------------------------------------------------------------------

MEAN_GAP = 0.1
"""Mean distance of log-probs, in nats. bf16 engines of the same weights stay below 0.02, with experts below 0.05."""
GAPS = ("sampler/logp_gap_mean", "sampler/logp_gap_max")
GROWTH = 3.0
"""A gap that grew by this factor came with the updates; one that was there from the start did not."""


def gap_bound(name: str) -> float:
    """The largest healthy value of a key of `GAPS`."""
    key = find(name)
    assert key is not None
    return key.alarm[1] if key.alarm else MEAN_GAP


def sampler_gap(metrics: Mapping[str, float]) -> str | None:
    """What is beyond its bound in a step whose completions the weights that train have sampled."""
    if metrics.get("rollout/staleness"):  # older weights have other log-probs
        return None
    for name in GAPS:
        if metrics.get(name, 0.0) > gap_bound(name):
            return (
                f"{name} is {metrics[name]:.3g}, above {gap_bound(name):g}: the sampler reports other log-probs than "
                "the trainer computes for the same tokens. See that it has the same model in the same number format "
                "(dtype), and that a server runs with --logprobs-mode processed_logprobs"
            )
    return None


def stale_sampler(table: Table) -> Iterator[Finding]:
    """Completions were not sampled from the weights that train."""
    key = find("sampler/logp_gap_max")
    assert key is not None
    for name in GAPS:
        bound = gap_bound(name)
        points = table.series(name)
        found = beyond(points, bound)
        if found is None:
            continue
        grew = points[0][1] * GROWTH < points[-1][1]
        is_meant = bool(table.config.get("max_staleness"))
        text = "the sampler does not have the weights that train: " + (
            "the gap grows with the updates, so new weights do not arrive"
            if grew
            else "the gap is there from the start, so it has another model, chat template or number format"
        )
        remedy = key.remedy
        if is_meant:
            text, remedy = "rollouts are too old for the weights that train on them", "lower max_staleness, or lr"
        yield Finding(
            rule="stale_sampler",
            severity="warning" if is_meant else "problem",
            step=found.begin,
            text=text,
            evidence=f"{name} is {found.worst:.3g}, above {bound:g}",
            remedy=remedy,
            metric=name,
        )
        return


LOST = 0.5
"""Share of updates that change nothing. Rounding to the nearest number loses an update of less than half the distance
to it; up to half of them is what rows with a gradient near 0 make in sound runs."""


def precision_lost(table: Table) -> Iterator[Finding]:
    """Updates are too small for the numbers that hold the weights."""
    updates = table.updates
    if updates is None or not len(updates.spacing):
        return
    spacing = np.sort(updates.spacing)
    # Weights and updates are not paired in a checkpoint, so each update is compared with all weights.
    below = 1 - np.searchsorted(spacing, 2 * updates.update, side="right") / len(spacing)
    below[updates.update == 0] = 0.0  # without a gradient there is nothing to round
    lost = float(below.mean()) if len(below) else 0.0
    if lost > LOST:
        yield Finding(
            rule="precision_lost",
            severity="problem",
            step=None,
            text="updates are smaller than what the weights can hold, so most of them are rounded away",
            evidence=f"{lost:.0%} of the updates of step {updates.step} are, at the highest lr of the run, less than "
            f"half the distance to the next float32 number: medians {np.median(updates.update):.1g} and "
            f"{np.median(spacing) / 2:.1g}",
            remedy="raise lr",
            metric="optim/lr",
        )


# --- groups and rewards -----------------------------------------------------------------------------------------------

DEAD = 0.8
"""Share of groups without signal: above it four of five samples are wasted."""
ALL_DEAD = 0.95
"""Share at which nothing is learned at all."""
MOSTLY = 0.5
"""Share of all groups that must be all right, or all wrong, for that to be the cause."""


def dead_groups(table: Table) -> Iterator[Finding]:
    """Completions of a group all earn the same: the task is too easy, too hard, or the policy is too sure."""
    found = beyond(table.series(DEAD_FRAC), DEAD)
    if found is None or not found.is_now or _is_constant(table) or not table.series(REWARD) or Fall.of(table):
        return
    if _is_sure_from_the_start(table):
        return
    share = f"{found.mean:.0%} of the groups are dead {found.when}"
    right, wrong, reward = (
        _mean_since(found.begin, table.series(name))
        for name in ("group/all_right_frac", "group/all_wrong_frac", REWARD)
    )
    if found.mean > ALL_DEAD and reward is not None and reward <= 0:
        yield _dead(
            "too_hard",
            found,
            "no completion earns anything, so nothing can be learned",
            f"all groups are dead at reward {reward:g}, {found.when}",
            "the task is too hard as it is, or the reward does not read the form of the completions: try `gruppo "
            "reward check`",
        )
    elif right is not None and right >= MOSTLY:
        began = table.steps[0] == 1 and found.begin == 1
        if began:  # later, it is what learning comes to
            yield _dead(
                "too_easy",
                found,
                "the task is too easy: most groups are all right from the start",
                f"{share}, {right:.0%} all right",
                "harder prompts, retire_solved, or dynamic_sampling to fill steps with other groups",
            )
    elif wrong is not None and wrong >= MOSTLY and not _is_never_right(table):
        yield _dead(
            "too_hard",
            found,
            "the task is too hard: most groups are all wrong",
            f"{share}, {wrong:.0%} all wrong",
            "read completions that earn nothing: if some are right, mend the reward or the answers of the data; else "
            "easier prompts, a larger group_size, or dynamic_sampling",
        )
    elif (progress := Progress.of(table)).is_judged or progress.direction != "up":  # else it is what learning comes to
        yield _dead(
            "no_signal",
            found,
            "most groups have no signal: their completions all earn the same",
            share,
            "raise group_size or temperature",
        )


def _dead(rule: str, found: Stretch, text: str, evidence: str, remedy: str) -> Finding:
    severity: Severity = "problem" if rule == "too_hard" else "warning"
    metric = DEAD_FRAC
    return Finding(
        rule=rule, severity=severity, step=found.begin, text=text, evidence=evidence, remedy=remedy, metric=metric
    )


def _mean_since(step: int, points: Points) -> float | None:
    """Mean of the values from a step on."""
    values = [value for at, value in points if at >= step]
    return sum(values) / len(values) if values else None


def _is_never_right(table: Table) -> bool:
    """Whether no answer of the run counts as right, although the reward rises: it is not told what is right."""
    change, correct = Change.of(table.series(REWARD)), table.series(CORRECT)
    return change is not None and change.rises() and bool(correct) and not any(value for _, value in correct)


def never_right(table: Table) -> Iterator[Finding]:
    """No answer ever counts as right: none of training, or, though those earn something, none on held-out prompts."""
    held_out, some = table.series("eval/accuracy"), any(spread > 0 for _, spread in table.series("reward/std"))
    rises, none_held_out = (
        _is_never_right(table),
        len(held_out) > 1 and not any(score for _, score in held_out) and some,
    )
    if not rises and not none_held_out:
        return
    evidence = f"{CORRECT} is 0 in all {len(table.steps)} steps, {REWARD} {Change.of(table.series(REWARD))}"
    remedy = "lower correct_at to what a right answer earns, or name the reward that decides in correct_by"
    yield Finding(
        rule="never_right",
        severity="warning",
        step=None,
        text="no answer counts as right, although the reward rises" if rises else "no held-out answer is ever right",
        evidence=evidence if rises else f"eval/accuracy is 0 in all {len(held_out)} evaluations",
        remedy=remedy
        if rises
        else f"try `gruppo reward check` on a right answer; if it counts, easier prompts; {remedy}",
        metric=CORRECT if rises else "eval/accuracy",
    )


def collapse(table: Table) -> Iterator[Finding]:
    """The policy has lost what it could."""
    fall, reward = Fall.of(table), _gain(table)
    if fall is not None and reward is not None:
        if fall.key not in (REWARD, CORRECT) and not any(reward_hacking(table)):
            yield Finding(
                rule="collapse",
                severity="problem",
                step=fall.step,
                text="training prompts are learned by heart, and what was right on held-out prompts is lost",
                evidence=f"{fall.key} fell from {fall.best:.3g} to {fall.last:.3g}, and {REWARD} rose, {reward}",
                remedy="more prompts, fewer steps or a lower lr; keep_best keeps the model of the best evaluation",
                metric=fall.key,
            )
    elif fall is not None:
        rates = [rate for _, rate in table.series("optim/lr")]
        lr = f" (lr={max(rates):g})" if rates else ""
        early = fall.step <= FEWEST_STEPS
        since = f"in the steps up to {fall.step}" if fall.step else "before the first step"
        yield Finding(
            rule="collapse",
            severity="problem",
            step=fall.step,
            text="the policy has collapsed" + (f" within the first steps{lr}" if early else ""),
            evidence=f"{fall.key} fell from {fall.best:.3g} {since} to {fall.last:.3g}",
            remedy=f"lower lr, by ten times to begin with{_forces(table)}; what else is found here follows from the "
            "collapse"
            if early
            else f"lower lr, clip_range or max_grad_norm{_forces(table)}, or raise beta or warmup_steps; keep_best "
            "keeps the model of the best evaluation",
            metric=fall.key,
        )


def decline(table: Table) -> Iterator[Finding]:
    """Held-out prompts are answered worse than by the model of the start, by less than a collapse."""
    if Progress.of(table).held_out != "down" or Fall.of(table) is not None or any(reward_hacking(table)):
        return
    first, *_, last = held_out_scores(table)
    reward = _gain(table)
    yield Finding(
        rule="decline",
        severity="problem",
        step=None,
        text="held-out prompts are answered worse than before the first step",
        evidence=f"{first.key} {first.value:.3g} -> {last.value:.3g}"
        + ("" if reward is None else f", {REWARD} {reward}"),
        remedy=f"lower lr{_forces(table)}" if reward is None else "more prompts, fewer steps or a lower lr",
        metric=first.key,
    )


def _gain(table: Table, by: float = 0.0) -> Change | None:
    """Change of a reward that rises, also above that of the first step: a policy that collapsed there may recover a
    little."""
    rewards = table.series(REWARD)
    change = Change.of(rewards)
    return change if change is not None and change.rises(by) and change.last > rewards[0][1] else None


def _forces(table: Table) -> str:
    """Options of a run, other than lr, that may have driven the policy away from what it could."""
    found = [(name, table.config.get(name)) for name in ("entropy_coef", "max_staleness")]
    return "".join(f", or {name}, which is {value:g}" for name, value in found if _is_positive(value))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


SURE_FROM_THE_START = 0.05
"""Entropy per token, in nats, of a policy that draws the same completion nearly every time."""
LOW_TEMPERATURE = 0.5
"""Below it, it is the temperature that makes a policy so sure."""


def _is_sure_from_the_start(table: Table) -> bool:
    """Whether the policy had nothing to choose in the first step, and was not right by that.

    Where hardly anything earns anything, only a low temperature tells it from a task that is too hard.
    """
    entropy, right = table.series(ENTROPY)[:1], table.series(CORRECT)[:1]
    is_sure = bool(entropy) and entropy[0][0] == 1 and entropy[0][1] < SURE_FROM_THE_START
    is_cold = table.config.get("temperature", 1.0) < LOW_TEMPERATURE
    wrong = _mean_since(1, table.series("group/all_wrong_frac"))
    earns = any(value for _, value in table.series("reward/std")) and (wrong is None or wrong < MOSTLY)
    return is_sure and (is_cold or earns) and not (right and right[0][1] >= SOLVED)


def no_exploration(table: Table) -> Iterator[Finding]:
    """The policy draws the same completion of a prompt again and again, from the first step on."""
    found = beyond(table.series(DEAD_FRAC), DEAD)
    if not _is_sure_from_the_start(table) or found is None or not found.is_now or found.begin > FEWEST_STEPS:
        return
    temperature = table.config.get("temperature")
    given = "" if temperature is None else f", which is {temperature:g}"
    usual = ": 1 is usual" if temperature is not None and temperature < LOW_TEMPERATURE else ""
    yield Finding(
        rule="no_exploration",
        severity="problem",
        step=found.begin,
        text="completions of a prompt are all alike from the first step, so there is nothing to compare",
        evidence=f"{ENTROPY} is {table.series(ENTROPY)[0][1]:.2g} nats in step 1, and {found.mean:.0%} of all groups "
        "are dead",
        remedy=f"raise temperature{given}{usual}",
        metric=ENTROPY,
    )


def _is_constant(table: Table) -> bool:
    """Whether all completions of all steps earned one value other than 0, which is a task that is too hard."""
    spread, mean = table.series("reward/std"), table.series(REWARD)
    return (
        len(spread) >= FEWEST_STEPS
        and not any(value > 1e-9 for _, value in spread)
        and max(value for _, value in mean) - min(value for _, value in mean) < 1e-9
        and mean[0][1] != 0
    )


def constant_reward(table: Table) -> Iterator[Finding]:
    """The reward does not depend on the completion, or there is none."""
    if not table.series(REWARD):
        yield Finding(
            rule="no_reward",
            severity="problem",
            step=table.steps[0],
            text="no completion has a reward",
            evidence="no reward function has scored a completion",
            remedy="all of them abstain (None); check their columns with `gruppo reward check`",
            metric=REWARD,
        )
    elif _is_constant(table):
        value = table.series(REWARD)[0][1]
        yield Finding(
            rule="constant_reward",
            severity="problem",
            step=table.steps[0],
            text="the reward gives every completion the same, so there is nothing to compare",
            evidence=f"all completions of {len(table.steps)} steps earned {value:g}",
            remedy="mend the function in rewards: try `gruppo reward check`; if all answers are right, harder prompts",
            metric="reward/std",
        )


REWARD_RISES = 0.1
"""Rise of the reward that counts, in spreads of the reward at the start."""


def reward_hacking(table: Table) -> Iterator[Finding]:
    """The sum of the rewards rises and right answers do not: one part is earned without them."""
    progress = Progress.of(table)
    correct, spread = (Change.of(table.series(name)) for name in (CORRECT, "reward/std"))
    if not progress.is_judged or progress.direction == "up" or correct is None or spread is None:
        return
    is_kept = progress.direction == "flat" and correct.first >= SOLVED
    total = _gain(table, by=REWARD_RISES * spread.first)
    if is_kept or total is None:
        return
    rises = {name: change for name, change in _side_rewards(table).items() if change.rises()}
    if not rises:
        return
    part = max(rises, key=lambda name: rises[name].last - rises[name].first)
    metric, held_out = f"reward/{part}/mean", table.series("eval/accuracy")
    ends = "" if len(held_out) < 2 else f", eval/accuracy {held_out[0][1]:.3g} -> {held_out[-1][1]:.3g}"
    falls = progress.direction == "down"
    yield Finding(
        rule="reward_hacking",
        severity="problem",
        step=departure(table.series(CORRECT), correct.first - LEAST_RISE) if falls else None,
        text=f"reward {printable(part)!r} is exploited: it rises while fewer "
        f"{'' if progress.held_out is None else 'held-out '}answers are right"
        if falls
        else f"reward {printable(part)!r} rises alone: answers do not become right more often",
        evidence=f"{REWARD} {total}, {CORRECT} {correct}{ends}, {printable(metric)} {rises[part]}",
        remedy="give it less weight in reward_weights, or none; read the completions that it pays",
        metric=metric,
    )


def _side_rewards(table: Table) -> dict[str, Change]:
    """Change of each reward that does not decide what is right, times its weight, where there are several rewards."""
    ends = "/abstain_frac"
    names = [key.split("/")[1] for key in table.keys if key.startswith("reward/") and key.endswith(ends)]
    found = {}
    for name in names:
        weight = table.weights.get(name, 1.0)
        change = Change.of([(step, weight * value) for step, value in table.series(f"reward/{name}/mean")])
        if name != table.correct_by and len(names) > 1 and change is not None:
            found[name] = change
    return found


# --- policy -----------------------------------------------------------------------------------------------------------

ENTROPY_LEFT = 0.2
"""Share of the entropy at the start below which a policy has stopped to explore."""


def entropy_collapse(table: Table) -> Iterator[Finding]:
    """The policy is sure of its answers, and they are not right."""
    points = table.series(ENTROPY)
    entropy, correct, dead = (Change.of(series) for series in (points, table.series(CORRECT), table.series(DEAD_FRAC)))
    # A language model that has found a form for its answers has little entropy, and may still differ in what counts.
    if entropy is None or (dead is not None and dead.last <= DEAD):
        return
    start = max(entropy.first, points[0][1])  # a fast collapse is over within the first window
    if entropy.last >= ENTROPY_LEFT * start or (correct is not None and correct.last >= SOLVED):
        return
    if _is_never_right(table) or _is_sure_from_the_start(table):
        return
    right = "" if correct is None else f", {CORRECT} {correct}"
    yield Finding(
        rule="entropy_collapse",
        severity="problem",
        step=departure(points, ENTROPY_LEFT * start),
        text="the policy has stopped to explore before its answers are right",
        evidence=f"{ENTROPY} {start:.3g} -> {entropy.last:.3g}{right}",
        remedy="lower lr, widen clip_range above (0.2 0.28), or set entropy_target",
        metric=ENTROPY,
    )


SPIKE = 20.0
"""Gradient norm over the median that is no ordinary noise: norms of sound runs stay within a factor of 12. Steps whose
answers are nearly all right are left out: most of their norms are near 0, and a rare wrong answer is a surprise."""


def gradient_spike(table: Table) -> Iterator[Finding]:
    """Single steps have gradients far beyond the others, or none that is finite."""
    skipped = [(step, value) for step, value in table.series(SKIPPED) if value]
    if skipped:
        yield Finding(
            rule="gradient_not_finite",
            severity="problem",
            step=skipped[0][0],
            text="updates were left out, since their gradient was not finite",
            evidence=f"{sum(value for _, value in skipped):g} updates in {len(skipped)} steps, first in step "
            f"{skipped[0][0]}",
            remedy="lower lr; dtype=float32 shows whether it is precision",
            metric=SKIPPED,
        )
    solved = {step for step, share in table.series(CORRECT) if share >= SOLVED}
    norms = [(step, value) for step, value in table.series(NORM) if step not in solved]
    limit = table.config.get("max_grad_norm", 1.0)
    median = float(np.median([value for _, value in norms])) if norms else 0.0
    spikes = [(step, value) for step, value in norms if value > SPIKE * median and value > limit]
    if spikes and len(norms) >= FEWEST_STEPS:
        worst = max(spikes, key=lambda spike: spike[1])
        yield Finding(
            rule="gradient_spike",
            severity="warning",
            step=spikes[0][0],
            text="single steps have gradients far beyond the others",
            evidence=f"{len(spikes)} of {len(norms)} steps; {NORM} is {worst[1]:.3g} in step {worst[0]}, the "
            f"median is {median:.3g}",
            remedy="look at the rewards of that step for values far off; lower max_grad_norm, or lr",
            metric=NORM,
        )
