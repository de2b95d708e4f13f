"""Progress: the gain of a run, by the number that decides; and Fall: its loss in a collapse."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf, sqrt
from typing import Literal

import numpy as np

from gruppo.doctor.finding import CORRECT, FEWEST_STEPS, REWARD, SURE, WINDOW, Change
from gruppo.doctor.table import Points, Table
from gruppo.keys import held_out_key

# --- held-out scores --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """One held-out evaluation, with the 95 % interval of its score."""

    key: str
    step: int
    value: float
    low: float
    high: float


def held_out_scores(table: Table) -> list[Score]:
    """Held-out evaluations in order: accuracies, or rewards if none decides what is right."""
    key = held_out_key(table.keys)
    if key is None:
        return []
    lows, highs = (dict(table.series(f"{key}_{end}")) for end in ("low", "high"))
    return [Score(key, step, value, lows.get(step, -inf), highs.get(step, inf)) for step, value in table.series(key)]


# --- gains ------------------------------------------------------------------------------------------------------------

SOLVED = 0.9
"""Share of right answers that leaves little to learn."""
LEAST_RISE = 0.02
"""Smallest rise in the share of right answers that counts as learning."""
SURE_OF_PROGRESS = 3.0
"""Standard errors that a change of training samples needs: at 2, one idle run in forty would seem to learn."""

Direction = Literal["up", "flat", "down"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Change through training. Held-out prompts decide before training samples, right answers before rewards."""

    direction: Direction
    is_judged: bool
    """True if a reward decides which answers are right; otherwise only rewards can be compared."""
    held_out: Direction | None
    """None with fewer than two evaluations, or with intervals wide enough to fit what the training samples show."""

    @classmethod
    def of(cls, table: Table) -> "Progress":
        """
        >>> Progress.of(Table(metrics=[{"step": step, "reward/correct_frac": step / 40} for step in range(1, 41)]))
        Progress(direction='up', is_judged=True, held_out=None)
        """
        is_judged = bool(table.series(CORRECT) or table.series("eval/accuracy"))
        change = Change.of(table.series(CORRECT if is_judged else REWARD))
        trained: Direction = "flat"
        if change is not None:
            moved = change.last - change.first
            least = max(SURE_OF_PROGRESS * change.error, LEAST_RISE if is_judged else 0.0)
            trained = "up" if moved > least else "down" if -moved > least else "flat"
        scores = held_out_scores(table)
        if len(scores) < 2 or (is_judged and scores[0].key != "eval/accuracy"):
            return cls(trained, is_judged, None)
        first, last = scores[0], scores[-1]
        moved = last.value - first.value
        # Newcombe's interval of a difference, from the two intervals.
        low = moved - hypot(last.value - last.low, first.high - first.value)
        high = moved + hypot(last.high - last.value, first.value - first.low)
        if low > 0 or high < 0:
            held_out: Direction = "up" if low > 0 else "down"
            return cls(held_out, is_judged, held_out)
        is_solved = is_judged and last.value >= SOLVED  # no room to rise as the samples do
        if trained == "up" and change is not None and change.last - change.first > high and not is_solved:
            return cls("flat", is_judged, "flat")  # the samples improve, held-out prompts do not
        return cls(trained, is_judged, None)


# --- losses -----------------------------------------------------------------------------------------------------------

FALLEN = 0.5
"""Share of the gain whose loss counts as a collapse."""
SURE_OF_THE_BEST = 4.0
"""Standard errors that a fall from the best needs: the best of many windows is high by chance."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A collapse: a score that lost most of its gain, in any unit. Right answers decide before rewards."""

    key: str
    """The score that fell: right answers or reward of the samples, or the held-out score."""
    best: float
    last: float
    """Mean of the last window, or the last evaluation."""
    step: int
    """Last step of the best window; 0 is the model before its first step."""

    @classmethod
    def of(cls, table: Table) -> "Fall | None":
        """The collapse of a run; None if the reward or the held-out score kept its level.

        >>> Fall.of(Table(metrics=[{"step": step, "reward/mean": 0.8 if step < 9 else 0.0} for step in range(1, 21)]))
        Fall(key='reward/mean', best=0.8, last=0.0, step=5)
        """
        held_out = held_out_scores(table)
        lost = cls._of_held_out(held_out)
        if lost is not None:
            return lost
        fall = None
        for samples in Samples.of(table):
            fall = (
                fall or cls._of_steps(samples) or cls._of_first_step(samples, table.config.get("prompts_per_step", 1))
            )
        # Rewards also fall when solved prompts retire; the held-out score does not.
        if fall is not None and len(held_out) > 1 and held_out[-1].step > fall.step:
            return None if held_out[-1].value >= FALLEN * max(each.value for each in held_out) else fall
        return fall

    @classmethod
    def _of_steps(cls, samples: "Samples") -> "Fall | None":
        """A fall from the best steps. `best` is the highest mean over `FEWEST_STEPS` steps."""
        values = np.array([value for _, value in samples.points], float)
        width = min(WINDOW, len(values) // 2)
        if width < FEWEST_STEPS:
            return None
        means = np.convolve(values, np.ones(FEWEST_STEPS) / FEWEST_STEPS, "valid").round(12)
        top = int(means.argmax())
        best, last = float(means[top]), float(values[-width:].mean())
        # From neighbouring steps, so that gain and loss do not count as noise.
        noise = np.sqrt(np.square(np.diff(values)).mean() / 2 * (1 / FEWEST_STEPS + 1 / width))
        if best - last <= max(SURE_OF_THE_BEST * noise, FALLEN * (best - means.min())):
            return None
        end = samples.points[top + FEWEST_STEPS - 1][0]
        return cls(samples.key, best, last, end) if samples.is_much(best, last) else None

    @classmethod
    def _of_first_step(cls, samples: "Samples", num_prompts: int) -> "Fall | None":
        """A fall from the first step: a few updates can ruin a policy before a window of steps is full."""
        values = np.array([value for _, value in samples.points], float)
        width = min(WINDOW, len(values) // 2)
        if width < FEWEST_STEPS or samples.points[0][0] != 1 or 1 not in samples.spreads:
            return None
        first, last = float(values[0]), float(values[-width:].mean())
        # Completions of a prompt are alike, so prompts are counted. An unchanged policy may have a lucky first step,
        # which is then as far from the mean as the last steps are.
        noise = samples.spreads[1] / sqrt(num_prompts)
        luck = float(values[-width:].std()) * sqrt(1 + 1 / width)
        if first - last <= max(SURE * noise, SURE_OF_THE_BEST * luck) or not samples.is_much(first, last):
            return None
        return cls(samples.key, first, last, 1)

    @classmethod
    def _of_held_out(cls, scores: Sequence[Score]) -> "Fall | None":
        """A fall of the held-out score beyond its intervals."""
        if len(scores) < 2 or min(each.value for each in scores) < 0:
            return None
        best, last = max(scores, key=lambda each: each.value), scores[-1]
        if last.high < best.low and last.value < FALLEN * best.value:
            return cls(last.key, best.value, last.value, best.step)
        return None


@dataclass(frozen=True, slots=True)
class Samples:
    """A score of the training samples by step."""

    key: str
    points: Points
    spreads: Mapping[int, float]
    """Standard deviation within each step."""

    @classmethod
    def of(cls, table: Table) -> "Iterator[Samples]":
        """The decisive score first: right answers, unless they are the reward; then the reward, unless more answers are
        right."""
        right, rewards = table.series(CORRECT), table.series(REWARD)
        if right and right != rewards:
            yield cls(CORRECT, right, {step: sqrt(share * (1 - share)) for step, share in right})
        if not right or right == rewards or Progress.of(table).direction != "up":
            yield cls(REWARD, rewards, dict(table.series("reward/std")))

    def is_much(self, best: float, last: float) -> bool:
        """True if much of the score is lost, compared with its spread within a step."""
        spread = max(self.spreads.values(), default=inf)
        lowest = min(value for _, value in self.points)
        return best - last > FALLEN * spread or (lowest >= 0 and last < FALLEN * best)
