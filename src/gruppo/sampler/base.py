"""Sampler: the base class of all samplers; with SamplingParams and the forms in which a caller may give prompts."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import InputError
from gruppo.process.by_name import import_object
from gruppo.types import Message, Prompt, SampleResponse, Trajectory
from gruppo.weights import Published
from gruppo.weights.canary import Rows, TrainedModel

PromptLike = Prompt | str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""A prompt of the data set, a text, token ids, chat messages, or a row with `prompt`, `messages` or `input_ids`."""

Samples = tuple[Trajectory, ...]
"""The trajectories of one prompt."""

Poll = Callable[[], None]
"""Cancellation hook: called while waiting; raise to abort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Temperature 0 is greedy. Filters (top-k, top-p, min-p) change what is drawn, not the reported log-probs: those
    are always over the whole vocabulary at `temperature`, as the trainer scores them."""

    temperature: float = 1.0
    max_new_tokens: int = 256
    top_k: int = 0
    """Draw among the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the fewest tokens that hold this much probability."""
    min_p: float = 0.0
    """Draw among tokens with at least this share of the most likely token's probability."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; they are cut from `text`, their tokens stay in `tokens`."""
    seed: int = 0
    step: int | None = None
    """With `seed`, prompt and sample number this decides every random draw. None: the number of calls without a step
    that the sampler has had, so that each call draws anew."""

    def __post_init__(self) -> None:
        bounds = {
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
        }
        for name, (is_good, expected) in bounds.items():
            if not is_good:
                raise InputError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Completions of one prompt, with the numbers that decide their random draws.

    Completion i is a function of the weights, the prompt's tokens, the params and (seed, step, number, first + i,
    position). Other requests in the same batch do not matter.
    """

    prompt: Prompt
    num_samples: int
    seed: int
    step: int
    number: int
    """Number of the prompt: its row in the data set, or its place in the batch."""
    first: int = 0
    """Sample number of the first completion."""
    position: int = 0
    """Tokens of the episode before this request, so that a later turn does not repeat the draws of the first."""
    max_new_tokens: int | None = None
    """Token limit of these completions; None: that of the params, which is never exceeded."""

    def limit(self, params: SamplingParams) -> int:
        """Token limit of these completions."""
        return params.max_new_tokens if self.max_new_tokens is None else min(self.max_new_tokens, params.max_new_tokens)


class Sampler(ABC):
    """Base class: prompts in, groups of trajectories out."""

    is_exact: ClassVar[bool] = False
    """Whether its log-probs are the trainer's own, so that there is no gap to measure or correct."""
    reads_files: ClassVar[bool] = False
    """Whether `load` takes weights from the folder of a `Published`, for an engine in another process. Else the sampler
    is made with a model of this process, whose weights are the newest."""
    canary_rows: Rows = ()
    """Tokens whose log-probs are published with the weights, for a sampler that proves whose weights it has."""

    def __init__(self, tokenizer: Any, vocabulary: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        """Tokens that the model has an embedding for; None: not known."""
        self.calls = 0
        """Calls of `sample` without a step."""
        self.loaded: Published | None = None
        """The weights that `load` took last; None: those of the start, or the trainer's own."""

    @abstractmethod
    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Future[Samples]]:
        """Start the completions; one future per request, in order. A future that is cancelled frees the sampler.

        The draws are decided by the requests: `seed` and `step` of the params are not read.
        """

    def sample(
        self, batch: Sequence[PromptLike], num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[SampleResponse]:
        """Draw `num_samples` completions of each prompt. The same seed, step and weights give the same tokens."""
        return [SampleResponse(sequences=samples) for samples in self.draw(batch, num_samples, params)]

    def draw(
        self, batch: Sequence[PromptLike], num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[Samples]:
        """As `sample`, each prompt's trajectories in a tuple."""
        check_call(batch, num_samples, params)
        params = params or SamplingParams()
        if not batch:
            return []
        return self.answers(self.requests(batch, num_samples, params), params)

    def answers(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Samples]:
        """The trajectories of each request, once all are complete."""
        futures = self.submit(requests, params)
        try:
            wait(futures)  # all of them: when one has failed, no other is left running
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def requests(self, batch: Sequence[PromptLike], num_samples: int, params: SamplingParams) -> list[SampleRequest]:
        """The requests that `sample` submits. A prompt that occurs again goes on with further samples, so that eight
        copies with one sample each draw what one copy with eight samples draws."""
        step = self.calls if params.step is None else params.step
        shared = {"num_samples": num_samples, "seed": params.seed, "step": step}
        seen: Counter[tuple[bool, int]] = Counter()
        requests = []
        for position, given in enumerate(batch):
            prompt = read_prompt(given, position, self.tokenizer)
            ids = prompt.token_ids
            if self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
                check_ids([prompt], self.vocabulary, self.tokenizer)
            key = isinstance(given, Prompt), prompt.index
            first, seen[key] = seen[key] * num_samples, seen[key] + 1
            requests.append(SampleRequest(prompt=prompt, number=prompt.index, first=first, **shared))
        self.calls += params.step is None
        return requests

    def load(self, published: Published) -> dict[str, float]:
        """Sample from published weights from now on, and prove it; returns what there is to report. Nothing here, where
        the model is the trainer's own."""
        return {}

    def sync(self, model: TrainedModel) -> dict[str, float]:
        """Publish a model's weights and load them, in one call."""
        return {}

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Release what the sampler holds."""


def check_call(batch: Any, num_samples: Any, params: Any) -> None:
    """Refuse arguments of `sample` that are not what they should be."""
    if isinstance(batch, str | Prompt | Mapping) or not isinstance(batch, Sequence):
        raise InputError(
            f"sample takes a list of prompts, got {type(batch).__name__} {str(batch)[:60]!r}; for one prompt write "
            "sample([prompt])"
        )
    if isinstance(num_samples, SamplingParams):
        raise InputError("num_samples must be a whole number, got SamplingParams; pass them as params=...")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise InputError(f"num_samples must be a whole number of at least 1, got {num_samples!r}")
    if params is not None and not isinstance(params, SamplingParams):
        raise InputError(f"params must be SamplingParams, got {type(params).__name__}")


def read_prompt(given: PromptLike, position: int, tokenizer: Any) -> Prompt:
    """A prompt in any of its forms as a Prompt; one that has no row number gets its `position` in the batch."""
    prompt: Any = given
    if isinstance(prompt, Mapping):
        name = next((name for name in ("prompt", "messages", "input_ids") if name in prompt), None)
        if name is None:
            raise InputError(
                f"prompt {position} is a row without 'prompt', 'messages' or 'input_ids'; it has "
                f"{', '.join(map(repr, prompt)) or 'nothing'}"
            )
        prompt = prompt[name]
    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError(f"prompt {position} is text, and this model has no tokenizer; give token ids")
        ids = tuple(tokenizer(prompt)["input_ids"])
        prompt = Prompt(token_ids=ids, text=prompt, source=prompt, index=position)
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(t, Mapping) and "role" in t for t in prompt):
        from gruppo.task.template import render_chat

        ids, text = render_chat(prompt, tokenizer)
        prompt = Prompt(token_ids=ids, text=text, source=prompt, index=position)
    elif isinstance(prompt, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        prompt = Prompt(token_ids=tuple(prompt), index=position)
    elif not isinstance(prompt, Prompt):
        raise InputError(
            f"prompt {position} must be a Prompt, a text, token ids, chat messages or a row of a data set, got "
            f"{type(prompt).__name__} {str(prompt)[:60]!r}"
        )
    if not prompt.token_ids:
        raise InputError(f"prompt {position} has no tokens; there is nothing to continue")
    return prompt


def check_ids(prompts: Iterable[Prompt], vocabulary: int | None, tokenizer: Any) -> None:
    """Refuse prompts with tokens that the model has no embedding for.

    Of the tokenizer alone that would be too much: some have tokens for images, which no text holds.
    """
    if vocabulary is None:
        return
    for prompt in prompts:
        foreign = next((token for token in prompt.token_ids if not 0 <= token < vocabulary), None)
        if foreign is not None:
            text = tokenizer.convert_ids_to_tokens(foreign) if tokenizer is not None and foreign >= 0 else None
            raise InputError(
                f"prompt {prompt.index} has token {foreign}{'' if text is None else f' ({str(text)[:60]!r})'}, and "
                f"the model has embeddings for {vocabulary} tokens, 0 to {vocabulary - 1}; use the model's own "
                "tokenizer, or add rows to the model as well: model.resize_token_embeddings(len(tokenizer))"
            )


def texts_of(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """The text of each row, on all cores where the tokenizer's class adds nothing to its library."""
    if tokenizer is None:
        return [""] * len(rows)
    from transformers import PreTrainedTokenizerFast as Plain

    own = type(tokenizer)
    is_plain = issubclass(own, Plain) and own.decode is Plain.decode and own._decode is Plain._decode
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True)
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def text_before(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first stop text in it; None: it holds none."""
    ends = [i for i in (text.find(s) for s in stop) if i >= 0]
    return text[: min(ends)] if ends else None


def stopped_at(
    tokenizer: Any, tokens: Sequence[int], stop: Sequence[str], end_ids: Collection[int]
) -> tuple[int, str] | None:
    """The first tokens whose text holds a stop text: how many they are, and the text before it. None: it never does.

    An end token ends a completion before anybody looks at its text.
    """

    def before(length: int) -> str | None:
        return text_before(texts_of(tokenizer, [list(tokens[:length])])[0], stop)

    longest = len(tokens) - (tokens[-1] in end_ids)
    if not stop or (text := before(longest)) is None:
        return None
    if before(longest - 1) is None:  # as a rule: a sampler ends there
        return longest, text
    return next((length, text) for length in range(1, longest) if (text := before(length)) is not None)


def sampler_class(spec: str) -> type[Sampler]:
    """The class `module:Class`."""
    found = import_object(spec, "sampler")
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise InputError(f"sampler={spec!r} is no class of samplers; derive one from gruppo.sampler.Sampler")
    return found
