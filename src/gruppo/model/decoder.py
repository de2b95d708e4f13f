"""GraphDecoder: decoding on a GPU with the trainer's own model, a CUDA graph per token.

A prompt's keys and values are computed and kept once, whatever the number of its samples; each row has room for its own
behind them. Drawing is part of the graph: nothing goes to the host until rows have ended. If there are more rows than
places in the cache, a row that has ended makes place for the next, so that a long row does not keep the others waiting.
A row's tokens depend on its prompt and its random numbers, not on the other rows, but for the rounding of products of
another size.

A graph costs as much as a dozen tokens, so that it serves the following steps too, where its cache is small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gruppo.batch.packed import usual_width
from gruppo.kernel.triton_decode import QUERIES, draw_tokens, note_tokens, row_tiles
from gruppo.model.attention_hook import refusal, set_shared_attention
from gruppo.model.fused_linear import joined_products

if TYPE_CHECKING:
    from gruppo.model.logp_model import LogpModel

CHECK_EVERY = 16
"""Tokens between two looks at which rows have ended."""
SHARE_OF_MEMORY = 0.6
"""Of the memory that is free, what the cache may take."""
SHARE_TO_KEEP = 0.04
"""Of the memory of the card, what a cache may take that is kept for the next step."""
GRAPH_OF_PROMPTS = 8192
"""Slots of prompts up to which their forward is a graph too: its launches take longer than its work."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was drawn, on the host: `[N, M]` each, of which the first `length` of a row count."""

    tokens: Tensor
    logps: Tensor
    entropies: Tensor
    length: Tensor  # [N]
    stopped: Tensor  # [N] bool: by an end token

    @classmethod
    def blank(cls, rows: int, room: int) -> "Decoded":
        """Rows of which nothing is drawn."""
        logps, entropies = torch.zeros(2, rows, room, dtype=torch.float32)
        length, stopped = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)
        return cls(torch.zeros(rows, room, dtype=torch.int64), logps, entropies, length, stopped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a graph is made for."""

    places: int
    """Rows that are decoded at once."""
    room: int
    """Tokens of a row at most."""
    prompts: int
    """Prompts that the rows belong to."""
    width: int
    """Slots of a prompt."""
    tiles: int
    """Tiles of rows of one prompt, now and when rows replace others."""
    temperature: float
    """0 takes the likeliest token."""
    stop_ids: tuple[int, ...]
    """Tokens that end a row."""

    @property
    def slots(self) -> int:
        """Keys and values of a layer that the cache has room for."""
        return self.places * self.room + self.prompts * self.width


def decode(
    logp_model: "LogpModel",
    prompts: Sequence[tuple[int, ...]],
    prompt_of: Sequence[int],
    uniforms: Tensor,
    *,
    places: int,
    temperature: float,
    stop_ids: Sequence[int],
    poll: Callable[[], None],
) -> Decoded:
    """Decode all rows, with the graph of the last call where it serves.

    Args:
        prompts: token ids of each prompt.
        prompt_of: the prompt of each row.
        uniforms: `[N, M]` float32 in [0, 1), one per row and token.
    """
    num_rows, room = uniforms.shape
    places = min(places, num_rows)
    shape = Shape(
        places=places,
        room=room,
        prompts=len(prompts),
        width=usual_width(max(map(len, prompts))),
        tiles=len(row_tiles(prompt_of, heads_that_share(logp_model))) if places == num_rows else places,
        temperature=temperature,
        stop_ids=tuple(stop_ids),
    )
    decoder, logp_model.decoder = logp_model.decoder, None
    if decoder is None or not decoder.serves(shape):
        del decoder  # its memory first
        decoder = GraphDecoder(logp_model, shape)
    found = decoder.run(prompts, prompt_of, uniforms, poll)
    if bytes_to_keep(logp_model, shape.slots):
        logp_model.decoder = decoder
    return found


class GraphDecoder:
    """Rows that grow by a token at a time."""

    def __init__(self, logp_model: "LogpModel", shape: Shape) -> None:
        self.logp_model, self.shape = logp_model, shape
        self.device = next(logp_model.model.parameters()).device
        set_shared_attention(logp_model.base)
        self.row_of = torch.full((shape.places,), -1)
        """The row in each place, on the host; -1: none."""
        self.next_row = 0

        def made(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=self.device)

        num, room, self.share = shape.places, shape.room, heads_that_share(logp_model)
        self.tiles, self.tile_of = made(shape.tiles, 1 + QUERIES // self.share), made(num)
        self.count, self.uniforms = made(num), made(num, room, dtype=torch.float32)
        self.u = made(num, dtype=torch.float32)
        # One column more than is read: rows that have ended write there.
        self.tokens = made(num, room + 1, dtype=torch.int64)
        self.logps, self.entropies = (made(num, room + 1, dtype=torch.float32) for _ in range(2))
        self.last, self.drawn, self.slot = (made(num, dtype=torch.int64) for _ in range(3))
        self.ended, self.stopped = (made(num, dtype=torch.bool) for _ in range(2))
        self.every_place, self.every_prompt = (torch.arange(n, device=self.device) for n in (num, shape.prompts))
        self.stop_ids = torch.tensor(shape.stop_ids, dtype=torch.int64, device=self.device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)  # read by no kernel
        self.ids_PL = made(shape.prompts, shape.width, dtype=torch.int64)
        self.place_PL = torch.arange(shape.width, device=self.device).expand(shape.prompts, -1)
        self.lengths_P = made(shape.prompts)
        assert logp_model.head is not None
        self.first_PV = made(shape.prompts, logp_model.head.out_features, dtype=torch.float32)
        config = _config(logp_model)
        heads, size = config.num_key_value_heads, head_size(logp_model)
        arrived = made(shape.tiles, heads)
        self.layers: list[tuple[Tensor, ...]] = []
        for _ in range(config.num_hidden_layers):
            shapes = [(num, heads, room, size)] * 2 + [(shape.prompts, heads, shape.width, size)] * 2
            kept = (torch.empty(s, dtype=next(logp_model.base.parameters()).dtype, device=self.device) for s in shapes)
            self.layers.append((*kept, self.tiles, self.tile_of, self.lengths_P, self.count, arrived))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_of_prompts: torch.cuda.CUDAGraph | None = None
        self.weights: list[int] = []
        """Where the weights of the graphs are."""
        self.num_runs = self.num_steps = 0

    def serves(self, shape: Shape) -> bool:
        """Whether its graphs are for this shape, or for wider prompts, and for weights that are where they were."""
        is_wide_enough = shape.width <= self.shape.width <= 2 * shape.width
        return is_wide_enough and shape == replace(self.shape, width=shape.width) and self.weights == self._weights()

    def _weights(self) -> list[int]:
        model = self.logp_model.model
        return [weight.data_ptr() for weights in (model.parameters(), model.buffers()) for weight in weights]

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        prompt_of: Sequence[int],
        uniforms: Tensor,
        poll: Callable[[], None],
    ) -> Decoded:
        """Decode until all rows have ended."""
        self.num_runs += 1
        self.found = Decoded.blank(*uniforms.shape)
        self.all_prompt_of, self.all_uniforms = torch.tensor(prompt_of, dtype=torch.int32), uniforms
        self.row_of.fill_(-1)
        self.next_row = 0
        self._start(prompts)
        self._fill(torch.arange(len(self.row_of)))
        while True:
            ended, drawn = self.ended.cpu(), self.drawn.cpu()
            if bool(ended.any()) and self.next_row < len(self.all_prompt_of):
                self._collect(ended.nonzero()[:, 0])
                self._fill(ended.nonzero()[:, 0])
                continue
            if bool(ended.all()):
                break
            for _ in range(min(CHECK_EVERY, self.shape.room - int(drawn[~ended].min()))):
                poll()
                self._advance()
        self._collect(torch.arange(len(self.row_of)))
        self.weights = self._weights()
        return self.found

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """What attention of a layer reads and writes besides queries, keys and values."""
        return self.layers[index]

    def prompt_layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Where attention of a layer keeps the prompts' keys and values."""
        return self.layers[index][2:4]  # type: ignore[return-value]

    def _start(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Keys and values of the prompts, and the logits of what follows them."""
        width = self.shape.width
        self.ids_PL.copy_(torch.tensor([list(p) + [0] * (width - len(p)) for p in prompts]))
        self.lengths_P.copy_(torch.tensor([len(p) for p in prompts]))
        if self.graph_of_prompts is None and self.num_runs > 1 and self.ids_PL.numel() <= GRAPH_OF_PROMPTS:
            self.graph_of_prompts = _captured(self._read_prompts, _graph_memory(self.device))
        if self.graph_of_prompts is None:
            self._read_prompts()
        else:
            self.graph_of_prompts.replay()

    def _read_prompts(self) -> None:
        """The prompts are padded on the right, where causal attention does not look."""
        without_cudnn = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(without_cudnn):  # which plans each width for a second
            hidden_PD = self._hidden(
                lambda hidden: hidden[self.every_prompt, self.lengths_P - 1],
                input_ids=self.ids_PL,
                attention_mask=self.mask,
                position_ids=self.place_PL,
                prompt_rows=self,
                use_cache=False,
            )
        self.first_PV.copy_(self._logits(hidden_PD))

    def _fill(self, places: Tensor) -> None:
        """Put the next rows into these places, and draw their first token."""
        places = places[: len(self.all_prompt_of) - self.next_row]
        rows = torch.arange(self.next_row, self.next_row + len(places))
        self.next_row += len(places)
        self.row_of[places] = rows
        at = places.to(self.device)
        tiles = row_tiles(self.all_prompt_of[self.row_of.clamp(min=0)].tolist(), self.share)
        self.tiles[len(tiles) :] = -1
        self.tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
        at_tile = {row: i for i, (_, *members) in enumerate(tiles) for row in members}
        self.tile_of.copy_(torch.tensor([at_tile[place] for place in range(len(self.row_of))]))
        prompt_of = self.all_prompt_of[rows].to(self.device)
        self.slot[at] = self.lengths_P[prompt_of].long() - 1
        self.uniforms[at] = self.all_uniforms[rows].to(self.device)
        self.u[at] = self.uniforms[at, 0]
        for state in (self.drawn, self.ended, self.stopped):
            state[at] = 0
        self._draw(self.first_PV[prompt_of], at, self.u[at])

    def _collect(self, places: Tensor) -> None:
        """Bring the rows in these places to the host; the places are empty then."""
        places = places[self.row_of[places] >= 0]
        rows, at, found = self.row_of[places], places.to(self.device), self.found
        for kept, drawn in ((found.tokens, self.tokens), (found.logps, self.logps), (found.entropies, self.entropies)):
            kept[rows] = drawn[at, : self.shape.room].cpu()
        found.length[rows], found.stopped[rows] = self.drawn[at].cpu(), self.stopped[at].cpu()
        self.row_of[places] = -1

    def _advance(self) -> None:
        """One more token of each row: by a graph, once kernels for these shapes have been compiled and run."""
        self.num_steps += 1
        shapes = tuple(x.shape for x in self.layers[0])
        if self.num_steps <= 2 and shapes not in self.logp_model.decoded:
            self._step()
            return
        self.logp_model.decoded.add(shapes)
        if self.graph is None:
            self.graph = _captured(self._step, _graph_memory(self.device))
        self.graph.replay()

    def _step(self) -> None:
        with joined_products(self.logp_model.base):
            hidden_ND = self._hidden(
                lambda hidden: hidden[:, 0],
                input_ids=self.last[:, None],
                attention_mask=self.mask,
                position_ids=self.slot[:, None],
                decode_rows=self,
                use_cache=False,
            )
        self._draw(self._logits(hidden_ND), self.every_place, self.u)

    def _hidden(self, take: Callable[[Tensor], Tensor], **keywords: Any) -> Tensor:
        """Hidden states of a slot of each row."""
        return self.logp_model.read(keywords, take, lambda hidden_ND: hidden_ND)

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """Float32 logits, as the trainer has them."""
        head = self.logp_model.head
        assert head is not None
        logits_NV = torch.mm(hidden_ND.to(head.weight.dtype), head.weight.T, out_dtype=torch.float32)  # type: ignore[call-overload]
        return head.shaped(logits_NV if head.bias is None else logits_NV + head.bias.float())

    def _draw(self, logits_NV: Tensor, place_N: Tensor, u_N: Tensor) -> None:
        """Draw a token for each of these places, and note it."""
        if self.shape.temperature == 0:
            token_N = logits_NV.argmax(-1)
            logp_N = logits_NV.log_softmax(-1).gather(1, token_N[:, None])[:, 0]
            entropy_N = torch.zeros_like(logp_N)
        else:
            token_N, logp_N, entropy_N = draw_tokens(logits_NV.contiguous(), u_N, self.shape.temperature)
        drawn = (place_N, token_N, logp_N, entropy_N)
        kept = (self.tokens, self.logps, self.entropies, self.last, self.drawn, self.count, self.slot, self.u)
        note_tokens(*drawn, self.uniforms, self.stop_ids, *kept, self.stopped, self.ended)


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
    one = torch.ones(1, dtype=torch.float32, device=device)
    anchor = _captured(lambda: one.add_(1), None)
    _anchors.append((anchor, one))
    return anchor.pool()


_anchors: list[Any] = []


def can_decode(logp_model: "LogpModel") -> bool:
    """Whether the model can be decoded in graphs: on a GPU, in half precision, with attention of one kind."""
    weight = next(logp_model.model.parameters())
    if (
        not weight.is_cuda
        or weight.element_size() != 2
        or logp_model.head is None
        or refusal(logp_model.base) is not None
    ):
        return False
    config = _config(logp_model)
    has_window = bool(config.to_dict().get("sliding_window"))
    return set(getattr(config, "layer_types", None) or ()) <= {"full_attention"} and not has_window


def _config(logp_model: "LogpModel") -> Any:
    return logp_model.base.config.get_text_config()  # type: ignore[union-attr]


def heads_that_share(logp_model: "LogpModel") -> int:
    """Query heads that share a key head."""
    config = _config(logp_model)
    return config.num_attention_heads // config.num_key_value_heads


def head_size(logp_model: "LogpModel") -> int:
    """Numbers of a key."""
    config = _config(logp_model)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def bytes_of_token(logp_model: "LogpModel") -> int:
    """Bytes of the keys and values of a token."""
    config = _config(logp_model)
    return config.num_hidden_layers * config.num_key_value_heads * head_size(logp_model) * 2 * 2


def bytes_to_keep(logp_model: "LogpModel", tokens: int) -> int:
    """Bytes of a cache for so many tokens, if it is small enough to be kept for the next step; else 0."""
    size = bytes_of_token(logp_model) * tokens
    device = next(logp_model.model.parameters()).device
    return size if size <= SHARE_TO_KEEP * torch.cuda.get_device_properties(device).total_memory else 0


def rows_that_fit(logp_model: "LogpModel", max_new_tokens: int) -> int:
    """Rows of the cache that the free memory has room for."""
    config = _config(logp_model)
    per_row = bytes_of_token(logp_model) * max_new_tokens
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free += 0 if logp_model.decoder is None else bytes_of_token(logp_model) * logp_model.decoder.shape.slots
    return max(int(free * SHARE_OF_MEMORY) // (per_row + 12 * config.vocab_size), 1)
