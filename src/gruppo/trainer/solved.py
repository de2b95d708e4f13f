"""Which prompts are solved and drawn no more."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SolvedPrompts:
    """Prompts retire once all their completions were right on `after` visits in a row.

    One that is missed starts over. At least `keep` prompts always stay, so that a step can be filled. The state is part
    of a run's checkpoints: it depends on what was sampled, not on the step alone.

    >>> solved = SolvedPrompts(after=2, num_prompts=3, keep=2)
    >>> for _ in range(2):
    ...     solved.see([(0, [1.0, 1.0]), (1, [1.0, 0.0]), (2, [1.0, 1.0])], correct_at=1.0)
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

    def see(self, visits: Iterable[tuple[int, Sequence[float | None]]], correct_at: float) -> None:
        """Take note of a step: the index of each prompt with the rewards of its completions."""
        if not self.after:
            return
        for index, rewards in visits:
            if not all(r is not None and r >= correct_at for r in rewards):
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
