"""Remedies that exist: every option, verb, extra, file and name that an error, a warning or a help text tells of.

Texts are read from the syntax tree of the package, so a new one is held to it from its first day.
"""

import ast
import builtins
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import gruppo
from gruppo.cli.arguments import make_parser
from gruppo.cli.main import VERBS
from gruppo.peer_names import ABSENT, ELSEWHERE, REFUSED
from gruppo.trainer.config import OPTIONS, TrainConfig

SOURCE = Path(gruppo.__file__).parent
ROOT = Path(__file__).parents[2]
GAP = "\0"
"""Where a text has a value that is known only when it runs."""

OF_PIP = {"disable-pip-version-check", "input", "quiet", "deps", "only-binary", "dest", "upgrade"}
"""Flags of pip, as the pattern below reads them: without a `no-`."""

EXTERNAL = {
    # of transformers and its files
    "tie_word_embeddings", "base_model_name_or_path", "add_eos_token", "auto_map", "transformers_weights",
    "max_position_embeddings", "eos_token_id", "model_max_length", "quantization_config", "load_in_4bit",
    "from_pretrained", "chat_template", "chunked_attention", "vocab_size", "resize_token_embeddings",
    # of PEFT
    "lora_alpha", "target_modules", "lora_dropout", "modules_to_save", "get_peft_model", "peft_config",
    # of torch and vLLM
    "torch.optim", "processed_logprobs", "enable_prefix_caching", "model_impl",
    "BitsAndBytesConfig",
    # what stands for a name of the reader's own
    "your_function", "model_str", "key", "word", "f",
    # of Open Instruct
    "load_ref_policy",
}  # fmt: skip
"""Names of other packages, spelt as those spell them."""

KNOWN = frozenset({*OPTIONS, *ELSEWHERE, *ABSENT, *REFUSED, *EXTERNAL, *dir(builtins)})


class Text(NamedTuple):
    where: str
    text: str
    names: frozenset[str]
    """Parameters and fields of the function and the class that it stands in."""
    is_told: bool
    """A sentence, or part of an error, a warning or a line of the log."""


def constant_text(node: ast.AST) -> str | None:
    """The text of a string expression, with a GAP for what is filled in; None if it is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else GAP for v in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = constant_text(node.left), constant_text(node.right)
        return None if sides == (None, None) else "".join(GAP if side is None else side for side in sides)
    return None


def is_telling(node: ast.AST) -> bool:
    """Whether a statement or call tells somebody something: an error, a warning, a line of the log."""
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("warning", "warn", "info", "error", "exception", "require") or name.endswith("Error")


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of the nodes that are docstrings, of modules, classes, functions and fields."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def texts_of(path: Path) -> list[Text]:
    tree = tree_of(path)
    of_code = docstrings(tree)  # help texts are among them: what they name must exist, whatever else they say
    has_formulas = path.parent.name == "loss" or path.name == "keys.py"
    found: list[Text] = []

    def walk(node: ast.AST, names: frozenset[str], is_told: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            a = node.args
            names |= {p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
        elif isinstance(node, ast.ClassDef):
            fields = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            inits = [s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
            names |= {*fields, *(p.arg for s in inits for p in (*s.args.args, *s.args.kwonlyargs))}
        elif isinstance(node, ast.JoinedStr):  # "got n={n}, stop_reason={answer.stop_reason}" reports values
            names |= {
                n.id if isinstance(n, ast.Name) else n.attr
                for n in ast.walk(node)
                if isinstance(n, ast.Name | ast.Attribute)
            }
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Reason", "_each"):
            return walk(node.args[0], names, is_told)  # the rest are names that do not exist
        is_told = is_told or is_telling(node)
        text = constant_text(node)
        if text is not None:
            is_sentence = text.strip().count(" ") > 1 and not has_formulas and id(node) not in of_code
            where = f"{path.relative_to(SOURCE)}:{node.lineno}"
            found.append(Text(where, text, names, is_told or is_sentence))  # type: ignore[attr-defined]
            if not isinstance(node, ast.JoinedStr):
                return
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
                walk(child, names, is_told)

    walk(tree, frozenset(), False)
    return found


@cache
def texts() -> tuple[Text, ...]:
    return tuple(text for path in sorted(SOURCE.rglob("*.py")) for text in texts_of(path))


@cache
def flags_of(verb: str) -> frozenset[str]:
    """The flags that a verb takes."""
    module, function = VERBS[tuple(verb.split())]
    made = importlib.import_module(module)
    source = inspect.getsource(getattr(made, function))
    (kind,) = re.findall(r"parse\w*\((\w+),", source)
    of_a_run = [getattr(made, name) for name in re.findall(r"\w+_OPTIONS\b", source)]
    options = TrainConfig.model_fields if verb in ("train", "demo") else [name for names in of_a_run for name in names]
    parser = make_parser(getattr(made, kind), verb, options)
    return frozenset(
        flag.removeprefix("--") for action in parser._actions for flag in action.option_strings or [action.dest]
    )


ALL_FLAGS = frozenset().union({"help", "version"}, *(flags_of(" ".join(words)) for words in VERBS))


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def extras() -> dict[str, list[str]]:
    return tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]


def problems(text: Text) -> Iterator[str]:
    """What a text names and does not exist."""
    yield from wrong_commands(text.text)
    yield from wrong_files(text.text)
    if text.is_told:
        yield from wrong_names(text)


def wrong_commands(text: str) -> Iterator[str]:
    verbs = "|".join(" ".join(words) for words in VERBS)
    for verb, rest in re.findall(rf"gruppo ({verbs})\b((?:(?!gruppo |  )[^`\n])*)", text):
        for flag in [] if verb == "convert" else re.findall(r"--(?:no-)?([a-z][a-z-]+)", rest):  # of others
            if flag not in {"help", *flags_of(verb)}:
                yield f"gruppo {verb} has no --{flag}"
    for verb in re.findall(r"`gruppo ([a-z]+(?: check)?)", text):
        if tuple(verb.split()) not in VERBS:
            yield f"there is no verb {verb!r}"
    vllm_page = text_of("docs/vllm.md")
    for flag in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z-]+)(?![a-z_])", text):  # one with _ is of another trainer
        if flag not in {*ALL_FLAGS, *OF_PIP, "nproc-per-node", "no-"} and f"--{flag}" not in vllm_page:
            yield f"no verb has --{flag}, and docs/vllm.md has no such flag of vLLM"
    for extra in re.findall(r"gruppo\[(\w+)\]", text):
        if extra not in extras():
            yield f"pyproject.toml has no extra {extra!r}"
    for target in re.findall(r"`make ([a-z-]+)", text):
        if f"\n{target}:" not in text_of("Makefile"):
            yield f"the Makefile has no target {target!r}"


def wrong_files(text: str) -> Iterator[str]:
    for name in re.findall(r"\b(?:docs|tests|examples|benchmarks|src)/[\w./-]+\w", text):
        if not (ROOT / name).exists():
            yield f"there is no file {name}"
    for name in re.findall(r"\bgruppo(?:\.[A-Za-z_]\w*)+(?::\w+)?", text):
        if not exists(name):
            yield f"{name} cannot be imported"


def exists(name: str) -> bool:
    """Whether a dotted name of gruppo, or module:name, leads to something."""
    module, _, attribute = name.partition(":")
    parts = module.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in [*parts[i:], *filter(None, [attribute])]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@cache
def parameters() -> dict[str, frozenset[str]]:
    """Parameters and fields of every class and function of the package, by name."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                names = {p.arg for p in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                found.setdefault(node.name, set()).update(names)
            elif isinstance(node, ast.ClassDef):
                fields = {
                    s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
                }
                inits = [s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
                names = {p.arg for s in inits for p in (*s.args.args, *s.args.kwonlyargs)}
                found.setdefault(node.name, set()).update(fields | names)
    return {name: frozenset(names) for name, names in found.items()}


@cache
def identifiers() -> frozenset[str]:
    """Names in the code of the package, and words that it compares with or looks up: strings that are told nobody."""
    found = {text.text for text in texts() if not text.is_told}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            found |= {getattr(node, name, None) for name in ("id", "arg", "attr", "name")}  # type: ignore[arg-type]
    return frozenset(word for word in found if isinstance(word, str))


def wrong_names(text: Text) -> Iterator[str]:
    """Names of options in an error: those of a run, or of the function, class or call that the text has to do with."""
    calls = re.findall(r"\b([A-Za-z_]\w*)\((?!e?s\))", text.text)  # not the plural of "batch(es)"
    known = KNOWN | text.names
    for call in calls:
        known |= {call, *parameters().get(call, ())}
        if call not in parameters() and call not in EXTERNAL and not hasattr(builtins, call):
            yield f"there is no function or class {call!r}"
    for name in re.findall(rf"(?<![\w.{GAP}-])([a-z]\w+)=", text.text):
        if name not in known:
            yield f"{name}= is no option of a run, nor of the function or the call that the text has to do with"
    for name in re.findall(rf"(?<![\w.{GAP}-])([a-z]+_\w*)(?![\w{GAP}.(=:/])", text.text):
        if name not in known and name not in identifiers():
            yield f"nothing is called {name}"
    for name in re.findall(r"\b(?:GRUPPO|VLLM)_[A-Z_]+\b", text.text):
        if not any(name in text_of(page) for page in ("docs/vllm.md", "CONTRIBUTING.md")):
            yield f"docs/vllm.md, as CONTRIBUTING.md, does not have the variable {name}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_what_a_text_names_exists(path: Path) -> None:
    wrong = [f"{t.where}: {problem} ({t.text[:100]!r})" for t in texts_of(path) for problem in problems(t)]
    assert wrong == []


@pytest.mark.parametrize("told, problem", [
    ("leave bad rows out with `gruppo train --on-bad-rows drop`", "gruppo train has no --on-bad-rows"),
    ("use `gruppo export RUN FOLDER --merged`", "gruppo export has no --merged"),
    ("see `gruppo train --help` and --learning-speed", "no verb has --learning-speed"),
    ("go on with `gruppo continue runs/first`", "there is no verb 'continue'"),
    ("pip install 'gruppo[modelscopes]'", "pyproject.toml has no extra 'modelscopes'"),
    ("`make test-all` shows it", "the Makefile has no target 'test-all'"),
    ("docs/reward.md explains it", "there is no file docs/reward.md"),
    ("use gruppo.task.reasoning_gym:scores", "gruppo.task.reasoning_gym:scores cannot be imported"),
    ("pass template='chat' to make the strings user turns", "template= is no option of a run"),
    ("pass isolated=False", "isolated= is no option of a run"),
    ("RewardScorer([f], isolated=False) runs it here", "isolated= is no option of a run"),
    ("lower the tokens_per_minibatch", "nothing is called tokens_per_minibatch"),
    ("give load_rewards(function)", "there is no function or class 'load_rewards'"),
    ("start it with VLLM_SERVER_DEVELOPER_MODE=1", "does not have the variable VLLM_SERVER_DEVELOPER_MODE"),
])  # fmt: skip
def test_what_does_not_exist_is_found(told: str, problem: str) -> None:
    found = list(problems(Text("here", told, frozenset(), True)))
    assert any(problem in each for each in found), found


@pytest.mark.parametrize("told", [
    "load_reward(function, isolated=False) runs it in this process",
    "fold it in first: gruppo export FOLDER NEW --merge; then `gruppo train --no-lora --model NEW`",
    "set beta or kl_in_reward, or lower max_new_tokens=256 (docs/losses.md); pip install 'gruppo[train]'",
])  # fmt: skip
def test_what_exists_is_not_complained_of(told: str) -> None:
    assert list(problems(Text("here", told, frozenset(), True))) == []


def test_other_trainers_names_lead_to_options_of_ours() -> None:
    assert {own.partition(":")[0] for own in ELSEWHERE.values()} <= OPTIONS.keys()
    assert not REFUSED.keys() & OPTIONS.keys()


def test_every_missing_extra_is_one_of_the_project() -> None:
    """`require("extra", ...)` and trackers by name: the hints that are put together at run time."""
    asked = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
                asked.add(node.args[0].value if isinstance(node.args[0], ast.Constant) else path.stem)
    assert asked == {"train", "data", "tasks", "modelscope", "math", "vllm", "qlora", "gguf", "ray", "trackers"}
    assert (asked - {"trackers"}) | {"wandb", "trackio"} <= extras().keys()


def test_a_path_in_a_printed_command_is_quoted() -> None:
    """`gruppo resume my run` would be read as two paths."""
    command = re.compile(r"gruppo (?:resume|export|doctor|report|eval|view|sample|demo|convert)\b[^`\n]*?\{(.*?)\}")
    unquoted = [
        f"{path.relative_to(SOURCE)}: {found[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for found in command.finditer(path.read_text(encoding="utf-8"))
        if "shell_word" not in found[1]
    ]
    assert unquoted == []
