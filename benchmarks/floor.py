"""The least time in which a card can do a workload, from two rates measured on it: a lower bound, not an estimate.

    python benchmarks/floor.py          the rates of this machine's GPU (or CPU), as JSON

For requests of p prompt and n answer tokens, on cards that move B bytes a second, do R operations a second and have
room for C tokens of keys and values beside the weights:

- Operations: 2 for each weight of the layers and each token, prompt or answer; 2 for each weight of the head and each
  token that is drawn; and 4 × layers × hidden size for each pair of a token and one that it attends to. Their time is
  operations / R.
- Steps: while a request waits for its next token its context is in memory, so the contexts of all steps, summed over
  the requests, are at most steps × C. And the longest answer takes a step a token. steps is the larger of the two.
- Bytes: the weights of layers and head once a step, and each step the keys and values of every running request's
  context. Their time is bytes / B.
- floor = max(operations / R, bytes / B): both can go on at once, but neither can be had for less. What it leaves out
  (activations, writing keys and values, sampling, the prompts' own pass over the weights) only makes it lower.

The first token comes from the prompt's pass and the end token from the last step, so an answer of n tokens takes n
steps, or one less when max_new_tokens cuts off its end token. B counts bytes read plus bytes written by a large copy
(reading alone may be a few percent faster); R is a large product of random bfloat16 matrices. `prompt_s` is the
prompts' part of the operations: a schedule that does all prompts before all answers cannot go below prompt_s +
bytes_s. `cards` share one model; each is counted whole.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from countdown import Shape


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on a card, and how many of them there are."""

    bytes_per_second: float
    operations_per_second: float
    memory_bytes: int
    cards: int = 1


@dataclass(frozen=True, slots=True)
class Floor:
    """The bound and what it is made of, all cards together."""

    seconds: float
    tokens_per_second: float
    bytes_s: float
    operations_s: float
    prompt_s: float
    steps: int
    weight_bytes: int
    cache_bytes: int
    operations: int
    room_tokens: int


def floor(lengths: Sequence[tuple[int, int]], most: int, shape: Shape, machine: Machine, item_bytes: int = 2) -> Floor:
    """The bound for requests of (prompt, answer) tokens; `most` is max_new_tokens, `item_bytes` those of a number."""
    steps_of = [min(answer, most - 1) for _, answer in lengths]
    contexts = sum(n * p + n * (n + 1) // 2 for (p, _), n in zip(lengths, steps_of, strict=True))
    prompt_pairs = sum(p * (p + 1) // 2 for p, _ in lengths)
    prompt_tokens = sum(p for p, _ in lengths)

    weights = item_bytes * (shape.layer_parameters + shape.head_parameters)
    per_token = item_bytes * 2 * shape.layers * shape.kv
    room = (machine.cards * machine.memory_bytes - weights) // per_token
    if room < 1:
        raise ValueError(f"{weights} bytes of weights leave no room in {machine.cards} × {machine.memory_bytes}")
    steps = max(max(steps_of), -(-contexts // room))

    pair = 4 * shape.layers * shape.hidden
    head = 2 * shape.head_parameters
    prompt_operations = 2 * shape.layer_parameters * prompt_tokens + pair * prompt_pairs + head * len(lengths)
    operations = prompt_operations + sum(steps_of) * (2 * shape.layer_parameters + head) + pair * contexts

    weight_bytes, cache_bytes = steps * weights, contexts * per_token
    rate, speed = machine.cards * machine.operations_per_second, machine.cards * machine.bytes_per_second
    bytes_s, operations_s = (weight_bytes + cache_bytes) / speed, operations / rate
    seconds = max(bytes_s, operations_s)
    useful = sum(answer for _, answer in lengths) / seconds
    parts = (prompt_operations / rate, steps, weight_bytes, cache_bytes, operations, room)
    return Floor(seconds, useful, bytes_s, operations_s, *parts)


def measure() -> tuple[str, Machine]:
    """The name of the card, and its copy bandwidth and matrix rate now: the median of repeated runs after warm-ups."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    size, side, repeats = (2**31, 8192, 20) if on_gpu else (2**27, 512, 5)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median(lambda: target.copy_(source), repeats)
    one, other = (torch.randn((side, side), device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)
    product_s = _median(lambda: torch.mm(one, other, out=out), repeats)
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else _host_bytes()
    name = torch.cuda.get_device_name(0) if on_gpu else "CPU"
    return name, Machine(2 * size / copy_s, 2 * side**3 / product_s, memory)


def _median(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of one call: by device events on a GPU, by the clock on a CPU."""
    import torch

    for _ in range(3):
        work()
    found: list[float] = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1000)
        else:
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _host_bytes() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    card, found = measure()
    print(json.dumps({"card": card, **asdict(found)}))
