"""What training and evaluation need beside a `Trainer`: metrics of long documents (`metrics`)."""
