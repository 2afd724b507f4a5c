"""Long-term memory around causal language models that exist."""
