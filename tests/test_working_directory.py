"""Processes that are started import nothing from the working directory but what the operator has named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from kit.services import LIGHT
from kit.waits import WAIT, run

from torchpipe_py import ConfigError, import_code
from torchpipe_py.cli import main

ROOT = Path(__file__).parents[1]
OPTIONAL = {"tensorrt", "torchvision", "pycuda", "simplejpeg", "lmdb", "usercustomize", "parsetab"}
SERVE = "import sys; from torchpipe_server.cli import main\nif __name__ == '__main__': sys.exit(main())"
TRAIN = """
import os, sys
from torch.utils.data import DataLoader
from torchpipe_py.training import ImageFiles, TensorToTensor, wrap_dataloader_torchpipe

def transform(image):
    assert "PYTHONSAFEPATH" not in os.environ
    return TensorToTensor()(image)

if __name__ == "__main__":
    files = ImageFiles([(sys.argv[1], 1)] * 4)
    decode = {"decode": {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": 8, "resize_w": 8}}
    plain = DataLoader(files, batch_size=4, num_workers=1)
    with wrap_dataloader_torchpipe("single", plain, decode, transform, workers_decode=True) as loader:
        print([tuple(images.shape) for images, _ in loader])
    assert "PYTHONSAFEPATH" not in os.environ
"""
TOOL = "import sys; from torchpipe_py.cli import main; sys.exit(main())"
SAFE_PATH = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot be told for what it spawns")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a file for every module there is; each that runs writes its name to ``RAN``."""
    folder = tmp_path / "here"
    folder.mkdir()
    text = (
        f"open({str(folder / 'RAN')!r}, 'a').write(__name__ + '\\n')\nraise ImportError('from the working directory')\n"
    )
    for name in {*sys.stdlib_module_names, *packages_distributions(), *OPTIONAL} - {"__main__"}:
        if "/" not in name:  # of a package that others have folders in
            (folder / f"{name}.py").write_text(text)
    return folder


def ran(folder: Path) -> str:
    file = folder / "RAN"
    return file.read_text() if file.exists() else ""


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, text=True)


def script(folder: Path, text: str) -> str:
    """A script in a separate folder, like an installed command; Python puts that first in ``sys.path``."""
    path = folder.parent / "commands" / "command.py"
    path.parent.mkdir()
    path.write_text(text)
    return str(path)


def ends_well(process: subprocess.Popen[str]) -> str:
    """The line that the service starts with; it is stopped then."""
    assert process.stdout is not None
    with process:
        try:
            line = process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT) == 0
        finally:
            process.kill()
    return line


def test_tools_in_a_deleted_working_directory_give_a_reason(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    command = f"cd here; rmdir ../here; exec {sys.executable} -c '{TOOL}' check no.toml"
    ended = run("bash", "-c", command, cwd=tmp_path, env={**os.environ, "PYTHONSAFEPATH": "1"})
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "torchpipe: the working directory was deleted: relative paths are now of /",
        "torchpipe: no.toml: no such file (working directory: /)",
    ]


@pytest.mark.slow
def test_service_ignores_modules_of_working_directory(folder: Path) -> None:
    config = folder / "my.toml"
    config.write_text('[node]\nbackend = "S[DecodeMat,Process[Identity]]"\n')
    flags = ("--port", "0", "--decode-isolation", "process")
    assert ends_well(start(folder, script(folder, SERVE), str(config), *flags)).startswith("serving")
    assert ran(folder) == ""


def test_the_service_as_a_module_with_code_of_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` imports the package itself with this folder in front; no library comes from here, though."""
    for name in ("argparse", "thriftpy2", "torch", "cv2", "onnxruntime", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the working directory')")
    (tmp_path / "my.toml").write_text('[node]\nbackend = "Own"\n')
    (tmp_path / "my_own_code.py").write_text("""
import os, sys
from torchpipe_py import ItemBackend, register_backend

@register_backend
class Own(ItemBackend):
    def setup(self):
        assert "PYTHONSAFEPATH" not in os.environ
        assert sys.path.index(os.getcwd()) == len(sys.path) - 1

    def forward_item(self, item):
        item["result"] = item["data"]
""")
    monkeypatch.setenv("PYTHONPATH", LIGHT)  # which comes after this folder
    command = ("-m", "torchpipe_server", "my.toml", "--port", "0", "--import", "my_own_code")
    assert ends_well(start(tmp_path, *command)).startswith("serving")


@pytest.mark.slow
@SAFE_PATH
def test_training_workers(folder: Path) -> None:
    image = ROOT / "configs/demo/images/ring_00.jpg"
    done = run(sys.executable, script(folder, TRAIN), image, cwd=folder)
    assert done.stdout == "[(4, 3, 8, 8)]\n", done.stderr
    assert ran(folder) == ""


def test_named_module_is_searched_in_working_directory_last(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.delitem(sys.modules, "json")
    import_code("json")
    assert "not the one in the working directory: rename that, or give it as a file" in caplog.text
    assert str(tmp_path) not in sys.path
    caplog.clear()
    (tmp_path / "named_by_the_operator.py").write_text("")
    import_code("named_by_the_operator")
    assert sys.path[-1] == str(tmp_path)
    import_code("named_by_the_operator")
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"^named_nowhere: no such module, installed or in "):
        import_code("named_nowhere")


@pytest.mark.parametrize("command", ["check", "parity", "bench"])
def test_every_command_imports_from_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The service, too: see above."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    package = tmp_path / f"named_for_{command}"
    package.mkdir()
    text = "from torchpipe_py import ConfigError\nraise ConfigError('it is imported')\n"
    (package / "first.py").write_text("")
    (package / "inner.py").write_text(text)
    (tmp_path / "images").mkdir()
    more = {"check": [], "parity": ["b.toml", "--img_dir", "images"], "bench": ["--img_dir", "images"]}
    assert main(
        [command, "a.toml", *more[command], "--import", f"named_for_{command}.first, named_for_{command}.inner"]
    )
    assert capsys.readouterr().err == "torchpipe: it is imported\n"
