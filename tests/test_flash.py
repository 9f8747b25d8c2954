"""Facts about the attention that is offered to transformers where no package brings one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.engines.continuous import flash

SCRIPTS = str(Path(flash.__file__).parents[4])
KERNEL = """
import sys, torch
from gristmill.engines.continuous.flash import kernels

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
for sequences, heads, kv_heads, size, page_size, programs in [
    (3, 4, 2, 64, 128, 1), (3, 4, 2, 64, 128, 512), (5, 9, 3, 64, 64, 512), (2, 8, 8, 80, 64, 1),
    (1, 16, 1, 128, 256, 512),
]:
    kernels.ENOUGH_PROGRAMS = programs
    pages = sequences * 4 + 2
    keys, values = (torch.randn(pages, page_size, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
    places = torch.randperm(sequences * 4, device=device).view(sequences, 4).int()
    before = torch.randint(0, 4 * page_size, (sequences,), dtype=torch.int32, device=device)
    before[0] = 0
    query = torch.randn(sequences, 1, heads, size, dtype=dtype, device=device)
    key, value = (torch.randn(sequences, 1, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
    out = kernels.flash_attn_with_kvcache(query, keys, values, key, value, before, places)[:, 0]
    right = kernels.reference_paged_decode(query[:, 0], keys, values, places, before + 1, size**-0.5)
    error = ((out.double() - right).norm() / right.norm()).item()
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-6), (sequences, heads, size, error)
    padded = torch.cat([before, before.new_full((2,), -1)])
    more = [torch.cat([x, torch.zeros_like(x[:1]).expand(2, *x.shape[1:])]) for x in (query, key, value, places)]
    more[3][-2:] = -1
    kept = keys[:-1].clone()
    again = kernels.flash_attn_with_kvcache(more[0], keys, values, more[1], more[2], padded, more[3])
    assert torch.equal(again[:-2, 0], out), "padding changes nothing"
    assert torch.equal(keys[:-1], kept), "padding writes nowhere but into the last page"
    window = kernels.paged_decode(query[:, 0], keys, values, places, before + 1, None, 10)
    for row, length in enumerate((before + 1).tolist()):
        first = max(0, length - 11)
        flat = [x[places[row].long()].flatten(0, 1)[first:length].double() for x in (keys, values)]
        k, v = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in flat)
        weights = torch.softmax((k @ query[row, 0].double().unsqueeze(-1)).squeeze(-1) * size**-0.5, -1)
        near = (weights.unsqueeze(1) @ v).squeeze(1)
        assert ((window[row].double() - near).norm() / near.norm()).item() < 5e-3
print("right")
"""


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [SCRIPTS, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path} | env
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (a CPU build of torch)")
def test_paged_decode_is_attention_over_the_pages_of_each_sequence() -> None:
    torch = pytest.importorskip("torch")
    done = run(KERNEL, **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}))
    assert done.stdout.strip() == "right", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import transformers.utils.import_utils as u; u.is_flash_attn_3_available()"])
def test_transformers_finds_it_whether_it_was_imported_before_or_not(before: str) -> None:
    if importlib.util.find_spec("flash_attn_interface") or importlib.util.find_spec("kernels"):
        pytest.skip("a package brings flash attention here")
    program = f"""
{before}
import sys, types
from gristmill.engines.continuous import flash
print(flash.offer(), flash.offer())
import transformers.utils.import_utils as u
u.is_torch_cuda_available = lambda: True
print(u.is_flash_attn_3_available())
"""
    done = run(program)
    assert done.stdout.splitlines() == [f"{flash.OURS} {flash.OURS}", "True"], done.stderr


def test_a_package_that_is_installed_goes_first(tmp_path: Path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("")
    program = (
        "from gristmill.engines.continuous import flash; import sys; print(flash.offer(), str(flash.SITE) in sys.path)"
    )
    done = run(program, PYTHONPATH=os.pathsep.join([str(tmp_path), SCRIPTS]))
    assert done.stdout.split() == ["the", "package", "flash-attn-3", "False"], done.stderr
