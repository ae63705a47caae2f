"""What the tests of the chat page share: a headless browser, and how they look at the page."""

import contextlib
import json
import shutil

import pytest
from selenium import webdriver

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_BROWSER = [
    pytest.mark.deep,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
SECONDS = 100  # for what takes seconds; selenium itself waits for 120


@contextlib.contextmanager
def open_browser():
    """`requests`, of the browser, collects the requests that pages send; see `sent`."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,800"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:
        browser.set_script_timeout(SECONDS)
        browser.requests = []
        yield browser


def js(page, expression: str):
    return page.execute_script(f"return {expression}")


def text(page, selector: str) -> str:
    return js(page, f"document.querySelector('{selector}')?.textContent ?? ''")


def click(page, selector: str) -> None:
    js(page, f"document.querySelector('{selector}').click()")


def choose(page, **settings) -> None:
    page.execute_script("""
        for (const [name, value] of Object.entries(arguments[0])) settings.elements[name].value = value;
        settings.dispatchEvent(new Event("input"));""", settings)  # fmt: skip


def ask(page, question: str, stop: str | None = None) -> list[int]:
    """The lengths of the answer after each of its changes. stop: how to stop it after the first change."""
    return page.execute_async_script("""
        const [question, stop, done] = arguments, sizes = [];
        const stops = {
          button: () => document.querySelector("#stop").click(),
          escape: () => document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" })),
        };
        document.querySelector("#composer textarea").value = question;
        document.querySelector("#send").click();
        const look = () => {
          const size = document.querySelector("article:last-child .answer").textContent.length;
          if (size && size !== sizes.at(-1)) sizes.push(size);
          if (size) stops[stop]?.();
          if (document.body.classList.contains("busy")) return;
          watcher.disconnect();
          done(sizes);
        };
        const watcher = new MutationObserver(look);
        watcher.observe(document.body, { attributes: true, childList: true, subtree: true });""",
        question, stop)  # fmt: skip


def sent(page) -> list[dict]:
    """All requests that the page has sent."""
    for entry in page.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            page.requests.append(message["params"]["request"])
    return page.requests


def asked(page) -> dict:
    """The body of the page's last POST request."""
    return json.loads([x["postData"] for x in sent(page) if x["method"] == "POST"][-1])


def keep(page, *exchanges: tuple[str, dict]) -> None:
    """Store a conversation in the browser, as if the user had had it, and show it: questions and answers."""
    empty = dict(content="", reasoning="", calls=[], note="", error="")
    kept = [dict(question=question, chosen=0, answers=[empty | answer]) for question, answer in exchanges]
    conversation = json.dumps(dict(id=1, exchanges=kept))
    page.execute_script("localStorage.setItem('llama-jax conversation 1', arguments[0])", conversation)
    page.refresh()
