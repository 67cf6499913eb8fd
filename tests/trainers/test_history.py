"""Allocator events to timelines: pairing, moments, and frees that no instrument saw."""

from __future__ import annotations

from memcalc.timeline import CATEGORIES, MOMENTS
from trainers.history import Boundary, Event, History

MARKS = ["start", "forward", "loss", "backward", "step"]


def steps(count: int, *, lost: set[int]) -> tuple[list[Event], list[Boundary]]:
    """Steps of 1000 ns: an activation from forward to backward, and in backward a buffer of a collective that is freed
    at once, but whose free is not seen in ``lost`` steps."""
    events, boundaries = [Event(1, 1, 100, "parameter")], []
    for step in range(count):
        at = (step + 1) * 1000
        boundaries += [Boundary(at + i * 100, step, moment) for i, moment in enumerate(MARKS)] + [
            Boundary(at + 600, -1, "init")
        ]
        buffer = 50 + step
        events += [
            Event(at + 110, 2, 10, "activation"),
            Event(at + 310, buffer, 7, "FSDP::all_gather"),
            Event(at + 330, 3, 5, "grad"),
        ]
        events += [Event(at + 340, 2, -10), Event(at + 410, 3, -5)]
        events += [Event(at + 320, buffer, -7)] if step not in lost else []
    return events, boundaries


def peaks(history: History, step: int) -> dict[str, int]:
    return {window.moment: window.peak for window in history.windows() if window.step == step}


EXPECTED = {"start": 100, "forward": 110, "loss": 110, "backward": 117, "step": 105}


def test_peaks_by_moment() -> None:
    history = History(*steps(3, lost=set()), kept={1})
    assert [peaks(history, step) for step in range(3)] == [EXPECTED] * 3


def test_unseen_frees_are_those_of_the_same_buffer_in_another_step() -> None:
    for lost in ({0}, {1}, {2}, {0, 2}):
        history = History(*steps(3, lost=lost), kept={1})
        assert [peaks(history, step) for step in range(3)] == [EXPECTED] * 3, lost


def test_a_buffer_that_is_never_seen_freed_is_not_invented_away() -> None:
    history = History(*steps(3, lost={0, 1, 2}), kept={1})
    assert peaks(history, 2)["start"] == 100 + 2 * 7


def test_what_is_kept_lives_on() -> None:
    events, boundaries = steps(2, lost=set())
    events += [Event(1410, 9, 4, "scalar"), Event(2410, 10, 4, "scalar"), Event(2420, 10, -4)]
    assert peaks(History(events, boundaries, kept={1, 9}), 1)["start"] == 104


def test_frees_of_earlier_allocations_do_not_count() -> None:
    events, boundaries = steps(1, lost=set())
    assert peaks(History([*events, Event(1050, 77, -999)], boundaries, kept={1}), 0) == EXPECTED


def test_timeline_of_one_step() -> None:
    history = History(*steps(3, lost=set()), kept={1})
    known = history.identify(10**6, {1: "parameters"})
    timeline = history.timeline(2, known)
    assert timeline.names == ("parameter", "activation", "FSDP::all_gather", "grad")
    assert timeline.delta.tolist() == [100, 10, 7, -7, 5, -10, -5]
    assert [MOMENTS[i] for i in timeline.moment] == ["start", "forward", *["backward"] * 4, "step"]
    categories = dict(
        zip(timeline.names, [CATEGORIES[timeline.category[timeline.ident == i][0]] for i in range(4)], strict=True)
    )
    assert categories == {
        "parameter": "parameters", "activation": "activations", "FSDP::all_gather": "communication", "grad": "temporary",
    }  # fmt: skip
    assert (timeline.peak().bytes, timeline.peak().moment) == (117, "backward")
