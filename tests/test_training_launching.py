"""Facts about the commands that start a training's processes, on one machine and on several."""

import os
import socket
import sys

import pytest

from gristmill.errors import UserError
from gristmill.training.launching import free_port, slurm_command, started_here

JOB = {"SLURM_JOB_ID": "77"}
NODES = {"77": ["node07", "node08"]}


def test_one_machine_finds_its_port_itself() -> None:
    command = started_here(4, ["rank.py", "task.json"])
    assert command[:4] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    assert "--standalone" in command
    assert f"--log-dir={os.devnull}" in command  # else a folder in /tmp for each start
    assert command[-2:] == ["rank.py", "task.json"]


def test_a_process_alone_needs_no_torchrun() -> None:
    assert started_here(1, ["rank.py", "task.json"]) == [sys.executable, "rank.py", "task.json"]


def test_several_nodes_meet_on_the_first_one_at_one_port() -> None:
    command = slurm_command(4, 2, ["rank.py"], JOB, NODES.__getitem__, 4321)
    assert command[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    for word in ("--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=node07:4321"):
        assert word in command
    assert "--rdzv-id=gristmill-77" in command
    assert command[-1] == "rank.py"


def test_nodes_without_a_job_of_so_many_are_refused() -> None:
    with pytest.raises(UserError, match="nodes=2, but this is no job of SLURM"):
        slurm_command(1, 2, ["rank.py"], {}, NODES.__getitem__, 1)
    with pytest.raises(UserError, match=r"nodes=3, but SLURM job 77 has 2 \(node07, node08\)"):
        slurm_command(1, 3, ["rank.py"], JOB, NODES.__getitem__, 1)


def test_a_free_port_can_be_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
