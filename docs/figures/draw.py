"""Draw the figures of docs/losses.md, tutorial.md and training.md from the code: `python docs/figures/draw.py`.

surrogates.png      loss and gradient of each variant against the ratio, for A = +1 and A = -1
kl.png              k1, k2, k3 against delta = logp - ref, value and gradient
tutorial_ratio.png  how far a clipped loss gets, with the ratio over the reference and over the last policy
tutorial_kl.png     k3 against delta, with its two regions
signal.png          share of groups with signal against the success rate, for several group sizes
"""

import copy
import io
from collections.abc import Callable
from math import log
from pathlib import Path

import altair as alt
import torch
import torch.nn.functional as F
import vl_convert
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gruppo.loss import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DRGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
    SAPOLoss,
    k1,
    k2,
    k3,
)
from gruppo.loss.inputs import align
from gruppo.task import builtin_model_path

HERE = Path(__file__).parent
INK, MUTED, GRID, BAND = "#1f2430", "#667085", "#eceef2", "#dfe6f1"
BLUE, ORANGE, GREEN = "#1d5fa8", "#c8501e", "#2f7d4f"
FONT = "DejaVu Sans, Arial, sans-serif"
OLD_LOGP = -1.0  # log-prob of the token when it was sampled; only CISPO's loss value depends on it
RATIOS = torch.linspace(0.005, 2, 400, dtype=torch.float64)
DELTAS = torch.linspace(-2.5, 2.5, 201, dtype=torch.float64)


def of_ratio(loss: PolicyLoss, advantage: float) -> tuple[Tensor, Tensor]:
    """Loss of a token and its gradient to log p, at each of RATIOS: one sequence of one token per ratio."""
    logps = (OLD_LOGP + RATIOS.log())[:, None].requires_grad_()
    inputs = align(
        {"labels": torch.ones(len(RATIOS), 1, dtype=torch.int64)},
        {"logps": logps},
        advantages=torch.full((len(RATIOS),), advantage),
        old_logps=torch.full_like(logps, OLD_LOGP),
    )
    values = loss.surrogate(loss.level(inputs), inputs)
    (gradient,) = torch.autograd.grad(values.sum(), logps)
    return values.detach(), gradient.squeeze(1)


def of_delta(estimator: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Penalty of a token and its gradient to log p, at each of DELTAS."""
    delta = DELTAS.clone().requires_grad_()
    values = estimator(delta, torch.zeros_like(delta))
    (gradient,) = torch.autograd.grad(values.sum(), delta)
    return values.detach(), gradient


def rows(x: Tensor, y: Tensor, name: str) -> list[dict]:
    return [{"x": a, "y": b, "name": name} for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def panel(
    data: list[dict],
    colors: dict[str, str],
    x: tuple[str, list[float], list[float]],  # title, domain, ticks
    y: tuple[str, list[float], list[float]],
    labels: list[tuple[float, float, str, str]],  # x, y, text, colour
    band: tuple[float, float] | None = None,
    rule: float | None = None,
    title: alt.TitleParams | str = "",
    size: tuple[int, int] = (190, 150),
) -> alt.LayerChart:
    """Lines over a shaded band, with the names written beside them."""
    x_scale, y_scale = (alt.Scale(domain=axis[1], nice=False, zero=False) for axis in (x, y))
    x_axis = alt.X("x:Q", title=x[0], scale=x_scale, axis=alt.Axis(values=x[2], format="~g"))
    y_axis = alt.Y("y:Q", title=y[0], scale=y_scale, axis=alt.Axis(values=y[2], format="~g"))
    layers: list[alt.Chart] = []
    if band is not None:
        edges = alt.Data(values=[{"a": band[0], "b": band[1]}])
        layers.append(alt.Chart(edges).mark_rect(color=BAND, opacity=1, clip=True).encode(x="a:Q", x2="b:Q"))
    if rule is not None:
        dash = alt.Chart(alt.Data(values=[{"at": rule}])).mark_rule(color=MUTED, strokeDash=[2, 3], strokeWidth=1)
        layers.append(dash.encode(x="at:Q"))
    zero = alt.Chart(alt.Data(values=[{"at": 0}])).mark_rule(color="#c3c9d4", strokeWidth=1)
    layers.append(zero.encode(y="at:Q"))
    color = alt.Color("name:N", scale=alt.Scale(domain=list(colors), range=list(colors.values())), legend=None)
    layers.append(
        alt.Chart(alt.Data(values=data)).mark_line(strokeWidth=2.4, clip=True).encode(x=x_axis, y=y_axis, color=color)
    )
    for at_x, at_y, text, ink in labels:
        point = alt.Data(values=[{"x": at_x, "y": at_y}])
        words = alt.Chart(point).mark_text(text=text, color=ink, align="left", fontSize=11, fontWeight=600, font=FONT)
        layers.append(words.encode(x="x:Q", y="y:Q"))
    return alt.layer(*layers).properties(width=size[0], height=size[1], title=title)


def finish(chart: alt.ConcatChart | alt.VConcatChart | alt.HConcatChart, title: str, subtitle: list[str], name: str):
    heading = alt.TitleParams(
        title,
        subtitle=subtitle,
        anchor="start",
        fontSize=16,
        subtitleFontSize=12,
        subtitleColor=MUTED,
        subtitlePadding=5,
        offset=14,
        color=INK,
        font=FONT,
        subtitleFont=FONT,
        subtitleLineHeight=16,
    )
    styled = (
        chart.properties(title=heading, background="white", padding=16)
        .configure_view(stroke="#d5dae3")
        .configure_axis(
            labelFont=FONT,
            titleFont=FONT,
            labelColor=MUTED,
            titleColor=INK,
            labelFontSize=11,
            titleFontSize=11.5,
            titleFontWeight=500,
            gridColor=GRID,
            domain=False,
            tickColor="#d5dae3",
        )
        .configure_title(font=FONT, color=INK)
    )
    png = vl_convert.vegalite_to_png(styled.to_json(), scale=2)
    # Few colours occur, so a palette holds them all and the file is a fifth of the size.
    flat = Image.open(io.BytesIO(png)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    flat.save(HERE / name, optimize=True)


def heading(name: str, note: str) -> alt.TitleParams:
    return alt.TitleParams(
        name, subtitle=note, fontSize=13, subtitleFontSize=11, subtitleColor=MUTED, anchor="start", subtitleFont=FONT
    )


def draw_surrogates() -> None:
    grpo = GRPOLoss()
    for twin in (BNPOLoss(), DRGRPOLoss()):  # one panel speaks for three only as long as their parts are the same
        assert (twin.level, twin.surrogate) == (grpo.level, grpo.surrogate)
    low, high = grpo.clip_range or (0.0, 0.0)
    dapo, cispo, gspo = DAPOLoss(), CISPOLoss(), GSPOLoss()
    variants = [
        ("GRPO, BNPO, Dr. GRPO", "clip to [0.8, 1.2]", grpo, (1 - low, 1 + high), "token ratio r"),
        ("GSPO", "the same clip, once per sequence", gspo, (1 - low, 1 + high), "sequence ratio s"),
        ("DAPO", "clip to [0.8, 1.28]", dapo, (1 - dapo.clip_range[0], 1 + dapo.clip_range[1]), "token ratio r"),
        ("SAPO", "soft gate, τ = 1, nothing clipped", SAPOLoss(), None, "token ratio r"),
        ("CISPO", "weight capped at 1.2", cispo, (0.0, 1 + cispo.clip_range[1]), "token ratio r"),
    ]
    signs = {"A = +1": (1.0, BLUE), "A = −1": (-1.0, ORANGE)}
    colors = {name: ink for name, (_, ink) in signs.items()}
    domain, ticks = [0.0, 2.0], [0, 0.5, 1, 1.5, 2]
    label_heights = {
        "GRPO, BNPO, Dr. GRPO": {"A = −1": 1.35, "A = +1": -1.35},
        "CISPO": {"A = −1": -1.6, "A = +1": 1.6},
    }
    tops, bottoms = [], []
    for number, (name, note, loss, band, x_title) in enumerate(variants):
        first = number == 0
        values = [row for sign, (a, _) in signs.items() for row in rows(RATIOS, of_ratio(loss, a)[0], sign)]
        pushes = [row for sign, (a, _) in signs.items() for row in rows(RATIOS, -of_ratio(loss, a)[1], sign)]
        labels = [(0.1, at, sign, colors[sign]) for sign, at in label_heights.get(name, {}).items()]
        tops.append(
            panel(
                values,
                colors,
                ("", domain, ticks),
                ("loss of the token" if first else "", [-3.2, 3.2], [-2, 0, 2]),
                labels,
                band,
                1.0,
                heading(name, note),
            )
        )
        y = ("push on log p" if first else "", [-2.2, 2.2], [-2, 0, 2])
        bottoms.append(panel(pushes, colors, (x_title, domain, ticks), y, [], band, 1.0))
    finish(
        alt.vconcat(alt.hconcat(*tops, spacing=18), alt.hconcat(*bottoms, spacing=18), spacing=10),
        "What each loss does with the ratio",
        [
            "One token, before its weight. Above: its loss. Below: the push −∂loss/∂log p; where it is 0, the token "
            "no longer moves the policy. Shaded: where the ratio is left as it is.",
            "CISPO's loss value also depends on log p (here −1 when sampled); only its gradient has a meaning.",
        ],
        "surrogates.png",
    )


def draw_kl() -> None:
    estimators = {"k1 = Δ": (k1, ORANGE), "k2 = Δ²/2": (k2, GREEN), "k3 = exp(−Δ) − 1 + Δ": (k3, BLUE)}
    colors = {name: ink for name, (_, ink) in estimators.items()}
    x = ("Δ = log p − log p_ref   (nats)", [-2.5, 2.5], [-2, -1, 0, 1, 2])
    values = [row for name, (k, _) in estimators.items() for row in rows(DELTAS, of_delta(k)[0], name)]
    slopes = [row for name, (k, _) in estimators.items() for row in rows(DELTAS, of_delta(k)[1], name)]
    left = panel(
        values,
        colors,
        x,
        ("penalty of the token  (nats)", [-3, 9], [-2, 0, 2, 4, 6, 8]),
        [(-1.95, 6.5, "k3", BLUE), (-2.3, 3.4, "k2", GREEN), (-1.35, -2.1, "k1", ORANGE)],
        rule=0.0,
        title=heading("Value", "k1: linear · k2: parabola · k3: exponential left, linear right"),
        size=(380, 260),
    )
    right = panel(
        slopes,
        colors,
        x,
        ("∂ penalty / ∂ log p", [-7, 3], [-6, -4, -2, 0, 2]),
        [(-1.62, -5.2, "k3: 1 − exp(−Δ)", BLUE), (-2.4, -1.55, "k2: Δ", GREEN), (-2.4, 1.4, "k1: 1", ORANGE)],
        rule=0.0,
        title=heading("Gradient", "what the optimizer feels; positive pushes log p down"),
        size=(380, 260),
    )
    finish(
        alt.hconcat(left, right, spacing=28),
        "KL estimators",
        ["Left of 0 the policy gives the token less than the reference does, right of 0 more."],
        "kl.png",
    )


def climb(reference: nn.Module, *, over_reference: bool, updates: int = 60) -> list[float]:
    """p("132") after "47+85=" before and after each update of docs/tutorial.md's experiment."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
    prompt, completion = tokenizer("47+85=")["input_ids"], tokenizer("132", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([prompt + completion])
    labels = torch.tensor([[-100] * len(prompt) + completion])
    loss_fn = GRPOLoss(clip_range=0.2)

    def logps_of(model: nn.Module) -> Tensor:
        logps = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return F.pad(logps, (1, 0))

    policy = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.002)
    with torch.no_grad():
        ref_logps = logps_of(reference)
    chances = []
    for _ in range(updates + 1):
        logps = logps_of(policy)
        chances.append(logps[0, len(prompt) :].sum().exp().item())
        old_logps = ref_logps if over_reference else logps.detach()
        optimizer.zero_grad()
        loss_fn({"labels": labels}, {"logps": logps}, advantages=[1.0], old_logps=old_logps).loss.backward()
        optimizer.step()
    return chances


def draw_tutorial_ratio() -> None:
    reference = AutoModelForCausalLM.from_pretrained(builtin_model_path(), dtype=torch.float32)
    curves = {
        "over the last policy": (climb(reference, over_reference=False), BLUE),
        "over the reference": (climb(reference, over_reference=True), ORANGE),
    }
    updates = torch.arange(61)
    data = [row for name, (chances, _) in curves.items() for row in rows(updates, torch.tensor(chances), name)]
    labels = [
        (31, 0.67, "ratio over the last policy", BLUE),
        (31, 0.24, "ratio over the reference: stops near 1.2 ×", ORANGE),
    ]
    lines = panel(
        data,
        {name: ink for name, (_, ink) in curves.items()},
        ("updates", [0, 60], [0, 10, 20, 30, 40, 50, 60]),
        ("probability of 132", [0, 1], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        labels,
        size=(560, 260),
    )
    finish(
        alt.hconcat(lines),
        "With a ratio over the reference, the clip ends learning",
        [
            "The embedded model is trained on one good answer, 47+85=132, with A = 1 and the clip at [0.8, 1.2].",
            "Over the reference the band is used up once and for all; over the last policy it moves along.",
        ],
        "tutorial_ratio.png",
    )


def draw_tutorial_kl() -> None:
    delta = torch.linspace(-3.2, 3.2, 257, dtype=torch.float64)
    twentyfold = torch.tensor([-log(20), log(20)], dtype=torch.float64)
    less, more = k3(twentyfold, twentyfold).tolist()
    curve = panel(
        rows(delta, k3(delta, delta), "k3"),
        {"k3": BLUE},
        ("Δ = log p − log p_ref   (nats)", [-3.2, 3.2], [-3, -2, -1, 0, 1, 2, 3]),
        ("penalty of the token  (nats)", [0, 20], [0, 5, 10, 15, 20]),
        [
            (-2.85, less, f"20 × less likely: {less:.1f}", INK),
            (1.6, more + 1.6, f"20 × more likely: {more:.1f}", INK),
            (-2.2, 8.2, "forgetting: exponential", ORANGE),
            (0.35, 8.2, "new habits: linear, slope below 1", GREEN),
        ],
        band=(-3.2, 0.0),
        rule=0.0,
        size=(560, 260),
    )
    points = alt.Data(values=[{"x": x, "y": y} for x, y in zip(twentyfold.tolist(), (less, more), strict=True)])
    dots = alt.Chart(points).mark_point(color=INK, filled=True, size=60, opacity=1).encode(x="x:Q", y="y:Q")
    finish(
        alt.hconcat(alt.layer(curve, dots)),
        "The KL penalty exp(−Δ) − 1 + Δ",
        ["Left of 0 the policy gives a token less than the reference does, right of 0 more. At 0 the two agree."],
        "tutorial_kl.png",
    )


def draw_signal() -> None:
    """A group has signal unless all of its answers are right or all are wrong: 1 − p^G − (1 − p)^G."""
    rate = torch.linspace(0, 1, 201, dtype=torch.float64)
    colors = {"4": ORANGE, "8": BLUE, "32": GREEN}
    data = [row for size in colors for row in rows(rate, 1 - rate ** int(size) - (1 - rate) ** int(size), size)]
    curve = panel(
        data,
        colors,
        ("share of right answers to a prompt", [0, 1], [0, 0.05, 0.2, 0.4, 0.6, 0.8, 1]),
        ("chance that a group has signal", [0, 1.05], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        [(0.1, 0.93, "32", GREEN), (0.17, 0.72, "8", BLUE), (0.24, 0.55, "group of 4", ORANGE)],
        rule=0.05,
        size=(560, 240),
    )
    finish(
        alt.hconcat(curve),
        "Large groups find signal on hard prompts",
        ["A prompt that is solved one time in twenty (the line) teaches something in 19, 34 or 81 % of its visits."],
        "signal.png",
    )


if __name__ == "__main__":
    draw_surrogates()
    draw_kl()
    draw_tutorial_ratio()
    draw_tutorial_kl()
    draw_signal()
