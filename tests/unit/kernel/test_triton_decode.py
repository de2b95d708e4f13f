"""Decoding kernels against plain torch, through Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gruppo.kernel.triton_decode import decode_attention, draw_tokens, row_tiles
from gruppo.sampler.torch_sampler import draw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


@pytest.mark.parametrize(("width", "kv_heads"), [(16, 2), (24, 2), (16, 1), (16, 6)])
def test_a_new_token_attends_to_its_prompt_its_own_tokens_and_itself(width, kv_heads):
    draw_from = torch.Generator().manual_seed(0)
    rows, heads, room, longest = 5, 6, 80, 70
    q, k, v = (torch.randn(rows, h, width, generator=draw_from) for h in (heads, kv_heads, kv_heads))
    own_k, own_v = (torch.randn(rows, kv_heads, room, width, generator=draw_from) for _ in range(2))
    prompt_k, prompt_v = (torch.randn(2, kv_heads, longest, width, generator=draw_from) for _ in range(2))
    prompt_of = [1, 0, 1, 0, 1]
    first = torch.tensor([0, 66], dtype=torch.int32)
    count = torch.tensor([0, 3, 70, 1, 79], dtype=torch.int32)
    tiles = row_tiles(prompt_of, heads // kv_heads)
    kept_k, kept_v = own_k.clone(), own_v.clone()
    out = decode_attention(q, k, v, own_k, own_v, prompt_k, prompt_v, tiles, first, count, 0.3)
    for n in range(rows):
        p, c = prompt_of[n], int(count[n])
        for h in range(heads):
            g = h // (heads // kv_heads)
            keys = torch.cat([prompt_k[p, g, first[p] :], kept_k[n, g, :c], k[n, g][None]]).double()
            values = torch.cat([prompt_v[p, g, first[p] :], kept_v[n, g, :c], v[n, g][None]]).double()
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
