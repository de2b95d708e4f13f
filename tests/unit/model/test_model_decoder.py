"""Decoding in places: rows that replace others, on the CPU without graphs, in Triton's interpreter."""

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from gruppo.model import TransformersModel, decoder
from gruppo.model.decoder import Decoded, GraphDecoder, Shape

PROMPTS, OWNER = [(3, 5, 7), (2,), (9, 8, 1, 4)], [0, 0, 1, 1, 2, 2, 0]
STOP_IDS, TEMPERATURE, ROOM = [6, 1, 12, 15], 0.9, 7


class EagerDecoder(GraphDecoder):
    """Without graphs, and with a product that a CPU has."""

    def _advance(self) -> None:
        self.num_steps += 1
        self._step()

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        assert self.logp_model.head is not None
        return self.logp_model.head.logits(hidden_ND).float()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter, in places that are masked
@torch.no_grad()
def test_rows_that_replace_others_draw_what_they_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "CHECK_EVERY", 2)
    monkeypatch.setattr(decoder, "GRAPH_OF_PROMPTS", 0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=24, initializer_range=0.3)
    model = TransformersModel(Qwen3ForCausalLM(config).eval(), device="cpu", compile=False, layout="padded")
    uniforms = torch.rand(len(OWNER), ROOM, generator=torch.Generator().manual_seed(1))
    found: dict[int, Decoded] = {}
    steps = {}
    for places in (7, 2):
        tiles = 3 if places == 7 else 2  # up to 8 rows of a prompt in each
        shape = Shape(
            places=places, room=ROOM, prompts=3, width=4, tiles=tiles, temperature=TEMPERATURE, stop_ids=tuple(STOP_IDS)
        )
        rows = EagerDecoder(model.logp_model, shape)
        if places == 2:
            rows.run([(1, 1, 1), (2, 2), (3, 3)], OWNER[:3], uniforms[4:], lambda: None)  # leaves nothing behind
            rows.num_steps = 0
        found[places] = rows.run(PROMPTS, OWNER, uniforms, lambda: None)
        steps[places] = rows.num_steps
    every, few = found[7], found[2]
    lengths = every.length.tolist()
    assert few.length.tolist() == lengths and torch.equal(few.stopped, every.stopped)
    assert 0 < int(every.stopped.sum()) < 7 and len(set(lengths)) > 3  # rows end at different tokens
    waves = sum(max(lengths[i : i + 2]) for i in range(0, 7, 2))
    assert steps[2] < waves  # fewer than two rows at a time that wait for each other
    for row, number in enumerate(OWNER):  # each row alone: the whole sequence through the model for every token
        tokens = list(PROMPTS[number])
        for n in range(lengths[row]):
            logits = model.next_logits([tuple(tokens)])[0].double() / TEMPERATURE
            token = int((logits.softmax(0).cumsum(0) > uniforms[row, n]).nonzero()[0])
            assert int(few.tokens[row, n]) == int(every.tokens[row, n]) == token, (row, n)
            assert abs(float(few.logps[row, n]) - float(logits.log_softmax(0)[token])) < 1e-4
            tokens.append(token)
        assert (tokens[-1] in STOP_IDS) == bool(few.stopped[row])
