"""The model card: README.md of a trained model's folder, with the recipe, the data and the numbers."""

from __future__ import annotations

from gristmill.config.specs import TrainingSpec
from gristmill.types import JsonDict

_OBJECTIVES = {
    "sft": "supervised fine-tuning on answers",
    "distill": "distillation from a teacher's stored log-probabilities",
    "pretrain": "next-token training",
}
#: What of the recipe says what is trained on what; the rest of it is the table.
_NAMED = {"objective", "base", "architecture", "tokenizer", "dataset", "prompt", "text_field", "logits"}


def model_card(spec: TrainingSpec, weights: JsonDict, metrics: JsonDict) -> str:
    """The card's Markdown."""
    return "\n".join([_front_matter(spec, weights), f"# {spec.name}", "", *_what(spec, weights, metrics), ""])


def _front_matter(spec: TrainingSpec, weights: JsonDict) -> str:
    base = [f"base_model: {weights['source']}"] if spec.training.base is not None and weights.get("source") else []
    return "\n".join(["---", "library_name: transformers", "pipeline_tag: text-generation", *base, "---", ""])


def _what(spec: TrainingSpec, weights: JsonDict, metrics: JsonDict) -> list[str]:
    training = spec.training
    start = (
        f"{training.base} ({weights.get('source')})" if training.base else f"fresh weights ({training.architecture})"
    )
    adapters = f", {metrics['trained_parameters']:,} of them trained as adapters" if training.lora else ""
    texts = metrics["data"]["texts"]
    lines = [
        f"Made by gristmill: {_OBJECTIVES[training.objective]}, from {start}, {metrics['parameters']:,} "
        f"parameters{adapters}.",
        "",
        "## Data",
        "",
        f"- {_source(spec)}: {texts['count']:,} texts, {texts['tokens']:,} tokens (SHA-256 {texts['sha256'][:16]}), of "
        f"which {metrics['data']['rows']:,} rows are trained on",
        f"- seen: {metrics['epochs']} epochs, {metrics['tokens']:,} tokens, {metrics['targets']:,} targets",
        "",
        "## Recipe",
        "",
        "| setting | value |",
        "|---|---|",
        f"| effective batch | {metrics['batch']['factors']} |",
    ]
    recipe = training.model_dump(mode="json", exclude_none=True)
    lines += [f"| {name} | {_cell(value)} |" for name, value in recipe.items() if name not in _NAMED]
    return [*lines, "", "## Numbers", "", "| number | value |", "|---|---|", *_numbers(metrics)]


def _source(spec: TrainingSpec) -> str:
    training = spec.training
    if training.logits is not None:
        return f"the stored logits {training.logits}"
    column = f", column {training.text_field}" if training.text_field else f", prompt {training.prompt}"
    return f"the dataset {training.dataset}{column}"


def _numbers(metrics: JsonDict) -> list[str]:
    rows = [("steps", metrics["steps"]), ("step of the result", metrics["result_of_step"])]
    last = metrics["last_step"] or {}
    rows += [(f"training {name}", last[name]) for name in ("loss", "cross_entropy", "kl") if name in last]
    for when, line in (metrics["evaluation"] or {}).items():
        rows += [(f"evaluation loss, {when} (step {line['step']})", line["evaluation_loss"])] if line else []
    rows += [("seconds", metrics["seconds"]), ("tokens a second", metrics["tokens_per_second"])]
    if metrics["model_flops_utilization"] is not None:
        rows.append(("model FLOPs utilization", metrics["model_flops_utilization"]))
    return [f"| {name} | {_cell(value)} |" for name, value in rows]


def _cell(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
