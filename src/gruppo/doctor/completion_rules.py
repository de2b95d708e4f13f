"""Rules over completions: each finds one fault in the sampled text. Thresholds are above the rule that uses them."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

import numpy as np

from gruppo.doctor.finding import CORRECT, LENGTH, Change, Finding, beyond, departure
from gruppo.doctor.table import Points, Rollouts, Table
from gruppo.process.streams import printable

FEWEST_GROUPS = 10
"""Fewest groups for a comparison within groups; fewer are noise."""
CONTRADICTED = 0.5
"""Share of mixed groups in which wrong answers earn more. A reward unrelated to correctness reaches a half; a useful
one stays near 0."""


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
            text="wrong answers earn more than right ones in total",
            evidence=f"wrong answers earn more in {against} of {len(differences)} groups that have both kinds, by "
            f"{-sum(differences) / len(differences):.3g} on average over all of them",
            remedy="fix the rewards or reward_weights; set correct_by to the reward that decides what is right",
            metric=CORRECT,
        )


def _groups(rollouts: Rollouts) -> Iterator[np.ndarray]:
    """Indices of each group's completions that have a reward."""
    for number in np.unique(rollouts.group_N):
        rows = np.flatnonzero((rollouts.group_N == number) & np.isfinite(rollouts.reward_N))
        if len(rows) > 1:
            yield rows


LONGER = 1.5
"""Growth of the mean length that deserves attention."""
PAID_BY_LENGTH = 0.8
"""Correlation of reward and length within groups above which the reward is mostly length."""
FAVOURED_LENGTH = 0.3
"""Correlation above which longer completions clearly earn more."""


def length_exploitation(table: Table) -> Iterator[Finding]:
    """Completions grow because length pays, not because answers improve."""
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
        step=departure(table.series(LENGTH), LONGER * length.first, above=True),
        text="completions grow because length pays",
        evidence=f"{LENGTH} {length}, correlation of length and reward within groups {correlation:.2f}{answers}",
        remedy="take length out of the rewards, penalise it with overlong_cache, or lower max_new_tokens; if no "
        "reward looks at length, use loss=drgrpo",
        metric=LENGTH,
    )


def _length_correlation(all_rollouts: Sequence[Rollouts]) -> float | None:
    """Correlation of length and reward, both centred in their groups; None if too few groups vary in both."""
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
"""Share of distinct 4-token pieces. Prose is above 0.9, long derivations above 0.7."""
LONG = 16
"""Tokens below which a text is too short to judge."""
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
            evidence=f"{found.worst:.0%} of the completions have at least {LONG} tokens and repeat more than half of "
            f"their 4-token pieces, {found.when}",
            remedy="lower lr or max_new_tokens, raise beta, or add a stop text; check whether a reward pays for length",
            metric=LENGTH,
        )


DOMINATES = 0.25
"""Largest healthy share of the credit for one prompt."""
UNFAIR = 5.0
"""Multiple of an equal share, for data with few prompts."""


def dominating_prompt(table: Table) -> Iterator[Finding]:
    """One prompt has much of the credit: its row is duplicated, or its rewards are outliers."""
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
            remedy="remove duplicates from the data (`gruppo data check` counts them), or fix the reward if this "
            "prompt's values are outliers",
            metric=None,
        )


MANY_LEAKED = 0.05
"""Share of leaked held-out prompts above which the score cannot be trusted."""


def _is_rendered(texts: Sequence[str], frame: tuple[str, str], prompt: str) -> bool:
    """True if a prompt is exactly these messages in a chat template.

    `frame` is what every prompt begins and ends with; anything more would be another message.

    >>> frame = ("<user>", "<end>")
    >>> _is_rendered(["Is 15 even?"], frame, "<user>Is 15 even?<end>"), _is_rendered(["1"], frame, "<user>15<end>")
    (True, False)
    """
    place = 0
    for i, text in enumerate(map(str.strip, texts)):  # templates strip whitespace
        found = prompt.find(text, place)
        if found < 0 or (i == 0 and not frame[0].startswith(prompt[:found])):
            return False
        place = found + len(text)
    return frame[1].endswith(prompt[place:])


def _common_start(texts: Set[str]) -> str:
    """Longest common prefix.

    >>> _common_start({"<user>1", "<user>23", "<user>2"})
    '<user>'
    """
    first, last = min(texts, default=""), max(texts, default="")  # all others sort between them
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def leaking_evaluation(table: Table) -> Iterator[Finding]:
    """Held-out prompts were trained on."""
    seen: dict[str, set[str]] = defaultdict(set)
    for rollouts in table.rollouts:
        for prompt, columns in zip(rollouts.prompts, rollouts.columns, strict=True):
            seen[columns].add(prompt)
    everything = set().union(*seen.values()) if seen else set()
    leaked = []
    frame = (_common_start(everything), _common_start({text[::-1] for text in everything})[::-1])
    for row in table.held_out:
        prompt = row.get("prompt")
        parts = prompt if isinstance(prompt, list) else [{"content": prompt}]
        found = [each.get("content") for each in parts if isinstance(each, dict)]
        texts = [text for text in found if isinstance(text, str) and text.strip()]
        if not texts or len(texts) != len(parts):
            continue
        others = seen.get(json.dumps({k: v for k, v in row.items() if k != "prompt"}, ensure_ascii=False), set())
        is_seen = isinstance(prompt, str) and prompt in everything
        if is_seen or any(_is_rendered(texts, frame, other) for other in others):
            leaked.append(texts[-1])
    if leaked:
        share = len(leaked) / len(table.held_out)
        yield Finding(
            rule="leaking_evaluation",
            severity="problem" if share > MANY_LEAKED else "warning",
            step=None,
            text="the evaluation leaks: held-out prompts were trained on",
            evidence=f"{len(leaked)} of {len(table.held_out)} held-out prompts are among the completions on disk, "
            f"such as {printable(leaked[0][:80])!r}",
            remedy="remove rows that data and eval_data share; `gruppo data check` counts them",
            metric="eval/accuracy",
        )
