"""README and docs: every block is run or says why not, tables are the generated ones, links resolve, pages stay short.

A page is read from top to bottom in one empty folder with the repository's ``configs``, ``examples``, ``scripts`` and
``idl``:

- ``console``: lines after ``$ `` are run by bash, and what is shown below them is what they print. ``…`` stands for
  any text, a line of ``…`` alone for any lines; where nothing is shown, nothing is compared. ``torchpipe-serve`` runs
  in the background until the page, or the next service, ends. A block without ``$`` is what the Python before printed.
- ``python``: run in one interpreter for the page. ``toml``: planned. ``text``: a drawing, nothing to run.

A comment before a block says more: ``<!-- not run: why -->``, ``<!-- file: name -->`` (the block is that file),
``<!-- figures vary -->`` (numbers are not compared), ``<!-- exit status 1 -->`` (or ``any``); several are separated by
semicolons.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any, NamedTuple, get_args

import api_page
import pytest
import site_pages
from kit.models import one_node
from kit.services import reserved_port
from kit.waits import PROGRAM_WAIT, WAIT, eventually
from test_layers import CLIENT, PACKAGE, SERVER
from torchpipe_server import options
from torchpipe_server.supervisor import child

from torchpipe_py.cli import markdown_table
from torchpipe_py.errors import ConfigError
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.training import LoaderOptions
from torchpipe_py.wire.answers import STATUSES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md") for page in sorted(ROOT.glob(pattern))]
README_BYTES = 12_288
FENCED = re.compile(
    r"(?:^<!-- (?P<marks>[^\n]*) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
RUN = {"console", "python", "toml", "text"}
EXCUSES = ("not run: ", "file: ")
CONTINUES = "continues from block to block"
"""A page that says so may use names of its earlier Python."""
WORDS_ELSEWHERE = """
    .mar BLS autocomplete batchSize config.pbtxt config.properties decoupled default_workers_per_model dynamic_batching
    ensemble explicit instance_group job_queue_size limiter livez log-verbose max_queue_delay_microseconds maxBatchDelay
    minWorkers model_warmup model.py perf_analyzer policy preferred_batch_size priority_levels sequence
    stateful TritonPythonModel version_policy warmup workflow
"""
"""What users of other servers search for."""

INTERPRETER = r"""
import ast, asyncio, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        waiting = eval(compile(ast.literal_eval(line), "<page>", "exec", flags, dont_inherit=True), names)
        if waiting is not None:
            asyncio.run(waiting)
        print("\0ok", flush=True)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        print("\0failed", flush=True)
"""


class Block(NamedTuple):
    marks: list[str]
    language: str
    text: str
    line: int

    def marked(self, start: str) -> str | None:
        """What follows ``start`` in the comment before the block."""
        return next((mark.removeprefix(start) for mark in self.marks if mark.startswith(start)), None)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            (match["marks"] or "").split("; "), match["language"], match["text"], text.count("\n", 0, match.start()) + 1
        )
        for match in FENCED.finditer(text)
    ]


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language != "text" and block.marked("not run: ") is None]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, with the output shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        count = next(index for index, line in enumerate(lines) if not line.endswith("\\")) + 1
        yield "\n".join(lines[:count]), "\n".join(lines[count:])


def fits(shown: str, printed: str, figures_vary: bool) -> bool:
    """Whether ``printed`` is what a page shows."""
    pattern = ""
    for line in shown.rstrip("\n").split("\n"):
        if line.strip() == "…":
            pattern += r"(?:.*\n)*"
            continue
        text = re.escape(line).replace("…", ".*")
        if figures_vary:
            text = re.sub(r"(?:\\ )+", r" +", re.sub(r"(?:\\-)?\d+(?:\\\.\d+)?(?:e\\-\d+)?", r"[-+\\d.e]+", text))
        pattern += text.rstrip() + r" *\n"
    return re.fullmatch(pattern, printed.rstrip("\n") + "\n") is not None


class Reader:
    """Does what a page says, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("configs", "scripts", "idl"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        # In place of the file that pages name, which a test cannot download.
        one_node(folder / "resnet50.onnx", ["n", 3, 224, 224], "GlobalAveragePool", gives=["n", 3, 1, 1])
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        # One thread for each program's arithmetic: other tests run beside this one.
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        self.here: dict[str, Any] = {"cwd": folder, "env": environment}
        self.heard: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **self.here}
        self.ports: dict[str, str] = {}
        self.reserved = contextlib.ExitStack()
        self.python: subprocess.Popen[str] | None = None
        self.service: subprocess.Popen[bytes] | None = None
        self.printed = ""

    def read(self, block: Block) -> None:
        name = block.marked("file: ")
        if name is not None:
            (self.folder / name).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self.run_python(block.text)
        elif block.language == "toml":
            (self.folder / "page.toml").write_text(block.text, encoding="utf-8")
            plan_pipeline(self.folder / "page.toml")
        elif block.language == "console":
            vary = "figures vary" in block.marks
            if not block.text.startswith("$ "):
                assert fits(block.text, self.printed, vary), self.printed
            for command, shown in commands(block.text):
                printed = self.run(command, block.marked("exit status ") or "0")
                assert not shown.strip() or fits(shown, printed, vary), printed

    def run(self, command: str, status: str) -> str:
        if command.startswith("torchpipe-serve "):
            return self.serve(command)
        program = ["bash", "-c", self.with_ports(command)]
        done = subprocess.run(program, stdin=subprocess.DEVNULL, timeout=PROGRAM_WAIT, check=False, **self.heard)
        assert status in (str(done.returncode), "any"), f"exit status {done.returncode}: {done.stdout}"
        return self.without_ports(done.stdout)

    def serve(self, command: str) -> str:
        self.stop_service()
        self.ports = {shown: str(self.reserved.enter_context(reserved_port())) for shown in ("8888", "8080")}
        log = self.folder / "service.log"
        with log.open("wb") as file:
            program = ["bash", "-c", f"exec {self.with_ports(command)}"]
            self.service = subprocess.Popen(program, stdout=file, stderr=file, **self.here)
        is_over = self.service.poll
        eventually(lambda: "serving " in log.read_text() or is_over() is not None, "no service", PROGRAM_WAIT)
        assert is_over() is None, log.read_text()
        return self.without_ports(log.read_text())

    def run_python(self, code: str) -> None:
        if self.python is None:
            program = [sys.executable, "-u", "-c", INTERPRETER]
            self.python = subprocess.Popen(program, stdin=subprocess.PIPE, **self.heard)
        assert self.python.stdin is not None
        assert self.python.stdout is not None
        self.python.stdin.write(f"{self.with_ports(code)!r}\n")
        self.python.stdin.flush()
        self.printed = ""
        while not self.printed.endswith(("\0ok\n", "\0failed\n")):
            line = self.python.stdout.readline()
            assert line, self.printed
            self.printed += line
        self.printed, _, outcome = self.printed.rpartition("\0")
        assert outcome == "ok\n", self.printed

    def with_ports(self, text: str) -> str:
        for shown, port in self.ports.items():
            text = text.replace(shown, port)
        return text

    def without_ports(self, text: str) -> str:
        for shown, port in self.ports.items():
            text = text.replace(port, shown)
        return text

    def stop_service(self) -> None:
        if self.service is not None:
            self.service.send_signal(signal.SIGTERM)
            assert self.service.wait(WAIT) == 0
            self.service = None

    def close(self) -> None:
        try:
            if self.python is not None:
                assert self.python.stdin is not None
                self.python.stdin.close()
                assert self.python.wait(WAIT) == 0
                assert self.python.stdout is not None
                self.python.stdout.close()
        finally:
            self.stop_service()
            self.reserved.close()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_every_block_gives_the_shown_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        for block in runnable(page):
            try:
                reader.read(block)
            except (Exception, AssertionError) as error:
                raise AssertionError(f"{name_of(page)}:{block.line}: {error}") from error
    finally:
        reader.close()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_excused(page: Path) -> None:
    for block in blocks(page):
        excused = any(block.marked(start) for start in EXCUSES)
        assert block.language in RUN or excused, f"{name_of(page)}:{block.line}: {block.language or 'no language'}"
        if block.language == "python":
            compile(block.text, name_of(page), "exec", 0x2000)  # with await at the top, as a page may have
    assert page.read_text(encoding="utf-8").count("\n```") % 2 == 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_copied_python_block_has_all_its_names(page: Path) -> None:
    earlier: set[str] = set()
    for block in blocks(page):
        if block.language != "python" or (block.marked("not run: ") or "").startswith(("a part", "parts")):
            continue
        tree = compile(block.text, name_of(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made, used = names_of(tree)
        missing = used - made - earlier - set(dir(builtins)) - {"__name__"}
        assert not missing, f"{name_of(page)}:{block.line}: {missing}; import them, or say: {CONTINUES}"
        if CONTINUES in page.read_text(encoding="utf-8"):
            earlier |= made


def names_of(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that some code makes, in whatever scope, and those that it uses."""
    made, used = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name):
                (used if isinstance(node.ctx, ast.Load) else made).add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                made.add(name)
            case ast.alias(name=name, asname=other):
                made.add(other or name.split(".")[0])
    return made, used


def test_words_of_other_servers_are_found_by_the_search_of_the_site() -> None:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("coming-from.md", "migrating.md"))
    found = set(re.split(site_pages.SEPARATOR, text.lower()))
    searched = re.split(site_pages.SEPARATOR, WORDS_ELSEWHERE.lower())
    assert [word for word in searched if word not in found] == []


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= README_BYTES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_files_and_functions_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings}, anchor
    folders = "configs|docs|idl|scripts|server|tests|torchpipe_py"
    for path, function in re.findall(rf"`((?:{folders})/[\w./-]+?)(?::([\w.]+))?`", text):
        assert (ROOT / path).exists(), path
        for name in function.split(".") if function else ():
            assert re.search(rf"(?:def|class) {name}\b", (ROOT / path).read_text(encoding="utf-8")), f"{path}:{name}"


def between(page: str, start: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.split(f"<!-- {start} -->\n")[1].split("<!-- end -->")[0].strip().splitlines()


def test_the_readme_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"]({page.relative_to(ROOT)})" not in readme] == ["README.md"]


def test_the_table_of_backends_is_the_generated_one() -> None:
    assert between("docs/backends.md", "torchpipe backends --markdown") == list(markdown_table())


def test_the_api_reference_is_that_of_the_docstrings() -> None:
    shown = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert shown == api_page.page(), "run: python scripts/api_page.py"


def test_the_api_reference_leaves_out_functions_of_other_packages() -> None:
    # A default of a dataclass is an attribute of the class: PyTorch's function, with PyTorch's docstring.
    assert isfunction(LoaderOptions.collate_labels)
    assert "collate_labels" not in dict(api_page.members(LoaderOptions))


def test_the_flags_of_the_service_are_the_declared_ones() -> None:
    assert between("docs/service.md", "flags")[2:] == options.markdown_table()


def test_documented_metrics_equal_those_of_the_service() -> None:
    files = ("server/torchpipe_server/supervisor/monitoring/metrics.py", "torchpipe_py/runtime/record/statistics.py")
    source = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(torchpipe_\w+)", page, flags=re.MULTILINE)
    assert {name.removesuffix("_total") for name in shown} == set(re.findall(r'"(torchpipe_\w+)"', source))


def test_every_error_code_and_reason_of_a_restart_has_a_symptom() -> None:
    shown = set(re.findall(r"`(\w+)`", (ROOT / "docs/symptoms.md").read_text(encoding="utf-8")))
    code = re.compile(r'(?:\bcode = |text: str, kind: str = |"code": |ProtocolError\(|NoStreamError\()"(\w+)"')
    codes = set(STATUSES)
    for file in [*ROOT.glob("torchpipe_py/**/*.py"), *ROOT.glob("server/torchpipe_server/**/*.py")]:
        if not {"training", "tools"} & {*file.relative_to(ROOT).parts}:  # whose errors no service answers with
            codes.update(code.findall(file.read_text(encoding="utf-8")))
    assert {"bad_frame", "bad_request", "not_served", "too_slow"} <= codes
    assert codes - shown == set()
    assert {*get_args(child.Reason), "failed_start"} - {"dismissed"} - shown == set()  # which is not replaced


def test_the_layers_shown_are_the_tested_ones() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## Processes")[0]
    package, service = text.split("The service imports")
    server, client = service.split("The client imports")
    for layers, shown in ((PACKAGE, package), (SERVER, server), (CLIENT, client)):
        cells = [line.split("|")[1] for line in shown.splitlines() if line.startswith("|")]
        rows = [
            next(row for row, cell in enumerate(cells) if re.search(rf"\b{name.replace('.', '/')}(\.py)?`", cell))
            for layer in layers
            for name in layer.split()
        ]
        assert rows == sorted(rows), layers


def test_a_page_that_is_wrong_is_found(tmp_path: Path) -> None:
    assert fits("a … c\n…\nlast 1.5 ms\n", "a b c\n\nmore\nlast 12 ms\n", True)
    assert not fits("a … c\n…\nlast 1.5 ms\n", "a b c\n\nmore\nlast 12 ms\n", False)
    assert not fits("QPS 1\n", "QPS none\n", True)
    reader = Reader(tmp_path)
    try:
        for language, text in (
            ("console", "$ echo right\nwrong\n"),
            ("console", "$ false\n"),
            ("python", "raise ValueError\n"),
            ("toml", '[node]\nbackend = "Identity"\nwrong = 1\n'),
        ):
            with pytest.raises((AssertionError, ConfigError)):
                reader.read(Block([""], language, text, 1))
    finally:
        reader.close()
    assert list(commands("$ a \\\n  b\nc\n$ d\n")) == [("a \\\n  b", "c\n"), ("d", "")]
