"""Callbacks for any LightningModule and any strategy."""

from lightning_moe.callbacks.continue_training import ContinueTraining
from lightning_moe.callbacks.throughput import ThroughputMonitor
from lightning_moe.callbacks.validate_at_start import ValidateAtStart

__all__ = ["ContinueTraining", "ThroughputMonitor", "ValidateAtStart"]
