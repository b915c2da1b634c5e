from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_moe.callbacks import ValidateAtStart


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.net.weight)

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(x).square().mean()

    def validation_step(self, x: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.net(x).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, max_steps: int, ckpt_path: str | None = None) -> tuple[list[str], pl.Trainer]:
    data = DataLoader(torch.ones(8, 1))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=CSVLogger(folder, name="", version=0 if ckpt_path is None else 1),
        callbacks=[ValidateAtStart()],
        val_check_interval=4,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Line(), data, data, ckpt_path=ckpt_path)
    lines = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = lines[0].split(",")
    rows = [dict(zip(columns, line.split(","), strict=True)) for line in lines[1:]]
    return [(row["step"], round(float(row["val_loss"]), 3)) for row in rows if row.get("val_loss")], trainer


def test_the_curve_begins_at_the_first_loss_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    curve, trainer = fit(tmp_path, 8)
    assert curve[0] == ("0", 1.0)
    # w *= 0.8 a step, the loss is w ** 2
    assert curve[1:] == [("3", round(0.8**8, 3)), ("7", round(0.8**16, 3))]
    assert trainer.global_step == 8
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed, _ = fit(tmp_path, 12, str(tmp_path / "a.ckpt"))
    assert [int(step) > 8 for step, _ in resumed] == [True], "no second beginning"
