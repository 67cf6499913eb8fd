"""The fastest plans that fit, found without looking at most of the others.

A ledger is played only for plans that would be chosen if they fitted: the fastest of those left is looked at first, and
one look tells which micro batches of its structure fit. Whole structures fall by their states, which need no ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memcalc.fitting import Group, needed_bytes, state_bound
from memcalc.plan import Plan
from memcalc.search import Search
from memcalc.structures import Structure, simplicity, structures
from memcalc.throughput import step_times

__all__ = ["SAME", "TIE", "Field", "Key", "row_key", "seconds_per_sample"]

TIE = 0.03
"""Plans this close in predicted time count as equal: one layout measured twice differs by 2.8 % (110.48 and
113.54 s, bigscience chronicles of tr11-176B), so a smaller lead is noise."""

SAME = 0.005
"""Forms of one row this close count as equal, and the simplest is taken: they print as the same relative speed."""

Key = tuple[object, ...]


def _family(plan: Plan) -> Key:
    """Plans that differ in what is computed again, how the loss is taken and how the optimizer walks, all of which the
    plainest of them, by the fastest walk, does without."""
    return plan.strategy, plan.ranks, plan.layout, plan.fsdp, plan.precision, plan.offload


def _is_plain(plan: Plan) -> bool:
    return not plan.checkpoint_every and not plan.loss.chunk_head


def seconds_per_sample(structure: Structure) -> NDArray[np.float64]:
    """Predicted time of one sample over all ranks at each micro batch of a structure."""
    found = step_times(structure.plan, structure.micro_batches, structure.accumulations).seconds_per_sample
    return np.asarray(found, dtype=np.float64)


def row_key(plan: Plan) -> Key:
    """Plans that are one row of the answer: what else differs is how the strategy is carried out."""
    layout = (plan.layout.tensor, plan.layout.pipeline)
    return plan.strategy, plan.ranks, layout, plan.checkpoint_every, plan.precision, plan.offload.on


def _effort(made: Structure, place: int) -> tuple[int, int]:
    return made.accumulations[place], made.micro_batches[place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """How a search went: plans that were counted, and how most of them needed no look."""

    plans: int
    structures: int
    by_states: int
    """Structures whose states alone are too much."""
    by_forward: int
    """Structures that fall by what their first forward passes leave."""
    ledgers: int
    """Structures whose ledger was looked at."""
    refuted: int
    """Of these, structures of which no micro batch fits."""

    @property
    def slower(self) -> int:
        """Structures that were left alone because something that fits is faster."""
        return self.structures - self.by_states - self.by_forward - self.ledgers


class Field:
    """All plans of a search as arrays, one entry a plan, and what is known of the groups that share a ledger."""

    def __init__(self, job: Search) -> None:
        self.job = job
        self.structures: list[Structure] = list(structures(job))
        self.groups: list[Group] = []
        self.by_states: set[int] = set()
        """Structures that fall by their states alone."""
        self.entries: list[NDArray[np.int64]] = []
        """Those of each structure, in the order of its micro batches."""
        group: list[int] = []
        place: list[int] = []
        owner: list[int] = []
        index: list[int] = []
        for number, each in enumerate(self.structures):
            limit = job.limit(each.plan)
            falls = needed_bytes(each.plan, state_bound(each.plan)) > limit
            if falls:
                self.by_states.add(number)
            start = len(group)
            order: list[int] = []
            for members in self._by_ledger(each):
                sizes = [each.micro_batches[k] for k in members]
                self.groups.append(Group(each.plan, each.rounds(members[0]), sizes, limit, -1 if falls else None))
                group += [len(self.groups) - 1] * len(members)
                place += range(len(members))
                order += members
            owner += [number] * len(order)
            index += order
            self.entries.append(start + np.argsort(np.array(order, np.int64)))
        self.group, self.place = np.array(group, np.int64), np.array(place, np.int64)
        self.owner, self.index = np.array(owner, np.int64), np.array(index, np.int64)
        self.fitting = np.array([len(g.micro_batches) - 1 if g.largest is None else -1 for g in self.groups], np.int64)
        """Index of the largest micro batch of a group that fits as far as is known."""
        ranks = sorted(range(len(self.structures)), key=lambda n: simplicity(self.structures[n].plan))
        self.simplicity = np.empty(len(ranks), np.int64)
        self.simplicity[ranks] = np.arange(len(ranks))
        keys: dict[Key, int] = {}
        self.row = np.array([keys.setdefault(row_key(each.plan), len(keys)) for each in self.structures], np.int64)
        self.seconds = np.full(len(group), np.inf)
        """Predicted time of a sample; of a structure that is not timed yet a bound."""
        self.timed = np.zeros(len(self.structures), bool)
        self._bounds()

    def _bounds(self) -> None:
        """Time the plainest structures of each family: the others take no less at the same micro batch."""
        families: dict[Key, list[int]] = {}
        for number, each in enumerate(self.structures):
            if number not in self.by_states:
                families.setdefault(_family(each.plan), []).append(number)
        for members in families.values():
            plain = [n for n in members if _is_plain(self.structures[n].plan)]
            for number in plain:
                self.time(number)
            if not plain:  # closed by the search: nothing is known of the others
                for number in members:
                    self.time(number)
                continue
            least = np.min([self.seconds[self.entries[number]] for number in plain], axis=0)
            for number in members:
                if not self.timed[number]:
                    self.seconds[self.entries[number]] = least

    def time(self, number: int) -> None:
        """Take a structure's own time."""
        self.seconds[self.entries[number]] = seconds_per_sample(self.structures[number])
        self.timed[number] = True

    @staticmethod
    def _by_ledger(each: Structure) -> Iterator[list[int]]:
        """Indices of the micro batches that share a ledger, by rising size."""
        rounds = [each.rounds(k) for k in range(len(each.micro_batches))]
        for count in dict.fromkeys(rounds):
            yield sorted((k for k, r in enumerate(rounds) if r == count), key=lambda k: each.micro_batches[k])

    def plan(self, entry: int) -> Plan:
        return self.structures[self.owner[entry]].at(int(self.index[entry]))

    def possible(self) -> NDArray[np.bool_]:
        """Plans that fit as far as is known."""
        return self.place <= self.fitting[self.group]

    def look(self, group: int) -> None:
        """Find out a step further which micro batches of a group do not fit."""
        self.fitting[group] = self.groups[group].look(int(self.fitting[group]))

    def largest(self, group: int) -> int:
        """Index of the largest micro batch of a group that fits, -1 where none does: looked at to the end."""
        while not self.known(group):
            self.look(group)
        return int(self.fitting[group])

    def known(self, group: int) -> bool:
        return self.groups[group].largest is not None

    def refuse(self, entry: int) -> None:
        """A plan that seemed to fit does not, and neither does what is larger."""
        group, place = int(self.group[entry]), int(self.place[entry]) - 1
        self.groups[group].largest = place
        self.fitting[group] = place

    def fastest(self, among: NDArray[np.bool_]) -> int | None:
        """The fastest plan that fits."""
        while True:
            alive = among & self.possible()
            if not alive.any():
                return None
            entry = int(np.argmin(np.where(alive, self.seconds, np.inf)))
            group, owner = int(self.group[entry]), int(self.owner[entry])
            if not self.timed[owner]:
                self.time(owner)
            elif self.known(group):
                return entry
            else:
                self.look(group)

    def pick(self, among: NDArray[np.bool_], tie: float = TIE) -> int | None:
        """The row of the simplest structure within a tie of the fastest plan that fits, in its best form."""
        first = self.fastest(among)
        if first is None:
            return None
        limit = (1 + tie) * float(self.seconds[first])
        near = np.flatnonzero(among & self.possible() & (self.seconds <= limit))
        for owner in sorted(set(self.owner[near].tolist()), key=lambda number: int(self.simplicity[number])):
            if len(self._fitting_of(owner, near, limit)):
                return self._best_of(self.row[self.owner] == self.row[owner], limit)
        raise AssertionError("the fastest itself fits")

    def _fitting_of(self, owner: int, near: NDArray[np.int64], limit: float) -> NDArray[np.int64]:
        """Plans of a structure that fit and are within the limit."""
        if not self.timed[owner]:
            self.time(owner)
        here = near[(self.owner[near] == owner) & (self.seconds[near] <= limit)]
        for group in set(self.group[here].tolist()):
            while not self.known(group) and self.fitting[group] >= self.place[here[self.group[here] == group]].min():
                self.look(group)
        return here[self.place[here] <= self.fitting[self.group[here]]]

    def _best_of(self, row: NDArray[np.bool_], limit: float) -> int:
        """The fastest of a row; of those as fast the simplest, which accumulates less and holds less."""
        first = self.fastest(row)
        assert first is not None
        limit = min((1 + SAME) * float(self.seconds[first]), limit)
        near = np.flatnonzero(row & self.possible() & (self.seconds <= limit))
        for owner in sorted(set(self.owner[near].tolist()), key=lambda number: int(self.simplicity[number])):
            if len(here := self._fitting_of(owner, near, limit)):
                made = self.structures[owner]
                return min(here.tolist(), key=lambda entry: _effort(made, int(self.index[entry])))
        raise AssertionError("the fastest itself fits")

    def looked(self) -> Looked:
        """How the search went."""
        found: dict[int, list[Group]] = {}
        for group, owner in dict(zip(self.group.tolist(), self.owner.tolist(), strict=True)).items():
            if owner not in self.by_states:
                found.setdefault(owner, []).append(self.groups[group])
        played = [groups for groups in found.values() if any(each.looked for each in groups)]
        return Looked(
            plans=len(self.seconds),
            structures=len(self.structures),
            by_states=len(self.by_states),
            by_forward=sum(all(each.largest == -1 and not each.looked for each in groups) for groups in found.values()),
            ledgers=len(played),
            refuted=sum(all(each.largest == -1 for each in groups) for groups in played),
        )
