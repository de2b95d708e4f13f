"""GraphDecoder: decoding on a GPU with the trainer's own model, a CUDA graph per token.

A prompt's keys and values are computed and kept once, whatever the number of its samples; each row has room for its own
behind them. Drawing is part of the graph: nothing goes to the host until rows have ended. A row's tokens depend on its
prompt and its random numbers, not on the other rows, but for the rounding of products of another size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gruppo.kernel.triton_decode import draw_tokens
from gruppo.model.attention_hook import refusal, set_shared_attention

if TYPE_CHECKING:
    from gruppo.model.scorer import Scorer

CHECK_EVERY = 16
"""Tokens between two looks at whether all rows have ended."""
SHARE_OF_MEMORY = 0.6
"""Of the memory that is free, what the cache may take."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was drawn, on the host: `[N, M]` each, of which the first `length` of a row count."""

    tokens: Tensor
    logps: Tensor
    entropies: Tensor
    length: Tensor  # [N]
    stopped: Tensor  # [N] bool: by an end token


class GraphDecoder:
    """Rows that grow by a token at a time.

    Args:
        prompts: token ids of each prompt.
        prompt_of: the prompt of each row.
        uniforms: `[N, M]` float32 in [0, 1), one per row and token.
        temperature: 0 takes the likeliest token.
        stop_ids: tokens that end a row.
    """

    def __init__(
        self,
        scorer: "Scorer",
        prompts: Sequence[tuple[int, ...]],
        prompt_of: Sequence[int],
        uniforms: Tensor,
        *,
        temperature: float,
        stop_ids: Sequence[int],
    ) -> None:
        self.scorer, self.temperature = scorer, temperature
        self.device = next(scorer.model.parameters()).device
        set_shared_attention(scorer.base)
        num_rows, self.room = uniforms.shape
        self.prompt_of = torch.tensor(prompt_of, dtype=torch.int32, device=self.device)
        self.uniforms = uniforms.to(self.device)
        self.stop_ids = torch.tensor([*stop_ids, -1], device=self.device)
        # One column more than is read: rows that have ended write there.
        self.tokens = torch.zeros(num_rows, self.room + 1, dtype=torch.int64, device=self.device)
        self.logps, self.entropies = (torch.zeros(num_rows, self.room + 1, device=self.device) for _ in range(2))
        self.last, self.drawn = (torch.zeros(num_rows, dtype=torch.int64, device=self.device) for _ in range(2))
        self.ended, self.stopped = (torch.zeros(num_rows, dtype=torch.bool, device=self.device) for _ in range(2))
        self.count = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)  # read by no kernel
        self.layers: list[tuple[Tensor, ...]] = []
        self._start(prompts)

    def run(self, poll: Callable[[], None]) -> Decoded:
        """Decode until all rows have ended."""
        graph: torch.cuda.CUDAGraph | None = None
        for step in range(1, self.room):
            poll()
            if step % CHECK_EVERY == 0 and bool(self.ended.all()):
                break
            if step <= 2:  # kernels are compiled and workspaces made before a graph is captured
                self._step()
                continue
            if graph is None:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._step()
            graph.replay()
        found = (self.tokens, self.logps, self.entropies, self.drawn, self.stopped)
        return Decoded(*(x[:, : self.room].cpu() if x.dim() == 2 else x.cpu() for x in found))

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """What attention of a layer reads and writes besides queries, keys and values."""
        return self.layers[index]

    def _start(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Keys and values of the prompts, padded on the left, and the first token of each row."""
        from transformers import DynamicCache

        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self.device)
        place_PL = torch.arange(longest, device=self.device) - (longest - lengths)[:, None]
        cache = DynamicCache(config=self.scorer.base.config)  # type: ignore[arg-type]
        hidden_PD = self._hidden(
            input_ids=ids,
            attention_mask=(place_PL >= 0).long(),
            position_ids=place_PL.clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        )
        first = (longest - lengths).to(torch.int32)
        for layer in cache.layers:
            keys, values = layer.keys, layer.values  # pyright: ignore[reportAttributeAccessIssue]
            assert keys is not None and values is not None
            shape = len(self.prompt_of), keys.shape[1], self.room, keys.shape[3]
            own = (torch.empty(shape, dtype=keys.dtype, device=self.device) for _ in range(2))
            prompt = (keys.contiguous(), values.contiguous())
            self.layers.append((*own, *prompt, self.prompt_of, first, self.count))
        self.length_N = lengths[self.prompt_of]
        self._draw(self._logits(hidden_PD)[self.prompt_of.long()])

    def _step(self) -> None:
        """One more token of each row."""
        self.count.copy_(self.drawn - 1)
        hidden_ND = self._hidden(
            input_ids=self.last[:, None],
            attention_mask=self.mask,
            position_ids=(self.length_N + self.drawn - 1)[:, None],
            decode_rows=self,
            use_cache=False,
        )
        self._draw(self._logits(hidden_ND))

    def _hidden(self, **keywords: Any) -> Tensor:
        """Hidden states of the last slot of each row."""
        return self.scorer.read(keywords, lambda hidden: hidden[:, -1], lambda last_ND: last_ND)

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """Float32 logits, as the trainer has them."""
        head = self.scorer.head
        assert head is not None
        logits_NV = torch.mm(hidden_ND.to(head.weight.dtype), head.weight.T, out_dtype=torch.float32)  # type: ignore[call-overload]
        return head.shaped(logits_NV if head.bias is None else logits_NV + head.bias.float())

    def _draw(self, logits_NV: Tensor) -> None:
        if self.temperature == 0:
            token_N = logits_NV.argmax(-1)
            logp_N = logits_NV.log_softmax(-1).gather(1, token_N[:, None])[:, 0]
            entropy_N = torch.zeros_like(logp_N)
        else:
            u_N = self.uniforms.gather(1, self.drawn.clamp(max=self.room - 1)[:, None])[:, 0]
            token_N, logp_N, entropy_N = draw_tokens(logits_NV.contiguous(), u_N, self.temperature)
        place_N1 = torch.where(self.ended, self.room, self.drawn)[:, None]
        for kept, new in ((self.tokens, token_N), (self.logps, logp_N), (self.entropies, entropy_N)):
            kept.scatter_(1, place_N1, new[:, None])
        self.last.copy_(token_N)
        self.stopped.logical_or_((token_N[:, None] == self.stop_ids).any(1) & ~self.ended)
        self.drawn.add_((~self.ended).long())
        self.ended.logical_or_(self.stopped | (self.drawn >= self.room))


def can_decode(scorer: "Scorer") -> bool:
    """Whether the model can be decoded in graphs: on a GPU, in half precision, with attention of one kind."""
    weight = next(scorer.model.parameters())
    if not weight.is_cuda or weight.element_size() != 2 or scorer.head is None or refusal(scorer.base) is not None:
        return False
    config = scorer.base.config.get_text_config()  # type: ignore[union-attr]
    has_window = bool(config.to_dict().get("sliding_window"))
    return set(getattr(config, "layer_types", None) or ()) <= {"full_attention"} and not has_window


def rows_that_fit(scorer: "Scorer", max_new_tokens: int) -> int:
    """Rows of the cache that the free memory has room for."""
    config = scorer.base.config.get_text_config()  # type: ignore[union-attr]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_row = config.num_hidden_layers * config.num_key_value_heads * size * 2 * 2 * max_new_tokens
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return max(int(free * SHARE_OF_MEMORY) // (per_row + 12 * config.vocab_size), 1)
