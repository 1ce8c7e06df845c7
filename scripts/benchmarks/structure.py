"""Count what a reader of this repository meets: files, imports, functions, classes, lines.

    python scripts/structure.py [checkout ...]      default: this one; several stand side by side

A *unit* is a module or a folder that lies directly in a package. *Floors* is the length of the longest chain of
imports, modules that import each other counted as one. Lines are all lines, comments and blank ones too. Modules and
what is in them are those of package, server, scripts and chaos tests.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import median

from torchpipe_py.arguments import ArgumentParser

Arrows = dict[str, set[str]]
Table = dict[str, object]

ROOTS = {"server", "scripts", "tests"}
"""Folders that modules are imported from."""


class Module:
    """One Python file of a checkout: its name as imports spell it, and what is written in it."""

    def __init__(self, path: Path, checkout: Path) -> None:
        self.path = path.relative_to(checkout)
        text = path.read_text(encoding="utf-8")
        self.lines = len(text.splitlines())
        nodes = list(ast.walk(ast.parse(text)))
        parts = self.path.with_suffix("").parts
        self.name = ".".join(part for part in parts[parts[0] in ROOTS :] if part != "__init__")
        self.names: dict[str, tuple[str, str]] = {}
        """What each imported name stands for: a module, and a name in it; "" where it is the module itself."""
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                self.names |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                self.names |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        self.functions = {
            f"{self.path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
            for node in nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }

    @property
    def area(self) -> str:
        """What its lines count as: code of the chaos tests lay in scripts once, and counts apart in either place."""
        if "chaos" in self.path.parts and not self.path.name.startswith("test_"):
            return "chaos"
        return {"torchpipe_py": "package"}.get(self.path.parts[0], self.path.parts[0])


def read(checkout: Path) -> dict[str, Module]:
    """The Python files of a checkout, by the names they are imported by."""
    folders = [checkout / "torchpipe_py", *(checkout / root for root in sorted(ROOTS))]
    modules = [Module(path, checkout) for folder in folders for path in sorted(folder.rglob("*.py"))]
    return {module.name: module for module in modules}


def imports(module: Module, modules: dict[str, Module]) -> set[str]:
    """The modules of the checkout that one imports, anywhere in it."""
    targets = set()
    for source, name in module.names.values():
        whole = f"{source}.{name}"
        is_module = whole in modules and name not in modules[source].names if source in modules else whole in modules
        targets.add(whole if is_module else source)
    return (targets & modules.keys()) - {module.name}


def units(arrows: Arrows, package: str) -> Arrows:
    """The same arrows between a package's units."""

    def unit(name: str) -> str:
        return name.removeprefix(f"{package}.").split(".")[0]

    joined: Arrows = {unit(name): set() for name in arrows}
    for name, targets in arrows.items():
        joined[unit(name)] |= {unit(target) for target in targets} - {unit(name)}
    return joined


def floors(arrows: Arrows) -> tuple[int, list[str]]:
    """The longest chain, and the members of each cycle."""

    @cache
    def reached(name: str) -> frozenset[str]:
        seen, ahead = set[str](), [name]
        while ahead:
            fresh = arrows[ahead.pop()] - seen
            seen |= fresh
            ahead.extend(fresh)
        return frozenset(seen)

    def cycle(name: str) -> frozenset[str]:
        return frozenset(other for other in reached(name) if name in reached(other)) | {name}

    @cache
    def height(members: frozenset[str]) -> int:
        below = {target for name in members for target in arrows[name]} - members
        return 1 + max((height(cycle(target)) for target in below), default=0)

    cycles = {cycle(name) for name in arrows}
    rings = sorted(" ".join(sorted(members)) for members in cycles if len(members) > 1)
    return max(map(height, cycles), default=0), rings


def depths(modules: dict[str, Module]) -> dict[str, int]:
    """For each class how many classes of the checkout its longest line of ancestors has, itself counted."""

    def home(module: str, name: str) -> tuple[str, str] | None:
        head, _, rest = name.partition(".")
        if module not in modules:
            return None
        if name in modules[module].classes:
            return module, name
        if head in modules[module].names:
            source, original = modules[module].names[head]
            if f"{source}.{original}" in modules and rest:
                source, original = f"{source}.{original}", ""
            return home(source, ".".join(part for part in (original, rest) if part))
        return None

    @cache
    def depth(module: str, name: str) -> int:
        bases = [home(module, ast.unparse(base)) for base in modules[module].classes[name].bases]
        return 1 + max((depth(*base) for base in bases if base and base != (module, name)), default=0)

    return {f"{name}.{each}": depth(name, each) for name, module in modules.items() for each in module.classes}


def spread(title: str, sizes: dict[str, int], count: int = 3) -> Table:
    """Median, 90th percentile and the largest, with their names."""
    ordered = sorted(sizes.values())
    table: Table = {f"{title}: median": f"{median(ordered):g}", f"{title}: p90": ordered[len(ordered) * 9 // 10]}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:count]
    return table | {f"{title}: largest {place}": f"{sizes[name]} {name}" for place, name in enumerate(largest, 1)}


def measure(checkout: Path) -> Table:
    """Every figure of a checkout, by what it is."""
    modules = read(checkout)
    product = {name: module for name, module in modules.items() if module.area != "tests"}
    lines, files = Counter[str](), Counter[str]()
    for module in modules.values():
        lines[module.area] += module.lines
        files[str(module.path.parent)] += 1
    table: Table = {f"lines: {area}": lines[area] for area in ("package", "server", "scripts", "chaos", "tests")}
    table["lines: all but tests"] = lines.total() - lines["tests"]
    table |= spread("files in a folder", files, 5)
    whole = {name: imports(module, product) for name, module in product.items()}
    graphs = {"modules": whole}
    for title, package in (("package", "torchpipe_py"), ("server", "torchpipe_server")):
        inside = {name for name in product if f"{name}.".startswith(f"{package}.")}
        graphs[f"{title}: modules"] = {name: whole[name] & inside for name in inside}
        graphs[f"{title}: units"] = units(graphs[f"{title}: modules"], package)
    for title, arrows in graphs.items():
        height, cycles = floors(arrows)
        table |= {title: len(arrows), f"{title}, arrows": sum(map(len, arrows.values()))}
        table |= {f"{title}, floors": height, f"{title}, cycles": "; ".join(cycles) or 0}
    table |= spread("function", {name: size for module in product.values() for name, size in module.functions.items()})
    table |= spread("file", {str(module.path): module.lines for module in product.values()})
    table |= spread("inheritance", depths(product))
    pages = [checkout / "README.md", *sorted(checkout.glob("docs/*.md"))]
    return table | {f"bytes: {page.relative_to(checkout)}": page.stat().st_size for page in pages if page.exists()}


def main(arguments: list[str]) -> None:
    parser = ArgumentParser(description="What a reader of this repository meets, counted.")
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="its folder (default: this one)")
    checkouts = parser.parse_args(arguments).checkouts or [Path(__file__).parents[2]]
    for checkout in checkouts:
        if not (checkout / "torchpipe_py").is_dir():
            parser.error(f"{checkout} is no checkout: it has no folder torchpipe_py")
    tables = [measure(checkout) for checkout in checkouts]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [[name, *(str(table.get(name, "-")) for table in tables)] for name in names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
