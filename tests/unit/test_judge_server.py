"""The fake judge: what it says, when, and every way in which it does not."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbeat.testing.judge_answers import END, choose, log_probs, tokens_of
from offbeat.testing.judge_faults import BABBLE, GARBAGE
from offbeat.testing.judge_process import main
from offbeat.testing.judge_server import (
    Fault,
    JudgeServer,
    LogNormal,
    Mix,
    judge_process,
    read_script,
)


def request(text: str = "2+2?", **more: Any) -> dict[str, Any]:
    return {"model": "judge", "messages": [{"role": "user", "content": text}]} | more


def ask(
    server: JudgeServer, text: str = "2+2?", timeout: float = 10, **more: Any
) -> httpx.Response:
    url = f"{server.base_url}/chat/completions"
    return httpx.post(url, json=request(text, **more), timeout=timeout)


def said(response: httpx.Response) -> list[str]:
    return [choice["message"]["content"] for choice in response.json()["choices"]]


# -- answers -------------------------------------------------------------------------------------


def test_an_answer_with_usage_and_what_the_call_had() -> None:
    with JudgeServer(lambda text: f"Score: {len(text)}") as server:
        answer = ask(server, "abcdefgh", seed=7, temperature=0.0)
        assert said(answer) == ["Score: 8"]
        assert answer.json()["usage"] == {
            "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
        }  # fmt: skip
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        (call,) = server.calls
        assert (call.text, call.body["seed"], server.arrived_calls) == ("abcdefgh", 7, 1)
        models = httpx.get(f"{server.base_url}/models").json()["data"]
        assert [model["id"] for model in models] == ["judge"]
        stats = httpx.get(f"{server.base_url}/stats").json()
        assert 0 <= stats.pop("call_seconds") < 10
        assert 0 <= time.monotonic() - stats.pop("clock") < 10
        assert stats == {"calls": 1, "now": 0, "most_at_once": 1}
        assert httpx.get(f"{server.base_url}/else").status_code == 404
        assert httpx.post(f"{server.base_url}/else", json={}).status_code == 404
        assert httpx.post(f"{server.base_url}/chat/completions", json={}).status_code == 400


def test_call_seconds_are_the_time_of_all_calls_together() -> None:
    with JudgeServer(delay=0.3) as server, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: ask(server), range(8)))
        assert 8 * 0.3 <= server.call_seconds < 8 * 10
        for _ in range(100):  # the last one may still be told to its client
            before = server.call_seconds
            time.sleep(0.02)
            if server.call_seconds == before:  # nothing is under way
                break
        else:
            pytest.fail("the seconds go on, though no call is under way")


def test_a_distribution_is_drawn_by_seed_and_read_as_log_probs() -> None:
    shares = {"8": 0.7, "3": 0.2, "10": 0.1}
    with JudgeServer(distribution=shares) as server:
        assert said(ask(server, temperature=0, n=3)) == ["8"] * 3
        drawn = said(ask(server, temperature=1.0, n=300, seed=1))
        assert drawn == said(ask(server, temperature=1.0, n=300, seed=1))
        assert drawn != said(ask(server, temperature=1.0, n=300, seed=2))
        assert 0.6 < drawn.count("8") / 300 < 0.8
        assert set(drawn) == set(shares)
        answer = ask(server, temperature=0, logprobs=True, top_logprobs=2)
    (token,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("8", [56])
    assert math.exp(token["logprob"]) == pytest.approx(0.7)
    top = [(t["token"], math.exp(t["logprob"])) for t in token["top_logprobs"]]
    assert top == [("8", pytest.approx(0.7)), ("3", pytest.approx(0.2))]


def test_log_probs_of_texts_that_begin_alike() -> None:
    assert tokens_of("Score: 8") == ["Score", ":", " 8"]
    shares = {"yes": 0.5, "yes sure": 0.3, "no": 0.1}
    first, second = log_probs("yes sure", shares, 5)
    found = {t["token"]: math.exp(t["logprob"]) for t in first["top_logprobs"]}
    assert found == {"yes": pytest.approx(0.8), "no": pytest.approx(0.1)}
    found = {t["token"]: math.exp(t["logprob"]) for t in second["top_logprobs"]}
    assert found == {" sure": pytest.approx(0.375), END: pytest.approx(0.625)}
    assert choose(shares, {"temperature": 0}, 0) == "yes"


def test_a_reply_that_raises_is_said() -> None:
    def reply(text: str) -> str:
        raise KeyError(text)

    with JudgeServer(reply) as server:
        answer = ask(server)
        assert (answer.status_code, "KeyError" in answer.text) == (500, True)


# -- faults --------------------------------------------------------------------------------------


def test_statuses_and_bodies() -> None:
    with JudgeServer(
        script=[
            Fault(429, headers={"Retry-After": "7"}),
            Fault(body=GARBAGE, content_type="text/html"),
            Fault(reply="no idea", finish_reason="length"),
            Fault(size=3_000_000),
        ]
    ) as server:
        limited = ask(server)
        assert (limited.status_code, limited.headers["retry-after"]) == (429, "7")
        garbage = ask(server)
        assert (garbage.content, garbage.headers["content-type"]) == (GARBAGE, "text/html")
        answer = ask(server)
        assert said(answer) == ["no idea"]
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        huge = ask(server)
        assert (len(huge.content), said(huge)) == (3_000_000, ["8"])
        assert said(ask(server)) == ["8"]


def test_faults_of_the_connection() -> None:
    with JudgeServer(script=[Fault(reset=True), Fault(cut=True), Fault(hang=True)]) as server:
        with pytest.raises(httpx.NetworkError):
            ask(server)
        with pytest.raises(httpx.RemoteProtocolError):
            ask(server)
        with pytest.raises(httpx.ReadTimeout):
            ask(server, timeout=0.3)
        deadline = time.monotonic() + 10
        while server.now and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.now == 0, "a client that is gone is waited for no longer"
        assert said(ask(server)) == ["8"]


def test_drip_comes_byte_by_byte() -> None:
    with JudgeServer(script=[Fault(body=b'{"a": 1}', drip=0.02)]) as server:
        url = f"{server.base_url}/chat/completions"
        with httpx.stream("POST", url, json=request()) as response:
            parts = list(response.iter_raw())
        assert b"".join(parts) == b'{"a": 1}'
        assert len(parts) >= 4


def test_every_third_fails_and_a_script_goes_first() -> None:
    with JudgeServer(fail_every=3, failing=Fault(503), script=[Fault(500)]) as server:
        found = [ask(server).status_code for _ in range(7)]
    assert found == [500, 200, 503, 200, 200, 503, 200]


def test_a_mix_has_its_shares_and_its_seed() -> None:
    mix = Mix(3, garbage=0.2, hang=0.05, status_500=0.1, babble=0.05)
    faults = [mix.fault(call) for call in range(4000)]
    assert faults == [Mix(3, garbage=0.2, hang=0.05, status_500=0.1, babble=0.05).fault(c)
                      for c in range(4000)]  # fmt: skip
    assert faults != [Mix(4, garbage=0.2, hang=0.05, status_500=0.1).fault(c) for c in range(4000)]
    for found, share in (
        (sum(f.body == GARBAGE for f in faults), 0.2),
        (sum(f.hang for f in faults), 0.05),
        (sum(f.status == 500 for f in faults), 0.1),
        (sum(f.reply == BABBLE for f in faults), 0.05),
        (sum(f == Fault() for f in faults), 0.6),
    ):
        assert found / 4000 == pytest.approx(share, abs=0.03)
    with pytest.raises(ValueError, match="sum to 1"):
        Mix(garbage=0.7, hang=0.5)
    with JudgeServer(mix=Mix(garbage=1.0)) as server:
        assert ask(server).content == GARBAGE


def test_latency_is_log_normal() -> None:
    latency = LogNormal(1.0, 0.5)
    drawn = [latency.seconds(call) for call in range(4000)]
    assert statistics.median(drawn) == pytest.approx(1.0, rel=0.05)
    assert statistics.mean(drawn) == pytest.approx(math.exp(0.125), rel=0.05)
    with JudgeServer(latency=LogNormal(0.2, 0.0), delay=0.1) as server:
        begun = time.monotonic()
        ask(server)
        assert time.monotonic() - begun >= 0.3


def test_a_script_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('[{"status": 500}, {}, {"body": "x", "hang": true}]')
    assert read_script(path) == [Fault(500), Fault(), Fault(body=b"x", hang=True)]
    path.write_text('[{"statsu": 500}]')
    with pytest.raises(ValueError, match="a fault has no 'statsu'; it has: body"):
        read_script(path)


# -- the server ----------------------------------------------------------------------------------


def test_stop_and_start_on_the_same_port() -> None:
    server = JudgeServer(script=[Fault(hang=True)]).start()
    address = server.base_url
    failures: list[Exception] = []

    def hang() -> None:
        try:
            ask(server)
        except httpx.NetworkError as error:
            failures.append(error)

    hung = threading.Thread(target=hang)
    hung.start()
    deadline = time.monotonic() + 10
    while not server.calls and time.monotonic() < deadline:
        time.sleep(0.01)
    server.stop()
    server.stop()
    hung.join(10)
    assert len(failures) == 1, "what hangs is reset"
    with pytest.raises(httpx.ConnectError):
        ask(server)
    server.start()
    try:
        assert server.base_url == address
        assert said(ask(server)) == ["8"]
        assert len(server.calls) == 2
    finally:
        server.stop()


def test_requests_in_pieces_and_one_after_another_on_one_connection() -> None:
    body = json.dumps(request()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n".encode()
    whole = head + b"\r\n" + body
    with JudgeServer() as server:
        port = int(server.base_url.removesuffix("/v1").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as wire:
            for at in range(0, len(whole), 7):
                wire.sendall(whole[at : at + 7])
            wire.sendall(whole + head + b"Connection: close\r\n\r\n" + body)
            answers = b"".join(iter(lambda: wire.recv(65536), b""))
        assert answers.count(b"HTTP/1.1 200") == 3
        with socket.create_connection(("127.0.0.1", port), 10) as wire:
            wire.sendall(head + b"Expect: 100-continue\r\n\r\n")
            assert wire.recv(65536).startswith(b"HTTP/1.1 100")
            wire.sendall(body)
            assert wire.recv(65536).startswith(b"HTTP/1.1 200")
        with socket.create_connection(("127.0.0.1", port), 10) as wire:
            wire.sendall(b"nonsense\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                wire.recv(65536)


def test_a_thousand_connections_at_once() -> None:
    body = json.dumps(request()).encode()
    whole = (
        b"POST /v1/chat/completions HTTP/1.1\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )

    async def one(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole)
        answer = await reader.read()
        writer.close()
        return answer

    async def main(port: int) -> list[bytes]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(one(port) for _ in range(1000)))

    threads = set(threading.enumerate())
    with JudgeServer(delay=3.0) as server:
        port = int(server.base_url.removesuffix("/v1").rpartition(":")[2])
        answers = asyncio.run(main(port))
        assert len(set(threading.enumerate()) - threads) == 1
    assert sum(answer.startswith(b"HTTP/1.1 200") for answer in answers) == 1000
    assert server.most_at_once > 500


def test_in_a_process_of_its_own_killed_and_back(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('[{"status": 500}]')
    with judge_process(
        "--script", str(script), "--distribution", '{"7": 1.0}', "--model", "m",
        "--latency", "0.01", "0.1", "--mix", '{"babble": 1.0}', "--seed", "3",
    ) as judge:  # fmt: skip
        url, address = f"{judge.base_url}/chat/completions", judge.base_url
        assert httpx.post(url, json=request()).status_code == 500
        assert said(httpx.post(url, json=request())) == [BABBLE]
        stats = judge.stats()
        assert stats.pop("call_seconds") > 0
        assert 0 <= time.monotonic() - stats.pop("clock") < 10
        assert stats == {"calls": 2, "now": 0, "most_at_once": 1}
        judge.kill()
        with pytest.raises(httpx.ConnectError):
            httpx.post(url, json=request())
        judge.start()
        assert judge.base_url == address
        assert httpx.get(f"{judge.base_url}/models").json()["data"][0]["id"] == "m"
    with pytest.raises(RuntimeError, match="is not started"):
        _ = judge.pid
    with pytest.raises(RuntimeError, match="did not start"):
        judge_process("--port", "nonsense").__enter__()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--script", "nowhere.json"], "--script: nowhere.json: [Errno 2]"),
        (["--mix", '{"hangs": 1}'], "unexpected keyword argument 'hangs'"),
        (["--mix", '{"hang": 2}'], "sum to 1 at most"),
        (["--port", "{taken}"], "--port {taken}: [Errno 98]"),
    ],
)
def test_options_that_cannot_be_used(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with JudgeServer() as other:
        taken = other.base_url.removesuffix("/v1").rpartition(":")[2]
        with pytest.raises(SystemExit):
            main([option.replace("{taken}", taken) for option in options])
    assert words.replace("{taken}", taken) in capsys.readouterr().err
