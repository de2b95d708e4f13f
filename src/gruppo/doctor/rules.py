"""Rules: each looks for one fault in the table of a run. Thresholds stand above their rule, with the reason."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gruppo.doctor.table import Points, Rollouts, Table
from gruppo.keys import find
from gruppo.output import printable
from gruppo.run.reader import RunReader

FEWEST_STEPS = 5
"""Steps below which nothing is judged: fewer are noise."""
WINDOW = 20
"""Steps over which a number is averaged before it is judged: one bad step is no fault."""

REWARD, CORRECT, LENGTH = "reward/mean", "reward/correct_frac", "completion/len_mean"
ENTROPY, NORM, SKIPPED, DEAD_FRAC = "rollout/entropy", "optim/grad_norm", "optim/skipped", "group/dead_frac"

Severity = Literal["problem", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A likely fault of a run."""

    rule: str
    severity: Severity
    """`problem`: the run does not learn what it should; `warning`: it may, at a price."""
    step: int | None
    """Where it began; None: it holds for the whole run."""
    text: str
    """What is likely wrong."""
    evidence: str
    remedy: str
    metric: str | None = None
    """Key of the chart that shows it."""

    def __str__(self) -> str:
        return f"{self.evidence}: {self.remedy}"


Rule = Callable[[Table], Iterator[Finding]]


def findings(run: RunReader) -> list[Finding]:
    """What is likely wrong with a run, problems first."""
    return applied(Table.of(run))


def applied(table: Table) -> list[Finding]:
    """The findings of all rules, problems first; none before `FEWEST_STEPS`."""
    if len(table.steps) < FEWEST_STEPS:
        return []
    found = [finding for rule in RULES.values() for finding in rule(table)]
    return sorted(found, key=lambda finding: finding.severity != "problem")


def advice(recent: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None) -> list[str]:
    """Sentences on the metrics of the last steps, while a run goes on; empty when nothing stands out."""
    return [str(finding) for finding in applied(Table(metrics=recent, config=config or {}))]


# --- windows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in which the mean of a window was beyond a bound."""

    begin: int
    last: int
    worst: float
    """The mean that is farthest from the bound."""
    is_now: bool
    """Whether the last window is among them."""

    @property
    def when(self) -> str:
        return f"since step {self.begin}" if self.is_now else f"in steps {self.begin} to {self.last}"


def _means(points: Points) -> tuple[int, list[float]]:
    """Length of the windows, and the mean of each; none for too few points."""
    width = min(WINDOW, len(points))
    if len(points) < FEWEST_STEPS:
        return width, []
    sums = np.concatenate([[0.0], np.cumsum([value for _, value in points])])
    return width, ((sums[width:] - sums[:-width]) / width).tolist()


def beyond(points: Points, bound: float, *, above: bool = True) -> Stretch | None:
    """The windows whose mean is above (or below) a bound, up to the last of them; None if there are none."""
    width, means = _means(points)
    sign = 1 if above else -1
    out = [i for i, mean in enumerate(means) if sign * mean > sign * bound]
    if not out:
        return None
    first, last = out[0], out[-1]
    inside = [step for step, value in points[first : first + width] if sign * value > sign * bound]
    worst = max((means[i] for i in out), key=lambda mean: sign * mean)
    return Stretch(inside[0], points[last + width - 1][0], worst, last == len(means) - 1)


SURE = 2.0
"""Standard errors that a change must have to be one."""


@dataclass(frozen=True, slots=True)
class Change:
    """A value at both ends of a run: means over the first and the last window, which share no step."""

    first: float
    last: float
    best: float
    """The highest mean of any window."""
    error: float
    """Standard error of the difference, from the spread within the windows."""

    @classmethod
    def of(cls, points: Points) -> "Change | None":
        """None for fewer points than two windows of `FEWEST_STEPS`.

        >>> Change.of([(step, float(step > 5)) for step in range(1, 11)])
        Change(first=0.0, last=1.0, best=1.0, error=0.0)
        """
        values = np.array([value for _, value in points], float)
        width = min(WINDOW, len(values) // 2)
        if width < FEWEST_STEPS:
            return None
        first, last = values[:width], values[-width:]
        means = np.convolve(values, np.ones(width) / width, "valid")
        error = float(np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / width))
        return cls(float(first.mean()), float(last.mean()), float(means.max()), error)

    def rises(self, by: float = 0.0) -> bool:
        return self.last - self.first > max(SURE * self.error, by)

    def falls(self, by: float = 0.0) -> bool:
        return self.first - self.last > max(SURE * self.error, by)

    def __str__(self) -> str:
        return f"{self.first:.3g} -> {self.last:.3g}"


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
        assert key.healthy is not None
        low, high = key.healthy
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
GROWTH = 3.0
"""A gap that grew by this factor came with the updates; one that was there from the start did not."""


def stale_sampler(table: Table) -> Iterator[Finding]:
    """Completions were not sampled from the weights that train."""
    key = find("sampler/logp_gap_max")
    assert key is not None and key.healthy is not None
    for name, bound in (("sampler/logp_gap_mean", MEAN_GAP), (key.name, key.healthy[1])):
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
    lost = float(below.mean())
    if lost > LOST:
        yield Finding(
            rule="precision_lost",
            severity="problem",
            step=None,
            text="updates are smaller than what the weights can hold, so most of them are rounded away",
            evidence=f"{lost:.0%} of the updates of step {updates.step} are less than half the distance to the next "
            f"float32 number: medians {np.median(updates.update):.1g} and {np.median(spacing) / 2:.1g}",
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
    if found is None or not found.is_now or _is_constant(table) or not table.series(REWARD):
        return
    share = f"{found.worst:.0%} of the groups are dead {found.when}"
    right, wrong, reward = (
        _last(table.series(name)) for name in ("group/all_right_frac", "group/all_wrong_frac", REWARD)
    )
    if found.worst > ALL_DEAD and reward is not None and reward <= 0:
        yield _dead(
            "too_hard",
            found,
            "no completion earns anything, so nothing can be learned",
            f"all groups are dead at reward {reward:g}, {found.when}",
            "if the reward was above 0 earlier the policy has collapsed: lower lr or raise beta; else the task "
            "is too hard as it is, or the reward does not read the form of the completions: try `gruppo reward check`",
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
    elif wrong is not None and wrong >= MOSTLY:
        yield _dead(
            "too_hard",
            found,
            "the task is too hard: most groups are all wrong",
            f"{share}, {wrong:.0%} all wrong",
            "raise group_size or temperature, easier prompts, or dynamic_sampling",
        )
    else:
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


def _last(points: Points) -> float | None:
    """Mean of the last window."""
    _, means = _means(points)
    return means[-1] if means else None


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


FEWEST_GROUPS = 10
"""Groups that must have what a rule compares within groups: fewer are noise."""
CONTRADICTED = 0.5
"""Share of groups with right and wrong answers in which wrong ones earn more. A reward that has nothing to do with
correctness reaches a half; one that serves it stays near 0."""


def contradicted_reward(table: Table) -> Iterator[Finding]:
    """Wrong answers earn more than right ones."""
    differences = []
    for rollouts in table.rollouts:
        for rows in _groups(rollouts):
            reward, correct = rollouts.reward_N[rows], rollouts.correct_N[rows]
            right, wrong = reward[correct == 1], reward[correct == 0]
            if len(right) and len(wrong):
                differences.append(float(np.nanmean(right) - np.nanmean(wrong)))
    against = sum(difference < 0 for difference in differences)
    if len(differences) >= FEWEST_GROUPS and against > CONTRADICTED * len(differences):
        yield Finding(
            rule="contradicted_reward",
            severity="problem",
            step=table.rollouts[0].step,
            text="the sum of the rewards pays wrong answers more than right ones",
            evidence=f"in {against} of {len(differences)} groups with right and wrong answers the wrong ones earn "
            f"more, by {-sum(differences) / len(differences):.3g} on average over all of them",
            remedy="mend the rewards, or their reward_weights; correct_by names the one that decides what is right",
            metric=CORRECT,
        )


def _groups(rollouts: Rollouts) -> Iterator[np.ndarray]:
    """Rows of each group whose rewards are known."""
    for number in np.unique(rollouts.group_N):
        rows = np.flatnonzero((rollouts.group_N == number) & np.isfinite(rollouts.reward_N))
        if len(rows) > 1:
            yield rows


CORRECT_FALLS = 0.05
"""Fall of the share of right answers that is more than noise over a window of steps."""
REWARD_RISES = 0.1
"""Rise of the reward that counts, in spreads of the reward at the start."""


def reward_hacking(table: Table) -> Iterator[Finding]:
    """The sum of the rewards rises while fewer answers are right: one part is being exploited."""
    parts = {name.split("/")[1] for name in table.keys if name.startswith("reward/") and name.endswith("/abstain_frac")}
    total, correct, spread = (Change.of(table.series(name)) for name in (REWARD, CORRECT, "reward/std"))
    if len(parts) < 2 or total is None or correct is None or spread is None:
        return
    if not total.rises(REWARD_RISES * spread.first) or not correct.falls(CORRECT_FALLS):
        return
    changes = {part: Change.of(table.series(f"reward/{part}/mean")) for part in sorted(parts)}
    rises = {part: change.last - change.first for part, change in changes.items() if change is not None}
    if not rises:
        return
    part = max(rises, key=lambda name: rises[name])
    metric = f"reward/{part}/mean"
    yield Finding(
        rule="reward_hacking",
        severity="problem",
        step=_departure(table.series(CORRECT), correct.first - CORRECT_FALLS),
        text=f"reward {printable(part)!r} is exploited: it rises while fewer answers are right",
        evidence=f"{REWARD} {total}, {CORRECT} {correct}, {printable(metric)} {changes[part]}",
        remedy="give it less weight in reward_weights, or none; read the completions that it pays",
        metric=metric,
    )


def _departure(points: Points, bound: float, *, above: bool = False) -> int | None:
    """The step after which a value stayed beyond a bound."""
    last = None
    for step, value in points:
        is_out = value > bound if above else value < bound
        last = (step if last is None else last) if is_out else None
    return last


# --- completions ------------------------------------------------------------------------------------------------------

LONGER = 1.5
"""Growth of the mean length that is worth a look."""
PAID_BY_LENGTH = 0.8
"""Correlation of reward and length within groups at which the reward is little else than the length."""
FAVOURED_LENGTH = 0.3
"""Correlation at which longer completions clearly earn more."""


def length_exploitation(table: Table) -> Iterator[Finding]:
    """Completions grow because length pays, and not because answers get better."""
    length, correct = (Change.of(table.series(name)) for name in (LENGTH, CORRECT))
    if length is None or not length.rises((LONGER - 1) * length.first):
        return
    correlation = _length_correlation(table.rollouts)
    is_better = correct is not None and correct.rises()
    if correlation is None or correlation < (PAID_BY_LENGTH if is_better else FAVOURED_LENGTH):
        return
    answers = "" if correct is None else f", {CORRECT} {correct}"
    yield Finding(
        rule="length_exploitation",
        severity="problem",
        step=_departure(table.series(LENGTH), LONGER * length.first, above=True),
        text="completions grow because length pays",
        evidence=f"{LENGTH} {length}, correlation of length and reward within groups {correlation:.2f}{answers}",
        remedy="take length out of the rewards, penalise it with overlong_cache, or lower max_new_tokens; with a "
        "reward that has no part in it, loss=drgrpo",
        metric=LENGTH,
    )


def _length_correlation(all_rollouts: Sequence[Rollouts]) -> float | None:
    """Correlation of length and reward, both centred in their groups; None where too few groups have both."""
    lengths, rewards = [], []
    for rollouts in all_rollouts:
        for rows in _groups(rollouts):
            length, reward = rollouts.length_N[rows].astype(float), rollouts.reward_N[rows]
            if length.std() > 0 and reward.std() > 0:
                lengths.append(length - length.mean())
                rewards.append(reward - reward.mean())
    if len(lengths) < FEWEST_GROUPS:
        return None
    x, y = np.concatenate(lengths), np.concatenate(rewards)
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


REPEATS = 0.5
"""Distinct pieces of 4 tokens over all of them. Prose is above 0.9, long derivations above 0.7."""
LONG = 16
"""Tokens below which a text is too short to tell."""
MANY = 0.25
"""Share of completions that repeat themselves."""


def repetition(table: Table) -> Iterator[Finding]:
    """Completions repeat themselves."""
    points: Points = []
    for rollouts in table.rollouts:
        is_repeating_N = (rollouts.length_N >= LONG) & (rollouts.distinct_N < REPEATS)
        points.append((rollouts.step, float(is_repeating_N.mean()) if len(is_repeating_N) else 0.0))
    found = beyond(points, MANY)
    if found is not None and found.is_now:
        yield Finding(
            rule="repetition",
            severity="problem",
            step=found.begin,
            text="completions repeat themselves",
            evidence=f"{found.worst:.0%} of the completions have at least {LONG} tokens, and more than half of their "
            f"4-token pieces come again, {found.when}",
            remedy="lower lr, lower max_new_tokens, raise beta, or a stop text; look whether a reward pays for length",
            metric=LENGTH,
        )


# --- policy -----------------------------------------------------------------------------------------------------------

ENTROPY_LEFT = 0.2
"""Share of the entropy at the start below which a policy has stopped to explore."""
SOLVED = 0.9
"""Share of right answers at which being sure is what was wanted."""


def entropy_collapse(table: Table) -> Iterator[Finding]:
    """The policy is sure of its answers, and they are not right."""
    points = table.series(ENTROPY)
    entropy, correct = Change.of(points), Change.of(table.series(CORRECT))
    if entropy is None:
        return
    start = max(entropy.first, points[0][1])  # a fast collapse is over within the first window
    if entropy.last >= ENTROPY_LEFT * start or (correct is not None and correct.last >= SOLVED):
        return
    right = "" if correct is None else f", {CORRECT} {correct}"
    yield Finding(
        rule="entropy_collapse",
        severity="problem",
        step=_departure(points, ENTROPY_LEFT * start),
        text="the policy has stopped to explore before its answers are right",
        evidence=f"{ENTROPY} {start:.3g} -> {entropy.last:.3g}{right}",
        remedy="lower lr, widen clip_range above (0.2 0.28), or set entropy_target",
        metric=ENTROPY,
    )


SPIKE = 10.0
"""Gradient norm over the median of the run that is no ordinary noise: norms of sound runs stay within a factor of 4."""


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
    norms = table.series(NORM)
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


# --- prompts ----------------------------------------------------------------------------------------------------------

DOMINATES = 0.25
"""Share of all credit that one prompt may have."""
UNFAIR = 5.0
"""Times an equal share, for data of few prompts."""


def dominating_prompt(table: Table) -> Iterator[Finding]:
    """One prompt has much of the credit: its row is there many times, or its rewards are far off."""
    credit: dict[str, float] = defaultdict(float)
    groups: dict[str, int] = defaultdict(int)
    for rollouts in table.rollouts:
        for number in np.unique(rollouts.group_N):
            rows = np.flatnonzero(rollouts.group_N == number)
            credit[rollouts.prompts[rows[0]]] += float(rollouts.credit_N[rows].sum())
            groups[rollouts.prompts[rows[0]]] += 1
    total = sum(credit.values())
    if not total or sum(value > 0 for value in credit.values()) < FEWEST_GROUPS:
        return
    prompt = max(credit, key=lambda text: credit[text])
    share = credit[prompt] / total
    if share > DOMINATES and share > UNFAIR / len(credit):
        yield Finding(
            rule="dominating_prompt",
            severity="warning",
            step=None,
            text=f"one prompt dominates: {printable(prompt[:80])!r}",
            evidence=f"it has {share:.0%} of the credit (|advantage| x tokens) with {groups[prompt]} of "
            f"{sum(groups.values())} groups; there are {len(credit)} prompts",
            remedy="take its copies out of data, or mend the reward if its values are far from the others'; "
            "`gruppo data check` counts equal rows",
            metric=None,
        )


MANY_LEAKED = 0.05
"""Share of held-out prompts among the training prompts above which the score is not to be trusted."""
LONG_ENOUGH = 16
"""Characters of a message that make it more than a coincidence inside a rendered prompt."""


def leaking_evaluation(table: Table) -> Iterator[Finding]:
    """Held-out prompts are among those that were trained on."""
    seen: dict[str, set[str]] = defaultdict(set)
    for rollouts in table.rollouts:
        for prompt, columns in zip(rollouts.prompts, rollouts.columns, strict=True):
            seen[columns].add(prompt)
    everything = set().union(*seen.values()) if seen else set()
    leaked = []
    for row in table.held_out:
        prompt = row.get("prompt")
        text = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
        if not isinstance(text, str):
            continue
        others = seen.get(json.dumps({k: v for k, v in row.items() if k != "prompt"}, ensure_ascii=False), set())
        if text in everything or (len(text) >= LONG_ENOUGH and any(text in other for other in others)):
            leaked.append(text)
    if leaked:
        share = len(leaked) / len(table.held_out)
        yield Finding(
            rule="leaking_evaluation",
            severity="problem" if share > MANY_LEAKED else "warning",
            step=None,
            text="the evaluation leaks: held-out prompts were trained on",
            evidence=f"{len(leaked)} of {len(table.held_out)} held-out prompts are among the training prompts that the "
            f"completions show, such as {printable(leaked[0][:80])!r}",
            remedy="take equal rows out of data and eval_data; `gruppo data check` counts them",
            metric="eval/accuracy",
        )


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (  # causes before what follows from them
        constant_reward,
        contradicted_reward,
        reward_hacking,
        stale_sampler,
        precision_lost,
        out_of_range,
        length_exploitation,
        repetition,
        entropy_collapse,
        gradient_spike,
        leaking_evaluation,
        dominating_prompt,
        dead_groups,
    )
}
