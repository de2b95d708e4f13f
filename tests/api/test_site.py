"""The site: it builds without a warning and fetches nothing. Reference pages list what the code has."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gruppo.cli.main import VERBS, run
from gruppo.keys import find
from gruppo.trainer.config import OPTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def builder() -> str | None:
    """A Python that has mkdocs: this one, or that of `make site`."""
    needed = ("mkdocs", "material", "latex2mathml")
    if all(importlib.util.find_spec(name) for name in needed):
        return sys.executable
    other = ROOT / ".venv-docs" / "bin" / "python"
    return str(other) if other.is_file() else None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = builder()
    if python is None:
        pytest.skip("needs the extra docs, or .venv-docs of `make site`")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, (
        built.stderr
    )  # --quiet would hide them from --strict
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_fetches_nothing(site):
    assert {path.stem for path in site.glob("*.html")} - {"404"} == {path.stem for path in DOCS.glob("*.md")}
    for path in site.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"?https?://[^>]*>", page) == [], (
            path.name
        )
        assert not re.search(r"googleapis|gstatic", page)


@pytest.mark.slow
def test_formulas_are_mathml_and_no_tex_is_left(site):
    for name in ("losses", "tutorial", "advantages"):
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        prose = re.sub(r"<(code|annotation|title)\b.*?</\1>", "", page, flags=re.S)
        assert page.count("<math ") >= 3 and "\\frac" not in prose and "\\text" not in prose


@pytest.mark.slow
def test_the_two_columns_of_the_trl_page_are_code_in_a_table(site):
    page = (site / "coming_from.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td>(?:(?!</td>).)*?class=\"highlight\"(?:(?!</td>).)*</td>", page, re.S)
    assert len(cells) == 4
    # Side by side they would not fit: the second script of each table was out of sight at 1280 pixels.
    assert page.count('<table class="beside">') == 2 and 'href="site.css"' in page
    assert "table.beside" in (site / "site.css").read_text()


def test_the_options_page_lists_every_option_with_its_default():
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.*?) \| (.+) \|$", (DOCS / "config.md").read_text(encoding="utf-8"), re.M
    )
    assert [name for name, *_ in rows] == list(OPTIONS)
    words = {"unset": None, "none": ((), {}), "`True`": True, "`False`": False}
    for name, _, default, said in rows:
        real = OPTIONS[name].get_default(call_default_factory=True)
        if default == "none":
            assert name == "advanced" or real in words["none"], name
        elif default in words:
            assert real is words[default], name
        else:
            assert default.strip("`").replace("_", "") == repr(real).replace("'", '"').replace("_", ""), name
        assert len(said) > 5


@pytest.mark.parametrize("page", ["config.md", "cli.md"])
def test_the_values_of_an_option_are_in_words_that_need_no_python(page):
    values = dict(re.findall(r"^\| `([\w-]+)` \| (.+?) \| ", (DOCS / page).read_text(encoding="utf-8"), re.M))
    assert len(values) > 20
    words = {word for said in values.values() for word in re.findall(r"[^\W\d]\w*", re.sub(r"`.*?`", "", said))}
    known = "whole numbers? true or false texts? paths? list of names? with values one two"
    assert [word for word in sorted(words) if not re.fullmatch(known.replace(" ", "|"), word)] == []
    if page == "config.md":
        assert [values[name] for name in ("lora_rank", "stop", "group_size", "clip_range", "quantize", "seed")] == [
            "whole number ≥ 1, ≤ 65,536", "list of texts", "whole number", "one or two numbers", "`nf4`",
            "whole number ≥ 0, < 2^64",
        ]  # fmt: skip


@pytest.mark.parametrize("words", [words for words in VERBS if words not in (("train",), ("demo",))], ids=" ".join)
def test_the_command_page_lists_the_flags_that_help_prints(words, capsys):
    with pytest.raises(SystemExit):
        run([*words, "--help"])
    help_text = capsys.readouterr().out
    printed = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", help_text) if not flag.startswith("--no-")}
    section = (
        (DOCS / "cli.md").read_text(encoding="utf-8").split(f"\n## gruppo {' '.join(words)}\n")[1].split("\n## ")[0]
    )
    assert set(re.findall(r"^\| `(--[\w-]+)` \|", section, re.M)) <= printed
    assert {flag for flag in printed if flag not in section} <= {"--help"}


KNOWN = {"gpu_memory_utilization", "enable_thinking", "lora_dropout", "modules_to_save", "tie_word_embeddings"}
"""Names of vLLM, of chat templates, of PEFT and of transformers."""


PARTS = {"doctor.md": ("## Symptoms", "## Check"), "training.md": ("", ""), "run_directory.md": ("", "## Files")}
"""Where a guide speaks of options and keys: from one heading to another."""


@pytest.mark.parametrize("page", PARTS)
def test_options_and_keys_of_a_guide_exist(page):
    """Names in backticks: `stage/key` is a metric, a name with an underscore an option, a loss, a reward, ..."""
    from gruppo.advantage import ADVANTAGES
    from gruppo.codec import SCHEMA
    from gruppo.loss import LOSSES
    from gruppo.reward.load import BUILTIN

    text, (first, last) = (DOCS / page).read_text(encoding="utf-8"), PARTS[page]
    text = text[text.index(first) : text.index(last) if last else None]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    names = re.findall(r"`([^`]+)`", text)
    columns = {"error/<name>", "extra/<name>"}
    stages = (
        "reward/",
        "group/",
        "completion/",
        "live/",
        "policy/",
        "optim/",
        "rollout/",
        "sampler/",
        "sync/",
        "eval/",
    )
    keys = [
        name for name in names if name.startswith((*stages, "dynamic/")) and name not in columns and "…" not in name
    ]
    assert [key for key in keys if find(key) is None] == []
    options = {name.split()[0] for name in names if re.match(r"[a-z]+_[a-z_]+(?: |$)", name)}
    known = OPTIONS.keys() | LOSSES.keys() | ADVANTAGES.keys() | BUILTIN.keys() | set(SCHEMA.names) | KNOWN
    assert options - known == set()
