"""Facts about the documents: they name every key and file, and their examples are valid."""

import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from pydantic import BaseModel

from gristmill.config.load import load_config
from gristmill.config.schema import Config

EXAMPLES = [ROOT / "config/config.yaml", *sorted((ROOT / "config/examples").glob("*.yaml"))]


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A config section and all sections below it."""
    found = {model}
    for field in model.model_fields.values():
        for candidate in [field.annotation, *getattr(field.annotation, "__args__", ())]:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found |= sections(candidate)
    return found


@pytest.mark.parametrize("section", sorted(sections(Config), key=lambda model: model.__name__))
def test_the_config_readme_explains_every_key(section: type[BaseModel]) -> None:
    text = (ROOT / "config/README.md").read_text()
    missing = [name for name in section.model_fields if not re.search(rf"\b{name}\b", text)]
    assert not missing


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_config_is_valid(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = yaml.safe_load(path.read_text())
    for dataset in value["datasets"].values():
        if not (ROOT / dataset["path"]).exists():  # a program beside the example makes it
            (tmp_path / dataset["path"]).write_text("{}")
    monkeypatch.chdir(tmp_path)
    load_config(value, [tmp_path, ROOT])


def test_the_config_in_the_readme_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"(    datasets:\n(?:    .*\n)+)", (ROOT / "README.md").read_text())
    assert block is not None
    for name in ("my_questions.jsonl", "my_prompt.jinja", "my_judge.jinja"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = load_config(yaml.safe_load(block[1]), [tmp_path])
    assert config.models["referee"].gpus_per_model == 4


EVALUATION = re.findall(r"((?:    .*\n)+)", (ROOT / "docs/evaluation.md").read_text())


@pytest.mark.parametrize("number", range(len(EVALUATION)))
def test_every_config_in_the_evaluation_page_is_valid(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = yaml.safe_load(EVALUATION[number])
    for entry in (*value["datasets"].values(), *value["prompts"].values()):
        (tmp_path / entry.get("path", entry.get("file"))).write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = load_config(value, [tmp_path])
    kinds = [judge.kind for judge in config.judges.values()]
    assert kinds == [[], ["pairwise"] * 3, ["score"], ["pairwise"]][number]


def test_the_evaluation_page_has_four_configs() -> None:
    assert len(EVALUATION) == 4


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_every_link_in_the_documents_leads_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    modules = [path.name for path in (ROOT / "scripts/gristmill").glob("*.py") if not path.name.startswith("_")]
    packages = [f"{path.name}/" for path in (ROOT / "scripts/gristmill").iterdir() if (path / "__init__.py").exists()]
    assert [name for name in [*modules, *packages] if name not in text] == []
