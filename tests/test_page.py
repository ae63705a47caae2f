"""The server's chat page, in a headless browser."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest
from conftest import FAST
from selenium import webdriver

import main

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
KEY = "abc"
SECONDS = 100  # for what takes seconds; selenium itself waits for 120
START = 300  # for what takes a minute


def until(condition, seconds=SECONDS):
    """Call the condition until its result is true, and return that result."""
    late = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < late
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server that requires a key. Answers end when their row of 512 positions is full."""
    log = tmp_path_factory.mktemp("page") / "log"
    variables = dict(JAX_PLATFORMS="cpu", XLA_FLAGS=FAST, LLAMA_JAX_API_KEY=KEY)
    command = [sys.executable, main.__file__, "--serve", "--port", "0", "--rows", "2", "--ignore-eos"]
    folder = pathlib.Path(main.__file__).parent
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env=os.environ | variables, cwd=folder)

    def address():
        assert process.poll() is None, log.read_text()
        return re.search(r"^serving .* at (http://\S+):", log.read_text(), re.M)

    try:
        yield until(address, START)[1]
    finally:
        process.terminate()
        process.wait(SECONDS)


@pytest.fixture(scope="module")
def browser(url):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:
        browser.set_script_timeout(SECONDS)
        browser.requests = []
        browser.get(url.replace("//", f"//anyone:{KEY}@"))  # from now on the browser knows the key
        until(lambda: text(browser, "h1") == "tiny-llama3")
        yield browser


@pytest.fixture
def page(browser, url):
    """The page as on a first visit, with temperature 0."""
    browser.get(url)
    browser.execute_script("localStorage.clear()")
    browser.get(url)
    choose(browser, temperature=0)
    return browser


def choose(page, **settings) -> None:
    page.execute_script("""
        for (const [name, value] of Object.entries(arguments[0])) settings.elements[name].value = value;
        settings.dispatchEvent(new Event("input"));""", settings)  # fmt: skip


def js(page, expression: str):
    return page.execute_script(f"return {expression}")


def text(page, selector: str) -> str:
    return js(page, f"document.querySelector('{selector}')?.textContent ?? ''")


def click(page, selector: str) -> None:
    js(page, f"document.querySelector('{selector}').click()")


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


def metrics(url: str) -> str:
    request = urllib.request.Request(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        return response.read().decode()


def test_a_conversation(page):
    """An answer grows while it is shown, is sent along with the next question, and outlives a reload."""
    until(lambda: text(page, "h1") == "tiny-llama3")
    sizes = ask(page, "Tell me your name")
    assert len(sizes) > 2 and sizes == sorted(sizes)
    first = text(page, ".answer")
    assert re.fullmatch(r"\d+ tokens, .* per second, the first after .* s, cut off .*", text(page, ".note"))
    assert asked(page)["messages"] == [{"role": "user", "content": "Tell me your name"}]

    choose(page, system="Be brief", seed=7, max_tokens=5)
    ask(page, "And mine?")
    assert text(page, "article:last-child .note").startswith("5 tokens")
    question = asked(page)
    roles_and_texts = [tuple(turn.values()) for turn in question.pop("messages")]
    assert roles_and_texts == [
        ("system", "Be brief"), ("user", "Tell me your name"), ("assistant", first), ("user", "And mine?")
    ]  # fmt: skip
    streamed = dict(stream=True, stream_options=dict(include_usage=True))
    assert question == streamed | dict(temperature=0, seed=7, max_tokens=5)  # empty settings are not sent

    before = text(page, "#log")
    page.refresh()
    assert text(page, "#log") == before
    assert text(page, ".title") == "Tell me your name"
    ask(page, "And hers?")
    assert asked(page)["seed"] == 7


@pytest.mark.parametrize("stop", ["button", "escape"])
def test_stop(page, url, stop):
    """The server frees the row, and the page keeps the answer up to there."""
    cancelled = r'llama_requests_total\{outcome="cancelled"\} (\d+)'
    before = re.search(cancelled, metrics(url))
    assert ask(page, "Count to 100", stop)
    assert text(page, ".note") == "Stopped"
    until(lambda: "llama_rows_in_use 0.0" in metrics(url))
    assert int(re.search(cancelled, metrics(url))[1]) == int(before[1] if before else 0) + 1
    said = text(page, ".answer")
    page.refresh()
    assert text(page, ".answer") == said != ""


def test_an_error(page):
    """The page shows the server's message, keeps the question, and can ask it again."""
    choose(page, top_p=2)
    assert ask(page, "Tell me your name") == []
    assert text(page, ".error").startswith("'top_p' 2 is not")
    choose(page, top_p="")
    click(page, ".retry")
    until(lambda: text(page, ".note"))
    assert text(page, ".question") == "Tell me your name"
    assert text(page, ".error") == ""


def test_edit(page):
    """An edited question replaces the original one and all that came after it."""
    choose(page, max_tokens=5)
    for question in "Tell me your name", "And mine?":
        ask(page, question)
    for edited in "Tell me your name", "", "Tell me your name":  # a second click cancels the edit
        click(page, ".edit")
        assert js(page, "document.querySelector('#composer textarea').value") == edited
    ask(page, "Do you like ice cream?")
    assert asked(page)["messages"] == [{"role": "user", "content": "Do you like ice cream?"}]
    assert js(page, "document.querySelectorAll('article').length") == 1


def test_conversations(page):
    choose(page, max_tokens=5)
    for question in "Tell me your name", "Do you like ice cream?":
        click(page, "#new")
        ask(page, question)
    page.refresh()
    titles = "[...document.querySelectorAll('.title')].map((title) => title.textContent)"
    assert js(page, titles) == ["Do you like ice cream?", "Tell me your name"]
    click(page, "li:last-child .title")
    assert text(page, ".question") == "Tell me your name"
    page.execute_script("confirm = () => true; document.querySelector('li:last-child .delete').click()")
    page.refresh()
    assert js(page, titles) == ["Do you like ice cream?"]


def test_without_storage(page):
    """The page works in a browser that forbids localStorage."""
    forbid = "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no') } })"
    script = page.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", dict(source=forbid))
    page.refresh()
    page.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    choose(page, max_tokens=5)
    assert ask(page, "Tell me your name")
    assert not js(page, "document.querySelector('#conversations small').hidden")


MARKUP = "<img src=x onerror=alert(1)><b>bold</b>", "<script>alert(1)</script>\n", "end"


def keep(page, **exchange) -> None:
    """Store a conversation in the browser, as if the user had had it."""
    conversation = json.dumps(dict(id=1, exchanges=[dict(error="", note="") | exchange]))
    page.execute_script("localStorage.setItem('llama-jax conversation 1', arguments[0])", conversation)
    page.refresh()


def test_markup_is_text(page):
    start, code, end = MARKUP
    keep(page, question=start, answer=f"{start}\n```html\n{code}```\n{end}")
    assert text(page, ".question") == text(page, ".title") == start
    pieces = "[...document.querySelector('.answer').children].map((x) => [x.tagName, x.textContent])"
    assert js(page, pieces) == [["P", start], ["PRE", code], ["P", end]]


def test_sliders(page):
    """A slider sets the number that is sent, a number moves its slider, and no number means the default."""
    slider = "document.querySelector('[data-of=top_p]')"
    assert js(page, f"{slider}.value") == "1" and js(page, "settings.top_p.value") == ""
    page.execute_script(
        f"{slider}.value = .25; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    assert js(page, "settings.top_p.value") == "0.25"
    ask(page, "Tell me your name")
    assert asked(page)["top_p"] == 0.25
    choose(page, top_p=0.5)
    assert js(page, f"{slider}.value") == "0.5"
    choose(page, top_p="")
    assert js(page, f"{slider}.value") == "1"


def test_narrow(page):
    """Nothing on the page is wider than a phone, however long the words are."""
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", dict(width=360, height=640, deviceScaleFactor=2, mobile=True)
    )
    word = "w" * 200
    keep(page, question=word, answer=f"{word}\n```\n{word}\n```\n", error=word)
    click(page, "[popovertarget=settings]")
    try:
        for part in "html", "body", "main", "#log", "#settings":
            assert js(page, f"document.querySelector('{part}').scrollWidth") <= 360, part
        assert js(page, "document.querySelector('pre').scrollWidth") > 360  # it scrolls by itself
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_no_request_leaves(page, url):
    until(lambda: text(page, "h1") == "tiny-llama3")
    ask(page, "Tell me your name")
    assert {x["url"].replace(f"anyone:{KEY}@", "").removeprefix(url) for x in sent(page)} == {
        "/", "/v1/models", "/v1/chat/completions"
    }  # fmt: skip
