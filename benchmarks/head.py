"""The head on a GPU: time against the products that any exact method must do, memory, and accuracy.

    python benchmarks/head.py                     the table; needs a CUDA device
    python benchmarks/head.py --peers DIR         also the kernels of TRL, Liger, verl and CCE, unpacked in DIR
    python benchmarks/head.py --quick             two shapes, for a first look
    python benchmarks/head.py --cpu               on a CPU: the walk against plain torch at V = 32000

floor      logits, d_hidden and (trained) d_weight through cuBLAS over the scored tokens, bf16, nothing else
x floor    forward + backward of GRPO's loss through the head, over that, in the same run
scratch    peak memory beyond inputs and results (d_hidden, d_weight)
errors     relative to float32 logits and float32 products, on 2048 rows

Writes benchmarks/results/head.json and head.png. Method: medians after warm-up, CUDA events, each contender in a block
of its own between two blocks of the floor, which are what it is compared with.
"""

import argparse
import json
import statistics
import sys
import time
import types
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gruppo.kernel.head import Head  # noqa: E402
from gruppo.kernel.index import take_unique  # noqa: E402
from gruppo.loss import GRPOLoss  # noqa: E402
from gruppo.loss.inputs import align  # noqa: E402
from gruppo.model.logp_model import LossWalk  # noqa: E402

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
        shortest = 2 * share - 1  # lengths evenly spread from there to 1, so that their mean is the share
        spread = [shortest + (1 - shortest) * (i + 0.5) / sequences for i in range(sequences)]
        ends = [max(1, round(self.length * part)) for part in spread]
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
    rows = p.hidden if all_scored else take_unique(p.hidden, p.scored)
    labels = p.labels if all_scored else p.labels[p.scored]

    def inputs(dtype):
        return align(
            {"labels": labels, "cu_seqlens": p.offsets},
            {"logps": torch.zeros(len(labels), dtype=dtype, device="cuda")},
            advantages=p.advantages,
            old_logps=p.old[p.scored],
        )

    walk = LossWalk(p.loss, inputs, p.lengths)
    result, loss = walk(Head(p.weight.detach()), rows.detach(), labels, p.trained)
    rows.backward(result.d_hidden)
    if p.trained:
        p.d_weight = result.d_weight
    return loss, result.logps


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
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo", compiled=False)

        def liger_fused(p: Problem):
            shape = (p.sequences, p.length)
            labels, mask, old = p.labels.view(shape), p.mask.int(), p.old.view(shape)
            loss = fused(p.hidden.view(*shape, -1), p.weight, labels, mask, p.advantages, old_per_token_logps=old)[0]
            loss.backward()
            if p.trained:
                p.d_weight = p.weight.grad
            return loss.detach(), None

        found["Liger fused linear"] = liger_fused
    except Exception as error:  # as above
        print(f"Liger's fused linear is left out: {error}")
    try:
        from verl_kernel.linear_cross_entropy import LinearCrossEntropy  # verl/utils/kernel, without the rest of verl

        found["verl Triton"] = through_autograd(
            lambda p: LinearCrossEntropy.apply(p.hidden, p.weight, p.labels, 1.0)[0]
        )
    except Exception as error:  # as above
        print(f"verl is left out: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["CCE"] = through_autograd(
            lambda p: -linear_cross_entropy(p.hidden, p.weight, p.labels, reduction="none").float()
        )
    except Exception as error:  # as above
        print(f"CCE is left out: {error}")
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
    torch.cuda._sleep(6_000_000)  # some 3 ms: as in a step, where the body's kernels are queued before the head's
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


def block(run, p: Problem, repeats: int) -> tuple[list[float], int]:
    """Milliseconds of `repeats` calls after three that warm up, and peak memory beyond inputs and results."""
    times, scratch = [], 0
    for turn in range(repeats + 3):
        p.clear()
        p.d_weight = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        took = milliseconds(run)
        if turn >= 3:
            times.append(took)
        results = p.hidden.numel() * 2
        if p.d_weight is not None:
            results += p.d_weight.numel() * p.d_weight.element_size()
        scratch = torch.cuda.max_memory_allocated() - before - results
    return times, scratch


def measure(name, runs, repeats):
    """Each contender in a block of its own, so that it meets the clocks that its own power draw causes, between two
    blocks of the floor, which are what it is compared with: the card warms up and cools down over a run."""
    torch.cuda.empty_cache()
    p = Problem(*SHAPES[name])
    p.loss = GRPOLoss()
    run_floor = floor(p)
    block(run_floor, p, repeats)  # the card is cold after the set-up
    floors, _ = block(run_floor, p, repeats)
    all_floors, rows = list(floors), []
    for n, run in runs.items():
        try:
            times, scratch = block(lambda run=run: run(p), p, repeats)
        except Exception as error:  # a peer that cannot take this shape
            print(f"{name}: {n} left out: {str(error).splitlines()[0][:100]}")
            continue
        before, (floors, _) = floors, block(run_floor, p, repeats)
        all_floors += floors
        took = statistics.median(times)
        over = took / statistics.median(before + floors)
        rows.append({"shape": name, "method": n, "ms": took, "x_floor": over, "scratch_gib": scratch / 2**30})
    return statistics.median(all_floors), rows


def draw_bars(table, path):
    """x floor of every method and shape; left out where the plotting library is absent."""
    try:
        import altair as alt
        import vl_convert as vlc
    except ImportError:
        print("no chart: altair and vl-convert-python are not installed (benchmarks/head.py --draw makes it later)")
        return
    order = [row["method"] for row in table if row["shape"] == table[0]["shape"]]
    longest = max(row["x_floor"] for row in table) * 1.35
    panels = []
    for shape in dict.fromkeys(row["shape"] for row in table):
        rows = [
            row | {"text": f"{row['x_floor']:.2f} x, {row['scratch_gib']:.1f} GiB", "ours": row["method"] == "gruppo"}
            for row in table
            if row["shape"] == shape
        ]
        base = alt.Chart(alt.Data(values=rows)).encode(
            y=alt.Y("method:N", sort=order, title=None),
            x=alt.X("x_floor:Q", title="time over the products alone", scale=alt.Scale(domain=[0, longest])),
        )
        colors = alt.Scale(domain=[True, False], range=["#1f5fa8", "#b8bfc9"])
        bars = base.mark_bar().encode(color=alt.Color("ours:N", scale=colors, legend=None))
        labels = base.mark_text(align="left", dx=4, color="#444444").encode(text="text:N")
        rule = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[3, 3], color="#c44e1a").encode(x="one:Q")
        panels.append(alt.layer(bars, labels, rule).properties(width=380, height=130, title=shape))
    chart = alt.concat(*panels, columns=2)
    path.write_bytes(vlc.vegalite_to_png(chart.to_dict(), scale=1.5))


def on_cpu(repeats):
    """CPU seconds (all threads) of log-probs and gradients, the walk against plain torch; they take turns."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    weight = randn(32000, 512) * 512**-0.5

    def plain(hidden, labels, factor):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logps = (h @ w.T).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        (factor * logps).sum().backward()

    def walk(hidden, labels, factor):
        Head(weight).train(hidden, labels, lambda rows, _logps, _entropies: (factor[rows], None))

    for num_rows in (1024, 4096):
        labels = torch.randint(0, 32000, (num_rows,), generator=generator)
        inputs = (randn(num_rows, 512), labels, randn(num_rows))
        times = {plain: [], walk: []}
        for _ in range(repeats):
            for run, seconds in times.items():
                start = time.process_time()
                run(*inputs)
                seconds.append(time.process_time() - start)
        a, b = (statistics.median(times[run][1:]) for run in (plain, walk))
        held = Head(weight).sizes
        print(
            f"{num_rows} tokens, H 512, V 32000: plain torch {a:.2f} s, walk {b:.2f} s of CPU time, ratio {b / a:.2f}"
        )
        print(f"  rows of logits held: plain {num_rows}, walk at most {min(num_rows, held.chunk + held.window)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="folder with unpacked peers")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="on a CPU instead")
    parser.add_argument("--draw", metavar="head.json", help="only draw the chart of an earlier run")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    given = parser.parse_args()
    if given.draw:
        report = json.loads(Path(given.draw).read_text())
        draw_bars(report["rows"], Path(given.draw).with_suffix(".png"))
        return
    if given.cpu:
        on_cpu(given.repeats)
        return
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
    draw_bars(table, folder / "head.png")
    (folder / "head.json").write_text(json.dumps(report | {"rows": table, "errors": accuracy}, indent=1))


if __name__ == "__main__":
    main()
