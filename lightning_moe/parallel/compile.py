"""``torch.compile`` of the blocks. The exchange of tokens stays outside of the compiled graphs."""

import torch
from torch import nn


def check_compile(compile: bool, activation_checkpointing: str, device: torch.device) -> None:
    """Check the strategy's ``compile`` against its other options and what is installed.

    Raises:
        ValueError: If the blocks cannot be compiled together with ``activation_checkpointing``.
        RuntimeError: If there is no compiler.
    """
    if not compile:
        return
    if activation_checkpointing == "selective":
        raise ValueError(
            "compile=True cannot be combined with activation_checkpointing='selective', which picks single operators;"
            " set activation_checkpointing='full' or 'none'"
        )
    try:
        if device.type == "cpu":
            from torch._inductor.cpp_builder import get_cpp_compiler

            get_cpp_compiler()
        else:
            import triton  # noqa: F401
    except Exception as error:
        needed = "a C++ compiler" if device.type == "cpu" else "the package triton"
        raise RuntimeError(
            f"compile=True needs {needed} on {device.type} ({error}); install it, or set compile=False"
        ) from error


def compile_block(block: nn.Module) -> None:
    """Compile the forward of a block at its first call. Its parameters keep their names."""
    block.forward = torch.compile(block.forward)
