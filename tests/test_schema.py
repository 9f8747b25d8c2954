"""Facts about config/config.schema.json: it is what the typed config says, and the demo's config satisfies it."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from gristmill.config.schema import Config, json_schema
from gristmill.files import read_json

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "config" / "config.schema.json"


def test_the_schema_file_is_what_the_classes_say() -> None:
    assert read_json(SCHEMA) == json_schema(), "config/config.schema.json is out of step; run python scripts/schema.py"


def test_the_demos_config_satisfies_the_schema() -> None:
    jsonschema.validate(yaml.safe_load((ROOT / "config" / "config.yaml").read_text()), read_json(SCHEMA))


@pytest.mark.parametrize(
    "config", [{}, {"datasets": {}, "models": {}, "prompts": {}, "runs": {}, "runz": {}}, {"runs": {"a b": {}}}]
)
def test_the_schema_refuses_what_the_classes_refuse(config: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, json_schema())


def test_every_section_of_a_config_is_described() -> None:
    described = json_schema()
    assert set(described["properties"]) == set(Config.model_fields)
    assert all(section.get("description") for section in described["$defs"].values())
