"""A rank other than 0 of a teacher that is cut over several GPUs: it does the same batches and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.engines.ranks import join, serve
from gristmill.types import JsonDict


def follow(told: JsonDict, batches: Iterator[JsonDict]) -> None:
    """Load this rank's part, and go through one batch after the other."""
    import torch

    from gristmill.engines.loading import load_model
    from gristmill.logits.scoring import Head

    on_gpu, size = bool(told["on_gpu"]), int(told["size"])
    join(int(told["rank"]), size, told["place"], on_gpu)
    head = Head(load_model(Path(told["folder"]), ModelConfig.model_validate(told["model"]), on_gpu, ranks=size))
    with torch.inference_mode():
        for batch in batches:
            for _ in head.chunks(batch["rows"]):
                pass


if __name__ == "__main__":
    serve(follow)
