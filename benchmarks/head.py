"""The head on a GPU: time against the products that any exact method must do, memory, and accuracy.

    python benchmarks/head.py                     the table; needs a CUDA device
    python benchmarks/head.py --peers DIR         also TRL's and Liger's kernels, unpacked in DIR (pure Python packages)
    python benchmarks/head.py --quick             one shape, for a first look

floor      logits, d_hidden and (trained) d_weight through cuBLAS over the scored tokens, bf16, nothing else
x floor    forward + backward of GRPO's loss through the head, over that, in the same run
scratch    peak memory beyond inputs and results (d_hidden, d_weight)
errors     relative to float32 logits and float32 products, on 2048 rows

Writes benchmarks/results/head.json and head.png. Method: medians after warm-up, CUDA events, each contender in a block
of its own between two blocks of the floor.
"""

import argparse
import json
import statistics
import sys
import types
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gruppo.kernel.gather import take_rows  # noqa: E402
from gruppo.kernel.head import Head  # noqa: E402
from gruppo.loss import GRPOLoss  # noqa: E402
from gruppo.loss.inputs import align  # noqa: E402
from gruppo.model.head_step import loss_through_head  # noqa: E402

# name: (rows of the padded batch, sequences, hidden size, vocabulary, trained, share of slots scored)
SHAPES = {
    "H 2560, V 152k, trained": (16384, 16, 2560, 151936, True, 1.0),
    "H 2560, V 152k, frozen": (16384, 16, 2560, 151936, False, 1.0),
    "H 4096, V 128k, frozen": (32768, 32, 4096, 128256, False, 1.0),
    "H 1024, V 152k, trained": (16384, 16, 1024, 151936, True, 1.0),
    "H 2560, V 152k, trained, 77 % scored": (16384, 16, 2560, 151936, True, 0.77),
    "H 2560, V 152k, frozen, 77 % scored": (16384, 16, 2560, 151936, False, 0.77),
}


class Problem:
    """Inputs of one shape: padded slots `[S * L]`, of which some are scored."""

    def __init__(self, slots, sequences, width, vocabulary, trained, share, seed=0):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        randn = lambda *size: torch.randn(*size, device="cuda", generator=generator)  # noqa: E731
        self.sequences, self.trained, self.share = sequences, trained, share
        self.length = slots // sequences
        self.weight = (randn(vocabulary, width) * width**-0.5).bfloat16().requires_grad_(trained)
        self.hidden = randn(slots, width).bfloat16().requires_grad_()
        self.labels = torch.randint(0, vocabulary, (slots,), device="cuda", generator=generator)
        ends = [max(1, round(self.length * min(1.0, 2 * share * (i + 0.5) / sequences))) for i in range(sequences)]
        if share == 1:
            ends = [self.length] * sequences
        self.lengths = ends
        mask = torch.zeros(sequences, self.length, dtype=torch.bool)
        for row, end in enumerate(ends):
            mask[row, :end] = True
        self.mask = mask.cuda()
        self.scored = self.mask.reshape(-1).nonzero().squeeze(1)
        self.offsets = torch.tensor([0, *ends]).cumsum(0).cuda()
        self.advantages = randn(sequences)
        with torch.no_grad():
            noise = 0.05 * randn(slots)
            logps = Head(self.weight.detach()).score(self.hidden.detach(), self.labels)[0]
            self.old = logps + noise

    def clear(self):
        self.hidden.grad = self.weight.grad = None


def ours(p: Problem):
    """Gather the scored rows, walk the head, scatter d_hidden back: all that a trainer does with it."""
    all_scored = len(p.scored) == len(p.labels)
    rows = p.hidden if all_scored else take_rows(p.hidden, p.scored)
    labels = p.labels if all_scored else p.labels[p.scored]

    def inputs():
        return align(
            {"labels": labels, "cu_seqlens": p.offsets},
            {"logps": torch.zeros(len(labels), device="cuda")},
            advantages=p.advantages,
            old_logps=p.old[p.scored],
        )

    head = Head(p.weight.detach())
    output, result = loss_through_head(
        head, rows.detach(), labels, p.loss, inputs, lengths=None, needs_weight=p.trained
    )
    rows.backward(result.d_hidden)
    if p.trained:
        p.d_weight = result.d_weight
    return output.loss, result.logps


def through_autograd(logps_of):
    """A contender that gives log-probs of all padded slots; the loss and the backward are plain autograd."""

    def run(p: Problem):
        logps = logps_of(p)
        shape = (p.sequences, p.length)
        labels = torch.where(p.mask, p.labels.view(shape), -100)
        output = p.loss(
            {"labels": labels}, {"logps": logps.view(shape)}, advantages=p.advantages, old_logps=p.old.view(shape)
        )
        output.loss.backward()
        if p.trained:
            p.d_weight = p.weight.grad
        return output.loss.detach(), logps.detach()[p.scored]

    return run


def naive(p: Problem):
    return (p.hidden @ p.weight.T).float().log_softmax(-1).gather(-1, p.labels[:, None]).squeeze(-1)


class _Absent(types.ModuleType):
    """Stands in for a package that a peer imports without using it here."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def contenders(peers: str | None):
    found = {"gruppo": ours, "torch, full logits": through_autograd(naive)}
    if peers is None:
        return found
    sys.path.insert(0, peers)
    sys.modules.setdefault("datasets", _Absent("datasets"))  # TRL imports it at the top and its kernels never use it
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        found["TRL chunked"] = through_autograd(
            lambda p: ChunkedLogProbFunction.apply(p.hidden, p.weight, None, p.labels, 1.0, 8192, None, 1.0, ())[0]
        )
        from trl.trainer.utils import selective_log_softmax

        found["TRL logits kernel"] = through_autograd(lambda p: selective_log_softmax(p.hidden @ p.weight.T, p.labels))
    except Exception as error:  # a peer that does not import here is left out, and said so
        print(f"TRL is left out: {error}")
    try:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        def liger(p: Problem):
            shape = (p.sequences, p.length)
            hidden = p.hidden.view(*shape, -1)
            # its kernel drops the last position of the logits, so one more row is computed per sequence
            hidden = torch.cat([hidden, hidden[:, -1:]], 1)
            loss = triton_grpo_loss(
                hidden @ p.weight.T,
                p.old.view(shape),
                None,
                p.labels.view(shape),
                p.advantages,
                completion_mask=p.mask.int(),
                temperature=1.0,
                beta=0.0,
                eps_low=0.2,
                eps_high=0.2,
                loss_type="grpo",
                reduce=True,
            )[0]
            loss.backward()
            if p.trained:
                p.d_weight = p.weight.grad
            return loss.detach(), None

        found["Liger Triton, full logits"] = liger
    except Exception as error:  # as above
        print(f"Liger is left out: {error}")
    return found


def floor(p: Problem):
    """The products alone, over the scored tokens."""
    rows = p.hidden.detach()[p.scored]
    weight = p.weight.detach()
    logits = torch.empty(len(rows), len(weight), dtype=torch.bfloat16, device="cuda").normal_()

    def run():
        torch.mm(rows, weight.T, out=logits)
        torch.mm(logits, weight)
        if p.trained:
            torch.mm(logits.T, rows)

    return run


def milliseconds(run):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def errors(run, p: Problem) -> dict[str, float]:
    """Against float32 logits and products."""
    p.clear()
    loss, logps = run(p)
    got_hidden, got_weight = p.hidden.grad.clone(), p.d_weight.clone() if p.trained else None
    p.clear()
    exact_hidden, exact_weight = p.hidden.detach().float().requires_grad_(), p.weight.detach().float().requires_grad_()
    exact = (exact_hidden @ exact_weight.T).log_softmax(-1).gather(-1, p.labels[:, None]).squeeze(-1)
    shape = (p.sequences, p.length)
    labels = torch.where(p.mask, p.labels.view(shape), -100)
    old = p.old.view(shape)
    true = p.loss({"labels": labels}, {"logps": exact.view(shape)}, advantages=p.advantages, old_logps=old)
    true.loss.backward()
    relative = lambda a, b: ((a.float() - b).norm() / b.norm()).item()  # noqa: E731
    return {
        "loss": abs(loss.item() - true.loss.item()) / abs(true.loss.item()),
        "logp": float("nan") if logps is None else (logps - exact.detach()[p.scored]).abs().max().item(),
        "d_hidden": relative(got_hidden, exact_hidden.grad),
        "d_weight": float("nan") if got_weight is None else relative(got_weight, exact_weight.grad),
    }


def measure(name, runs, repeats):
    torch.cuda.empty_cache()
    p = Problem(*SHAPES[name])
    p.loss = GRPOLoss()
    rows = []
    times: dict[str, list[float]] = {n: [] for n in ("floor", *runs)}
    memory, left_out = {}, {}
    base_run = floor(p)
    # Each contender runs in a block of its own, so that it meets the clocks and the power draw that it causes itself;
    # the floor is measured at both ends.
    for n in ["floor", *runs, "floor"]:
        for turn in range(repeats + 3):
            p.clear()
            p.d_weight = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                took = milliseconds(base_run if n == "floor" else lambda n=n: runs[n](p))
            except Exception as error:  # a peer that cannot take this shape
                left_out[n] = str(error).splitlines()[0][:100]
                del times[n]
                break
            if turn >= 3:
                times[n].append(took)
            results = p.hidden.numel() * 2 + (p.weight.numel() * 4 if p.trained else 0)
            memory[n] = torch.cuda.max_memory_allocated() - before - results
    del base_run
    base = statistics.median(times["floor"])
    for n in times:
        if n != "floor":
            took = statistics.median(times[n])
            scratch = memory[n] / 2**30
            rows.append({"shape": name, "method": n, "ms": took, "x_floor": took / base, "scratch_gib": scratch})
    for n, why in left_out.items():
        print(f"{name}: {n} left out: {why}")
    return base, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="folder with unpacked peers")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/head.py needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    runs = contenders(given.peers)
    names = list(SHAPES)[:2] if given.quick else list(SHAPES)
    table, floors = [], {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for name in names:
        floors[name], rows = measure(name, runs, given.repeats)
        table += rows
        print(f"{name}: floor {floors[name]:.2f} ms")
        for row in rows:
            figures = f"{row['ms']:8.2f} ms  {row['x_floor']:.3f} x floor  scratch {row['scratch_gib']:.2f} GiB"
            print(f"  {row['method']:<28}{figures}")
    small = Problem(2048, 8, 2560, 151936, True, 0.77)
    small.loss = GRPOLoss()
    accuracy = {}
    for n, run in runs.items():
        try:
            accuracy[n] = errors(run, small)
        except Exception as error:  # as above
            print(f"errors of {n}: {str(error)[:100]}")
            continue
        print(f"  {n:<28}" + "  ".join(f"{k} {v:.1e}" for k, v in accuracy[n].items()))
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "floor_ms": floors}
    (folder / "head.json").write_text(json.dumps(report | {"rows": table, "errors": accuracy}, indent=1))


if __name__ == "__main__":
    main()
