"""A headless Chromium, and what it shows of the live page."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar
from xml.etree.ElementTree import Element, TreeBuilder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1000"),
)
BROWSER_SECONDS = 90


class Document(HTMLParser):
    """A dumped page as a tree."""

    VOID: ClassVar = {"meta", "link", "br", "hr", "img", "input"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.builder = TreeBuilder()
        self.feed(text)
        self.close()
        self.root = self.builder.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in self.VOID:
            self.builder.end(tag)

    def handle_endtag(self, tag: str) -> None:
        self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        self.builder.data(data)


class Shown:
    """What a browser shows after a while of its virtual time."""

    def __init__(self, root: Element) -> None:
        self.root = root

    def by_id(self, name: str) -> Element:
        return next(element for element in self.root.iter() if element.get("id") == name)

    def text(self, name: str) -> str:
        return text_of(self.by_id(name))

    @property
    def banner(self) -> str:
        """Empty while it is hidden."""
        return "" if "hidden" in self.by_id("banner").attrib else self.text("banner")

    @property
    def totals(self) -> dict[str, tuple[str, str]]:
        """Figure and note by name."""
        tiles = [[text_of(part) for part in tile] for tile in self.by_id("totals")]
        return {name: (figure, note) for name, figure, note in tiles}

    def table(self, name: str) -> dict[str, dict[str, Element]]:
        """Cells by the first one's text and their heads."""
        heads, *rows = self.by_id(name).iter("tr")
        titles = [text_of(head) for head in heads]
        return {text_of(row[0]): dict(zip(titles, row, strict=True)) for row in rows}

    def boxes(self) -> dict[str, dict[str, Element]]:
        """The live figures in the picture, by node and class."""
        groups = [one for one in self.by_id("graph").iter("g") if one.get("data-node") is not None]
        return {
            str(group.get("data-node")): {str(part.get("class")): part for part in group.iter() if part is not group}
            for group in groups
        }


def text_of(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def labels(element: Element) -> list[str]:
    return [str(one.get("aria-label")) for one in element.iter() if one.get("aria-label")]


class Browser:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, url: str, seconds: float) -> Shown:
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={self.directory}", "--dump-dom"]
        command += [f"--virtual-time-budget={1000 * seconds:.0f}", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        assert "<body" in done.stdout, done.stderr
        return Shown(Document(done.stdout).root)
