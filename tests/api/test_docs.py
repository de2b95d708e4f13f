"""The documentation tells the truth: its code runs, prints what it shows, and names what exists."""

import ast
import contextlib
import inspect
import io
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from warm_process import run_python

from gruppo.metric import CISPOMetric, GRPOMetric, GSPOMetric

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALL = sorted(path.name for path in DOCS.glob("*.md"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.M | re.S)
PAGES = [name for name in ALL if PYTHON_BLOCK.search((DOCS / name).read_text(encoding="utf-8"))]
PAGES.remove("index.md")  # the run of README, which test_readme.py takes
OUTPUT_BLOCK = re.compile(r"\s*^```text\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def given(page, tmp_path, monkeypatch):
    """What a page takes for granted, in a directory of its own: a run, or a sampler and the model that is trained."""
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        namespace = {"__name__": "__docs__"}
        if page in ("run_directory.md", "doctor.md", "report.md"):
            from gruppo.trainer import GRPOTrainer, TrainConfig

            sizes = {
                "max_new_tokens": 4,
                "steps": 1,
                "prompts_per_step": 2 if page == "run_directory.md" else 8,
                "group_size": 2,
                "eval_prompts": 0,
            }
            GRPOTrainer(TrainConfig(output="runs/first", **sizes), quiet=True).train()
        if page == "distributed.md":
            monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        if page == "vllm.md":
            monkeypatch.syspath_prepend(str(ROOT / "tests/unit/sampler"))
            from stub_vllm import StubServer

            from gruppo.model import TransformersModel
            from gruppo.sampler import vLLMSampler

            server = stack.enter_context(contextlib.closing(StubServer()))
            sampler = vLLMSampler("builtin", servers=[server.address], max_model_len=24)
            stack.callback(sampler.close)
            namespace |= {"sampler": sampler, "actor": TransformersModel("builtin", device="cpu")}
        yield namespace


@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=pytest.mark.long) if name == "distributed.md" else name for name in PAGES]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what starts a worker process
def test_python_blocks_print_what_the_page_shows(page, given):
    """The blocks of a page share one namespace, in order. A ```text block after one is its whole output."""
    text = (DOCS / page).read_text(encoding="utf-8")
    namespace = given
    blocks = list(PYTHON_BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block[1], page, "exec"), namespace)  # the newlines make tracebacks name the line
        shown = OUTPUT_BLOCK.match(text, block.end())
        assert printed.getvalue() == (shown[1] if shown else ""), f"docs/{page}, block at line {line}"


@pytest.mark.parametrize(
    "path", [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_every_block_is_of_a_kind_that_a_test_reads(path):
    """python, sh and yaml are run or read, text is compared with what a block printed, math is TeX."""
    fences = re.findall(r"^```(.*)$", path.read_text(encoding="utf-8"), re.M)
    assert set(fences[1::2]) <= {""}  # the closing ones
    assert {opening.split(" ")[0] for opening in fences[::2]} <= {"python", "sh", "yaml", "text", "math"}


YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", [name for name in ALL if YAML_BLOCK.search((DOCS / name).read_text(encoding="utf-8"))])
def test_yaml_blocks_are_options_of_a_run(page):
    import yaml

    from gruppo.trainer import TrainConfig

    for block in YAML_BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        TrainConfig.read(yaml.safe_load(block), where=page)


@pytest.mark.parametrize("page", ALL)
def test_links_and_figures_lead_somewhere(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = DOCS / name if name else DOCS / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(file: Path) -> set[str]:
    """The anchors GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [name for name in ALL if name != "map.md"])  # its files are grouped by folder
def test_files_named_on_the_page_exist(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / "src" / "gruppo" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("metric", [GRPOMetric, GSPOMetric, CISPOMetric])
def test_metrics_page_lists_the_keys_that_are_reported(metric):
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    in_table = re.findall(r"^\| `(train/\w+)` \| .* \| .* \|$", text.split("## Reading a value")[0], re.M)
    with_section = re.findall(r"^### `(train/\w+)`$", text, re.M)
    logps = torch.tensor([[-1.0, -2.0]])
    full = metric(top_k_kl=1)
    full.accumulate(
        {"labels": torch.tensor([[3, 4]])},
        {"logps": logps, "entropies": -logps},
        old_logps=logps + 0.1,
        advantages=[1.0],
    )
    reported = full.calculate()
    assert in_table == with_section
    assert set(in_table) == set(reported) and len(in_table) == len(reported)


SECTIONS = {
    "drgrpo": "Dr. GRPO",
    "dual_clip": "Dual clip",
    "two_sided": "Two-sided clip",
    "decoupled_ppo": "Decoupled PPO",
    "top_entropy": "Top entropy",
    "clip_cov": "Clip-Cov",
    "kl_cov": "KL-Cov",
    "prime": "Prime",
    "gspo_token": "GSPO-token",
}
COMPARED_IN_TABLES = ("grpo", "gspo", "sapo", "cispo", "bnpo", "drgrpo", "dapo")


def named(part):
    return getattr(part, "__name__", type(part).__name__)


def test_losses_page_lists_the_parts_of_every_named_loss():
    from gruppo.loss import LOSSES

    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+Loss)` \| `(\w+)` \| `(\w+)` \| `(\w+)` \| `(\w+)` \| (\S*) \|", text, re.M)
    expected = []
    for name, cls in LOSSES.items():
        made = cls()
        select = f"`{named(made.select)}`" if made.select is not None else ""
        expected.append((cls.__name__, name, named(made.level), named(made.surrogate), named(made.aggregate), select))
    assert rows == expected


def test_losses_page_lists_the_own_options_of_every_named_loss_with_their_defaults():
    from gruppo.loss import LOSSES

    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    for cls in LOSSES.values():
        (row,) = re.findall(rf"^\| `{cls.__name__}` \|.*$", text, re.M)
        listed = {name: ast.literal_eval(value) for name, value in re.findall(r"`(\w+)=([^`]+)`", row)}
        own = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert listed == {p.name: p.default for p in own}, cls.__name__


def test_losses_page_has_a_section_for_every_named_loss():
    from gruppo.loss import LOSSES

    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    compared = (DOCS / "comparison.md").read_text(encoding="utf-8")
    for name, cls in LOSSES.items():
        heading = SECTIONS.get(name, name.upper().replace("_", "-"))
        section = text.split(f"\n### {heading}\n")[1].split("\n### ")[0]
        assert "```math" in section and "Parts: " in section and f"```text\n{cls()!r}\n```" in section, heading
        if cls.paper.startswith("arXiv"):
            assert cls.paper in section, heading
        if name in COMPARED_IN_TABLES:
            for peer in ("Twinkle", "TRL", "Open Instruct", "verl"):
                assert f"\n| {heading} | {peer} |" in compared, f"{heading}: {peer}"
        else:
            assert re.search(rf"^\| {heading} \| .+ \|$", compared, re.M), heading


def test_losses_page_names_every_part():
    from gruppo import loss

    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    table = text.split("| part | symbol |")[1].split("\n\n")[0]
    rows = {line.split(" | ")[0]: set(re.findall(r"`(\w+)`", line)) for line in table.splitlines()}
    weights = set(loss.weights.__all__) - {"CORRECTIONS", "CorrectedSum"}
    kinds: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in {*loss.parts.__all__, "CorrectedSum"} - {"part"}:
        made = getattr(loss, name)
        takes = inspect.signature(made.__call__ if isinstance(made, type) else made).parameters
        kinds[tuple(each for each in takes if each != "self")].add(name)
    assert rows["| level"] == kinds["inputs",]
    assert rows["| surrogate"] == kinds["log_ratio_T", "inputs"]
    assert rows["| weights: correction"] | rows["| weights: selection"] == weights
    assert rows["| terms: KL"] == {estimator.__name__ for estimator in loss.KL_NAMES.values()}
    assert rows["| terms: KL"] | rows["| terms: others"] == set(loss.terms.__all__) - {"KL_ESTIMATORS", "KL_NAMES"}
    assert rows["| aggregation"] == kinds["segments", "totals"]


def test_advantages_page_lists_every_estimator_with_its_class_and_paper():
    from gruppo.advantage import ADVANTAGES

    text = (DOCS / "advantages.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+Advantage)` \| .+ \| (\d{4}\.\d{5}|none) \| .+ \|$", text, re.M)
    assert [(name, cls) for name, cls, _ in rows] == [(n, c.__name__) for n, c in ADVANTAGES.items()]
    for name, _, paper in rows:
        described = " ".join((ADVANTAGES[name].__doc__ or "").split())
        assert paper == "none" or f"arXiv:{paper}" in described, name


def test_rewards_page_has_every_option_of_every_builtin_with_its_default_and_an_example():
    from gruppo.reward.load import BUILTIN

    text = (DOCS / "rewards.md").read_text(encoding="utf-8")
    built_ins = text.split("\n## Built-ins\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \| (\S+) \| .+ \|$", built_ins, re.M))
    expected = set()
    for name, cls in BUILTIN.items():
        assert f"`{name}`" in built_ins and re.search(rf'\("{name}[":]|\(r"{name}:|"{name}:', built_ins), name
        for parameter in inspect.signature(cls).parameters.values():
            default = parameter.default
            written = ",".join(default) if isinstance(default, tuple) else default
            written = f"`{written}`" if isinstance(written, str) and written else written
            expected.add((parameter.name, str(written or (0 if written == 0 else "none"))))
    assert listed == expected


def test_training_page_lists_every_recipe_with_its_loss_and_advantage():
    from gruppo.recipes import RECIPES

    text = (DOCS / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d{4}\.\d{5}|blog) \| `(\w+)` \| `(\w+)` \| .+ \|$", text, re.M)
    assert rows == [(n, r.paper, r.values["loss"], r.values["advantage"]) for n, r in RECIPES.items()]


def test_advantages_page_lists_every_number_of_dynamic_sampling():
    from gruppo.rollout.source import dynamic_metrics

    text = (DOCS / "advantages.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(dynamic/\w+)` \|", text, re.M)
    assert listed == [*dynamic_metrics([], 0), "dynamic/prompts_retired"]


@pytest.mark.parametrize("figure", ["surrogates.png", "kl.png", "tutorial_ratio.png", "tutorial_kl.png", "signal.png"])
def test_figures_are_small_png_files(figure):
    data = (DOCS / "figures" / figure).read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and len(data) < 200_000


def test_loss_on_paper_agrees_with_itself():
    """By hand: 0.25 * -1.2 + 0.25 * (-0.9 + 0.1 * (1 - ln 2)) + 0.5 * (0.8 + 0.1 * (ln 2 - 0.5)) = -0.107671."""
    script = ROOT / "examples" / "01_loss_on_paper.py"
    ran = run_python([script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    table = dict(re.findall(r"^(GRPO|GSPO|Dr\. GRPO) +([+-]\d\.\d{6}) +\2$", ran.stdout, re.M))
    assert table == {"GRPO": "-0.107671", "GSPO": "-0.163619", "Dr. GRPO": "-0.312500"}
    assert re.search(r"= loss +-0\.107671$", ran.stdout, re.M)
    assert len(script.read_text(encoding="utf-8").splitlines()) < 120


def test_losses_page_lists_every_correction_by_name():
    from gruppo.loss import CORRECTIONS

    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    listed = text.split("In a run, `correction` takes a name: ")[1].split(", or `your.module")[0]
    assert re.findall(r"`(\w+)`", listed) == list(CORRECTIONS)
