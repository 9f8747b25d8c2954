"""Whether two models mean the same by a token id: what of a tokenizer decides that, and how many ids it has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gristmill.errors import UserError
from gristmill.files import canonical
from gristmill.types import JsonDict


def check_student(metadata: Mapping[str, Any], tokenizer: Any, head_width: int | None = None) -> None:
    """Refuse a student that reads ids otherwise than the teacher did.

    Args:
        metadata: of a file of logits.
        tokenizer: the student's, of transformers.
        head_width: how many logits the student has, padding included; None: not known yet.

    Raises:
        UserError: another tokenizer, or fewer logits than there are tokens.
    """
    found, wanted = tokenizer_sha256(tokenizer), metadata["tokenizer_sha256"]
    if found != wanted:
        raise UserError(
            f"the student's tokenizer ({getattr(tokenizer, 'name_or_path', '') or 'unnamed'}, sha256 {found[:16]}…) is "
            f"not the teacher's ({metadata['teacher']['name']}, sha256 {wanted[:16]}…), so their token ids differ; "
            "take a student with the teacher's tokenizer"
        )
    if head_width is not None and head_width < metadata["vocab_size"]:
        raise UserError(
            f"the student has {head_width:,} logits, and the teacher's vocabulary has {metadata['vocab_size']:,} "
            "tokens; resize the student's embeddings to that many or more"
        )


def tokenizer_sha256(tokenizer: Any) -> str:
    """What decides how a tokenizer cuts a text into ids, as a SHA-256.

    That is the vocabulary with the added tokens, the merges or scores, the normalizer and the pre-tokenizer of the fast
    tokenizer's JSON; of a tokenizer without one, its class and vocabulary. Truncation, padding, what is put around a
    text (bos) and the chat template stay out: they change no id.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    named: JsonDict = {"vocab": tokenizer.get_vocab()}
    if backend is None:
        named["class"] = type(tokenizer).__name__
    else:
        parts = json.loads(backend.to_str())
        model = {name: value for name, value in parts["model"].items() if name not in ("vocab", "dropout")}
        if "merges" in model:  # "a b" or ["a", "b"], by the version that wrote them
            model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        if isinstance(parts["model"].get("vocab"), list):  # unigram: pieces with scores
            model["pieces"] = parts["model"]["vocab"]
        named |= {"model": model, "normalizer": parts["normalizer"], "pre_tokenizer": parts["pre_tokenizer"]}
    return hashlib.sha256(canonical(named)).hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """The tokenizer's real vocabulary: one more than its highest id, added tokens included."""
    ids: list[int] = list(tokenizer.get_vocab().values())
    return max(ids) + 1
