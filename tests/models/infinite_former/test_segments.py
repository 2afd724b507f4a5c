"""The plan of the segment loop, against one that follows every token of every row by itself."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.models.infinite_former.segments import append, plan_steps, token_order


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 6),
    window=st.integers(0, 8),
    calls=st.lists(st.lists(st.integers(0, 15), min_size=3, max_size=3), min_size=1, max_size=4),
    at_least=st.integers(1, 9),
)
def test_every_token_meets_its_own_segment_and_window(
    length: int, window: int, calls: list[list[int]], at_least: int
) -> None:
    seen = [0, 0, 0]
    kept = torch.full((3, window, 1), -1.0)
    for counts in calls:
        num_tokens = max(*counts, 1)
        # Token t of a document carries t; padding carries a number that no document has.
        tokens = torch.stack([torch.arange(num_tokens) + start for start in seen]).float()
        for row, count in enumerate(counts):
            tokens[row, count:] = -9
        steps = list(plan_steps(seen, counts, length, window, kept.shape[1], torch.device("cpu"), at_least=at_least))
        assert len(steps) >= at_least
        outputs, read = [], [0, 0, 0]
        for step in steps:
            if step.tokens_BT is None:
                new = tokens[:, step.start : step.start + step.length]
            else:
                new = tokens.gather(1, step.tokens_BT)
            full = torch.ones(3, dtype=torch.bool) if step.write_B is None else step.write_B
            if step.write:
                for row in full.nonzero().flatten().tolist():
                    end = seen[row] + read[row]
                    assert end % length == 0
                    written = kept[row, window : window + length, 0]
                    assert written.tolist() == list(range(end - length, end))
            kept = append(kept, new[..., None], step.move)
            assert kept.shape[1] == step.move.width <= window + length
            for row in range(3):
                real = step.length if step.real_BT is None else int(step.real_BT[row].sum())
                place = min(row, len(step.places_BT) - 1)
                for query in range(real):
                    token = seen[row] + read[row] + query
                    start = token // length * length
                    sees = step.mask_BTS[min(row, len(step.mask_BTS) - 1), query]
                    values = kept[row, step.first :, 0][sees].tolist()
                    assert values == list(range(max(start - window, 0), token + 1))
                    assert step.places_BT[place, query] == window + token - start
                assert step.mask_BTS[min(row, len(step.mask_BTS) - 1)].any(dim=-1).all()
                read[row] += real
            outputs.append(new)
        order = token_order(steps, counts, num_tokens)
        joined = torch.cat(outputs, dim=1)
        restored = joined if order is None else joined.gather(1, order)
        for row, count in enumerate(counts):
            assert read[row] == count
            assert restored[row, :count].tolist() == tokens[row, :count].tolist()
        seen = [start + count for start, count in zip(seen, counts, strict=True)]
