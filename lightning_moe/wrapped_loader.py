"""A dataloader around another one."""

from typing import Any


class WrappedLoader:
    """Has the attributes of the dataloader inside; its own are set by :meth:`_set`, ``_loader`` among them."""

    def _set(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy that is not built yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)  # Lightning sets worker_init_fn and lets go of workers
