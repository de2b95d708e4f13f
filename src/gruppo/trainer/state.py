"""State of a run besides weights and optimizer: solved prompts, coefficients that follow a measurement, a reference
that moves. Part of every checkpoint."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gruppo.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from gruppo.model.reference import Reference

FILE = "run_state.json"
REFERENCE = "reference.safetensors"


@dataclass(slots=True)
class SolvedPrompts:
    """Prompts that retire once all their completions were right on `after` visits in a row.

    One that is missed starts over. At least `keep` prompts always stay, so that a step can be filled.

    >>> solved = SolvedPrompts(after=2, num_prompts=3, keep=2)
    >>> for _ in range(2):
    ...     solved.see([(0, [True, True]), (1, [True, False]), (2, [True, True])])
    >>> sorted(solved.retired)  # the third would leave fewer than 2
    [0]
    """

    after: int = 0
    """Visits in a row; 0: nothing retires."""
    num_prompts: int = 0
    keep: int = 0
    retired: set[int] = field(default_factory=set)
    streak: dict[int, int] = field(default_factory=dict)
    """Solved visits in a row of prompts that are not retired."""

    def see(self, visits: Iterable[tuple[int, Sequence[bool | None]]]) -> None:
        """Count a step: the index of each prompt, and whether each of its completions was right."""
        if not self.after:
            return
        for index, right in visits:
            if not all(right):
                self.streak.pop(index, None)
                continue
            self.streak[index] = self.streak.get(index, 0) + 1
            if self.streak[index] >= self.after and self.num_prompts - len(self.retired) > self.keep:
                self.retired.add(index)
                del self.streak[index]

    def state(self) -> dict[str, list]:
        return {"retired": sorted(self.retired), "streak": sorted(self.streak.items())}

    def load(self, state: dict[str, list]) -> None:
        self.retired = set(state["retired"])
        self.streak = {int(index): int(count) for index, count in state["streak"]}


@dataclass(frozen=True)
class AdaptiveKL:
    """arXiv:1909.08593: beta grows while the KL is above its target and shrinks below.

        beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * count / horizon)

    Args:
        target: the KL to hold.
        horizon: over how many units of `count` (sequences, say) beta can change by a fifth.

    >>> AdaptiveKL(target=0.1, horizon=100).next(0.5, kl=0.2, count=10)
    0.51
    """

    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0):
            raise InputError(f"target and horizon must be positive, got {self.target!r} and {self.horizon!r}")

    def next(self, beta: float, kl: float, count: int) -> float:
        """The coefficient of the next step, after one with `count` sequences whose mean KL was `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return beta * (1 + error * count / self.horizon)


@dataclass(frozen=True)
class AdaptiveEntropy:
    """Skywork-OR1, arXiv:2505.22312: the bonus grows while the entropy is at or below its target, else shrinks.

    The bonus acts only while the entropy is at or below the target: `applied` gives what a step should use, `next`
    what to remember for the step after.

    >>> rule = AdaptiveEntropy(target=0.2, change=0.005)
    >>> rule.next(0.01, entropy=0.1), rule.applied(0.01, entropy=0.3)
    (0.015, 0.0)
    """

    target: float
    change: float = 0.005
    lowest: float = 0.0
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not (self.change > 0 and self.lowest <= self.highest):
            raise InputError(
                f"change must be positive and lowest <= highest, got change={self.change!r}, lowest={self.lowest!r}, "
                f"highest={self.highest!r}"
            )

    def next(self, coef: float, entropy: float) -> float:
        """The coefficient to remember, after a step whose mean entropy was `entropy`."""
        moved = coef + self.change if entropy <= self.target else coef - self.change
        return min(max(moved, self.lowest), self.highest)

    def applied(self, coef: float, entropy: float) -> float:
        """The coefficient to use in the next step: 0 while there is entropy enough."""
        return coef if entropy <= self.target else 0.0


@dataclass(slots=True)
class RewardKL:
    """Coefficient of the KL that is subtracted from a reward, and the target that `AdaptiveKL` moves it towards.

    The other place for a KL penalty is the loss (`beta`). In the reward it is a number per completion that no gradient
    passes through, so it works with every loss and estimator:

        r_i <- r_i - coefficient * sum_t (log p(t) - log p_reference(t))

    >>> kl = RewardKL(coefficient=0.1, target=2.0, horizon=100)
    >>> kl.follow(6.0, completions=50)  # far too high: the error counts as 0.2
    >>> round(kl.coefficient, 6)
    0.11
    """

    coefficient: float = 0.0
    target: float | None = None
    horizon: int = 10_000

    def follow(self, kl: float, completions: int) -> None:
        """Move the coefficient after a step whose completions had this mean KL."""
        if self.target is not None:
            self.coefficient = AdaptiveKL(self.target, self.horizon).next(self.coefficient, kl, completions)


@dataclass(slots=True)
class EntropyBonus:
    """Coefficient of the entropy bonus, and the rule that moves it.

    The entropy is that of the whole policy at sampling time, so a step can use it for its own bonus.

    >>> bonus = EntropyBonus(coefficient=0.01, rule=AdaptiveEntropy(target=0.2, change=0.005))
    >>> bonus.at(0.5), bonus.at(0.1)  # entropy enough: no bonus
    (0.0, 0.01)
    >>> bonus.follow(0.5)
    >>> bonus.coefficient
    0.005
    """

    coefficient: float = 0.0
    rule: AdaptiveEntropy | None = None
    """None: the coefficient stays."""

    def at(self, entropy: float | None) -> float:
        """The coefficient for a step whose policy has this entropy."""
        if self.rule is None or entropy is None:
            return self.coefficient
        return self.rule.applied(self.coefficient, entropy)

    def follow(self, entropy: float | None) -> None:
        """Move the coefficient after such a step."""
        if self.rule is not None and entropy is not None:
            self.coefficient = self.rule.next(self.coefficient, entropy)


@dataclass(slots=True)
class RunState:
    """What later steps depend on besides the weights."""

    solved: SolvedPrompts = field(default_factory=SolvedPrompts)
    kl: RewardKL = field(default_factory=RewardKL)
    entropy: EntropyBonus = field(default_factory=EntropyBonus)
    reference: "Reference | None" = None
    """Only one that the run moves; else it is the model at the start and needs no saving."""

    def save(self, folder: Path) -> None:
        state = {
            "solved": self.solved.state(),
            "kl_coefficient": self.kl.coefficient,
            "entropy_coefficient": self.entropy.coefficient,
        }
        (folder / FILE).write_text(json.dumps(state), encoding="utf-8")
        if self.reference is not None:
            from safetensors.torch import save_file

            save_file(self.reference.state(), folder / REFERENCE)

    def load(self, folder: Path) -> None:
        try:
            state = json.loads((folder / FILE).read_text(encoding="utf-8"))
            self.solved.load(state["solved"])
            self.kl.coefficient = float(state["kl_coefficient"])
            self.entropy.coefficient = float(state["entropy_coefficient"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / FILE} cannot be read: {error}") from error
        if self.reference is not None:
            from safetensors.torch import load_file

            self.reference.load(load_file(folder / REFERENCE))
