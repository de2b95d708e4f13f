"""GraphDecoder: decoding on a GPU with the trainer's own model, a CUDA graph per token.

A prompt's keys and values are computed and kept once, whatever the number of its samples; each row has room for its own
behind them. Drawing is part of the graph: nothing goes to the host until rows have ended. If there are more rows than
places in the cache, a row that has ended makes place for the next, so that a long row does not keep the others waiting.
A row's tokens depend on its prompt and its random numbers, not on the other rows, but for the rounding of products of
another size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gruppo.batch.packed import usual_width
from gruppo.kernel.triton_decode import draw_tokens, row_tiles
from gruppo.model.attention_hook import refusal, set_shared_attention

if TYPE_CHECKING:
    from gruppo.model.scorer import Scorer

CHECK_EVERY = 16
"""Tokens between two looks at which rows have ended."""
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
        places: rows that are decoded at once.
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
        places: int,
        temperature: float,
        stop_ids: Sequence[int],
    ) -> None:
        self.scorer, self.temperature = scorer, temperature
        self.device = next(scorer.model.parameters()).device
        set_shared_attention(scorer.base)
        num_rows, self.room = uniforms.shape
        num = min(places, num_rows)
        self.all_prompt_of, self.all_uniforms = torch.tensor(prompt_of, dtype=torch.int32), uniforms
        self.found = Decoded(
            tokens=torch.zeros(num_rows, self.room, dtype=torch.int64),
            logps=torch.zeros(num_rows, self.room),
            entropies=torch.zeros(num_rows, self.room),
            length=torch.zeros(num_rows, dtype=torch.int64),
            stopped=torch.zeros(num_rows, dtype=torch.bool),
        )
        self.row_of = torch.full((num,), -1)
        """The row in each place, on the host; -1: none."""
        self.next_row = 0

        def made(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num, *shape, dtype=dtype, device=self.device)

        config = scorer.base.config.get_text_config()  # type: ignore[union-attr]
        self.share = config.num_attention_heads // config.num_key_value_heads
        self.prompt_of = [0] * num
        self.tiles = row_tiles(self.prompt_of, self.share).to(self.device)
        self.count = made(dtype=torch.int32)
        self.uniforms = made(self.room, dtype=torch.float32)
        # One column more than is read: rows that have ended write there.
        self.tokens = made(self.room + 1, dtype=torch.int64)
        self.logps, self.entropies = (made(self.room + 1, dtype=torch.float32) for _ in range(2))
        self.last, self.drawn, self.length = (made(dtype=torch.int64) for _ in range(3))
        self.ended, self.stopped = (made(dtype=torch.bool) for _ in range(2))
        self.every_place = torch.arange(num, device=self.device)
        self.stop_ids = torch.tensor([*stop_ids, -1], device=self.device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)  # read by no kernel
        self.layers: list[tuple[Tensor, ...]] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_steps = 0
        self._start(prompts)

    def run(self, poll: Callable[[], None]) -> Decoded:
        """Decode until all rows have ended."""
        self._fill(torch.arange(len(self.row_of)))
        while True:
            ended, drawn = self.ended.cpu(), self.drawn.cpu()
            if bool(ended.any()) and self.next_row < len(self.all_prompt_of):
                self._collect(ended.nonzero()[:, 0])
                self._fill(ended.nonzero()[:, 0])
                continue
            if bool(ended.all()):
                break
            for _ in range(min(CHECK_EVERY, self.room - int(drawn[~ended].min()))):
                poll()
                self._advance()
        self._collect(torch.arange(len(self.row_of)))
        return self.found

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """What attention of a layer reads and writes besides queries, keys and values."""
        return self.layers[index]

    def _start(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Keys and values of the prompts, padded on the left, and the logits of what follows them."""
        from transformers import DynamicCache

        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        longest = usual_width(max(len(p) for p in prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self.device)
        place_PL = torch.arange(longest, device=self.device) - (longest - lengths)[:, None]
        cache = DynamicCache(config=self.scorer.base.config)  # type: ignore[arg-type]
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # cuDNN plans each width for a second
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
            shape = len(self.row_of), keys.shape[1], self.room, keys.shape[3]
            own = (torch.empty(shape, dtype=keys.dtype, device=self.device) for _ in range(2))
            prompt = (keys.contiguous(), values.contiguous())
            self.layers.append((*own, *prompt, self.tiles, first, self.count))
        self.lengths_P, self.first_PV = lengths, self._logits(hidden_PD)

    def _fill(self, places: Tensor) -> None:
        """Put the next rows into these places, and draw their first token."""
        places = places[: len(self.all_prompt_of) - self.next_row]
        rows = torch.arange(self.next_row, self.next_row + len(places))
        self.next_row += len(places)
        self.row_of[places] = rows
        at = places.to(self.device)
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            self.prompt_of[place] = int(self.all_prompt_of[row])
        self.tiles.copy_(row_tiles(self.prompt_of, self.share))
        prompt_of = self.all_prompt_of[rows].to(self.device)
        self.length[at] = self.lengths_P[prompt_of]
        self.uniforms[at] = self.all_uniforms[rows].to(self.device)
        for state in (self.drawn, self.ended, self.stopped):
            state[at] = 0
        self._draw(self.first_PV[prompt_of], at)

    def _collect(self, places: Tensor) -> None:
        """Bring the rows in these places to the host; the places are empty then."""
        places = places[self.row_of[places] >= 0]
        rows, at, found = self.row_of[places], places.to(self.device), self.found
        for kept, drawn in ((found.tokens, self.tokens), (found.logps, self.logps), (found.entropies, self.entropies)):
            kept[rows] = drawn[at, : self.room].cpu()
        found.length[rows], found.stopped[rows] = self.drawn[at].cpu(), self.stopped[at].cpu()
        self.row_of[places] = -1

    def _advance(self) -> None:
        """One more token of each row: by a graph, once kernels for these shapes have been compiled and run."""
        self.num_steps += 1
        shapes = tuple(x.shape for x in self.layers[0])
        if self.num_steps <= 2 and shapes not in self.scorer.decoded:
            self._step()
            return
        self.scorer.decoded.add(shapes)
        if self.graph is None:
            self.graph = _captured(self._step, _graph_memory(self.device))
        self.graph.replay()

    def _step(self) -> None:
        self.count.copy_(self.drawn - 1)
        hidden_ND = self._hidden(
            input_ids=self.last[:, None],
            attention_mask=self.mask,
            position_ids=(self.length + self.drawn - 1)[:, None],
            decode_rows=self,
            use_cache=False,
        )
        self._draw(self._logits(hidden_ND), slice(None))

    def _hidden(self, **keywords: Any) -> Tensor:
        """Hidden states of the last slot of each row."""
        return self.scorer.read(keywords, lambda hidden: hidden[:, -1], lambda last_ND: last_ND)

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """Float32 logits, as the trainer has them."""
        head = self.scorer.head
        assert head is not None
        logits_NV = torch.mm(hidden_ND.to(head.weight.dtype), head.weight.T, out_dtype=torch.float32)  # type: ignore[call-overload]
        return head.shaped(logits_NV if head.bias is None else logits_NV + head.bias.float())

    def _draw(self, logits_NV: Tensor, at: Tensor | slice) -> None:
        """Draw a token for each of these places, and note it."""
        place_N, drawn_N, ended_N = self.every_place[at], self.drawn[at], self.ended[at]
        if self.temperature == 0:
            token_N = logits_NV.argmax(-1)
            logp_N = logits_NV.log_softmax(-1).gather(1, token_N[:, None])[:, 0]
            entropy_N = torch.zeros_like(logp_N)
        else:
            u_N = self.uniforms[place_N, drawn_N.clamp(max=self.room - 1)]
            token_N, logp_N, entropy_N = draw_tokens(logits_NV.contiguous(), u_N, self.temperature)
        column_N = torch.where(ended_N, self.room, drawn_N)
        for kept, new in ((self.tokens, token_N), (self.logps, logp_N), (self.entropies, entropy_N)):
            kept[place_N, column_N] = new
        stopped_N = (token_N[:, None] == self.stop_ids).any(1) & ~ended_N
        num_N = drawn_N + (~ended_N).long()
        self.last[at], self.drawn[at] = token_N, num_N
        self.stopped[at] = self.stopped[at] | stopped_N
        self.ended[at] = ended_N | stopped_N | (num_N >= self.room)


def _captured(step: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of a step. Not by `torch.cuda.graph`, which gives back the memory that the training step takes again."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        step()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


@cache
def _graph_memory(device: torch.device) -> Any:
    """Memory of graphs; a small graph holds it, so that each graph takes what the last one had."""
    one = torch.ones(1, device=device)
    anchor = _captured(lambda: one.add_(1), None)
    _anchors.append((anchor, one))
    return anchor.pool()


_anchors: list[Any] = []


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
