"""Parts without a framework."""
