"""Replay: the run's own loss gives the recorded gradient, and others what plain torch computes."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gruppo.cli.main import run as command
from gruppo.cli.replay import show
from gruppo.errors import InputError
from gruppo.loss import GRPOLoss, GSPOLoss
from gruppo.replay import Replay, Variant, replay
from gruppo.run.reader import RunReader
from gruppo.task.carries import carries_rows
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.weights.source import resolve

ROWS = [row for row in carries_rows("train")[::37] if int(row["prompt"][1]) + int(row["prompt"][4]) > 9]
"""Sums with a carry, in which the embedded model is right and wrong by turns."""

SMALL: dict[str, Any] = {
    "steps": 3,
    "save_every": 1,
    "keep_checkpoints": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 4,
    "temperature": 1.5,
    "lr": 1e-3,
    "eval_prompts": 0,
    "tensorboard": False,
    "threads": 1,
}

Make = Callable[..., RunReader]


@pytest.fixture
def trained(tmp_path: Path) -> Make:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def make(**options: Any) -> RunReader:
        output = tmp_path / "run"
        config = TrainConfig(**SMALL | {"data": str(data), "output": str(output)} | options)
        GRPOTrainer(config, quiet=True).train()
        return RunReader(output)

    return make


# --- the recorded gradient --------------------------------------------------------------------------------------------

OPTIONS = {
    "one update": {},
    "several updates": {"minibatches": 2, "epochs_per_batch": 2},
    "an adapter with a KL penalty": {"lora": True, "beta": 0.04},
}
"""Further ones are in `tests/doctor/test_replay_options.py`."""


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_runs_own_loss_gives_the_recorded_gradient(trained: Make, options: dict[str, Any]) -> None:
    run = trained(**options)
    norms = {line["step"]: line["optim/grad_norm"] for line in run.metrics()}
    for step in (1, 3):
        found = replay(run, step)
        assert found.weights is not None and found.replayed_norm == pytest.approx(norms[step], rel=1e-6)


def test_the_recorded_loss_comes_back_without_weights(trained: Make) -> None:
    run = trained()
    (line,) = [line for line in run.metrics() if line["step"] == 2]
    found = replay(run, 2, use_weights=False)
    assert found.weights is None and found.replayed_norm is None
    assert found.variants[0].value == pytest.approx(line["policy/loss"], abs=1e-6)
    assert any("recorded log-probs stand in" in note for note in found.notes)


# --- an independent computation ---------------------------------------------------------------------------------------


def log_probs(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / SMALL["temperature"]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def grpo(new: list[Tensor], old: list[Tensor], advantages: list[float]) -> Tensor:
    each = []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = (n - o).exp()
        each.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean())
    return torch.stack(each).mean()


def gspo(new: list[Tensor], old: list[Tensor], advantages: list[float]) -> Tensor:
    each = []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = (n - o).mean().exp()
        each.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
    return torch.stack(each).mean()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


def test_grpo_and_gspo_differ_as_plain_torch_says(trained: Make) -> None:
    """Two updates of step 1 with a model of transformers and AdamW of torch; the losses are compared in the second."""
    run = trained(minibatches=2, lr=1e-2)
    found = replay(run, 1, losses=["gspo"])
    rows = [row for row in run.completions(1).to_pylist() if row["status"] == "kept"]
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    model = AutoModelForCausalLM.from_pretrained(resolve("builtin", weights=True), dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def score(part: list[dict[str, Any]]) -> list[Tensor]:
        return [log_probs(model, row["prompt_ids"], row["tokens"]) for row in part]

    def gradient(loss: Tensor) -> Tensor:
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        assert None not in gradients
        return torch.cat([g.flatten() for g in gradients])

    old = [row.detach() for row in score(second)]
    now = score(first)
    before = grpo(now, [row.detach() for row in now], [row["advantage"] for row in first])
    before.backward()
    norm_before = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    new, advantages = score(second), [row["advantage"] for row in second]
    losses = grpo(new, old, advantages), gspo(new, old, advantages)
    expected = [gradient(loss) for loss in losses]

    assert found.update == 2 and [v.loss for v in found.variants] == ["grpo", "gspo"]
    for variant, loss, vector in zip(found.variants, losses, expected, strict=True):
        assert variant.value == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
        assert variant.grad_norm == pytest.approx(float(vector.norm()), rel=1e-3)
    assert found.cosine[0][1] == pytest.approx(cosine(*expected), abs=1e-3)
    assert found.cosine[0][1] < 0.99  # they do differ here
    assert found.replayed_norm == pytest.approx((float(norm_before) + float(expected[0].norm())) / 2, rel=1e-3)
    ratios = [(n - o).exp() for n, o in zip(new, old, strict=True)]
    live = [(r, a) for r, a in zip(ratios, advantages, strict=True) if a]
    clipped = sum(int(((r > 1.2) if a > 0 else (r < 0.8)).sum()) for r, a in live)
    assert found.variants[0].clipped == pytest.approx(clipped / sum(len(r) for r, _ in live))
    for i, loss in enumerate((grpo, gspo)):
        leaves = [row.detach().requires_grad_() for row in new]
        credit = torch.autograd.grad(loss(leaves, old, advantages), leaves)
        for row, by_hand in zip(found.variants[i].credit, credit, strict=True):
            assert row == pytest.approx(by_hand.tolist(), rel=1e-3, abs=1e-6)


def test_without_weights_the_credit_is_that_of_the_recorded_log_probs(trained: Make) -> None:
    run = trained(minibatches=2, lr=1e-2)
    found = replay(run, 1, losses=["gspo"], use_weights=False)
    rows = [row for row in run.completions(1).to_pylist() if row["status"] == "kept"]
    rows = rows[len(rows) // 2 :]
    live = [i for i, row in enumerate(rows) if row["advantage"]]
    old = [torch.tensor(rows[i]["old_logps"]) for i in live]
    gradients = []
    for k, loss in enumerate((grpo, gspo)):
        leaves = [torch.tensor(rows[i]["policy_logps"], requires_grad=True) for i in live]
        value = loss(leaves, old, [rows[i]["advantage"] for i in live]) * len(live) / len(rows)
        credit = torch.autograd.grad(value, leaves)
        gradients.append(torch.cat(credit))
        for i, by_hand in zip(live, credit, strict=True):
            assert found.variants[k].credit[i] == pytest.approx(by_hand.tolist(), rel=1e-4, abs=1e-8)
        assert found.variants[k].grad_norm == pytest.approx(float(gradients[k].norm()), rel=1e-4)
    assert found.cosine[0][1] == pytest.approx(cosine(*gradients), abs=1e-5)


def test_another_advantage_is_computed_from_the_recorded_rewards(trained: Make) -> None:
    """RLOO without a division: r_i less the mean of the others; by hand from the file."""
    run = trained()
    found = replay(run, 1, advantages=["drgrpo"])
    rows = run.completions(1).to_pylist()
    rewards = [row["reward"] for row in rows]
    groups = [rewards[i : i + 4] for i in range(0, len(rewards), 4)]
    by_hand = [r - sum(group) / 4 for group in groups for r in group]
    assert [v.advantage for v in found.variants] == ["grpo", "drgrpo"]
    assert found.variants[1].advantages == pytest.approx(by_hand, abs=1e-6)


def test_a_kl_penalty_that_the_run_did_not_have_is_to_the_model_at_the_start(trained: Make) -> None:
    """k3 of the weights before step 3 to the base model, with models of transformers: mean over tokens, then rows."""
    run = trained()
    found = replay(run, 3, [GRPOLoss(beta=0.1)])
    base, now = (
        AutoModelForCausalLM.from_pretrained(resolve("builtin", weights=True), dtype=torch.float32).eval()
        for _ in range(2)
    )
    now.load_state_dict(load_file(run.path / "checkpoints" / "step-000002" / "weights.safetensors"))
    by_hand = []
    with torch.no_grad():
        for row in run.completions(3).to_pylist():
            gap = log_probs(base, row["prompt_ids"], row["tokens"]) - log_probs(now, row["prompt_ids"], row["tokens"])
            by_hand.append((gap.exp() - 1 - gap).mean())
    expected = torch.stack(by_hand).mean().item()
    assert expected > 1e-4
    assert found.variants[1].terms["kl"] == pytest.approx(expected, rel=1e-3)


# --- the command, and what is refused ---------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_all_numbers(
    trained: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = trained(), tmp_path / "replay.json"
    words = ["replay", str(run.path), "--step", "1", "--loss", "gspo", "--loss", "dapo", "--advantage", "rloo"]
    assert command([*words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    norm = run.metrics()[0]["optim/grad_norm"]
    assert f"gradient norm: recorded {norm:.6g}, replayed {norm:.6g}" in printed
    written = json.loads(out.read_text())
    assert [v["name"] for v in written["variants"]] == ["grpo + grpo", "gspo + rloo", "dapo + rloo"]
    assert len(written["cosine"]) == 3 and written["cosine"][1][1] == pytest.approx(1.0)
    rows = run.completions(1).to_pylist()
    assert [(c["prompt_index"], c["sample"]) for c in written["completions"]] == [
        (row["prompt_index"], row["sample"]) for row in rows
    ]
    assert [len(c["credit"][0]) for c in written["completions"]] == [len(row["tokens"]) for row in rows]
    with pytest.raises(InputError, match="exists already"):
        command([*words, "--out", str(out)])


def shown_at(width: int, *advantages: str, **facts: Any) -> str:
    """A replay as it is printed on a terminal of some width: the same loss with several advantages."""
    zero: dict[str, Any] = {
        "terms": {},
        "clipped": 0.0,
        "masked": 0.0,
        "moved": 0.0,
        "lost": 0,
        "gained": 0,
        "flipped": 0,
    }
    variants = [
        Variant(
            loss="decoupled_ppo", advantage=name, value=-0.125, grad_norm=1.5, advantages=[], credit=[], **zero | facts
        )
        for name in advantages
    ]
    found = Replay(
        run="runs/first",
        step=1,
        update=1,
        weights=None,
        recorded_norm=None,
        replayed_norm=None,
        variants=variants,
        cosine=[[1.0] * len(variants)] * len(variants),
        rollouts=[],
        rows=[],
        sampled=[],
    )
    file = io.StringIO()
    show(found, Console(file=file, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True))
    return file.getvalue()


def test_names_stand_whole_in_a_narrow_terminal() -> None:
    names = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    text = shown_at(80, *names)
    lines = [line for line in text.splitlines() if line.startswith("│")]
    assert "…" not in text and max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    told: list[list[str]] = []
    for cell in cells:  # a row without a value goes on with the names of the one before
        told = [*told[:-1], [told[-1][0] + cell[0], told[-1][1] + cell[1]]] if not cell[2] else [*told, cell[:2]]
    assert told == [["decoupled_ppo", name] for name in names]
    assert [cell[2:5] for cell in cells if cell[2]] == [["-0.125000", "1.5", "1.000000"]] * 3


def test_credit_of_the_other_sign_is_not_said_to_be_on_other_tokens() -> None:
    text = shown_at(200, "grpo", "mine", moved=1.0, flipped=69)
    assert "100.0% of the credit is on other tokens or of the other sign" in text
    assert "69 change its sign" in text


def test_rows_are_those_of_the_file_where_groups_were_left_out(trained: Make) -> None:
    run = trained(dynamic_sampling=3, minibatches=2)
    rows = run.completions(1).to_pylist()
    kept = [i for i, row in enumerate(rows) if row["status"] == "kept"]
    assert kept != list(range(len(kept)))  # a group before them was left out
    completions = replay(run, 1).as_json()["completions"]
    assert [completion["row"] for completion in completions] == kept[len(kept) // 2 :]
    for completion in completions:
        row = rows[completion["row"]]
        assert (row["prompt_index"], row["sample"]) == (completion["prompt_index"], completion["sample"])
        assert len(completion["credit"][0]) == len(row["tokens"])


def test_a_loss_object_has_its_own_options(trained: Make) -> None:
    run = trained()
    wide, tight = (replay(run, 2, [GSPOLoss(clip_range=c)]).variants[1] for c in (0.2, 1e-9))
    assert wide.loss == "GSPOLoss" and wide.clipped == tight.clipped == 0.0  # on-policy, every ratio is 1


@pytest.mark.parametrize(
    ("step", "options", "reason"),
    [
        (9, {}, "has no step 9"),
        (1, {"advantages": ["remax"]}, "compares with a greedy completion"),
        (1, {"losses": ["no_such_loss"]}, "loss='no_such_loss' is unknown"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    trained: Make, step: int, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        replay(trained(), step, **options)


def test_a_part_of_a_step_is_refused(trained: Make) -> None:
    with pytest.raises(InputError, match="has 2 of the 4 groups"):
        replay(trained(completions_limit=8), 1)


def test_without_a_checkpoint_the_reason_and_the_steps_with_weights_are_named(trained: Make) -> None:
    found = replay(trained(save_every=2), 2)
    assert found.weights is None
    assert any("no checkpoint of step 1" in note and "steps with weights: 1, 3" in note for note in found.notes)


def test_a_model_object_has_recorded_log_probs_only(tmp_path: Path) -> None:
    from gruppo.weights.source import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(resolve("builtin", weights=True), dtype=torch.float32)
    config = TrainConfig(**SMALL | {"output": str(tmp_path / "run")})
    GRPOTrainer(config, model=model, tokenizer=load_tokenizer("builtin"), data=ROWS, quiet=True).train()
    found = replay(RunReader(tmp_path / "run"), 1)
    assert found.weights is None and any("was a Python object" in note for note in found.notes)
