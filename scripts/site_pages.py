"""``python scripts/site_pages.py FOLDER``: README.md and docs/ as pages for mkdocs, with ``mkdocs.yml``.

README.md becomes the first page, the other pages of the repository's root are beside those of ``docs``; links are
rewritten accordingly. Files that pages link to are copied. ``examples/NAME/README.md`` becomes ``example-NAME.md``.
``llms.txt`` is a list of all pages.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#:\s]+)(?=[)#])")
GUIDE = {  # the order in which a reader needs them; a page that does not exist is left out
    "Start": """
        first-model
        configuration
        python
        notebooks
        files
        example-sharp
    """,
    "Models and pictures": """
        models
        detectors
        images
        video
        backends
        own-backends
        testing-backends
    """,
    "Serve": """
        service
        protocols
        client
        tuning
        warm-up
        monitoring
        symptoms
    """,
    "Deploy": """
        deployment
        proxy
        scaling
        gpu
        gpu-memory
        ray
    """,
    "Train": """
        training
        parity
    """,
    "Coming from elsewhere": """
        migrating
        coming-from
        upgrading
        versions
    """,
    "Reference": """
        api
        benchmarks
        architecture
        SKILL
        CONTRIBUTING
        SECURITY
        CHANGELOG
    """,
}
FEATURES = ["navigation.sections", "navigation.footer", "content.code.copy", "search.suggest", "search.highlight"]
PALETTE = [
    {"media": f"(prefers-color-scheme: {mode})", "scheme": scheme, "primary": "blue grey", "accent": "blue"}
    for mode, scheme in (("light", "default"), ("dark", "slate"))
]
COMMANDS_ALONE = "code[data-md-copying]:has(.gp) :is(.gp, .go) { display: none; }\n"
"""Style: what the button of a console block copies are its commands, without ``$`` and output."""
SEPARATOR = r"[\s\-,:;=!?\[\](){}<>\"'`/|*]+|&[lg]t;"
"""Between words of the search: what is around keys and names of files, which stay whole."""
SEARCH = {"separator": SEPARATOR, "fields": {"title": {"boost": 10.0}}}
"""With the theme's boost, 1,000, "model" in a title would beat "warmup" in a text."""
PAGES = ("*.md", "docs/**/*.md", "examples/*/README.md")


def main(target: Path) -> None:
    """Write the pages to ``target / "pages"`` and the configuration beside them."""
    pages = target / "pages"
    pages.mkdir(parents=True)
    for source in [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]:
        parts = LINK.split(source.read_text(encoding="utf-8"))  # text, "](", link, text, …
        parts[2::3] = [page_link(source, link, pages) for link in parts[2::3]]
        (pages / page_name(source)).write_text("".join(parts), encoding="utf-8")
    names = {path.stem for path in pages.glob("*.md")}
    guide = {title: [name for name in listed.split() if name in names] for title, listed in GUIDE.items()}
    (pages / "site.css").write_text(COMMANDS_ALONE, encoding="utf-8")
    (pages / "llms.txt").write_text(llms(pages, guide), encoding="utf-8")
    (target / "mkdocs.yml").write_text(json.dumps(configuration(guide), indent=1), encoding="utf-8")  # JSON is YAML


def llms(pages: Path, guide: dict[str, list[str]]) -> str:
    """The pages for language models (https://llmstxt.org): a link to each, with its first sentence."""
    lines = ["# torchpipe_py", "", f"> {first_paragraph(pages / 'index.md')}"]
    for title, names in guide.items():
        lines += ["", f"## {title}", ""]
        for name in names:
            path = pages / f"{name}.md"
            heading = re.search(r"^# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading is not None, name
            lines.append(f"- [{heading[1]}]({name}.html): {first_sentence(path)}")
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str:
    """The first sentence of a page."""
    return re.split(r"(?<=[.!?:]) (?=[A-Z])", first_paragraph(path))[0].rstrip(":")


def first_paragraph(path: Path) -> str:
    """The first paragraph of a page's prose, without links and marks."""
    text = path.read_text(encoding="utf-8")
    prose = next((part for part in text.split("\n\n") if re.match(r"\w|\[|`(?!`)", part)), "")
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split())).replace("`", "")


def page_name(source: Path) -> str:
    """The name of a Markdown file on the site."""
    if source.name != "README.md":
        return source.name
    return "index.md" if source.parent == ROOT else f"example-{source.parent.name}.md"


def page_link(source: Path, link: str, pages: Path) -> str:
    """The target of a link of ``source`` on the site; a file that is not a page is copied to it."""
    path = (source.parent / link).resolve()
    if path.suffix == ".md":
        return page_name(path)
    copy = pages / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        listing = "".join(f"- [{file.name}]({file.name})\n" for file in sorted(path.iterdir()) if file.is_file())
        shutil.copytree(path, copy, dirs_exist_ok=True)
        (copy / "index.md").write_text(f"# {path.name}\n\n{listing}", encoding="utf-8")
        return f"{path.relative_to(ROOT)}/index.md"
    shutil.copy(path, copy)
    return str(path.relative_to(ROOT))


def configuration(guide: dict[str, list[str]]) -> dict[str, object]:
    """mkdocs' configuration: no fonts, icons or scripts of other hosts."""
    nav: list[dict[str, object]] = [{"torchpipe_py": "index.md"}]
    nav += [{title: [f"{name}.md" for name in names]} for title, names in guide.items()]
    return {
        "site_name": "torchpipe_py",
        "docs_dir": "pages",
        "nav": nav,
        "not_in_nav": "/scripts/",
        "use_directory_urls": False,
        "theme": {"name": "material", "font": False, "features": FEATURES, "palette": PALETTE},
        "markdown_extensions": ["tables", "toc", "pymdownx.superfences", "pymdownx.highlight"],
        "extra_css": ["site.css"],
        "plugins": [{"search": SEARCH}],
        "validation": {"anchors": "warn", "links": {"not_found": "warn"}},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
