"""Modules over the operators: they project, call one operator, and project back."""
