"""Records that pass between stages: plain values without torch, which print, pickle and compare.

A Rollout holds its Trajectory, a Group its Rollouts, all the way from the sampler to the loss (`docs/dataflow.md`).
Example: a group of two for the prompt "1+1=".

    >>> prompt = Prompt(token_ids=(5, 6, 5, 7), text="1+1=")
    >>> good = Trajectory(prompt=prompt, tokens=(8, 2), logps=(-0.5, -0.1), text="2", stop_reason="stop")
    >>> bad = Trajectory(prompt=prompt, tokens=(9, 2), logps=(-1.5, -0.1), text="3", stop_reason="stop")
    >>> rollouts = (Rollout(trajectory=good, reward=1.0), Rollout(trajectory=bad, reward=0.0))
    >>> group = Group(prompt=prompt, rollouts=rollouts)
    >>> SampleResponse(sequences=(good, bad)).sequences[0].new_input_feature.input_ids
    (5, 6, 5, 7, 8, 2)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from gruppo.errors import InputError

StopReason = Literal["stop", "done", "length", "turns", "context", "deadline", "env_error"]
"""Why a sequence ended.

Complete: `stop`, the model ended it (end token or stop string); `done`, its environment did.
Cut: at the limit of tokens (`length`), of turns (`turns`), or by the model's context (`context`).
Lost: the environment did not answer in time (`deadline`) or failed (`env_error`). A lost episode has no reward.
"""
CUT: frozenset[StopReason] = frozenset({"length", "turns", "context"})
LOST: frozenset[StopReason] = frozenset({"deadline", "env_error"})

ENVIRONMENT = "environment"
"""Name among the errors of a rollout under which a lost episode says why."""

GroupStatus = Literal["kept", "no_signal", "surplus"]
"""`kept`: trained on. Dynamic sampling drops the others: `no_signal` teaches nothing, `surplus` exceeds the step."""


class Message(TypedDict):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    """Calls in OpenAI's form. One that could not be read has an `error`, which says why."""
    name: NotRequired[str]
    """Of a tool's answer: the tool."""
    tool_call_id: NotRequired[str]
    is_error: NotRequired[bool]
    """Of a tool's answer: the call failed, and `content` says why. Chat templates do not see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Row of the data set, ready to sample from."""

    token_ids: tuple[int, ...]
    """Tokens the model sees, including special tokens and chat template."""
    text: str = ""
    """The same tokens as text."""
    source: str | Sequence[Message] = ""
    """The row's `prompt` as in the data set; rewards receive this."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row; rewards receive them by name."""
    index: int = 0
    """Row number in the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Text after a prompt, written by the policy and possibly by others (a tool, a user).

    Tokens and log-probs are the sampler's own and are never re-tokenised or recomputed.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    """All tokens after the prompt."""
    sampled: tuple[bool, ...] | None = None
    """True for tokens that the policy sampled; None if it sampled all."""
    logps: tuple[float, ...] | None = None
    """Log-prob of each sampled token under the sampling policy, at the sampling temperature; None if unknown."""
    entropies: tuple[float, ...] | None = None
    """Entropy of the sampling policy at each sampled token, if the sampler reports it."""
    versions: tuple[int, int] = (0, 0)
    """Oldest and newest policy that wrote tokens here, as the number of weight updates each had seen."""
    text: str = ""
    """What the policy wrote, decoded; with turns, its last one."""
    stop_reason: StopReason = "stop"
    messages: tuple[Message, ...] | None = None
    """The conversation after the prompt, where there are turns."""
    env_reward: float | None = None
    """The reward that the environment gave itself; None: it gives none."""
    error: str = ""
    """Why the episode was lost."""

    def __post_init__(self) -> None:
        if self.sampled is not None and len(self.sampled) != len(self.tokens):
            raise InputError(
                f"sampled has {len(self.sampled)} entries for {len(self.tokens)} tokens; give one True or False each"
            )
        for name in ("logps", "entropies"):
            check_per_token(name, getattr(self, name), self.num_sampled)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.prompt.token_ids

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.tokens) if self.sampled is None else sum(self.sampled)

    @property
    def sampled_tokens(self) -> tuple[int, ...]:
        """The tokens that the policy sampled."""
        if self.sampled is None:
            return self.tokens
        return tuple(token for token, is_sampled in zip(self.tokens, self.sampled, strict=True) if is_sampled)

    @property
    def policy_version(self) -> int:
        """Number of weight updates that the newest policy in it had seen."""
        return self.versions[1]

    @property
    def is_truncated(self) -> bool:
        return self.stop_reason in CUT

    @property
    def is_lost(self) -> bool:
        return self.stop_reason in LOST

    @property
    def new_input_feature(self) -> "InputFeature":
        """The sequence as an `InputFeature`, with the sampling log-probs as `old_logps`."""
        return InputFeature(
            prompt_ids=self.prompt_ids,
            completion_ids=self.tokens,
            completion_mask=None if self.sampled is None else tuple(map(int, self.sampled)),
            old_logps=self.logps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Trajectory with its rewards, and the numbers it is trained with."""

    trajectory: Trajectory
    reward: float | None = None
    """Weighted sum of the reward functions; None when all of them abstained."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Each reward function's own value."""
    correct: bool | None = None
    """True if the answer is right, by the one reward that decides; None if that abstained. Weights, penalties and KL do
    not change it."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Columns that reward functions logged with `log_extra`."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Traceback or reason of each reward function that failed on this completion."""
    shaped: float | None = None
    """Reward as the estimator compared it: with length penalties, minus the KL to the reference."""
    advantage: float | tuple[float, ...] = 0.0
    """A number, or one per sampled token."""
    is_masked: bool = False
    """True if it counts as a sequence of the step but none of its tokens is trained on."""
    old_logps: tuple[float, ...] | None = None
    """Log-probs of the sampled tokens under the trainer's weights before the step's first update."""
    ref_logps: tuple[float, ...] | None = None
    """Log-probs of the sampled tokens under the reference policy."""
    policy_logps: tuple[float, ...] | None = None
    """Log-probs of the sampled tokens in the last update that trained on them, if recorded."""
    entropies: tuple[float, ...] | None = None
    """Entropies at the sampled tokens in that update."""
    rejected: tuple[bool, ...] | None = None
    """True for sampled tokens that the loss left out of its policy term in that update."""
    clipped: tuple[int, ...] | None = None
    """Clipping of each sampled token in that update: -1 low, 1 high, 0 none; None if the loss clips nothing."""

    def __post_init__(self) -> None:
        for name in ("advantage", "old_logps", "ref_logps", "policy_logps", "entropies", "rejected", "clipped"):
            values = getattr(self, name)
            if hasattr(values, "__len__"):  # an advantage may be one number
                check_per_token(name, values, self.trajectory.num_sampled)

    @property
    def num_scored(self) -> int:
        """Tokens that enter the loss."""
        return 0 if self.is_masked else self.trajectory.num_sampled

    @property
    def has_advantage(self) -> bool:
        """True if any of its tokens has a nonzero advantage."""
        return any(self.advantage) if isinstance(self.advantage, tuple) else self.advantage != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one prompt, which credit is shared among."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    status: GroupStatus = "kept"
    greedy: Rollout | None = None
    """Greedy completion of the prompt, for estimators that compare with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResponse:
    """The trajectories of one prompt."""

    sequences: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFeature:
    """Sequence to train on by hand: the prompt, then the completion.

    `completion_mask` has one 0/1 per completion token: 1 for tokens that the policy sampled and that are scored, 0 for
    others (a tool's answer). `None` means all 1. Log-probs have one value per completion token with mask 1.
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
            check_per_token(name, getattr(self, name), self.num_scored)

    @property
    def input_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.completion_ids

    @property
    def num_scored(self) -> int:
        """Completion tokens that enter the loss."""
        return len(self.completion_ids) if self.completion_mask is None else sum(self.completion_mask)

    def rollout(self) -> Rollout:
        """The sequence as a rollout."""
        sampled = None if self.completion_mask is None else tuple(map(bool, self.completion_mask))
        trajectory = Trajectory(prompt=Prompt(token_ids=self.prompt_ids), tokens=self.completion_ids, sampled=sampled)
        return Rollout(trajectory=trajectory, old_logps=self.old_logps, ref_logps=self.ref_logps)


def check_per_token(name: str, values: Sequence[float] | None, num: int) -> None:
    """Refuse values that are not one per sampled token."""
    if values is not None and len(values) != num:
        raise InputError(f"{name} has {len(values)} entries for {num} sampled tokens; give one value per sampled token")
