"""Reformer with angular LSH attention, reversible layers and axial positions (Kitaev et al. 2020)."""
