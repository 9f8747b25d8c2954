"""Facts about files and texts that set traps: each works exactly, or is refused in one line before any answer."""

import csv
import gzip
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import ROOT, SNAKEMAKE, Project, echo_config
from pyarrow import parquet
from reading import fields, refusal
from whole_way import expected, rows_of, whole_way

from gristmill.config.repeated import refuse_repeated_keys
from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.files import write_jsonl
from gristmill.rows import count_up_to, read_rows
from gristmill.rows.source import MAX_DEPTH
from gristmill.splitting import measure

ENVIRONMENT = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"}


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is looked for."""
    (tmp_path / "no_gpus.json").write_text("[]")
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "no_gpus.json"))


def saved(folder: Path, name: str, content: str | bytes) -> Path:
    data = content.encode("utf-8") if isinstance(content, str) else content
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder / name


# ---- what a file may be


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "a.parquet.gz"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "a pipe, a device or a socket, not a file; write the rows to a file" in refusal(tmp_path / name)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(tmp_path: Path, device: str) -> None:
    (tmp_path / "a.jsonl").symlink_to(device)
    assert "a pipe, a device or a socket" in refusal(tmp_path / "a.jsonl")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(("name", "content"), [("a.csv", "id,x\n1,a\n"), ("a.jsonl", '{"id": 1}\n'), ("a.json", "[]")])
def test_utf_16_without_a_byte_order_mark_is_not_read_as_text_with_nuls(
    tmp_path: Path, encoding: str, name: str, content: str
) -> None:
    message = refusal(saved(tmp_path, name, content.encode(encoding)))
    assert "is UTF-16 or UTF-32 without a byte order mark, or no text; save it as UTF-8" in message


def test_a_csv_header_with_a_nul_is_refused_and_a_cell_with_one_is_kept(tmp_path: Path) -> None:
    assert "the header has a NUL character" in refusal(saved(tmp_path, "a.csv", "number,a\0b\n1,2\n"))
    assert fields(saved(tmp_path, "b.csv", "number,x\n1,a\0b\n")) == [{"number": "1", "x": "a\0b"}]


# ---- delimiters


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", "id;x\n1;2\n", "one column, 'id;x'; it seems to use semicolons, not commas; set the dataset's"),
        ("a.csv", "id;x\n1;2\n", 'delimiter to ";" ("," keeps it as it is)'),
        ("a.csv", "id\tx\n1\t2\n", 'name the file .tsv, or set the dataset\'s delimiter to "\\t"'),
        ("a.tsv", "id,x\n1,2\n", 'name the file .csv, or set the dataset\'s delimiter to ","'),
        ("a.csv", "id;price, EUR\n1;2,5\n", "2 columns, 'id;price, EUR'; it seems to use semicolons"),
        ("a.csv", "id;price, EUR\n1;2\n", "it seems to use semicolons"),
    ],
)
def test_another_delimiter_is_named_with_the_way_to_set_it(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    path = saved(tmp_path, name, content)
    assert reason in refusal(path)
    with pytest.raises(UserError, match="it seems to use"):
        count_up_to(path, 3)


def test_a_header_that_only_mentions_another_delimiter_is_read(tmp_path: Path) -> None:
    content = '"Q1; choose one","Q2; choose one"\nyes,"no, never"\n"a; b",c\n'
    assert fields(saved(tmp_path, "a.csv", content)) == [
        {"Q1; choose one": "yes", "Q2; choose one": "no, never"},
        {"Q1; choose one": "a; b", "Q2; choose one": "c"},
    ]


@pytest.mark.parametrize("delimiter", [";", "\t", "|", "^", " ", ":", "§"])
def test_a_delimiter_that_is_named_is_used(tmp_path: Path, delimiter: str) -> None:
    path = saved(tmp_path, "a.csv.gz", f'id{delimiter}x\n1{delimiter}"2{delimiter},5"\n')
    assert fields(path, delimiter=delimiter) == [{"id": "1", "x": f"2{delimiter},5"}]
    assert count_up_to(path, 5, delimiter) == 1


def test_a_delimiter_that_is_named_is_taken_at_its_word(tmp_path: Path) -> None:
    assert fields(saved(tmp_path, "a.csv", "a;b\n1;2\n"), delimiter=",") == [{"a;b": "1;2"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.json.gz"])
def test_a_delimiter_of_a_format_without_one_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"delimiter is ';', but only \.csv, \.tsv files have one; remove it"):
        read_rows(tmp_path / name, delimiter=";")


# ---- sizes


def nested(depth: int) -> str:
    """A row with so many lists and objects inside one another, itself the first."""
    pairs = (depth - 1) // 2
    rest = (depth - 1) % 2
    return '{"x": ' + '[{"y":' * pairs + "[" * rest + "1" * (not rest) + "]" * rest + "}]" * pairs + "}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "b.json", "c.json"])
def test_the_deepest_row_goes_the_whole_way_and_a_deeper_one_is_refused(tmp_path: Path, name: str) -> None:
    wrap = {"a.json": "[{}]", "b.json": "{}\n{{}}", "c.json": '{{"k":\n {}}}'}.get(name, "{}")
    extra = 1 if name == "c.json" else 0  # the object keyed by id is one more
    path = saved(tmp_path, name, wrap.format(nested(MAX_DEPTH - extra)))
    (first, *_) = rows_of(whole_way(path, 1, id_field=None))
    assert [first] == expected([json.loads(nested(MAX_DEPTH - extra))])
    for depth in (MAX_DEPTH + 1 - extra, MAX_DEPTH + 2, 950, 1100, 100_000):
        message = refusal(saved(tmp_path, name, wrap.format(nested(depth))), id_field=None)
        assert f"nested too deeply, over {MAX_DEPTH} lists and objects inside one another; write the inner" in message


def test_many_shallow_brackets_are_not_deep(tmp_path: Path) -> None:
    row = {"x": [[1]] * 1000, "y": "[" * 1000}
    assert fields(saved(tmp_path, "a.jsonl", json.dumps(row))) == [row]


def test_30_mb_in_one_field_and_10_000_columns_go_the_whole_way(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": "long", "x": "é" * 15_000_000}, {f"c{n}": n for n in range(10_000)}]
    path = saved(tmp_path, "a.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert rows_of(whole_way(path, 2)) == expected(rows)
    buffer = io.StringIO()
    csv.writer(buffer).writerows([rows[1], rows[1].values()])
    (row,) = fields(saved(tmp_path, "a.csv", buffer.getvalue()))
    assert row == {name: str(value) for name, value in rows[1].items()}
    parquet.write_table(pa.Table.from_pylist(rows[1:]), tmp_path / "a.parquet")
    assert fields(tmp_path / "a.parquet") == rows[1:]


# ---- texts


def test_text_that_looks_like_jinja_reaches_prompt_and_answer_as_it_stands(tmp_path: Path) -> None:
    texts = [
        "{{ 7*7 }}",
        "{% for x in y %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{# gone #}",
        "{% raw %}{{ '{{' }}",
        "${7*7} $(id) `id` %s {run} {input}",
    ]
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"id": text, "x": text} for text in texts])
    generations = whole_way(path, 2)
    assert [line["text"] for line in generations] == [f"{text}|{text}|" for text in texts]
    assert [line["messages"][0]["content"] for line in generations] == [f"{text}|{text}|" for text in texts]


def test_line_ends_and_surrogates_inside_strings_go_the_whole_way(tmp_path: Path) -> None:
    rows = [
        {"id": str(n), "x": f"a{odd}b"} for n, odd in enumerate("\u2028\u2029\x85\r\n\x0b\x0c\x1c\0\ud800\udfff\ufeff")
    ]
    path = saved(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    generations = whole_way(path, 3)
    assert rows_of(generations) == expected(rows)
    assert [line["text"] for line in generations] == [f"{row['id']}|{row['x']}|" for row in rows]


def test_a_lone_surrogate_in_a_prompt_is_refused_for_a_model_that_has_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    sampling = {"max_new_tokens": 1, "stop": []}
    named = {"sample": 0, "variant": "", "sampling": sampling}
    texts = {"fine": "a", "broken": "a\ud800"}
    lines = [{"id": name, "messages": [{"role": "user", "content": text}], **named} for name, text in texts.items()]
    write_jsonl(tmp_path / "requests.jsonl", lines[:1])
    weights = {"name": "m", "folder": str(tmp_path / "model"), "context_tokens": None, "weights_hash": "x"}
    model = ModelConfig(source=str(tmp_path / "model"))
    assert measure(tmp_path / "requests.jsonl", model, weights) == [1]
    write_jsonl(tmp_path / "requests.jsonl", lines)
    with pytest.raises(UserError, match=r"broken#0: the prompt holds '\\ud800', half of a surrogate pair"):
        measure(tmp_path / "requests.jsonl", model, weights)
    assert measure(tmp_path / "requests.jsonl", ModelConfig(engine="echo"), weights) == [1, 1]


def test_a_reason_says_at_once(tmp_path: Path) -> None:
    for content in ('{"x": "a\tb"}', '{"x": "\\q"}', '{"x": "open'):
        assert re.search(r"line 1: [A-Z][a-z \\]* at column \d+;", refusal(saved(tmp_path, "a.jsonl", content)))


# ---- keys given twice


def repeated(path: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        refuse_repeated_keys([path])
    return str(caught.value).splitlines()


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = saved(tmp_path, "c.yaml", "runs:\n  a: {x: 1}\n  b: [{y: 1, y: 2}]\n  a: {x: 2}\n# end\nruns: {}\n")
    assert repeated(path) == [
        f"{path}: runs.b.0.y is there twice, on line 3 and line 3; remove one",
        f"{path}: runs.a is there twice, on line 2 and line 4; remove one",
        f"{path}: runs is there twice, on line 1 and line 6; remove one",
    ]


def test_a_key_given_twice_in_json_with_tabs_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "c.json", '{\n\t"a":1,\n\t"a":\t2\n}')
    assert repeated(path) == [f"{path}: a is there twice, on line 2 and line 3; remove one"]


def test_aliases_and_merge_keys_are_no_repetition(tmp_path: Path) -> None:
    text = "base: &b {x: 1}\none: {<<: *b, x: 2}\ntwo: *b\nthree: {1: a, '1': b}\n"
    refuse_repeated_keys([saved(tmp_path, "c.yaml", text), saved(tmp_path, "d.yaml", ""), ROOT / "config/config.yaml"])


def test_a_config_of_nested_aliases_is_looked_through_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    refuse_repeated_keys([saved(tmp_path, "c.yaml", "\n".join(lines))])


# ---- the real workflow


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(SNAKEMAKE), "--cores", "2", *arguments]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, text=True, capture_output=True, timeout=300, check=False
    )


def config_errors(result: subprocess.CompletedProcess[str]) -> list[str]:
    output = f"{result.stdout}{result.stderr}"
    assert result.returncode == 2, output[-2000:]
    assert "Traceback" not in output
    assert "jobs" not in output
    return [line for line in output.splitlines() if line.startswith("config error: ")]


def checkout(folder: Path) -> Path:
    """A copy of the parts of this checkout that run."""
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "Snakefile", folder)
    for name in ("rules", "scripts", "config", "profiles", "envs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.slow
def test_the_workflow_runs_from_a_checkout_whose_path_has_spaces_and_quotes(tmp_path: Path) -> None:
    folder = checkout(tmp_path / 'it\'s a "path" $HOME; [x] é &')
    result = snakemake(folder, "--configfile", "config/examples/echo.yaml")
    assert result.returncode == 0, result.stderr[-3000:]
    lines = (folder / "results/runs/direct/generations.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 21
    assert (folder / "results/report.html").exists()


def test_a_checkout_whose_path_has_braces_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "my {run}")
    (line,) = config_errors(snakemake(folder, "--configfile", "config/examples/echo.yaml"))
    assert line == f"config error: Snakemake cannot run from a path with {{ or }}: {folder}; move the checkout"


@pytest.fixture
def hostile(project: Project) -> Project:
    """A project in a folder with braces, with rows, prompt and title that look like something else."""
    folder = project.folder.rename(project.folder.with_name("{run} of 'mine' *?[x]"))
    made = Project(folder)
    made.write_rows(
        [
            {"id": name, "question": f"{name} {{{{ 7*7 }}}}"}
            for name in ("../x", "a/b", "{run}", "$(id)", "-n", "é ^=,")
        ],
        "rows $(id) '^=,.jsonl",
    )
    made.write_prompt("ask me.jinja", "{{ question }} {run}")
    made.write_config(
        echo_config(
            datasets={"rows": {"path": "rows $(id) '^=,.jsonl"}},
            prompts={"ask": {"file": "ask me.jinja", "system": "{run} \0 $(id) 'q'"}},
            runs={"plain": {"dataset": "rows", "model": "echo", "prompt": "ask"}},
            report={"title": "{run} {x} {{y}}"},
        )
    )
    return made


def test_rows_paths_and_titles_with_braces_and_shell_signs_go_through_the_workflow(hostile: Project) -> None:
    hostile.done(gpu=2)
    names = ["../x", "a/b", "{run}", "$(id)", "-n", "é ^=,"]
    lines = hostile.lines("runs/plain/generations.jsonl")
    assert [line["id"] for line in lines] == names
    assert [line["text"] for line in lines] == [f"{name} {{{{ 7*7 }}}} {{run}}" for name in names]
    assert {line["messages"][0]["content"] for line in lines} == {"{run} \0 $(id) 'q'"}
    assert "{run} {x} {{y}}" in (hostile.folder / "results/report.html").read_text()
    assert "Nothing to be done" in hostile.done(gpu=2)


def test_a_key_given_twice_and_braces_in_a_file_name_stop_the_workflow_before_any_job(project: Project) -> None:
    shutil.copy(project.folder / "rows.jsonl", project.folder / "ro{run}ws.jsonl")
    project.write_config(echo_config(datasets={"rows": {"path": "ro{run}ws.jsonl"}}))
    (line,) = config_errors(
        snakemake(ROOT, "--configfile", str(project.folder / "config.yaml"), "-d", str(project.folder))
    )
    assert (
        "datasets.rows.path is 'ro{run}ws.jsonl', and Snakemake takes {…} in a path for a wildcard; rename it" in line
    )
    with open(project.folder / "config.yaml", "a") as handle:
        handle.write("report: {}\nreport: {title: x}\n")
    (line,) = config_errors(
        snakemake(ROOT, "--configfile", str(project.folder / "config.yaml"), "-d", str(project.folder))
    )
    assert re.search(r"config\.yaml: report is there twice, on line \d+ and line \d+; remove one", line)
    assert not (project.folder / "results").exists()


def test_a_relative_configfile_is_the_one_of_the_folder_where_snakemake_starts(project: Project) -> None:
    command = ["-s", str(ROOT / "Snakefile"), "-n", "--configfile", "config.yaml", "--directory", "elsewhere"]
    elsewhere = project.folder / "elsewhere"
    elsewhere.mkdir()
    (project.folder / "rows.jsonl").rename(elsewhere / "rows.jsonl")
    (project.folder / "ask.jinja").rename(elsewhere / "ask.jinja")
    result = snakemake(project.folder, *command)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "render_requests" in result.stdout + result.stderr
