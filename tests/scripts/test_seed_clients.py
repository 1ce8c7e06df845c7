"""Clients as users of the documents have them, written against an older contract, against both services of today.

Their contract has ``ping`` and ``infer_batch`` and no exceptions. The scripts share no code with this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.gpu import baseline
from kit.services import ROOT, serving
from kit.waits import run
from test_baseline import serving as serving_baseline

from torchpipe_py.tools.options import parse_load

DEMO = ROOT / "configs" / "demo"
LABELS = (DEMO / "labels.txt").read_text(encoding="utf-8").split()
SERVICES = ("torchpipe-serve", "baseline")

CONTRACT = """
struct InferenceParams { 1: required string uuid; 2: required binary data; }
struct InferenceResult { 1: required string label; 2: required double score; }
service InferenceService { void ping(), InferenceResult infer_batch(1: InferenceParams params), }
"""

THRIFTPY2_CLIENT = """
import sys

import thriftpy2
from thriftpy2.rpc import make_client
from thriftpy2.thrift import TApplicationException

serve = thriftpy2.load("serve.thrift", module_name="serve_thrift")
client = make_client(serve.InferenceService, "127.0.0.1", int(sys.argv[1]), timeout=60_000)
client.ping()
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        params = serve.InferenceParams(path, file.read())
    try:
        result = client.infer_batch(params)
        print(result.label, result.score)
    except TApplicationException as error:
        print("error", error.type)
client.close()
"""

APACHE_CLIENT = """
import sys

import cv2
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TMessageType, TType
from thrift.transport import TSocket, TTransport

transport = TTransport.TBufferedTransport(TSocket.TSocket("localhost", int(sys.argv[1])))
protocol = TBinaryProtocol(transport)
transport.open()


def call(name, write_params=None):
    protocol.writeMessageBegin(name, TMessageType.CALL, 0)
    protocol.writeStructBegin(name + "_args")
    if write_params:
        protocol.writeFieldBegin("params", TType.STRUCT, 1)
        write_params()
        protocol.writeFieldEnd()
    protocol.writeFieldStop()
    protocol.writeStructEnd()
    protocol.writeMessageEnd()
    transport.flush()
    assert protocol.readMessageBegin() == (name, TMessageType.REPLY, 0)
    success = read_fields()
    protocol.readMessageEnd()
    return success.get(0)


def read_fields():
    fields = {}
    protocol.readStructBegin()
    while True:
        _, kind, number = protocol.readFieldBegin()
        if kind == TType.STOP:
            break
        if kind == TType.STRUCT and number == 0:
            fields[number] = read_fields()
        elif kind == TType.STRING:
            fields[number] = protocol.readString()
        elif kind == TType.DOUBLE:
            fields[number] = protocol.readDouble()
        else:
            protocol.skip(kind)
        protocol.readFieldEnd()
    protocol.readStructEnd()
    return fields


assert call("ping") is None
for path in sys.argv[2:]:
    # As the documents' load tester sends an image: the array that OpenCV encoded, not bytes made of it.
    image = cv2.imread(path, 1)
    data = open(path, "rb").read() if image is None else cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 95])[1]

    def write():
        protocol.writeStructBegin("InferenceParams")
        protocol.writeFieldBegin("uuid", TType.STRING, 1)
        protocol.writeString(path)
        protocol.writeFieldEnd()
        protocol.writeFieldBegin("data", TType.STRING, 2)
        protocol.writeBinary(data)
        protocol.writeFieldEnd()
        protocol.writeFieldStop()
        protocol.writeStructEnd()

    result = call("infer_batch", write)
    print("error 5" if result is None else f"{result[1]} {result[2]}")
transport.close()
"""


@pytest.fixture(scope="module", params=SERVICES)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a service with the demo's model."""
    if request.param == "baseline":
        with serving_baseline(baseline.load_model(None, str(DEMO / "model.onnx"), 64), 64) as port:
            yield port
    else:
        with serving(str(ROOT / "configs" / "demo.toml")) as server:
            yield server.port


@pytest.mark.parametrize("client", [THRIFTPY2_CLIENT, APACHE_CLIENT], ids=["thriftpy2", "Apache Thrift"])
def test_client_of_the_older_contract_gets_labels_and_survives_an_error(client: str, port: int, tmp_path: Path) -> None:
    (tmp_path / "serve.thrift").write_text(CONTRACT, encoding="utf-8")
    (tmp_path / "client.py").write_text(client, encoding="utf-8")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    images = [DEMO / "images" / "ring_00.jpg", tmp_path / "broken.jpg", DEMO / "images" / "star_00.jpg"]
    done = run(sys.executable, "-I", "client.py", port, *images, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ring, broken, star = (line.split() for line in done.stdout.splitlines())
    assert broken == ["error", "5"]  # MISSING_RESULT: its contract has no exception that could say more
    assert [_name(ring[0]), _name(star[0])] == ["ring", "star"]
    assert all(0.5 < float(answer[1]) <= 1 for answer in (ring, star))


def _name(label: str) -> str:
    return LABELS[int(label)] if label.isdecimal() else label  # the baseline has no names


def test_load_tester_takes_the_options_of_the_documents(port: int, tmp_path: Path) -> None:
    documented = f"--img_dir {DEMO / 'images'}/ --port {port} --request_client 20 --request_batch 1".split()
    options = parse_load(documented, "client_qps.py")
    assert (options.request_client, options.request_batch, options.total_number) == (20, 1, 10_000)

    report = tmp_path / "report.json"
    shorter = ["--total_number", "200", "--no-progress", "--json", report]  # 10,000 would take seconds
    done = run(sys.executable, "scripts/client_qps.py", *documented, *shorter, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text(encoding="utf-8"))
    assert (figures["images_ok"], figures["settings"]["request_client"]) == (200, 20)
    assert figures["qps"] > 0
    assert 0 < figures["latency_ms"]["p50"] <= figures["latency_ms"]["p99"]
