"""GRPO loss and metrics against Twinkle and TRL, on a CPU.

    benchmarks/setup_peers.sh .venv-bench
    .venv-bench/bin/python benchmarks/core_cpu.py

`make bench` does both. How to read the figures, and those measured so far: docs/benchmarks.md.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the peers look for a network when imported; none is needed

import torch
import twinkle.loss.grpo
import twinkle.metric.grpo
from timing import Timing, as_json, busy_note, interleave, machine, settle_allocator, table
from torch import Tensor
from trl_loss import TRLLoss

from gruppo.loss import GRPOLoss
from gruppo.metric import GRPOMetric

NUM_ROWS, NUM_COLUMNS, NUM_PROMPT = 64, 2048, 256
CLIP_RANGE = 0.2
LOSS_LIMIT = 1.0  # gruppo's loss may take this share of the faster peer's time
METRIC_LIMIT = 0.5  # and its metrics this share of Twinkle's
WARMUP = 20
RESULTS = Path(__file__).parent / "results" / "core_cpu.json"

GRUPPO = "gruppo GRPOLoss"
TWINKLE = "Twinkle GRPOLoss"
TRL = "TRL _compute_loss, its loss only"
TRL_WHOLE = "TRL _compute_loss, whole"
GRUPPO_METRIC = "gruppo GRPOMetric"
TWINKLE_METRIC = "Twinkle GRPOMetric"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A padded batch as it comes from a model: B rows of P prompt and C completion columns, L = P + C."""

    labels: Tensor  # [B, L] int64, -100 in prompts and behind the end of a completion
    logps: Tensor  # [B, L] float32
    old_logps: Tensor  # [B, L] float32
    entropies: Tensor  # [B, L] float32
    advantages: Tensor  # [B] float32


def make_batch() -> Batch:
    """Completions end in the second half or are cut at the last column; 18 % of the ratios leave the band."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_ROWS, NUM_COLUMNS)
    num_completion = NUM_COLUMNS - NUM_PROMPT
    end_B = NUM_PROMPT + torch.randint(num_completion // 2, num_completion * 5 // 4, (NUM_ROWS,), generator=generator)
    column_L = torch.arange(NUM_COLUMNS)
    scored_BL = (column_L >= NUM_PROMPT) & (column_L < end_B[:, None])
    labels = torch.randint(0, 150_000, shape, generator=generator)
    logps = -torch.empty(shape).exponential_(2, generator=generator)
    return Batch(
        labels=labels.masked_fill(~scored_BL, -100),
        logps=logps,
        old_logps=logps + 0.15 * torch.randn(shape, generator=generator),
        entropies=2 * torch.rand(shape, generator=generator),
        advantages=torch.randn(NUM_ROWS, generator=generator),
    )


@dataclass(frozen=True, slots=True)
class LossCall:
    """A loss as a function of nothing, and the leaf whose gradient it fills."""

    forward: Callable[[], Tensor]
    logps: Tensor
    first_column: int = 0

    def __call__(self) -> Tensor:
        self.logps.grad = None
        loss = self.forward()
        loss.backward()
        return loss.detach()


def loss_calls(batch: Batch) -> dict[str, LossCall]:
    """Each contender with a leaf of its own, fed in the form its own trainer would feed it."""
    inputs = {"labels": batch.labels}
    keywords = {"advantages": batch.advantages, "old_logps": batch.old_logps}

    ours = batch.logps.clone().requires_grad_()
    gruppo_loss = GRPOLoss(clip_range=CLIP_RANGE)

    theirs = batch.logps.clone().requires_grad_()
    twinkle_loss = twinkle.loss.grpo.GRPOLoss(epsilon=CLIP_RANGE)

    # TRL scores completion columns only: its trainer never makes log-probs for prompts.
    completion_mask = (batch.labels != -100)[:, NUM_PROMPT:].to(torch.int64)
    trl_inputs = {
        "prompt_ids": torch.zeros(NUM_ROWS, NUM_PROMPT, dtype=torch.int64),
        "prompt_mask": torch.ones(NUM_ROWS, NUM_PROMPT, dtype=torch.int64),
        "completion_ids": batch.labels[:, NUM_PROMPT:].clamp(min=0),
        "completion_mask": completion_mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logps[:, NUM_PROMPT:].contiguous(),
    }
    entropies = batch.entropies[:, NUM_PROMPT:].contiguous()

    def trl(loss_only: bool) -> LossCall:
        logps = batch.logps[:, NUM_PROMPT:].clone().requires_grad_()
        return LossCall(TRLLoss(logps, entropies, trl_inputs, CLIP_RANGE, loss_only), logps, NUM_PROMPT)

    return {
        GRUPPO: LossCall(lambda: gruppo_loss(inputs, {"logps": ours}, **keywords).loss, ours),
        TWINKLE: LossCall(lambda: twinkle_loss(inputs, {"logps": theirs}, **keywords)["loss"], theirs),
        TRL: trl(loss_only=True),
        TRL_WHOLE: trl(loss_only=False),
    }


def check_losses(calls: dict[str, LossCall]) -> None:
    """The same value and the same gradient, or there is nothing to compare."""
    expected, ours = calls[GRUPPO](), calls[GRUPPO].logps
    assert ours.grad is not None and ours.grad.count_nonzero() > 0
    for name, call in calls.items():
        loss = call()
        assert call.logps.grad is not None
        say = f"{name} and {GRUPPO} differ in the {{}}: ".format
        _assert_close(loss, expected, say("loss"), atol=1e-7)
        wanted = ours.grad[:, call.first_column :]
        _assert_close(call.logps.grad, wanted, say("gradient"), atol=1e-5 * wanted.abs().mean().item())


def _assert_close(actual: Tensor, expected: Tensor, intro: str, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol, msg=lambda text: intro + text)


def metric_calls(batch: Batch) -> dict[str, Callable[[], None]]:
    """`accumulate` of metrics that live through all rounds, as in a training step of many micro-batches."""
    metrics, advantages = _new_metrics(), batch.advantages.tolist()
    return {name: lambda name=name: _accumulate(metrics[name], batch, advantages) for name in metrics}


def _new_metrics() -> dict[str, GRPOMetric | twinkle.metric.grpo.GRPOMetric]:
    return {
        GRUPPO_METRIC: GRPOMetric(epsilon=CLIP_RANGE),
        TWINKLE_METRIC: twinkle.metric.grpo.GRPOMetric(epsilon=CLIP_RANGE),
    }


def _accumulate(metric: GRPOMetric | twinkle.metric.grpo.GRPOMetric, batch: Batch, advantages: list[float]) -> None:
    metric.accumulate(
        {"labels": batch.labels},
        {"logps": batch.logps, "entropies": batch.entropies},
        old_logps=batch.old_logps,
        advantages=advantages,  # a list, because Twinkle leaves out the clip rates when they are a tensor
    )


def check_metrics(batch: Batch) -> None:
    """Every key that Twinkle reports, with the same value."""
    metrics = _new_metrics()
    for metric in metrics.values():
        _accumulate(metric, batch, batch.advantages.tolist())
    ours, theirs = metrics[GRUPPO_METRIC].calculate(), metrics[TWINKLE_METRIC].calculate()
    assert len(theirs) >= 11, sorted(theirs)
    for key, value in theirs.items():
        # 1e-6 absolute: Twinkle adds in float32, and the mean of the difference is close to 0
        assert math.isclose(ours[key], value, rel_tol=1e-5, abs_tol=1e-6), f"{key}: gruppo {ours[key]}, Twinkle {value}"


def verdicts(losses: dict[str, Timing], metrics: dict[str, Timing]) -> list[tuple[bool, str]]:
    """Is each goal met, and the sentence that says so."""
    faster = min((TWINKLE, TRL), key=lambda name: losses[name].median)
    loss_share = 1 / losses[faster].ratio
    metric_share = 1 / metrics[TWINKLE_METRIC].ratio
    return [
        (loss_share <= LOSS_LIMIT, f"loss: {loss_share:.2f} of the faster peer ({faster}), limit {LOSS_LIMIT:g}"),
        (metric_share <= METRIC_LIMIT, f"metric: {metric_share:.2f} of Twinkle's time, limit {METRIC_LIMIT:g}"),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"""
Times forward + backward of GRPOLoss and GRPOMetric.accumulate on {NUM_ROWS} x {NUM_COLUMNS} tokens (float32, padded,
{NUM_PROMPT} prompt columns, ragged ends) against Twinkle's classes and TRL's GRPOTrainer._compute_loss. First all are
checked to give the same numbers; then they take turns, so that other load on the machine falls on all alike.

"ratio" is a contender's median over gruppo's: above 1 it is slower than gruppo. TRL's function also joins the model's
input and computes what it logs; it is timed without these and whole, and only the first counts. "lowest" is the lowest
ratio of one round. "CPU" is processor time, in which waiting for a busy machine does not count.

Exit status 1: gruppo's loss takes longer than the faster peer, or its metrics more than {METRIC_LIMIT:g} of Twinkle's.
""",
        epilog="Example: core_cpu.py --threads 1 --repeats 500",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, help="threads torch may use (default: torch's own choice)")
    parser.add_argument(
        "--repeats", type=int, default=200, help="rounds; each times every contender once (default: 200)"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="JSON of the figures (default: benchmarks/results/core_cpu.json)"
    )
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {arguments.repeats}: quartiles need several rounds")
    if arguments.threads is not None and arguments.threads < 1:
        parser.error(f"--threads must be at least 1, got {arguments.threads}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    note = busy_note()
    settle_allocator()
    batch = make_batch()
    calls = loss_calls(batch)
    check_losses(calls)
    check_metrics(batch)

    about = machine() | {name: version(name) for name in ("gruppo", "twinkle-kit", "trl")}
    print(f"{NUM_ROWS} x {NUM_COLUMNS} tokens, float32, {arguments.repeats} rounds")
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    if note:
        print(note, end="\n\n")
    losses = interleave(calls, arguments.repeats, WARMUP)
    print(table("loss, forward + backward", losses), end="\n\n")
    metrics = interleave(metric_calls(batch), arguments.repeats, WARMUP)
    print(table("metric, accumulate", metrics), end="\n\n")

    outcome = verdicts(losses, metrics)
    for is_met, sentence in outcome:
        print(f"{'met ' if is_met else 'MISSED'}  {sentence}")
    record = {
        "machine": about,
        "rounds": arguments.repeats,
        "note": note,
        "loss_ms": as_json(losses),
        "metric_ms": as_json(metrics),
        "goals": [{"met": is_met, "goal": sentence} for is_met, sentence in outcome],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(is_met for is_met, _ in outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
