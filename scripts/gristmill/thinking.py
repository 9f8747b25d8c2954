"""What a reasoning model says when it has thought: the words after `</think>`.

- Text without tags is all said. A block that opens and never closes is thinking that was cut: nothing was said.
- Where the chat template opens the block, the engines put its tag in front of the answer (engines/answers.py), so that
  the stored text is whole. A lone `</think>` ends a block all the same.
- The files keep the raw text; only readers leave the thinking out.
"""

from __future__ import annotations

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
#: Why an answer counts as missing when its thinking never ended.
UNCLOSED = "unclosed_thinking"
#: An opening tag, and the space behind it, at the end of a prompt.
_CLOSED = re.compile(re.escape(THINK_CLOSE) + r"[ \t]*(?=\n)")
_OPENED = re.compile(re.escape(THINK_OPEN) + r"\s*\Z")


def spoken(text: str) -> str | None:
    """The words after the last reasoning block; None while one is still open."""
    _, closed, after = text.rpartition(THINK_CLOSE)
    said = after if closed else text
    return None if THINK_OPEN in said else said


def after_block(text: str) -> str | None:
    """The words after a reasoning block that a text begins with; None while it is open.

    Tags that stand elsewhere are words: a judge may quote an answer that has some, and must not lose its verdict by
    that. Only a closing tag at the end of a line also ends a block whose opening tag a server left out.
    """
    said = text.lstrip()
    if said.startswith(THINK_OPEN):
        _, closed, after = said.partition(THINK_CLOSE)
        return after if closed else None
    found = _CLOSED.search(text)
    return text[found.end() :] if found and THINK_OPEN not in text[: found.start()] else text


def opening(prompt: str) -> str:
    """The opening tag that a prompt ends with, as the template wrote it; empty when it ends otherwise."""
    found = _OPENED.search(prompt)
    return found[0] if found else ""
