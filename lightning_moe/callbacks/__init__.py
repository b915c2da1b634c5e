"""Callbacks for any LightningModule. All but ``ExpertLoadMonitor`` take any strategy, too."""

from lightning_moe.callbacks.continue_training import ContinueTraining
from lightning_moe.callbacks.expert_load import ExpertLoadMonitor
from lightning_moe.callbacks.hub_checkpoint import HubCheckpoint
from lightning_moe.callbacks.throughput import ThroughputMonitor
from lightning_moe.callbacks.validate_at_start import ValidateAtStart

__all__ = ["ContinueTraining", "ExpertLoadMonitor", "HubCheckpoint", "ThroughputMonitor", "ValidateAtStart"]
