"""A rank other than 0 of continuous batching on several GPUs: for every session a manager that follows the first's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.engines.continuous.manager import Session, make_manager
from gristmill.engines.ranks import join, serve
from gristmill.types import JsonDict


def follow(told: JsonDict, sessions: Iterator[JsonDict]) -> None:
    """Load this rank's part, and go through one session after the other."""
    from gristmill.engines.continuous import flash
    from gristmill.engines.continuous.rows import RowTable
    from gristmill.engines.loading import load_model

    on_gpu, size = bool(told["on_gpu"]), int(told["size"])
    if on_gpu:
        flash.offer()
    join(int(told["rank"]), size, told["place"], on_gpu)
    model = load_model(Path(told["folder"]), ModelConfig.model_validate(told["model"]), on_gpu, ranks=size)
    for order in sessions:
        session = Session.from_json(order)
        table = RowTable(session.rows, model.device)
        manager = make_manager(model, session, table, on_gpu)
        try:
            manager.start()
            manager._generation_thread.join()
        finally:
            manager.stop()
            manager.destroy()


if __name__ == "__main__":
    serve(follow)
