"""The server's chat page, in a headless browser."""

import re
import urllib.request

import pytest
from browser import NEEDS_BROWSER, ask, asked, choose, click, js, keep, open_browser, sent, text
from processes import serving, until

pytestmark = NEEDS_BROWSER
KEY = "abc"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server that requires a key. Answers end when their row of 512 positions is full."""
    log = tmp_path_factory.mktemp("page") / "log"
    with serving(log, "--rows", 2, "--ignore-eos", LLAMA_JAX_API_KEY=KEY) as address:
        yield address


@pytest.fixture(scope="module")
def browser(url):
    with open_browser() as browser:
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
    sampling = dict(temperature=0, top_p=0.9, seed=7, max_tokens=5)  # top_p is the page's own
    assert question == streamed | sampling

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
    assert js(
        page, "document.querySelector('.alternatives').hidden"
    )  # the error is not an answer to go back to


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


def test_sliders(page):
    """A slider sets the number that is sent, a number moves its slider, and no number means the default."""
    slider = "document.querySelector('[data-of=top_p]')"
    assert js(page, f"{slider}.value") == "0.9" and js(page, "settings.top_p.value") == ""
    page.execute_script(
        f"{slider}.value = .25; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    assert js(page, "settings.top_p.value") == "0.25"
    ask(page, "Tell me your name")
    assert asked(page)["top_p"] == 0.25
    choose(page, top_p=0.5)
    assert js(page, f"{slider}.value") == "0.5"
    choose(page, top_p="")
    assert js(page, f"{slider}.value") == "0.9"


def test_narrow(page):
    """Nothing on the page is wider than a phone, however long the words are."""
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", dict(width=360, height=640, deviceScaleFactor=2, mobile=True)
    )
    word = "w" * 200
    table = f"|a|b|\n|-|-|\n|{'`' + word + '`'}|{word}|\n"
    answer = f"{word}\n```{word}\n{word}\n```\n{table}"
    calls = [dict(name=word, arguments=word)]
    keep(page, (word, dict(content=answer, reasoning=word, calls=calls, error=word)))
    page.execute_script("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
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
        "/", "/page/page.css", "/page/page.js", "/page/client.js", "/page/markdown.js",
        "/page/vendor/markdown-it.mjs", "/v1/models", "/v1/chat/completions",
    }  # fmt: skip
