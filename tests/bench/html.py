"""Reads pages, strictly and in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

VOID = {"meta", "link", "line", "path", "br"}
EVIL = "<script>alert('&amp;')</script>"

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), "")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")

_TRIED = """
<script>
const said = {};
said.sorted = [...document.querySelectorAll("table.sorts")].map(table => {
  const button = table.tHead.querySelectorAll("button")[1];
  const order = () => [...table.tBodies[0].rows].map(r => r.cells[1].dataset.v).join("|");
  button.click(); const up = order(); button.click(); const down = order();
  return [up, down, up.split("|").reverse().join("|") === down].join(" / ");
});
said.wide = document.documentElement.scrollWidth - window.innerWidth;
said.scheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
said.ground = getComputedStyle(document.body).backgroundColor;
said.flat = [...document.querySelectorAll("svg")].filter(
  s => s.getBoundingClientRect().height < 20).length;
document.title = JSON.stringify(said);
</script>
"""


class Page(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str, name: str) -> list[str]:
        return [v for t, n, v in self.attributes if (t, n) == (tag, name)]

    @property
    def words(self) -> str:
        return " ".join("".join(self.texts).split())


def check_alone(text: str) -> Page:
    """Checks that a page is whole, asks nobody for anything, and suits both schemes."""
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace("// what", ""))
    assert page.all("link", "href") == ["data:,"], "or browsers ask for an icon"
    assert not [name for _, name, _ in page.attributes if name in ("src", "srcset")]
    assert text.count("<script>") == 1, "its own"
    assert "fetch(" not in text
    assert len(text.encode()) < 2_000_000
    dark = text.split("prefers-color-scheme: dark")[1]
    light = text.split(":root {")[1].split("}")[0]
    names = set(re.findall(r"(--\w+):", light))
    assert names == set(re.findall(r"(--\w+):", dark))
    assert names >= set(re.findall(r"var\((--\w+)\)", text))
    return page


def opened(text: str, folder: Path, scheme: str = "light", width: int = 400) -> dict:
    """Opens a page in headless Chromium, where no name can be looked up, and tries it.

    Returns:
        What the browser says of it; "console" has what it wrote there.
    """
    file, profile = folder / "page.html", folder / "profile"
    file.write_text(text.replace("</body>", f"{_TRIED}</body>"), encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0",
        f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}",
        f"--window-size={width},900", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title is not None, done.stderr
    said: dict = json.loads(
        title[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    )
    said["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return said
