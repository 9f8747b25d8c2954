"""Facts about reasoning blocks: what was said, what a template opened, and how an answer without an end is graded."""

from pathlib import Path

import pytest
from test_metrics import answer, tallied

from gristmill.config.schema import ModelConfig
from gristmill.engines.answers import read_answer
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.prepared import Prepared
from gristmill.thinking import opening, spoken
from gristmill.types import Message, Request, Sampling


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Paris", "Paris"),
        ("<think>Rome?</think>\nParis", "\nParis"),
        ("Rome?</think>Paris", "Paris"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>Rome", None),
        ("<think>a</think>b<think>c", None),
        ("<think></think>", ""),
        ("", ""),
    ],
)
def test_what_is_said_stands_after_the_last_block(text: str, said: str | None) -> None:
    assert spoken(text) == said


@pytest.mark.parametrize(
    ("prompt", "tag"), [("x<think>\n", "<think>\n"), ("<think>", "<think>"), ("<think>\n\n</think>\n\n", ""), ("x", "")]
)
def test_a_prompt_that_ends_with_an_opening_tag_opens_a_block(prompt: str, tag: str) -> None:
    assert opening(prompt) == tag


def test_thinking_is_not_graded_and_an_answer_that_never_came_is_invalid() -> None:
    texts = ["<think>Rome</think>Paris", "Rome</think>Paris", "<think>Paris", "<think>Paris</think>\n"]
    grades, metrics = tallied([answer(str(n), text, "Paris") for n, text in enumerate(texts)])
    assert [line["grades"]["exact_match"] for line in grades] == [True, True, False, False]
    assert [line["grades"]["contains"] for line in grades] == [True, True, False, False]
    assert [line["invalid"] for line in grades] == [None, None, "unclosed_thinking", "empty"]
    assert metrics["invalid"]["unclosed_thinking"] == 1


TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.mark.parametrize("known", [True, False], ids=["a token", "bytes"])
@pytest.mark.parametrize(("end", "text"), [("<think>\n", "<think>\ngreen blue"), ("", "green blue")])
def test_an_answer_gets_the_tag_that_the_template_opened(tmp_path: Path, end: str, text: str, known: bool) -> None:
    encoder = _encoder(tmp_path, TEMPLATE + end.replace("\n", "{{ '\\n' }}"), ["<think>"] if known else [])
    request = Request("r", 0, "", (Message(role="user", content="red"),), Sampling(max_new_tokens=9))
    ids = encoder.encode([request.messages])[0]
    generated = encoder.tokenizer("green blue", add_special_tokens=False)["input_ids"]
    completion = read_answer(Prepared(request, ids, 0), [*generated, encoder.tokenizer.eos_token_id], encoder, 0.0)
    assert (completion.text, completion.completion_tokens, completion.finish_reason) == (text, len(generated), "stop")


def _encoder(folder: Path, template: str, added: list[str]) -> ChatEncoder:
    """A tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    plain = Tokenizer(models.BPE({word: place for place, word in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=template, eos_token="<eos>")
    tokenizer.add_tokens(added)
    tokenizer.save_pretrained(folder)
    return ChatEncoder(folder, ModelConfig(source="here"))
