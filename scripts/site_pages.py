"""``python scripts/site_pages.py FOLDER``: README.md and docs/ as pages for mkdocs, with ``mkdocs.yml``.

README.md becomes the first page, the other pages of the repository's root are beside those of ``docs``; links are
rewritten accordingly. Files that pages link to are copied. ``api.md`` has the public names of the packages.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#:\s]+)(?=[)#])")
GUIDE = {
    "Start": "first-model configuration python models images backends own-backends migrating",
    "Serve": "service protocols client monitoring tuning deployment scaling gpu ray",
    "More": "training benchmarks architecture CONTRIBUTING SECURITY CHANGELOG api",
}
PACKAGES = ("torchpipe_py", "torchpipe_py.training", "torchpipe_py.ray", "torchpipe_client", "torchpipe_server")


def main(target: Path) -> None:
    """Write the pages to ``target / "pages"`` and the configuration beside them."""
    pages = target / "pages"
    pages.mkdir(parents=True)
    for source in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]:
        parts = LINK.split(source.read_text(encoding="utf-8"))  # text, "](", link, text, …
        parts[2::3] = [page_link(source, link, pages) for link in parts[2::3]]
        text = "".join(parts)
        name = "index.md" if source.name == "README.md" else source.name
        (pages / name).write_text(text, encoding="utf-8")
    api = "\n\n".join(["# API reference", *(f"::: {package}" for package in PACKAGES)])
    (pages / "api.md").write_text(api + "\n", encoding="utf-8")
    (target / "mkdocs.yml").write_text(json.dumps(configuration(), indent=1), encoding="utf-8")  # JSON is YAML


def page_link(source: Path, link: str, pages: Path) -> str:
    """The target of a link of ``source`` on the site; a file that is not a page is copied to it."""
    path = (source.parent / link).resolve()
    if path == ROOT / "README.md":
        return "index.md"
    if path.suffix == ".md":
        return path.name
    copy = pages / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        listing = "".join(f"- [{file.name}]({file.name})\n" for file in sorted(path.iterdir()) if file.is_file())
        shutil.copytree(path, copy, dirs_exist_ok=True)
        (copy / "index.md").write_text(f"# {path.name}\n\n{listing}", encoding="utf-8")
        return f"{path.relative_to(ROOT)}/index.md"
    shutil.copy(path, copy)
    return str(path.relative_to(ROOT))


def configuration() -> dict[str, object]:
    """mkdocs' configuration: no fonts, icons or scripts of other hosts."""
    nav: list[dict[str, object]] = [{"torchpipe_py": "index.md"}]
    nav += [{title: [f"{page}.md" for page in names.split()]} for title, names in GUIDE.items()]
    paths, options = [str(ROOT), str(ROOT / "server")], {"members_order": "alphabetical"}
    return {
        "site_name": "torchpipe_py",
        "docs_dir": "pages",
        "nav": nav,
        "not_in_nav": "/scripts/",
        "use_directory_urls": False,
        "theme": {"name": "material", "font": False, "features": ["navigation.sections", "content.code.copy"]},
        "markdown_extensions": ["tables", "toc", "pymdownx.superfences", "pymdownx.highlight"],
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": {"paths": paths, "options": options}}}}],
        "validation": {"anchors": "warn", "links": {"not_found": "warn"}},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
