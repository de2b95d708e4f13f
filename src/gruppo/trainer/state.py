"""State of a run besides weights and optimizer: solved prompts, coefficients that follow a measurement, a reference
that moves. `Snapshots` saves it with the model in every checkpoint."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gruppo.errors import CheckpointError
from gruppo.run.checkpoints import Checkpoints
from gruppo.weights.files import Entries

if TYPE_CHECKING:
    from gruppo.model import TransformersModel
    from gruppo.model.reference import Reference
    from gruppo.trainer.ahead import RolloutsAhead
    from gruppo.trainer.config import TrainConfig
    from gruppo.trainer.stream import StreamedRollouts

FILE = "trainer.json"
REFERENCE = "reference.safetensors"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError)
"""What a file that is not one of ours raises when it is read."""


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
        retired = {_number(index) for index in state["retired"]}
        streak = {_number(index): _number(count) for index, count in state["streak"]}
        if retired and len(retired) >= self.num_prompts:
            raise ValueError(f"all {self.num_prompts} prompts are retired")
        self.retired, self.streak = retired, streak


@dataclass(slots=True)
class AdaptiveKL:
    """Coefficient of the KL that is subtracted from rewards; with a target it follows arXiv:1909.08593:

        coefficient <- coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * completions / horizon)

    The other place for a KL penalty is the loss (`beta`). In the reward it is a number per completion that no gradient
    passes through, so it works with every loss and estimator:

        r_i <- r_i - coefficient * sum_t (log p(t) - log p_reference(t))

    >>> kl = AdaptiveKL(coefficient=0.1, target=2.0, horizon=100)
    >>> kl.follow(6.0, completions=50)  # far too high: the error counts as 0.2
    >>> round(kl.coefficient, 6)
    0.11
    """

    coefficient: float = 0.0
    target: float | None = None
    """None: the coefficient stays."""
    horizon: int = 10_000
    """Completions over which the coefficient can change by a fifth."""

    def follow(self, kl: float, completions: int) -> None:
        """Move the coefficient after a step whose completions had this mean KL."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * completions / self.horizon


@dataclass(slots=True)
class AdaptiveEntropy:
    """Coefficient of the entropy bonus; with a target it follows Skywork-OR1, arXiv:2505.22312.

    It grows while the entropy is at or below the target and shrinks above. The bonus acts only at or below the target.
    The entropy is that of the whole policy at sampling time, so a step can use it for its own bonus.

    >>> bonus = AdaptiveEntropy(coefficient=0.01, target=0.2, change=0.005)
    >>> bonus.at(0.5), bonus.at(0.1)  # entropy enough: no bonus
    (0.0, 0.01)
    >>> bonus.follow(0.5)
    >>> bonus.coefficient
    0.005
    """

    coefficient: float = 0.0
    target: float | None = None
    """None: the coefficient stays."""
    change: float = 0.005
    highest: float = 1.0

    def at(self, entropy: float | None) -> float:
        """The coefficient for a step whose policy has this entropy."""
        is_enough = self.target is not None and entropy is not None and entropy > self.target
        return 0.0 if is_enough else self.coefficient

    def follow(self, entropy: float | None) -> None:
        """Move the coefficient after such a step."""
        if self.target is not None and entropy is not None:
            moved = self.coefficient + (self.change if entropy <= self.target else -self.change)
            self.coefficient = min(max(moved, 0.0), self.highest)


@dataclass(slots=True)
class RunState:
    """What later steps depend on besides the weights."""

    solved: SolvedPrompts = field(default_factory=SolvedPrompts)
    kl: AdaptiveKL = field(default_factory=AdaptiveKL)
    entropy: AdaptiveEntropy = field(default_factory=AdaptiveEntropy)
    reference: "Reference | None" = None
    """Only one that the run moves; else it is the model at the start and needs no saving."""
    ahead: "RolloutsAhead | StreamedRollouts | None" = None
    """Rollouts of the steps to come, with `max_staleness`."""
    loaded: Path | None = None
    """The checkpoint that the run goes on from."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Early end of a run, and the options that it ended under. It holds until they allow more: a run that is done is
    not trained on by a `resume` that asks for nothing new."""

    by: str
    """patience, score (`stop_at_score`) or callback."""
    steps: int
    """The last step that the run could have taken."""
    limit: float | None = None
    """`patience` or `stop_at_score` at the time."""

    @classmethod
    def read(cls, facts: Any) -> "Ending | None":
        """From JSON; a ValueError for what is none."""
        if facts is None:
            return None
        found = cls(str(facts["by"]), _number(facts["steps"]), facts["limit"])
        if found.by not in ENDED_BY or not isinstance(found.limit, int | float | None):
            raise ValueError(f"{facts!r:.200} is not what ended a run")
        return found

    def holds(self, config: "TrainConfig") -> bool:
        """Whether a run with these options is still over."""
        limits = {"patience": config.patience or inf, "score": config.stop_at_score}
        limit = limits.get(self.by, self.limit)
        is_as_strict = self.limit is None or (limit is not None and limit <= self.limit)
        return config.steps <= self.steps and is_as_strict

    @property
    def text(self) -> str:
        return ENDED_BY[self.by]


ENDED_BY = {"patience": "by patience", "score": "by stop_at_score", "callback": "by a callback"}
"""What ends a run early, in words."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run goes on: what its checkpoint says of the loop."""

    step: int
    unfinished: dict[str, float] | None = None
    """Metrics of the step, if it was interrupted before their record."""
    ended: Ending | None = None


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Checkpoints of everything that later steps depend on."""

    checkpoints: Checkpoints
    model: "TransformersModel"
    state: RunState

    def save(self, step: int, unfinished: Mapping[str, float] | None = None, ended: Ending | None = None) -> None:
        """Write the state after `step`. `unfinished`: its metrics, if it was interrupted before their record."""
        state = self.state

        def write(folder: Path) -> Entries:
            entries = self.model.save_state(folder)
            facts = {
                "step": step,
                "version": self.model.version,
                "unfinished": unfinished,
                "ended": ended and asdict(ended),
                "solved": state.solved.state(),
                "kl_coefficient": state.kl.coefficient,
                "entropy_coefficient": state.entropy.coefficient,
            }
            (folder / FILE).write_text(json.dumps(facts), encoding="utf-8")
            if state.reference is not None:
                save_file(state.reference.state(), folder / REFERENCE)
            if state.ahead is not None:
                state.ahead.save(folder)
            return entries

        self.checkpoints.save(step, write)

    def load_newest(self) -> Position | None:
        """Put model and state back as the newest whole checkpoint has them; None where there is no checkpoint, and they
        are as they were before the first step."""
        return self.checkpoints.load(self._load)

    def load_step(self, step: int) -> None:
        """Put model and state back as they were after a step; its checkpoint must be there and whole."""
        self.checkpoints.load_step(step, self._load)

    def _load(self, folder: Path) -> Position:
        state = self.state
        try:
            facts = json.loads((folder / FILE).read_text(encoding="utf-8"))
            step, version, unfinished = _number(facts["step"]), _number(facts["version"]), facts["unfinished"]
            kl, entropy = float(facts["kl_coefficient"]), float(facts["entropy_coefficient"])
            if folder.name != f"step-{step:06d}":
                raise ValueError(f"step={step} is not that of its folder")
            if not isfinite(kl) or not isfinite(entropy):
                raise ValueError(f"kl_coefficient is {kl} and entropy_coefficient {entropy}, not finite numbers")
            values = (unfinished or {}).values()
            if not all(isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) for value in values):
                raise ValueError(f"unfinished={unfinished!r:.200}")
            position = Position(step, unfinished, Ending.read(facts["ended"]))
            state.solved.load(facts["solved"])
            reference = None if state.reference is None else load_file(folder / REFERENCE)
        except _UNREADABLE as error:
            raise CheckpointError(f"{folder / FILE} cannot be read: {error}") from error
        self.model.load_state(folder)
        if state.reference is not None and reference is not None:
            state.reference.load(reference)
        self.model.version, state.kl.coefficient, state.entropy.coefficient = version, kl, entropy
        state.loaded = folder
        return position


def _number(value: Any) -> int:
    """A step, a version or the index of a prompt; files of a run hold them in 32 bits."""
    if not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{value!r:.80} is not a number of a step, of a version or of a prompt")
    return value
