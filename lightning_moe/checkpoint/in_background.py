"""A save that goes on while training does."""

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

_log = logging.getLogger(__name__)
# A copy of this many bytes costs nothing worth avoiding.
_SMALL = 1 << 20


class Pending:
    """One save in a thread of its own.

    The thread does not keep a program from ending in the middle of the save by a signal; at an ordinary end the
    interpreter waits for it.

    Args:
        path: The checkpoint that it writes.
        write: Does it.
    """

    def __init__(self, path: Path, write: Callable[["Pending"], None]) -> None:
        self.path = path
        self._write = write
        self._error: BaseException | None = None
        self._deferred: list[Callable[[], None]] = []
        self._sealed = False
        self._lock = threading.RLock()  # a signal handler of the same thread may save as well
        self._thread = threading.Thread(target=self._run, name="save-checkpoint")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def after(self, action: Callable[[], None]) -> bool:
        """Do something once the checkpoint is in place, and not at all if that fails.

        Returns:
            Whether it will be done; ``False`` if the checkpoint is in place already.
        """
        with self._lock:
            if self._sealed and self._error is None:
                return False
            self._deferred.append(action)
            return True

    def run_deferred(self) -> None:
        """Do what was to wait for the checkpoint; called by the thread when it is in place."""
        while True:
            with self._lock:
                if not self._deferred:
                    self._sealed = True
                    return
                action = self._deferred.pop(0)
            action()

    def wait(self) -> BaseException | None:
        """Wait for the end; return what went wrong."""
        self._thread.join()
        return self._error

    def _run(self) -> None:
        try:
            self._write(self)
        except BaseException as error:
            _log.error("saving %s in the background failed: %s: %s", self.path, type(error).__name__, error)
            with self._lock:
                self._error = error
                self._sealed = True


def private_copy(state: Any, live: frozenset[int], copy_all: bool) -> Any:
    """Copy a nested state to the CPU, so that training can go on.

    Args:
        state: Dictionaries, lists and tuples of tensors and of plain values.
        live: Addresses of the memory that training changes, from :func:`memory_of`.
        copy_all: Copy every tensor, and not only what is live or on an accelerator.
    """
    if isinstance(state, Tensor):
        tensor = state.detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type != "cpu":
            return tensor.to("cpu")
        shared = copy_all or local.nbytes < _SMALL or local.untyped_storage().data_ptr() in live
        return tensor.clone() if shared else tensor
    if type(state) in (dict, OrderedDict):
        return type(state)((key, private_copy(value, live, copy_all)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(private_copy(value, live, copy_all) for value in state)
    return copy.deepcopy(state)


def memory_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Addresses of the memory that tensors on the CPU have."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (t.detach() for t in tensors))
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in local if tensor.device.type == "cpu")
