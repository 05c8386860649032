"""The client against a server that answers like vLLM 0.32, and against one that misbehaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from harness.errors import BlocksHeld, HarnessError, StackError
from harness.records import Completion, Prompt, TokenChoice
from harness.running import client as client_module
from harness.running.client import EngineClient, QueueState
from harness.running.completions import Departure
from services.faults import Fault, FaultKind, LoadControl, parse_control
from tests import fake_server
from tests.fake_server import FakeServer, hang, refuse, reply, reset, stream, trickle

COMPLETIONS = "/v1/completions"
PROMPT = Prompt("p", (504, 3575), "The capital", 0)
CONTROL = LoadControl(tag="cell-1", offer_blocks=3, fault=Fault(FaultKind.REPORT, (1,)))
PARIS_TOP = {"token_id:7042": -0.25, "token_id:260": -2.5}
DOT_TOP = {"token_id:28": -1.5, "token_id:30": -0.5}
PLAIN = {
    "id": "cmpl-cell-1",
    "choices": [
        {
            "index": 0,
            "text": " Paris.",
            "logprobs": {"tokens": ["token_id:7042", "token_id:30"], "top_logprobs": [PARIS_TOP, DOT_TOP]},
            "finish_reason": "length",
            "token_ids": [7042, 30],
        }
    ],
    "usage": {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2},
    "kv_transfer_params": None,
}
USAGE_EVENT = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
ERROR = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}


def event(text: str, token_ids: list[int], tops: list[dict[str, float]], finish: str | None = None) -> object:
    choice = {"text": text, "token_ids": token_ids, "logprobs": {"top_logprobs": tops}, "finish_reason": finish}
    return {"id": "cmpl-cell-1", "choices": [choice]}


PARIS_EVENT = event(" Paris", [7042], [PARIS_TOP])
DOT_EVENT = event(".", [30], [DOT_TOP], "length")


@pytest.fixture
def engine() -> Iterator[FakeServer]:
    with fake_server.running() as fake:
        yield fake


def complete(engine: FakeServer, *, streamed: bool = False, deadline_s: float = 10) -> Completion:
    client = EngineClient(engine.url)
    return client.complete(PROMPT, CONTROL, max_tokens=2, stream=streamed, deadline_s=deadline_s)


def test_a_plain_completion_is_parsed(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = reply(PLAIN)
    got = complete(engine)
    assert (got.status_code, got.error, got.timed_out) == (200, "", False)
    assert (got.text, got.token_ids, got.finish_reason, got.prompt_token_count) == (" Paris.", (7042, 30), "length", 5)
    assert got.top[1] == (TokenChoice(30, -0.5), TokenChoice(28, -1.5))
    assert got.ttft_s == 0
    assert got.duration_s > 0


@pytest.mark.parametrize(
    "events",
    [
        (PARIS_EVENT, DOT_EVENT, USAGE_EVENT),
        (event(" Paris.", [7042, 30], [PARIS_TOP, DOT_TOP], "length"), USAGE_EVENT),
        (PARIS_EVENT, event(".", [30], [DOT_TOP]), event("", [], [], "length"), USAGE_EVENT),
    ],
    ids=["one token a chunk", "two tokens in a chunk", "finish in a chunk of its own"],
)
def test_a_stream_gives_the_same_completion(engine: FakeServer, events: tuple[object, ...]) -> None:
    engine.behaviours[COMPLETIONS] = reply(PLAIN)
    plain = complete(engine)
    engine.behaviours[COMPLETIONS] = stream(*events)
    streamed = complete(engine, streamed=True)
    for name in ("status_code", "error", "text", "token_ids", "finish_reason", "top", "prompt_token_count"):
        assert getattr(streamed, name) == getattr(plain, name), name
    assert 0 < streamed.ttft_s <= streamed.duration_s


def test_what_is_sent(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = stream(PARIS_EVENT)
    complete(engine, streamed=True)
    _, headers, body = engine.requests[-1]
    assert headers["X-Request-Id"] == "cell-1"
    assert isinstance(body, dict)
    assert parse_control(body["kv_transfer_params"]) == CONTROL
    assert body["model"] == "kvproof-model"
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["seed"]) == ([504, 3575], 2, 0, 0)
    assert (body["logprobs"], body["return_token_ids"], body["return_tokens_as_token_ids"]) == (5, True, True)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_body_is_an_observation(engine: FakeServer, streamed: bool) -> None:
    engine.behaviours[COMPLETIONS] = refuse(500, json.dumps(ERROR).encode())
    got = complete(engine, streamed=streamed)
    assert (got.status_code, got.error) == (500, "InternalServerError: Internal server error")
    assert (got.token_ids, got.broken_off) == ((), False)


def test_an_error_body_that_is_not_vllms(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = refuse(502, b"<h1>Bad Gateway</h1>")
    assert complete(engine).error == "<h1>Bad Gateway</h1>"


def test_an_error_event_keeps_the_tokens_before_it(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = stream(PARIS_EVENT, ERROR)
    got = complete(engine, streamed=True)
    assert (got.status_code, got.error) == (200, "InternalServerError: Internal server error")
    assert (got.token_ids, got.broken_off) == ((7042,), False)


def test_half_a_stream_is_an_error(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = stream(PARIS_EVENT, end=False)
    got = complete(engine, streamed=True)
    assert got.status_code == 200
    assert got.token_ids == (7042,)
    assert got.error
    assert (got.timed_out, got.broken_off) == (False, True)


def test_a_stream_that_ends_properly_without_done_is_an_error(engine: FakeServer) -> None:
    def behave(handler: fake_server.Handler) -> None:
        stream(PARIS_EVENT, end=False)(handler)
        handler.send_chunk(b"")

    engine.behaviours[COMPLETIONS] = behave
    got = complete(engine, streamed=True)
    assert (got.error, got.broken_off) == ("the stream ended without [DONE]", True)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reset_is_sent_once(engine: FakeServer, streamed: bool) -> None:
    engine.behaviours[COMPLETIONS] = reset
    got = complete(engine, streamed=streamed)
    assert (got.status_code, got.timed_out) == (0, False)
    assert "closed connection" in got.error
    assert [path for path, _, _ in engine.requests].count(COMPLETIONS) == 1


def test_nobody_listens() -> None:
    with fake_server.running() as engine:
        pass
    got = complete(engine)
    assert (got.status_code, got.timed_out) == (0, False)
    assert "Connection refused" in got.error


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("behaviour", [hang(seconds=2), trickle(seconds=2)], ids=["silence", "trickle"])
def test_the_deadline_holds(engine: FakeServer, behaviour: fake_server.Behaviour, streamed: bool) -> None:
    engine.behaviours[COMPLETIONS] = behaviour
    began_s = time.monotonic()
    got = complete(engine, streamed=streamed, deadline_s=0.4)
    assert got.timed_out
    assert got.error == "no complete answer within 0.4 s"
    assert 0.4 <= time.monotonic() - began_s < 1


def test_the_deadline_holds_inside_a_stream(engine: FakeServer) -> None:
    def behave(handler: fake_server.Handler) -> None:
        stream(PARIS_EVENT, end=False)(handler)
        time.sleep(2)

    engine.behaviours[COMPLETIONS] = behave
    got = complete(engine, streamed=True, deadline_s=0.4)
    assert (got.timed_out, got.token_ids, got.duration_s < 1) == (True, (7042,), True)


def test_the_deadline_covers_the_model_name(engine: FakeServer) -> None:
    engine.behaviours["/v1/models"] = hang(seconds=2)
    got = complete(engine, deadline_s=0.3)
    assert (got.timed_out, got.duration_s < 1) == (True, True)


@pytest.mark.parametrize("answer", [[], {"choices": [{"token_ids": "many"}]}, "Paris"])
def test_an_answer_that_makes_no_sense(engine: FakeServer, answer: object) -> None:
    engine.behaviours[COMPLETIONS] = reply(answer)
    got = complete(engine)
    assert got.status_code == 200
    assert got.error.startswith("the answer cannot be read")


def test_several_threads_share_a_client(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = stream(PARIS_EVENT, DOT_EVENT, USAGE_EVENT)
    client = EngineClient(engine.url)
    got: list[Completion] = []

    def send() -> None:
        got.append(client.complete(PROMPT, CONTROL, max_tokens=2, stream=True, deadline_s=10))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.error, one.token_ids) for one in got] == [("", (7042, 30))] * 8


CHAT = "/v1/chat/completions"
TALK = Prompt("talk", (1, 504), "<user> Hello", 0, message="Hello")


def top(entries: dict[str, float]) -> object:
    return {"top_logprobs": [{"token": token, "logprob": logprob} for token, logprob in entries.items()]}


def talk(engine: FakeServer, *, streamed: bool) -> Completion:
    client = EngineClient(engine.url)
    return client.complete(TALK, CONTROL, max_tokens=2, stream=streamed, deadline_s=10, chat=True)


def test_a_chat(engine: FakeServer) -> None:
    choice = {
        "message": {"role": "assistant", "content": " Paris."},
        "logprobs": {"content": [top(PARIS_TOP), top(DOT_TOP)]},
        "finish_reason": "length",
        "token_ids": [7042, 30],
    }
    engine.behaviours[CHAT] = reply({"choices": [choice], "usage": {"prompt_tokens": 2}})
    got = talk(engine, streamed=False)
    assert (got.text, got.token_ids, got.finish_reason, got.prompt_token_count) == (" Paris.", (7042, 30), "length", 2)
    assert [[choice.token_id for choice in at] for at in got.top] == [[7042, 260], [30, 28]]
    (body,) = [body for path, _, body in engine.requests if path == CHAT]
    assert body is not None
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    assert (body["logprobs"], body["top_logprobs"], "prompt" in body) == (True, 5, False)
    assert parse_control(body["kv_transfer_params"]) == CONTROL


def test_a_streamed_chat(engine: FakeServer) -> None:
    def chunk(delta: dict[str, str], **choice: object) -> object:
        return {"choices": [{"delta": delta, **choice}]}

    engine.behaviours[CHAT] = stream(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": " Paris"}, token_ids=[7042], logprobs={"content": [top(PARIS_TOP)]}),
        chunk({"content": "."}, token_ids=[30], logprobs={"content": [top(DOT_TOP)]}, finish_reason="length"),
        USAGE_EVENT,
    )
    got = talk(engine, streamed=True)
    assert (got.text, got.token_ids, got.error, len(got.top)) == (" Paris.", (7042, 30), "", 2)
    assert got.ttft_s > 0


def test_a_client_that_leaves_in_the_middle_of_a_stream(engine: FakeServer) -> None:
    begun = threading.Event()

    def behave(handler: fake_server.Handler) -> None:
        stream(PARIS_EVENT, end=False)(handler)
        begun.set()
        time.sleep(2)

    engine.behaviours[COMPLETIONS] = behave
    departure = Departure()
    leaving = threading.Thread(target=lambda: begun.wait(5) and departure.leave())
    leaving.start()
    got = EngineClient(engine.url).complete(
        PROMPT, CONTROL, max_tokens=2, stream=True, deadline_s=10, departure=departure
    )
    leaving.join()
    assert (got.gave_up, got.timed_out, got.error, got.finish_reason) == (True, False, "the client gave up", "")
    assert got.duration_s < 1


def test_a_client_that_leaves_before_the_answer_comes_reads_none_of_it(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = stream(PARIS_EVENT, DOT_EVENT, USAGE_EVENT)
    departure = Departure()
    departure.leave()
    got = EngineClient(engine.url).complete(
        PROMPT, CONTROL, max_tokens=2, stream=True, deadline_s=10, departure=departure
    )
    assert (got.gave_up, got.token_ids, got.finish_reason) == (True, (), "")


def test_a_client_that_leaves_too_late_has_its_answer(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = stream(PARIS_EVENT, DOT_EVENT, USAGE_EVENT)
    departure = Departure()
    got = EngineClient(engine.url).complete(
        PROMPT, CONTROL, max_tokens=2, stream=True, deadline_s=10, departure=departure
    )
    departure.leave()
    assert (got.gave_up, got.error, got.finish_reason) == (False, "", "length")


def test_facts_about_the_engine(engine: FakeServer) -> None:
    client = EngineClient(engine.url + "/")
    assert client.is_healthy()
    assert client.version() == "0.32.0"
    assert client.model_name() == "kvproof-model"
    assert (client.block_size(), client.num_gpu_blocks()) == (32, 728)
    assert client.queue_state() == QueueState(running_count=3, waiting_count=3, cache_usage=0.5, preemption_count=3)
    assert client.tokenize("The capital") == (504, 3575)
    assert client.tokenize_chat("The capital") == (504, 3575)
    assert client.detokenize((504, 3575)) == "The capital"
    client.reset_prefix_cache()


def test_proxies_of_the_environment_are_ignored(engine: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert EngineClient(engine.url).is_healthy()


def test_reset_without_the_dev_mode(engine: FakeServer) -> None:
    del engine.behaviours["/reset_prefix_cache"]
    with pytest.raises(HarnessError, match="VLLM_SERVER_DEV_MODE=1"):
        EngineClient(engine.url).reset_prefix_cache()


def test_reset_waits_until_the_blocks_are_free(engine: FakeServer) -> None:
    answers = iter([{"success": False}, {"success": False}, {"success": True}])
    engine.behaviours["/reset_prefix_cache"] = lambda handler: reply(next(answers))(handler)
    EngineClient(engine.url).reset_prefix_cache()
    assert next(answers, None) is None


def test_reset_gives_up_while_blocks_are_held(engine: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESET_TIMEOUT_S", 0.1)
    engine.behaviours["/reset_prefix_cache"] = reply({"success": False})
    with pytest.raises(BlocksHeld, match="still holds KV blocks"):
        EngineClient(engine.url).reset_prefix_cache()


def test_an_empty_answer_to_reset_is_a_success(engine: FakeServer) -> None:
    engine.behaviours["/reset_prefix_cache"] = refuse(200, b"")
    EngineClient(engine.url).reset_prefix_cache()


@pytest.mark.parametrize("behaviour", [refuse(503, b""), reset, hang(seconds=2)], ids=["503", "reset", "silence"])
def test_unhealthy(engine: FakeServer, behaviour: fake_server.Behaviour) -> None:
    engine.behaviours["/health"] = behaviour
    assert not EngineClient(engine.url).is_healthy()


def test_something_else_than_vllm(engine: FakeServer) -> None:
    engine.behaviours.update({"/version": reply([]), "/metrics": refuse(200, b""), "/tokenize": refuse(401, b"no")})
    client = EngineClient(engine.url)
    with pytest.raises(StackError, match=r"/version: not what vLLM answers"):
        client.version()
    with pytest.raises(StackError, match=r"/metrics: no vllm:num_requests_running"):
        client.queue_state()
    with pytest.raises(StackError, match=r"/tokenize: HTTP 401: no"):
        client.tokenize("text")


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ("<html>{", "these are no metrics"),
        (fake_server.METRICS.replace("} 3.0", "} NaN"), "cannot convert float NaN"),
    ],
)
def test_metrics_that_make_no_sense(engine: FakeServer, metrics: str, problem: str) -> None:
    engine.behaviours["/metrics"] = refuse(200, metrics.encode())
    with pytest.raises(StackError, match=problem):
        EngineClient(engine.url).queue_state()


@pytest.mark.parametrize("value", ['block_size="0"', 'block_size="None"', 'other="32"'])
def test_a_block_size_that_is_none(engine: FakeServer, value: str) -> None:
    engine.behaviours["/metrics"] = refuse(200, fake_server.METRICS.replace('block_size="32"', value).encode())
    with pytest.raises(StackError, match=r"block_size of vllm:cache_config_info is (0|None|missing), not a count"):
        EngineClient(engine.url).block_size()


def test_a_server_without_a_model(engine: FakeServer) -> None:
    engine.behaviours["/v1/models"] = reply({"data": []})
    with pytest.raises(StackError, match="no model is served there"):
        EngineClient(engine.url).model_name()
    assert "no model is served there" in complete(engine).error


def test_likely_tokens_without_ids_cannot_be_read(engine: FakeServer) -> None:
    engine.behaviours[COMPLETIONS] = reply(event(" Paris", [7042], [{" Paris": -0.5}], "stop"))
    got = complete(engine)
    assert got.broken_off
    assert "the answer cannot be read: invalid literal for int()" in got.error


def test_a_short_call_has_a_deadline_however_slowly_the_answer_comes(engine: FakeServer) -> None:
    engine.behaviours["/health"] = trickle(seconds=10)
    began_s = time.monotonic()
    assert not EngineClient(engine.url).is_healthy()
    assert time.monotonic() - began_s < 5


def test_a_short_call_does_not_swallow_whatever_comes(engine: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_BYTES_MAX", 1000)
    engine.behaviours["/version"] = refuse(200, b"x" * 1001)
    with pytest.raises(StackError, match="/version: the answer has more than 1000 bytes"):
        EngineClient(engine.url).version()
