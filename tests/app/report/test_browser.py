"""The page in a real browser: nothing refused by its own policy, nothing fetched, no sideways scrolling."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import Browser, found
from gredp.app.cli import main
from gredp.app.report.command import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="no Chromium is installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Two runs side by side, with names that would be scripts if they were not text."""
    folder = tmp_path_factory.mktemp("runs") / "<script>document.title='owned'<"
    quick = ["train", "--epochs", "1", "--accountant", "rdp", "--json"]
    for name, options in (("shaped", ["--noise", "shaped"]), ("paper", ["--claim", "paper"])):
        main([*quick, *options, "--out", str(folder / name)])
    record = json.loads((folder / "paper" / "record.json").read_text())
    record["selection"] = "<img src=x onerror=\"document.title='owned'\">"
    record["settings"]["dataset"] = "a-path-without-blanks/" * 20
    (folder / "paper" / "record.json").write_text(json.dumps(record))
    return write_report([folder / "shaped", folder / "paper"])


@pytest.fixture
def browser(tmp_path):
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.close()


def complaints(browser: Browser) -> list:
    """Refusals, script errors, and anything that was fetched beside the page itself."""
    heard = [e for e in browser.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
    fetched = [e for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    return heard + fetched[1:]


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)])
def test_on_a_desk_and_on_a_phone_in_the_dark(page, browser, width, dark):
    browser.show(page, width, dark)
    assert complaints(browser) == []
    assert browser.value("document.title") == "Privacy report of 2 runs"
    assert browser.value("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
    assert browser.value("innerWidth") == width
    assert browser.value("document.scripts.length + document.images.length") == 0
    picture = np.asarray(Image.open(io.BytesIO(browser.picture())).convert("L"))
    paper = float(np.median(picture))
    assert paper < 60 if dark else paper > 240
    ink = "getComputedStyle(document.querySelector('svg text')).fill"
    assert browser.value(ink) == ("rgb(231, 234, 238)" if dark else "rgb(27, 31, 36)")
    heights = "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)"
    assert min(browser.value(heights)) >= 8, "figures can be read"


def test_on_paper(page, browser):
    browser.show(page, dark=True)
    content = browser.printed()
    assert content.startswith(b"%PDF")
    assert 2 <= content.count(b"/Type /Page\n") <= 12
