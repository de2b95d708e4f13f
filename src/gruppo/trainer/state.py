"""State of a run besides weights and optimizer: solved prompts, coefficients that follow a measurement, a reference
that moves. `Snapshots` saves it with the model in every checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gruppo.errors import CheckpointError
from gruppo.rollout.source import SolvedPrompts, number_of
from gruppo.run.checkpoints import Checkpoints
from gruppo.weights.files import Entries

if TYPE_CHECKING:
    from gruppo.model import TransformersModel
    from gruppo.model.reference import Reference
    from gruppo.rollout.schedule import Schedule
    from gruppo.trainer.config import TrainConfig

FILE = "trainer.json"
REFERENCE = "reference.safetensors"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError)
"""What a file that is not one of ours raises when it is read."""


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
    schedule: "Schedule | None" = None
    """Rollouts of the steps to come are part of the state, with `max_staleness`."""


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
        found = cls(str(facts["by"]), number_of(facts["steps"]), facts["limit"])
        if found.by not in ENDED_BY or not isinstance(found.limit, int | float | None):
            raise ValueError(f"{facts!r:.200} is not what ended a run")
        return found

    def holds(self, config: "TrainConfig") -> bool:
        """Whether a run with these options is still over."""
        limits = {"patience": config.advanced.patience or inf, "score": config.advanced.stop_at_score}
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

    step: int = 0
    unfinished: dict[str, float] | None = None
    """Metrics of the step, if it was interrupted before their record."""
    ended: Ending | None = None
    folder: Path | None = None
    """The checkpoint; None: there is none yet."""
    is_done: bool = False
    """The run was done here, and its `model` holds these weights."""


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
            if state.schedule is not None:
                state.schedule.save(folder, step)
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
            step, version, unfinished = number_of(facts["step"]), number_of(facts["version"]), facts["unfinished"]
            kl, entropy = float(facts["kl_coefficient"]), float(facts["entropy_coefficient"])
            if folder.name != f"step-{step:06d}":
                raise ValueError(f"step={step} is not that of its folder")
            if not isfinite(kl) or not isfinite(entropy):
                raise ValueError(f"kl_coefficient is {kl} and entropy_coefficient {entropy}, not finite numbers")
            values = (unfinished or {}).values()
            if not all(isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) for value in values):
                raise ValueError(f"unfinished={unfinished!r:.200}")
            position = Position(step, unfinished, Ending.read(facts["ended"]), folder)
            state.solved.load(facts["solved"])
            reference = None if state.reference is None else load_file(folder / REFERENCE)
        except _UNREADABLE as error:
            raise CheckpointError(f"{folder / FILE} cannot be read: {error}") from error
        self.model.load_state(folder)
        if state.reference is not None and reference is not None:
            state.reference.load(reference)
        self.model.version, state.kl.coefficient, state.entropy.coefficient = version, kl, entropy
        return position
