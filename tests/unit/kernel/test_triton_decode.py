"""Decoding kernels against plain torch, through Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gruppo.kernel import triton_decode
from gruppo.kernel.triton_decode import decode_attention, draw_tokens, note_tokens, row_tiles
from gruppo.sampler.torch_sampler import draw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


@pytest.mark.parametrize("least", [16, 256])
@pytest.mark.parametrize(("width", "kv_heads"), [(16, 2), (24, 2), (16, 1), (16, 6)])
def test_a_new_token_attends_to_its_prompt_its_own_tokens_and_itself(width, kv_heads, least, monkeypatch):
    monkeypatch.setattr(triton_decode, "LEAST_PROMPT", least)  # in several parts, or in one
    monkeypatch.setattr(triton_decode, "LEAST_OWN", least)
    monkeypatch.setitem(triton_decode.SETTINGS, "STEP", 16)
    draw_from = torch.Generator().manual_seed(0)
    rows, heads, room, longest = 5, 6, 80, 70
    q, k, v = (torch.randn(rows, h, width, generator=draw_from) for h in (heads, kv_heads, kv_heads))
    own_k, own_v = (torch.randn(rows, kv_heads, room, width, generator=draw_from) for _ in range(2))
    prompt_k, prompt_v = (torch.randn(2, kv_heads, longest, width, generator=draw_from) for _ in range(2))
    prompt_of = [1, 0, 1, 0, 1]
    length = torch.tensor([70, 4], dtype=torch.int32)
    count = torch.tensor([0, 3, 70, 1, 79], dtype=torch.int32)
    used = row_tiles(prompt_of, heads // kv_heads)
    tiles = torch.tensor([*used, [-1] * len(used[0])], dtype=torch.int32)
    tile_of = torch.tensor([next(i for i, t in enumerate(used) if n in t[1:]) for n in range(rows)], dtype=torch.int32)
    kept_k, kept_v = own_k.clone(), own_v.clone()
    arrived = torch.zeros(len(tiles), kv_heads, dtype=torch.int32)
    out = decode_attention(q, k, v, own_k, own_v, prompt_k, prompt_v, tiles, tile_of, length, count, arrived, 0.3)
    assert not arrived.any()
    for n in range(rows):
        p, c = prompt_of[n], int(count[n])
        for h in range(heads):
            g = h // (heads // kv_heads)
            keys = torch.cat([prompt_k[p, g, : length[p]], kept_k[n, g, :c], k[n, g][None]]).double()
            values = torch.cat([prompt_v[p, g, : length[p]], kept_v[n, g, :c], v[n, g][None]]).double()
            expected = (keys @ q[n, h].double() * 0.3).softmax(0) @ values
            torch.testing.assert_close(out[n, h].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(own_k[n, :, c], k[n]) and torch.equal(own_v[n, :, c], v[n])
        others = torch.arange(room) != c
        assert torch.equal(own_k[n][:, others], kept_k[n][:, others])


@pytest.mark.parametrize("columns", [5, 1024, 3000])
def test_tokens_are_where_the_cumulative_probability_passes_u(columns):
    draw_from = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(40, columns, generator=draw_from)
    logits[3, :-1] = -torch.inf  # one token has all the probability
    u = torch.rand(40, generator=draw_from)
    u[0], u[1] = 0.0, 1 - 2**-24
    token, logp, entropy = draw_tokens(logits, u, 0.7)
    log_p = (logits / 0.7).double().log_softmax(-1)
    expected = draw(log_p.exp(), u.double())
    same = token == expected
    assert same.float().mean() > 0.9  # the others lie where u meets a boundary, to rounding
    passed = log_p.exp().cumsum(-1)
    for row in range(40):
        low = passed[row, token[row] - 1] if token[row] else 0.0
        assert low - 1e-5 <= u[row] <= passed[row, token[row]] + 1e-5
    torch.testing.assert_close(logp.double(), log_p.gather(1, token[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    p = log_p.exp()
    torch.testing.assert_close(entropy.double(), -torch.xlogy(p, p).sum(-1), rtol=1e-5, atol=1e-5)


def test_noted_tokens_move_their_places_on_and_leave_the_others():
    uniforms = torch.arange(12.0).reshape(4, 3)
    tokens, logps, entropies = (torch.full((4, 4), -1, dtype=d) for d in (torch.int64, torch.float32, torch.float32))
    last, slot = torch.tensor([9, 9, 9, 9]), torch.tensor([5, 5, 5, 5])
    drawn, count = torch.tensor([0, 1, 2, 1]), torch.tensor([-1, 0, 1, 0], dtype=torch.int32)
    u = torch.full((4,), -1.0)
    stopped, ended = torch.tensor([False, False, False, True]), torch.tensor([False, False, False, True])
    places = torch.tensor([3, 2, 0])  # has ended; has room for one more; draws an end token
    token, logp, entropy = torch.tensor([40, 41, 42]), torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0.1, 0.2, 0.3])
    note_tokens(places, token, logp, entropy, uniforms, torch.tensor([7, 42]), tokens, logps, entropies, last, drawn,
                count, slot, u, stopped, ended)  # fmt: skip
    assert tokens.tolist() == [[42, -1, -1, -1], [-1] * 4, [-1, -1, 41, -1], [-1, -1, -1, 40]]
    assert logps[2].tolist() == [-1, -1, -2, -1] and logps[0, 0] == -3 and float(entropies[2, 2]) == pytest.approx(0.2)
    assert drawn.tolist() == [1, 1, 3, 1] and count.tolist() == [0, 0, 2, 0] and slot.tolist() == [6, 5, 6, 5]
    assert stopped.tolist() == [True, False, False, True] and ended.tolist() == [True, False, True, True]
    assert u.tolist() == [1.0, -1.0, 8.0, 10.0]  # of the last draw again where there is no next
