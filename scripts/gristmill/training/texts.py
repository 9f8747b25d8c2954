"""Texts → token ids in a folder, once, without a GPU: what every process of a training maps into its memory.

- The ids are those that a teacher reads (logits/texts.py): a chat is the prompt through the model's template and the
  reference behind it, ended by the token that ends a turn, and only the answer has targets. Of a plain text every token
  but the first is a target; it ends with the tokenizer's end-of-text token, so that texts that share a row end.
- A plain text that is longer than a row is split into windows that share one token, so that each token is a target
  once. An answer is cut at the row's end. What was left out is counted.
- tokens.bin: all ids as little-endian int32. rows.npy: of each row where it starts, how many tokens it has, its first
  target, and 63 bits of a hash of its text's id, by which a share of the texts is held out: windows stay together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from gristmill.config.specs import LogitsSpec, TrainingDataSpec
from gristmill.engines.chat import ChatEncoder
from gristmill.errors import UserError
from gristmill.files import atomic_folder, canonical, write_json
from gristmill.logits.texts import window_lines
from gristmill.logits.vocabulary import tokenizer_sha256
from gristmill.types import JsonDict
from gristmill.weights import require_prepared

TOKENS, ROWS, ABOUT = "tokens.bin", "rows.npy", "about.json"


def write_texts(spec: TrainingDataSpec, weights: JsonDict, out: Path, log: Callable[[str], None]) -> None:
    """The folder of a training's texts, with `evaluation` in it where that has a dataset of its own.

    Raises:
        UserError: a text cannot be read, or no row has a target.
    """
    chat = ChatEncoder(require_prepared(weights), spec.texts.teacher.model)
    with atomic_folder(out) as folder:
        for part, texts in (("training", spec.texts), ("evaluation", spec.evaluation)):
            if texts is not None:
                (folder / part).mkdir()
                about = _write(texts, weights, chat, folder / part)
                write_json(folder / part / ABOUT, about)
                log(f"{part}: {about['rows']:,} rows, {about['tokens']:,} tokens, {about['targets']:,} targets")


def text_hash(id: str) -> int:
    """63 bits that stand for a text's id."""
    return int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _write(spec: LogitsSpec, weights: JsonDict, chat: ChatEncoder, folder: Path) -> JsonDict:
    lines = window_lines(spec, None, weights, chat)
    if spec.prompt is None:
        lines = _ended(lines, chat.tokenizer.eos_token_id, spec.texts.max_tokens or 0)
    return {**write_rows(lines, folder), "tokenizer_sha256": tokenizer_sha256(chat.tokenizer)}


def write_rows(lines: Iterable[JsonDict], folder: Path) -> JsonDict:
    """Write the token ids of windows (logits.texts.window_lines) into a folder that is there; gives their numbers.

    Raises:
        UserError: no window has a target.
    """
    rows: list[tuple[int, int, int, int]] = []
    start, cut, dropped, needed = 0, 0, 0, 0
    content = hashlib.sha256()
    with open(folder / TOKENS, "wb") as handle:
        for line in lines:
            if "skipped" in line or line["first"] >= len(line["tokens"]):
                dropped += 1
                if "skipped" not in line:
                    needed = min(needed or line["first"] + 1, line["first"] + 1)
                continue
            data = np.asarray(line["tokens"], "<i4").tobytes()
            handle.write(data)
            rows.append((start, len(line["tokens"]), line["first"], text_hash(line["id"])))
            content.update(canonical([line["first"], len(line["tokens"])]) + data)
            start, cut = start + len(line["tokens"]), cut + line["cut_tokens"]
    if not rows:
        short = f": the shortest prompt alone needs sequence_tokens={needed} for one" if needed else ""
        raise UserError(
            f"no row of {dropped} has a token to learn{short}; look at the dataset's texts, references and "
            "sequence_tokens"
        )
    table = np.asarray(rows, np.int64)
    np.save(folder / ROWS, table)
    return {
        "rows": len(rows),
        "tokens": start,
        "targets": int((table[:, 1] - table[:, 2]).sum()),
        "cut_tokens": cut,
        "rows_without_targets": dropped,
        "sha256": content.hexdigest(),
    }


def _ended(lines: Iterable[JsonDict], end: int | None, most: int) -> Iterator[JsonDict]:
    """Plain texts with the end-of-text token behind their last window; in a window of its own where that is full."""
    held: JsonDict | None = None
    for line in lines:
        if held is not None:
            yield from _closed(held, end, most) if line["window"] == 0 else [held]
        held = line
    if held is not None:
        yield from _closed(held, end, most)


def _closed(line: JsonDict, end: int | None, most: int) -> Iterator[JsonDict]:
    if end is None or "skipped" in line or not line["tokens"]:
        yield line
    elif len(line["tokens"]) < most:
        yield line | {"tokens": [*line["tokens"], end]}
    else:
        yield line
        yield line | {"window": line["window"] + 1, "tokens": [line["tokens"][-1], end]}
