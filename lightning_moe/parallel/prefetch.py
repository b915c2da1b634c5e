"""Gather the weights of the next block while one computes, past the wait for the host inside its experts.

FSDP2 gathers the weights of a module when it is called, and hides that behind the computation of the modules before
because the host runs ahead of the device. An experts module makes the host wait, to learn how many rows it receives:
what comes after it would be gathered with the device idle. So each block asks for the weights of the next one, its
experts included, before it runs. In the backward pass nothing waits for the host, and FSDP2 does by itself.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def check_prefetch_blocks(prefetch_blocks: object) -> None:
    """Check the strategy's option.

    Raises:
        ValueError: If it is neither ``"auto"`` nor a number of blocks.
    """
    wrong = isinstance(prefetch_blocks, bool) or not isinstance(prefetch_blocks, int) or prefetch_blocks < 0
    if prefetch_blocks != "auto" and wrong:
        raise ValueError(f"prefetch_blocks={prefetch_blocks!r} must be 'auto' or a number of blocks, 0 for none")


def prefetch(
    blocks: Sequence[tuple[str, nn.Module]],
    roots: Sequence[tuple[str, nn.Module]],
    prefetch_blocks: int | str,
    device: torch.device,
) -> None:
    """Let each block ask for the weights of those after it.

    Args:
        blocks: Qualified names and sharded blocks, in the order in which they run.
        roots: Qualified names and modules that FSDP2 knows as roots. Blocks that are roots themselves are left out: one
            root cannot gather for another.
        prefetch_blocks: How many blocks ahead; ``"auto"`` is 1 on CUDA and none on CPU, where gathering is computation.
        device: The device of this rank.
    """
    ahead = int(device.type == "cuda") if isinstance(prefetch_blocks, str) else prefetch_blocks
    if not ahead:
        return
    stacks: dict[str, list[nn.Module]] = {}
    for name, block in blocks:
        if not any(name.startswith(f"{root}.") for root, _ in roots):
            continue
        stacks.setdefault(name.rpartition(".")[0], []).append(block)
    for stack in stacks.values():
        for position, block in enumerate(stack):
            wanted = [unit for later in stack[position + 1 : position + 1 + ahead] for unit in _units(later)]
            if position == 0:
                wanted = _units(block)[1:] + wanted
            if isinstance(block, FSDPModule) and wanted:
                block.set_modules_to_forward_prefetch(wanted)


def no_backward_prefetch(module: nn.Module) -> None:
    """Keep FSDP2 from gathering ahead in the backward pass.

    It goes by the order in which a rank has gathered in the forward pass. A rank that holds no experts gathers none,
    and so would come to the collectives of all ranks in another order than the others.
    """
    for unit in _units(module):
        # To be gathered ahead is what is there: with an empty list FSDP2 would choose.
        unit.set_modules_to_backward_prefetch([unit])


def _units(block: nn.Module) -> list[FSDPModule]:
    """What FSDP2 gathers by itself in a block, the block first."""
    return [module for module in block.modules() if isinstance(module, FSDPModule)]
