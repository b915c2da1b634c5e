"""Callbacks for any LightningModule and any strategy."""

from lightning_moe.callbacks.continue_training import ContinueTraining
from lightning_moe.callbacks.throughput import ThroughputMonitor

__all__ = ["ContinueTraining", "ThroughputMonitor"]
