"""`gruppo replay`: other losses and advantages on the rollouts of a step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from gruppo.cli.arguments import Arguments, HomePath, Word, parse
from gruppo.errors import InputError
from gruppo.process.streams import printable
from gruppo.run.reader import RunReader

if TYPE_CHECKING:
    from gruppo.replay import Replay


class ReplayArguments(Arguments):
    """Try other losses and advantages on the rollouts of a step that a run has recorded: loss, gradient norm, cosine
    between gradients, what is clipped or left out, and the credit of each token. The first line of the table is the
    run's own loss, with the gradient that was recorded. Each --loss is combined with each --advantage.

    gruppo replay runs/my-run --step 1 --loss gspo --loss cispo
    gruppo replay runs/my-run --step 1 --advantage rloo --out replay.json
    gruppo replay runs/my-run --step 1 --loss gspo --page replay.html
    """

    run: Annotated[HomePath, Word("RUN", is_positional=True)]
    """The run directory."""
    step: int
    """A step whose completions were written. Its gradients need the weights before it: those of a checkpoint of the
    step before, or for step 1 the base model. Without them, the recorded log-probs are used."""
    loss: Annotated[tuple[str, ...], Word("NAME", is_repeated=True)] = ()
    """A loss, as for `gruppo train`; may be given several times. Unset: the run's own."""
    advantage: Annotated[tuple[str, ...], Word("NAME", is_repeated=True)] = ()
    """An advantage, as for `gruppo train`; may be given several times. Unset: the recorded advantages."""
    recorded: bool = False
    """Take the recorded log-probs even where the weights are there: needs no model."""
    out: Annotated[HomePath | None, Word("FILE")] = None
    """New JSON file for all numbers, with the credit of each token."""
    page: Annotated[HomePath | None, Word("FILE")] = None
    """New HTML file that needs no network: the table, and the completions with the credit that each loss gives a token,
    side by side."""
    trust: bool = False
    """Import a loss or metrics that the run names although another user owns its directory or can write it."""


def replay_step(arguments: Sequence[str]) -> int:
    given = parse(ReplayArguments, arguments, "replay")
    for flag, path in (("--out", given.out), ("--page", given.page)):
        if path is not None and path.exists():
            raise InputError(f"{flag} {path} exists already; name a new file")
    if given.out is not None and given.page is not None and given.out.resolve() == given.page.resolve():
        raise InputError(f"--out and --page both name {given.out}; name two files")
    run = RunReader(given.run)
    run.check_owner(given.trust)
    from gruppo.replay import replay

    found = replay(run, given.step, given.loss, given.advantage, use_weights=not given.recorded)
    show(found, Console(highlight=False, markup=False, emoji=False, soft_wrap=True))
    if given.out is not None:
        _write("--out", given.out, json.dumps(found.as_json()))
        print(f"all numbers: {given.out}")
    if given.page is not None:
        from gruppo.report.page import replay_page

        _write("--page", given.page, replay_page(run, found.as_json()))
        print(f"page: {given.page.resolve().as_uri()}")
    return 0


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{flag} {path} cannot be written: {error}; name another file") from error


def show(found: "Replay", console: Console) -> None:
    """Print a replay as a table."""
    console.print(f"step {found.step} of {found.run}, {len(found.rollouts)} completions")
    console.print(f"weights: {found.weights or 'none, from recorded log-probs'}")
    if found.recorded_norm is not None and found.replayed_norm is not None:
        gap = abs(found.replayed_norm / found.recorded_norm - 1) if found.recorded_norm else 0.0
        console.print(
            f"gradient norm: recorded {found.recorded_norm:.6g}, replayed {found.replayed_norm:.6g} (relative "
            f"difference {gap:.1g})"
        )
    table = Table()
    kind = "gradient norm" if found.weights else "norm of d/dlogp"
    for name in ("loss", "advantage"):
        table.add_column(name, overflow="fold")  # a name that is cut may look like another
    for name, width in (("value", 9), (kind, 11), ("cosine", 9), ("clipped", 7), ("masked", 6)):
        table.add_column(name, justify="right", min_width=width)
    for i, variant in enumerate(found.variants):
        table.add_row(
            printable(variant.loss),
            printable(variant.advantage),
            f"{variant.value:+.6f}",
            f"{variant.grad_norm:.6g}",
            f"{found.cosine[0][i]:.6f}",
            "-" if variant.clipped is None else f"{variant.clipped:.1%}",
            f"{variant.masked:.1%}",
        )
    console.print(table, soft_wrap=False)
    first = found.variants[0]
    for i, variant in enumerate(found.variants[1:], 1):
        others = [f"{other.name} {found.cosine[i][j]:.6f}" for j, other in enumerate(found.variants) if j > i]
        lines = [
            f"{variant.name} against {first.name}: {variant.moved:.1%} of the credit is on other tokens or of the "
            f"other sign, {variant.lost} tokens lose theirs, {variant.gained} gain some, {variant.flipped} change "
            "its sign",
            *([f"cosine of {variant.name} with {', '.join(others)}"] if others else []),
        ]
        for line in lines:
            console.print(printable(line))
    for note in found.notes:
        console.print(printable(note))
