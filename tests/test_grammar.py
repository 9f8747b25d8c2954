"""Facts about answers that follow a JSON Schema: they parse and validate, and belong to their row as any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Project, echo_config
from test_decoding import LOGGED, TINY, engine_of, told, watched

from gristmill.codec import request_from_json, request_to_json, sampling_to_json
from gristmill.config.schema import ModelConfig, SamplingConfig
from gristmill.engines.echo import EchoEngine
from gristmill.engines.static.engine import StaticEngine
from gristmill.errors import UserError
from gristmill.types import Completion, JsonDict, Message, Request, Sampling

torch = pytest.importorskip("torch")

VERDICT: JsonDict = {
    "type": "object",
    "properties": {
        "reason": {"type": "string", "maxLength": 12},
        "verdict": {"enum": ["A", "B", "C"]},
        "score": {"type": "integer", "minimum": 1, "maximum": 10},
        "sure": {"type": "boolean"},
    },
    "required": ["reason", "verdict", "score", "sure"],
    "additionalProperties": False,
}
FLAT: JsonDict = {
    "type": "object",
    "properties": {"label": {"const": "yes"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    "required": ["tags"],
    "additionalProperties": False,
}
#: More than the longest document, whose every character may be escaped (\\uXXXX).
MOST = 160
SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.95, "seed": 3},
    "top-k": {"temperature": 0.7, "top_k": 5, "seed": 1},
    "penalty": {"repetition_penalty": 1.2},
}


def sampling(schema: JsonDict | None, **settings: Any) -> Sampling:
    values = {"max_new_tokens": MOST, "json_schema": schema, **settings}
    return SamplingConfig.model_validate(values).for_requests()


def ask(count: int, drawn: Sampling) -> list[Request]:
    texts = ["Judge the answer. " * (1 + n % 3) + f"Number {n}." for n in range(count)]
    return [Request(f"r{n}", 0, "", (Message(role="user", content=text),), drawn) for n, text in enumerate(texts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("bytes"), "Llama")


def byte_model(folder: Path, kind: str, **changes: Any) -> Path:
    """A model of random weights whose tokens are the bytes, and more logits than tokens."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({word: place for place, word in enumerate(["<pad>", "<eos>", *alphabet])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, chat_template=template, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {**TINY, "vocab_size": len(alphabet) + 9, "max_position_embeddings": 512, **changes}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def engine(folder: Path, rows: int | None = None, *, whole: bool = False) -> StaticEngine:
    found = engine_of(folder, rows, whole=whole)
    found._context_tokens = 512
    return found


def documents(engine: StaticEngine, requests: list[Request]) -> dict[str, Any]:
    found = list(engine.generate(requests))
    assert len(found) == len(requests)
    assert {getattr(outcome, "finish_reason", outcome) for outcome in found} == {"stop"}
    return {outcome.id: json.loads(outcome.text or "") for outcome in found if isinstance(outcome, Completion)}


@pytest.mark.parametrize("settings", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("schema", [VERDICT, FLAT], ids=["verdict", "flat"])
def test_answers_follow_the_schema_in_its_order(folder: Path, schema: JsonDict, settings: dict[str, Any]) -> None:
    found = documents(engine(folder, 5), ask(12, sampling(schema, **settings)))
    for document in found.values():
        jsonschema.validate(document, schema)
        assert list(document) == [name for name in schema["properties"] if name in document]
    if "temperature" in settings:
        assert len({json.dumps(document) for document in found.values()}) > 3


@pytest.mark.parametrize("settings", SAMPLINGS.values(), ids=SAMPLINGS)
def test_an_answer_does_not_depend_on_the_batch_nor_on_the_way_it_is_made(
    folder: Path, settings: dict[str, Any]
) -> None:
    requests = ask(9, sampling(VERDICT, **settings))
    alone = {name: found for one in requests for name, found in told(list(engine(folder).generate([one]))).items()}
    for rows in (2, 9):
        assert told(list(engine(folder, rows).generate(requests))) == alone
    assert told(list(engine(folder, 4, whole=True).generate(requests))) == alone


def test_a_model_that_answers_in_whole_batches_follows_the_schema_too(tmp_path: Path) -> None:
    found = engine(byte_model(tmp_path, "Mistral", sliding_window=8), 4)
    assert found._obstacle
    for document in documents(found, ask(6, sampling(VERDICT, temperature=1.0))).values():
        jsonschema.validate(document, VERDICT)


def test_rows_of_several_schemas_and_of_none_are_answered_together(folder: Path) -> None:
    wanted = {"r0": VERDICT, "r1": FLAT, "r2": None}
    requests = [
        replace(one, sampling=sampling(schema, max_new_tokens=MOST if schema else 9))
        for one, schema in zip(ask(3, sampling(None)), wanted.values(), strict=True)
    ]
    found = {outcome.id: outcome for outcome in engine(folder).generate(requests)}
    plain = {outcome.id: outcome for outcome in engine(folder).generate(requests[2:])}
    for name, schema in wanted.items():
        outcome = found[name]
        assert isinstance(outcome, Completion)
        if schema is not None:
            jsonschema.validate(json.loads(outcome.text or ""), schema)
        else:
            assert outcome.text == plain[name].text  # type: ignore[union-attr]


def test_rows_that_begin_again_for_want_of_memory_follow_the_schema(folder: Path) -> None:
    requests = ask(8, sampling(VERDICT, temperature=1.0))
    expected = told(list(engine(folder).generate(requests)))
    small, calls = engine(folder, 8), 0

    def run_out(shape: tuple[int, int]) -> None:
        nonlocal calls
        calls += 1
        if calls in (6, 30):
            raise torch.OutOfMemoryError("once in a while")

    with watched(small, run_out):
        assert told(list(small.generate(requests))) == expected
    assert calls > 30


def test_an_answer_that_is_cut_says_so(folder: Path) -> None:
    (outcome,) = engine(folder).generate(ask(1, sampling(VERDICT, max_new_tokens=12)))
    assert isinstance(outcome, Completion)
    assert (outcome.finish_reason, outcome.completion_tokens) == ("length", 12)
    assert (outcome.text or "").startswith('{"reason": "')


def test_logits_that_are_not_finite_are_a_failure_also_where_the_schema_forbids_the_token(folder: Path) -> None:
    broken = engine(folder)
    with torch.no_grad():
        broken._model.lm_head.weight[0] = torch.nan
    outcomes = list(broken.generate(ask(3, sampling(VERDICT))))
    assert [getattr(outcome, "reason", None) for outcome in outcomes] == ["non_finite_logits"] * 3


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "nonsense"}, "json_schema cannot be followed: Invalid type: nonsense; simplify it"),
        ({"type": "object", "not": {"type": "string"}}, r'Unimplemented keys: \["not"\]; simplify it'),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}, "regex parse error"),
        ("{", "json_schema is no JSON Schema"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_one_line(folder: Path, schema: Any, said: str) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(UserError, match=said) as caught:
        list(engine(folder).generate(ask(2, Sampling(max_new_tokens=4, json_schema=text))))
    assert "\n" not in str(caught.value)


# ---- config and files


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"json_schema": {"type": "array"}}, "type is 'array', and answers are objects; write type: object"),
        ({"json_schema": {}}, "type is None"),
        ({"json_schema": FLAT, "stop": ["}"]}, r"stop '}' would cut the document of json_schema"),
        ({"json_schema": {"type": "object", "x": float("nan")}}, "it is no JSON"),
        ({"json_schema": "{}"}, "json_schema"),
    ],
)
def test_the_config_takes_schemas_of_objects_without_stop_texts(values: JsonDict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingConfig.model_validate(values)


def test_a_schema_travels_in_the_order_of_its_properties_and_only_where_there_is_one() -> None:
    (request,) = ask(1, sampling(VERDICT))
    line = request_to_json(request)
    assert list(json.loads(line["sampling"]["json_schema"])["properties"]) == ["reason", "verdict", "score", "sure"]
    assert request_from_json(line) == request
    assert "json_schema" not in sampling_to_json(sampling(None))


# ---- the engine without a model


@pytest.mark.parametrize("schema", [VERDICT, FLAT, {"type": "object"}])
def test_echo_writes_a_document_that_follows_the_schema(schema: JsonDict) -> None:
    for outcome in EchoEngine().generate(ask(3, sampling(schema))):
        assert isinstance(outcome, Completion)
        jsonschema.validate(json.loads(outcome.text or ""), schema)


def test_echo_refuses_a_schema_that_it_cannot_follow() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x$"}}, "required": ["a"]}
    with pytest.raises(UserError, match="echo writes no document for a json_schema with pattern; take a simpler one"):
        list(EchoEngine().generate(ask(1, sampling(odd))))


def test_a_schema_in_the_config_comes_through_the_whole_workflow_in_its_order(project: Project) -> None:
    runs = echo_config()["runs"]
    runs["plain"]["sampling"] = {"json_schema": VERDICT}
    project.write_config(echo_config(runs=runs))
    project.done("results/report.html")
    lines = project.lines("runs/plain/generations.jsonl")
    assert len(lines) == 12
    for line in lines:
        jsonschema.validate(json.loads(line["text"]), VERDICT)
        assert list(json.loads(line["text"])) == VERDICT["required"]


# ---- a real vocabulary


@pytest.mark.model
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "drawn"])
def test_the_real_models_answers_follow_the_schema(smollm2_folder: Path, settings: dict[str, Any]) -> None:
    model = ModelConfig.model_validate({"source": str(smollm2_folder), "dtype": "float32"})
    real = StaticEngine(smollm2_folder, model, 8192, on_gpu=False, log=LOGGED.append)
    requests = ask(4, sampling(VERDICT, **settings))
    found = documents(real, requests)
    for document in found.values():
        jsonschema.validate(document, VERDICT)
    assert documents(real, requests[2:3]) == {"r2": found["r2"]}
