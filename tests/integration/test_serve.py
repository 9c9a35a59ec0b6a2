"""`quire serve` with the embedded model, from outside: clients that stay, clients that leave, an engine that dies.

The last test that uses the session's server ends it with Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.conftest import (
    DEADLINE_S,
    MODEL,
    START_S,
    Served,
    can_bind,
    free_port,
    is_alive,
    start,
    wait_for,
    write_config,
)

LONG = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def idle(served: Served) -> bool:
    return (
        served.metric("num_requests_running") == 0
        and served.metric("num_requests_waiting") == 0
        and served.metric("kv_blocks", state="private") == 0
        and served.metric("kv_blocks", state="cached_in_use") == 0
    )


# -- clients that stay -------------------------------------------------------------------------------------------------


def test_first_contact_is_concurrent_and_mixed(served: Served) -> None:
    """Right after the start: arrays belong to the engine's thread, whoever imported what where."""

    def one(index: int) -> httpx.Response:
        if index % 2:
            return served.post("/v1/completions", prompt="1 2 3", max_tokens=5, temperature=0)
        messages = [{"role": "user", "content": "hi"}]
        return served.post("/v1/chat/completions", messages=messages, max_tokens=5, temperature=0)

    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(one, range(12)))
    assert [response.status_code for response in responses] == [200] * 12
    texts = {response.json()["choices"][0]["text"] for response in responses[1::2]}
    assert len(texts) == 1
    assert texts.pop()


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_openai_client_streams_what_it_would_have_got_whole(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Write one sentence about the sea \U0001f30a."}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**request)
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens, "the same prompt again comes from the prefix cache"


def test_the_openai_client_completes_text_and_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt=["One two three", "A B C"], max_tokens=6, temperature=0)
    assert [choice.index for choice in text.choices] == [0, 1]
    assert all(choice.text for choice in text.choices)
    ids = client.completions.create(model=MODEL, prompt=[[1000, 2000, 3000]], max_tokens=3, temperature=0)
    assert ids.usage is not None
    assert (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 3)


def test_the_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt=[[7] * 9000], stream=True)
    assert "8192" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert refused.value.param == "temperature"


def test_errors_keep_their_envelope_through_ray_serve(served: Served) -> None:
    cases = [
        (httpx.post(served.url + "/v1/completions", content=b"{", headers={"content-type": "application/json"}), 400),
        (httpx.post(served.url + "/v1/completions", data={"a": "1"}), 415),
        (served.get("/v1/chat/completions"), 405),
        (served.get("/v1/nope"), 404),
        (served.get("/v1/models/nope"), 404),
    ]  # fmt: skip
    for response, status in cases:
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_browsers_on_loopback_may_call(served: Served) -> None:
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(served.url + "/v1/chat/completions", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    head = httpx.head(served.url + "/health")
    assert (head.status_code, head.content) == (200, b"")


def test_the_server_replica_has_no_mlx_in_it(served: Served) -> None:
    maps = Path("/proc")
    if not maps.is_dir():
        pytest.skip("needs /proc")
    _, health = served.health()
    with_mlx = set()
    for pid in served.descendants:
        try:
            if "libmlx" in (maps / str(pid) / "maps").read_text():
                with_mlx.add(pid)
        except OSError:
            continue
    assert with_mlx == {health["engine_pid"]}, "only the engine's process loads MLX"


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_and_blocks(served: Served, stream: bool) -> None:
    wait_for(lambda: idle(served), "an idle engine")
    before = served.metric("requests_aborted_total")
    assert before is not None
    body = {"model": MODEL, "prompt": "Tell a long story", "stream": stream, **LONG}
    with httpx.Client(timeout=None) as leaving:
        request = leaving.build_request("POST", served.url + "/v1/completions", json=body)
        if stream:
            response = leaving.send(request, stream=True)
            next(response.iter_bytes())
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(served.url + "/v1/completions", json=body, timeout=httpx.Timeout(2.0))
    wait_for(lambda: served.metric("requests_aborted_total") == before + 1, "an abort", 10)
    wait_for(lambda: idle(served), "slot and blocks to be free", 10)


def test_many_clients_that_leave_at_any_moment(served: Served) -> None:
    """More than the engine runs at once, so that some still wait for their first step; half of them don't stream."""
    moments = random.Random(7)

    async def leave(index: int) -> None:
        body = json.dumps({"model": MODEL, "prompt": f"Story {index}", "stream": index % 2 == 0, **LONG}).encode()
        host, port = served.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        await asyncio.sleep(moments.choice([0, 0.01]))  # the body often comes in a packet of its own
        writer.write(body)
        await asyncio.sleep(moments.choice([0, 0.02, 0.3, 3]) * moments.random())
        writer.close()

    async def all_leave() -> None:
        await asyncio.gather(*(leave(index) for index in range(120)))

    for _ in range(2):
        asyncio.run(all_leave())
    wait_for(lambda: idle(served), "all slots and blocks to be free", 30)
    assert served.post("/v1/completions", prompt="One two three", max_tokens=2).status_code == 200


# -- an engine that dies -----------------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_is_noticed_and_started_again(served: Served) -> None:
    _, health = served.health()
    pid, restarts = health["engine_pid"], health["engine_restarts"]
    events: list[str] = []
    first = threading.Event()
    noticed: list[float] = []

    def read() -> None:
        body = {"model": MODEL, "prompt": "Tell a long story", "stream": True, **LONG}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=DEADLINE_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    first.set()
        noticed.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(DEADLINE_S)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    reader.join(DEADLINE_S)
    assert noticed[0] - killed < 5.0
    assert json.loads(events[-1])["error"]["code"] == "engine_dead"
    assert "[DONE]" not in events

    response = served.post("/v1/completions", prompt="x", max_tokens=1)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert served.health()[0] == 503

    wait_for(lambda: served.health()[0] == 200, "the engine to be back", START_S)
    _, health = served.health()
    assert health["engine_restarts"] == restarts + 1
    assert health["engine_pid"] != pid
    assert served.metric("engine_restarts_total") == restarts + 1
    answer = served.post("/v1/completions", prompt="One two three", max_tokens=2)
    assert answer.json()["usage"]["completion_tokens"] == 2
    served.descendants.add(health["engine_pid"])


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_log_tells_what_the_wait_was_for_and_where_it_serves(served: Served) -> None:
    log = served.output()
    for part in ("[quire] Starting Ray", "[quire] Loading the weights", "[quire] Quire is ready", served.url + "/v1"):
        assert part in log
    assert "Traceback" not in log.split("Quire is ready")[0]


def test_ctrl_c_ends_everything(served: Served) -> None:
    """With streams open. The last test of this server."""

    def read() -> None:
        body = {"model": MODEL, "prompt": "Tell a long story", "stream": True, **LONG}
        try:
            with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=DEADLINE_S) as response:
                for _ in response.iter_bytes():
                    pass
        except httpx.HTTPError:
            pass

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    wait_for(lambda: served.metric("num_requests_running") == 4, "four streams")
    took = served.stop(signal.SIGINT)
    for reader in readers:
        reader.join(DEADLINE_S)
    assert served.process.returncode == 0
    assert took < 15.0
    wait_for(lambda: not [pid for pid in served.descendants if is_alive(pid)], "every process to be gone", 5)
    assert can_bind(int(served.url.rsplit(":", 1)[1]))


# -- configurations that are wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": {"max_num_seq": 4}}, "engine.max_num_seq: unknown key (did you mean 'max_num_seqs'?)"),
        ({"num_replicas": "two"}, "num_replicas"),
        ({"engine": {"model": "./no/such/folder"}}, "engine.model: there is no ./no/such/folder"),
    ],
)
def test_a_wrong_configuration_ends_before_ray_starts(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    port = free_port()
    failed = start(write_config(tmp_path, port, **changes), tmp_path / "log", port)
    assert failed.process.wait(DEADLINE_S) == 1
    assert expected in failed.output()
    assert "Starting Ray" not in failed.output()


def test_what_only_the_engine_can_find_wrong_ends_it_too(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, port, engine={"num_blocks": 4, "max_model_len": 4096})
    failed = start(config, tmp_path / "log", port)
    try:
        assert failed.process.wait(START_S) == 1
    finally:
        failed.kill_all()
    assert "num_blocks is 4" in failed.output().split("quire: ")[-1]
    assert can_bind(port)


def test_serve_run_works_without_the_wrapper(tmp_path: Path) -> None:
    """`serve run` in an activated environment, with Serve's own proxy; SIGTERM ends it."""
    port = free_port()
    config = write_config(tmp_path, port)
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "RAY_ADDRESS": "local",  # never another Ray of this machine's
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "PYTHONUNBUFFERED": "1",
    }
    serve = Path(sys.executable).with_name("serve")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(serve), "run", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    running = Served(process, f"http://127.0.0.1:{port}", log)
    try:
        running.wait_until_ready()
        answer = running.post("/v1/completions", prompt="One two three", max_tokens=3, temperature=0)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert "Quire is ready" in running.output()
        assert running.stop() < 30.0
        wait_for(lambda: not [pid for pid in running.descendants if is_alive(pid)], "every process to be gone", 10)
    finally:
        running.kill_all()
