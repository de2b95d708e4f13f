"""TorchSampler: batched decoding of any transformers model, in this process.

Each prompt runs through the model once. Samples of a group share their row of the cache until they draw different
tokens. When many rows have finished, the cache is cut down to those that go on. A model whose cache does not give the
trainer's log-probs decodes without one (`decoding.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gruppo.errors import InputError, NumericError
from gruppo.model.transformers_model import TransformersModel
from gruppo.sampler.base import PromptLike, check_call, draw_numbers, read_prompt
from gruppo.sampler.decoding import CachedRows, RecomputedRows, Way, find_way
from gruppo.sampler.params import SamplingParams
from gruppo.sampler.randomness import row_keys, uniforms
from gruppo.types import Prompt, SampleResponse, Trajectory
from gruppo.weights.source import end_tokens_of


class TorchSampler:
    """Samples from a TransformersModel. Given the trainer's own, it always samples from the newest weights.

    Args:
        model: the model, or the id of one to load with `options`.
        on_token: called before each forward; may raise to leave.
    """

    def __init__(
        self, model: TransformersModel | str, *, on_token: Callable[[], None] | None = None, **options: Any
    ) -> None:
        if isinstance(model, str):
            model = TransformersModel(model, **options)
        elif options:
            raise InputError(f"options {sorted(options)} go with a model id, not with a model")
        self.model = model
        self.tokenizer = model.tokenizer
        generation, config = (getattr(model.model, name, None) for name in ("generation_config", "config"))
        self.stop_ids = end_tokens_of(generation, config, model.tokenizer)
        self.on_token = on_token
        self.calls = 0
        """Calls of `sample` without a step."""
        self.way: Way | None = None
        """How the model decodes; None until the first call of `sample`."""

    is_exact = True

    @torch.inference_mode()
    def sample(
        self, batch: Sequence[PromptLike], num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[SampleResponse]:
        """Draw `num_samples` completions of each prompt. The same seed and step give the same tokens."""
        check_call(batch, num_samples, params)
        params = params or SamplingParams()
        if not batch:
            return []
        prompts = [read_prompt(prompt, i, self.tokenizer) for i, prompt in enumerate(batch)]
        numbers, first = draw_numbers(batch, num_samples)
        samples = (first[:, None] + np.arange(num_samples)).reshape(-1)
        step = params.step
        if step is None:
            step = self.calls
            self.calls += 1
        keys_PS = row_keys(params.seed, step, np.repeat(numbers, num_samples), samples).reshape(-1, num_samples)
        responses: list[SampleResponse | None] = [None] * len(batch)
        was_training = self.model.model.training
        self.model.model.eval()
        try:
            for part in self._parts(prompts):
                chosen = [prompts[i] for i in part]
                rows = _Decoding(self, chosen, num_samples, keys_PS[part].ravel(), params).run()
                for j, i in enumerate(part):
                    sequences = rows[j * num_samples : (j + 1) * num_samples]
                    responses[i] = SampleResponse(sequences=tuple(sequences))
        finally:  # `on_token` may have raised
            self.model.model.train(was_training)
        return [r for r in responses if r is not None]

    def _parts(self, prompts: list[Prompt]) -> list[list[int]]:
        """Which prompts are decoded together: all, or those of one length."""
        if self.way is None:  # found when it first matters: it costs some forwards where attention is not plain
            self.way = find_way(self.model)
        if self.way != "by length":
            return [list(range(len(prompts)))]
        parts: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            parts.setdefault(len(prompt.token_ids), []).append(i)
        return list(parts.values())

    def sync(self, model: TransformersModel) -> dict[str, float]:
        """Nothing to hand over: the model is the trainer's own."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


class _Decoding:
    """Prompts decoded together. `N` rows = prompts x samples; `A` of them are still active; the cache has `C` rows.

    Rows that have drawn the same tokens so far share one row of the cache (`home`), until they part.
    """

    def __init__(
        self,
        sampler: TorchSampler,
        prompts: list[Prompt],
        num_samples: int,
        keys: np.ndarray,
        params: SamplingParams,
    ) -> None:
        self.sampler = sampler
        self.rows_class = RecomputedRows if sampler.way == "recomputed" else CachedRows
        self.device = sampler.model.device
        self.params = params
        self.prompts = prompts
        self.num_samples = num_samples
        self.keys = keys
        num_rows = len(prompts) * num_samples
        self.tokens = np.zeros((num_rows, params.max_new_tokens), dtype=np.int64)
        self.logps = np.zeros((num_rows, params.max_new_tokens), dtype=np.float64)
        self.entropies = np.zeros((num_rows, params.max_new_tokens), dtype=np.float64)
        self.length = np.zeros(num_rows, dtype=np.int64)
        self.texts: dict[int, str] = {}  # rows that a stop string ended
        self.stopped = np.zeros(num_rows, dtype=bool)
        self.stop_ids = np.fromiter(sampler.stop_ids, dtype=np.int64)

    def run(self) -> list[Trajectory]:
        self._decode_all()
        return self._sequences()

    def _decode_all(self) -> None:
        rows = self.rows_class(self.sampler.model, [prompt.token_ids for prompt in self.prompts])
        active = np.arange(len(self.tokens))
        home = active // self.num_samples
        is_shared = self.num_samples > 1
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
            if self.sampler.on_token is not None:
                self.sampler.on_token()
            rows.advance(keep, drawn)

    def _draw(self, logits_CV: Tensor, home: np.ndarray, active: np.ndarray, step: int) -> np.ndarray:
        """Draw a token per active row, note it and its log-prob, and mark the rows that end."""
        temperature = self.params.temperature
        log_p_CV = (logits_CV / (temperature or 1.0)).log_softmax(-1)
        home_A = torch.from_numpy(home).to(self.device)
        if temperature == 0:
            tokens_A = log_p_CV.argmax(-1)[home_A]
        else:
            u_A = torch.from_numpy(uniforms(self.keys[active], step)).to(self.device)
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

    def _sequences(self) -> list[Trajectory]:
        decoded: dict[tuple[int, ...], str] = {}
        sequences = []
        version = self.sampler.model.version
        rows = (self.tokens.tolist(), self.logps.tolist(), self.entropies.tolist(), self.length.tolist())
        for row, (tokens, logps, entropies, length) in enumerate(zip(*rows, strict=True)):
            ids = tuple(tokens[:length])
            text = self.texts.get(row)
            if text is None and (text := decoded.get(ids)) is None:
                text = decoded[ids] = self._decode(tokens[:length])
            sequences.append(
                Trajectory(
                    prompt=self.prompts[row // self.num_samples],
                    tokens=ids,
                    logps=tuple(logps[:length]),
                    text=text,
                    stop_reason="stop" if self.stopped[row] else "length",
                    versions=(version, version),
                    entropies=None if self.params.temperature == 0 else tuple(entropies[:length]),
                )
            )
        return sequences


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
