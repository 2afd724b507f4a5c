"""Pure functions on tensors: no transformers, no nn.Module, no hidden state."""
