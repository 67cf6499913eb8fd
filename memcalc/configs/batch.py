"""The arithmetic of a batch: samples per step = micro batch x accumulation x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.errors import PlanError

__all__ = ["Batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Three numbers of which one may follow from the others; None where a file says nothing."""

    train: int | None = None
    """Samples per optimizer step over all ranks."""
    micro: int | None = None
    """Samples per rank and forward pass."""
    accumulation: int | None = None

    def ranks(self) -> int | None:
        """Data-parallel ranks that follow where all three are said and divide.

        >>> Batch(train=32, micro=4, accumulation=2).ranks()
        4
        """
        if not (self.train and self.micro and self.accumulation) or self.train % (self.micro * self.accumulation):
            return None
        return self.train // (self.micro * self.accumulation)

    def settled(self, ranks: int, name: str, copies: int = 1) -> Batch:
        """All three, for so many data-parallel ranks, each of them ``copies`` GPUs wide.

        As DeepSpeed fills them in (deepspeed/runtime/config.py, _set_batch_related_parameters), but nothing is rounded:
        what does not divide raises PlanError with the numbers that would do.

        >>> Batch(train=32, accumulation=1).settled(8, "ds.json").micro
        4
        >>> Batch(train=256, micro=2).settled(7, "ds.json")
        Traceback (most recent call last):
        ...
        memcalc.errors.PlanError: ds.json: train batch 256 does not divide over micro batch 2 x 7 ranks; what would do: train batch 252 or 266, or 8 GPUs
        """
        train, micro, rounds = self.train, self.micro, self.accumulation
        if train is None:
            micro, rounds = micro or 1, rounds or 1
            return Batch(train=micro * rounds * ranks, micro=micro, accumulation=rounds)
        if micro is None:
            rounds = rounds or 1
            micro = self._part(train, rounds, "accumulation", ranks, name, copies)
        elif rounds is None:
            rounds = self._part(train, micro, "micro batch", ranks, name, copies)
        if train != micro * rounds * ranks:
            raise PlanError(
                f"{name}: train batch {train} is not micro batch {micro} x accumulation {rounds} x {_ranks(ranks)}, "
                f"which is {micro * rounds * ranks}; what would do: {', or '.join(self._cures(train, micro, rounds, ranks, copies))}"
            )
        return Batch(train=train, micro=micro, accumulation=rounds)

    @staticmethod
    def _part(train: int, part: int, called: str, ranks: int, name: str, copies: int) -> int:
        """What is left for the third number."""
        each = part * ranks
        if train % each == 0:
            return train // each
        below, above = train // each * each, (train // each + 1) * each
        trains = " or ".join(str(near) for near in (below, above) if near)
        most = min(train // part, 2 * ranks + 1024)
        counts = [count for count in range(1, most + 1) if train % (part * count) == 0]
        cure = f", or {_gpus(min(counts, key=lambda count: (abs(count - ranks), count)) * copies)}" if counts else ""
        raise PlanError(
            f"{name}: train batch {train} does not divide over {called} {part} x {_ranks(ranks)}; "
            f"what would do: train batch {trains}{cure}"
        )

    @staticmethod
    def _cures(train: int, micro: int, rounds: int, ranks: int, copies: int) -> list[str]:
        found = [f"train batch {micro * rounds * ranks}"]
        for called, others in (("accumulation", micro * ranks), ("micro batch", rounds * ranks)):
            if train % others == 0:
                found.append(f"{called} {train // others}")
        if train % (micro * rounds) == 0:
            found.append(_gpus(train // (micro * rounds) * copies))
        return found


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"
