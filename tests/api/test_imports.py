"""The core needs torch and nothing else; the types need not even that. Each check runs in a fresh interpreter."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gruppo

pytestmark = pytest.mark.slow

CORE = ("gruppo.loss", "gruppo.advantage", "gruppo.metric", "gruppo.batch", "gruppo.kernel")

# What `pip install torch` brings along (numpy is not among it) and what those packages need themselves.
TORCH = ("torch", "torchgen", "functorch", "typing_extensions", "filelock", "sympy", "mpmath", "networkx", "jinja2")
TORCH += ("markupsafe", "fsspec", "setuptools", "pkg_resources", "triton", "nvidia", "cuda")

HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {shown!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
"""


def run(code, shown=()):
    """Standard output of the code in a new interpreter that can import the standard library and `shown` alone; all
    that is installed if `shown` is None."""
    hide = "" if shown is None else HIDE.format(shown=(*shown, "gruppo", "__main__"))
    source = str(Path(gruppo.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", hide + code],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_imports_and_computes_with_torch_as_the_only_package():
    code = f"""
import {", ".join(CORE)}
import torch
labels, logps = torch.tensor([[3, 4], [5, -100]]), torch.zeros(2, 2, requires_grad=True)
features = [gruppo.batch.pack([])]
advantages = gruppo.advantage.GRPOAdvantage()([0.0, 1.0], num_generations=2)
loss = gruppo.loss.GRPOLoss()({{"labels": labels}}, {{"logps": logps}}, advantages=advantages).loss
loss.backward()
metric = gruppo.metric.GRPOMetric()
metric.accumulate({{"labels": labels}}, {{"logps": logps}}, old_logps=logps.detach(), advantages=advantages)
entropy = gruppo.kernel.logps_and_entropy(torch.zeros(1, 4), torch.tensor([0]))[1].exp()
print(loss.item(), logps.grad.tolist(), metric.calculate()["train/approx_kl"], round(entropy.item()))
"""
    assert run(code, TORCH) == "0.0 [[0.125, 0.125], [-0.25, 0.0]] 0.0 4\n"


@pytest.mark.parametrize("package", ["transformers", "peft", "pydantic", "yaml", "rich", "pyarrow", "numpy"])
def test_a_package_is_hidden_in_these_tests(package):
    code = f"""
try:
    import {package}
except ImportError:
    print("hidden")
"""
    assert run(code, TORCH) == "hidden\n"


def test_the_core_loads_no_package_but_torch_and_what_torch_loads():
    # With everything importable: whatever is loaded after the core was loaded by torch before it.
    code = f"""
import sys, torch, torch.distributed
before = {{name.partition(".")[0] for name in sys.modules}}
import {", ".join(CORE)}
after = {{name.partition(".")[0] for name in sys.modules}}
print(sorted(after - before - sys.stdlib_module_names - {{"gruppo"}}))
"""
    assert run(code, (*TORCH, *metadata.packages_distributions())) == "[]\n"


def test_records_of_a_run_are_read_without_torch_trainer_or_model(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    code = f"""
import gruppo.run.reader
run = gruppo.run.reader.RunReader({str(tmp_path)!r})
print(run.config()["steps"], run.metrics())
"""
    assert run(code, ("yaml", "_yaml")) == "3 [{'step': 1}]\n"


def test_no_module_of_the_run_package_loads_torch_trainer_or_model():
    code = """
import importlib, pkgutil, sys
import gruppo.run
names = [module.name for module in pkgutil.iter_modules(gruppo.run.__path__)]
for name in names:
    importlib.import_module(f"gruppo.run.{name}")
loaded = {".".join(name.split(".")[:2]) for name in sys.modules}
print(len(names) >= 9, sorted(loaded & {"torch", "transformers", "gruppo.trainer", "gruppo.model"}))
"""
    assert run(code, None) == "True []\n"


@pytest.mark.parametrize("verb", ["", "train", "resume", "demo"])
def test_the_help_of_a_run_does_not_load_torch(verb):
    code = f"""
import contextlib, io, sys
from gruppo.cli.main import run
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    run([*{verb.split()!r}, "--help"])
print("torch" in sys.modules, "gruppo {verb}".strip() in out.getvalue())
"""
    assert run(code, None) == "False True\n"


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("gruppo.sampler", ("model", "loss", "metric", "kernel", "batch", "advantage", "reward", "trainer", "cli")),
        ("gruppo.weights", ("model", "sampler", "loss", "metric", "kernel", "batch", "reward", "trainer", "cli")),
    ],
)
def test_samplers_and_weights_import_nothing_of_the_trainers_side(package, absent):
    code = f"""
import sys, {package}
loaded = {{name.split(".")[1] for name in sys.modules if name.startswith("gruppo.")}}
print(sorted(loaded & set({absent!r})), "vllm" in sys.modules)
"""
    assert run(code, (*TORCH, *metadata.packages_distributions())) == "[] False\n"


def test_types_and_errors_need_no_package_at_all():
    code = """
import gruppo, gruppo.types, gruppo.errors
feature = gruppo.types.InputFeature(prompt_ids=(1,), completion_ids=(2, 3))
print(feature.num_scored, issubclass(gruppo.errors.InputError, ValueError))
"""
    assert run(code) == "2 True\n"


def test_importing_gruppo_alone_does_not_load_torch():
    code = """
import sys, gruppo, gruppo.types, gruppo.errors
print("torch" in sys.modules)
"""
    assert run(code, TORCH) == "False\n"


def test_subpackages_load_when_they_are_first_used():
    code = """
import sys, gruppo
print("gruppo.loss" in sys.modules, gruppo.loss.GRPOLoss().beta, gruppo.types.Prompt.__name__, hasattr(gruppo, "lss"))
"""
    assert run(code, TORCH) == "False 0.0 Prompt False\n"


@pytest.mark.parametrize(
    "code, what, module",
    [
        ("import gruppo.model", "gruppo.model", "transformers"),
        ("import gruppo.trainer", "gruppo.trainer", "pydantic"),
        ("from gruppo.cli.main import run; run(['train'])", "gruppo train", "pydantic"),
    ],
)
def test_the_error_without_the_extra_says_what_to_install(code, what, module):
    caught = f"""
from gruppo.errors import MissingExtraError
try:
    {code}
except MissingExtraError as error:
    print(error)
"""
    told = f"{what} needs {module!r}, which is not installed; pip install 'gruppo[train]'\n"
    assert run(caught, (*TORCH, "numpy")) == told


def test_installed_packages_beyond_torch_and_numpy_are_extras():
    required = [r for r in metadata.requires("gruppo") or [] if "extra ==" not in r]
    assert sorted(r.split(">")[0] for r in required) == ["numpy", "torch"]


def test_type_checkers_see_the_annotations():
    assert (Path(gruppo.__file__).parent / "py.typed").is_file()


def test_the_trainer_is_found_at_the_top_too():
    from gruppo import GRPOTrainer, TrainConfig, trainer

    assert (GRPOTrainer, TrainConfig) == (trainer.GRPOTrainer, trainer.TrainConfig)
