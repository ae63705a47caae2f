"""What the chat page makes of answers that no tiny model writes: a stub says them.

The page's files and its content security policy are those of server/app.py.
"""

import asyncio
import json
import random
import re
import threading
import time
from hashlib import sha256

import pytest
import uvicorn
from axe_core_python.base import AXE_SCRIPT
from browser import NEEDS_BROWSER, ask, asked, choose, click, js, keep, open_browser, text
from processes import until
from selenium.common.exceptions import JavascriptException
from selenium.webdriver import ActionChains, Keys
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from server.app import PAGE, PageFiles, page

pytestmark = NEEDS_BROWSER


class Stub:
    """A server that answers with `deltas`: texts, deltas of OpenAI's API, or an error.

    pause: seconds after each. name, default_sampling: of its model.
    """

    def __init__(self):
        self.deltas, self.pause, self.name, self.default_sampling = [], 0.0, "stub", {}
        routes = [
            Route("/", page),
            Mount("/page", PageFiles(directory=PAGE)),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning"))

    async def models(self, request):
        return JSONResponse(dict(data=[dict(id=self.name, default_sampling=self.default_sampling)]))

    async def chat(self, request):
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self):
        for delta in self.deltas:
            choices = [dict(delta=dict(content=delta) if isinstance(delta, str) else delta)]
            yield sent_event(delta if "error" in delta else dict(choices=choices))
            await asyncio.sleep(self.pause)
        yield sent_event(dict(choices=[], usage=dict(completion_tokens=len(self.deltas))))
        yield "data: [DONE]\n\n"


def sent_event(content: dict) -> str:
    return f"data: {json.dumps(content)}\n\n"


@pytest.fixture(scope="module")
def stub():
    stub = Stub()
    thread = threading.Thread(target=stub.server.run)
    thread.start()
    until(lambda: stub.server.started)
    stub.url = f"http://127.0.0.1:{stub.server.servers[0].sockets[0].getsockname()[1]}"
    yield stub
    stub.server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def chat(browser, stub):
    """The page as on a first visit."""
    stub.deltas, stub.pause, stub.name, stub.default_sampling = ["Yes."], 0.0, "stub", {}
    browser.get(stub.url)
    browser.execute_script("localStorage.clear()")
    browser.get(stub.url)
    until(lambda: text(browser, "h1") == "stub")
    return browser


def in_module(page, script: str, *arguments):
    """The value of a script's `done(value)`, with what server/page/markdown.js exports as `markdown`."""
    start = "const done = arguments[arguments.length - 1], fail = (e) => done(String(e.stack));"
    load = f"import('/page/markdown.js').then((markdown) => {{ {script} }}).catch(fail);"
    return page.execute_async_script(start + load, *arguments)


ANSWER = """# Sorting

Some *ways* to **sort** ~~out~~ `x`,
and their cost:

| way | new? | cost |
|:--|:-:|--:|
| `sorted(x)` | yes | n log n |

1. A key:

   ```python title
   sorted(x, key=len)
   ```
2. See [the **docs**](https://docs.python.org/3/ "title"), https://a.example/b, ![a picture](https://a.example/c.png).

- a
  - b

> quoted

---

    indented

3. three
"""


def outline(page, selector: str) -> list:
    """An element's content: texts, and [name, *content] of the elements in it."""
    return page.execute_script("""
        const outline = (x) => x.nodeType === Node.TEXT_NODE ? x.data
          : [x.tagName.toLowerCase(), ...[...x.childNodes].map(outline).filter(Boolean)];
        return outline(document.querySelector(arguments[0])).slice(1)""", selector)  # fmt: skip


def test_markdown(chat):
    keep(chat, ("?", dict(content=ANSWER)))
    docs, written = ["a", "the ", ["strong", "docs"]], ["a", "https://a.example/b"]
    code = ["div", ["div", ["span", "python"], ["button", "Copy"]], ["div", ["pre", "sorted(x, key=len)"]]]
    cells = ["tr", ["th", "way"], ["th", "new?"], ["th", "cost"]], [
        "tr", ["td", ["code", "sorted(x)"]], ["td", "yes"], ["td", "n log n"],
    ]  # fmt: skip
    assert outline(chat, ".answer") == [
        ["h3", "Sorting"],
        ["p", "Some ", ["em", "ways"], " to ", ["strong", "sort"], " ", ["s", "out"], " ", ["code", "x"], ",",
         ["br"], "and their cost:"],
        ["div", ["table", ["thead", cells[0]], ["tbody", cells[1]]]],
        ["ol", ["li", ["p", "A key:"], code],
         ["li", ["p", "See ", docs, ", ", written, ", ", ["a", "a picture"], "."]]],
        ["ul", ["li", "a", ["ul", ["li", "b"]]]],
        ["blockquote", ["p", "quoted"]],
        ["hr"],
        ["div", ["div", ["span"], ["button", "Copy"]], ["div", ["pre", "indented"]]],
        ["ol", ["li", "three"]],
    ]  # fmt: skip
    links = "[...document.querySelectorAll('.answer a')].map((x) => [x.href, x.rel, x.target])"
    safe = ["noopener noreferrer", "_blank"]
    targets = ["https://docs.python.org/3/", "https://a.example/b", "https://a.example/c.png"]
    assert js(chat, links) == [[target, *safe] for target in targets]
    assert js(chat, "[...document.querySelectorAll('ol')].map((x) => x.start)") == [1, 3]
    aligned = "[...document.querySelectorAll('th')].map((x) => getComputedStyle(x).textAlign)"
    assert js(chat, aligned) == ["left", "center", "right"]


GROWING = [
    ANSWER,
    "1. a\n\n2. b\n\n   c\n\n3) d\n10. e",
    "- a\n\n  b\n\n- c\n\n1\n\n- d\n-",
    "a\n---\nb\n===\nc\n\n---\n***\n-- -\n- - x",
    "> a\nb\n\n> c\n#\n#x\n    d\n\n    e",
    "~~~\n```\n\n~~~\n\n```js\nlet x;\n``\n```\nend ```x``` `` ` ``",
    "text | b\n-|-\nc\n\na | b\n:-: | --\n\\| | `|`\n\nrest",
    "[one] and [two][one]\n\n[one]: https://a.example/1\n\n[one]\n\n[three]: javascript:alert(1)\n[three]",
    "*a **b* c** _d_e_ __f__ \\*g\\* &amp; &#106; &lt;i>\r\n\r\nh\r\ni\rj\r\rk",
    "# a\n####### b\n## c ##\nd\n\n- # e\n- > f\n  - ```\n    g",
]


def test_a_growing_text(chat):
    """However the text has grown, its elements are those of the whole text."""
    draw = random.Random(0)
    cuts = [sorted({*draw.choices(range(len(x)), k=12), len(x)}) for x in GROWING] + [
        list(range(1, len(x) + 1)) for x in GROWING
    ]
    compared = in_module(chat, """
        const [texts, cuts] = arguments_, node = () => document.createElement("div");
        done(cuts.map((ends, i) => {
          const text = texts[i % texts.length], grown = new markdown.Markdown(node());
          ends.forEach((end) => grown.show(text.slice(0, end)));
          grown.finish();
          const whole = new markdown.Markdown(node());
          whole.show(text);
          return [grown.container.innerHTML, whole.container.innerHTML];
        }));""".replace("arguments_", json.dumps([GROWING, cuts])))  # fmt: skip
    for grown, whole in compared:
        assert grown == whole != ""


def test_the_cost_of_a_growing_text(chat):
    """A long answer is parsed about once, not once per token, and what was drawn stays as it is."""
    counted = in_module(chat, """
        const { parser, Markdown } = markdown, grown = new Markdown(log), parse = parser.parse;
        const block = "Some *words* to read.\\n\\n- an item\\n- another\\n\\n```\\ncode\\n```\\n\\n";
        const text = block.repeat(300);
        let parsed = 0, first;
        parser.parse = (x, env) => { parsed += x.length; return parse.call(parser, x, env); };
        for (let end = 5; end < text.length; end += 5) {
          grown.show(text.slice(0, end));
          if (end === 1000) first = [...log.children].slice(0, 20);
        }
        delete parser.parse;
        const same = first.every((x, i) => x === log.children[i]);
        done([parsed / text.length, log.children.length, same]);""")  # fmt: skip
    parsed, blocks, same = counted
    assert parsed < 20  # times the text: tokens of 5 characters, blocks of 35
    assert blocks == 3 * 300 and same


def test_what_stays_in_a_growing_text(chat):
    """A block that grows keeps its elements, and so a selection, the focus, and where it is scrolled to."""
    kept = in_module(chat, """
        const grown = new markdown.Markdown(log), text = "```python\\n" + "x = 1\\n".repeat(50);
        grown.show(text.slice(0, 30));
        const button = log.querySelector("button"), content = log.querySelector("pre").firstChild;
        button.focus();
        for (let end = 31; end < text.length; end += 7) grown.show(text.slice(0, end));
        grown.show(text + "```\\nend");
        done([document.activeElement === button, log.querySelector("pre").firstChild === content,
          content.data]);""")  # fmt: skip
    assert kept == [True, True, "\n".join(["x = 1"] * 50)]


def test_one_drawing_per_frame(chat, stub):
    """Deltas that come together are drawn together, at the next frame."""
    chat.execute_script("""
        window.frames_ = 0;
        const request = requestAnimationFrame;
        requestAnimationFrame = (draw) => request((now) => { frames_ += 1; draw(now); });""")
    stub.deltas = [f"word{i} " for i in range(2000)]
    sizes = ask(chat, "?")
    assert text(chat, ".answer").startswith("word0 word1 ") and "word1999" in text(chat, ".answer")
    assert 0 < len(sizes) <= js(chat, "frames_") + 1 < 1000


def test_scrolling(chat, stub):
    """The page follows a growing answer as long as the reader is at its end."""
    stub.deltas, stub.pause = ["a line\n\n"] * 100, 0.01
    at_end = "log.scrollHeight - log.scrollTop - log.clientHeight < 40"
    ask(chat, "?")
    assert js(chat, f"log.scrollHeight > 2 * log.clientHeight && {at_end}")
    chat.execute_script("""
        document.querySelector("#composer textarea").value = "?";
        document.querySelector("#send").click();
        new MutationObserver((_, watcher) => {
          if (document.querySelector("article:last-child .answer").children.length < 50) return;
          log.scrollTop = 100;
          watcher.disconnect();
        }).observe(log, { childList: true, subtree: true });""")
    until(lambda: not js(chat, "document.body.classList.contains('busy')"))
    assert js(chat, "log.scrollTop") == 100 and not js(chat, at_end)


# Each of these runs `hit()` in a page that reads it as HTML, follows its link, or parses Markdown carelessly.
PAYLOADS = [
    "<script>hit()</script>",
    "<SCRIPT SRC=data:text/javascript,hit()></SCRIPT>",
    "<scr<script>ipt>hit()</scr</script>ipt>",
    "</p></div><script>hit()</script>",
    "</title></style><script>hit()</script>",
    "--><script>hit()</script><!--",
    "<![CDATA[<script>hit()</script>]]>",
    "<img src=x onerror=hit()>",
    "<img/src=x/onerror=hit()>",
    "<img src=x:x onerror\n=\nhit()>",
    "<svg onload=hit()>",
    "<svg><a xlink:href=javascript:hit()><text y=20>x</text></a></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=hit()>",
    "<details open ontoggle=hit()>",
    "<input autofocus onfocus=hit()>",
    "<iframe src=javascript:parent.hit()></iframe>",
    "<iframe srcdoc='<script>parent.hit()</script>'></iframe>",
    "<form action=javascript:hit()><button>x</button></form>",
    "<base href=javascript:/><a href=hit()>x</a>",
    "<meta http-equiv=refresh content='0;url=javascript:hit()'>",
    "<link rel=stylesheet href=data:,*{x:expression(hit())}>",
    "<style>@import 'javascript:hit()';</style>",
    "<div style=background:url(javascript:hit())>",
    "<noscript><p title='</noscript><img src=x onerror=hit()>'></noscript>",
    "<a href=javascript:hit()>x</a>",
    "[x](javascript:hit())",
    "[x](JaVaScRiPt:hit())",
    "[x](java&#115;cript:hit())",
    "[x](java\\script:hit())",
    "[x](&#x6A&#x61&#x76&#x61&#x73&#x63&#x72&#x69&#x70&#x74&#x3A;hit())",
    "[x](\x01javascript:hit())",
    "[x](java%0ascript:hit())",
    "[x](<javascript:hit()>)",
    "[x](vbscript:hit())",
    "[x](data:text/html;base64,PHNjcmlwdD5wYXJlbnQuaGl0KCk8L3NjcmlwdD4=)",
    "[x](file:///etc/passwd)",
    "[x](//evil.example/)",
    "[x]: javascript:hit()\n\n[x]",
    "![x](javascript:hit())",
    '![x](https://a.example/x" onerror="hit())',
    '![x" onerror="hit()](https://a.example/x)',
    '[x](https://a.example/ "onclick=hit()")',
    '[x](https://a.example/"onmouseover="hit())',
    "[<img src=x onerror=hit()>](https://a.example/)",
    "<javascript:hit()>",
    "<https://a.example/onclick=hit()>",
    "https://a.example/<script>hit()</script>",
    "`<img src=x onerror=hit()>`",
    '```"><img/src=x/onerror=hit()>\n<script>hit()</script>\n```',
    "|<img src=x onerror=hit()>|\n|-|\n|<script>hit()</script>|",
    "&lt;script&gt;hit()&lt;/script&gt;",
    "\\<script>hit()\\</script>",
    "<__proto__ onclick=hit()> {{constructor.constructor('hit()')()}} ${hit()}",
]

# What an answer may be made of, and the attributes that these elements may have.
ELEMENTS = {
    *"div p h3 h4 h5 h6 ul ol li blockquote hr table thead tbody tr th td".split(),
    *"em strong s br code pre a span button".split(),
}
ATTRIBUTES = {"class", "role", "aria-label", "tabindex", "href", "target", "rel", "start", "style"}


@pytest.fixture
def without_policy(chat):
    """The page without its content security policy: what keeps a script from running is the page itself."""
    chat.execute_cdp_cmd("Page.setBypassCSP", dict(enabled=True))
    source = dict(source="window.hits = 0; window.hit = () => { hits += 1; }")
    script = chat.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    chat.refresh()
    yield chat
    chat.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    chat.execute_cdp_cmd("Page.setBypassCSP", dict(enabled=False))


def assert_inert(page) -> None:
    """No script of an answer has run, nor could: no other elements, attributes, or schemes of links."""
    time.sleep(0.3)  # for what loads or fails to load
    assert js(page, "hits") == 0
    found = page.execute_script("""
        const parts = [...document.querySelectorAll(".answer *, .thoughts *, .calls .code *")];
        const names = (x) => [...x.attributes].map((attribute) => attribute.name);
        return [[...new Set(parts.map((x) => x.localName))], [...new Set(parts.flatMap(names))],
          parts.map((x) => x.getAttribute("style")).filter(Boolean),
          [...document.querySelectorAll("a")].map((x) => x.protocol),
          document.scripts.length,
          document.querySelectorAll("main [src], main iframe, main style").length]""")
    elements, attributes, styles, schemes, scripts, others = found
    assert set(elements) <= ELEMENTS and set(attributes) <= ATTRIBUTES
    assert all(re.fullmatch("text-align: (left|center|right);", style) for style in styles)
    assert set(schemes) <= {"http:", "https:", "mailto:"}
    assert scripts == 1 and others == 0


def test_the_payloads_are_dangerous(without_policy):
    """The truth about the list: read as HTML, in a page without a policy, these texts do run."""
    without_policy.execute_script(
        "for (const x of arguments[0]) log.insertAdjacentHTML('beforeend', x)", PAYLOADS
    )
    until(lambda: js(without_policy, "hits") > 8)
    assert len(PAYLOADS) >= 40


def test_scripts_are_text(without_policy, stub):
    """In questions, answers, reasoning, names and arguments of calls, notes, errors, and the model's name."""
    browser = without_policy
    exchanges = [
        (x, dict(content=x, reasoning=x, note=x, error=x, calls=[dict(name=x, arguments=x)]))
        for x in PAYLOADS
    ]
    keep(browser, *exchanges)
    browser.execute_script("for (const x of document.querySelectorAll('details')) x.open = true")
    texts = "[...document.querySelectorAll('{}')].map((x) => x.textContent)"
    for selector in ".question", ".error", ".note", ".calls pre":
        assert js(browser, texts.format(selector)) == PAYLOADS
    assert js(browser, texts.format("summary"))[1::2] == [f"Tool call: {x}" for x in PAYLOADS]
    assert text(browser, ".title") == PAYLOADS[0]
    for payload, answer, reasoning in zip(
        PAYLOADS,
        js(browser, texts.format(".answer")),
        js(browser, texts.format(".thoughts")),
        strict=True,
    ):
        assert answer == reasoning
        if re.match("</?[a-zA-Z]+[ >/]", payload) and "\n" not in payload:
            assert answer == payload
    assert_inert(browser)

    click(browser, "#new")
    stub.deltas = [x for payload in PAYLOADS for x in re.findall("(?s).{1,3}", payload + "\n\n")]
    stub.deltas += [dict(reasoning_content=x) for x in PAYLOADS]
    stub.deltas += [
        dict(tool_calls=[dict(index=i, function=dict(name=x, arguments=x))]) for i, x in enumerate(PAYLOADS)
    ]
    ask(browser, PAYLOADS[0])
    assert js(browser, texts.format(".calls pre")) == PAYLOADS
    assert_inert(browser)
    for name in PAYLOADS[:10]:
        stub.name = name
        browser.refresh()
        until(lambda name=name: text(browser, "h1") == name)
        assert_inert(browser)


def test_policy(chat):
    """The browser itself refuses inline scripts, requests elsewhere, and any text as HTML."""
    with pytest.raises(JavascriptException, match="TrustedHTML"):
        chat.execute_script("log.innerHTML = '<b>x</b>'")
    refused = chat.execute_async_script("""
        const done = arguments[0], found = [];
        document.addEventListener("securitypolicyviolation", (e) => {
          if (found.push(e.effectiveDirective) === 3) done(found.sort());
        });
        const image = new Image();
        image.src = "https://a.example/x.png";
        fetch("https://a.example/").catch(() => {});
        log.style.cssText = "color: red";  // allowed
        log.setAttribute("style", "color: red");""")
    assert refused == ["connect-src", "img-src", "style-src-attr"]


def test_vendored():
    """The library is the published one."""
    folder = PAGE / "vendor"
    digest = sha256((folder / "markdown-it.mjs").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
    first = (folder / "markdown-it.mjs").read_text().partition("\n")[0]
    assert first.split()[2] in (folder / "README.md").read_text()  # the version


def test_alternatives(chat, stub):
    """Retry keeps the answers that were there; the one that is shown is sent along with the next question."""
    choose(chat, seed=7)
    for i, answer in enumerate(("one", "two", "three")):
        stub.deltas = [answer]
        if i == 0:
            ask(chat, "?")
        else:
            click(chat, ".retry")
            until(lambda answer=answer: text(chat, ".answer") == answer)
            until(lambda: not js(chat, "document.body.classList.contains('busy')"))
        assert asked(chat)["seed"] == 7 + i  # another draw
    assert text(chat, ".place") == "3/3"
    for button, shown in ("next", "one"), ("previous", "three"), ("previous", "two"):
        click(chat, f".{button}")
        assert text(chat, ".answer") == shown
    chat.refresh()
    assert text(chat, ".place") == "2/3" and text(chat, ".answer") == "two"
    ask(chat, "And?")
    assert [x["content"] for x in asked(chat)["messages"]] == ["?", "two", "And?"]


def test_reasoning_and_calls(chat, stub):
    """They are folded, in pieces as they come, and not sent back."""
    arguments = '{"city": "Paris", "id": 12345678901234567890}'
    pieces = re.findall(".{1,7}", arguments)
    first = dict(index=0, id="a", type="function", function=dict(name="get_weather", arguments=""))
    stub.deltas = [
        dict(role="assistant", content=None),
        dict(reasoning_content="The user wants "),
        dict(reasoning_content="the *weather*."),
        "I look",
        " it up.",
        dict(tool_calls=[first]),
        *(dict(tool_calls=[dict(index=0, function=dict(arguments=x))]) for x in pieces),
        dict(tool_calls=[dict(index=1, function=dict(name="get_time", arguments="{}"))]),
    ]
    ask(chat, "Weather?")
    for _ in range(2):
        assert outline(chat, ".thoughts") == [["p", "The user wants the ", ["em", "weather"], "."]]
        assert text(chat, ".answer") == "I look it up."
        summaries = js(chat, "[...document.querySelectorAll('summary')].map((x) => x.textContent)")
        assert summaries == ["Reasoning", "Tool call: get_weather", "Tool call: get_time"]
        calls = js(chat, "[...document.querySelectorAll('.calls pre')].map((x) => x.textContent)")
        assert calls == [arguments, "{}"]  # as they are: a number that JavaScript cannot hold, too
        assert not js(chat, "document.querySelector('details[open]')")
        chat.refresh()
    ask(chat, "And?")
    assert asked(chat)["messages"][1] == dict(role="assistant", content="I look it up.")


@pytest.mark.parametrize("given", [{}, dict(temperature=0.6, top_k=20, presence_penalty=0.5)])
def test_sampling(chat, stub, given):
    """The page has defaults of its own if the server has none; else it leaves the choice to the server."""
    stub.default_sampling = given
    chat.refresh()
    until(lambda: text(chat, "h1") == "stub")
    names = "temperature", "top_p", "top_k"
    shown = {name: js(chat, f"settings.{name}.placeholder") for name in names}
    ask(chat, "?")
    question = {name: x for name, x in asked(chat).items() if "stream" not in name and name != "messages"}
    if given:
        assert question == {} and shown == dict(temperature="0.6", top_p="", top_k="20")
        assert text(chat, "#origin").startswith("What is left empty is what the checkpoint")
    else:
        assert question == dict(temperature=0.5, top_p=0.9) and shown["temperature"] == "0.5"
        assert text(chat, "#origin").startswith("Neither the checkpoint nor")
    choose(chat, temperature=1, top_p=1)
    ask(chat, "?")
    assert (asked(chat)["temperature"], asked(chat)["top_p"]) == (1, 1)


def test_copy(chat, stub):
    """Code and answers are copied as they were written, also where the browser gives a page no clipboard."""
    stub.deltas = ["Look:\n```python\n<b>\n  x\n```\n"]
    ask(chat, "?")
    chat.execute_script("""
        window.copied = [];
        Object.defineProperty(navigator, "clipboard",
          { configurable: true, value: { writeText: async (x) => { copied.push(x); } } });""")
    click(chat, ".code .copy")
    until(lambda: text(chat, ".code .copy") == "Copied")
    chat.execute_script("""
        Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.execCommand = () => { copied.push(document.activeElement.value); };""")
    click(chat, "footer .copy")
    assert js(chat, "copied") == ["<b>\n  x", stub.deltas[0]]
    until(lambda: text(chat, ".code .copy") == "Copy")


def test_export(chat, stub, tmp_path):
    """Files with the questions and the answers that are shown; the JSON one is a request to the API."""
    chat.execute_cdp_cmd("Browser.setDownloadBehavior", dict(behavior="allow", downloadPath=str(tmp_path)))
    choose(chat, system="Be brief")
    for question, answer in ("What is *1 < 2*?", "**True**"), ("And 2 < 1?", "False"):
        stub.deltas = [answer]
        ask(chat, question)
    files = [tmp_path / f"What-is-1-2-.{kind}" for kind in ("md", "json")]
    for file in files:
        click(chat, "[popovertarget=export]")
        click(chat, f"#export [value={file.suffix[1:]}]")
        until(file.exists)
    texts = ["Be brief", "What is *1 < 2*?", "**True**", "And 2 < 1?", "False"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    pairs = list(zip(roles, texts, strict=True))
    assert files[0].read_text() == "\n".join(f"## {role}\n\n{content}\n" for role, content in pairs)
    messages = [dict(role=role, content=content) for role, content in pairs]
    assert json.loads(files[1].read_text()) == dict(model="stub", messages=messages)


def test_an_older_conversation(chat):
    """Conversations that an earlier version of the page has kept are shown."""
    old = dict(id=1, exchanges=[dict(question="Who?", answer="Me", note="1 token", error="")])
    chat.execute_script("localStorage.setItem('llama-jax conversation 1', arguments[0])", json.dumps(old))
    chat.refresh()
    assert [text(chat, x) for x in (".question", ".answer", ".note")] == ["Who?", "Me", "1 token"]
    ask(chat, "And?")
    assert [x["content"] for x in asked(chat)["messages"]] == ["Who?", "Me", "And?"]


def test_theme(chat):
    """As the system, or as the user chooses; the choice outlives a reload."""

    def background() -> int:
        color = js(chat, "getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3])) // 3

    try:
        for system in "dark", "light":
            features = [dict(name="prefers-color-scheme", value=system)]
            chat.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=features))
            for theme in "", "light", "dark":
                choose(chat, theme=theme)
                chat.refresh()
                assert js(chat, "settings.theme.value") == theme
                assert (background() < 64) == ((theme or system) == "dark")
    finally:
        chat.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[]))


def test_keyboard(chat, stub):
    def press(*keys: str) -> None:
        chain = ActionChains(chat)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    def idle() -> bool:
        return not js(chat, "document.body.classList.contains('busy')")

    value = "document.querySelector('#composer textarea').value"
    press("one")
    ActionChains(chat).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    press("two")
    assert js(chat, value) == "one\ntwo"
    press(Keys.ENTER)
    until(lambda: text(chat, ".answer") == "Yes." and idle())
    assert asked(chat)["messages"][0]["content"] == "one\ntwo"
    press(Keys.ARROW_UP)  # edits the last question
    assert js(chat, value) == "one\ntwo"
    press(Keys.ESCAPE)
    assert js(chat, value) == ""
    stub.deltas, stub.pause = ["word "] * 500, 0.02
    press("three", Keys.ENTER)
    until(lambda: "word" in text(chat, "article:last-child .answer"))
    press(Keys.ESCAPE)
    until(idle)
    assert text(chat, "article:last-child .note") == "Stopped"
    ActionChains(chat).key_down(Keys.CONTROL).key_down(Keys.SHIFT).send_keys("o").key_up(Keys.SHIFT).key_up(
        Keys.CONTROL
    ).perform()
    assert js(chat, "document.querySelectorAll('article').length") == 0
    assert js(chat, "document.activeElement === document.querySelector('#composer textarea')")


def test_focus_order(chat):
    """Tab goes through the page in reading order, code that scrolls included."""
    keep(chat, ("?", dict(content="[a](https://a.example/)\n```\nx\n```", reasoning="y")))
    chat.execute_script("document.querySelector('#new').focus()")
    order = []
    for _ in range(13):
        name = "document.activeElement.ariaLabel || document.activeElement.textContent.trim()"
        order.append(js(chat, name))
        ActionChains(chat).send_keys(Keys.TAB).perform()
    assert order == [
        "+ New conversation", "?", "Delete “?”", "Export", "Settings", "Conversation", "Edit",
        "Reasoning", "a", "Copy code", "Code", "Retry", "Copy",
    ]  # fmt: skip


def test_a_screen_reader(chat, stub):
    """An answer is announced when it is complete, and an error is."""
    chat.execute_script("""
        window.said = [];
        const status = document.querySelector("[role=status]");
        new MutationObserver(() => said.push(status.textContent)).observe(status, { childList: true });""")
    stub.deltas = ["It is ", "**blue**."]
    ask(chat, "Which?")
    stub.deltas = [dict(error=dict(message="too slow"))]
    ask(chat, "Why?")
    until(lambda: len(js(chat, "said")) == 4)
    first, answered, second, failed = js(chat, "said")
    assert first == second == "Answering"
    assert answered.startswith("2 tokens") and answered.endswith(". It is blue.")
    assert failed.startswith("too slow")


LONG = (
    "How?",
    dict(content=ANSWER * 3, reasoning=ANSWER, calls=[dict(name="f", arguments="{}")], note="9 tokens"),
)
FAILED = ("Why?", dict(content="Half an ans", error="too slow"))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_axe(chat, theme, width):
    """axe finds nothing serious: contrast, names, roles, labels, landmarks, headings."""
    metrics = dict(width=width, height=700, deviceScaleFactor=1, mobile=width < 500)
    chat.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        choose(chat, theme=theme)
        for shown in (), (LONG, FAILED):
            if shown:
                keep(chat, *shown)
            chat.execute_script(AXE_SCRIPT)
            for opened in "", "settings", "export", "conversations":
                chat.execute_script("""
                    for (const x of document.querySelectorAll("details")) x.open = true;
                    document.querySelector(":popover-open")?.hidePopover();
                    document.getElementById(arguments[0])?.showPopover();""", opened)  # fmt: skip
                found = chat.execute_async_script("axe.run().then(arguments[0])")
                assert len(found["passes"]) > 20
                serious = [x for x in found["violations"] if x["impact"] in ("serious", "critical")]
                assert not [(x["id"], [node["html"] for node in x["nodes"]]) for x in serious]
    finally:
        chat.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
