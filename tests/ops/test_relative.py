"""Scores of distances, against the formula read off the paper entry by entry."""

from __future__ import annotations

import math

import torch

from hf_longmem.ops.relative import relative_scores, sinusoids


def test_sinusoids_are_the_papers() -> None:
    encoded = sinusoids(5, 6, theta=100.0)
    for distance in range(5):
        for pair in range(3):
            angle = distance * 100.0 ** (-2 * pair / 6)
            assert math.isclose(encoded[distance, pair], math.sin(angle), abs_tol=1e-6)
            assert math.isclose(encoded[distance, pair + 3], math.cos(angle), abs_tol=1e-6)


def test_every_pair_is_scored_by_its_own_distance() -> None:
    torch.manual_seed(0)
    q, r = torch.randn(2, 3, 4, 8), torch.randn(3, 6, 8)
    distance = torch.randint(0, 6, (2, 4, 5))
    scores = relative_scores(q, r, distance)
    for row in range(2):
        for query in range(4):
            for key in range(5):
                expected = (q[row, :, query] * r[:, distance[row, query, key]]).sum(-1)
                torch.testing.assert_close(scores[row, :, query, key], expected)


def test_distances_outside_the_table_are_taken_for_the_nearest_inside() -> None:
    q, r = torch.randn(1, 1, 1, 4), torch.randn(1, 3, 4)
    outside = relative_scores(q, r, torch.tensor([[[-2, 9]]]))
    torch.testing.assert_close(outside, relative_scores(q, r, torch.tensor([[[0, 2]]])))
