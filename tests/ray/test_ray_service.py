from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fakes import Gate

from torchpipe_py import DecodeError, InvalidRequest, PipeClosed, pipe
from torchpipe_py.ray.arguments import Arguments
from torchpipe_py.ray.service import Answer, Service, UnhealthyError

TEXT = {"backend": "Identity"}
ARGUMENTS = Arguments("demo.toml", drain_seconds=30.0, max_message_bytes=64, max_text_bytes=64)
WIDE = dataclasses.replace(ARGUMENTS, max_message_bytes=1000, max_text_bytes=1000)


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    yield body[:7]
    yield body[7:]


def served(use: Callable[[Service], Awaitable[Any]], config: Any = TEXT, arguments: Arguments = ARGUMENTS) -> Any:
    """What ``use`` makes of a service on the pipe, which is ended then."""

    async def run() -> Any:
        service = Service(lambda: pipe(config), arguments)
        try:
            return await use(service)
        finally:
            await service.end()

    return asyncio.run(run())


def post(service: Service, body: bytes, query: str = "", path: str = "/infer", **fields: str) -> Awaitable[Answer]:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return service.answer("POST", path, query, named, pieces(body))


def asked(body: bytes, query: str = "", **more: Any) -> Answer:
    fields = more.pop("fields", {})
    answer: Answer = served(lambda service: post(service, body, query, **fields), **more)
    return answer


def test_bytes_in_json_out(jpeg: bytes) -> None:
    answer = asked(b"bytes of any kind")
    assert (answer.status, json.loads(answer.body)) == (200, {"result": {"b64": "Ynl0ZXMgb2YgYW55IGtpbmQ="}})


def test_json_in_and_other_keys_out() -> None:
    answer = asked(b'{"inputs": {"data": 1, "x": "y"}, "outputs": ["x"]}', fields={"content_type": "application/json"})
    assert (answer.status, answer.body) == (200, b'{"x": "y"}\n')


def test_a_list_in_json() -> None:
    body = b'{"inputs": {"data": "a", "x": [[1, 2.5], "b"]}, "outputs": ["x"]}'
    answer = asked(body, fields={"content_type": "application/json"}, arguments=WIDE)
    assert (answer.status, answer.body) == (200, b'{"x": [[1, 2.5], "b"]}\n')


@pytest.mark.parametrize(
    ("body", "query", "fields", "status", "code"),
    [
        (b"x", "node_name=none", {}, 404, "unknown_node"),
        (b"x", "outputs=score", {}, 422, "no_result"),
        (b"x", "", {"x_deadline_ms": "soon"}, 400, "invalid_request"),
        (b"x" * 65, "", {}, 413, "too_large"),
        (b"{", "", {"content_type": "application/json"}, 400, "invalid_request"),
        (b"x", "", {"path": "/infr"}, 404, "not_found"),
    ],
)
def test_errors_are_statuses(body: bytes, query: str, fields: dict[str, str], status: int, code: str) -> None:
    answer = asked(body, query, fields=fields)
    assert (answer.status, json.loads(answer.body)["code"]) == (status, code)


def test_a_body_names_the_argument_that_bounds_it() -> None:
    assert json.loads(asked(b"x" * 65).body)["error"] == "a body of more than 64 bytes (max_message_bytes)"


def test_another_path_is_named_as_it_was_asked_for() -> None:
    answer: Answer = served(lambda service: post(service, b"x", path="/v2/models/demo"))
    assert json.loads(answer.body) == {"error": "no /v2/models/demo; there is /infer", "code": "not_found"}


def test_other_methods_are_told_what_is_allowed() -> None:
    answer: Answer = served(lambda service: service.answer("GET", "/infer", "", {}, pieces(b"")))
    assert (answer.status, answer.headers) == (405, {"Allow": "POST"})


def test_beyond_max_inflight_come_back_later(register: Any) -> None:
    with Gate() as gate:
        name = register(gate.backend)

        async def use(service: Service) -> Answer:
            first = asyncio.create_task(service.infer(b"1"))
            await asyncio.to_thread(gate.wait_entered)
            answer = await post(service, b"2")
            gate.open()
            assert await first == b"1"
            return answer

        answer = served(use, {"backend": name, "max_inflight": 1})
    assert (answer.status, answer.headers, json.loads(answer.body)["code"]) == (429, {"Retry-After": "1"}, "overloaded")


def test_a_deadline_ends_a_request_whose_backend_runs_on(register: Any) -> None:
    with Gate() as gate:
        name = register(gate.backend)

        async def use(service: Service) -> Answer:
            answer = await post(service, b"1", x_deadline_ms="1")
            gate.open()
            return answer

        answer = served(use, {"backend": name})
    assert (answer.status, json.loads(answer.body)["code"]) == (504, "deadline_exceeded")


def test_a_defect_says_nothing_of_folders(register: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def forward(self, items: list[dict[str, Any]]) -> None:
            raise OSError("cannot read '/home/somebody/model.bin'")

    name = register(Broken)
    answer = asked(b"x", config={"backend": name})
    assert answer.status == 500
    assert json.loads(answer.body)["code"] == "backend_error"
    assert "/home" not in answer.body.decode()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "raise OSError" in caplog.text, "the log has its traceback"


def test_a_handle_gets_the_result_or_what_it_gave(jpeg: bytes) -> None:
    async def use(service: Service) -> tuple[Any, Any]:
        return await service.infer(b"1"), await service.infer({"data": b"2", "id": 7})

    assert served(use) == (b"1", {"data": b"2", "id": 7, "result": b"2"})


def test_a_handle_gets_errors_as_they_are() -> None:
    with pytest.raises(DecodeError, match=r"^8 bytes are no image"):
        served(lambda service: service.infer(b"no image"), {"backend": "DecodeMat"})
    with pytest.raises(InvalidRequest, match="a request needs the key 'data'"):
        served(lambda service: service.infer({"dat": 1}))


def test_a_request_that_nobody_waits_for_is_dropped_from_its_queue(register: Any) -> None:
    with Gate() as gate:
        name = register(gate.backend)

        async def use(service: Service) -> Any:
            first = asyncio.create_task(service.infer(b"1"))
            await asyncio.to_thread(gate.wait_entered)
            second = asyncio.create_task(service.infer(b"2"))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            gate.open()
            return await first

        assert served(use, {"backend": name}) == b"1"
    assert gate.batches == [[b"1"]]


def test_a_batch_that_does_not_end_is_unhealthy(register: Any) -> None:
    with Gate() as gate:
        name = register(gate.backend)

        async def use(service: Service) -> Any:
            first = asyncio.create_task(service.infer(b"1"))
            await asyncio.to_thread(gate.wait_entered)
            while not service.current.stats()["nodes"]["node"]["oldest_batch_s"] > 1e-6:
                await asyncio.sleep(0)
            with pytest.raises(
                UnhealthyError, match=r"^node 'node': a batch runs for \d+ s, more than hang_seconds = "
            ):
                service.check()
            gate.open()
            await first

        served(use, {"backend": name}, Arguments("demo.toml", hang_seconds=1e-6))


def test_a_dead_instance_is_unhealthy() -> None:
    async def use(service: Service) -> None:
        service.check()
        await asyncio.to_thread(service.current.close)
        with pytest.raises(UnhealthyError, match=r"^node 'node': 2 of 2 instances are dead$"):
            service.check()

    served(use, {"backend": "Identity", "instance_num": 2})


def test_an_exchange_loses_no_request(register: Any) -> None:
    with Gate() as gate:
        name = register(gate.backend)

        async def use(service: Service) -> tuple[Any, Any]:
            first = asyncio.create_task(service.infer(b"old"))
            await asyncio.to_thread(gate.wait_entered)
            before = service.current
            exchange = asyncio.create_task(service.exchange(lambda: pipe({"backend": "Identity"})))
            while service.current is before:
                await asyncio.sleep(0)
            new = await service.infer(b"new")
            assert not first.done()
            assert not exchange.done()
            gate.open()
            await exchange
            with pytest.raises(PipeClosed):
                before({"data": b"late"})
            return await first, new

        assert served(use, {"backend": name}) == (b"old", b"new")


def test_a_pipe_that_cannot_be_built_keeps_a_replica_from_starting() -> None:
    async def use(service: Service) -> Any:
        with pytest.raises(ValueError, match="no backend 'Identiti'"):
            await service.exchange(lambda: pipe({"backend": "Identiti"}))

    served(use)


def test_a_pipe_at_work_stays_where_another_cannot_be_built(caplog: pytest.LogCaptureFixture) -> None:
    async def use(service: Service) -> Any:
        service.check()
        await service.exchange(lambda: pipe({"backend": "Identiti"}))
        await service.exchange(lambda: None)
        return await service.infer(b"1")

    assert served(use) == b"1"
    assert "the configuration cannot be exchanged; the one before stays" in caplog.text
    assert "no backend 'Identiti'" in caplog.text
