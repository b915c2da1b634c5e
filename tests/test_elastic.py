"""A killed rank whose torchrun starts all again, and a job that a scheduler ends and starts again: the run goes on."""

import contextlib
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_moe.attempts import agree
from lightning_moe.cli_checkpoints import checkpoint_places, newest_fitting
from tests.harness import RANK_VARIABLES, ROOT, free_port

EXAMPLES = ROOT / "examples"
SECONDS = 240.0  # for whatever is waited for
Losses = dict[int, float]


def write_config(folder: Path, **saving: Any) -> None:
    """The quickstart without an end, small, with the loss of every step in a file."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["model"]["init_args"]["config"].update(
        hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16, intermediate_size=64
    )
    config["data"]["init_args"].update(sequence_length=32, batch_size=2, max_bytes=200_000)
    config["trainer"].update(max_steps=100_000, log_every_n_steps=1, limit_val_batches=0, val_check_interval=1000)
    config["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "runs", "name": "elastic", "flush_logs_every_n_steps": 1},
    }
    saves = config["trainer"]["callbacks"][-1]
    assert saves["class_path"].endswith("ModelCheckpoint")
    saves["init_args"].update(saving)
    config["trainer"]["callbacks"] = [saves]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def losses(folder: Path, version: int) -> Losses:
    """Step -> loss, as far as an attempt has got."""
    file = folder / "runs" / "elastic" / f"version_{version}" / "metrics.csv"
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("train/loss")]
    return {int(row["step"]): float(row["train/loss"]) for row in rows[:-1]}  # the last may be half of one


def check_same_losses(folder: Path) -> int:
    """The second attempt repeats the steps that the first had gone beyond its checkpoint; return where it begins."""
    before, after = losses(folder, 0), losses(folder, 1)
    both = before.keys() & after.keys()
    assert both, (max(before), min(after))
    assert {step: before[step] for step in both} == {step: after[step] for step in both}, "bit for bit"
    return min(after)


def saved_steps(folder: Path, version: int) -> list[int]:
    """The steps that an attempt has saved whole."""
    found = (folder / "runs" / "elastic" / f"version_{version}" / "checkpoints").glob("step*.ckpt")
    return sorted(int(path.stem[4:]) for path in found)


class Group:
    """Programs that print to one file; none of them is left at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[object], **variables: str) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        scripts = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join([str(self.folder / "bin"), scripts, environment.get("PATH", "")])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
        environment.update({"OMP_NUM_THREADS": "1", **variables})
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def wait_for(self, what: str, seen: Callable[[], Any]) -> None:
        end = time.monotonic() + SECONDS
        while not seen():
            ended = [process.args for process in self.processes if process.poll() is not None]
            if ended or time.monotonic() > end:
                pytest.fail(f"{what}: not seen; ended: {ended}\n{self.printed()[-6000:]}")
            time.sleep(0.1)

    def end(self, number: int) -> list[int]:
        """Send a signal to all, and tell how they ended."""
        for process in self.processes:
            process.send_signal(number)
        codes = [process.wait(SECONDS) for process in self.processes]
        self.processes.clear()
        return codes

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGSTOP)  # it starts no more
                for pid in [*children(process.pid), process.pid]:  # torchrun's workers have sessions of their own
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    found = Group(tmp_path)
    yield found
    found.kill()


def children(pid: int) -> list[int]:
    """All that a process has started, and what that has started."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*own, *(deeper for child in own for deeper in children(child))]


def test_ranks_agree_anew_in_every_attempt() -> None:
    store, minute = dist.HashStore(), timedelta(minutes=1)
    for value in ("first", "second", "third"):
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(agree, store, rank, 3, "", minute) for rank in (1, 2)]
            time.sleep(0.1)  # they look first, and find what the former attempt has left
            assert agree(store, 0, 3, value, minute) == value
            assert [other.result() for other in others] == [value, value]


def test_a_rank_that_does_not_come() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have not come to this attempt within 1 s"):
        agree(dist.HashStore(), 0, 2, "port", timedelta(seconds=1))


# Two nodes


class NotAllowedError(Exception):
    """Why there can be no network namespaces here."""


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """Commands to run something in each of two network namespaces, joined by a veth pair."""
    ip = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if ip is None:
        raise NotAllowedError("`ip` is not installed (Debian: iproute2)")
    names = [f"moe{os.getpid()}{side}" for side in "ab"]

    def run(*arguments: str) -> None:
        done = subprocess.run([ip, *arguments], capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            raise NotAllowedError(f"`ip {' '.join(arguments)}`: {done.stderr.strip()}")

    try:
        for name in names:
            run("netns", "add", name)
        run("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for number, name in enumerate(names, 1):
            run("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", name)
            run("-n", name, "link", "set", "lo", "up")
            run("-n", name, "link", "set", name, "up")
        yield [[ip, "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run([ip, "netns", "delete", name], capture_output=True, timeout=20, check=False)


def start_nodes(group: Group, hosts: Sequence[Sequence[str]], nodes: Sequence[Mapping[str, str]]) -> None:
    write_config(group.folder, save_on_exception=True, every_n_train_steps=10)
    port = str(free_port())
    for host, variables in zip(hosts, nodes, strict=True):
        command = [*host, EXAMPLES / "torchrun.sh", "--config", "config.yaml"]
        group.start(command, NODES="2", DEVICES="1", PORT=port, **variables)


def check_that_it_goes_on(group: Group) -> None:
    """A worker of the second node is killed; then both nodes are told to end."""
    folder = group.folder
    group.wait_for("a checkpoint and some steps more", lambda: saved_steps(folder, 0) and max(losses(folder, 0)) > 14)
    (worker,) = children(group.processes[1].pid)
    os.kill(worker, signal.SIGKILL)
    group.wait_for("steps of the second attempt", lambda: len(losses(folder, 1)) > 4)
    printed = group.printed()
    assert "training begins at step 0" in printed, "the first attempt"
    assert "2 ranks: expert_parallel_size=2" in printed, "one expert-parallel group over both nodes"
    assert re.search(r"fit continues from runs/elastic/version_0/checkpoints/(last|step\d+)\.ckpt", printed)
    assert check_same_losses(folder) in saved_steps(folder, 0)

    group.end(signal.SIGTERM)  # torchrun hands it on
    assert max(saved_steps(folder, 1)) > max(losses(folder, 1)), "saved after the last step"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_two_hosts(group: Group) -> None:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except NotAllowedError as reason:
            pytest.skip(f"two network namespaces are not allowed here: {reason}")
        stack.callback(group.kill)
        names = [host[-1] for host in hosts]
        nodes = [{"HEAD": "10.77.0.1", "LOCAL": f"10.77.0.{n}", "IFNAME": name} for n, name in enumerate(names, 1)]
        start_nodes(group, hosts, nodes)
        check_that_it_goes_on(group)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_nodes_on_one_host(group: Group) -> None:
    with contextlib.suppress(NotAllowedError), two_hosts():
        if not os.environ.get("ONE_HOST"):
            pytest.skip("test_two_hosts does this, and over a network; ONE_HOST=1 runs this one all the same")
    start_nodes(group, [[], []], [{"IFNAME": "lo", "HOST": "1"}, {"IFNAME": "lo", "HOST": "0"}])
    check_that_it_goes_on(group)


# SLURM


def test_a_requeued_job_goes_on_from_what_a_job_with_its_config_has_saved(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, logger=CSVLogger(tmp_path / "runs", "x"), accelerator="cpu")

    def write(time: int, name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (time, time))

    def found(seed: int) -> tuple[Path | None, list[str]]:
        return newest_fitting(checkpoint_places(trainer), {"model": {}, "data": {"seed": seed}})

    write(1, "hpc_ckpt_1.ckpt/.metadata", "")  # of no run that is known here
    assert found(0)[0] is None
    write(2, "runs/x/version_0/config.yaml", "model: {}\ndata: {seed: 0}")
    write(3, "runs/x/version_0/checkpoints/a.ckpt/.metadata", "")
    assert found(0)[0] == tmp_path / "runs/x/version_0/checkpoints/a.ckpt"
    write(4, "hpc_ckpt_2.ckpt/.metadata", "")
    assert found(0)[0] == tmp_path / "hpc_ckpt_2.ckpt"
    write(5, "runs/x/version_1/config.yaml", "model: {}\ndata: {seed: 1}")
    write(6, "hpc_ckpt_3.ckpt/.metadata", "")
    (tmp_path / "hpc_ckpt_4.ckpt.partial").mkdir()
    assert found(1)[0] == tmp_path / "hpc_ckpt_3.ckpt"
    path, passed_over = found(0)
    assert path == tmp_path / "hpc_ckpt_2.ckpt"
    assert "hpc_ckpt_3.ckpt is passed over: its config has data.seed: 1, this one 0" in passed_over[0]


SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && shift
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids="$pids $!"; done
trap 'kill -USR1 $pids' USR1
trap 'kill -TERM $pids' TERM
for pid in $pids; do
    while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
    [ $code = 0 ] || exit $code
done
"""
SCONTROL = """#!/bin/bash
echo "$@" >> requeued
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the programs that stand for SLURM's are bash")
def test_slurm_job_is_requeued_and_goes_on(group: Group) -> None:
    folder = group.folder
    (folder / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "moe", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    tasks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "127.0.0.1"}
    variables = {**job, **tasks, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    command = [EXAMPLES / "slurm.sh", "--config", "config.yaml"]

    write_config(folder, every_n_train_steps=100_000)
    task = group.start(command, **variables)
    group.wait_for("some steps", lambda: max(losses(folder, 0), default=0) > 2)
    task.send_signal(signal.SIGUSR1)
    group.wait_for("the requeue", lambda: (folder / "requeued").exists())
    assert (folder / "requeued").read_text() == "requeue 1234\n"
    reached = max(losses(folder, 0))
    group.wait_for("steps that are lost", lambda: max(losses(folder, 0)) > reached + 2)
    assert group.end(signal.SIGTERM) == [0]
    assert not list(folder.rglob("step*.ckpt")), "saved on SIGUSR1 only"

    group.start(command, **variables)
    group.wait_for("steps of the requeued job", lambda: len(losses(folder, 1)) > 2)
    assert "fit continues from hpc_ckpt_1.ckpt" in group.printed()
    check_same_losses(folder)
    assert group.end(signal.SIGTERM) == [0]
