"""The column ``strategy`` of a table of speeds: which ranks do what.

    single | ddpN | fsdp_full_shardN | fsdp_shard_grad_opN | fsdp_no_shardN | hsdpN+shardS | zero0 ... zero3

then ``+dpD +tpT +ppP +cpC +epE``, and ``+shardS`` where optimizer states are divided over S ranks only; ``+interleaved``
and ``+sp`` are marks. ``dpD+...`` without a word before is plain data parallel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Arrangement", "parse"]

_KINDS = "single|ddp|fsdp_full_shard|fsdp_shard_grad_op|fsdp_no_shard|hsdp|zero[0-3]"
_KIND = re.compile(rf"({_KINDS})([0-9]{{0,6}})")
_DEGREE = re.compile(r"(dp|tp|pp|cp|ep|shard)([0-9]{1,6})")
_MARKS = ("interleaved", "sp")
_MOST = 10**6  # ranks, as in Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """What a cell of the column says. Degrees are at least 1."""

    kind: str
    """``single``, ``ddp``, one of FSDP's, ``hsdp``, ``zero0`` to ``zero3``, or ``dp`` for plain data parallel."""
    data: int = 1
    """Ranks with samples of their own."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    shard: int = 0
    """Ranks over which shards, or optimizer states, are spread; 0 for all that there are."""
    interleaved: bool = False
    sequence: bool = False
    one_process: bool = False
    """``dp2(DataParallel)``: torch.nn.DataParallel."""

    @property
    def ranks(self) -> int:
        """All of them; experts are spread over ranks that are counted already."""
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        """The cell again, in the grammar's order, without degrees of 1 except that of data parallel.

        >>> str(parse("zero1+dp8+tp1+pp2"))
        'zero1+dp8+pp2'
        """
        if self.kind in ("single", "dp") or self.kind.startswith("zero"):
            first = [self.kind] * (self.kind != "dp") + [f"dp{self.data}"] * (self.kind != "single")
        else:
            first = [f"{self.kind}{self.data}"]
        degrees = (("tp", self.tensor), ("pp", self.pipeline), ("cp", self.context), ("ep", self.expert))
        rest = [f"{name}{degree}" for name, degree in degrees if degree > 1]
        rest += [f"shard{self.shard}"] * (self.shard > 0)
        rest += ["interleaved"] * self.interleaved + ["sp"] * self.sequence
        return "+".join([*first, *rest]) + "(DataParallel)" * self.one_process


def parse(text: str) -> Arrangement | None:
    """A cell read; None where it is not of this grammar, or says a degree twice or one that cannot be.

    >>> parse("hsdp32+shard8").data, parse("fsdp_full_shard8+tp8+pp8+interleaved").ranks
    (32, 512)
    >>> parse("zero2 (degree not stated)") is None, parse("zero1+tp2+pp4") is None
    (True, True)
    """
    words = text.strip().lower()
    one_process = words.endswith("(dataparallel)")
    first, *rest = words.removesuffix("(dataparallel)").split("+")
    kind = _KIND.fullmatch(first)
    degrees: dict[str, int] = {}
    if kind is None:
        rest, name = [first, *rest], "dp"
    else:
        name = kind[1]
        if kind[2]:
            if name.startswith("zero") or name == "single":
                return None
            degrees["dp"] = int(kind[2])
    marks = []
    for part in rest:
        degree = _DEGREE.fullmatch(part)
        if degree and degree[1] not in degrees:
            degrees[degree[1]] = int(degree[2])
        elif part in _MARKS and part not in marks:
            marks.append(part)
        else:
            return None
    if name == "single" and not degrees.keys() - {"ep"}:
        degrees["dp"] = 1
    models = degrees.keys() & {"tp", "pp", "cp"}
    if "dp" not in degrees and not (name == "dp" and models):
        return None
    if name == "hsdp" and "shard" not in degrees:
        return None
    found = Arrangement(
        kind=name, data=degrees.get("dp", 1), tensor=degrees.get("tp", 1), pipeline=degrees.get("pp", 1),
        context=degrees.get("cp", 1), expert=degrees.get("ep", 1), shard=degrees.get("shard", 0),
        interleaved="interleaved" in marks, sequence="sp" in marks, one_process=one_process,
    )  # fmt: skip
    return found if _possible(found, degrees) else None


def _possible(found: Arrangement, degrees: dict[str, int]) -> bool:
    shares = found.shard == 0 or (found.data * found.context) % found.shard == 0
    alone = not found.one_process or (found.kind == "dp" and found.ranks == found.data)
    return min(degrees.values(), default=1) >= 1 and found.ranks <= _MOST and shares and alone
