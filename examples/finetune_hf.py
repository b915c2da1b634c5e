"""Train a Transformers MoE model in a LightningModule of your own: only ``strategy="moe_ep"`` is new.

python examples/finetune_hf.py                             # Lightning starts the processes
torchrun --nproc-per-node 2 examples/finetune_hf.py        # or torchrun does
python examples/finetune_hf.py --model path/to/folder      # weights that save_pretrained wrote, else random ones
"""

import argparse

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import lightning_moe  # noqa: F401  registers strategy="moe_ep"
from lightning_moe.data import StdlibCode


class LanguageModel(pl.LightningModule):
    def __init__(self, folder: str | None) -> None:
        super().__init__()
        if folder is not None:
            self.net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        else:
            config = Qwen3MoeConfig(
                vocab_size=256, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
            )  # fmt: skip
            self.net = Qwen3MoeForCausalLM(config)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        logits = self.net(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy="moe_ep",
        accelerator="auto",
        devices=options.devices,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        max_steps=options.steps,
        log_every_n_steps=1,
    )
    trainer.fit(LanguageModel(options.model), StdlibCode(sequence_length=128, batch_size=4))
    trainer.print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.3f}")
