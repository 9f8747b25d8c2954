"""Facts about the commands that start a training's processes, on one machine and on several."""

import socket
import sys

import pytest

from gristmill.errors import UserError
from gristmill.training.launching import free_port, slurm_command, torchrun

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[07-08]"}


def test_one_machine_finds_its_port_itself() -> None:
    command = torchrun(4, ["rank.py", "task.json"])
    assert command[:4] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    assert "--standalone" in command
    assert command[-2:] == ["rank.py", "task.json"]


def test_several_nodes_meet_on_the_first_one_at_one_port() -> None:
    expanded = {"node[07-08]": ["node07", "node08"]}
    command = slurm_command(4, 2, ["rank.py"], JOB, expanded.__getitem__, 4321)
    assert command[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    for word in ("--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=node07:4321"):
        assert word in command
    assert "--rdzv-id=gristmill-77" in command
    assert command[-1] == "rank.py"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "nodes=2, but this is no job of SLURM"),
        ({**JOB, "SLURM_JOB_NUM_NODES": "3"}, r"nodes=2, but SLURM job 77 has 3 \(node\[07-08\]\)"),
    ],
)
def test_nodes_without_a_job_of_so_many_are_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        slurm_command(1, 2, ["rank.py"], environ, lambda names: ["a", "b"], 1)


def test_a_free_port_can_be_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
