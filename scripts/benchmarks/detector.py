"""A detector of YOLOv8n's shapes, with suppression: ours, the model alone, LitServe and Triton on the same pictures.

All decode and letterbox to the same pixels and answer boxes as JSON, or as tensors over ``/v2``. Services have as many
workers or instances as there are cores, each with one thread of ONNX Runtime. Before the rounds each answers every
picture, and the boxes are compared.

Triton serves ``benchmarks/triton`` and needs the model before it starts: ``python -m benchmarks.detector FILE.onnx``
writes it; then ``BENCH_MODEL=FILE.onnx tritonserver --model-repository=benchmarks/triton --load-model=detector …``, and
``bench.py detector --detector-model FILE.onnx --triton PORT``.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bare import Measure, Processes
from benchmarks.common import Report, Subject, cores, in_threads, picture
from benchmarks.opencv_detector import OpenCvDetector
from benchmarks.peers import PATHS, is_installed, serving_module
from benchmarks.services import Tables, free_port, serving
from torchpipe_py.arguments import ArgumentParser

CLIENTS = (1, 8)
BUSY = CLIENTS[-1]
SIZES = ((500, 375), (640, 480), (375, 500), (800, 600), (1280, 720), (480, 640), (640, 360), (1024, 768))
PICTURES = 16
SIDE, WIDTH = 640, 0.25  # those of YOLOv8n
LIMIT, LOOP = "limit: {} processes with a thread each", "the model alone in a loop, {} process"
ENDS = "/infer", "OIP", "gRPC"
SAME_PIXELS, SAME_SCORE = 0.5, 1e-3

Boxes = np.ndarray
"""K×6: left, top, right, bottom, score, class, best first."""
Ask = Callable[[bytes], Boxes]


def detector(args: argparse.Namespace) -> Report:
    """Requests/s and latency of each, and whether they found the same."""
    report = Report(f"detector: {args.side}x{args.side}, width {args.width:g}, {PICTURES} JPEGs of {len(SIZES)} sizes")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = str(Path(args.detector_model or Path(folder, "detector.onnx")).absolute())
        if not Path(model).exists():
            write_model(model, args.side, args.width)
        limit, loop = Processes(cores(), alone, model, 1), Processes(1, alone, model, 0)
        for processes in (limit, loop):
            stack.callback(processes.close)
        subjects = [Subject(LIMIT, lambda _, seconds: limit.load(1, seconds), (cores(),))]
        subjects.append(Subject(LOOP, loop.load, (1,)))
        asks = dict(_asks(stack, report, model, args))
        report.remarks.append(compared(OpenCvDetector(model, 0), asks, pictures()))
        subjects += [Subject(name, in_threads(_in_turns(ask))) for name, ask in asks.items()]
        report.measure(subjects, CLIENTS, args.seconds, args.rounds)
    _hold(report, [name for name in asks if not name.startswith("torchpipe")])
    return report


def _asks(stack: ExitStack, report: Report, model: str, args: argparse.Namespace) -> Any:
    """Start the services; yield the name of each way to ask, and a function that does."""
    side = args.side
    shapes: dict[str, tuple[Tables, list[str]]] = {
        "as exported": (two_nodes(model, side), []),
        "one node": (one_node(model, side), ["--workers", str(cores())]),
    }
    has_grpc = importlib.util.find_spec("grpc") is not None
    for shape, (tables, options) in shapes.items():
        grpc_port, root = free_port(), next(iter(tables))
        options = [*options, *(["--grpc-port", str(grpc_port)] if has_grpc else [])]
        port = stack.enter_context(serving(tables, options))
        infer, oip, grpc = (f"torchpipe-serve, {shape}, {end}, {{}} clients" for end in ENDS)
        yield infer, _HttpAsk(port, "/infer", lambda body: boxes_of(json.loads(body)["result"]))
        yield oip, _HttpAsk(port, f"/v2/models/{root}/infer", _of_tensors, is_framed=True)
        if has_grpc:
            yield grpc, _grpc_ask(grpc_port, root)
    if not has_grpc:
        report.remarks.append("no gRPC: grpcio is not installed")
    if is_installed("litserve", report):
        settings = {"MODEL": model, "WORKERS": cores()}
        peer = stack.enter_context(serving_module("litserve", "benchmarks.peers.litserve_detector", settings))
        yield "LitServe, {} clients", _HttpAsk(peer.port, PATHS["litserve"], lambda body: boxes_of(json.loads(body)))
    if args.triton is None:
        report.remarks.append("no Triton: --triton PORT")
    else:
        path = "/v2/models/detector/infer"
        yield "Triton, Python backend, {} clients", _HttpAsk(args.triton, path, _of_text, is_framed=True)


def _hold(report: Report, peers: Sequence[str]) -> None:
    ours = {end: f"torchpipe-serve, one node, {end}, {{}} clients" for end in ENDS}
    for end, name in ours.items():
        if (name, BUSY) not in report.loads:
            continue
        report.require(f"{end} against the limit", report.ratio((name, BUSY), (LIMIT, cores())), low=0.9)
        report.require(f"{end} against the model in a loop", report.ratio((name, BUSY), (LOOP, 1)), low=1.2)
        for peer in peers:
            against = f"{end} against {peer.split(',')[0]}, {BUSY} clients"
            report.require(against, report.ratio((name, BUSY), (peer, BUSY)), low=1.2)


# -- the work -----------------------------------------------------------------------------------------------------


@cache
def pictures() -> Sequence[bytes]:
    """JPEGs of different sizes and contents."""
    return [picture(*SIZES[index % len(SIZES)], seed=index) for index in range(PICTURES)]


def write_model(path: str, side: int, width: float) -> None:
    """A detector that finds something in these pictures."""
    import cv2

    from benchmarks.yolo import write_yolo

    images = [cv2.imdecode(np.frombuffer(each, np.uint8), cv2.IMREAD_COLOR_RGB) for each in pictures()[: len(SIZES)]]
    write_yolo(Path(path), side, width, [cv2.resize(image, (side, side)) for image in images])


def alone(model: str, threads: int) -> tuple[Measure, str]:
    """The work without a service, in calling threads."""
    detect = OpenCvDetector(model, threads)
    return in_threads(_in_turns(detect)), ""


def _in_turns(call: Callable[[bytes], object]) -> Callable[[], object]:
    """A call with the next of the pictures."""
    files, number = pictures(), count()
    return lambda: call(files[next(number) % len(files)])


def one_node(model: str, side: int) -> Tables:
    decode = {"max_h": side, "max_w": side, "color": "rgb"}
    node = {"backend": "S[DecodeMat,LetterBoxMat,cvtColorMat,OnnxTensor]", **decode, **_of_model(model)}
    return {"detector": node}


def two_nodes(model: str, side: int) -> Tables:
    """As ``torchpipe export`` writes it."""
    decode = {"backend": "S[DecodeMat,LetterBoxMat,cvtColorMat]", "max_h": side, "max_w": side, "color": "rgb"}
    return {
        "detector": {**decode, "instance_num": 2, "next": "model"},
        "model": {"backend": "OnnxTensor", **_of_model(model)},
    }


def _of_model(model: str) -> dict[str, Any]:
    return {"model": model, "mean": 0, "std": 255, "postprocessor": "YoloBoxes"}


# -- asking -------------------------------------------------------------------------------------------------------


class _HttpAsk:
    """Posts a picture on the calling thread's connection; ``is_framed``: as one tensor of the protocol."""

    def __init__(self, port: int, path: str, read: Callable[[bytes], Boxes], is_framed: bool = False) -> None:
        self._port, self._path, self._read, self._is_framed = port, path, read, is_framed
        self._local = threading.local()

    def __call__(self, content: bytes) -> Boxes:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        fields = {"Content-Type": "image/jpeg"}
        if self._is_framed:
            size = len(content) + 4
            tensor = {"name": "data", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}}
            head = json.dumps({"inputs": [tensor]}).encode()
            fields = {"Inference-Header-Content-Length": str(len(head))}
            content = head + struct.pack("<I", len(content)) + content
        connection.request("POST", self._path, content, fields)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{self._path}: {answer.status}: {body[:300].decode(errors='replace')}")
        return self._read(body)


def _grpc_ask(port: int, model: str) -> Ask:
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    request, answer = message("inference.ModelInferRequest"), message("inference.ModelInferResponse")
    of_thread = threading.local()  # a connection for each client, as over HTTP: one connection has one worker

    def ask(content: bytes) -> Boxes:
        if not hasattr(of_thread, "infer"):
            options = [("grpc.use_local_subchannel_pool", 1)]
            of_thread.infer = grpc.insecure_channel(f"127.0.0.1:{port}", options=options).unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=lambda given: given.SerializeToString(),
                response_deserializer=answer.FromString,
            )
        tensor = {"name": "data", "datatype": "BYTES", "shape": [1]}
        raw = struct.pack("<I", len(content)) + content
        given = of_thread.infer(request(model_name=model, inputs=[tensor], raw_input_contents=[raw]), timeout=60)
        found = {each.name: raw for each, raw in zip(given.outputs, given.raw_output_contents, strict=True)}
        boxes, scores = (np.frombuffer(found[name], np.float32) for name in ("boxes", "scores"))
        classes = np.frombuffer(found["classes"], np.int64)
        return np.column_stack([boxes.reshape(-1, 4), scores, classes])

    return ask


def boxes_of(found: Sequence[Mapping[str, Any]]) -> Boxes:
    return np.array([[*each["box"], each["score"], each["class"]] for each in found]).reshape(-1, 6)


def _of_tensors(body: bytes) -> Boxes:
    found = {each["name"]: np.array(each["data"]) for each in json.loads(body)["outputs"]}
    return np.column_stack([found["boxes"].reshape(-1, 4), found["scores"], found["classes"]])


def _of_text(body: bytes) -> Boxes:
    (output,) = json.loads(body)["outputs"]
    return boxes_of(json.loads(output["data"][0]))


def compared(detect: Callable[[bytes], Any], asks: Mapping[str, Ask], files: Sequence[bytes]) -> str:
    """A remark on the boxes of all; ``RuntimeError`` if one finds others than the model alone."""
    total = 0
    for number, content in enumerate(files):
        wanted = boxes_of(detect(content))
        total += len(wanted)
        for name, ask in asks.items():
            found = ask(content)
            misses = sum(not _has(found, box) for box in wanted) + sum(not _has(wanted, box) for box in found)
            # Rounding may decide for another one of two boxes that overlap by just about the limit.
            if misses > 0.02 * len(wanted):
                raise RuntimeError(f"{name}: picture {number}: {misses} boxes differ, of {len(wanted)}")
    return f"all found the same boxes, {total / len(files):.0f} in a picture"


def _has(boxes: Boxes, box: np.ndarray) -> bool:
    """Whether such a box is among them."""
    apart = np.abs(boxes - box)
    return bool(((apart[:, :4] < SAME_PIXELS).all(1) & (apart[:, 4] < SAME_SCORE) & (apart[:, 5] == 0)).any())


if __name__ == "__main__":
    parser = ArgumentParser(description="Write the detector of the benchmark.")
    parser.add_argument("file")
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--width", type=float, default=WIDTH)
    given = parser.parse_args()
    write_model(given.file, given.side, given.width)
    sys.exit()
