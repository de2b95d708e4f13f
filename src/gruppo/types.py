"""The data that crosses a stage. No torch here: these are plain values that print, pickle and compare.

    Prompt           a row of the data set, rendered and tokenised
    SampledSequence  one completion, with the tokens and log-probs exactly as they were sampled
    SampleResponse   the completions of one prompt
    Rollout          a completion with its reward and advantage
    Group            the rollouts of one prompt
    InputFeature     what the trainer needs of a sequence: tokens, and which of them are scored

Example, a group of two for the prompt "1+1=":

    >>> prompt_ids = (5, 6, 5, 7)
    >>> good = SampledSequence(prompt_ids=prompt_ids, tokens=(8, 2), logps=(-0.5, -0.1), text="2", stop_reason="stop")
    >>> bad = SampledSequence(prompt_ids=prompt_ids, tokens=(9, 2), logps=(-1.5, -0.1), text="3", stop_reason="stop")
    >>> response = SampleResponse(sequences=(good, bad))
    >>> response.sequences[0].new_input_feature.input_ids
    (5, 6, 5, 7, 8, 2)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from gruppo.errors import InputError

StopReason = Literal["stop", "length"]
"""`stop`: the model ended the sequence (end token or stop string). `length`: the token limit cut it off."""

GroupStatus = Literal["kept", "no_signal", "surplus"]
"""`kept`: trained on. Dynamic sampling leaves out the others: `no_signal` teaches nothing, `surplus` is more than a
step takes."""


class Message(TypedDict):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row of the data set, ready to sample from."""

    token_ids: tuple[int, ...]
    """What the model sees, special tokens and chat template included."""
    text: str = ""
    """The same as text."""
    source: str | Sequence[Message] = ""
    """The row's `prompt` as it stood in the data set; rewards receive this."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row; rewards receive them by name."""
    index: int = 0
    """Row number in the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFeature:
    """One sequence for the trainer: the prompt, then the completion.

    `completion_mask` has one 0/1 per completion token: 1 for tokens that the policy sampled and that are scored,
    0 for tokens put there by somebody else (a tool's answer). `None` means all 1. Log-probs have one value per
    completion token with mask 1.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    completion_mask: tuple[int, ...] | None = None
    old_logps: tuple[float, ...] | None = None
    """Log-probs under the policy that sampled the tokens, at the sampling temperature."""
    ref_logps: tuple[float, ...] | None = None
    """Log-probs under the reference policy."""

    def __post_init__(self) -> None:
        mask = self.completion_mask
        if mask is not None and len(mask) != len(self.completion_ids):
            raise InputError(
                f"completion_mask has {len(mask)} entries for {len(self.completion_ids)} completion tokens; "
                "give one 0 or 1 per completion token"
            )
        for name in ("old_logps", "ref_logps"):
            values = getattr(self, name)
            if values is not None and len(values) != self.num_scored:
                raise InputError(
                    f"{name} has {len(values)} entries for {self.num_scored} scored tokens; "
                    "give one log-prob per completion token whose mask is 1"
                )

    @property
    def input_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.completion_ids

    @property
    def num_scored(self) -> int:
        """Completion tokens that enter the loss."""
        return len(self.completion_ids) if self.completion_mask is None else sum(self.completion_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One completion. `tokens` and `logps` are the sampler's own and are never re-tokenised or recomputed."""

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    """Log-prob of each token under the sampling policy at the sampling temperature."""
    text: str
    stop_reason: StopReason
    policy_version: int = 0
    """How many weight updates the sampling policy had seen."""
    entropies: tuple[float, ...] | None = None
    """Entropy of the sampling policy at each token, where the sampler knows it."""

    @property
    def is_truncated(self) -> bool:
        return self.stop_reason == "length"

    @property
    def new_input_feature(self) -> InputFeature:
        """The sequence as the trainer takes it, with the sampling log-probs as `old_logps`."""
        return InputFeature(prompt_ids=self.prompt_ids, completion_ids=self.tokens, old_logps=self.logps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResponse:
    """The completions of one prompt."""

    sequences: tuple[SampledSequence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A completion with what it earned."""

    sequence: SampledSequence
    reward: float | None
    """Weighted sum of the reward functions; None when all of them abstained."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Each reward function's own value."""
    correct: bool | None = None
    """Whether the answer is right, by the one reward that decides it; None when that one abstained. A fact about the
    answer: weights, length penalties and KL do not change it."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Columns that reward functions logged with `log_extra`."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Traceback or reason of each reward function that failed on this completion."""
    shaped: float | None = None
    """The reward as the estimator compared it: with length penalties, less the KL to the reference."""
    advantage: float = 0.0
    old_logps: tuple[float, ...] | None = None
    """Log-probs under the trainer's own weights at sampling time, where they were computed."""
    ref_logps: tuple[float, ...] | None = None
    """Log-probs under the reference policy, where they were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt: the unit in which credit is given."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    status: GroupStatus = "kept"
    greedy: Rollout | None = None
    """The greedy completion of the prompt, for estimators that compare with it."""
