"""TorchSampler: batched decoding of any transformers model, in this process.

Each prompt runs through the model once. Samples of a group share their row of the cache until they draw different
tokens. When many rows have finished, the cache is cut down to those that go on. A model whose cache does not give the
trainer's log-probs decodes without one (`decoding.py`).
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gruppo.errors import InputError, NumericError
from gruppo.random import row_keys, row_uniforms
from gruppo.sampler.base import Poll, Sampler, SampleRequest
from gruppo.sampler.decoding import CachedRows, DecodedModel, RecomputedRows, Way, find_way
from gruppo.sampler.params import SamplingParams
from gruppo.types import SampleResponse, Trajectory
from gruppo.weights import Published
from gruppo.weights.canary import TrainedModel
from gruppo.weights.source import end_tokens_of


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

            model = TransformersModel(model, **options)
        elif options:
            raise InputError(f"options {sorted(options)} go with a model id, not with a model")
        super().__init__(model.tokenizer)
        self.model = model
        generation, config = (getattr(model.model, name, None) for name in ("generation_config", "config"))
        self.stop_ids = end_tokens_of(generation, config, model.tokenizer)
        self.poll = poll
        self.way: Way | None = None
        """The way the model decodes; None until the first call of `submit`."""

    @torch.inference_mode()
    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Future[SampleResponse]]:
        """Decode all requests; the futures are complete."""
        futures: list[Future[SampleResponse]] = [Future() for _ in requests]
        was_training = self.model.model.training
        self.model.model.eval()
        try:
            for part in self._parts(requests):
                responses = _Decoding(self, [requests[i] for i in part], params).run()
                for i, response in zip(part, responses, strict=True):
                    futures[i].set_result(response)
        finally:  # `poll` may have raised
            self.model.model.train(was_training)
        return futures

    def _parts(self, requests: Sequence[SampleRequest]) -> list[list[int]]:
        """Indices of the requests that are decoded together: all, or those with prompts of one length."""
        if not requests:
            return []
        if self.way is None:  # found when it first matters: it costs some forwards where attention is not plain
            self.way = find_way(self.model)
        if self.way != "by length":
            return [list(range(len(requests)))]
        parts: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            parts.setdefault(len(request.prompt.token_ids), []).append(i)
        return list(parts.values())

    def load(self, published: Published) -> dict[str, float]:
        """Nothing to load: the model is the trainer's own."""
        return {}

    def sync(self, model: TrainedModel) -> dict[str, float]:
        """Nothing to publish: the model is the trainer's own."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


class _Decoding:
    """Requests decoded together. `N` rows = all samples; `A` of them are still active; the cache has `C` rows.

    Rows that have drawn the same tokens so far share one row of the cache (`home`), until they part.
    """

    def __init__(self, sampler: TorchSampler, requests: Sequence[SampleRequest], params: SamplingParams) -> None:
        self.sampler = sampler
        self.rows_class = RecomputedRows if sampler.way == "recomputed" else CachedRows
        self.device = sampler.model.device
        self.params = params
        self.requests = requests
        self.owner = np.repeat(np.arange(len(requests)), [r.num_samples for r in requests])
        """The request of each row."""
        self.keys = np.concatenate([_keys(request) for request in requests])
        num_rows = len(self.owner)
        self.tokens = np.zeros((num_rows, params.max_new_tokens), dtype=np.int64)
        self.logps = np.zeros((num_rows, params.max_new_tokens), dtype=np.float64)
        self.entropies = np.zeros((num_rows, params.max_new_tokens), dtype=np.float64)
        self.length = np.zeros(num_rows, dtype=np.int64)
        self.texts: dict[int, str] = {}  # rows that a stop string ended
        self.stopped = np.zeros(num_rows, dtype=bool)
        self.stop_ids = np.fromiter(sampler.stop_ids, dtype=np.int64)

    def run(self) -> list[SampleResponse]:
        self._decode_all()
        rows = iter(self._trajectories())
        return [SampleResponse(sequences=tuple(next(rows) for _ in range(r.num_samples))) for r in self.requests]

    def _decode_all(self) -> None:
        rows = self.rows_class(self.sampler.model, [r.prompt.token_ids for r in self.requests])
        active = np.arange(len(self.tokens))
        home = self.owner
        is_shared = len(self.owner) > len(self.requests)
        for step in range(self.params.max_new_tokens):
            tokens = self._draw(rows.logits_CV, home, active, step)
            going_on = ~self.stopped[active]
            if not going_on.any() or step + 1 == self.params.max_new_tokens:
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

    def _draw(self, logits_CV: Tensor, home: np.ndarray, active: np.ndarray, step: int) -> np.ndarray:
        """Draw a token per active row, note it and its log-prob, and mark the rows that end."""
        temperature = self.params.temperature
        log_p_CV = (logits_CV / (temperature or 1.0)).log_softmax(-1)
        home_A = torch.from_numpy(home).to(self.device)
        if temperature == 0:
            tokens_A = log_p_CV.argmax(-1)[home_A]
        else:
            u_A = torch.from_numpy(row_uniforms(self.keys[active], step)).to(self.device)
            p_CV = log_p_CV.exp()
            tokens_A = draw(filtered(log_p_CV, self.params).exp() if self.params.filters else p_CV, u_A, home_A)
            # Of the whole distribution, as the log-probs are. xlogy would do for p = 0, but here log p is at hand.
            entropy_C = -(p_CV * log_p_CV.clamp(min=-1e4)).sum(-1)
            self.entropies[active, step] = entropy_C[home_A].cpu().numpy()
        logps = log_p_CV[home_A, tokens_A].cpu().numpy()
        if np.isnan(logps).any():
            raise NumericError("the model gives NaN for a token: its weights hold numbers that are not finite")
        self.logps[active, step] = logps
        tokens = tokens_A.cpu().numpy()
        self.tokens[active, step] = tokens
        self.length[active] = step + 1
        self.stopped[active] = (tokens[:, None] == self.stop_ids).any(1)
        if self.params.stop:
            for row in active[~self.stopped[active]]:
                self.stopped[row] = self._hits_stop_string(row)
        return tokens

    def _hits_stop_string(self, row: int) -> bool:
        text = self._decode(self.tokens[row, : self.length[row]].tolist())
        ends = [i for i in (text.find(s) for s in self.params.stop) if i >= 0]
        if ends:
            self.texts[row] = text[: min(ends)]
        return bool(ends)

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = self.sampler.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))

    def _trajectories(self) -> list[Trajectory]:
        decoded: dict[tuple[int, ...], str] = {}
        made = []
        version = self.sampler.model.version
        rows = (self.tokens.tolist(), self.logps.tolist(), self.entropies.tolist(), self.length.tolist())
        for row, (tokens, logps, entropies, length) in enumerate(zip(*rows, strict=True)):
            ids = tuple(tokens[:length])
            text = self.texts.get(row)
            if text is None and (text := decoded.get(ids)) is None:
                text = decoded[ids] = self._decode(tokens[:length])
            made.append(
                Trajectory(
                    prompt=self.requests[self.owner[row]].prompt,
                    tokens=ids,
                    logps=tuple(logps[:length]),
                    text=text,
                    stop_reason="stop" if self.stopped[row] else "length",
                    versions=(version, version),
                    entropies=None if self.params.temperature == 0 else tuple(entropies[:length]),
                )
            )
        return made


def _keys(request: SampleRequest) -> np.ndarray:
    """A key per sample of a request, from which all its draws follow."""
    samples = request.first + np.arange(request.num_samples)
    return row_keys(request.seed, request.step, np.full(request.num_samples, request.number), samples)


def filtered(log_p_AV: Tensor, params: SamplingParams) -> Tensor:
    """Log-probs with the tokens that top-k, top-p or min-p exclude at -inf (not renormalised)."""
    if not params.filters:
        return log_p_AV
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
