"""One way of answering, in a process of its own: told what to load, then asked for passes, a JSON line each.

    {"kind": …, "folder": …, …}                  the first line on standard input: a Spec
    {"way": "generate-4", "turn": 0, "limit_s": 30}    every other one: a pass over the requests

Answered on standard output: {"event": "loaded" | "pass" | "progress" | "unavailable" | "failed", …}. Whatever else a
library prints goes to standard error.

- generate-<rows>[-sorted][-nocudnn]: transformers' generate() on batches of so many rows, in the file's order or
  longest prompt first; as torch comes, or with cuDNN's attention off. A pass that takes longer than its limit is a
  sample: useful tokens and seconds are those of the batches that were finished. Since the lengths are known, so is
  the number of steps of the whole file, and with the seconds of a step the rate that all of it would have:
  `whole_tokens_per_second`.
- bare-continuous: model.generate_batch() with its defaults, over the attention that gristmill would offer it.
- bare-vllm: LLM.generate() with its defaults; bare-vllm-eager: not compiled, as gristmill's engine on a CPU.
- anything else: an engine of gristmill, by its name in the config, opened and run as the worker does.
- The bare ways are given token ids; an engine of gristmill gets text, and its clock also covers tokenizing it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from provenance import PACKAGES, versions  # noqa: E402
from workload import Asked, Work, asked, batches, work_from_json  # noqa: E402

from gristmill.config.schema import ModelConfig  # noqa: E402
from gristmill.engines.chat import ChatEncoder  # noqa: E402
from gristmill.engines.continuous import flash  # noqa: E402
from gristmill.errors import UserError  # noqa: E402
from gristmill.progress import log  # noqa: E402
from gristmill.types import Completion, JsonDict  # noqa: E402

GENERATE = re.compile(r"generate-(\d+)(-sorted)?(-nocudnn)?")
PROGRESS_S = 2.0


@dataclass(frozen=True, slots=True)
class Spec:
    """What the process is for."""

    #: "generate", "bare-continuous", "bare-vllm", "bare-vllm-eager" or an engine of gristmill.
    kind: str
    folder: str
    work: Work
    on_gpu: bool
    dtype: str
    #: Further keys of ModelConfig; `attention` also holds for bare-continuous.
    model: JsonDict = field(default_factory=dict)

    def config(self, **more: Any) -> ModelConfig:
        """The model's config as a user would write it; raises pydantic's ValidationError for a key it does not know."""
        return ModelConfig.model_validate({"source": self.folder, "dtype": self.dtype, **self.model, **more})


@dataclass(slots=True)
class Pass:
    """What a pass gave: id → (text, tokens), None for a request that failed; seconds from its start to its end."""

    seconds: float
    answers: dict[str, tuple[str, int] | None]
    #: Whether every request was asked.
    complete: bool
    more: JsonDict = field(default_factory=dict)


class Way(Protocol):
    """Something loaded that answers."""

    def run(self, way: str, requests: Sequence[Asked], limit_s: float) -> Pass:
        """Answer the requests once."""
        ...

    def about(self) -> JsonDict:
        """What is worth knowing of it."""
        ...


class NotAvailable(Exception):
    """The way cannot be gone here; the text says why."""


class Prompts:
    """Token ids of prompts and texts of answers, by the same encoder that gristmill's engines use."""

    def __init__(self, spec: Spec) -> None:
        self._chat = ChatEncoder(Path(spec.folder), ModelConfig.model_validate({"source": spec.folder}))
        self.ends = self._chat.stop_ids()
        pad = self._chat.tokenizer.pad_token_id
        self.pad = int(pad) if pad is not None else self.ends[0]

    def ids(self, requests: Sequence[Asked]) -> list[list[int]]:
        """The prompts."""
        return self._chat.encode([each.request.messages for each in requests])

    def answer(self, row: Sequence[int]) -> tuple[str, int]:
        """Text and useful tokens of generated ids: up to the first end token."""
        end = next((place for place, token in enumerate(row) if token in self._chat.ends), len(row))
        return self._chat.decode(row[:end]), end


class Generate:
    """transformers' generate(), as people write it today."""

    def __init__(self, spec: Spec) -> None:
        self._prompts = Prompts(spec)
        self._model = _load(spec, None)

    def about(self) -> JsonDict:
        """Which attention it runs with."""
        return {"attention": self._model.config._attn_implementation}

    def run(self, way: str, requests: Sequence[Asked], limit_s: float) -> Pass:
        """Batch after batch until the limit; the batch in flight is then cut off and does not count."""
        import torch

        rows, longest_first, cudnn = _parse(way)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        ids = self._prompts.ids(requests)
        planned = batches(len(ids), rows, [len(prompt) for prompt in ids], longest_first)
        most = requests[0].request.sampling.max_new_tokens
        self._batch([ids[place] for place in planned[0]], min(4, most), None)  # kernels are loaded and chosen
        answers: dict[str, tuple[str, int] | None] = {}
        useful_s, steps, start = 0.0, 0, time.perf_counter()
        for batch in planned:
            begun = time.perf_counter()
            if (left_s := limit_s - (begun - start)) <= 0:
                break
            found, ended = self._batch([ids[place] for place in batch], most, left_s)
            steps += len(found[0])
            if not ended:
                break
            useful_s += time.perf_counter() - begun
            for place, row in zip(batch, found, strict=True):
                answers[requests[place].request.id] = self._prompts.answer(row)
        all_s = time.perf_counter() - start
        step_s = all_s / steps if steps else None
        whole = _whole_rate(requests, planned, most, step_s)
        return Pass(useful_s, answers, len(answers) == len(ids), {"step_s": step_s, **whole})

    def _batch(self, prompts: Sequence[list[int]], most: int, limit_s: float | None) -> tuple[list[list[int]], bool]:
        """New ids of each row, and whether they came to their end."""
        import torch
        from transformers import GenerationConfig

        from gristmill.engines.static.deadline import Deadline

        width, pad = max(map(len, prompts)), self._prompts.pad
        rows = [[pad] * (width - len(ids)) + ids for ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        place = self._model.device
        deadline = Deadline(limit_s)
        config = GenerationConfig(
            max_new_tokens=most, do_sample=False, eos_token_id=self._prompts.ends, pad_token_id=pad
        )
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(rows, device=place),  # (B, T)
                attention_mask=torch.tensor(mask, device=place),
                generation_config=config,
                stopping_criteria=[deadline],
            )
        found: list[list[int]] = output[:, width:].tolist()
        return found, not deadline.passed


class BareContinuous:
    """transformers' continuous batching, by its own front door."""

    def __init__(self, spec: Spec) -> None:
        self._attention = flash.offer() if spec.on_gpu else "sdpa"
        self._prompts = Prompts(spec)
        self._model = _load(spec, spec.model.get("attention"))

    def about(self) -> JsonDict:
        """Which attention it runs with."""
        return {"attention": f"{self._model.config._attn_implementation}, {self._attention}"}

    def run(self, way: str, requests: Sequence[Asked], limit_s: float) -> Pass:
        """All requests in one call, which makes its cache and its graphs anew; it knows no limit."""
        from transformers import GenerationConfig

        ids = self._prompts.ids(requests)
        config = GenerationConfig(
            max_new_tokens=requests[0].request.sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=self._prompts.ends[0] if len(self._prompts.ends) == 1 else self._prompts.ends,
            pad_token_id=self._prompts.pad,
        )
        start = time.perf_counter()
        found = self._model.generate_batch(inputs=ids, generation_config=config)  # not under inference_mode, it says
        seconds = time.perf_counter() - start
        rows = {tuple(one.prompt_ids): one.generated_tokens for one in found.values() if one.error is None}
        pairs = zip(requests, (rows.get(tuple(prompt)) for prompt in ids), strict=True)
        answers = {each.request.id: None if row is None else self._prompts.answer(row) for each, row in pairs}
        return Pass(seconds, answers, True)


class BareVllm:
    """vLLM's offline front door."""

    def __init__(self, spec: Spec) -> None:
        try:
            from vllm import LLM
        except ImportError as error:
            raise NotAvailable(f"vllm cannot be imported: {error}") from error
        self._prompts = Prompts(spec)
        self._llm = LLM(model=spec.folder, dtype=spec.dtype, enforce_eager=spec.kind.endswith("-eager"))

    def about(self) -> JsonDict:
        """VLLM tells of its choices in its log."""
        return {}

    def run(self, way: str, requests: Sequence[Asked], limit_s: float) -> Pass:
        """All requests in one call; it knows no limit."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids in self._prompts.ids(requests)]
        most = requests[0].request.sampling.max_new_tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=most, stop_token_ids=self._prompts.ends)
        start = time.perf_counter()
        found = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        pairs = zip(requests, found, strict=True)
        return Pass(
            seconds, {each.request.id: self._prompts.answer(one.outputs[0].token_ids) for each, one in pairs}, True
        )


class OurEngine:
    """An engine of gristmill, opened as the worker opens it."""

    def __init__(self, spec: Spec) -> None:
        from pydantic import ValidationError

        from gristmill.engines import open_engine
        from gristmill.weights import prepare

        try:
            model = spec.config(engine=spec.kind)
            self._engine, self._why = open_engine(model, prepare("benchmark", model, log), spec.on_gpu, log)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise NotAvailable(f"the config refuses it: {said}") from error
        except (ImportError, UserError) as error:
            raise NotAvailable(f"{type(error).__name__}: {error}") from error

    def about(self) -> JsonDict:
        """What the worker writes into the manifest."""
        names = ("device_map", "dtype", "attention")
        found = {name: getattr(self._engine, name, None) for name in names}
        return {"engine": self._engine.name, "why": self._why, **found}

    def run(self, way: str, requests: Sequence[Asked], limit_s: float) -> Pass:
        """A pass that takes longer than its limit is stopped as a signal would: what is in flight ends."""
        answers: dict[str, tuple[str, int] | None] = {}
        tokens, said_s, stopped, start = 0, 0.0, False, time.perf_counter()
        for outcome in self._engine.generate([each.request for each in requests]):
            seconds = time.perf_counter() - start
            answers[outcome.id] = None
            if isinstance(outcome, Completion) and outcome.text is not None:
                answers[outcome.id] = outcome.text, outcome.completion_tokens
                tokens += outcome.completion_tokens
            if seconds - said_s >= PROGRESS_S:
                said_s = seconds
                say("progress", answered=len(answers), seconds=seconds, tokens=tokens)
            if seconds > limit_s and not stopped and len(answers) < len(requests):
                self._engine.stop()
                stopped = True
        return Pass(time.perf_counter() - start, answers, not stopped or len(answers) == len(requests))


def open_way(spec: Spec) -> Way:
    """Load what the spec is for."""
    ways: dict[str, type[Way]] = {
        "generate": Generate,
        "bare-continuous": BareContinuous,
        "bare-vllm": BareVllm,
        "bare-vllm-eager": BareVllm,
    }
    return ways.get(spec.kind, OurEngine)(spec)  # type: ignore[call-arg]


def _load(spec: Spec, attention: str | None) -> Any:
    """The model as people load it: on one device, or spread by device_map where there are several."""
    import torch
    from transformers import AutoModelForCausalLM

    several = spec.on_gpu and torch.cuda.device_count() > 1
    place = ("auto" if several else "cuda") if spec.on_gpu else None
    model = AutoModelForCausalLM.from_pretrained(
        spec.folder, dtype=getattr(torch, spec.dtype), device_map=place, attn_implementation=attention
    )
    return model.eval()


def _parse(way: str) -> tuple[int, bool, bool]:
    """Rows of a batch, whether longest first, whether with cuDNN's attention."""
    found = GENERATE.fullmatch(way)
    if found is None:
        raise NotAvailable(f"{way} is no way; write generate-<rows>[-sorted][-nocudnn]")
    return int(found[1]), found[2] is not None, found[3] is None


def _whole_rate(
    requests: Sequence[Asked], planned: Sequence[Sequence[int]], most: int, step_s: float | None
) -> JsonDict:
    """Useful tokens a second of all batches at so many seconds a step; nothing where the lengths are not known."""
    lengths = [each.answer_tokens for each in requests]
    if any(length is None for length in lengths) or not step_s:
        return {}
    known = [length or 0 for length in lengths]
    steps = sum(max(min(known[place] + 1, most) for place in batch) for batch in planned)
    return {"whole_steps": steps, "whole_tokens_per_second": sum(known) / (steps * step_s)}


def summary(found: Pass, requests: Sequence[Asked], turn: int) -> JsonDict:
    """A pass in numbers: only right answers are useful."""
    there = {each.request.id: each for each in requests}
    got = {name: answer for name, answer in found.answers.items() if answer is not None}
    right = {name: tokens for name, (text, tokens) in got.items() if there[name].is_right(text, tokens)}
    wrong = [name for name in got if name not in right]
    tokens = sum(right.values())
    numbers: JsonDict = {
        "turn": turn,
        "seconds": round(found.seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / found.seconds, 2) if found.seconds and tokens else None,
        "requests": len(requests),
        "answered": len(got),
        "right": len(right),
        "wrong": len(wrong),
        "failed": len(found.answers) - len(got),
        "complete": found.complete,
        **found.more,
    }
    if wrong:
        text, length = got[wrong[0]]
        numbers["first_wrong"] = {"id": wrong[0], "tokens": length, "expected": there[wrong[0]].answer_tokens}
        numbers["first_wrong"]["text"] = text[:200]
    if requests and requests[0].answer is None:
        numbers["texts"] = {name: text for name, (text, _) in got.items()}
    return numbers


def main() -> None:
    """A spec in, passes out, until standard input ends."""
    lines = _lines()
    spec = read_spec(next(lines))
    try:
        start = time.perf_counter()
        way = open_way(spec)
        say(
            "loaded",
            seconds=round(time.perf_counter() - start, 2),
            python=platform.python_version(),
            packages=versions(PACKAGES),
            **way.about(),
        )
        for command in lines:
            requests = asked(spec.work, command["turn"])
            found = way.run(command["way"], requests, command["limit_s"])
            say("pass", **summary(found, requests, command["turn"]))
    except NotAvailable as error:
        say("unavailable", reason=str(error))
    except Exception as error:  # whatever a library raises is this way's result, and the other ways go on
        traceback.print_exc()
        say("failed", reason=f"{type(error).__name__}: {error}"[:500])


def read_spec(line: JsonDict) -> Spec:
    """The first line."""
    return Spec(**{**line, "work": work_from_json(line["work"])})


def say(event: str, **values: Any) -> None:
    """One line to whoever started the process."""
    _out().write(json.dumps({"event": event, **values}) + "\n")
    _out().flush()


def _lines() -> Iterator[JsonDict]:
    for line in sys.stdin:
        yield json.loads(line)


_channel: list[IO[str]] = []


def _out() -> IO[str]:
    """Standard output as it was at the start; descriptor 1 is standard error from then on."""
    if not _channel:
        _channel.append(os.fdopen(os.dup(1), "w"))
        os.dup2(2, 1)
    return _channel[0]


if __name__ == "__main__":
    _out()
    main()
