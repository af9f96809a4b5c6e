"""The pages in a real browser: axe-core finds nothing to complain of, and no page scrolls sideways."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from finished_search import finished_search
from made_up_inspection import made_up_inspection
from playwright.sync_api import Browser, Page, sync_playwright

from orchestrator.reporting.pages.inspection_page import build_page
from orchestrator.reporting.pages.report_page import write_report
from orchestrator.storage.json_files import write_json

pytestmark = pytest.mark.extended
WIDTHS = (360, 768, 1600)
PAGES = ("report", "unfinished", "inspection", "deep")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no chromium here: install the package of that name (Debian: apt install chromium)")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A search with everything, one that has only begun, and inspections of a small and of a deep model."""
    root = tmp_path_factory.mktemp("pages")
    search = finished_search(root / "a", demo_dir)
    begun = finished_search(root / "b", demo_dir)
    write_json(begun.promotion, {})
    for name, layers in (("inspection", 4), ("deep", 32)):
        (root / f"{name}.html").write_text(build_page(made_up_inspection(layers, 8)), encoding="utf-8")
    result = {"report": write_report(search.root)["report"], "unfinished": write_report(begun.root)["report"]}
    return {name: Path(result.get(name, root / f"{name}.html")) for name in PAGES}


def opened(browser: Browser, file: Path, width: int, scheme: Any) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(file.as_uri())
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_violation(browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    page = opened(browser, pages[name], width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    assert len(results.response["passes"]) > 15
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_no_page_scrolls_sideways(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    page = opened(browser, pages[name], width, "light")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_the_table_of_results_fits_a_page_of_1400_pixels(browser: Browser, pages: dict[str, Path]) -> None:
    """A long path is whole, in several lines."""
    page = opened(browser, pages["report"], 1400, "light")
    box = page.locator("div.scroll", has=page.locator("table")).first
    path = "promoted/t0007-64/" + "a-folder-with-a-long-name/" * 6
    cell = box.locator("tbody tr:nth-child(2) td:last-child")
    cell.evaluate("(cell, path) => { cell.textContent = path; }", path)
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth") and cell.inner_text() == path
    page.close()


def test_what_is_wrong_is_found(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "wrong.html"
    file.write_text("<html><body><h3>x</h3><img src=''><p style='width: 2000px; color: #ccc'>pale</p></body></html>")
    page = opened(browser, file, 360, "light")
    assert {"image-alt", "color-contrast", "html-has-lang"} <= {v["id"] for v in Axe().run(page).response["violations"]}
    assert page.evaluate("document.documentElement.scrollWidth") > 360
    page.close()


def test_keyboard_reaches_what_scrolls_and_the_skip_link(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["report"], 360, "light")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    box = page.locator("div.scroll", has=page.locator("table")).first
    box.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.evaluate("document.activeElement.classList.contains('scroll')")
    page.close()


def test_a_table_is_filtered_and_sorted_by_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["report"], 1600, "light")
    page.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    field = page.locator("input[type=search]").first
    table = page.locator(".filter + .scroll table").first
    everything = table.locator("tbody tr").count()
    field.fill("headfold_gqa 25%")
    assert table.locator("tbody tr:visible").count() == 1 < everything
    field.fill("")
    table.get_by_role("button", name="loss", exact=True).focus()
    for order in ("ascending", "descending"):
        page.keyboard.press("Enter")
        head = table.locator(f"th[aria-sort={order}]")
        assert head.inner_text().startswith("loss")
        column = head.evaluate("head => head.cellIndex")
        cells = table.locator(f"tbody tr > :nth-child({column + 1})").all_inner_texts()
        losses = [float(text) for text in cells if text[:1].isdigit()]
        assert len(losses) >= 8 and losses == sorted(losses, reverse=order == "descending")
    page.close()


def test_points_show_their_values_and_commands_are_copied(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["report"], 1600, "light")
    page.locator("figure > .scroll").first.focus()
    tip = page.locator(".tip")
    assert not tip.is_visible()
    page.keyboard.press("ArrowRight")
    assert "1,024 bytes per token, loss" in tip.inner_text()
    page.keyboard.press("ArrowLeft")  # before the first is the last
    assert tip.inner_text().startswith("original model: 4,096 bytes")
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_role("button", name="Copied").or_(page.get_by_role("button", name="Selected")).wait_for()
    page.close()


def test_a_cut_table_says_that_it_scrolls(browser: Browser, pages: dict[str, Path]) -> None:
    script = """() => {
        for (const part of document.querySelectorAll("details")) part.open = true;
        return new Promise((resolve) => setTimeout(() => resolve([...document.querySelectorAll("div.scroll")]
            .filter((box) => box.querySelector("table") && box.clientWidth)
            .map((box) => [box.scrollWidth > box.clientWidth + 1,
                getComputedStyle(box, "::before").content.includes("Scroll")])), 100));
    }"""
    for width in (360, 1600):
        page = opened(browser, pages["report"], width, "light")
        overview, *others = page.evaluate(script)
        assert overview == [False, False], "on a narrow page it is a list"
        assert all(cut == hint for cut, hint in others)
        assert width > 360 or any(cut for cut, _ in others)
        page.close()
