"""Writes the generated parts of the documentation; `make docs` runs it and a test holds the pages to it.

docs/map.md       three walks through the code, and every module with the first sentence of its docstring
docs/config.md    every option of a run with its type, default and sentence
docs/cli.md       every verb with its help and options
and what stands between `<!-- NAME -->` and `<!-- end -->`: the keys of docs/metrics.md, the formulas of docs/losses.md,
the exit codes of docs/run_directory.md, the names of other trainers' options in
docs/coming_from.md
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

from gruppo import errors, options
from gruppo.cli.arguments import RunArguments
from gruppo.cli.main import VERBS
from gruppo.cli.train import STOPPED
from gruppo.keys import KEYS, Key
from gruppo.loss import LOSSES
from gruppo.peer_names import ABSENT, OPEN_INSTRUCT, REFUSED, TRL, TRL_TRAINER, TWINKLE, UNSLOTH, VERL
from gruppo.trainer.config import TrainConfig

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gruppo"
DOCS = ROOT / "docs"

HEADER = """# Source map

Generated from the modules' docstrings by `make docs`. The packages follow the pipeline: prompts → rollouts → rewards →
advantages → packed batch → log-probs → loss → step → metrics. To see them at work, take one of the [three
walks](#three-walks).

| package | what it does |
|---|---|
| `gruppo.types` | the records that travel: Prompt, Trajectory, Rollout, Group |
| `gruppo.process` | streams that never end a run, child processes, objects by name |
| `gruppo.task` | turns rows of a file or hub into tokenised prompts |
| `gruppo.sampler` | turns prompts into groups of sampled completions |
| `gruppo.weights` | finds a model's weights, and hands trained ones to the sampler |
| `gruppo.reward` | scores completions, in processes that can be killed |
| `gruppo.advantage` | turns rewards into credit within a group |
| `gruppo.batch` | packs rollouts into flat tensors; the one shift by one is here |
| `gruppo.kernel` | computes log-probs and gradients without a [tokens, vocabulary] tensor |
| `gruppo.loss` | builds losses from level, surrogate, weights, terms and aggregation; 26 by name |
| `gruppo.metric` | measures what the policy did, exactly, for any split of a step |
| `gruppo.model` | scores tokens with a transformers model, plans a step and takes it |
| `gruppo.parallel` | connects the ranks that share a step |
| `gruppo.turns` | lets the policy and an environment take turns: tools, games, chat templates as token ids |
| `gruppo.rollout` | drives sampler and rewards, and decides when the rollouts of a step are sampled |
| `gruppo.options`, `gruppo.trainer` | every option of a run; the training loop |
| `gruppo.run` | writes and reads the run directory: completions, checkpoints, trackers, terminal |
| `gruppo.doctor` | names what is probably wrong with a run |
| `gruppo.replay` | computes other losses on the rollouts of a step |
| `gruppo.report` | renders a run as an HTML page, and the live view |
| `gruppo.recipes` | holds configurations from papers |
| `gruppo.convert` | translates configurations of TRL, Open Instruct and Twinkle |
| `gruppo.cli` | is the command line |
"""

Walk = list[tuple[str, str]]
"""Functions in the order in which they are called, each with what it does."""

STEP: Walk = [
    ("GRPOTrainer.step", "calls the stages below in order and returns the metrics of the step"),
    ("Schedule.take", "gives the sampler the newest weights, then asks for the rollouts of the step"),
    ("RolloutSource.next", "samples prompts until the step is full, and says which groups are trained on"),
    ("prompt_indices", "picks the prompts, as a function of the step"),
    ("Driver.play", "samples and scores; nothing else calls the sampler or a reward"),
    ("TorchSampler.submit", "draws the completions: token ids with their log-probs"),
    ("RewardScorer.score", "calls the reward functions, in this process or in workers"),
    ("AdvantageAssigner.assign", "subtracts penalties from the rewards and compares them within each group"),
    ("Learner.update", "splits the step into minibatches and makes one optimizer step with each"),
    ("Planner.step", "splits a minibatch into micro-batches and counts the totals that the loss divides by"),
    ("pack", "puts the sequences of a micro-batch into flat tensors; the shift by one is here"),
    ("TransformersModel.run", "runs forward and backward of each micro-batch"),
    ("PolicyLoss.compute", "turns log-probs and advantages into the loss"),
    ("clip_and_step", "clips the gradient and moves the weights, unless the gradient is not finite"),
    ("Recorder.step", "writes the line of `metrics.jsonl`, after `step` has returned to `GRPOTrainer.train`"),
]

RESUME: Walk = [
    ("VERBS", "says which function of which module a verb is; nothing else is imported for it"),
    ("resume", "reads the flags and refuses a directory that a stranger could have written"),
    ("TrainConfig.of_run", "reads the options from the run's `config.yaml`"),
    ("GRPOTrainer.__init__", "takes the config and any Python objects"),
    ("assemble", "builds every part of the run, in the order in which they need each other"),
    ("RunDirectory.reopen", "opens the directory and takes its lock"),
    ("check_origin", "refuses to go on if the options, prompts or base weights have changed"),
    ("go_on", "puts everything back as the newest checkpoint has it"),
    ("Snapshots.load_newest", "reads what a checkpoint holds besides the model: step, coefficients, solved prompts"),
    ("Checkpoints.load", "finds the newest whole checkpoint and skips damaged ones"),
    ("load_training_state", "reads weights and optimizer state"),
    ("RunDirectory.go_on_after", "drops the records of later steps"),
    ("GRPOTrainer.train", "takes the remaining steps"),
]

SAMPLER: Walk = [
    ("Sampler", "the base class: what `submit` must return, and what `is_exact` and `reads_files` promise"),
    ("Trajectory", "what a sampler returns for each completion"),
    ("TorchSampler", "the example to copy for a sampler in the trainer's process"),
    ("vLLMSampler", "the example for an engine elsewhere"),
    ("HandOver", "how the trainer's weights reach a sampler: the trainer's own model, a copy, or a folder"),
    ("WeightStore", "writes that folder, with the log-probs by which an engine proves which weights it has"),
    ("read_sampler", "reads the option `sampler`; `module:Class` needs no change here, a name of its own does"),
    ("build_hand_over", "makes the sampler of a run from that option"),
    ("Driver", "calls it: prompts, number of samples and seed become requests"),
]

WALKS = """
## Three walks

The files that you meet, in order, each with the function or class to look for. A test follows the first two walks in a
real run.

### One training step

`GRPOTrainer.train` takes steps until the run is over. With default options each goes through:

{step}
Models with a large vocabulary score in `kernel/head.py`, without full logits; `max_staleness` and `streaming` replace
`Schedule` by other classes of `rollout/`.

### `gruppo resume`

{resume}
### Adding a sampler

Users name a class of their own as `--sampler module:Class` ([an example that runs](extending.md#a-sampler)). To add
one to gruppo, read:

{sampler}
Then add its tests to `tests/unit/sampler/`: the same request must draw the same tokens whatever else is in the batch.
"""


def places() -> dict[str, list[str]]:
    """Files of every function, class, method and constant at the top of a module, by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        names: list[str] = []
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                names += [node.name, *(f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef))]
            elif isinstance(node, ast.FunctionDef):
                names.append(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            found.setdefault(name, []).append(path.relative_to(SOURCE).as_posix())
    return found


def walk_list(walk: Walk, files: dict[str, list[str]]) -> str:
    lines = []
    for number, (name, what) in enumerate(walk, 1):
        there = files.get(name, [])
        assert len(there) == 1, f"WALKS in docs/generate.py: {name} is in {there}; name what is in one file"
        lines.append(f"{number}. `{there[0]}`, `{name}`: {what}\n")
    return "".join(lines)


def walks() -> str:
    files = places()
    return WALKS.format(step=walk_list(STEP, files), resume=walk_list(RESUME, files), sampler=walk_list(SAMPLER, files))


def first_line(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def map_page() -> str:
    packages = sorted({path.parent for path in SOURCE.rglob("*.py")})
    parts = [HEADER, walks()]
    for package in packages:
        name = package.relative_to(SOURCE.parent).as_posix()
        modules = sorted(p for p in package.glob("*.py") if p.name not in ("__init__.py", "__main__.py"))
        parts.append(f"\n## {name}\n\n{first_line(package / '__init__.py')}\n")
        if modules:
            parts.append("\n| file | |\n|---|---|\n")
            parts += [f"| `{path.name}` | {first_line(path).replace('|', '&#124;')} |\n" for path in modules]
    return "".join(parts)


def table(head: str, rows: Iterable[str]) -> str:
    return f"| {head} |\n|{'---|' * (head.count('|') + 1)}\n" + "".join(f"| {row} |\n" for row in rows)


def run_table() -> str:
    rows = (f"`{k.name}` | {k.what} | {k.over} | {k.expected} | {k.reduce}" for k in KEYS)
    return table("key | what it is | over | expect | values combine by", rows)


def formula_table(prefix: str, shown_as: str) -> str:
    chosen: list[Key] = [key for key in KEYS if key.name.startswith(prefix) and key.formula]
    rows = (f"`{k.name.replace(prefix, shown_as)}` | {k.formula} | {k.expected}" for k in chosen)
    return table("key | formula | expect", rows)


def metrics_page() -> str:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    text = filled(text, "keys: run", run_table())
    text = filled(text, "keys: train", formula_table("live/", "train/"))
    return filled(text, "keys: sampler", formula_table("sampler/", "sampler/"))


def filled(text: str, name: str, made: str) -> str:
    """The page with its generated part filled in."""
    text, found = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{made}\n{m[2]}", text, flags=re.S
    )
    assert found == 1, name
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A field of a class as its source has it."""

    name: str
    kind: str
    default: str
    """Empty: there is none."""
    what: str

    @property
    def values(self) -> str:
        """The type in words for a cell of a table.

        >>> Option(name="lr", kind="Annotated[float, Field(gt=0)] | None", default="None", what="").values
        'number > 0'
        """
        return in_words(ast.parse(self.kind, mode="eval").body)


WORDS = {
    "bool": "true or false", "int": "whole number", "float": "number", "str": "text", "Path": "path",
    "Positive": "whole number ≥ 1", "Count": "whole number ≥ 0", "Place": "path or name", "Named": "name",
    "Names": "list of texts", "AllNamed": "list of names", "HomePath": "path",
    "AdvancedOptions": "names with values",
}  # fmt: skip
"""Types of options as the tables call them."""

SEVERAL = {"number": "numbers", "text": "texts", "path": "paths"}


def in_words(kind: ast.expr) -> str:
    """An annotation in words. One that has none is an error, so that no Python reaches a page."""
    if isinstance(kind, ast.BinOp):  # one | other
        parts = [in_words(part) for part in (kind.left, kind.right)]
        if parts == ["number", "two numbers"]:
            return "one or two numbers"
        return " or ".join(part for part in parts if part)
    if isinstance(kind, ast.Constant) and kind.value is None:
        return ""
    if isinstance(kind, ast.Name):
        return WORDS[kind.id]
    assert isinstance(kind, ast.Subscript), ast.unparse(kind)
    outer, inside = ast.unparse(kind.value), kind.slice
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if outer == "Annotated":
        limits = [part for part in parts[1:] if isinstance(part, ast.Call) and ast.unparse(part.func) == "Field"]
        return " ".join([in_words(parts[0]), *map(bounds, limits)])
    if outer == "Literal":
        return ", ".join(f"`{ast.literal_eval(part)}`" for part in parts)
    if outer == "dict":
        return "names with values"
    assert outer == "tuple", ast.unparse(kind)
    several = SEVERAL[in_words(parts[0])]
    return f"list of {several}" if isinstance(parts[1], ast.Constant) else f"two {several}"


def bounds(field: ast.Call) -> str:
    """`Field(ge=0, le=1)` in signs, with names of limits as their values."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(f"{signs[limit.arg or '']} {limit_of(limit.value)}" for limit in field.keywords)


def limit_of(value: ast.expr) -> str:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Pow):
        return f"{ast.unparse(value.left)}^{ast.unparse(value.right)}"
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return f"{ast.literal_eval(value.left) * ast.literal_eval(value.right):,}"
    number = getattr(options, value.id) if isinstance(value, ast.Name) else ast.literal_eval(value)
    return f"{number:,}"


def options_of(cls: type) -> Iterator[Option]:
    """Fields of a class and its bases, with the string under each."""
    for owner in reversed(cls.__mro__[:-1]):
        if not owner.__module__.startswith("gruppo"):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for line, after in zip(definition.body, [*definition.body[1:], None], strict=True):
            if not isinstance(line, ast.AnnAssign) or "ClassVar" in ast.unparse(line.annotation):
                continue
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(line)
            said = str(after.value.value)
            default = "" if line.value is None else ast.unparse(line.value)
            default = "{}" if default.startswith("Field(default_factory=") else default
            kind = ast.unparse(line.annotation)
            alias = getattr(sys.modules[owner.__module__], kind, None)  # a name for a Literal
            kind = f"Literal{list(get_args(alias))}" if get_origin(alias) is Literal else kind
            yield Option(name=ast.unparse(line.target), kind=kind, default=default, what=cell(said))


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "&#124;")


def shown(default: str) -> str:
    return {"": "", "None": "unset", "()": "none", "{}": "none"}.get(default, f"`{default}`".replace("'", '"'))


CONFIG_HEADER = """# Options of a run

Generated from `options.py` by `make docs`. Every option is a flag (`--group-size 8`), a line of a YAML file
(`group_size: 8`) and an argument of `TrainConfig`. Flags win over the file, the file over a recipe. An unknown name, a
value out of range and options that contradict each other are refused before anything is loaded.

As flags, true or false is `--lora` or `--no-lora`, a list is `--stop END STOP`, and names with values are
`--loss-options share 0.1`. What is *unset* is `null` in YAML and `None` in Python.

```python
from gruppo.trainer import TrainConfig

config = TrainConfig(model="builtin", group_size=16, loss="gspo", clip_range=(3e-4, 4e-4))
print(config.to_yaml().splitlines()[0], config.prompts_per_step * config.group_size)
```

```text
model: builtin 512
```
"""


def config_page() -> str:
    parts = [CONFIG_HEADER]
    for group in reversed(TrainConfig.__bases__):
        rows = (f"`{o.name}` | {o.values} | {shown(o.default)} | {o.what}" for o in options_of(group))
        parts.append(f"\n## {group.__name__.removesuffix('Options')}\n\n{inspect.getdoc(group)}\n\n")
        parts.append(table("option | values | default | what it is", rows))
    rows = (f"`{o.name}` | {o.values} | {shown(o.default)} | {o.what}" for o in options_of(options.AdvancedOptions))
    parts.append(f"\n## Advanced\n\n{inspect.getdoc(options.AdvancedOptions)}\n\n")
    parts.append(table("option | values | default | what it is", rows))
    return "".join(parts)


CLI_HEADER = """# Command line

Generated from the help texts by `make docs`. `gruppo VERB --help` prints the same. Exit codes are in
[the run directory](run_directory.md#exit-codes).
"""


def cli_page() -> str:
    parts = [CLI_HEADER]
    for words, (module, function) in VERBS.items():
        made = importlib.import_module(module)
        source = inspect.getsource(getattr(made, function))
        (name,) = re.findall(r"parse\w*\((\w+),", source)
        of_a_run = re.findall(r"\w+_OPTIONS\b", source)
        cls = getattr(made, name)
        help_text = inspect.cleandoc(cls.__doc__ or "")
        commands = re.findall(r"^ *(gruppo .*)$", help_text, re.M)
        prose = re.sub(r"^ *gruppo .*\n?", "", help_text, flags=re.M).replace("\n\n\n", "\n\n").strip()
        parts.append(f"\n## gruppo {' '.join(words)}\n\n{prose}\n")
        if commands:
            parts.append(
                "\n```sh\n" + "".join(f"{re.sub(r'  +', '   # ', line, count=1)}\n" for line in commands) + "```\n"
            )
        rows = (f"{flag(o)} | {o.values} | {shown(o.default)} | {o.what}" for o in options_of(cls))
        parts.append("\n" + table("option | values | default | what it is", rows))
        if issubclass(cls, RunArguments):
            parts.append("\nAnd all options of [a run](config.md), each as a flag.\n")
        elif of_a_run:
            names = ", ".join(f"`--{name.replace('_', '-')}`" for name in getattr(made, of_a_run[0]))
            parts.append(f"\nAnd as for [a run](config.md): {names}.\n")
    return "".join(parts)


def flag(option: Option) -> str:
    if word := re.search(r"Word\('(\w+)', is_positional=True\)", option.kind):
        return f"`{word[1]}`"
    named = re.search(r"flag='([\w-]+)'", option.kind)
    return f"`{named[1] if named else '--' + option.name.replace('_', '-')}`"


def losses_page() -> str:
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    for name, cls in LOSSES.items():
        text = filled(text, f"formula: {name}", f"```text\n{cls()!r}\n```\n")
    return text


def run_directory_page() -> str:
    codes = {0: ["done"]}
    for _, error in inspect.getmembers(errors, inspect.isclass):
        codes.setdefault(error.exit_code, []).append(f"`{error.__name__}`: {cell(error.__doc__ or '')}")
    codes[1] = [
        "a Python traceback: a bug of gruppo or of a function of yours; of `gruppo doctor`: a problem was found"
    ]
    codes[STOPPED] = ["stopped by a signal and saved; `gruppo resume` goes on"]
    codes[130] = ["Ctrl-C before training began, or while another verb ran"]
    rows = (f"{code} | {' '.join(said)}" for code, said in sorted(codes.items()))
    return filled((DOCS / "run_directory.md").read_text(encoding="utf-8"), "exit codes", table("code | meaning", rows))


def coming_from_page() -> str:
    text = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    peers = {"TRL": TRL_TRAINER | TRL | UNSLOTH, "Open Instruct": OPEN_INSTRUCT, "Twinkle": TWINKLE, "verl": VERL}
    for peer, names in peers.items():
        theirs: dict[str, list[str]] = {}  # by what they are here
        for name, own in names.items():
            theirs.setdefault(own, []).append(f"`{name}`")
        cells = ((", ".join(named), *own.partition(": ")[::2]) for own, named in theirs.items())
        head = "TRL, Unsloth" if peer == "TRL" else peer
        rows = (f"{named} | `{own}` | {note}" for named, own, note in cells)
        text = filled(text, f"names: {peer}", table(f"{head} | here | note", rows))
    reasons: dict[str, list[str]] = {}
    for name, reason in (ABSENT | REFUSED).items():
        reasons.setdefault(reason.why, []).append(f"`{name}`")
    rows = (f"{', '.join(names)} | {cell(why)}" for why, names in reasons.items())
    return filled(text, "names: absent", table("option | why", rows))


PAGES = {
    "map.md": map_page,
    "metrics.md": metrics_page,
    "config.md": config_page,
    "cli.md": cli_page,
    "losses.md": losses_page,
    "run_directory.md": run_directory_page,
    "coming_from.md": coming_from_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}")
