"""Scores of distances, against the formula read off the paper entry by entry."""

from __future__ import annotations

import math

import pytest
import torch

from hf_longmem.ops.relative import relative_scores, relative_scores_of_last, sinusoids


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


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (5, 5), (4, 9), (64, 65)])
def test_scores_of_the_last_queries_are_those_of_their_distances(queries: int, keys: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 3, queries, 8, dtype=torch.float64), torch.randn(3, keys, 8, dtype=torch.float64)]
    distance = keys - queries + torch.arange(queries)[:, None] - torch.arange(keys)
    upstream = torch.where(distance >= 0, torch.randn(2, 3, queries, keys, dtype=torch.float64), 0.0)
    found, expected = [], []
    for results, score in (
        (found, relative_scores_of_last),
        (expected, lambda q, r: relative_scores(q, r, distance[None])),
    ):
        q, r = (tensor.clone().requires_grad_() for tensor in given)
        scores = score(q, r)
        results += [scores.masked_fill(distance < 0, 0.0), *torch.autograd.grad(scores, (q, r), upstream)]
    torch.testing.assert_close(found, expected)
