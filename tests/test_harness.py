import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    RanksFailedError,
    in_subprocess,
    run_ranks,
    run_ranks_expecting_error,
    server_processes,
)


def _describe(scale):
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    rank = int(os.environ["RANK"])
    return {
        "rank": rank,
        "world": int(os.environ["WORLD_SIZE"]),
        "elastic": TorchElasticEnvironment.detect(),
        "threads": torch.get_num_threads(),
        "product": scale * rank,
        "pid": os.getpid(),
    }


def _all_reduce(values):
    dist.init_process_group("gloo")
    values = values * (dist.get_rank() + 1)
    values.requires_grad_()
    (values**2).sum().backward()
    total = values.detach().clone()
    dist.all_reduce(total)
    return total, values.grad


def _fail_on_one(rank):
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        print("about to fail")
        raise ValueError("the reason")
    dist.barrier()


def _hang_on_one():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        subprocess.Popen(["sleep", "60"])
        _sleep_here()
    dist.barrier()


def _sleep_here():
    time.sleep(60)


def _die():
    os._exit(7)


def _raise_own_error():
    raise KeyError(os.environ["RANK"])


def _raise_except_on_one():
    if os.environ["RANK"] != "1":
        raise ValueError("expected")


def _large():
    return torch.arange(2_000_000) + int(os.environ["RANK"])


def _loader_workers():
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=1)
    return [batch.tolist() for batch in loader]


def test_each_rank_returns_its_own_result():
    results = run_ranks(_describe, 3, 10, threads=2)
    assert [r["rank"] for r in results] == [0, 1, 2]
    assert [r["product"] for r in results] == [0, 10, 20]
    assert all(r["world"] == 3 and r["elastic"] and r["threads"] == 2 for r in results)
    assert len({r["pid"] for r in results} | {os.getpid()}) == 4


def test_ranks_communicate_and_tensors_come_back():
    values = torch.tensor([1.0, 2.0])
    results = run_ranks(_all_reduce, 2, values)
    for rank, (total, grad) in enumerate(results):
        torch.testing.assert_close(total, 3 * values)
        torch.testing.assert_close(grad, 2 * values * (rank + 1))
    assert not values.is_shared()


def test_large_results_do_not_block():
    assert [int(r[-1]) for r in run_ranks(_large, 2)] == [1_999_999, 2_000_000]


def test_the_failing_rank_is_named_with_traceback_and_output():
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_fail_on_one, 2, 1, timeout=60)
    text = str(caught.value)
    assert "rank 1 of 2: ValueError: the reason" in text
    assert "in _fail_on_one" in text
    assert "about to fail" in text
    assert time.monotonic() - start < 40, "the other rank was not killed at once"


def test_a_hang_is_killed_with_its_children_and_shows_where():
    with pytest.raises(RanksFailedError, match=r"ranks \[0, 1\] had not finished after 2 s") as caught:
        run_ranks(_hang_on_one, 2, timeout=2)
    assert "_sleep_here" in str(caught.value)


def test_a_rank_that_dies_is_reported():
    with pytest.raises(RanksFailedError, match="exit code 7"):
        run_ranks(_die, 2)


def test_errors_of_all_ranks_are_collected():
    assert run_ranks_expecting_error(_raise_own_error, 2) == ["KeyError: '0'", "KeyError: '1'"]


def test_a_rank_without_the_expected_error_is_a_failure():
    with pytest.raises(RanksFailedError, match=r"ranks \[1\] returned without an error"):
        run_ranks_expecting_error(_raise_except_on_one, 2)


def test_a_rank_may_start_loader_workers():
    assert run_ranks(_loader_workers, 1) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]


def test_variables_of_the_caller_reach_the_ranks_and_stay_clean(monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "value")
    assert run_ranks(os.getenv, 1, "SOME_VARIABLE") == ["value"]
    assert "RANK" not in os.environ


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_the_server_forks_from_a_single_thread():
    run_ranks(os.getpid, 1)
    for pid in server_processes():
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1


def test_a_program_runs_and_reports():
    done = in_subprocess([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"])
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (3, "out", "err")


def test_a_program_that_hangs_is_killed_with_its_children():
    code = "import subprocess, time; print('started', flush=True); subprocess.Popen(['sleep', '60']); time.sleep(60)"
    with pytest.raises(RanksFailedError, match=r"(?s)ran past 2 s.*started"):
        in_subprocess([sys.executable, "-c", code], timeout=2)
