"""Hypothesis strategies over KV tensor layouts."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcascade.handlers.device.geometry import PageRef

from .kv_layouts import Case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layout of up to three groups over up to four tensors."""
    pages = tuple(draw(st.lists(st.integers(1, 96), min_size=1, max_size=4)))
    gaps = tuple(draw(st.sampled_from([0, 0, 8, 13])) for _ in pages)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        tensors = draw(st.lists(st.integers(0, len(pages) - 1), min_size=1, max_size=4))
        groups.append(
            tuple(
                PageRef(t, draw(st.sampled_from([pages[t], max(1, pages[t] // 2)])))
                for t in tensors
            )
        )
    world = draw(st.integers(1, 3))
    return Case(
        pages,
        gaps,
        tuple(groups),
        draw(st.sampled_from([1, 2, 4])),
        world,
        draw(st.integers(0, world - 1)),
        draw(st.sampled_from([0, 7, 4096])),
    )
