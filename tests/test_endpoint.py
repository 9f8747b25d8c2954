"""Facts about engine endpoint, against a server that speaks chat completions and fails as it is told to."""

import itertools
import json
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Project, echo_config, wait_until
from hypothesis import given
from hypothesis import strategies as st
from test_worker import generate_command, shard_of

from gristmill.config.endpoint import EndpointConfig
from gristmill.config.load import load_config
from gristmill.config.schema import Config, GpusConfig, ModelConfig
from gristmill.config.specs import ModelSpec, encode, encode_placements
from gristmill.engines.endpoint import client as client_module
from gristmill.engines.endpoint.client import MAX_WAIT_S, _retry_after_s
from gristmill.engines.endpoint.engine import EndpointEngine
from gristmill.engines.endpoint.messages import Unreadable, body, read_answer
from gristmill.engines.endpoint.pacing import Pace
from gristmill.errors import UserError
from gristmill.files import read_jsonl, write_json
from gristmill.keys import RequestKeys, model_identity, row_seed
from gristmill.planning.plan import make_plan
from gristmill.planning.text import plan_text
from gristmill.planning.workers import Worker
from gristmill.types import Completion, Failure, Gpu, JsonDict, Outcome, Request, Sampling
from gristmill.weights import prepare, read_description
from gristmill.worker import run_shard

SERVED = {"base_url": "http://h/v1", "model": "m"}
CANARY = "sk-canary-4711-do-not-write-me"
#: What a script says of one request: status, headers and body; None hangs, "reset" breaks the connection.
Reply = tuple[int, dict[str, str], Any] | str | None


def completion(text: str | None, finish: str = "stop", **message: Any) -> JsonDict:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **message}}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return {"model": "judge-2026", "system_fingerprint": "fp_1", "choices": [choice], "usage": usage}


def ok(text: str | None, finish: str = "stop", **message: Any) -> Reply:
    return 200, {}, completion(text, finish, **message)


def fault(status: int, words: str = "no", **headers: str) -> Reply:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": {"message": words}}


class Server:
    """A chat completions server. `script` decides each reply from the body and how often this prompt came before."""

    def __init__(self) -> None:
        self.script: Callable[[JsonDict, int], Reply] = lambda asked, _: ok(f"echo {asked['messages'][-1]['content']}")
        self.asked: list[JsonDict] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.most_at_once, self._at_once = 0, 0
        self._lock = threading.Lock()
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                outer.answer(self)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            before = self.prompts()[asked["messages"][-1]["content"]]
            self.asked.append(asked)
            self.headers.append(dict(handler.headers))
            self.paths.append(handler.path)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.reply(handler, self.script(asked, before))
        finally:
            with self._lock:
                self._at_once -= 1

    def reply(self, handler: BaseHTTPRequestHandler, said: Reply) -> None:
        if said is None:
            self.release.wait()
            return
        if said == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.close_connection = True
            handler.connection.close()
            return
        assert not isinstance(said, str)
        status, headers, value = said
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        with self._lock:
            self._at_once -= 1
        handler.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(name, text)
        handler.end_headers()
        handler.wfile.write(data)
        with self._lock:
            self._at_once += 1

    def prompts(self) -> Counter[str]:
        """Prompt → how often it came."""
        return Counter(asked["messages"][-1]["content"] for asked in self.asked)

    def close(self) -> None:
        self.release.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own waits between tries are short here."""
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.01)


def endpoint(url: str, **changes: Any) -> EndpointConfig:
    return EndpointConfig.model_validate({"base_url": url, "model": "judge", **changes})


def model(url: str, on_overflow: str = "error", **changes: Any) -> ModelConfig:
    section = {"base_url": url, "model": "judge", **changes}
    return ModelConfig.model_validate({"engine": "endpoint", "endpoint": section, "on_overflow": on_overflow})


def request(name: str, **sampling: Any) -> Request:
    messages = ({"role": "user", "content": f"say {name}"},)
    return Request(name, 0, "", messages, Sampling(**{"max_new_tokens": 8, **sampling}))  # type: ignore[arg-type]


def requests(count: int) -> list[Request]:
    return [request(f"r{number}") for number in range(count)]


def ask(url: str, asked: Sequence[Request], on_overflow: str = "error", **changes: Any) -> dict[str, Outcome]:
    """Row id → outcome; also logs to `LOGGED`."""
    engine = EndpointEngine(endpoint(url, **changes), on_overflow, LOGGED.append)
    try:
        return {outcome.id: outcome for outcome in engine.generate(asked)}
    finally:
        engine.close()


LOGGED: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_logged() -> None:
    LOGGED.clear()


def text_of(outcome: Outcome) -> str | None:
    assert isinstance(outcome, Completion), outcome
    return outcome.text


def refusal(url: str, asked: Sequence[Request], **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        ask(url, asked, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_row_is_answered_once_and_out_of_order_as_the_server_answers(server: Server) -> None:
    server.script = lambda asked, _: (
        time.sleep(0.3 if asked["messages"][-1]["content"] == "say r0" else 0) or ok(asked["messages"][-1]["content"])  # type: ignore[func-returns-value]
    )
    engine = EndpointEngine(endpoint(server.url), "error", LOGGED.append)
    outcomes = list(engine.generate(requests(30)))
    engine.close()
    assert sorted(o.id for o in outcomes) == sorted(r.id for r in requests(30))
    assert outcomes[0].id != "r0"
    assert {o.id: text_of(o) for o in outcomes} == {r.id: f"say {r.id}" for r in requests(30)}
    assert max(server.prompts().values()) == 1
    assert set(server.paths) == {"/v1/chat/completions"}


def test_an_answer_has_the_servers_tokens_and_finish_reason(server: Server) -> None:
    server.script = lambda asked, _: ok("cut", "length" if asked["messages"][-1]["content"] == "say r0" else "stop")
    found = ask(server.url, requests(2))
    cut, whole = found["r0"], found["r1"]
    assert isinstance(cut, Completion)
    assert isinstance(whole, Completion)
    assert (cut.finish_reason, whole.finish_reason) == ("length", "stop")
    assert (cut.prompt_tokens, cut.completion_tokens, cut.prompt_cut_tokens) == (7, 3, 0)
    assert cut.seconds > 0


def test_no_more_requests_are_under_way_than_max_concurrent(server: Server) -> None:
    together = threading.Barrier(3)  # fewer would wait here for ever
    server.script = lambda *_: ok(f"number {together.wait(60)}")
    ask(server.url, requests(39), max_concurrent=3)
    assert server.most_at_once == 3


@given(st.integers(1, 1000), st.lists(st.floats(0, 10), min_size=2, max_size=30))
def test_requests_are_evenly_spaced(per_minute: int, gaps: list[float]) -> None:
    pace, now, starts = Pace(per_minute), 0.0, list[float]()
    for gap in gaps:
        now += gap
        starts.append(now + pace.reserve(now))
    assert all(later - earlier >= 60 / per_minute - 1e-6 for earlier, later in itertools.pairwise(starts))


def test_without_a_limit_no_request_waits_but_while_it_is_held() -> None:
    pace = Pace(None)
    assert [pace.reserve(1.0), pace.reserve(1.0)] == [0, 0]
    pace.hold(5.0)
    pace.hold(3.0)
    assert (pace.held_s(1.0), pace.held_s(6.0)) == (4.0, -1.0)


def test_requests_per_minute_holds_the_second_request_back(server: Server) -> None:
    engine = EndpointEngine(endpoint(server.url, requests_per_minute=1), "error", LOGGED.append)
    answers = engine.generate(requests(2))
    assert next(answers).id == "r0"
    engine.stop()
    assert list(answers) == []
    assert len(server.asked) == 1
    engine.close()


@pytest.mark.parametrize(
    "first",
    [
        fault(500),
        fault(502),
        fault(503),
        fault(504),
        fault(429, Retry_After="0"),
        fault(429),
        fault(408),
        "reset",
        (200, {}, b"{not json"),
        (200, {}, {"choices": []}),
        (200, {}, completion(None)),
        (200, {}, completion("x", "something_else")),
        (200, {}, [1]),
    ],
    ids=str,
)
def test_a_passing_error_is_tried_again(server: Server, first: Reply) -> None:
    server.script = lambda _, before: first if before == 0 else ok("well")
    found = ask(server.url, requests(2))
    assert {name: text_of(outcome) for name, outcome in found.items()} == {"r0": "well", "r1": "well"}
    assert set(server.prompts().values()) == {2}
    assert LOGGED


def test_what_is_under_way_and_was_sent_again_is_there_for_whoever_watches(server: Server) -> None:
    seen: list[int] = []

    def script(_: JsonDict, before: int) -> Reply:
        seen.append(engine.batch_rows)
        return (500, {}, "down") if before == 0 else ok("well")

    server.script = script
    engine = EndpointEngine(endpoint(server.url, max_concurrent=2), "error", LOGGED.append)
    assert (engine.batch_rows, engine.retries) == (0, 0)
    assert len(list(engine.generate(requests(3)))) == 3
    engine.close()
    assert (engine.batch_rows, engine.retries) == (0, 3)
    assert set(seen) <= {1, 2}


def test_a_request_that_hangs_is_given_up_and_tried_again(server: Server) -> None:
    server.script = lambda _, before: None if before == 0 else ok("well")
    assert text_of(ask(server.url, requests(1), timeout_seconds=0.3)["r0"]) == "well"


def test_retry_after_holds_all_requests_back(server: Server) -> None:
    """r0 is refused while r1 is under way; r2 is not sent before the time that the server asked for."""

    def script(asked: JsonDict, _: int) -> Reply:
        if asked["messages"][-1]["content"] == "say r0":
            return fault(429, Retry_After="100")
        wait_until(lambda: bool(LOGGED))
        return ok("well")

    server.script = script
    engine = EndpointEngine(endpoint(server.url, max_concurrent=2), "error", LOGGED.append)
    answers = engine.generate(requests(3))
    assert next(answers).id == "r1"
    engine.stop()
    assert list(answers) == []
    assert server.prompts() == Counter(["say r0", "say r1"])
    engine.close()


@given(st.floats(0, MAX_WAIT_S))
def test_retry_after_is_a_number_of_seconds(seconds: float) -> None:
    assert _retry_after_s(str(seconds)) == seconds


def test_retry_after_is_capped_and_may_be_a_date() -> None:
    assert _retry_after_s("86400") == MAX_WAIT_S
    assert _retry_after_s("-5") == 0
    assert _retry_after_s("soon") is None
    assert _retry_after_s("nan") is None
    assert _retry_after_s(formatdate(time.time() - 60, usegmt=True)) == 0
    assert 20 < (_retry_after_s(formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
    assert _retry_after_s(formatdate(time.time() + 9999, usegmt=True)) == MAX_WAIT_S


def test_a_row_that_never_gets_through_fails_alone(server: Server) -> None:
    server.script = lambda asked, _: fault(500, "boom") if asked["messages"][-1]["content"] == "say r3" else ok("well")
    found = ask(server.url, requests(6), retries=2)
    failed = found.pop("r3")
    assert isinstance(failed, Failure)
    assert (failed.reason, failed.detail) == ("server_error", "status 500: boom (3 tries)")
    assert server.prompts()["say r3"] == 3
    assert {text_of(outcome) for outcome in found.values()} == {"well"}


def test_many_rows_may_fail_while_others_are_answered(server: Server) -> None:
    """Eight without an answer between them end the job; ten among answers do not."""
    server.script = lambda asked, _: (
        fault(500, "boom") if int(asked["messages"][-1]["content"].removeprefix("say r")) % 2 else ok("well")
    )
    found = ask(server.url, requests(20), retries=0, max_concurrent=1)
    assert Counter(type(outcome) for outcome in found.values()) == {Failure: 10, Completion: 10}


def test_a_row_that_hangs_every_time_fails_as_a_timeout(server: Server) -> None:
    server.script = lambda asked, _: None if asked["messages"][-1]["content"] == "say r0" else ok("well")
    failed = ask(server.url, requests(2), retries=1, timeout_seconds=0.2)["r0"]
    assert isinstance(failed, Failure)
    assert failed.reason == "timeout"


def test_a_server_that_is_not_there_ends_the_job_in_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    said = refusal(url, requests(3), retries=1)
    assert said.startswith(f"{url} (model judge) gives no answer after 2 tries: ConnectError")
    assert said.endswith("run again (answers are kept)")


def test_a_server_that_only_fails_ends_the_job(server: Server) -> None:
    server.script = lambda *_: fault(500, "down")
    assert "gives no answer after 2 tries: status 500: down" in refusal(server.url, requests(40), retries=1)


def test_a_limit_that_does_not_end_names_the_keys_to_lower(server: Server) -> None:
    server.script = lambda *_: fault(429, "slow down")
    said = refusal(server.url, requests(3), retries=1)
    assert "lower requests_per_minute or max_concurrent" in said


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (fault(401), "status 401, the server does not accept the key"),
        (fault(403), "status 403"),
        (fault(404), "status 404, there is no such model or address"),
        (fault(429, "insufficient_quota: pay"), "status 429, the account has no credit"),
    ],
    ids=str,
)
def test_what_no_retry_mends_ends_the_job_at_once(
    server: Server, reply: Reply, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    server.script = lambda *_: reply
    said = refusal(server.url, requests(1), key_env="JUDGE_KEY")
    assert words in said
    assert said.startswith(server.url)
    assert "check the key in JUDGE_KEY, endpoint.base_url and endpoint.model" in said
    assert len(server.asked) == 1
    assert CANARY not in said


def test_a_redirect_is_not_followed_with_the_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    elsewhere = Server()
    try:
        server.script = lambda *_: (307, {"Location": f"{elsewhere.url}/chat/completions"}, {})
        assert "redirects are not followed" in refusal(server.url, requests(1), key_env="JUDGE_KEY")
        assert elsewhere.asked == []
    finally:
        elsewhere.close()


def test_what_came_before_the_error_is_given_first(server: Server) -> None:
    server.script = lambda asked, _: fault(401) if asked["messages"][-1]["content"] == "say r4" else ok("well")
    engine = EndpointEngine(endpoint(server.url, max_concurrent=1), "error", LOGGED.append)
    answers = engine.generate(requests(9))
    assert [next(answers).id for _ in range(4)] == ["r0", "r1", "r2", "r3"]
    with pytest.raises(UserError, match="status 401"):
        next(answers)
    engine.close()


TOO_LONG = fault(400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens")


@pytest.mark.parametrize(
    "reply",
    [
        TOO_LONG,
        (400, {}, {"error": {"code": 400, "message": "the request exceeds the available context size, try again"}}),
        (422, {}, {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000", "error_type": "x"}),
        (400, {}, {"error": {"message": "long", "code": "context_length_exceeded"}}),
    ],
    ids=["vllm", "llama.cpp", "tgi", "openai"],
)
def test_a_prompt_over_the_context_goes_by_on_overflow(server: Server, reply: Reply) -> None:
    server.script = lambda asked, _: reply if asked["messages"][-1]["content"] == "say r1" else ok("well")
    said = refusal(server.url, requests(3))
    assert said.startswith("r1#0: prompt and max_new_tokens=8 exceed the server's context")
    skipped = ask(server.url, requests(3), on_overflow="skip")["r1"]
    assert isinstance(skipped, Completion)
    assert (skipped.text, skipped.finish_reason) == (None, "skipped")


def test_a_refused_row_is_a_failure_with_the_servers_words(server: Server) -> None:
    server.script = lambda asked, _: (
        fault(400, "flagged by policy") if asked["messages"][-1]["content"] == "say r0" else ok("well")
    )
    failed = ask(server.url, requests(3))["r0"]
    assert failed == Failure("r0", 0, "", "refused_by_server", "status 400: flagged by policy")
    assert server.prompts()["say r0"] == 1


def test_a_filtered_answer_is_a_failure_and_its_text_is_not_taken(server: Server) -> None:
    server.script = lambda *_: ok("half an ans", "content_filter")
    failed = ask(server.url, requests(1))["r0"]
    assert isinstance(failed, Failure)
    assert failed.reason == "refused_by_server"


def test_a_server_that_refuses_every_request_ends_the_job_with_its_words(server: Server) -> None:
    server.script = lambda *_: fault(400, "unknown parameter: frobnicate")
    said = refusal(server.url, requests(40), max_concurrent=1)
    assert "unknown parameter: frobnicate" in said
    assert len(server.asked) == 8


def test_an_answer_without_usage_counts_no_tokens_and_says_so_once(server: Server) -> None:
    server.script = lambda *_: (200, {}, {key: value for key, value in completion("x").items() if key != "usage"})
    found = ask(server.url, requests(5))["r0"]
    assert isinstance(found, Completion)
    assert (found.prompt_tokens, found.completion_tokens) == (0, 0)
    assert sum("usage" in line for line in LOGGED) == 1


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (ok("4", reasoning_content="2+2"), "<think>2+2</think>4"),
        (ok("4", reasoning="2+2"), "<think>2+2</think>4"),
        (ok(None, "length", reasoning_content="2+"), "<think>2+"),
        (ok(None, reasoning_content="2+2"), "<think>2+2</think>"),
        (ok("4", reasoning_content=None), "4"),
        (ok("4", reasoning_content=""), "4"),
        (ok("", "stop"), ""),
        (ok(None, refusal="I will not"), "I will not"),
    ],
)
def test_thoughts_stand_before_the_answer(server: Server, reply: Reply, text: str) -> None:
    server.script = lambda *_: reply
    assert text_of(ask(server.url, requests(1))["r0"]) == text


NAMES = st.sampled_from(["choices", "message", "content", "finish_reason", "usage", "model"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["stop", "length", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner),
)


@given(JSON | st.fixed_dictionaries({"choices": st.tuples(st.dictionaries(NAMES, JSON))}))
def test_no_json_is_taken_for_an_answer_or_breaks_the_reading(value: Any) -> None:
    try:
        answer = read_answer(request("a"), json.dumps(value).encode(), 0.1)
    except Unreadable:
        return
    assert isinstance(answer.outcome, Completion)
    assert isinstance(answer.outcome.text, str)


def test_what_is_asked_is_what_sampling_says(server: Server) -> None:
    sampled = request("a", temperature=0.7, top_p=0.9, stop=("END", "\n"), seed=5)
    ask(server.url, [sampled, request("b")], extra={"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}})
    by_prompt = {asked["messages"][-1]["content"]: asked for asked in server.asked}
    drawn, greedy = by_prompt["say a"], by_prompt["say b"]
    assert drawn == {
        "model": "judge",
        "messages": [{"role": "user", "content": "say a"}],
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["END", "\n"],
        "seed": row_seed(sampled) >> 32,
        "n": 1,
        "stream": False,
        "top_k": 20,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert (greedy["temperature"], "seed" in greedy, "stop" in greedy) == (0.0, False, False)


def test_a_null_in_extra_leaves_a_key_out() -> None:
    section = endpoint("http://h/v1", extra={"max_tokens": None, "max_completion_tokens": 9})
    asked = body(section, request("a"))
    assert "max_tokens" not in asked
    assert asked["max_completion_tokens"] == 9


@given(st.text(), st.integers(0, 2**40), st.integers(0, 9))
def test_a_seed_fits_what_servers_take(name: str, seed: int, sample: int) -> None:
    drawn = replace(request(name, temperature=1.0, seed=seed), sample=sample)
    assert 0 <= body(endpoint("http://h/v1"), drawn)["seed"] < 2**31


def test_a_schema_for_the_answer_goes_along() -> None:
    asked = body(endpoint("http://h/v1"), request("a", json_schema='{"type": "object"}'))
    named = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert asked["response_format"] == {"type": "json_schema", "json_schema": named}


def test_labels_to_be_scored_are_refused(server: Server) -> None:
    scored = Request("a", 0, "", ({"role": "user", "content": "?"},), Sampling(1), labels=("A", "B"))
    assert "engine: endpoint cannot do" in refusal(server.url, [scored])
    assert server.asked == []


@pytest.mark.parametrize(("key", "value"), [("top_k", 5), ("repetition_penalty", 1.2)])
def test_sampling_that_has_no_key_is_refused_before_anything_is_asked(server: Server, key: str, value: float) -> None:
    said = refusal(server.url, [request("a", **{key: value})])
    assert f"sampling.{key} is {value:g}" in said
    assert f"put it in endpoint.extra: {{{key}: {value:g}}}" in said
    assert text_of(ask(server.url, [request("a", **{key: value})], extra={key: value})["a"]) == "echo say a"


def test_the_key_goes_into_one_header_and_only_when_it_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", f"{CANARY}\n")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-someone-else")
    ask(server.url, requests(1))
    ask(server.url, requests(1), key_env="JUDGE_KEY")
    assert [headers.get("Authorization") for headers in server.headers] == [None, f"Bearer {CANARY}"]
    assert "sk-of-someone-else" not in str(server.headers)


@pytest.mark.parametrize(("value", "words"), [(None, "is not set"), ("", "is not set"), ("a\nb", "holds spaces")])
def test_a_key_that_is_none_is_said_without_quoting_it(
    value: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(UserError, match=f"JUDGE_KEY.*{words}"):
        EndpointEngine(endpoint("http://h/v1", key_env="JUDGE_KEY"), "error", LOGGED.append)


def test_a_server_that_repeats_the_key_is_quoted_without_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    server.script = lambda _, before: fault(400, f"bad request from {CANARY}") if before else fault(500, CANARY)
    failed = ask(server.url, requests(1), key_env="JUDGE_KEY")["r0"]
    assert isinstance(failed, Failure)
    assert failed.detail == "status 400: bad request from <key>"
    assert LOGGED
    assert CANARY not in "".join(LOGGED)


def test_stop_gives_what_is_under_way_and_drops_what_waits(server: Server) -> None:
    """r0 is under way, r1 waits a minute for another try, r2 was not begun."""
    going = threading.Event()

    def script(asked: JsonDict, before: int) -> Reply:
        if asked["messages"][-1]["content"] == "say r0":
            going.wait(60)
            return ok("well")
        return fault(500, Retry_After="60")

    server.script = script
    engine = EndpointEngine(endpoint(server.url, max_concurrent=2), "error", LOGGED.append)
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.extend(engine.generate(requests(3))))
    reader.start()
    wait_until(lambda: bool(LOGGED) and len(server.asked) == 2)
    engine.stop()
    going.set()
    reader.join(30)
    assert not reader.is_alive()
    assert [(o.id, text_of(o)) for o in outcomes] == [("r0", "well")]
    assert server.prompts() == Counter({"say r0": 1, "say r1": 1})
    engine.close()


def test_close_gives_up_what_is_under_way(server: Server) -> None:
    server.script = lambda *_: None
    engine = EndpointEngine(endpoint(server.url), "error", LOGGED.append)
    reader = threading.Thread(target=lambda: list(engine.generate(requests(1))))
    reader.start()
    wait_until(lambda: len(server.asked) == 1)
    engine.close()
    reader.join(30)
    assert not reader.is_alive()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_url": "http://me:secret@h/v1"}, "holds a user or a password"),
        ({"base_url": "http://secret@h/v1"}, "holds a user or a password"),
        ({"base_url": "ftp://h/v1"}, "is no http or https URL"),
        ({"base_url": "h:8000/v1"}, "is no http or https URL"),
        ({"base_url": "http://h"}, "does not end in /v1"),
        ({"base_url": "http://h/v1?key=x"}, "does not end in /v1"),
        ({"base_url": "http://h/v1/chat/completions"}, "does not end in /v1"),
        ({"key_env": "sk-123"}, "key_env"),
        ({"extra": {"model": "x"}}, "extra.model is written by gristmill"),
        ({"extra": {"temperature": 1}}, "extra.temperature is what sampling says"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"model": ""}, "model"),
    ],
    ids=str,
)
def test_a_wrong_endpoint_is_one_line(changes: dict[str, Any], words: str) -> None:
    section = {"base_url": "http://h/v1", "model": "judge", **changes}
    said = config_error({"engine": "endpoint", "endpoint": section})
    assert words in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"engine": "endpoint"}, "endpoint is missing"),
        (
            {"engine": "static", "source": "x/y", "endpoint": SERVED},
            "engine is static",
        ),
        ({"source": "x/y", "endpoint": SERVED}, "engine is auto"),
        *(
            ({"engine": "endpoint", "endpoint": SERVED, **more}, words)
            for more, words in [
                ({"source": "x/y"}, "set endpoint.model"),
                ({"gpus_per_model": 2}, "gpus_per_model means nothing"),
                ({"context_tokens": 2048}, "context_tokens means nothing"),
                ({"timeout_seconds": 3.0}, "set endpoint.timeout_seconds"),
                ({"on_overflow": "truncate_left"}, "needs the tokenizer"),
            ]
        ),
    ],
    ids=str,
)
def test_a_model_is_served_elsewhere_or_runs_here(section: dict[str, Any], words: str) -> None:
    assert words in config_error(section)


def config_values(section: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    prompt = Path(__file__)  # any file that is there
    return {
        "datasets": {"d": {"path": str(prompt)}},
        "models": {"m": section},
        "prompts": {"p": {"file": str(prompt)}},
        "runs": {"r": {"dataset": "d", "model": "m", "prompt": "p", "sampling": sampling}},
    }


def config_error(section: dict[str, Any], **sampling: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_config(config_values(section, **sampling), [Path.cwd()])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sampling_that_the_server_has_no_key_for_stops_the_config() -> None:
    section = {"engine": "endpoint", "endpoint": SERVED}
    assert "runs.r.sampling.top_k is 5" in config_error(section, top_k=5, temperature=1.0)
    section["endpoint"] = {**SERVED, "extra": {"top_k": 5}}
    load_config(config_values(section, top_k=5, temperature=1.0), [Path.cwd()])


def keys_of(found: ModelConfig, **sampling: Any) -> str:
    return RequestKeys(model_identity(found, prepare("m", found, print), False), found).key(
        request("a", **sampling), None
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_answer_is_known_by_the_served_name_and_not_by_the_place(temperature: float) -> None:
    here, there = model("http://a/v1", requests_per_minute=3), model("https://b/v1/", key_env="KEY", retries=1)
    assert keys_of(here, temperature=temperature) == keys_of(there, temperature=temperature)
    others = [
        model("http://a/v1", model="other"),
        model("http://a/v1", extra={"top_k": 5}),
        ModelConfig(engine="echo"),
    ]
    found = [keys_of(other, temperature=temperature) for other in [here, *others]]
    assert len(set(found)) == len(found)


def test_the_spec_of_a_job_changes_with_the_name_and_not_with_the_place() -> None:
    here, there = model("http://a/v1", max_concurrent=2), model("https://b/v1", key_env="KEY")
    spec = encode(ModelSpec.unplaced("m", here))
    assert spec == encode(ModelSpec.unplaced("m", there))
    assert "KEY" not in spec
    assert spec != encode(ModelSpec.unplaced("m", model("http://a/v1", model="other")))
    placed = ModelSpec.unplaced("m", there).placed(encode_placements({"m": there, "n": ModelConfig(engine="echo")}))
    assert placed.model == there


def test_a_description_of_another_served_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    one, other = model("http://a/v1"), model("http://a/v1", model="other")
    write_json(path, prepare("m", one, print))
    assert read_description(path, "m", one)["weights_hash"].startswith("endpoint:")
    for wrong in (other, ModelConfig(engine="echo")):
        with pytest.raises(UserError, match="weights_hash"):
            read_description(path, "m", wrong)


@pytest.mark.parametrize("count", [0, 4])
def test_a_served_model_has_one_worker_without_a_gpu(count: int) -> None:
    config = Config.model_validate(config_values({"engine": "endpoint", "endpoint": {**SERVED, "key_env": "NO_KEY"}}))
    gpus = [Gpu(index, f"GPU-{index}", "H100", 81559, 0) for index in range(count)]
    plan = make_plan(config, gpus, None, 16, cluster=False)
    assert plan.all_workers() == {"m": [Worker(0)]}
    assert plan.threads("m") == 1
    text = plan_text(config, plan)
    assert "model m: served elsewhere, no GPU, 1 worker with 1 thread each" in text
    assert "engine endpoint: m at http://h/v1; NO_KEY is not set here" in text


def test_a_worker_of_a_served_model_takes_no_lease(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a host with GPUs, and with gpus.devices that name none of them."""
    monkeypatch.setenv("GRISTMILL_LEASES", str(tmp_path / "leases"))
    inventory = [{"index": 0, "uuid": "GPU-0", "name": "H100", "memory_total_mib": 81559, "memory_used_mib": 0}]
    monkeypatch.setenv("GRISTMILL_INVENTORY", json.dumps(inventory))
    found = model(server.url)
    shard = shard_of(tmp_path, ["a", "b"])
    run_shard(shard, found, prepare("m", found, print), GpusConfig(wait_minutes=0), 1)
    assert {line["id"]: line["text"] for line in read_jsonl(shard.part)} == {"a": "echo say a", "b": "echo say b"}
    assert not (tmp_path / "leases").exists()
    assert not shard.gpu_samples.exists()
    segment = "".join(path.read_text() for path in shard.journal.glob("*.jsonl"))
    assert '"served":{"model":["judge-2026"],"system_fingerprint":["fp_1"]}' in segment.replace(" ", "")


def test_what_was_answered_before_an_error_is_not_asked_again(server: Server, tmp_path: Path) -> None:
    found = model(server.url, max_concurrent=1)
    shard = shard_of(tmp_path, [f"r{n}" for n in range(6)])
    well = server.script
    server.script = lambda asked, before: (
        fault(401) if asked["messages"][-1]["content"] == "say r3" else well(asked, before)
    )
    with pytest.raises(UserError, match="status 401"):
        run_shard(shard, found, prepare("m", found, print), GpusConfig(), 1)
    server.script = well
    run_shard(shard, found, prepare("m", found, print), GpusConfig(), 1)
    assert server.prompts() == Counter({f"say r{n}": 1 for n in range(6)}) + Counter(["say r3"])


def served_command(folder: Path, shard: Any, found: ModelConfig) -> list[str]:
    """The program for a shard, with the model's placement beside its spec."""
    command = generate_command(folder, shard)
    command[command.index("--spec") + 1] = encode(ModelSpec.unplaced("m", found))
    write_json(folder / "weights.json", prepare("m", found, print))
    return [*command, "--placements", encode_placements({"m": found})]


def test_after_a_kill_only_what_is_missing_is_asked(server: Server, tmp_path: Path) -> None:
    """Also answers that came and were not yet in the journal may be asked again: those under way, no more."""
    names = [f"r{n}" for n in range(60)]
    shard, found = shard_of(tmp_path, names), model(server.url, max_concurrent=2)
    command = served_command(tmp_path, shard, found)
    well, hold = server.script, threading.Event()
    server.script = lambda asked, before: None if len(server.asked) > 30 and not hold.is_set() else well(asked, before)
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(server.asked) >= 32)
    killed.kill()
    killed.wait()
    known = {json.loads(line)["completion"]["id"] for path in shard.journal.glob("*.jsonl")
             for line in path.read_bytes().split(b"\n") if line.startswith(b'{"key"')}  # fmt: skip
    assert 28 <= len(known) <= 30
    before = server.prompts()
    hold.set()
    server.release.set()
    subprocess.run(command, check=True, capture_output=True)
    asked_again = server.prompts() - before
    assert asked_again == Counter(f"say {name}" for name in names if name not in known)
    assert [line["id"] for line in read_jsonl(shard.part)] == names


def test_a_signal_ends_a_job_that_waits_for_its_server(server: Server, tmp_path: Path) -> None:
    server.script = lambda asked, before: (
        fault(503, Retry_After="100") if asked["messages"][-1]["content"] == "say r1" else ok("well")
    )
    shard, found = shard_of(tmp_path, ["r0", "r1", "r2"]), model(server.url)
    process = subprocess.Popen(served_command(tmp_path, shard, found), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(server.asked) == 3 and bool(list(shard.journal.glob("*.jsonl"))))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert process.stderr is not None
    assert "stopped by SIGTERM" in process.stderr.read()


JUDGE_PROMPT = "Is {{ answer }} right? {{ labels }}"


def judged(project: Project, url: str, **changes: Any) -> None:
    """An echo run that a served model judges."""
    section = {"base_url": url, "model": "judge", "key_env": "JUDGE_KEY", **changes}
    project.write_prompt("judge.jinja", JUDGE_PROMPT)
    models = {"echo": {"engine": "echo"}, "referee": {"engine": "endpoint", "endpoint": section}}
    prompts = {"ask": {"file": "ask.jinja"}, "judge": {"file": "judge.jinja"}}
    judges = {"right": {"kind": "pointwise", "model": "referee", "prompt": "judge", "runs": ["plain"]}}
    project.write_config(echo_config(models=models, prompts=prompts, judges=judges))


@pytest.mark.slow
def test_a_served_judge_over_a_run_from_config_to_report(server: Server, project: Project) -> None:
    """And the key is in no file and in nothing that is printed; a move asks nothing, another model all."""
    server.script = lambda *_: ok("A")
    judged(project, server.url)
    printed = project.done(JUDGE_KEY=CANARY)
    verdicts = project.lines("judges/right/plain/verdicts.jsonl")
    assert [(line["id"], line["verdict"]) for line in verdicts] == [(f"r{n}", "correct") for n in range(12)]
    assert len(server.asked) == 12
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {CANARY}"}
    manifest = project.value("judges/right/plain/manifest.json")
    assert manifest["spec"]["model"]["endpoint"]["base_url"] == server.url
    assert manifest["spec"]["model"]["endpoint"]["key_env"] == "JUDGE_KEY"
    (worker,) = manifest["workers"]
    assert worker["served"] == {"model": ["judge-2026"], "system_fingerprint": ["fp_1"]}
    assert (worker["engine"], worker["devices"], worker["rows"]) == ("endpoint", [], 12)
    assert (project.folder / "results/report.html").exists()
    files = [path for path in project.folder.rglob("*") if path.is_file()]
    assert any(".snakemake" in path.parts for path in files)
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in printed

    moved = Server()
    try:
        judged(project, moved.url, requests_per_minute=60)
        assert "Nothing to be done" in project.done(JUDGE_KEY=CANARY)
        assert moved.asked == []
        judged(project, moved.url, model="another")
        project.done("results/judges/right/plain/verdicts.jsonl", JUDGE_KEY=CANARY)
        assert Counter(asked["model"] for asked in moved.asked) == {"another": 12}
    finally:
        moved.close()


@pytest.mark.slow
def test_without_its_key_a_judge_stops_in_one_line_and_nothing_is_asked(server: Server, project: Project) -> None:
    judged(project, server.url)
    result = project.run("--retries", "0")
    assert result.returncode != 0
    assert re.search(r"^error: JUDGE_KEY, which endpoint\.key_env names, is not set", result.stdout, re.MULTILINE)
    assert server.asked == []


@pytest.mark.slow
def test_jobs_of_one_served_model_share_its_limits(server: Server, project: Project) -> None:
    """Two judges ask it: one after the other, so that no more than max_concurrent requests are under way."""

    def script(*_: Any) -> Reply:
        deadline = time.monotonic() + 10  # the first job asks for as long as the other one takes to start
        while len(server.asked) <= 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        return ok("A")

    server.script = script
    judged(project, server.url, max_concurrent=2)
    config = yaml.safe_load((project.folder / "config.yaml").read_text())
    config["judges"]["again"] = {**config["judges"]["right"], "sampling": {"max_new_tokens": 4}}
    project.write_config(config)
    project.done(*(f"results/judges/{name}/plain/verdicts.jsonl" for name in ("right", "again")), JUDGE_KEY=CANARY)
    assert len(server.asked) == 24
    assert server.most_at_once <= 2
