"""Facts about a worker: nothing is asked twice, nothing is lost to a signal, and no hole passes for an answer."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gristmill import fence, journal, locks, worker
from gristmill.adoption import adopt
from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.errors import UserError
from gristmill.files import read_jsonl, with_checksum, write_json, write_jsonl
from gristmill.journal import Segment
from gristmill.locks import try_lock
from gristmill.planning.workers import Worker
from gristmill.stopping import Interrupted
from gristmill.types import Completion, Failure, Gpu, JsonDict, Outcome, Request
from gristmill.worker import Shard, run_shard

SCRIPTS = Path(__file__).parents[1] / "scripts"
ECHO = ModelConfig(engine="echo")
WEIGHTS: JsonDict = {"name": "m", "folder": None, "weights_hash": "echo", "context_tokens": None}
NO_WAIT = GpusConfig(wait_minutes=0)


def shard_of(folder: Path, names: Sequence[str], name: str = "1-of-1", content: str = "say") -> Shard:
    """A shard with a request for each name."""
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "stop": [], "seed": 0}
    lines = [
        {"id": row, "sample": 0, "variant": "", "messages": [{"role": "user", "content": f"{content} {row}"}],
         "sampling": sampling, "prompt_tokens": 2}
        for row in names
    ]  # fmt: skip
    path = folder / "shards" / f"{name}.jsonl"
    write_jsonl(path, map(with_checksum, lines))
    samples = folder / "gpu" / f"{name}.jsonl"
    return Shard("runs/a", name, path, folder / "journal", folder / "parts" / f"{name}.jsonl", samples, Worker(gpus=1))


def work(shard: Shard, model: ModelConfig = ECHO) -> None:
    run_shard(shard, model, WEIGHTS, NO_WAIT, 1)


def generate_command(folder: Path, shard: Shard) -> list[str]:
    """The program for a shard, with weights.json of the folder."""
    spec = {"name": "m", "model": {"engine": "echo"}}
    command = [sys.executable, str(SCRIPTS / "generate.py"), "--spec", json.dumps(spec), "--unit", "runs/a"]
    command += ["--weights", str(folder / "weights.json"), "--shard", str(shard.requests)]
    return [*command, "--journal", str(shard.journal), "--out", str(shard.part), "--gpu-samples", str(folder / "gpu")]


def part(shard: Shard) -> dict[str, Any]:
    """Row → text of the part, in its order."""
    return {line["id"]: line["text"] for line in read_jsonl(shard.part)}


def asked(folder: Path) -> list[str]:
    """Every row a model was ever asked, once for each time, by the journal."""
    return [name for segment in sorted(folder.glob("journal/*.jsonl")) for name in asked_in(segment)]


def asked_in(segment: Path) -> list[str]:
    lines = [line for line in segment.read_bytes().split(b"\n")[:-1] if line.startswith(b'{"key"')]
    return [(record.get("completion") or record["failure"])["id"] for record in map(json.loads, lines)]


class FakeEngine:
    """Answers with its own name; rows in `failing` fail, and `edit` may change what comes back."""

    name = "fake"

    def __init__(self, failing: Sequence[str] = (), edit: Any = list) -> None:
        self.failing, self.edit, self.closed, self.stopped = failing, edit, False, False

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        return [1 for _ in requests]

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        yield from self.edit([self._answer(request) for request in reversed(requests)])

    def _answer(self, request: Request) -> Outcome:
        if request.id in self.failing:
            return Failure(*request.rid, "out_of_memory", "no room for 9 tokens")
        return Completion(*request.rid, f"fake {request.id}", "stop", 1, 1, 0.1)

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an engine in the place of the one that the config names."""

    def put(engine: FakeEngine) -> FakeEngine:
        monkeypatch.setattr(worker, "open_engine", lambda *_: (engine, "the test says so"))
        return engine

    return put


# ---- nothing twice


def test_a_part_has_every_request_in_the_shards_order_with_its_key(tmp_path: Path, use: Any) -> None:
    use(FakeEngine())  # answers in reverse
    shard = shard_of(tmp_path, ["c", "a", "b"])
    work(shard)
    assert part(shard) == {"c": "fake c", "a": "fake a", "b": "fake b"}
    assert list(part(shard)) == ["c", "a", "b"]
    keys = list(worker.keyed_requests(shard.requests, ECHO, WEIGHTS))
    assert [line["key"] for line in read_jsonl(shard.part)] == keys


def test_a_second_run_asks_nothing_and_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of(tmp_path, ["a", "b"])
    work(shard)
    before = shard.part.read_bytes()
    shard.part.unlink()
    monkeypatch.setattr(worker, "open_engine", None)  # calling it would fail
    work(shard)
    assert shard.part.read_bytes() == before
    assert asked(tmp_path) == ["a", "b"]


def test_rows_that_move_to_another_shard_or_are_new_cost_only_what_is_new(tmp_path: Path) -> None:
    for name, rows in (("1-of-2", ["a", "c"]), ("2-of-2", ["b", "d"])):
        work(shard_of(tmp_path, rows, name))
    whole = shard_of(tmp_path, ["new", "a", "b", "c", "d"], "1-of-1")
    work(whole)
    assert part(whole) == {name: f"say {name}" for name in ("new", "a", "b", "c", "d")}
    assert sorted(asked(tmp_path)) == ["a", "b", "c", "d", "new"]


def test_answers_that_another_shard_takes_over_meanwhile_are_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    work(shard_of(old, ["a", "b"]))
    whole = shard_of(new, ["a", "b"])
    shard = replace(whole, left_behind=(old / "journal",))

    def behind_another(folder: Path, *rest: Any) -> int:
        for path in (old / "journal").glob("*.jsonl"):
            if not (folder / path.name).exists():  # between this shard's look into the journal and its own taking over
                os.link(path, folder / path.name)
        return adopt(folder, *rest)

    monkeypatch.setattr(worker, "adopt", behind_another)
    monkeypatch.setattr(worker, "open_engine", None)  # calling it would fail
    work(shard)
    assert part(shard) == {"a": "say a", "b": "say b"}


def test_an_edited_prompt_is_asked_again(tmp_path: Path) -> None:
    work(shard_of(tmp_path, ["a"]))
    edited = shard_of(tmp_path, ["a"], content="shout")
    work(edited)
    assert part(edited) == {"a": "shout a"}
    assert asked(tmp_path) == ["a", "a"]


def test_an_empty_shard_makes_an_empty_part(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [])
    work(shard)
    assert shard.part.read_bytes() == b""
    assert asked(tmp_path) == []


def test_the_journal_says_who_worked(tmp_path: Path, use: Any) -> None:
    use(FakeEngine())
    shard = shard_of(tmp_path, ["a", "b"])
    work(shard)
    (found,) = journal.workers(shard.journal, {line["key"] for line in read_jsonl(shard.part)})
    described = {"unit": "runs/a", "shard": "1-of-1", "engine": "fake", "why": "the test says so", "devices": []}
    assert found.items() >= described.items()
    assert (found["rows"], found["completion_tokens"], found["prompt_tokens"]) == (2, 2, 2)


def test_the_time_to_load_is_in_the_log_and_the_journal_also_of_a_worker_that_crashed(
    tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(FakeEngine(edit=lambda outcomes: [*outcomes[:1], outcomes[0]]))  # the second answer is a bug
    load = worker.open_engine
    monkeypatch.setattr(worker, "open_engine", lambda *words: (time.sleep(0.3), load(*words))[1])
    shard = shard_of(tmp_path, ["a", "b"])
    with pytest.raises(RuntimeError, match="does not wait for an answer"):
        work(shard)
    (found,) = journal.workers(shard.journal, set(worker.keyed_requests(shard.requests, ECHO, WEIGHTS)))
    assert found["rows"] == 1
    assert 0.3 <= found["load_seconds"] < 3
    assert "engine fake (the test says so), loaded in 0.3 s on the CPU" in capsys.readouterr().err


def test_answers_made_on_another_node_are_used_and_stay_that_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("socket.gethostname", lambda: "node7")
        work(shard_of(tmp_path, ["a", "b"], "1-of-2"))
    shard = shard_of(tmp_path, ["a", "b", "c"])
    work(shard)
    assert sorted(asked(tmp_path)) == ["a", "b", "c"]
    made = {
        one["host"]: one["rows"]
        for one in journal.workers(shard.journal, {line["key"] for line in read_jsonl(shard.part)})
    }
    assert made == {"node7": 2, socket.gethostname(): 1}


# ---- failures


def test_failed_rows_stop_the_worker_with_names_and_reasons(tmp_path: Path, use: Any) -> None:
    engine = use(FakeEngine(failing=["b", "c"]))
    shard = shard_of(tmp_path, ["a", "b", "c"])
    with pytest.raises(UserError) as caught:
        work(shard)
    message = str(caught.value)
    assert "2 rows failed" in message
    assert "b#0 (out_of_memory)" in message
    assert "c#0 (out_of_memory)" in message
    assert "run again to retry only these" in message
    assert engine.closed
    assert not shard.part.exists()


def test_the_next_run_retries_only_the_failed_rows(tmp_path: Path, use: Any) -> None:
    use(FakeEngine(failing=["b"]))
    shard = shard_of(tmp_path, ["a", "b", "c"])
    with pytest.raises(UserError):
        work(shard)
    use(FakeEngine())
    work(shard)
    assert sorted(asked(tmp_path)) == ["a", "b", "b", "c"]
    assert list(part(shard)) == ["a", "b", "c"]


def test_rows_that_may_fail_stand_in_the_part_without_a_text_and_are_asked_again(tmp_path: Path, use: Any) -> None:
    use(FakeEngine(failing=["b"]))
    shard = replace(shard_of(tmp_path, ["a", "b", "c", "d"]), max_failed_ratio=0.25)
    work(shard)
    lines = {line["id"]: (line["text"], line["finish_reason"]) for line in read_jsonl(shard.part)}
    assert lines["b"] == (None, "out_of_memory")
    assert list(lines) == ["a", "b", "c", "d"]
    use(FakeEngine())
    work(shard)
    assert part(shard)["b"] == "fake b"
    assert sorted(asked(tmp_path)) == ["a", "b", "b", "c", "d"]


@pytest.mark.parametrize(("failing", "ratio"), [(["b", "c"], 0.25), (["a", "b", "c", "d"], 1.0)])
def test_too_many_failed_rows_or_all_of_them_stop_the_worker(
    tmp_path: Path, use: Any, failing: list[str], ratio: float
) -> None:
    use(FakeEngine(failing=failing))
    shard = replace(shard_of(tmp_path, ["a", "b", "c", "d"]), max_failed_ratio=ratio)
    with pytest.raises(UserError, match=rf"{len(failing)} rows failed \(max_failed_ratio {ratio:g}\)"):
        work(shard)
    assert not shard.part.exists()


def test_an_engine_that_crashes_keeps_what_it_had_answered(tmp_path: Path, use: Any) -> None:
    def crash(outcomes: list[Outcome]) -> Iterator[Outcome]:
        yield from outcomes[:2]
        raise RuntimeError("CUDA error")

    engine = use(FakeEngine(edit=crash))
    shard = shard_of(tmp_path, ["a", "b", "c"])
    with pytest.raises(RuntimeError, match="CUDA error"):
        work(shard)
    assert engine.closed
    use(FakeEngine())
    work(shard)
    assert sorted(asked(tmp_path)) == ["a", "b", "c"]


STRANGER = Completion("stranger", 0, "", "hello", "stop", 1, 1, 0.1)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda outcomes: outcomes[1:], "answered 2 of 3 requests, not c#0"),
        (lambda outcomes: [], "answered 0 of 3 requests, not a#0, b#0, c#0"),
        (lambda outcomes: [*outcomes, STRANGER], "answered stranger#0, which does not wait"),
        (lambda outcomes: [*outcomes[:2], outcomes[0]], "answered c#0, which does not wait"),
        (lambda outcomes: [*outcomes, outcomes[0]], "answered c#0, which does not wait"),
    ],
    ids=["too few", "none", "unknown", "one twice and one not at all", "one twice"],
)
def test_an_engine_that_answers_other_than_it_was_asked_is_an_error_and_not_a_hole(
    tmp_path: Path, use: Any, edit: Any, said: str
) -> None:
    use(FakeEngine(edit=edit))
    shard = shard_of(tmp_path, ["a", "b", "c"])
    with pytest.raises(RuntimeError, match=f"engine fake {said}"):
        work(shard)
    assert not shard.part.exists()


# ---- set-ups that cannot work


@pytest.mark.parametrize("damage", ["gone", "cut", "no request"])
def test_a_shard_that_cannot_be_read_is_one_line_and_its_folder_goes(tmp_path: Path, damage: str) -> None:
    shard = shard_of(tmp_path, ["a"])
    if damage == "gone":
        shard.requests.unlink()
    else:
        shard.requests.write_text('{"id": "a", "samp' if damage == "cut" else "{}\n")
    write_json(tmp_path / "weights.json", WEIGHTS)
    result = subprocess.run(generate_command(tmp_path, shard), stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "1-of-1.jsonl cannot be read" in result.stderr
    assert "the shards are removed, run again" in result.stderr
    assert not shard.requests.parent.exists()  # so that Snakemake splits again


def test_weights_that_are_gone_are_named_with_the_next_step(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, ["a"])
    weights = WEIGHTS | {"folder": str(tmp_path / "gone")}
    with pytest.raises(UserError, match="gone with the weights of m is gone; snakemake --forcerun prepare_model"):
        run_shard(shard, ModelConfig(source="x"), weights, NO_WAIT, 1)


def test_weights_that_changed_since_they_were_prepared_are_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_of(tmp_path, ["a"])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    weights = WEIGHTS | {"folder": str(tmp_path / "model"), "files": {"config.json": 9}, "weights_hash": "x"}
    monkeypatch.setattr(worker, "open_engine", None)  # calling it would fail
    with pytest.raises(UserError, match=r"prepared \(config\.json has 2 bytes, had 9\); snakemake --forcerun"):
        run_shard(shard, ModelConfig(source="x"), weights, NO_WAIT, 1)


@pytest.mark.parametrize("devices", [[0], []])
def test_devices_that_may_not_be_used_here_do_not_become_a_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[int]
) -> None:
    gpus = [asdict(Gpu(index, f"GPU-{index}", "H100", 81559, 0)) for index in range(2)]
    write_json(tmp_path / "gpus.json", gpus)
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "gpus.json"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    config = GpusConfig.model_validate({"devices": devices})
    with pytest.raises(UserError, match=r"gpus\.devices is \[.*set it to auto"):
        run_shard(shard_of(tmp_path, ["a"]), ModelConfig(source="x"), WEIGHTS, config, 1)


def test_two_workers_of_one_shard_do_not_run_side_by_side(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, ["a"])
    shard.journal.mkdir()
    assert try_lock(shard.journal / "1-of-1.lock", "an orphan") is not None
    with pytest.raises(UserError, match=rf"held by pid {os.getpid()} \(an orphan\)"):
        work(shard)
    assert not shard.part.exists()


# ---- signals


def test_a_signal_in_a_batch_keeps_that_batch_and_asks_no_other(tmp_path: Path, use: Any) -> None:
    def stop_in_the_first_batch(outcomes: list[Outcome]) -> Iterator[Outcome]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield from outcomes[:2]
        if not engine.stopped:
            yield from outcomes[2:]

    engine = use(FakeEngine(edit=stop_in_the_first_batch))
    shard = shard_of(tmp_path, ["a", "b", "c"])
    with pytest.raises(Interrupted, match="SIGTERM"):
        work(shard)
    assert engine.closed
    assert asked(tmp_path) == ["c", "b"]
    assert not shard.part.exists()


def test_a_job_whose_snakemake_was_replaced_leaves_and_writes_no_part(
    tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(fence.RUN, "old")
    locks.release(fence.claim("old"))

    def replaced(outcomes: list[Outcome]) -> Iterator[Outcome]:
        yield outcomes[0]
        locks.release(fence.claim("new"))
        yield outcomes[1]

    use(FakeEngine(edit=replaced))
    shard = shard_of(tmp_path, ["a", "b"])
    with pytest.raises(UserError, match=r"1-of-1\.jsonl is not written"):
        work(shard)
    assert sorted(asked(tmp_path)) == ["a", "b"]  # what it knew stays known
    assert not shard.part.exists()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_stopped_worker_keeps_what_is_done_and_the_next_asks_only_the_rest(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    rows = [f"r{row}" for row in range(60)]
    shard = shard_of(tmp_path, rows)
    write_json(tmp_path / "weights.json", WEIGHTS)
    command = generate_command(tmp_path, shard)
    environment = {"GRISTMILL_ECHO_SECONDS": "0.1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as child:
        while len(asked(tmp_path)) < 3:
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(number)
        _, said = child.communicate()
    assert child.returncode == status
    assert "Traceback" not in said
    assert number == signal.SIGKILL or f"stopped by {number.name}; finished rows are in" in said
    done = asked(tmp_path)
    assert 3 <= len(done) < len(rows)
    assert not shard.part.exists()
    work(shard)
    assert sorted(asked(tmp_path)) == sorted(rows)  # each of them once
    assert part(shard) == {row: f"say {row}" for row in rows}


def test_a_torn_last_record_is_asked_again(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, ["a", "b"])
    work(shard)
    (segment,) = shard.journal.glob("*.jsonl")
    data = segment.read_bytes()
    segment.write_bytes(data[: data.index(b'"text":"say b"')])
    work(shard)
    assert part(shard) == {"a": "say a", "b": "say b"}
    assert sorted(asked(tmp_path)) == ["a", "b"]


def test_answers_of_another_model_do_not_count(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, ["a"])
    (other,) = worker.keyed_requests(shard.requests, ModelConfig(engine="echo", dtype="float16"), WEIGHTS)
    with Segment(shard.journal, {}) as segment:
        segment.append(other, Completion("a", 0, "", "from another model", "stop", 1, 1, 0.1))
    work(shard)
    assert part(shard) == {"a": "say a"}
