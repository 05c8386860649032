"""report.html in a real browser, opened from disk as a reader does. Needs Debian's chromium and chromium-driver."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from harness.report import write_reports
from harness.report.as_html import to_html
from harness.run_folder import RunFolder
from harness.running.phases import judge_again
from tests.report_builders import cells, many_cells, run_report

pytestmark = pytest.mark.browser

CHROMEDRIVER = "/usr/bin/chromedriver"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900")
DEADLINE_S = 20
RECORDED = Path(__file__).parent / "recorded" / "h200-v2-runner"
RED = "recompute-report-sync-middle"
EVIL = "<img src=x onerror=document.title='hit'></script><script>document.title='hit'</script>"
WIDTHS = (400, 1280)


class Page:
    """report.html in the browser, and what a reader does with it."""

    def __init__(self, driver: webdriver.Chrome, file: Path) -> None:
        self.driver, self.file = driver, file
        self.open()

    def open(self, fragment: str = "") -> None:
        """Load it anew, however the address differs."""
        self.driver.get("about:blank")
        self.driver.get(self.file.as_uri() + fragment)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def shown(self) -> list[str]:
        """The ids of the cells that are listed."""
        return self._cells("cell.checkVisibility()")

    def opened(self) -> list[str]:
        return self._cells("cell.open")

    def _cells(self, condition: str) -> list[str]:
        script = f"return [...document.querySelectorAll('details.cell')].filter((cell) => {condition})"
        return list(self.driver.execute_script(f"{script}.map((cell) => cell.dataset.id.slice('cell-'.length))"))

    def press(self, *keys: str) -> None:
        """On whatever has the focus."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def search(self, text: str) -> None:
        self.one("[name=q]").send_keys(text)

    def choose(self, name: str, value: str) -> None:
        self.one(f"[name={name}]").send_keys(value)

    def links(self, inside: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, f"{inside} a")

    @property
    def focused(self) -> str:
        """The cell whose line has the focus, or the name of what has."""
        active = self.driver.switch_to.active_element
        if active.tag_name != "summary":
            return active.get_attribute("name") or active.tag_name
        parent = active.find_element(By.XPATH, "..")
        return str(parent.get_attribute("data-id")).removeprefix("cell-")

    @property
    def fragment(self) -> str:
        return unquote(str(self.driver.execute_script("return location.hash.slice(1)")))

    def is_in_view(self, selector: str) -> bool:
        script = "const r = arguments[0].getBoundingClientRect(); return r.bottom > 0 && r.top < innerHeight"
        return bool(self.driver.execute_script(script, self.one(selector)))

    def wait_until(self, holds: object) -> None:
        WebDriverWait(self.driver, DEADLINE_S).until(holds)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield browser
    browser.quit()


@pytest.fixture(autouse=True)
def nothing_is_said_or_asked(driver: webdriver.Chrome) -> Iterator[None]:
    """After each test: no console message, and no request but for the file itself."""
    yield
    assert driver.get_log("browser") == []
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {address for address in asked if not address.startswith(("file:///", "about:blank"))} == set()
    assert {Path(address.split("#")[0]).name for address in asked if address.startswith("file:")} <= {"report.html"}
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with one red cell whose answer is markup, and a run of 200 cells."""
    log = tuple(f"(EngineCore pid=1) INFO 11-30 17:14:09 [core.py:99] {EVIL} line {index}" for index in range(60))
    odd = tuple(replace(cell, why=EVIL) if cell.id == RED else cell for cell in cells())
    many = many_cells(200)
    red = {cell.id: "something else" for cell in many if "report-sync-middle" in cell.id}
    reports = {"small": run_report(odd, {RED: EVIL}, log), "large": run_report(many, red, log)}
    found = {}
    for name, report in reports.items():
        found[name] = tmp_path_factory.mktemp(name) / "report.html"
        found[name].write_text(to_html(report), "utf-8")
    return found


@pytest.fixture
def page(driver: webdriver.Chrome, files: dict[str, Path]) -> Page:
    return Page(driver, files["small"])


def test_a_click_on_a_red_cell_in_the_picture_shows_its_story(page: Page) -> None:
    page.one(f"details.cell[data-id='cell-{RED}'] > summary").click()
    assert page.opened() == []
    tile = page.one(".tile.fail[href]")
    assert tile.text == "✗ wrong-output"
    tile.click()
    assert page.opened() == [RED]
    assert page.focused == RED
    assert page.is_in_view(f"#cell-{RED} .why")
    story = page.one(f"#cell-{RED}").text
    for part in (
        "differs from partial(3) at token 0",
        "▲ first",
        "does not hold",
        "--cell recompute-report-sync-middle",
    ):
        assert part in story


def test_the_timeline_shows_what_happened_in_each_lane(page: Page) -> None:
    texts = [text.text for text in page.driver.find_elements(By.CSS_SELECTOR, f"#cell-{RED} .timeline text")]
    assert texts[1:3] == ["victim", "HTTP 200"]
    assert {"loaded 0-6", "fault report 3", "reported 3", "canary"} <= set(texts)


def test_filters_narrow_the_list_and_dim_the_picture(page: Page) -> None:
    page.one(".statuses .fail").click()
    assert page.shown() == [RED]
    assert page.one("#shown").text == f"1 of {len(cells())} cells"
    assert len(page.driver.find_elements(By.CSS_SELECTOR, ".tile.out")) == len(cells()) - 1
    page.one(".statuses .fail").click()
    page.choose("load", "async")
    page.choose("engine", "decode-fail")
    assert page.shown() == [cell.id for cell in cells() if cell.id.startswith("fail-") and "-async" in cell.id]
    page.one("#filter [type=reset]").click()
    assert len(page.shown()) == len(cells())


def test_a_dimmed_cell_of_the_picture_can_be_looked_at_all_the_same(page: Page) -> None:
    page.one(".statuses .fail").click()
    page.one(".tile.out").click()
    first = cells()[0].id
    assert page.focused == first
    assert first in page.opened()
    assert page.is_in_view(f"#cell-{first} .why")
    assert len(page.shown()) == len(cells())


def test_search_finds_words_anywhere_in_a_story(page: Page) -> None:
    page.search("PARTIAL(6)  decode-fail")
    assert page.shown() == ["fail-report-sync-last", "fail-report-async-last"]
    page.search(" no-such-word")
    assert page.shown() == []
    assert page.one("#none").is_displayed()
    page.one("#clear-none").click()
    assert len(page.shown()) == len(cells())


def test_the_address_holds_the_state_and_brings_it_back(page: Page) -> None:
    page.choose("load", "sync")
    page.search("middle")
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    state, shown, opened = page.fragment, page.shown(), page.opened()
    assert state == f"load=sync&q=middle&cell=cell-{shown[1]}"
    page.open(f"#{state}")
    assert (page.fragment, page.shown(), page.opened()) == (state, shown, opened)
    assert page.focused == shown[1]


def test_a_cell_has_an_address_of_its_own_and_back_leads_back(page: Page) -> None:
    page.open("#cell-fail-none-async")
    assert "fail-none-async" in page.opened()
    assert page.is_in_view("#cell-fail-none-async .why")
    page.one(".tile.fail[href]").click()
    assert page.fragment == f"cell-{RED}"
    page.driver.back()
    page.wait_until(lambda _: page.fragment == "cell-fail-none-async" and page.focused == "fail-none-async")


def test_keys_search_walk_open_close_and_clear(page: Page) -> None:
    page.press("/")
    assert page.focused == "q"
    page.press("silent/")
    assert page.one("[name=q]").get_property("value") == "silent/"
    page.press(Keys.BACKSPACE, Keys.ARROW_DOWN)
    first, second, *_ = page.shown()
    assert page.focused == first
    page.press(Keys.ARROW_DOWN)
    assert page.focused == second
    page.press(Keys.ENTER)
    assert second in page.opened()
    page.press(Keys.ESCAPE)
    assert second not in page.opened()
    assert page.focused == second
    page.press(Keys.ARROW_UP)
    assert page.focused == first
    page.press("/", Keys.ESCAPE)
    assert len(page.shown()) == len(cells())
    page.press(Keys.ESCAPE)
    assert page.focused == "body"


def test_tab_and_enter_open_a_cell_from_the_picture(page: Page) -> None:
    page.driver.execute_script("document.querySelector('a.tile').focus()")
    page.press(Keys.TAB, Keys.ENTER)
    second = page.driver.find_elements(By.CSS_SELECTOR, "a.tile")[1].get_attribute("title")
    assert page.focused == second
    assert second in page.opened()


def test_the_repeat_command_is_copied(page: Page) -> None:
    page.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    command = page.one(f"#cell-{RED} .command")
    button = page.one(f"#cell-{RED} .copy")
    button.click()
    page.wait_until(lambda _: button.text == "Copied")
    copied = page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == command.text
    assert re.fullmatch(rf"python harness/run_matrix.py run --replay \S+ --cell {RED}", copied)
    assert page.one("#said").get_property("textContent") == "Copied"


def test_markup_in_answers_logs_and_matrix_files_stays_text(page: Page) -> None:
    assert EVIL in page.one(f"#cell-{RED} .why").text
    assert EVIL in page.one(f"#cell-{RED} .pair div:nth-child(2) mark").text
    page.one("#unfold").click()
    log = page.one(f"#cell-{RED} details:last-of-type")
    log.find_element(By.TAG_NAME, "summary").click()
    assert EVIL in log.text
    assert page.driver.find_elements(By.CSS_SELECTOR, "img") == []
    assert len(page.driver.find_elements(By.TAG_NAME, "script")) == 1
    assert "hit" not in page.driver.title


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_its_window(page: Page, width: int, scheme: str) -> None:
    _resize(page.driver, width)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.open(f"#cell-{RED}")
    page.one("#unfold").click()
    page.driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.driver.execute_script(script) == 0
    assert _is_dark(page) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(page: Page, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert page.driver.execute_script(LOW_CONTRAST) == []


def test_paper_shows_everything_and_no_controls(page: Page) -> None:
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert len(page.opened()) == len(cells())
    assert page.one(f"#cell-{RED} details pre").is_displayed()
    assert not page.one("#filter").is_displayed()
    assert not page.one(".copy").is_displayed()
    page.driver.execute_script("dispatchEvent(new Event('afterprint'))")
    assert page.opened() == [RED]


def test_without_script_everything_can_be_read(driver: webdriver.Chrome, files: dict[str, Path]) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page = Page(driver, files["small"])
        assert page.opened() == [RED]
        assert not page.one("#filter").is_displayed()
        assert "7 loaded" in page.one(f"#cell-{RED}").text
        page.one("details.cell > summary").click()
        assert len(page.opened()) == 2
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_run_of_200_cells_is_small_and_quick(driver: webdriver.Chrome, files: dict[str, Path]) -> None:
    assert files["large"].stat().st_size < 2_000_000
    page = Page(driver, files["large"])
    assert page.one("#shown").text == "200 of 200 cells"
    page.one(".statuses .fail").click()
    red = page.shown()
    assert red
    assert all("report-sync-middle" in cell_id for cell_id in red)
    tile = page.driver.find_elements(By.CSS_SELECTOR, ".tile.fail[href]")[-1]
    cell_id = tile.get_attribute("title")
    tile.click()
    assert page.focused == cell_id
    assert page.is_in_view(f"#cell-{cell_id} .why")


def test_the_report_of_a_real_run_opens_with_its_evidence(driver: webdriver.Chrome, tmp_path: Path) -> None:
    run = shutil.copytree(RECORDED, tmp_path / "run")
    write_reports(judge_again(RunFolder.open(run)), run)
    page = Page(driver, run / "report.html")
    assert "vLLM 0.26.0, smollm2, shared-volume: 1 of 6 cells did not end as they must" in page.one("h1").text
    page.one(".tile.fail[href]").click()
    assert page.focused == RED
    addresses = [link.get_attribute("href") or "" for link in page.links(f"#cell-{RED}")]
    evidence = [Path(unquote(urlsplit(address).path)) for address in addresses if address.startswith("file:")]
    assert [file.name for file in evidence] == ["observation.json", "journal.jsonl", "engine.log", "verdict.json"]
    assert all(file.is_file() for file in evidence)
    assert page.one("#cost .chart").is_displayed()


def _resize(driver: webdriver.Chrome, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def _is_dark(page: Page) -> bool:
    return sum(_colour(page, "background-color")) < sum(_colour(page, "color"))


def _colour(page: Page, name: str) -> list[int]:
    text = page.one("body").value_of_css_property(name)
    return [int(part) for part in text.split("(")[1].rstrip(")").split(",")[:3]]


LOW_CONTRAST = """
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const back = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const low = new Set();
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !element.checkVisibility() || element.closest("script, .unseen")) continue;
  const style = getComputedStyle(element);
  const colour = parse(element.closest("svg") ? style.fill : style.color);
  const [a, b] = [light(colour), light(back(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) low.add(element.outerHTML);
}
return [...low];
"""
