"""Run by test_logits_vllm.py in an environment with vllm: a teacher's rows by vLLM, as one line of JSON.

python tests/logits_vllm_program.py MODEL_FOLDER TOKENS_JSON K
"""

import json
import sys
from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.logits.storage import LogitsRow
from gristmill.logits.texts import Window, WindowId
from gristmill.logits.vllm import VllmTeacher


def main(folder: Path, texts: list[list[int]], k: int) -> list[dict[str, Any]]:
    model = ModelConfig.model_validate({"source": str(folder), "dtype": "float32", "engine": "vllm"})
    teacher = VllmTeacher(folder, model, k, False, print)
    windows = [(str(n), Window(WindowId(str(n), 0, "", 0), 1 + n, tokens)) for n, tokens in enumerate(texts)]
    found = dict(teacher.score(windows))
    teacher.close()
    names = ("top_ids", "top_logprobs", "tail_logprob", "target_logprob")
    rows = [found[key] for key, _ in windows]
    assert all(isinstance(row, LogitsRow) for row in rows), rows
    return [{name: getattr(row, name).tolist() for name in names} for row in rows]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))))
