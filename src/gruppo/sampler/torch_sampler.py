"""TorchSampler: batched decoding of any transformers model, in this process.

Each prompt runs through the model once. Samples of a group share their row of the cache until they draw different
tokens. When many rows have finished, the cache is cut down to those that go on.

Log-probs of sampled tokens must be those that the trainer computes. With plain attention a cache gives them. A model
with other layers is compared with the trainer's scoring first; `find_way` decides how it decodes.
"""

import inspect
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from gruppo.errors import InputError, NumericError
from gruppo.random import row_keys, row_uniforms
from gruppo.sampler.base import Poll, Sampler, SampleRequest, Samples, SamplingParams, stopped_at, text_before, texts_of
from gruppo.types import InputFeature, Trajectory
from gruppo.weights.canary import TrainedModel
from gruppo.weights.source import end_tokens_of, vocabulary_size

logger = logging.getLogger(__name__)

NOT_FINITE = (
    "the model gives NaN for a token: its weights hold numbers that are not finite, or far too large. Lower lr, or "
    "weight_decay; of a model that was not trained here, check its files"
)

Way = Literal["together", "by length", "recomputed"]
"""With a cache, all prompts padded to one length; with a cache, prompts of one length at a time; without a cache."""


class DecodedModel(TrainedModel, Protocol):
    """The trainer's model as decoding uses it: `gruppo.model.TransformersModel`, or another of its kind."""

    tokenizer: Any
    device: torch.device

    def next_logits(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Logits of the token after each row, `[N, V]` float32."""
        ...

    def rows_at_once(self, max_new_tokens: int) -> int:
        """Rows that `decode` has places for; 0: it cannot."""
        ...

    def decode(
        self,
        prompts: Sequence[tuple[int, ...]],
        prompt_of: Sequence[int],
        uniforms: Tensor,
        *,
        places: int,
        temperature: float,
        stop_ids: Sequence[int],
        poll: Poll,
    ) -> Any:
        """Tokens, log-probs, entropies, lengths, and which rows an end token stopped."""
        ...


class TorchSampler(Sampler):
    """Samples from a TransformersModel. Given the trainer's own, it always samples from the newest weights.

    Args:
        model: the model, or the id of one to load with `options`.
        poll: cancellation hook, called before each forward; raise to abort.
    """

    is_exact = True

    def __init__(self, model: DecodedModel | str, *, poll: Poll = lambda: None, **options: Any) -> None:
        if isinstance(model, str):
            from gruppo.model import TransformersModel  # only here: a sampler of its own needs no trainer

            model = TransformersModel(model, trains=False, **options)
        elif options:
            raise InputError(f"options {sorted(options)} go with a model id, not with a model")
        super().__init__(model.tokenizer, vocabulary_size(model.model))
        self.model = model
        generation, config = (getattr(model.model, name, None) for name in ("generation_config", "config"))
        self.stop_ids = end_tokens_of(generation, config, model.tokenizer)
        self.poll = poll
        self.way: Way | None = None
        """The way the model decodes; None until the first call of `submit`."""

    @torch.inference_mode()
    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Future[Samples]]:
        """Decode all requests; the futures are complete."""
        futures: list[Future[Samples]] = [Future() for _ in requests]
        was_training = self.model.model.training
        self.model.model.eval()
        try:
            if requests and self.way is None:  # now that it matters: it costs forwards where attention is not plain
                self.way = find_way(self.model)
            in_graphs = self.way == "together" and not params.filters
            longest = max((request.limit(params) for request in requests), default=0)
            places = self.model.rows_at_once(longest) if in_graphs and requests else 0
            for part in self._parts(requests, places):
                decoding = _Decoding(self, [requests[i] for i in part], params)
                samples = decoding.run_in_graphs(places) if places else decoding.run()
                for i, drawn in zip(part, samples, strict=True):
                    futures[i].set_result(drawn)
        finally:  # `poll` may have raised
            self.model.model.train(was_training)
        return futures

    def _parts(self, requests: Sequence[SampleRequest], places: int) -> list[list[int]]:
        """Requests that are decoded together: of one length where that is needed, or as many prompts as rows."""
        if places:
            return [list(range(i, min(i + places, len(requests)))) for i in range(0, len(requests), places)]
        parts: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            parts.setdefault(len(request.prompt.token_ids) if self.way == "by length" else 0, []).append(i)
        return list(parts.values())


class _Decoding:
    """Requests decoded together. `N` rows = all samples; `A` of them are still active; the cache has `C` rows.

    Rows that have drawn the same tokens so far share one row of the cache (`home`), until they part.
    """

    def __init__(self, sampler: TorchSampler, requests: Sequence[SampleRequest], params: SamplingParams) -> None:
        self.sampler = sampler
        self.params = params
        self.requests = requests
        self.owner = np.repeat(np.arange(len(requests)), [r.num_samples for r in requests])
        """The request of each row."""
        self.keys = row_keys(
            np.array([r.seed for r in requests], dtype=np.uint64)[self.owner],
            np.array([r.step for r in requests])[self.owner],
            np.array([r.number for r in requests])[self.owner],
            np.concatenate([r.first + np.arange(r.num_samples) for r in requests]),
        )
        """A key per row, from which all its draws follow."""
        self.position = np.array([r.position for r in requests])[self.owner]
        """Draws of each row's episode before this request."""
        self.limit = np.array([r.limit(params) for r in requests])[self.owner]
        shape = len(self.owner), int(self.limit.max())
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.logps, self.entropies = np.zeros(shape), np.zeros(shape)
        self.length = np.zeros(len(self.owner), dtype=np.int64)
        self.texts: dict[int, str] = {}  # rows that a stop string ended
        self.stopped = np.zeros(len(self.owner), dtype=bool)
        self.stop_ids = np.fromiter(sampler.stop_ids, dtype=np.int64)

    def run_in_graphs(self, places: int) -> list[Samples]:
        """Samples of each request, decoded by the model in CUDA graphs."""
        params, longest = self.params, self.tokens.shape[1]
        uniforms = np.zeros(self.tokens.shape, dtype=np.float32)
        for start in range(0, longest if params.temperature else 0, 256):
            places_K = np.arange(start, min(start + 256, longest))
            uniforms[:, places_K] = row_uniforms(self.keys[:, None], self.position[:, None] + places_K)
        found = self.sampler.model.decode(
            [r.prompt.token_ids for r in self.requests],
            self.owner.tolist(),
            torch.from_numpy(uniforms.clip(max=1 - 2.0**-24)),
            places=places,
            temperature=params.temperature,
            stop_ids=self.stop_ids.tolist(),
            poll=self.sampler.poll,
        )
        drawn = (found.tokens, found.logps.double(), found.entropies.double(), found.length, found.stopped)
        self.tokens, self.logps, self.entropies, self.length, self.stopped = (x.numpy() for x in drawn)
        if np.isnan(self.logps).any():
            raise NumericError(NOT_FINITE)
        is_over = self.length > self.limit  # the graph has one limit for all rows
        self.length, self.stopped = np.minimum(self.length, self.limit), self.stopped & ~is_over
        for row, length in enumerate(self.length.tolist() if params.stop else []):
            tokens = self.tokens[row, :length].tolist()
            ended = stopped_at(self.sampler.tokenizer, tokens, params.stop, self.sampler.stop_ids)
            if ended is not None:
                self.stopped[row] = True
                self.length[row], self.texts[row] = ended
        return self._samples()

    def run(self) -> list[Samples]:
        """Samples of each request, decoded a token of all rows at a time."""
        rows_class = RecomputedRows if self.sampler.way == "recomputed" else CachedRows
        rows = rows_class(self.sampler.model, [r.prompt.token_ids for r in self.requests])
        active = np.arange(len(self.tokens))
        home = self.owner
        is_shared = len(self.owner) > len(self.requests)
        for step in range(self.tokens.shape[1]):
            tokens = self._draw(rows.logits_CV, home, active, step)
            going_on = ~self.stopped[active] & (self.limit[active] > step + 1)
            if not going_on.any():
                break
            active, home, tokens = active[going_on], home[going_on], tokens[going_on]
            num_cached, vocabulary = rows.logits_CV.shape
            parents, drawn, kind, parts = home, tokens, np.arange(len(home)), False
            if is_shared:
                _, first, kind = np.unique(home * vocabulary + tokens, return_index=True, return_inverse=True)
                parents, drawn = home[first], tokens[first]
                parts = len(np.unique(parents)) < len(parents)
                is_shared = len(parents) < len(active)
                if not is_shared:
                    parents, drawn, kind = home, tokens, np.arange(len(home))
            # Cutting the cache costs a copy: worth it when half of it is done, needed when rows of one home part.
            keep: np.ndarray | None = None
            if parts or rows.is_cheap_to_cut or len(parents) <= num_cached // 2:
                keep, home = parents, kind
            else:
                spread = np.zeros(num_cached, dtype=np.int64)
                spread[parents] = drawn
                drawn, home = spread, parents[kind]
            self.sampler.poll()
            rows.advance(keep, drawn)
        return self._samples()

    def _draw(self, logits_CV: Tensor, home: np.ndarray, active: np.ndarray, step: int) -> np.ndarray:
        """Draw a token per active row, note it and its log-prob, and mark the rows that end."""
        temperature, device = self.params.temperature, logits_CV.device
        log_p_CV = (logits_CV / (temperature or 1.0)).log_softmax(-1)
        home_A = torch.from_numpy(home).to(device)
        if temperature == 0:
            tokens_A = log_p_CV.argmax(-1)[home_A]
        else:
            u_A = torch.from_numpy(row_uniforms(self.keys[active], self.position[active] + step)).to(device)
            p_CV = log_p_CV.exp()
            tokens_A = draw(filtered(log_p_CV, self.params).exp() if self.params.filters else p_CV, u_A, home_A)
            # Of the whole distribution, as the log-probs are. xlogy would do for p = 0, but here log p is at hand.
            entropy_C = -(p_CV * log_p_CV.clamp(min=-1e4)).sum(-1)
            self.entropies[active, step] = entropy_C[home_A].cpu().numpy()
        logps = log_p_CV[home_A, tokens_A].cpu().numpy()
        if np.isnan(logps).any():
            raise NumericError(NOT_FINITE)
        self.logps[active, step] = logps
        tokens = tokens_A.cpu().numpy()
        self.tokens[active, step] = tokens
        self.length[active] = step + 1
        self.stopped[active] = (tokens[:, None] == self.stop_ids).any(1)
        if self.params.stop:
            for row in active[~self.stopped[active]]:
                (text,) = texts_of(self.sampler.tokenizer, [self.tokens[row, : step + 1].tolist()])
                before = text_before(text, self.params.stop)
                if before is not None:
                    self.stopped[row], self.texts[row] = True, before
        return tokens

    def _samples(self) -> list[Samples]:
        made = []
        version = self.sampler.model.version
        rows = [tokens[:length] for tokens, length in zip(self.tokens.tolist(), self.length.tolist(), strict=True)]
        keys = [tuple(row) for row in rows]
        unknown = {key: row for i, (key, row) in enumerate(zip(keys, rows, strict=True)) if i not in self.texts}
        decoded = dict(zip(unknown, texts_of(self.sampler.tokenizer, list(unknown.values())), strict=True))
        numbers = zip(keys, self.logps.tolist(), self.entropies.tolist(), strict=True)
        for row, (ids, logps, entropies) in enumerate(numbers):
            made.append(
                Trajectory(
                    prompt=self.requests[self.owner[row]].prompt,
                    tokens=ids,
                    logps=tuple(logps[: len(ids)]),
                    text=self.texts[row] if row in self.texts else decoded[ids],
                    stop_reason="stop" if self.stopped[row] else "length",
                    versions=(version, version),
                    entropies=None if self.params.temperature == 0 else tuple(entropies[: len(ids)]),
                )
            )
        sampled = iter(made)
        return [tuple(next(sampled) for _ in range(r.num_samples)) for r in self.requests]


def filtered(log_p_AV: Tensor, params: SamplingParams) -> Tensor:
    """Log-probs with the tokens that top-k, top-p or min-p exclude at -inf (not renormalised)."""
    if 0 < params.top_k < log_p_AV.shape[-1]:
        smallest = log_p_AV.topk(params.top_k).values[:, -1:]
        log_p_AV = log_p_AV.masked_fill(log_p_AV < smallest, -torch.inf)
    if params.min_p > 0:
        floor = log_p_AV.amax(-1, keepdim=True) + float(np.log(params.min_p))
        log_p_AV = log_p_AV.masked_fill(log_p_AV < floor, -torch.inf)
    if params.top_p < 1:
        ordered, order = log_p_AV.sort(descending=True)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p  # the most likely token has nothing before it and always stays
        excluded = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= params.top_p)
        log_p_AV = log_p_AV.masked_fill(excluded, -torch.inf)
    return log_p_AV


def draw(p_CV: Tensor, u_A: Tensor, home_A: Tensor | None = None) -> Tensor:
    """The token at which the cumulative probability passes u, per row; `p` need not sum to 1; u is for row `home`."""
    cumulative = p_CV.cumsum(-1, dtype=torch.float64)
    if home_A is not None and not torch.equal(home_A, torch.arange(len(p_CV), device=home_A.device)):
        cumulative = cumulative[home_A]
    target = u_A[:, None] * cumulative[:, -1:]
    # right=True: the first token whose cumulative probability exceeds the target, so never one of probability 0
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=p_CV.shape[-1] - 1)


# --- rows of tokens that grow by a token at a time, and the logits of what follows them ---------------------------


class CachedRows:
    """Rows in transformers' cache: keys, values and recurrent states; one token per row and step.

    `logits_CV` follow each of its `C` rows; at first these are the prompts, padded on the left.
    """

    is_cheap_to_cut = False

    def __init__(self, model: DecodedModel, prompts: Sequence[tuple[int, ...]]) -> None:
        from transformers import DynamicCache
        from transformers.cache_utils import CacheLayerMixin

        self.model = model.model
        self.device = model.device
        self.cache = DynamicCache(config=self.model.config)
        self.cache_name = _cache_name(model) or "past_key_values"
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self.device)
        length_P = torch.tensor(lengths, device=self.device)
        place_PL = torch.arange(longest, device=self.device) - (longest - length_P)[:, None]
        # Prompts of one length need no mask, and attention is faster without one.
        self.attention = None if min(lengths) == longest else (place_PL >= 0).long()
        self.logits_CV = self._forward(ids, place_PL.clamp(min=0))
        self.position_C = length_P - 1
        if not any(isinstance(layer, CacheLayerMixin) for layer in self.cache.layers):
            self.attention = None  # only keys have to be masked again; a recurrence has the padding behind it

    def advance(self, keep: np.ndarray | None, tokens: np.ndarray) -> None:
        """Keep these rows of the cache, in this order and maybe several times (None: all), and append a token to each.

        `reorder_cache` is the one selection that every kind of layer has.
        """
        if keep is not None:
            rows = torch.from_numpy(keep).to(self.device)
            self.cache.reorder_cache(rows)  # type: ignore[arg-type]  # a LongTensor to transformers
            self.position_C = self.position_C[rows]
            self.attention = None if self.attention is None else self.attention[rows]
        if self.attention is not None:
            self.attention = torch.cat([self.attention, self.attention.new_ones(len(self.attention), 1)], 1)
        self.position_C = self.position_C + 1
        self.logits_CV = self._forward(torch.from_numpy(tokens).to(self.device)[:, None], self.position_C[:, None])

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        outputs = self.model(
            input_ids=ids,
            attention_mask=self.attention,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        return outputs.logits[:, -1].float()


class RecomputedRows:
    """Rows without a cache, each distinct one run whole in every step, as the trainer runs it."""

    is_cheap_to_cut = True

    def __init__(self, model: DecodedModel, prompts: Sequence[tuple[int, ...]]) -> None:
        self.model = model
        self.rows = list(prompts)
        self.logits_CV = self.model.next_logits(self.rows)

    def advance(self, keep: np.ndarray | None, tokens: np.ndarray) -> None:
        rows = self.rows if keep is None else [self.rows[i] for i in keep]
        self.rows = [(*row, token) for row, token in zip(rows, tokens.tolist(), strict=True)]
        self.logits_CV = self.model.next_logits(self.rows)


# --- which of them a model needs ----------------------------------------------------------------------------------


def find_way(model: DecodedModel) -> Way:
    """The way a model decodes: with a cache for plain attention, else decided by a comparison with the trainer."""
    if _has_plain_attention(model):
        return "together"
    name = type(_base(model)).__name__
    vocabulary = _base(model).config.get_text_config().vocab_size
    # Two sequences for each of three prompts of unequal length; like samples of a group they part after the prompt.
    features = [
        InputFeature(
            prompt_ids=tuple(token % vocabulary for token in prompt),
            completion_ids=tuple((len(prompt) + 5 * sample + 3 * j) % vocabulary for j in range(24)),
        )
        for prompt in [(7, 14, 5, 12, 3, 10, 1, 8, 15), (6, 13, 4, 11), (2, 9)]
        for sample in range(2)
    ]
    expected = torch.cat(model.forward_only(features, temperature=1.0)["logps"])
    alone = torch.cat([model.forward_only([f], temperature=1.0)["logps"][0] for f in features])
    is_half = next(model.model.parameters()).element_size() == 2
    # Rounding is measured: what the trainer's own numbers differ by, in one batch and one by one. A recurrence that is
    # slightly off drifts with every token, so that what is small here is not after a thousand.
    tolerance = max(10 * float((alone - expected).abs().max()), 0.2 if is_half else 1e-4)
    padded = _disagreement(model, [features], expected, tolerance)
    if padded is None:
        return "together"
    reason = _disagreement(model, [features[i : i + 2] for i in range(0, len(features), 2)], expected, tolerance)
    if reason is None:
        logger.warning("%s: prompts are sampled one length at a time, since padded to one %s", name, padded)
        return "by length"
    logger.warning("%s: sampling runs without a cache, a whole forward per token, since with one %s", name, reason)
    return "recomputed"


def _base(model: DecodedModel) -> Any:
    """The transformers model inside a PEFT adapter, or the model itself."""
    return model.model.get_base_model() if hasattr(model.model, "get_base_model") else model.model


def _cache_name(model: DecodedModel) -> str | None:
    """The keyword under which the model takes a cache."""
    taken = inspect.signature(_base(model).forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in taken), None)


def _has_plain_attention(model: DecodedModel) -> bool:
    """Whether the cache holds keys and values, of all tokens or of a window, and nothing else."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    base = _base(model)
    if _cache_name(model) != "past_key_values" or getattr(base, "_is_stateful", False):
        return False  # transformers calls stateful what keeps a state, be it in the cache or in the model
    try:
        layers = DynamicCache(config=base.config).layers
    except KeyError:  # a kind of layer that transformers has no cache for
        return False
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _disagreement(
    model: DecodedModel, batches: Sequence[Sequence[InputFeature]], expected: Tensor, tolerance: float
) -> str | None:
    """Reason why a cache does not give the expected log-probs of these pairs, token by token; None when it does."""
    cached = []
    try:
        for pairs in batches:
            rows, logps = CachedRows(model, [f.prompt_ids for f in pairs[::2]]), []
            home = np.repeat(np.arange(len(pairs) // 2), 2)
            for tokens in np.array([f.completion_ids for f in pairs]).T:
                logps.append(rows.logits_CV.log_softmax(-1)[torch.from_numpy(home), torch.from_numpy(tokens)])
                rows.advance(home, tokens)
                home = np.arange(len(pairs))
            cached.append(torch.stack(logps, 1).flatten())
    except Exception as error:  # whatever a model raises that takes no such cache
        return f"it fails with {type(error).__name__}: {error}"
    gap = float((torch.cat(cached) - expected).abs().max())
    return None if gap <= tolerance else f"its log-probs differ by {gap:.2g}"
