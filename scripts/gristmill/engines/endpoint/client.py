"""One request to the server: paced, sent again after passing errors, and sorted into an outcome or the job's end.

- Passing: timeouts, broken connections, 408, 409, 425, 429, 5xx, and a 200 that cannot be read. They are tried again
  with exponential waits and jitter, or after what Retry-After says; that also holds the other requests back.
- A row that is out of tries is a Failure. The job ends when IN_A_ROW rows in a row are, when the server cannot be
  reached and answered nothing meanwhile, and when 429 does not end.
- 401, 402, 403, 404, a redirect and an empty account end the job at once. A redirect is never followed: it would carry
  the key elsewhere.
- A prompt over the context goes by on_overflow. Any other 4xx is a refused row; when IN_A_ROW came before any
  answer, the config is wrong, and the job ends with the server's words.
- The key stands in one header and nowhere else; a server's words are quoted without it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import httpx2
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from gristmill.config.endpoint import EndpointConfig
from gristmill.engines.endpoint.messages import Answer, Unreadable, body, read_answer
from gristmill.engines.endpoint.pacing import Pace
from gristmill.errors import UserError
from gristmill.types import Completion, Failure, FailureReason, Outcome, Request

#: First wait after a passing error, and the longest of any, also where Retry-After asks for more.
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 120.0
#: So many refused rows before any answer mean a wrong config; so many out of tries in a row, a server that is down.
IN_A_ROW = 8
_PASSING = {408, 409, 425, 429}
_ADVICE = {
    401: "the server does not accept the key",
    402: "the account has no credit",
    403: "the key may not use this model",
    404: "there is no such model or address",
}
_CONTEXT = re.compile(
    r"context[_ -]?(length|window|size)|maximum context|max_model_len|too many tokens|prompt is too long"
    r"|inputs.{0,40}max_new_tokens|max_(completion_)?tokens.{0,40}too large",
    re.IGNORECASE | re.DOTALL,
)
_NO_CREDIT = re.compile("insufficient_quota|billing", re.IGNORECASE)


class Stopped(Exception):
    """The job is ending; the row is given up."""


class Passing(Exception):
    """An error that may be gone at the next try."""

    def __init__(self, what: str, reason: FailureReason, wait_s: float | None = None, limited: bool = False) -> None:
        """Keep what a row that is out of tries says."""
        super().__init__(what)
        self.reason, self.wait_s, self.limited = reason, wait_s, limited


class Client:
    """Asks one server; used within one event loop."""

    def __init__(
        self,
        endpoint: EndpointConfig,
        key: str | None,
        on_overflow: str,
        served: dict[str, list[str]],
        log: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is connected before `__aenter__`. `served` takes what the server says it is."""
        self._endpoint, self._key, self._on_overflow, self._log = endpoint, key, on_overflow, log
        self._url = f"{endpoint.base_url}/chat/completions"
        self._ending = asyncio.Event()
        self._pace = Pace(endpoint.requests_per_minute)
        self._answers, self._refusals = 0, 0
        #: Requests under way, and those that were sent again: for whoever watches.
        self.under_way, self.sent_again = 0, 0
        #: Rows that ran out of tries since the last answer.
        self._lost = 0
        self._said: set[str] = set()
        self._served = served
        self._backoff = wait_exponential(multiplier=FIRST_WAIT_S, max=MAX_WAIT_S) + wait_random(0, FIRST_WAIT_S)

    async def __aenter__(self) -> Client:
        """Open the pool: TLS is verified, and no redirect is followed."""
        most = self._endpoint.max_concurrent
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most)
        self._http = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None, follow_redirects=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._http.aclose()

    def end(self) -> None:
        """Give up rows that wait for their turn; requests under way go on."""
        self._ending.set()

    async def ask(self, request: Request) -> Outcome:
        """The outcome of one request.

        Raises:
            UserError: the server, the key or the config does not do.
            Stopped: `end` was called while it waited.
        """
        answers = self._answers
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Passing),
            stop=stop_after_attempt(1 + self._endpoint.retries),
            wait=self._wait_s,
            sleep=self._sleep,
            before_sleep=self._note,
            reraise=True,
        )
        try:
            outcome: Outcome = await retrying(self._once, request)
        except Passing as error:
            self._lost += 1
            absent = isinstance(error.__cause__, httpx2.ConnectError) and self._answers == answers
            if error.limited or absent or self._lost >= IN_A_ROW:
                raise UserError(self._gave_up(error)) from error
            tries = self._endpoint.retries + 1
            return Failure(*request.rid, error.reason, f"{error} ({tries} tries)")
        return outcome

    async def _once(self, request: Request) -> Outcome:
        await self._turn()
        start = time.perf_counter()
        self.under_way += 1
        try:
            async with asyncio.timeout(self._endpoint.timeout_seconds):
                response = await self._http.post(self._url, json=body(self._endpoint, request))
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise Passing(f"no answer within {self._endpoint.timeout_seconds:g} s", "timeout") from error
        except httpx2.RequestError as error:
            raise Passing(f"{type(error).__name__}: {self._quoted(str(error))}", "server_error") from error
        finally:
            self.under_way -= 1
        if response.status_code == 200:
            return self._read(request, response.content, time.perf_counter() - start)
        return self._sorted(request, response)

    def _read(self, request: Request, content: bytes, seconds: float) -> Outcome:
        try:
            answer = read_answer(request, content, seconds)
        except Unreadable as error:
            raise Passing(str(error), "server_error") from error
        self._answers, self._lost = self._answers + 1, 0
        self._remember(answer)
        return answer.outcome

    def _sorted(self, request: Request, response: httpx2.Response) -> Outcome:
        """What a status other than 200 means."""
        status, words = response.status_code, self._quoted(_words(response))
        no_credit = status == 429 and _NO_CREDIT.search(words)
        if status in _ADVICE or no_credit:
            raise UserError(self._unusable(status, _ADVICE[402 if no_credit else status]))
        if status in _PASSING or status >= 500:
            wait_s = _retry_after_s(response.headers.get("Retry-After"))
            raise Passing(f"status {status}: {words}", "server_error", wait_s, limited=status == 429)
        if status < 400:
            raise UserError(self._unusable(status, "the server answers from elsewhere, and redirects are not followed"))
        if _CONTEXT.search(words):
            return self._overflow(request, words)
        self._refusals += 1
        if self._refusals >= IN_A_ROW and not self._answers:
            raise UserError(
                f"{self._place()}: the first {self._refusals} requests were refused (status {status}: {words}); "
                "correct what it names in sampling or endpoint.extra"
            )
        return Failure(*request.rid, "refused_by_server", f"status {status}: {words}")

    def _overflow(self, request: Request, words: str) -> Outcome:
        if self._on_overflow == "skip":
            return Completion(*request.rid, None, "skipped", 0, 0, 0.0)
        raise UserError(
            f"{request.rid}: prompt and max_new_tokens={request.sampling.max_new_tokens} exceed the server's context "
            f"({words}); set models.*.on_overflow to skip, or lower max_new_tokens"
        )

    async def _turn(self) -> None:
        """Wait for this request's turn."""
        clock = asyncio.get_running_loop().time
        await self._sleep(self._pace.reserve(clock()))
        while (left := self._pace.held_s(clock())) > 0:
            await self._sleep(left)

    async def _sleep(self, seconds: float) -> None:
        if self._ending.is_set():
            raise Stopped
        if seconds <= 0:
            return
        try:
            await asyncio.wait_for(self._ending.wait(), seconds)
        except TimeoutError:
            return
        raise Stopped

    def _wait_s(self, state: RetryCallState) -> float:
        """Seconds before the next try; what Retry-After says holds for all requests."""
        error = state.outcome.exception() if state.outcome is not None else None
        if not isinstance(error, Passing) or error.wait_s is None:
            return float(self._backoff(state))
        self._pace.hold(asyncio.get_running_loop().time() + error.wait_s)
        return error.wait_s + random.uniform(0, FIRST_WAIT_S)  # not all at the same moment

    def _note(self, state: RetryCallState) -> None:
        """Say each kind of error once: a busy server is no reason to fill a log."""
        self.sent_again += 1
        what = str(state.outcome.exception()) if state.outcome is not None else ""
        self._say(what.partition(":")[0], f"{what}; tried again, as all such errors are")

    def _say(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._log(f"{self._place()}: {line}")

    def _remember(self, answer: Answer) -> None:
        for found, said in (("model", answer.model), ("system_fingerprint", answer.fingerprint)):
            if said is not None and said not in self._served[found]:
                self._served[found].append(said)
        if not answer.counted:
            self._say("usage", "answers come without usage, so tokens are recorded as 0")

    def _place(self) -> str:
        return f"{self._endpoint.base_url} (model {self._endpoint.model})"

    def _unusable(self, status: int, why: str) -> str:
        key = f"the key in {self._endpoint.key_env}" if self._endpoint.key_env else "key_env (no key is sent)"
        return f"{self._place()}: status {status}, {why}; check {key}, endpoint.base_url and endpoint.model"

    def _gave_up(self, error: Passing) -> str:
        step = (
            "lower requests_per_minute or max_concurrent"
            if error.limited
            else "see that it runs, or raise endpoint.retries or timeout_seconds"
        )
        tries = f"{self._endpoint.retries + 1} tries"
        return f"{self._place()} gives no answer after {tries}: {error}; {step}, and run again (answers are kept)"

    def _quoted(self, words: str) -> str:
        """A server's words on one line, without the key."""
        plain = " ".join(words.split())
        plain = plain.replace(self._key, "<key>") if self._key else plain
        return plain[:300] or "no words"


def _words(response: httpx2.Response) -> str:
    """The message of an error's body, in whichever form the server writes it."""
    text = response.text
    try:
        said = json.loads(text)
    except ValueError:
        return text
    error = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(error, dict):
        found = [error.get(key) for key in ("message", "detail", "code", "type")]
        return "; ".join(str(item) for item in found if item) or text
    return str(error)


def _retry_after_s(value: str | None) -> float | None:
    """Seconds that Retry-After asks for, as a number or an HTTP date, at most MAX_WAIT_S; None without a sound one."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), MAX_WAIT_S) if seconds == seconds else None
