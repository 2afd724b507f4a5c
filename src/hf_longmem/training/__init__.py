"""What training and evaluation need beside a `Trainer`: metrics, callbacks, and which checkpoint is whole."""
