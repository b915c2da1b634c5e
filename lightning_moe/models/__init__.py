"""LightningModules that the configs of this project instantiate."""

from lightning_moe.models.causal_lm import CausalLM

__all__ = ["CausalLM"]
