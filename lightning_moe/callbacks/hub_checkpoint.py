"""Writes the model as a folder that Transformers loads, while it trains and at the end."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_moe.checkpoint.hub_live import all_ranks, check_can_be_saved, save_pretrained
from lightning_moe.checkpoint.hub_write import find_tokenizer, parse_size

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HubCheckpoint(Callback):
    """Writes the model in the format of the Hugging Face hub: what ``AutoModelForCausalLM.from_pretrained`` loads.

    Each save is a folder ``step-N`` of its own, which is there only once it is whole. No rank ever holds the whole
    model. Training cannot go on from such a folder as it was, only with its weights: keep a ``ModelCheckpoint`` for
    that.

    Args:
        dirpath: Where the folders go; default: ``hub`` in the log directory of the run. All ranks have to share it.
        every_n_train_steps: Optimizer steps between saves, ``None`` for none in between.
        every_n_epochs: Epochs between saves, ``None`` for none in between.
        save_on_train_end: Save once more at the end of training, where the last step is not saved yet.
        keep_last: How many folders of this run are kept, ``None`` for all; older ones are deleted after a save.
        module: Name of the model in the LightningModule, where it holds several of Transformers.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; default: that of the weights.
        max_shard_size: Bytes of a file at most, also as ``"5GB"``.
        tokenizer: A folder with a tokenizer, or a ``tokenizer.json``, to copy; default: that of the data module, else
            that in the folder which the model was loaded from.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        save_on_train_end: bool = True,
        keep_last: int | None = None,
        module: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        max_shard_size: int | str = "5GB",
        tokenizer: str | None = None,
    ) -> None:
        for name, value in (
            ("every_n_train_steps", every_n_train_steps),
            ("every_n_epochs", every_n_epochs),
            ("keep_last", keep_last),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number from 1 up, or None")
        if every_n_train_steps is None and every_n_epochs is None and not save_on_train_end:
            raise ValueError(
                "HubCheckpoint would never save: set every_n_train_steps or every_n_epochs, or leave save_on_train_end"
                " at True"
            )
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r} is not known; allowed are {', '.join(map(repr, _DTYPES))}, or None")
        parse_size(max_shard_size)
        self.dirpath = dirpath
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs
        self.save_on_train_end = save_on_train_end
        self.keep_last = keep_last
        self.module = module
        self.dtype = dtype
        self.max_shard_size = max_shard_size
        self.tokenizer = tokenizer
        self._folder: Path | None = None
        self._written: list[str] = []
        self._last_step = -1

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage == "fit":  # the state in a checkpoint is given back after this
            self._written, self._last_step = [], -1

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        ranks = all_ranks()
        with ranks.failing_together("HubCheckpoint"):
            find_tokenizer(self.tokenizer)
        check_can_be_saved(pl_module, **self._options())
        directory = self.dirpath or str(Path(trainer.log_dir or trainer.default_root_dir) / "hub")
        self._folder = Path(ranks.from_first(directory)).expanduser().absolute()
        # A run that goes on in another place leaves what the earlier one has written there.
        self._written = [path for path in self._written if Path(path).parent == self._folder]

    @override
    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if self.every_n_train_steps and step and step % self.every_n_train_steps == 0:
            self._save(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer, pl_module)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self.save_on_train_end:
            self._save(trainer, pl_module)

    def _save(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        step = trainer.global_step
        if trainer.fast_dev_run or step == self._last_step:  # type: ignore[attr-defined]
            return
        assert self._folder is not None
        ranks = all_ranks()
        target = Path(ranks.from_first(str(_free(self._folder / f"step-{step}"))))
        tokenizer = find_tokenizer(self.tokenizer, _of_data(trainer), getattr(module, "pretrained", None))
        save_pretrained(module, target, tokenizer=tokenizer, **self._options())
        self._last_step = step
        self._written.append(str(target))
        rank_zero_info(f"HubCheckpoint: wrote {target}")
        while self.keep_last is not None and len(self._written) > self.keep_last:
            oldest = self._written.pop(0)
            if ranks.rank == 0:
                shutil.rmtree(oldest, ignore_errors=True)

    def _options(self) -> dict[str, Any]:
        dtype = None if self.dtype is None else _DTYPES[self.dtype]
        return {"name": self.module, "dtype": dtype, "max_shard_size": self.max_shard_size}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(dirpath=self.dirpath, module=self.module, dtype=self.dtype)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"written": list(self._written), "last_step": self._last_step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._written = list(state_dict["written"])
        self._last_step = state_dict["last_step"]


def _free(path: Path) -> Path:
    """A name that nothing has yet, as ``ModelCheckpoint`` makes one."""
    version, free = 0, path
    while free.exists():
        version += 1
        free = path.with_name(f"{path.name}-v{version}")
    return free


def _of_data(trainer: "pl.Trainer") -> str | None:
    """Where the tokenizer of the data module is, if it says so."""
    tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
    return tokenizer if isinstance(tokenizer, str) and tokenizer != "bytes" else None
