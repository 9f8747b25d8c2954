"""Facts about the code that keep it quick to start: heavy packages are imported where they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
ENGINES = SCRIPTS / "gristmill" / "engines"
#: A class of theirs has one of transformers for a base, or they are kernels; they are imported where they are used.
DERIVED = {
    ENGINES / "static" / "kv_cache.py",
    ENGINES / "continuous" / "rows.py",
    ENGINES / "continuous" / "flash" / "kernels.py",
}
HEAVY = {"torch", "transformers", "accelerate", "bitsandbytes", "vllm", "pandas", "altair", "sklearn", "statsmodels"}


def imported_at_load(tree: ast.Module) -> set[str]:
    """Packages that importing the module imports; those of functions and of TYPE_CHECKING blocks are not."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            waiting += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            waiting += node.body
    return found


@pytest.mark.parametrize(
    "path", sorted({*SCRIPTS.rglob("*.py")} - DERIVED), ids=lambda path: str(path.relative_to(SCRIPTS))
)
def test_no_module_imports_a_heavy_package_when_it_is_loaded(path: Path) -> None:
    assert imported_at_load(ast.parse(path.read_text("utf-8"))) & HEAVY == set()


def test_what_the_workflow_and_the_workers_load_first_loads_no_torch() -> None:
    modules = "config.load config.check gpu.gpus planning.text keys weights worker splitting merging manifest export"
    modules += " engines.static.engine engines.continuous.engine engines.vllm.engine engines.choice"
    imports = "; ".join(f"import gristmill.{module}" for module in modules.split())
    program = f"import sys; {imports}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={"PYTHONPATH": str(SCRIPTS)}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
