"""Pictures of the chat page: python3 -m images.chat_page URL

URL: the address of a running server, for example http://127.0.0.1:8000. Needs chromium, chromedriver and the
extra `test`. The conversations are written here and stored in the browser, no model has written them.
"""

import pathlib
import sys

from tests.browser import click, keep, open_browser, text, until

FOLDER = pathlib.Path(__file__).parent
DESKTOP, PHONE = (1000, 760), (390, 760)

SORTING = """Both return the words in order of length. They differ in **what they change**:

| call | returns | changes `words` | cost |
|:--|:--|:-:|--:|
| `sorted(words, key=len)` | a new list | no | n log n |
| `words.sort(key=len)` | `None` | yes | n log n |

So keep the original with `sorted`:

```python
words = ["roofline", "chip", "shard"]
by_length = sorted(words, key=len)
print(by_length)  # ['chip', 'shard', 'roofline']
```

1. Both are *stable*: words of equal length stay in their order.
2. Both take `reverse=True`.
"""
WEATHER = dict(
    reasoning="They ask for two cities. One call for each.",
    calls=[
        dict(name="get_weather", arguments='{"city": "Bern"}'),
        dict(name="get_weather", arguments='{"city": "Oslo"}'),
    ],
)
TABLE = ("How do I sort words by length?", dict(content=SORTING))
FAILED = dict(error="no answer from the server: Failed to fetch")
PICTURES = {  # a file's name: size, whether dark, conversation
    "desktop": (DESKTOP, False, [TABLE]),
    "phone": (PHONE, False, [TABLE]),
    "dark": (DESKTOP, True, [TABLE]),
    "tools": (DESKTOP, False, [("Is it warmer in Bern or in Oslo?", WEATHER)]),
    "error": (DESKTOP, False, [TABLE, ("And backwards?", FAILED)]),
}  # fmt: skip


def take(url: str) -> None:
    """Write the pictures into images/chat_page/."""
    with open_browser() as browser:
        for name, ((width, height), dark, conversation) in PICTURES.items():
            size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
            theme = dict(name="prefers-color-scheme", value="dark" if dark else "light")
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[theme]))
            browser.get(url)
            keep(browser, *conversation)
            until(lambda question=conversation[0][0]: question in text(browser, "main"))
            if name == "tools":
                click(browser, ".calls summary")
            (FOLDER / f"{name}.png").write_bytes(browser.get_screenshot_as_png())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 -m images.chat_page URL")
    take(sys.argv[1])
