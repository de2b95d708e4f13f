"""Shared prompts against repeated prompts: time, memory and numbers of the body of a model, forward and backward.

    python benchmarks/shared_prompt.py                      # on a GPU: shapes, sweep over G, numbers, compilations
    python benchmarks/shared_prompt.py --tiny               # on a CPU, tiny: does it run?
    python benchmarks/shared_prompt.py --draw FILE.json     # only the chart

A shape is (prompt, completion, G): G completions of one prompt. Repeated: G rows of prompt + completion through SDPA's
kernels, the fastest counts. Shared: the prompt once. Both run through the same LogpModel, on the same model with random
weights, and get the same gradient at the scored slots; the contenders take turns.
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from gruppo.batch import pack, pack_shared
from gruppo.kernel import shared_prompt_attention as attention
from gruppo.model.logp_model import LogpModel
from gruppo.types import InputFeature

ROOT = Path(__file__).parents[1]
SHAPES = [(1024, 512, 8), (512, 1024, 8), (2048, 512, 16)]
SWEEP = [(1024, 512, g) for g in (2, 4, 16, 32)]
BUDGET = 40960
"""Slots of one forward when both layouts may fill the same memory."""
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
TINY = QWEN | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512}
FLASH = SDPBackend.FLASH_ATTENTION


def make_model(sizes, device, dtype):
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).to(dtype).eval()


def make_features(prompt, completion, group, vocabulary, *, groups=1, seed=0):
    """`completion` slots each: the last token of a completion predicts nothing and has none."""
    draw = torch.Generator().manual_seed(seed)
    tokens = lambda n: tuple(torch.randint(0, vocabulary, (n,), generator=draw).tolist())  # noqa: E731
    return [
        InputFeature(prompt_ids=shared, completion_ids=tokens(completion + 1))
        for shared in (tokens(prompt) for _ in range(groups))
        for _ in range(group)
    ]


class Contender:
    """One way to run the body over a batch."""

    def __init__(self, logp_model, batch, groups=1, *, backend=None, route=None):
        self.logp_model, self.batch, self.groups, self.route = logp_model, batch, groups, route
        self.context = (lambda: sdpa_kernel(backend)) if backend else contextlib.nullcontext
        draw = torch.Generator().manual_seed(1)
        weight = logp_model.head.weight
        shape = (len(batch.scored), weight.shape[1])
        self.gradient = torch.randn(shape, generator=draw).to(weight.device, weight.dtype)

    def forward(self):
        best = attention.best_route
        if self.route:
            attention.best_route = lambda *_: self.route
        try:
            keywords, take = self.logp_model._keywords(self.batch)
            return take(self.logp_model.base.base_model(**keywords).last_hidden_state)
        finally:
            attention.best_route = best

    def __call__(self):
        for parameter in self.logp_model.model.parameters():
            parameter.grad = None
        with self.context():
            hidden = self.forward()
            hidden.backward(self.gradient)
        return hidden


def contenders(logp_model, shape, routes, budget=None, vocabulary=500):
    """Per layout a batch of one group, or as many groups as the budget holds."""
    prompt, completion, size = shape
    device = logp_model.head.weight.device

    def features(slots):
        return make_features(*shape, vocabulary, groups=1 if budget is None else max(budget // slots, 1))

    repeated = features(size * (prompt + completion))
    shared = features(prompt + size * completion)
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION} if device.type == "cuda" else {"sdpa": None}
    batch = pack(repeated).to(device)
    made = {
        f"repeated, {n}": Contender(logp_model, batch, len(repeated) // size, backend=b) for n, b in backends.items()
    }
    batch = pack_shared(shared, multiple_of=attention.BLOCK if device.type == "cuda" else 1).to(device)
    made |= {f"shared, {r}": Contender(logp_model, batch, len(shared) // size, route=r) for r in routes}
    return made, size * (prompt + completion) / (prompt + size * completion)


def measure(made, repeats):
    """Of each: milliseconds (median, quartiles), those of its kernels alone, and peak GiB beyond what stays."""
    cuda = torch.cuda.is_available()
    seconds, rows = {name: [] for name in made}, {}
    gc.collect()
    gc.disable()  # a collection would fall on whoever happens to run
    for name, call in made.items():
        try:
            call()  # compiles, fills caches
        except Exception as error:  # a kernel that this machine does not have
            print(f"  {name} does not run: {str(error)[-300:]}", flush=True)
            continue
        rows[name] = {"groups": call.groups, "gib": 0.0, "kernels_ms": 0.0}
        if cuda:
            for parameter in call.logp_model.model.parameters():
                parameter.grad = None
            torch.cuda.synchronize()
            kept = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                call()
                torch.cuda.synchronize()
            rows[name]["gib"] = (torch.cuda.max_memory_allocated() - kept) / 2**30
            rows[name]["kernels_ms"] = sum(e.self_device_time_total for e in seen.key_averages()) / 1e3
    names = list(rows)
    for i in range(repeats):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            made[name]()
            if cuda:
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - start) * 1e3)
    gc.enable()
    for name in names:
        q1, middle, q3 = statistics.quantiles(seconds[name], n=4)
        rows[name] |= {"ms": middle, "q1": q1, "q3": q3}
    return rows


def report(shape, what, rows, tokens):
    """Ratios of the times and the memory of one group, repeated over shared."""
    base = next(iter(rows.values()))
    print(f"{shape}, {what}: {tokens:.2f} x fewer tokens", flush=True)
    out = []
    for name, row in rows.items():
        row = row | {"shape": list(shape), "what": what, "method": name, "tokens": tokens}
        for key in ("ms", "kernels_ms", "gib"):
            row[f"{key}_ratio"] = (base[key] / base["groups"]) / (row[key] / row["groups"]) if row[key] else 0.0
        out.append(row)
        print(
            f"  {name:18} {row['groups']} group(s) {row['ms']:8.2f} ms ({row['q1']:.1f} - {row['q3']:.1f}), kernels "
            f"{row['kernels_ms']:8.2f} ms, {row['gib']:5.1f} GiB; a group: speed {row['ms_ratio']:.2f} = "
            f"{row['ms_ratio'] / tokens:.0%} of the tokens, kernels {row['kernels_ms_ratio']:.2f} = "
            f"{row['kernels_ms_ratio'] / tokens:.0%}, memory {row['gib_ratio']:.2f}",
            flush=True,
        )
    return out


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def numbers(logp_model, features, routes, exact=None):
    """Relative distances of hidden states and of all gradients: shared, repeated, and repeated in another batch shape.

    `exact` has the same weights in float32: the distance from it says which of them is nearer the truth.
    """
    device = logp_model.head.weight.device
    made = {
        "repeated, one batch": Contender(
            logp_model, pack(features).to(device), backend=FLASH if device.type == "cuda" else None
        )
    }
    rows = pack_shared(features, multiple_of=attention.BLOCK).to(device)
    made |= {f"shared, {r}": Contender(logp_model, rows, route=r) for r in routes}
    if device.type == "cuda":
        made["repeated, cudnn"] = Contender(logp_model, pack(features).to(device), backend=SDPBackend.CUDNN_ATTENTION)

    def run(call):
        hidden = call().detach()
        return hidden, torch.cat(
            [p.grad.flatten().float() for p in logp_model.base.base_model.parameters() if p.grad is not None]
        )

    results = {name: run(call) for name, call in made.items()}
    whole = next(iter(made.values()))
    single = [
        Contender(logp_model, pack([f]).to(device), backend=FLASH if device.type == "cuda" else None) for f in features
    ]
    sizes = [len(c.batch.scored) for c in single]
    pieces, total = [], 0
    for call, gradient in zip(single, whole.gradient.split(sizes), strict=True):
        call.gradient = gradient
        hidden, grads = run(call)
        pieces.append(hidden)
        total = total + grads
    results["repeated, one by one"] = (torch.cat(pieces), total)
    if exact is not None:
        reference = Contender(exact, whole.batch)
        reference.gradient = whole.gradient.float()
        hidden = reference().detach()
        grads = torch.cat([p.grad.flatten() for p in exact.base.base_model.parameters() if p.grad is not None])
        truth = (hidden, grads)
    first = next(iter(results))
    out = {}
    for name, (hidden, grads) in results.items():
        out[name] = {"hidden": distance(hidden, results[first][0]), "gradient": distance(grads, results[first][1])}
        if exact is not None:
            out[name] |= {"hidden_exact": distance(hidden, truth[0]), "gradient_exact": distance(grads, truth[1])}
        print(f"  {name:22}" + "  ".join(f"{k} {v:.2e}" for k, v in out[name].items()), flush=True)
    return out


def compilations(sizes, device, dtype, routes, steps):
    """Graphs that torch compiles over steps of random lengths, and the seconds of the slowest steps."""
    from torch._dynamo.utils import counters

    logp_model = LogpModel(make_model(sizes | {"num_hidden_layers": 2}, device, dtype))
    draw = torch.Generator().manual_seed(2)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=draw))  # noqa: E731
    out = {}
    for route in routes:
        before, seconds = counters["stats"]["unique_graphs"], []
        for step in range(steps):
            features = [
                feature
                for g in range(number(1, 9))
                for feature in make_features(number(16, 600), number(4, 400), 8, 500, seed=1000 * step + g)
            ]
            batch = pack_shared(features, multiple_of=attention.BLOCK).to(device)
            start = time.perf_counter()
            Contender(logp_model, batch, route=route)()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        graphs = counters["stats"]["unique_graphs"] - before
        out[route] = {
            "graphs": graphs,
            "steps": steps,
            "slowest_s": sorted(seconds)[-8:],
            "median_s": statistics.median(seconds),
        }
        print(
            f"  {route}: {graphs} graphs compiled in {steps} steps of random lengths; slowest {sorted(seconds)[-8:]}",
            flush=True,
        )
    return out


def draw_chart(rows, path):
    try:
        import altair as alt
        import vl_convert as vlc
    except ImportError:
        print("no chart: altair and vl-convert-python are not installed (--draw makes it later)")
        return
    values = []
    for row in rows:
        if row["what"] != "one group a forward" and row["method"] == "shared, flex":
            shape = "{} + {} x {}".format(*row["shape"])
            for what, key in (("tokens", "tokens"), ("speed", "ms_ratio"), ("memory", "gib_ratio")):
                values.append({"shape": shape, "what": what, "times": row[key]})
    order = {"shape": list(dict.fromkeys(v["shape"] for v in values)), "what": ["tokens", "speed", "memory"]}
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("shape:N", sort=order["shape"], title="prompt + completion x G", axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("what:N", sort=order["what"]),
        y=alt.Y("times:Q", title="repeated over shared"),
    )
    colors = alt.Scale(domain=order["what"], range=["#b8bfc9", "#1f5fa8", "#c44e1a"])
    bars = base.mark_bar().encode(color=alt.Color("what:N", scale=colors, title=None))
    labels = base.mark_text(dy=-6, color="#444444", fontSize=9).encode(text=alt.Text("times:Q", format=".2f"))
    chart = alt.layer(bars, labels).properties(width=760, height=240)
    path.write_bytes(vlc.vegalite_to_png(chart.to_dict(), scale=1.2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--routes", default="flex")
    parser.add_argument("--parts", default="shapes,sweep,numbers,compilations")
    parser.add_argument("--draw", metavar="shared_prompt.json")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    given = parser.parse_args()
    if given.draw:
        draw_chart(json.loads(Path(given.draw).read_text())["rows"], Path(given.draw).with_suffix(".png"))
        return
    tiny = given.tiny or not torch.cuda.is_available()
    device, dtype, sizes = ("cpu", torch.float32, TINY) if tiny else ("cuda", torch.bfloat16, QWEN)
    shapes, sweep = ([(24, 12, 4)], [(24, 12, 2)]) if tiny else (SHAPES, SWEEP)
    routes, parts = ("mask",) if tiny else tuple(given.routes.split(",")), given.parts.split(",")
    name = "cpu" if tiny else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}", flush=True)
    result = {"device": name, "torch": torch.__version__, "rows": []}
    logp_model = LogpModel(make_model(sizes, device, dtype))
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)

    def table(cases, routes):
        for shape, budget in cases:
            slots = min(budget or 200, 200) if tiny and budget else budget
            made, tokens = contenders(logp_model, shape, routes, slots, sizes["vocab_size"])
            what = "one group a forward" if slots is None else f"{slots} slots a forward"
            result["rows"] += report(shape, what, measure(made, given.repeats), tokens)
            del made
        (folder / "shared_prompt.json").write_text(json.dumps(result, indent=1))

    if "shapes" in parts:
        table([(s, None) for s in shapes] + [(s, BUDGET) for s in shapes], routes)
    if "numbers" in parts:
        print("distances from the first, and from float32:", flush=True)
        model = make_model(sizes, device, torch.float32)
        model.load_state_dict({n: w.float() for n, w in logp_model.model.state_dict().items()})
        features = make_features(*shapes[0][:2], 4, sizes["vocab_size"], groups=2, seed=3)
        ragged = [replace(f, completion_ids=f.completion_ids[: -1 - 7 * i]) for i, f in enumerate(features) if i < 7]
        result["numbers"] = numbers(logp_model, ragged if not tiny else features, routes, LogpModel(model))
        del model
    if "compilations" in parts:
        result["compilations"] = compilations(sizes, device, dtype, routes[-1:], given.steps)
    if "sweep" in parts:
        table([(s, BUDGET) for s in sweep], routes[-1:])
    (folder / "shared_prompt.json").write_text(json.dumps(result, indent=1))
    draw_chart(result["rows"], folder / "shared_prompt.png")


if __name__ == "__main__":
    main()
