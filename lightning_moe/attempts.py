"""What torchrun's next attempt must not find of the one before."""

import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_POLL_S = 0.02


def leave_the_former_attempt(rank: int, world_size: int, timeout: timedelta | None) -> None:
    """Let rank 0 hold the store of this attempt, where torchrun may start several. Collective.

    All attempts use the store of torchrun's agent under the same names (github.com/pytorch/pytorch/issues/135712). A
    rank that starts early would find the address that another one had in the attempt before, and fail to connect, or
    wait. The count of restarts tells the attempts of one node apart only: each node counts its own. So the ranks agree
    on a port, and use it as if torchrun had been told ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        timeout: How long a rank waits for the others, ``None`` for the store's own limit.

    Raises:
        RuntimeError: If a rank does not come.
    """
    several = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if dist.is_initialized() or not several or os.environ.get(_AGENTS_STORE) != "True":
        return
    limit = timeout or timedelta(minutes=5)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    mine = str(_free_port()) if rank == 0 else ""
    os.environ["MASTER_PORT"] = agree(dist.PrefixStore("lightning_moe/attempts", store), rank, world_size, mine, limit)
    os.environ[_AGENTS_STORE] = "False"


def agree(store: dist.Store, rank: int, world_size: int, value: str, timeout: timedelta) -> str:
    """Give rank 0's value to all ranks over a store in which another attempt has done the same. Collective.

    Args:
        store: The store.
        rank: This rank.
        world_size: The number of ranks.
        value: The value; that of rank 0 counts.
        timeout: How long a rank waits for the others.

    Returns:
        The value.

    Raises:
        RuntimeError: If a rank does not come.
    """
    own = uuid.uuid4().hex  # nothing of another attempt has this name
    if rank != 0:
        store.set(f"asks/{rank}", own)
        store.wait([own], timeout)
        answer = store.get(own).decode()
        store.set(f"heard/{rank}", answer)
        return answer.split()[1]
    answer, end = f"{own} {value}", time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world_size))
    while missing:
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {missing} have not come to this attempt within {timeout.total_seconds():.0f} s")
        for other in [other for other in missing if store.check([f"asks/{other}"])]:
            # It may be the question of the former attempt, which nobody hears the answer to.
            store.set(store.get(f"asks/{other}").decode(), answer)
            if store.check([f"heard/{other}"]) and store.get(f"heard/{other}").decode() == answer:
                missing.remove(other)
        time.sleep(_POLL_S)
    return value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
