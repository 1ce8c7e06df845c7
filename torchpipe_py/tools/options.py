"""The options of every tool, and the types of their values; it does not import the tools."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.errors import ConfigError, listed, nearest
from torchpipe_py.files import output_problem
from torchpipe_py.tools.report import ToolError
from torchpipe_py.values import to_floats

if TYPE_CHECKING:
    from torchpipe_py.plan.build import Pipeline

# --- types of values; argparse adds the flag to their errors


def number(what: str, low: float, high: float, kind: Callable[[str], Any] = float) -> Callable[[str], Any]:
    """The type of a number from ``low`` to ``high``; ``what`` names it in the message."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return value

    return parse


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of a whole number."""
    bounds = f", at least {least}" if most is None else f" from {least} to {most}"
    return number(f"a whole number{bounds}", least, math.inf if most is None else most, int)


def above_zero(what: str) -> Callable[[str], float]:
    """The type of a number of ``what``."""
    return number(f"a number of {what} above 0 and below a million", 5e-324, math.nextafter(1e6, 0))


points = number("points of accuracy, 0 to 100", 0, 100)


def output_file(text: str) -> Path:
    """The type of a file to write, checked before any work is done."""
    if problem := output_problem(text):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {problem}")
    return Path(text)


def _tolerance(text: str) -> Any:
    from torchpipe_py.tools.compare_models.tolerance import read_tolerance

    try:
        return read_tolerance(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _onnx(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".onnx":
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in .onnx, got {text!r}; for example {path.stem or 'model.int8'}.onnx"
        )
    return path


def _stem(text: str) -> Path:
    path = Path(text)
    return path.with_suffix("") if path.suffix in (".onnx", ".toml") else path


def _sides(text: str) -> int | tuple[int, int]:
    if not re.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"expected pixels, as 224, or height and width, as 224x160, got {text!r}")
    height, by, width = text.partition("x")
    return (int(height), int(width)) if by else int(height)


def _floats(text: str) -> tuple[float, ...]:
    try:
        numbers = to_floats(text)
    except (ConfigError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if len(numbers) not in (1, 3):
        raise argparse.ArgumentTypeError(f"expected one number or three, got {len(numbers)}")
    return tuple(numbers)


# --- torchpipe parity, export, quantize, encrypt, from-triton


def add_parity_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe parity``."""
    add = parser.add_argument
    add("a", metavar="A.toml", help="the reference; its results say what is compared")
    other = parser.add_mutually_exclusive_group(required=True).add_argument
    other("b", nargs="?", metavar="B.toml", help="to compare with it, with a result of the same kind")
    function = "instead of B: compare A with file.py:function, the reference, which is called with each image's path"
    other("--against", metavar="CODE", help=function)
    other("--torchvision", metavar="WEIGHTS", help="instead of B: torchvision's transform of these weights")
    add("--img_dir", required=True, metavar="DIR", help="images, found recursively by extension")
    add("--model", metavar="CONFIG.toml", help="a pipe that takes either result as data: compares its results")
    limits = "limits, as 'top1=0.999, score=0.01': stops as soon as images show that B keeps or misses them"
    add("--tolerance", type=_tolerance, metavar="LIMITS", help=limits)
    add("--html", type=output_file, metavar="FILE", help="write a self-contained report with pictures")
    add("--json", type=output_file, metavar="FILE", help="write every figure of every image")
    add("--worst", type=at_least(0), default=10, metavar="N", help="images to show (default: %(default)s)")
    mean = number("a number, at least 0", 0, 1e308)
    add("--max-mean", type=mean, metavar="X", help="bar: mean absolute difference, averaged over all images")
    share = number("a share from 0 to 1", 0, 1)
    add("--min-agreement", type=share, metavar="X", help="bar: share of images with the same class, 0 to 1")
    add("--max-drop", type=points, metavar="X", help="bar: points of accuracy (0 to 100) that B may lose")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe export``."""
    add = parser.add_argument
    add(
        "source",
        metavar="MODEL",
        help="a torchvision classifier, module:function or file.py:function of yours, or an ONNX file",
    )
    add(
        "--weights",
        metavar="FILE",
        help="a state dict, or a checkpoint that has one; of torchvision's models also 'pretrained' (the default), the "
        "name of weights, or 'random' to measure speed",
    )
    add("--seed", type=at_least(0, 2**63 - 1), default=0, metavar="N", help="of --weights random (default: 0)")
    names = "NAME.onnx and NAME.toml (default: model); of an ONNX file only NAME.toml (default: beside it)"
    add("--out", type=_stem, metavar="NAME", help=names)
    add("--force", action="store_true", help="replace existing files")
    add("--labels", type=Path, metavar="FILE", help="one class per line; default: those of the weights, if any")
    kinds = "of a classifier: SoftmaxMax (the default), TopK, Sigmoid for several labels, or '' for plain outputs; "
    kinds += "of a segmenter ArgMax; "
    add("--postprocessor", metavar="NAME", help=f"{kinds}of an ONNX file by default what its shapes say")
    pixels = parser.add_argument_group("preprocessing", "as the model was evaluated; default: that of the weights")
    add = pixels.add_argument
    add("--transforms", metavar="WEIGHTS", help="torchvision's for weights, as ResNet50_Weights.IMAGENET1K_V1")
    add("--resize", type=_sides, metavar="N|HxW", help="the shorter side, or height and width, pixels")
    add("--crop", type=_sides, metavar="N|HxW", help="of the centre, pixels")
    fits = "how a picture gets the size of an ONNX file's input (default: letterbox for YOLO, crop for classifiers)"
    add("--fit", choices=("letterbox", "stretch", "crop", "whole"), help=fits)
    add("--interpolation", choices=("bilinear", "bicubic"), help="of the resize")
    add("--mean", type=_floats, metavar="R,G,B", help="of pixels from 0 to 1, as in transforms.Normalize")
    add("--std", type=_floats, metavar="R,G,B", help="the same")
    add("--color", choices=("rgb", "bgr", "gray"), help="that the model takes (default: rgb)")
    add("--preprocess", type=Path, metavar="TOML", help="decode and resize by this file instead, as in training")
    parser.add_argument("--opset", type=int, default=17, help="of ONNX (default: %(default)s)")


CALIBRATE = 128
"""Default number of calibration images: more hardly widen the ranges of the layers."""


def add_quantize_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe quantize``."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="the pipe whose model is quantised; its result is a class")
    labelled = "images, found recursively; labelled ones are LABEL/name.jpg or LABEL_name.jpg"
    add("--img_dir", required=True, metavar="DIR", help=labelled)
    where = "where the int8 model is written (default: %(default)s)"
    add("--out", type=_onnx, default="model.int8.onnx", metavar="FILE.onnx", help=where)
    add("--force", action="store_true", help="replace an existing file")
    add("--node", metavar="NAME", help="the node of the model, if several have one")
    add(
        "--max-drop",
        type=points,
        default=0.5,
        metavar="X",
        help="points of accuracy, 0 to 100, that it may lose (default: %(default)s); without labels: percent of the "
        "images that may change their class",
    )
    calibrate = "images to calibrate with (default: %(default)s), at most half of all; the others check the result"
    add("--calibrate", type=at_least(0), default=CALIBRATE, metavar="N", help=calibrate)
    keep = "keep up to N layers that int8 harms most in fp32 (default: none)"
    add("--keep", type=at_least(0), default=0, metavar="N", help=keep)


def add_encrypt_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe encrypt``."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="an ONNX file, TorchScript, a .pt2 or a TensorRT engine")
    keys = parser.add_mutually_exclusive_group(required=True).add_argument
    keys("--key_file", default="", metavar="FILE", help="with the key: 32 bytes, raw, in hex or in base64")
    keys("--key_env", default="", metavar="NAME", help="an environment variable with the key")
    keys("--new_key", default="", metavar="FILE", help="make a key, and write it to FILE, which must not exist")
    add("--out", metavar="FILE", help="the encrypted model (default: MODEL.enc)")
    add("--force", action="store_true", help="replace an existing file")


def add_from_triton_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe from-triton``."""
    add = parser.add_argument
    add("repository", metavar="MODEL_REPOSITORY", help="its folder, as for tritonserver --model-repository")
    add("--out", default="converted", metavar="FOLDER", help="NAME.toml for each model (default: %(default)s)")
    add("--force", action="store_true", help="replace existing files, but keep classes that you completed")


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe watch``."""
    add = parser.add_argument
    add("--streams", required=True, metavar="FILE.toml", help="a table for each stream, with its source")
    add("--out", type=output_file, metavar="FILE", help="write a line of JSON for each frame; default: print it")
    add("--show", action="store_true", help="show frames and boxes in a window of each stream")
    add("--seconds", type=above_zero("seconds"), metavar="S", help="stop after S seconds")


def _parameter(text: str) -> tuple[str, Any]:
    name, is_given, value = text.partition("=")
    if not is_given or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, as threshold=0.5, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("expected names, separated by commas")
    return list(dict.fromkeys(names))


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe run``."""
    add = parser.add_argument
    source = (
        "a folder of images, a pattern as 'shots/**/*.jpg', an image, a video, a tar, a URL, a text file that lists "
        "these, one a line, or - for such a list on the standard input"
    )
    add("source", metavar="SOURCE", help=source)
    out = "a line for each file: .ndjson, .csv or .parquet; with --draw a folder"
    add("--out", type=Path, required=True, metavar="OUT", help=out)
    add("--draw", action="store_true", help="draw results on the pictures; OUT has them, and results.ndjson")
    add("--restart", action="store_true", help="begin anew: discard an unfinished run, and replace OUT")
    add("--ordered", action="store_true", help="lines in the order of SOURCE; default: as files are done")
    content = "content: add the SHA-256 of each file, and compute the same content once; default: path"
    add("--by", choices=("path", "content"), default="path", help=content)
    _add_node_name(parser, "files")
    outputs = "what lines have of a request's dict, separated by commas; default: result"
    add("--outputs", type=_names, default=["result"], metavar="KEYS", help=outputs)
    parameter = "a parameter of each request, as threshold=0.5: JSON, or else a text; may be repeated"
    add("--param", type=_parameter, action="append", metavar="NAME=VALUE", help=parameter)
    workers = "processes, each with a pipe; default: one per core, at most 8, or 1 on a machine with an NVIDIA GPU"
    add("--workers", type=at_least(0, 1024), default=0, metavar="N", help=workers)
    silent = "seconds after which a process without an answer is replaced; default %(default)g"
    add("--timeout", type=above_zero("seconds"), default=300.0, metavar="S", help=silent)
    add("--ray", metavar="ADDRESS", help="run over Ray Data on this cluster instead: auto, local, ray://host:10001")
    add("--no-progress", dest="progress", action="store_false", help="no line of progress on the standard error")


def to_bytes(text: str) -> int:
    """``6G`` or ``800M`` as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.upper(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected bytes, as 6G or 800M, got {text!r}")
    return int(float(match[1]) * 1024.0 ** " KMG".index(match[2] or " "))


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe tune``."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="a pipe with one root")
    add("--img_dir", type=Path, required=True, metavar="DIR", help="typical images, found recursively")
    pixels = "also try other pixels and precision, which change results, and say by how much"
    add("--allow-pixels", dest="allow_pixels", action="store_true", help=pixels)
    add("--out", type=output_file, metavar="FILE", help="the tuned file; default: CONFIG.tuned.toml")
    _add_goal_options(parser, 120.0)
    add("--replay", type=Path, metavar="FILE", help="arrival times in seconds, one per line; default: Poisson")
    add("--html", type=output_file, metavar="FILE", help="write a self-contained page with a plot")


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchpipe compile``."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="a pipe with one root")
    pictures = "pictures as the service will get them, found recursively: one half chooses, the other certifies"
    add("--img_dir", type=Path, required=True, metavar="DIR", help=pictures)
    limits = "what may be lost, as for parity: 'top1=0.999, score=0.01'"
    add("--tolerance", type=_tolerance, required=True, metavar="LIMITS", help=limits)
    files = "the compiled file; default: CONFIG.compiled.toml. Its certificate is FILE.certificate.json, and .html"
    add("--out", type=output_file, metavar="FILE", help=files)
    _add_goal_options(parser, 240.0)


def _add_goal_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Declare what ``tune`` and ``compile`` are to find, with what, and in how many seconds."""
    add, default = parser.add_argument, "; default %(default)g"
    slo = "find the most requests per second with 99 %% answered within MS"
    add("--slo-p99", dest="slo_p99", type=above_zero("ms"), metavar="MS", help=slo)
    rate = "find the shortest p99 at R requests per second"
    add("--rate", type=above_zero("requests per second"), metavar="R", help=rate)
    add("--cores", type=at_least(1), metavar="N", help="cores that the service will have; default: all")
    add("--gpu-memory", type=to_bytes, metavar="BYTES", help="of a GPU that the service may use, as 6G")
    budget = number("a number of seconds from 5 to 3600", 5, 3600)
    add("--budget", type=budget, default=seconds, metavar="S", help="about how many seconds it may take" + default)
    add("--json", type=output_file, metavar="FILE", help="write all measurements to FILE")
    add("--no-progress", dest="progress", action="store_false", help="no progress bar, nor a line per phase")


def _add_node_name(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"the root that {what} enter, where the configuration has several"
    parser.add_argument("--node_name", metavar="NAME", help=text)


def check_node_name(plan: Pipeline, name: str | None) -> None:
    """``ToolError`` unless ``name`` is a root of the plan, or None where it has only one."""
    if name is None and plan.only_root is None:
        raise ToolError(f"--node_name: has to name one of the roots: {listed(list(plan.roots))}")
    if name is not None and name not in plan.roots:
        raise ToolError(f"--node_name {name}: not a root; {nearest(name, plan.roots)}")


# --- torchpipe bench and torchpipe load

DEFAULT_TOTAL = 10_000
MOST_IMAGES = 10**9
ARRIVALS = ("closed", "constant", "poisson", "replay")
DEFAULT_PROBE_S = 10.0
_CLIENTS, _IMAGES = "clients are --request_client here", "images are counted by --total_number here"
_SERVER = "the server is --host and --port here, and --transport http for HTTP"
ELSEWHERE = {
    **dict.fromkeys(("--concurrency", "--connections", "-c"), _CLIENTS),
    **dict.fromkeys(("--requests", "-n"), _IMAGES),
    **dict.fromkeys(("--url", "-u"), _SERVER),
}
"""Flags of other load testers, and their equivalents."""

_STATUSES = """\
exit status: 0 every image has a result, the run was stable and any SLO was met; 1 it could not run;
2 some images have no result, or an open loop was unstable (or the arguments are wrong); 3 the SLO was missed, or
--search found no rate that meets it; 4 INVALID, it measured the tester itself; 130 interrupted. A sweep has the status
of its worst run (4, then 2, 3, 0), or of what stopped it."""


def add_load_options(parser: argparse.ArgumentParser, clients: str) -> None:
    """Declare the options that ``bench`` and ``load`` share; ``clients`` describes the clients."""
    add, default = parser.add_argument, "; default %(default)s"
    client, images = at_least(1, 10_000), at_least(1, MOST_IMAGES)
    add("--img_dir", type=Path, required=True, metavar="DIR", help="images, found recursively")
    add("--request_client", type=client, default=20, metavar="N", help=clients + default)
    add("--request_batch", type=client, default=1, metavar="N", help="images per call" + default)
    add("--total_number", type=images, default=DEFAULT_TOTAL, metavar="N", help="images to send in total" + default)
    _add_node_name(parser, "images")
    warmup = "calls per client, not counted; default 5 %% of the calls or of --duration, 1 to 50"
    add("--warmup", type=at_least(0, MOST_IMAGES), metavar="N", help=warmup)
    labels = "report accuracy: circle/03.jpg and circle_03.jpg have the label circle"
    add("--labels_from_names", action="store_true", help=labels)
    add("--json", type=output_file, metavar="FILE", help="write the whole report to FILE")
    add("--no-progress", dest="progress", action="store_false", help="no progress bar")


def parse_load(arguments: Sequence[str], program: str) -> argparse.Namespace:
    """The command line of ``torchpipe load``, with derived settings filled in.

    Wrong values end the process with status 2; ``ToolError`` for options that contradict each other.
    """
    description = f"Load tester of the inference service. `{program} compare A.json B.json` compares two reports."
    parser = ArgumentParser(prog=program, description=description, epilog=_STATUSES, elsewhere=ELSEWHERE)
    add_load_options(parser, clients="clients, each with a connection")
    add, default = parser.add_argument, "; default %(default)s"
    port = at_least(1, 65535)
    add("--host", default="127.0.0.1", help="where the service is" + default)
    add("--port", type=port, default=8888, metavar="PORT", help="port that takes images" + default)
    add("--transport", choices=("buffered", "framed", "http"), default="buffered", help="of Thrift, or HTTP")
    add("--path", metavar="PATH", help="where images are POSTed over HTTP; default /infer")
    priority = "of each request: 1 is low (Thrift: infer_many; HTTP: X-Priority)" + default
    add("--priority", type=int, choices=(0, 1), default=0, help=priority)
    limit = "seconds for a call, and for a connection" + default
    add("--timeout", type=above_zero("seconds"), default=10.0, metavar="S", help=limit)
    server = "process whose CPU use is reported; default: the local one that listens on the port"
    add("--server_pid", type=at_least(1), metavar="PID", help=server)
    stats = "the service's --http-port, to report its nodes and the hand-over to engine processes"
    add("--http-port", type=port, metavar="PORT", help=stats)
    add("--csv", type=output_file, metavar="FILE", help="write a line for each run to FILE")
    add("--html", type=output_file, metavar="FILE", help="write a self-contained page with plots to FILE")
    add = parser.add_argument_group("when calls are sent").add_argument
    add(
        "--rate",
        type=above_zero("images per second"),
        metavar="R",
        help="images per second of all clients together, however fast the server is: an open loop; with "
        "--request_batch B these are R/B calls per second. Rescales a --replay",
    )
    add("--arrivals", choices=ARRIVALS, help="default: closed; with --rate constant, with --replay replay")
    add("--replay", type=Path, metavar="FILE", help="send times in seconds since the start, one per line")
    add("--replay_column", metavar="NAME", help="the column of times, if --replay is a CSV file")
    add("--seed", type=int, default=0, help="of Poisson arrivals; default %(default)s")
    duration = "seconds to send for, instead of --total_number; with --search for each probe, default 10"
    add("--duration", type=above_zero("seconds"), metavar="S", help=duration)
    add = parser.add_argument_group("verdict and several runs").add_argument
    slo = "99 %% of the calls must be answered within MS, from when they were due"
    add("--slo-p99", dest="slo_p99", type=above_zero("ms"), metavar="MS", help=slo)
    add("--search", action="store_true", help="find the highest rate with --slo-p99 met, stable, no errors")
    sweep = "a run for each value: clients=1,2,5 or rate=100:400:100 (start:stop:step, stop included)"
    add("--sweep", metavar="WHAT=VALUES", help=sweep)
    return _completed(parser.parse_args(arguments, argparse.Namespace(total_number=None)))


def _completed(options: argparse.Namespace) -> argparse.Namespace:
    is_http, paced, arrivals = options.transport == "http", options.rate is not None, options.arrivals
    sweeps_rates = options.sweep is not None and options.sweep.startswith("rate=")
    several, replays, counts = options.search or sweeps_rates, options.replay is not None, options.total_number
    for is_wrong, why in (
        (is_http and options.request_batch > 1, "--request_batch: over HTTP a request has one image"),
        (options.path is not None and not is_http, "--path: is for --transport http"),
        (replays and arrivals not in (None, "replay"), f"--replay: does not go with --arrivals {arrivals}"),
        (paced and arrivals == "closed", "--rate: a closed loop has no rate; --arrivals constant or poisson"),
        (arrivals in ("constant", "poisson") and not (paced or several), f"--arrivals {arrivals}: needs a --rate"),
        (arrivals == "replay" and not replays, "--arrivals replay: needs a --replay FILE"),
        (options.replay_column is not None and not replays, "--replay_column: needs a --replay FILE"),
        (counts and options.duration, "--duration: takes the place of --total_number; give one of them"),
        (options.search and options.slo_p99 is None, "--search: needs the --slo-p99 MS to meet"),
        (options.search and options.sweep is not None, "--search: does not go with --sweep; give one of them"),
        (options.search and counts, "--search: give --duration for its probes instead of --total_number"),
        (several and paced, "--rate: --search and --sweep rate= choose the rate; leave it out"),
        (
            several and (replays or arrivals in ("closed", "replay")),
            "--search and --sweep rate=: need --arrivals constant or poisson",
        ),
    ):
        if is_wrong:
            raise ToolError(why)
    options.path = options.path or "/infer"
    if arrivals is None:
        options.arrivals = "replay" if replays else "constant" if paced or several else "closed"
    if options.search and options.duration is None:
        options.duration = DEFAULT_PROBE_S
    if counts is None and options.duration is None and options.arrivals != "replay":
        options.total_number = DEFAULT_TOTAL
    return options
