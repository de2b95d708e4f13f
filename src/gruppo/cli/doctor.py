"""`gruppo doctor`: what is wrong with a run, or with the installation."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text

from gruppo.cli.arguments import Arguments, HomePath, Word, parse
from gruppo.errors import InputError
from gruppo.process.streams import printable
from gruppo.run.reader import RunReader

PACKAGES = ("torch", "transformers", "peft", "safetensors", "pyarrow", "numpy", "vllm", "triton", "bitsandbytes")
LITTLE_DISK = 2 * 2**30
"""Free bytes below which a checkpoint of a small model with its optimizer may not fit."""
STYLES = {"problem": "bold red", "warning": "yellow"}


class DoctorArguments(Arguments):
    """Say what is likely wrong with a run: the cause, the evidence, and the option to change. Exit code 1: there is a
    problem. Without a run: versions, devices, disk, and a self-test of the invariances that training relies on, on the
    embedded model.

    gruppo doctor runs/my-run
    gruppo doctor
    """

    run: Annotated[HomePath | None, Word("RUN", is_positional=True)] = None
    """The run directory, of a finished or a running run."""
    as_json: Annotated[bool, Word(flag="--json")] = False
    """Print one JSON object instead of text; with a run."""


def doctor(arguments: Sequence[str]) -> int:
    given = parse(DoctorArguments, arguments, "doctor")
    if given.as_json and given.run is None:
        raise InputError("--json is for the findings of a run; name its directory, or leave --json out")
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    return check_installation(console) if given.run is None else check_run(given.run, console, as_json=given.as_json)


def check_run(path: Path, console: Console, *, as_json: bool = False) -> int:
    """Print state and findings of a run; 1 where one of them is a problem."""
    from gruppo.doctor import summary

    run = RunReader(path)
    run.check()
    state, found = summary(run)
    if as_json:
        console.print_json(data={"state": asdict(state), "findings": [asdict(each) for each in found]})
    else:
        console.print(Text(printable(state.text)))
        for each in found:
            began = "" if each.step is None else f", since step {each.step}"
            console.print(
                Text.assemble("\n", (f"{each.severity}: {printable(each.text)}{began}", STYLES[each.severity]))
            )
            console.print(Text(f"  evidence  {printable(each.evidence)}\n  remedy    {each.remedy}"))
        if not found:
            ok = state.name not in ("stalled", "collapsed")
            console.print(Text("nothing stands out" if ok else "no rule names a cause; docs/doctor.md goes by symptom"))
    return int(any(each.severity == "problem" for each in found))


def check_installation(console: Console) -> int:
    """Print versions, devices and disk, and run the self-test; 1 where a check fails."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # libraries of torch cannot be loaded from it
        raise InputError("the working directory is deleted; change into another and start again") from None
    import torch

    from gruppo import __version__
    from gruppo.doctor.self_test import self_test

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    console.print(f"{'gruppo':<14}{__version__}")
    for name, version in found.items():
        console.print(f"{name:<14}{version}")
    console.print(f"{'threads':<14}{torch.get_num_threads()}")
    for i in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(i))
        console.print(f"{'device':<14}{torch.cuda.get_device_name(i)}, {free:.0f} of {total:.0f} GiB free")
    if not torch.cuda.is_available():
        console.print(f"{'device':<14}cpu (no GPU that torch can use)")
    free = shutil.disk_usage(here).free
    console.print(f"{'disk':<14}{free / 2**30:.0f} GiB free here" + (": little" if free < LITTLE_DISK else ""))
    is_sound = True
    for check in self_test():
        is_sound = is_sound and check.is_passed
        style = "green" if check.is_passed else STYLES["problem"]
        line = f"  {check.name}: {printable(check.detail)} ({check.seconds:.1f} s)"
        console.print(Text.assemble(("ok    " if check.is_passed else "FAILED", style), line))
    return 0 if is_sound else 1
