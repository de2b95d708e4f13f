"""Rules over metrics: each finds one fault. Thresholds are defined above the rule that uses them."""

from collections.abc import Iterator, Mapping

import numpy as np

from gruppo.doctor.finding import (
    CORRECT,
    DEAD_FRAC,
    ENTROPY,
    FEWEST_STEPS,
    LENGTH,
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
from gruppo.process.streams import printable
from gruppo.types import CUT, ENVIRONMENT

# --- ranges of the registry -------------------------------------------------------------------------------------------

RANGES = {
    "live/approx_kl": ("kl_blow_up", "the policy moves too far within a step"),
    "policy/kl": ("kl_blow_up", "the policy has moved far from the reference"),
    "turns/lost_frac": ("lost_episodes", "episodes are lost because the environment fails"),
    "reward/<name>/error_frac": ("reward_fails", "a reward function keeps failing"),
    "turns/unparsed_frac": ("unreadable_calls", "many tool calls cannot be read"),
    "turns/cut_frac": ("cut_episodes", "many episodes are cut before they end"),
    "completion/truncated_frac": ("truncation", "most completions are cut off before they end"),
    "completion/empty_frac": ("empty_completions", "most completions are blank"),
}
"""Rule and cause for each key outside its healthy range; `gruppo.keys` has the bounds and remedies. Causes come before
their consequences."""


def out_of_range(table: Table) -> Iterator[Finding]:
    """Keys whose mean is outside their healthy range."""
    keys = [(name, key) for name in table.keys if (key := find(name)) is not None and key.name in RANGES]
    if "turns/cut_frac" in table.keys:  # which names the limit
        keys = [(name, key) for name, key in keys if name != "completion/truncated_frac"]
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
                text=text + _failure(table, name) + _limit(table, name),
                evidence=f"{name} is {found.worst:.3g}, {'above' if above else 'below'} {bound:g}",
                remedy=key.remedy,
                metric=name,
            )


def _failure(table: Table, name: str) -> str:
    """First failure of a reward function or of the environment, as recorded in the completions."""
    if not name.endswith(("/error_frac", "/lost_frac")):
        return ""
    reward = ENVIRONMENT if name == "turns/lost_frac" else name.split("/")[1]
    texts = [rollouts.errors[reward] for rollouts in table.rollouts if reward in rollouts.errors]
    last_line = printable(texts[0].rstrip().rpartition("\n")[2])[:200] if texts else ""
    return f": {last_line}" if last_line else ""


def _limit(table: Table, name: str) -> str:
    """The limit that cut most episodes, as recorded in the completions."""
    cut = {stop: sum(rollouts.stops.get(stop, 0) for rollouts in table.rollouts) for stop in sorted(CUT)}
    if name != "turns/cut_frac" or not any(cut.values()):
        return ""
    most = max(cut, key=lambda stop: cut[stop])
    return f", {cut[most] / sum(cut.values()):.0%} of them by {most}"


# --- sampler and precision --------------------------------------------------------------------------------------------

MEAN_GAP = 0.1
"""Limit of the mean log-prob gap, in nats. bf16 engines with equal weights stay below 0.02, with experts below 0.05."""
GAPS = ("sampler/logp_gap_mean", "sampler/logp_gap_max")
GROWTH = 3.0
"""Growth of the gap that shows that updates do not arrive; with less, it was there from the start."""


def gap_bound(name: str) -> float:
    """Largest healthy value of a key of `GAPS`."""
    key = find(name)
    assert key is not None
    return key.alarm[1] if key.alarm else MEAN_GAP


def sampler_gap(metrics: Mapping[str, float]) -> str | None:
    """Warning about the gap of an on-policy step; None if it is healthy."""
    if metrics.get("rollout/staleness"):  # older weights have other log-probs
        return None
    for name in GAPS:
        if metrics.get(name, 0.0) > gap_bound(name):
            return (
                f"{name} is {metrics[name]:.3g}, above {gap_bound(name):g}: sampler and trainer disagree about "
                "the log-probs of the same tokens. Check that both have the same model in the same number format "
                "(dtype), and that a server runs with --logprobs-mode processed_logprobs"
            )
    return None


def stale_sampler(table: Table) -> Iterator[Finding]:
    """The sampler does not have the trainer's weights."""
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
        text = "the sampler does not have the trainer's weights: " + (
            "the gap grows with every update, so new weights do not arrive"
            if grew
            else "the gap exists from the start, so its model, chat template or number format differs"
        )
        remedy = key.remedy
        if is_meant:
            text, remedy = "rollouts are too old for the weights they train", "lower max_staleness, or lr"
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
"""Share of updates that change nothing: those below half the distance to the next number round away. Healthy runs lose
up to half, at weights whose gradient is near 0."""


def precision_lost(table: Table) -> Iterator[Finding]:
    """Updates are too small for the number format of the weights."""
    updates = table.updates
    if updates is None or not len(updates.spacing):
        return
    spacing = np.sort(updates.spacing)
    # A checkpoint does not pair weights with updates, so each update is compared with all weights.
    below = 1 - np.searchsorted(spacing, 2 * updates.update, side="right") / len(spacing)
    below[updates.update == 0] = 0.0  # without a gradient there is nothing to round
    lost = float(below.mean()) if len(below) else 0.0
    if lost > LOST:
        yield Finding(
            rule="precision_lost",
            severity="problem",
            step=None,
            text="most updates are too small for the weights' number format and round to nothing",
            evidence=f"at the highest lr of the run, {lost:.0%} of the updates in step {updates.step} are below half "
            f"the distance to the next float32 number (medians: {np.median(updates.update):.1g} and "
            f"{np.median(spacing) / 2:.1g})",
            remedy="raise lr",
            metric="optim/lr",
        )


# --- groups and rewards -----------------------------------------------------------------------------------------------

DEAD = 0.8
"""Share of groups without signal above which four of five samples are wasted."""
ALL_DEAD = 0.95
"""Share above which nothing is learned."""
MOSTLY = 0.5
"""Share of groups that must be all right, or all wrong, to name that as the cause."""


def dead_groups(table: Table) -> Iterator[Finding]:
    """Most groups earn one reward: the task is too easy or too hard, or the policy too certain."""
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
            "no completion earns a reward, so there is nothing to learn from",
            f"all groups are dead with a reward of {reward:g}, {found.when}",
            "run `gruppo reward check`, in case the reward does not read this format; if it does, make the task easier",
        )
    elif right is not None and right >= MOSTLY:
        began = table.steps[0] == 1 and found.begin == 1
        if began:  # later on, a successful run looks like this
            yield _dead(
                "too_easy",
                found,
                "the task is too easy: most groups are all right from the start",
                f"{share}, {right:.0%} all right",
                "use harder prompts, retire_solved, or dynamic_sampling, which fills steps with other groups",
            )
    elif wrong is not None and wrong >= MOSTLY and not _is_never_right(table):
        yield _dead(
            "too_hard",
            found,
            "the task is too hard: most groups are all wrong",
            f"{share}, {wrong:.0%} all wrong",
            "read completions that earn nothing: if some are right, fix the reward or the answers in the data; if not, "
            "use easier prompts, a larger group_size, or dynamic_sampling",
        )
    elif (progress := Progress.of(table)).is_judged or progress.direction != "up":  # else a successful run
        yield _dead(
            "no_signal",
            found,
            "most groups have no signal: all of their completions earn the same",
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
    """Mean from this step on."""
    values = [value for at, value in points if at >= step]
    return sum(values) / len(values) if values else None


def _is_never_right(table: Table) -> bool:
    """True if the reward rises but no answer ever counts as right."""
    change, correct = Change.of(table.series(REWARD)), table.series(CORRECT)
    return change is not None and change.rises() and bool(correct) and not any(value for _, value in correct)


def never_right(table: Table) -> Iterator[Finding]:
    """No answer ever counts as right, in training or on held-out prompts."""
    held_out, some = table.series("eval/accuracy"), any(spread > 0 for _, spread in table.series("reward/std"))
    rises, none_held_out = (
        _is_never_right(table),
        len(held_out) > 1 and not any(score for _, score in held_out) and some,
    )
    if not rises and not none_held_out:
        return
    evidence = f"{CORRECT} is 0 in all {len(table.steps)} steps, {REWARD} {Change.of(table.series(REWARD))}"
    remedy = "set correct_at to what a right answer earns, or correct_by to the reward that decides"
    yield Finding(
        rule="never_right",
        severity="warning",
        step=None,
        text="the reward rises, but no answer counts as right" if rises else "no held-out answer is ever right",
        evidence=evidence if rises else f"eval/accuracy is 0 in all {len(held_out)} evaluations",
        remedy=remedy
        if rises
        else f"try `gruppo reward check` with a right answer; if it counts, use easier prompts; if not, {remedy}",
        metric=CORRECT if rises else "eval/accuracy",
    )


def collapse(table: Table) -> Iterator[Finding]:
    """The policy lost what it could do."""
    fall, reward = Fall.of(table), _gain(table)
    if fall is not None and reward is not None:
        if fall.key not in (REWARD, CORRECT) and not any(reward_hacking(table)):
            yield Finding(
                rule="collapse",
                severity="problem",
                step=fall.step,
                text="the policy memorises the training prompts and gets held-out ones wrong",
                evidence=f"{fall.key} fell from {fall.best:.3g} to {fall.last:.3g} while {REWARD} rose, {reward}",
                remedy="use more prompts, fewer steps or a lower lr; keep_best keeps the model of the best evaluation",
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
            remedy=f"lower lr to a tenth{_forces(table)}; the other findings follow from the collapse"
            if early
            else f"lower lr, clip_range or max_grad_norm{_forces(table)}, or raise beta or warmup_steps; keep_best "
            "keeps the model of the best evaluation",
            metric=fall.key,
        )


def decline(table: Table) -> Iterator[Finding]:
    """Held-out answers got worse than at the start, but short of a collapse."""
    if Progress.of(table).held_out != "down" or Fall.of(table) is not None or any(reward_hacking(table)):
        return
    first, *_, last = held_out_scores(table)
    reward = _gain(table)
    yield Finding(
        rule="decline",
        severity="problem",
        step=None,
        text="held-out answers are worse than before the first step",
        evidence=f"{first.key} {first.value:.3g} -> {last.value:.3g}"
        + ("" if reward is None else f", {REWARD} {reward}"),
        remedy=f"lower lr{_forces(table)}" if reward is None else "use more prompts, fewer steps or a lower lr",
        metric=first.key,
    )


def _gain(table: Table, by: float = 0.0) -> Change | None:
    """Change of a rising reward that ends above the first step, in which a policy may collapse to recover a little."""
    rewards = table.series(REWARD)
    change = Change.of(rewards)
    return change if change is not None and change.rises(by) and change.last > rewards[0][1] else None


def _forces(table: Table) -> str:
    """Options besides lr that may have broken the policy, as part of a remedy."""
    found = [(name, table.config.get(name)) for name in ("entropy_coef", "max_staleness")]
    return "".join(f", or {name}, which is {value:g}" for name, value in found if _is_positive(value))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


SURE_FROM_THE_START = 0.05
"""Entropy per token, in nats, of a policy that draws the same completion nearly every time."""
LOW_TEMPERATURE = 0.5
"""Temperature below which it is the cause of such certainty."""


def _is_sure_from_the_start(table: Table) -> bool:
    """True if the policy had no choice in the first step, and was not right.

    If hardly anything earns a reward, only a low temperature tells this from a task that is too hard.
    """
    entropy, right = table.series(ENTROPY)[:1], table.series(CORRECT)[:1]
    is_sure = bool(entropy) and entropy[0][0] == 1 and entropy[0][1] < SURE_FROM_THE_START
    is_cold = table.config.get("temperature", 1.0) < LOW_TEMPERATURE
    wrong = _mean_since(1, table.series("group/all_wrong_frac"))
    earns = any(value for _, value in table.series("reward/std")) and (wrong is None or wrong < MOSTLY)
    return is_sure and (is_cold or earns) and not (right and right[0][1] >= SOLVED)


def no_exploration(table: Table) -> Iterator[Finding]:
    """From the first step, the policy draws the same completion of a prompt again and again."""
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
        text="from the first step, a prompt's completions are all alike, so there is nothing to compare",
        evidence=f"{ENTROPY} is {table.series(ENTROPY)[0][1]:.2g} nats in step 1, and {found.mean:.0%} of the groups "
        "are dead",
        remedy=f"raise temperature{given}{usual}",
        metric=ENTROPY,
    )


def _is_constant(table: Table) -> bool:
    """True if all completions earned the same nonzero reward. A constant 0 means a task that is too hard."""
    spread, mean = table.series("reward/std"), table.series(REWARD)
    return (
        len(spread) >= FEWEST_STEPS
        and not any(value > 1e-9 for _, value in spread)
        and max(value for _, value in mean) - min(value for _, value in mean) < 1e-9
        and mean[0][1] != 0
    )


def constant_reward(table: Table) -> Iterator[Finding]:
    """The reward is the same for every completion, or missing."""
    if not table.series(REWARD):
        yield Finding(
            rule="no_reward",
            severity="problem",
            step=table.steps[0],
            text="no completion has a reward",
            evidence="no reward function scored any completion",
            remedy="they all abstain (None); check their columns with `gruppo reward check`",
            metric=REWARD,
        )
    elif _is_constant(table):
        value = table.series(REWARD)[0][1]
        yield Finding(
            rule="constant_reward",
            severity="problem",
            step=table.steps[0],
            text="every completion earns the same, so there is nothing to compare",
            evidence=f"all completions of {len(table.steps)} steps earned {value:g}",
            remedy="fix the reward function: try `gruppo reward check`; if all answers are right, use harder prompts",
            metric="reward/std",
        )


REWARD_RISES = 0.1
"""Smallest rise that counts, in multiples of the reward's spread at the start."""


def reward_hacking(table: Table) -> Iterator[Finding]:
    """The total reward rises without more right answers: one part is earned without them."""
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
        text=f"reward {printable(part)!r} is being exploited: it rises while fewer "
        f"{'' if progress.held_out is None else 'held-out '}answers are right"
        if falls
        else f"reward {printable(part)!r} rises, but answers do not get better",
        evidence=f"{REWARD} {total}, {CORRECT} {correct}{ends}, {printable(metric)} {rises[part]}",
        remedy="lower or drop its weight in reward_weights; read the completions it rewards",
        metric=metric,
    )


def _side_rewards(table: Table) -> dict[str, Change]:
    """Weighted change of each reward that does not decide correctness, if there are several rewards."""
    ends = "/abstain_frac"
    names = [key.split("/")[1] for key in table.keys if key.startswith("reward/") and key.endswith(ends)]
    found = {}
    for name in names:
        weight = table.weights.get(name, 1.0)
        change = Change.of([(step, weight * value) for step, value in table.series(f"reward/{name}/mean")])
        if name != table.correct_by and len(names) > 1 and change is not None:
            found[name] = change
    return found


# --- turns ------------------------------------------------------------------------------------------------------------

RARELY = 0.01
"""Calls per episode below which tools play no part."""


def tools_never_called(table: Table) -> Iterator[Finding]:
    """The policy has tools and calls none.

    Where the options name no tools, episodes of a single turn show it: a game answers its first turn.
    """
    calls, turns = table.series("turns/calls"), dict(table.series("turns/mean"))
    has_tools = bool(table.config.get("tools"))
    points = [(step, value) for step, value in calls if has_tools or turns.get(step) == 1]
    found, correct = beyond(points, RARELY, above=False), Change.of(table.series(CORRECT))
    if found is None or not found.is_now or (correct is not None and correct.last >= SOLVED):
        return
    yield Finding(
        rule="tools_never_called",
        severity="warning",
        step=found.begin,
        text="the policy does not call its tools",
        evidence=f"{found.mean:.3g} calls per episode {found.when}",
        remedy="say in the prompt when to call a tool, check that the chat template shows the tools to the model, or "
        "start from a model that can call tools; GRPO cannot teach what is never sampled",
        metric="turns/calls",
    )


MOSTLY_GIVEN = 0.8
"""Share of an episode's tokens written by the environment above which the policy's own are a minor part of the cost."""


def mostly_given(table: Table) -> Iterator[Finding]:
    """Most tokens of an episode are the environment's: they cost time and memory, and teach nothing."""
    own = dict(table.series(LENGTH))
    shares = [
        (step, given / (given + own[step]))
        for step, given in table.series("turns/given_tokens")
        if given + own.get(step, 0.0) and step in own
    ]
    found = beyond(shares, MOSTLY_GIVEN)
    if found is None or not found.is_now:
        return
    yield Finding(
        rule="mostly_given",
        severity="warning",
        step=found.begin,
        text="most tokens of an episode are written by the environment",
        evidence=f"{found.mean:.0%} of the tokens after the prompt {found.when}",
        remedy="let tools and environment answer with less text: only the policy's own tokens are trained on, and all "
        "of them cost time and memory",
        metric="turns/given_tokens",
    )


# --- policy -----------------------------------------------------------------------------------------------------------

ENTROPY_LEFT = 0.2
"""Share of the initial entropy below which a policy no longer explores."""


def entropy_collapse(table: Table) -> Iterator[Finding]:
    """The policy is certain of answers that are wrong."""
    points = table.series(ENTROPY)
    entropy, correct, dead = (Change.of(series) for series in (points, table.series(CORRECT), table.series(DEAD_FRAC)))
    # A language model that settled on a format has little entropy and may still vary where it matters.
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
        text="the policy stopped exploring before its answers were right",
        evidence=f"{ENTROPY} {start:.3g} -> {entropy.last:.3g}{right}",
        remedy="lower lr, widen the upper side of clip_range (0.2 0.28), or set entropy_target",
        metric=ENTROPY,
    )


SPIKE = 20.0
"""Multiple of the median gradient norm that is a spike; healthy runs stay within 12. Steps with nearly all answers
right are left out: their norms are near 0, so a rare wrong answer stands out."""


def gradient_spike(table: Table) -> Iterator[Finding]:
    """A few steps have far larger gradients than the rest, or gradients that are not finite."""
    skipped = [(step, value) for step, value in table.series(SKIPPED) if value]
    if skipped:
        yield Finding(
            rule="gradient_not_finite",
            severity="problem",
            step=skipped[0][0],
            text="updates were skipped because their gradient was not finite",
            evidence=f"{sum(value for _, value in skipped):g} updates in {len(skipped)} steps, first in step "
            f"{skipped[0][0]}",
            remedy="lower lr; try dtype=float32 to see whether precision is the cause",
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
            text="a few steps have far larger gradients than the rest",
            evidence=f"in {len(spikes)} of {len(norms)} steps; {NORM} is {worst[1]:.3g} in step {worst[0]}, the median "
            f"is {median:.3g}",
            remedy="check the rewards of that step for outliers; lower max_grad_norm or lr",
            metric=NORM,
        )
