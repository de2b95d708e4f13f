"""The head on a GPU: every route against float32, all losses, sizes and extremes, memory, and no host sync.

CI has no GPU; there these tests are skipped. On a machine with one: `pytest tests/gpu`, or without pytest
`PYTHONPATH=src python tests/gpu/test_head_on_gpu.py`, which runs every test and prints its name.
"""

import statistics
import sys

import torch

try:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]
except ImportError:  # run as a script on a machine without pytest
    pytest = None

from gruppo.kernel import Head, LogitShape
from gruppo.kernel.head import FUSED, TORCH, TRITON
from gruppo.loss import CISPOLoss, DAPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from gruppo.loss.inputs import align
from gruppo.metric import GRPOMetric
from gruppo.model.logp_model import LossWalk

ROUTES = (FUSED, TRITON, TORCH)


def problem(num_rows, width, vocabulary, seed=0, spread=1.0):
    draw = torch.Generator(device="cuda").manual_seed(seed)
    randn = lambda *size: torch.randn(*size, device="cuda", generator=draw)  # noqa: E731
    hidden = randn(num_rows, width).bfloat16()
    weight = (spread * randn(vocabulary, width) * width**-0.5).bfloat16()
    labels = torch.randint(0, vocabulary, (num_rows,), device="cuda", generator=draw)
    return hidden, weight, labels, draw


def exact(hidden, weight, labels, shape=None):
    """Leaves in float64 and log-probs and entropies with their graph."""
    shape = shape or LogitShape()
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    z = h @ w.T * shape.scale
    z = z if shape.soft_cap is None else shape.soft_cap * torch.tanh(z / shape.soft_cap)
    log_p = (z / shape.temperature).log_softmax(-1)
    return h, w, log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def relative(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def test_every_vocabulary_size_on_every_route():
    for vocabulary in (32, 1000, 32000, 50257, 128256, 151936, 262144):
        for num_rows in (1, 130):
            hidden, weight, labels, draw = problem(num_rows, 256, vocabulary)
            factor = torch.randn(num_rows, device="cuda", generator=draw)
            h, w, logps, entropies = exact(hidden, weight, labels)
            grad_hidden, grad_weight = torch.autograd.grad((factor * logps).sum(), (h, w))
            for route in ROUTES:
                head = Head(weight, route=route)
                result = head.train(hidden, labels, lambda rows, _l, _e, f=factor: (f[rows], None))
                where = (vocabulary, num_rows, route)
                assert (result.logps - logps).abs().max() < 1e-4, where
                assert (result.entropies - entropies).abs().max() < 1e-4, where
                assert relative(result.d_hidden, grad_hidden) < 3e-3, where
                assert relative(result.d_weight, grad_weight) < 3e-3, where
                scored = head.score(hidden, labels)
                assert torch.equal(scored[0], result.logps) and torch.equal(scored[1], result.entropies), where


def test_no_tokens_on_every_route():
    hidden, weight, labels, _ = problem(0, 256, 1000)
    for route in ROUTES:
        result = Head(weight, route=route).train(hidden, labels, lambda rows, logps, _: (logps, None))
        assert torch.equal(result.d_weight, torch.zeros_like(result.d_weight)), route


def test_extreme_logits_are_right_on_every_route():
    weight = torch.zeros(1000, 64, device="cuda", dtype=torch.bfloat16)
    weight[3, 0], weight[4, 0] = 1e4, -1e4
    hidden = torch.zeros(3, 64, device="cuda", dtype=torch.bfloat16)
    hidden[:, 0] = 1.0
    labels = torch.tensor([3, 4, 5], device="cuda")
    h, w, logps, _ = exact(hidden, weight, labels)
    grad_hidden, _ = torch.autograd.grad(logps.sum(), (h, w))
    for route in ROUTES:
        result = Head(weight, route=route).train(hidden, labels, lambda rows, logps, _: (torch.ones_like(logps), None))
        torch.testing.assert_close(result.logps.double(), logps.detach(), rtol=1e-6, atol=1e-4)
        assert relative(result.d_hidden, grad_hidden) < 3e-3, route


def test_scaled_and_capped_logits_on_every_route():
    shapes = [
        LogitShape(temperature=0.7),
        LogitShape(scale=0.25, soft_cap=3.0, temperature=1.3),
    ]
    for shape in shapes:
        hidden, weight, labels, draw = problem(200, 128, 10000, spread=4.0)
        a, b = (torch.randn(200, device="cuda", generator=draw) for _ in range(2))
        for entropy in (False, True):
            h, w, logps, entropies = exact(hidden, weight, labels, shape)
            total = (a * logps).sum() + (b * entropies).sum() * entropy
            grad_hidden, grad_weight = torch.autograd.grad(total, (h, w))
            for route in ROUTES:
                head = Head(weight, shape=shape, route=route)
                ask = lambda rows, _l, _e, a=a, b=b, entropy=entropy: (a[rows], b[rows] if entropy else None)  # noqa: E731
                result = head.train(hidden, labels, ask, entropy_gradient=entropy)
                where = (shape, entropy, route)
                assert (result.logps - logps).abs().max() < 1e-4, where
                assert relative(result.d_hidden, grad_hidden) < 4e-3, where
                assert relative(result.d_weight, grad_weight) < 4e-3, where


def test_every_loss_through_the_head_is_that_of_float64_in_every_layout():
    lengths = [200, 1, 700, 33, 500, 66]
    num_rows = sum(lengths)
    hidden, weight, labels, draw = problem(num_rows, 256, 32000)
    randn = lambda *size: torch.randn(*size, device="cuda", generator=draw)  # noqa: E731
    h, w, logps, entropies = exact(hidden, weight, labels)
    old, ref = (logps.detach() + 0.1 * randn(num_rows)).float(), (logps.detach() + 0.1 * randn(num_rows)).float()
    inputs = {"labels": labels, "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).cuda()}
    arguments = {"advantages": randn(len(lengths)), "old_logps": old, "ref_logps": ref}
    worst = 0.0
    for cls in (GRPOLoss, GSPOLoss, CISPOLoss, SAPOLoss, DAPOLoss):
        for options in ({}, {"beta": 0.05}, {"beta": 0.05, "entropy_coef": 0.01}):
            loss = cls(**options)
            expected = loss(inputs, {"logps": logps, "entropies": entropies}, **arguments)
            grad_hidden, grad_weight = torch.autograd.grad(expected.loss, (h, w), retain_graph=True)
            for route in ROUTES:
                for scratch in (None, 400 * 32000 * 6):  # everything at once; windows shorter than a sequence
                    head = Head(weight, route=route, scratch_bytes=scratch)
                    blank = torch.zeros(num_rows, device="cuda")
                    walk = LossWalk(loss, lambda _, b=blank: align(inputs, {"logps": b}, **arguments), lengths)
                    result, value = walk(head, hidden, labels, trains=True)
                    where = (cls.__name__, options, route, scratch)
                    assert abs(value.item() - expected.loss.item()) < 1e-4 * max(1, abs(expected.loss.item())), where
                    worst = max(worst, relative(result.d_hidden, grad_hidden), relative(result.d_weight, grad_weight))
                    assert worst < 3e-3, (where, worst)
    print(f"  worst relative error of a gradient: {worst:.1e}")


def test_scratch_is_flat_in_the_number_of_tokens():
    weight = problem(1, 1024, 151936)[1]
    for num_rows in (16384, 65536, 262144):
        hidden = torch.randn(num_rows, 1024, device="cuda").bfloat16()
        labels = torch.randint(0, 151936, (num_rows,), device="cuda")
        head = Head(weight)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = head.train(hidden, labels, lambda rows, logps, _: (torch.ones_like(logps), None))
        results = sum(
            x.numel() * x.element_size() for x in (result.d_hidden, result.d_weight, result.logps, result.entropies)
        )
        scratch = (torch.cuda.max_memory_allocated() - before - results) / 2**30
        print(f"  scratch at {num_rows} tokens: {scratch:.3f} GiB")
        assert scratch <= 1.25, num_rows
        del hidden, labels, result


def test_dead_rows_cost_nothing():
    """Half of the sequences without signal, left out as TransformersModel does: at most 0.65 of the time."""
    hidden, weight, labels, _ = problem(16384, 2560, 151936)
    ask = lambda rows, logps, _: (torch.ones_like(logps), None)  # noqa: E731

    def seconds(rows):
        times = []
        for turn in range(8):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            Head(weight).train(hidden[:rows], labels[:rows], ask)
            end.record()
            torch.cuda.synchronize()
            times += [start.elapsed_time(end)] * (turn >= 2)
        return statistics.median(times)

    ratio = seconds(8192) / seconds(16384)
    print(f"  half of the rows: {ratio:.3f} of the time")
    assert ratio <= 0.65


def test_loss_and_metric_make_the_host_wait_nowhere():
    labels = torch.randint(0, 100, (8, 64), device="cuda")
    labels[:, :9] = -100
    logps = (-torch.rand(8, 64, device="cuda")).requires_grad_()
    old, advantages = logps.detach() + 0.1, torch.randn(8, device="cuda")
    entropies = torch.rand(8, 64, device="cuda")
    packed = {"labels": labels.reshape(-1), "cu_seqlens": torch.arange(9, device="cuda") * 64}
    metric = GRPOMetric(top_k_kl=5)
    losses = [GRPOLoss(), GSPOLoss(beta=0.1), CISPOLoss(entropy_coef=0.1), DAPOLoss()]
    for mode in ("default", "error"):  # the first round compiles and allocates
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for loss in losses:
                for inputs, shape in (({"labels": labels}, (8, 64)), (packed, (512,))):
                    outputs = {"logps": logps.view(shape), "entropies": entropies.view(shape)}
                    arguments = {"old_logps": old.view(shape), "advantages": advantages}
                    loss(inputs, outputs, ref_logps=old.view(shape), **arguments).loss.backward()
                    metric.accumulate(inputs, {k: v.detach() for k, v in outputs.items()}, **arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert metric.calculate()["train/approx_kl"] > 0


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_") and name in (sys.argv[1:] or [name]):
            test()
            print("passed", name, flush=True)
