"""The GPU that the stand-in claims to have."""

from dataclasses import dataclass

import torch


@dataclass
class Device:
    """What tests set: whether there is a GPU, and its compute capability."""

    cuda: bool = True
    capability: tuple[int, int] = (10, 0)

    def require(self) -> None:
        if not self.cuda:
            raise RuntimeError("TransformerEngineConfig needs CUDA.")


DEVICE = Device()


def place(device: torch.device | str | None) -> torch.device:
    """Where a tensor goes that the library would put on a device: what is for CUDA goes to the CPU without one."""
    wanted = torch.device("cuda" if device is None else device)
    return torch.device("cpu") if wanted.type == "cuda" and not torch.cuda.is_available() else wanted
