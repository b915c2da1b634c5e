"""A LightningModule around any causal language model of Transformers."""

import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_moe.checkpoint import load_from_checkpoint, load_pretrained
from lightning_moe.flops import CONVENTION, transformer_flops_per_token
from lightning_moe.models.configuration import (
    generate_as_in,
    has_weights,
    network_config,
    without_quantization,
)
from lightning_moe.models.optimizer import AdamW, decay_groups
from lightning_moe.models.router_terms import AuxLossLevel, RouterTerms
from lightning_moe.models.schedule import Schedule, check_schedule, learning_rate_factor
from lightning_moe.models.token_window import TokenWindow, scale_gradients
from lightning_moe.nn.router_losses import ScoreFunction
from lightning_moe.optional import require

_log = logging.getLogger(__name__)

_IGNORED = -100


class CausalLM(LightningModule):
    """Trains any causal language model of Transformers, dense or Mixture-of-Experts, on next-token prediction.

    The network is named in exactly one of three ways: ``config_class`` with the fields in ``config``; ``config`` with
    the key ``model_type``; or ``pretrained``. Nothing is ever downloaded.

    A batch is a mapping with ``input_ids`` ``[B, L]`` and ``labels`` ``[B, L]`` (int64). A label is the token that
    follows, so the data is shifted already, and -100 marks positions that do not count. ``attention_mask`` and
    ``position_ids`` are passed on where they are present.

    Gradients are those of the mean loss over all valid tokens of an optimizer step, however they are spread over ranks
    and, with ``accumulate_grad_batches``, over micro-batches. ``on_after_backward`` of the last micro-batch completes
    them; a subclass that overrides it calls ``super()``. ``train/loss`` is the mean over the tokens of one micro-batch.

    The losses of routers below are added in training, never to ``val/loss``, for every network whose experts
    ``strategy="moe_ep"`` finds; that of Transformers is not. Tokens with ``attention_mask`` 0 are left out of them, and
    all others count, those without a label too (of a prompt, for example): they load the experts all the same. Each
    sequence, for the batch-wise loss each micro-batch, weighs as many as it has valid labels, as in the main loss, so
    that a coefficient means the same for any number of ranks and micro-batches. ``train/aux_loss`` and ``train/z_loss``
    are logged over all ranks, without their coefficients.

    Args:
        config: Fields of the network's configuration, for example ``{hidden_size: 256, num_hidden_layers: 4}``.
        config_class: Name of a configuration class of Transformers, for example ``Qwen3MoeConfig``.
        pretrained: A folder with a ``config.json``. Weights are read from safetensors files that lie there, under
            ``ExpertParallelStrategy`` by each rank its own part (:func:`lightning_moe.checkpoint.load_pretrained`);
            without any files the weights are random.
        optimizer: Builds the optimizer from parameter groups. Norms and biases are in a group without weight decay.
        warmup_steps: Optimizer steps in which the learning rate rises linearly.
        schedule: ``"cosine"``: fall to ``min_lr_ratio`` over the length of the run; or ``"constant"``.
        min_lr_ratio: The share of the learning rate at which the cosine ends.
        meta_device: Build the network without memory; ``ExpertParallelStrategy`` makes and initializes it block by
            block, so that the whole network never has to fit one device. With weights in ``pretrained`` that strategy
            always does so.
        aux_loss_coef: Coefficient of the load-balancing loss, 0 for none. The loss is 1 for a perfect balance and
            ``num_experts / num_experts_per_tok`` for the worst, in the mean over layers.
        aux_loss_level: What is balanced: ``"batch"``, the tokens of a micro-batch on all ranks together, as in Switch
            Transformer (:func:`~lightning_moe.nn.batch_balance_loss`); or ``"sequence"``, those of each sequence, as in
            DeepSeek-V3 (:func:`~lightning_moe.nn.sequence_balance_loss`), which does not depend on the number of
            micro-batches either.
        z_loss_coef: Coefficient of the router z-loss (:func:`~lightning_moe.nn.router_z_loss`), 0 for none.
        router_score_function: What the network's routers turn logits into scores with, for the load-balancing loss:
            ``"softmax"``, ``"sigmoid"``, ``"sqrtsoftplus"``, or ``"auto"`` to find out.
        pretrained_strict: Weights that ``pretrained`` lacks, or has and the network does not, are errors. With
            ``False`` the former are random and the latter not used; and of embeddings with another number of rows,
            those rows are read that both have.

    Raises:
        ValueError: If an option has a value that is not allowed, or if the configuration class, the model type, a field
            of the configuration or the folder does not exist, or if router losses are asked for here and in the
            configuration. When the network is built: if it has no routers that a loss can observe.
        ModuleNotFoundError: If Transformers is not installed.
    """

    model: torch.nn.Module
    flops_convention = CONVENTION

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        config_class: str | None = None,
        pretrained: str | None = None,
        # The command line reads this lambda: it shows the class with its defaults, and lets each be overridden.
        optimizer: OptimizerCallable = lambda params: AdamW(params, lr=3e-4, weight_decay=0.1),
        warmup_steps: int = 0,
        schedule: Schedule = "cosine",
        min_lr_ratio: float = 0.1,
        meta_device: bool = False,
        aux_loss_coef: float = 0.0,
        aux_loss_level: AuxLossLevel = "batch",
        z_loss_coef: float = 0.0,
        router_score_function: ScoreFunction | Literal["auto"] = "auto",
        pretrained_strict: bool = True,
    ) -> None:
        super().__init__()
        check_schedule(schedule, warmup_steps, min_lr_ratio)
        self.router_terms = RouterTerms(aux_loss_coef, aux_loss_level, z_loss_coef, router_score_function)
        self.network_config = network_config(config, config_class, pretrained)
        self.router_terms.check_config(self.network_config)
        # Not the optimizer: a checkpoint with a function in it cannot be read with weights_only=True.
        self.save_hyperparameters(ignore=["optimizer"])
        self.pretrained = pretrained
        self.pretrained_strict = pretrained_strict
        self.optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.schedule: Schedule = schedule
        self.min_lr_ratio = min_lr_ratio
        self.meta_device = meta_device
        self._window = TokenWindow()
        self._evaluated = torch.zeros(2)  # summed loss and valid tokens of the evaluation that is running

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path | IO[Any], *args: Any, **kwargs: Any) -> "CausalLM":
        """Build the model from a checkpoint, a file or a folder; Lightning's own method reads files alone.

        Args:
            checkpoint_path: The checkpoint.
            *args: As for Lightning's own method; for a folder as for
                :func:`lightning_moe.checkpoint.load_from_checkpoint`.
            **kwargs: Likewise.
        """
        if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_dir():
            return load_from_checkpoint(cls, checkpoint_path, *args, **kwargs)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    @override
    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        tokens, known = getattr(data, "vocab_size", None), self.network_config.get_text_config().vocab_size
        if tokens is not None and tokens > known:
            raise ValueError(
                f"config.vocab_size={known} is too small for the data: {type(data).__name__} has tokens up to"
                f" {tokens - 1}. Set config.vocab_size to {tokens} or more"
            )

    # The network

    @override
    def configure_model(self) -> None:
        if "model" in self._modules:  # called for each fit, validate, test and predict
            return
        weights = self.pretrained if self.pretrained is not None and has_weights(self.pretrained) else None
        on_meta = self._build_on_meta(weights)
        if weights is None or on_meta:
            with torch.device("meta") if on_meta else nullcontext():
                self.model = self._build()
        if weights is not None:
            self._read(weights)
        self.router_terms.attach(self.model)

    def _build_on_meta(self, weights: str | None) -> bool:
        if self._trainer is None:  # load_from_checkpoint fills the weights
            return False
        from lightning_moe.strategy import ExpertParallelStrategy

        if isinstance(self.trainer.strategy, ExpertParallelStrategy):
            return self.meta_device or weights is not None
        if self.meta_device:
            raise ValueError(
                f"meta_device=True needs Trainer(strategy='moe_ep'): {type(self.trainer.strategy).__name__} would leave"
                " the weights uninitialized. Choose that strategy or leave meta_device out"
            )
        return False

    def _build(self) -> torch.nn.Module:
        transformers = require("transformers", "CausalLM")
        # The default dtype is the one that the Trainer's precision stores weights in, not that of config.json.
        return transformers.AutoModelForCausalLM.from_config(
            without_quantization(self.network_config), dtype=torch.get_default_dtype()
        )

    def _read(self, folder: str) -> None:
        """Read the weights: later and by parts into a network without memory, else all of them now."""
        if "model" in self._modules:
            load_pretrained(self, folder, prefix="model", strict=self.pretrained_strict)
            generate_as_in(folder, self.model)
            return
        transformers = require("transformers", "CausalLM")
        network, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=self.network_config,
            dtype=torch.get_default_dtype(),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=not self.pretrained_strict,
        )
        fix = "pretrained_strict=False lets it pass"
        if (missing := sorted(found["missing_keys"])) and self.pretrained_strict:
            raise ValueError(
                f"pretrained={folder!r} lacks {len(missing)} weights of {type(network).__name__}, for example"
                f" {', '.join(missing[:3])}; they would be random. {fix}"
            )
        if (unexpected := sorted(found["unexpected_keys"])) and self.pretrained_strict:
            raise ValueError(
                f"pretrained={folder!r} holds {len(unexpected)} weights that {type(network).__name__} has no place for,"
                f" for example {', '.join(unexpected[:3])}. {fix}"
            )
        if missing or unexpected:
            _log.warning(
                "%s lacks %d weights, which are random (%s), and holds %d that are not used (%s)",
                *(folder, len(missing), ", ".join(missing[:3]), len(unexpected), ", ".join(unexpected[:3])),
            )
        self.model = network.train()

    @override
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """Run the network.

        Args:
            input_ids: Tokens ``[B, L]``.
            **kwargs: What else the network's ``forward`` takes.

        Returns:
            The network's output, with ``logits`` ``[B, L, V]``.

        Raises:
            RuntimeError: If the network is not built yet.
        """
        if "model" not in self._modules:
            raise RuntimeError("the network is not built yet: call configure_model() first (a Trainer does)")
        return self.model(input_ids=input_ids, **kwargs)

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the training FLOPs a token, by the convention of :mod:`lightning_moe.flops`.

        Args:
            sequence_length: Tokens in the sequence.

        Raises:
            ValueError: If the formula does not cover the network; the message names the field that says so.
        """
        return transformer_flops_per_token(self.network_config, sequence_length).total

    # Steps

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        with self.router_terms.observe() as routings:
            losses, valid = self._token_losses(batch)
        mask = batch.get("attention_mask")
        terms = self.router_terms.terms(
            routings, torch.ones_like(valid) if mask is None else mask, valid.sum(1), self._reduced
        )
        local, wide = losses.sum(), _wide_dtype(losses)
        sums = torch.stack([x.detach().to(wide) for x in (local, valid.sum(), *(term.local for term in terms))])
        total, tokens, *totals = self._reduced(sums).unbind()
        if batch_idx % self.trainer.accumulate_grad_batches == 0:  # where Lightning sets the gradients to zero
            self._window.reset()
        # Strategies average gradients over the W ranks. With S_r the summed loss of rank r and d the divisor, which is
        # the valid tokens of all ranks where a step has one micro-batch, (1/W) sum_r (S_r * W / d) = sum_r S_r / d is
        # the mean over all tokens. A rank without a valid token has S_r = 0 and gradients of exactly zero, and takes
        # part in every collective of the backward.
        scale = self.trainer.world_size / self._window.add(tokens)
        loss = torch.stack([local, *(term.token_sum(tokens) for term in terms)]).sum() * scale.to(local.dtype)
        count = tokens.clamp(min=1.0)
        self.log("train/loss", (total / count).float(), prog_bar=True)
        for term, value in zip(terms, totals, strict=True):
            self.log(f"train/{term.name}", term.mean(value, count).float())
        # A tensor on the CPU stays there; a number would be copied to the device, which waits for it.
        self.log("lr", torch.tensor(float(self.trainer.optimizers[0].param_groups[0]["lr"])))
        return loss

    @override
    def on_after_backward(self) -> None:
        # Here, and not in on_before_optimizer_step, where callbacks see the gradients before this module is called.
        accumulate = self.trainer.accumulate_grad_batches
        if accumulate > 1 and not self.trainer.fit_loop._should_accumulate():
            factor = self._window.factor(accumulate)
            if factor != 1.0:
                groups = (group for optimizer in self.trainer.optimizers for group in optimizer.param_groups)
                scale_gradients((parameter for group in groups for parameter in group["params"]), factor)

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)

    @override
    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)

    @override
    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the mean log-likelihood of a sequence's valid labels ``[B]`` (nats a token, NaN if it has none)."""
        losses, valid = self._token_losses(batch)
        return -losses.sum(dim=1) / valid.sum(dim=1)

    @override
    def on_validation_epoch_start(self) -> None:
        self._evaluated = torch.zeros(2, device=self.device)

    @override
    def on_test_epoch_start(self) -> None:
        self._evaluated = torch.zeros(2, device=self.device)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _token_losses(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of each token ``[B, L]`` in float32, 0 where the label does not count, and where it does."""
        if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
            found = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise TypeError(f"CausalLM needs batches that map 'input_ids' and 'labels' to tensors, got {found}")
        labels = batch["labels"]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        logits = self(**inputs, use_cache=False).logits
        losses = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="none")
        return losses.view(labels.shape), labels != _IGNORED

    def _evaluate(self, batch: Mapping[str, Tensor]) -> None:
        losses, valid = self._token_losses(batch)
        # In float32 the sums of a long validation would lose what single tokens add.
        dtype = _wide_dtype(losses)
        self._evaluated = self._evaluated.to(dtype) + torch.stack([losses.sum(dtype=dtype), valid.sum().to(dtype)])

    def _log_evaluation(self, stage: str) -> None:
        """Log the mean over the valid tokens of all batches, dataloaders and ranks."""
        total, count = self._reduced(self._evaluated).unbind()
        loss = total / count
        # The values are those of all ranks already; sync_dist says so to Lightning, which would warn otherwise.
        self.log(f"{stage}/loss", loss.float(), prog_bar=True, sync_dist=True)
        self.log(f"{stage}/perplexity", loss.exp().float(), sync_dist=True)

    def _reduced(self, sums: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(sums, reduce_op="sum")

    # Optimizer

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(decay_groups(self))

        def factor(step: int) -> float:
            return learning_rate_factor(step, self._total_steps, self.warmup_steps, self.schedule, self.min_lr_ratio)

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    @override
    def on_train_start(self) -> None:
        self._window.reset()  # of a run that ended within an accumulation
        if self.schedule == "cosine":
            self._total_steps()  # an unknown length is an error now, not after the warm-up
        # A checkpoint brings the learning rate of its own run's length: follow the present length from the first step.
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if isinstance(scheduler, LambdaLR):
                rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
                for group, base, factor in rates:
                    group["lr"] = base * factor(scheduler.last_epoch)

    def _total_steps(self) -> int:
        total = self.trainer.estimated_stepping_batches
        if total == -1 or math.isinf(total):
            raise ValueError(
                "schedule='cosine' needs to know how long the run is: set Trainer(max_steps=...), or max_epochs with"
                " data of known length, or use schedule='constant'"
            )
        return int(total)


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for sums over many tokens; MPS has no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
