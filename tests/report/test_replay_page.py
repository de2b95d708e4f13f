"""The page of a replayed step in a real browser: two losses' credit side by side, with the numbers of the replay."""

import json
from pathlib import Path
from typing import Any

import pytest
from pages import until

from gruppo.cli.main import run as run_command
from gruppo.errors import InputError
from gruppo.replay import replay
from gruppo.report.page import replay_page
from gruppo.run.reader import RunReader

ATTACK = "</script><script>window.hacked = 1</script><img src=x onerror=window.hacked=1>\u202e"
PLACE = """(({sample, variant}, {i}) => [sample, variant, i])(
  document.activeElement.closest('.strip').dataset, document.activeElement.dataset
)"""
COLOURS = "all => all.map(t => t.style.backgroundColor)"


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    """A run of one step with four updates, so that ratios leave the clip range."""
    output = tmp_path_factory.mktemp("replayed") / "first"
    options = (
        "--steps 1 --prompts-per-step 8 --group-size 4 --minibatches 2 --epochs-per-batch 2 --lr 1e-3 --temperature 1.5"
    )
    small = "--eval-prompts 0 --no-tensorboard --threads 1"
    assert run_command(["train", *options.split(), *small.split(), "--output", str(output)]) == 0
    return RunReader(output)


@pytest.fixture(scope="module")
def found(stepped: RunReader) -> dict[str, Any]:
    return replay(stepped, 1, ["gspo"]).as_json()


@pytest.fixture(scope="module")
def address(stepped: RunReader) -> str:
    """The page, written by the command."""
    page = stepped.path / "replay.html"
    assert run_command(["replay", str(stepped.path), "--step", "1", "--loss", "gspo", "--page", str(page)]) == 0
    return page.resolve().as_uri()


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", "").removesuffix(" %"))


def panel_numbers(page: Any) -> dict[str, str]:
    return page.locator("#token dd").evaluate_all(
        "all => Object.fromEntries(all.map(d => [d.dataset.name, d.textContent]))"
    )


def strip(page: Any, completion: dict[str, Any], variant: int) -> Any:
    return page.locator(f".strip[data-sample='{completion['sample']}'][data-variant='{variant}'] .tok")


def of_group(page: Any, found: dict[str, Any], place: int) -> list[dict[str, Any]]:
    """Choose a group; returns what the replay has of its completions."""
    page.locator(".group").nth(place).click()
    index = int(page.locator(".panel h3").text_content().split()[1])
    return [completion for completion in found["completions"] if completion["prompt_index"] == index]


def test_hovering_shows_the_credit_of_every_loss(open_page, stepped, found, address):
    opened = open_page(address)
    page = opened.page
    assert page.locator(".group").count() == 4  # a minibatch of the eight groups of the step
    rows = stepped.completions(1).to_pylist()
    compared = differ = 0
    for place in range(4):
        for completion in of_group(page, found, place):
            row = rows[completion["row"]]
            assert (row["prompt_index"], row["sample"]) == (completion["prompt_index"], completion["sample"])
            for variant in (0, 1):
                tokens = strip(page, completion, variant)
                assert tokens.count() == len(row["tokens"])
                for i in range(len(row["tokens"])):
                    tokens.nth(i).hover()
                    shown = panel_numbers(page)
                    own, other = (credit[i] for credit in completion["credit"])
                    assert number(shown["credit-0"]) == pytest.approx(own, rel=1e-3)
                    assert number(shown["credit-1"]) == pytest.approx(other, rel=1e-3)
                    assert number(shown["difference-1"]) == pytest.approx(other - own, rel=1e-3, abs=1e-6)
                    assert number(shown["sampler"]) == pytest.approx(row["logps"][i], rel=1e-3, abs=1e-6)
                    assert "−0" not in shown.values()
                    compared, differ = compared + 1, differ + (own != other)
    assert compared >= 64 and differ >= 16
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [address]


def test_the_table_has_what_the_replay_found(open_page, found, address):
    page = open_page(address).page
    cells = page.locator("#replay tr").evaluate_all("all => all.map(r => [...r.children].map(c => c.textContent))")
    names, *lines = cells
    assert [line[:2] for line in lines] == [["grpo (of the run)", "grpo"], ["gspo", "grpo"]]
    for i, (variant, line) in enumerate(zip(found["variants"], lines, strict=True)):
        shown = dict(zip(names, line, strict=True))
        assert number(shown["value"]) == pytest.approx(variant["value"], rel=1e-3)
        assert number(shown["gradient norm"]) == pytest.approx(variant["grad_norm"], rel=1e-4)
        assert number(shown["cosine"]) == pytest.approx(found["cosine"][0][i], rel=1e-4)
        assert number(shown["clipped"]) == pytest.approx(100 * variant["clipped"], abs=0.05)
        assert number(shown["masked"]) == pytest.approx(100 * variant["masked"], abs=0.05)
        assert number(shown["gain it"]) == variant["gained"]


def test_strips_are_coloured_by_credit_on_one_scale(open_page, found, address):
    page = open_page(address).page
    limit = page.evaluate("viewer.limit")
    everything = sorted(
        abs(x) for completion in found["completions"] for credit in completion["credit"] for x in credit if x
    )
    assert limit == pytest.approx(everything[int(len(everything) * 0.99)], rel=1e-5)
    seen: dict[str, set[float]] = {}
    for place in range(4):
        for completion in of_group(page, found, place):
            for variant in (0, 1):
                colours = strip(page, completion, variant).evaluate_all(COLOURS)
                for credit, colour in zip(completion["credit"][variant], colours, strict=True):
                    if abs(credit) < 0.02 * limit:
                        continue
                    strength = min(abs(credit) / limit, 1)
                    alpha = float(colour.rpartition(",")[2].removesuffix(")"))
                    assert alpha == pytest.approx(0.08 + 0.57 * strength, abs=0.005)
                    seen.setdefault(colour.rpartition(",")[0], set()).add(credit)
    assert len(seen) == 2  # likelier and less likely have a hue each
    assert all(max(credits) < 0 or min(credits) > 0 for credits in seen.values())


def test_the_difference_colours_the_strip_of_the_other_loss(open_page, found, address):
    page = open_page(address).page
    page.select_option("#v-sort", "moved")
    page.select_option("#v-color", "difference")
    completions = of_group(page, found, 0)
    largest = max(abs(b - a) for c in found["completions"] for a, b in zip(*c["credit"], strict=True))
    assert largest == max(abs(b - a) for c in completions for a, b in zip(*c["credit"], strict=True))
    own, other = (
        [c for c in page.locator(f".strip[data-variant='{v}'] .tok").evaluate_all(COLOURS) if c] for v in (0, 1)
    )
    assert own == [] and other


def test_the_keyboard_alone_reaches_a_token_of_either_loss(open_page, address):
    page = open_page(address).page
    kind = "document.activeElement.className.split(' ')[0]"
    page.focus("#v-sort")
    for _ in range(12):
        if page.evaluate(kind) == "group":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    sample, variant, i = page.evaluate(PLACE)
    assert (variant, i) == ("0", "0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(PLACE) == [sample, "1", "1"]
    assert panel_numbers(page)["credit-1"] != "–"
    marked = page.locator(".tok.on").evaluate_all("all => all.map(t => t.closest('.strip').dataset.variant)")
    assert marked == ["0", "1"]
    page.keyboard.press("ArrowDown")
    assert page.evaluate(PLACE)[:2] != [sample, "1"]


def test_the_first_link_leads_to_the_token_that_differs_most(open_page, found, address):
    page = open_page(address).page
    page.select_option("#v-sort", "moved")
    completions = of_group(page, found, 0)
    page.locator(".top-tokens a").first.click()
    until(page, "document.activeElement.classList.contains('tok')")
    sample, _, i = page.evaluate(PLACE)
    (chosen,) = [c for c in completions if c["sample"] == int(sample)]
    gaps = {
        (c["sample"], k): abs(b - a) for c in completions for k, (a, b) in enumerate(zip(*c["credit"], strict=True))
    }
    assert gaps[chosen["sample"], int(i)] == pytest.approx(max(gaps.values()), rel=1e-4)


def test_names_of_losses_that_attack_are_text(open_page, stepped, found, tmp_path):
    variants = [variant | {"name": ATTACK, "loss": ATTACK, "advantage": ATTACK} for variant in found["variants"]]
    file = tmp_path / "hostile.html"
    file.write_text(replay_page(stepped, found | {"variants": variants, "notes": [ATTACK], "weights": ATTACK}))
    opened = open_page(file.as_uri())
    opened.page.locator(".strip .tok").first.hover()
    assert opened.page.evaluate("[window.hacked, document.images.length, document.scripts.length]") == [None, 0, 3]
    assert "window.hacked = 1" in opened.page.locator("#token").text_content()
    assert "\u202e" not in opened.page.locator("body").inner_text()
    assert opened.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_has_nothing_beyond_its_edge(open_page, address, scheme):
    page = open_page(address, viewport={"width": 360, "height": 740}, color_scheme=scheme).page
    page.locator(".strip .tok").first.hover()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# --- without a browser ------------------------------------------------------------------------------------------------


def test_a_file_that_exists_or_is_named_twice_is_refused(stepped, tmp_path: Path):
    words = ["replay", str(stepped.path), "--step", "1", "--recorded"]
    page = tmp_path / "page.html"
    with pytest.raises(InputError, match="--out and --page both name"):
        run_command([*words, "--page", str(page), "--out", str(page)])
    with pytest.raises(InputError, match=r"--page .*cannot be written"):
        run_command([*words, "--page", str(tmp_path / "missing" / "page.html")])
    assert run_command([*words, "--page", str(page), "--out", str(tmp_path / "all.json")]) == 0
    assert json.loads((tmp_path / "all.json").read_text())["completions"][0]["row"] == 16
    assert "script-src 'sha256-" in page.read_text()
    with pytest.raises(InputError, match=r"--page .*exists already"):
        run_command([*words, "--page", str(page)])


def test_the_page_holds_tokens_that_the_policy_did_not_write_and_advantages_per_token(stepped, found):
    from gruppo.report.data import Limits, TokenTexts, step_data

    first, second, *_ = found["completions"]
    given = {
        first["row"]: first | {"credit": [[None, 1.23456789e-7], [0.0, -2.0]], "advantage": [[0.5, 0.25], 1.5]},
        second["row"]: second,
    }
    shown = step_data(stepped, 1, TokenTexts(stepped), Limits(tokens=100), given)
    (group,) = shown["groups"]
    assert shown["left_out"] == 0 and len(group["rollouts"]) == 2
    assert group["rollouts"][0]["credit"] == [[None, 1.23457e-7], [0.0, -2.0]]
    assert group["rollouts"][0]["given"] == ["per token", 1.5]
