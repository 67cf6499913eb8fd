"""Faults in the page of memcalc ui: who is answered, what may be asked, and what is drawn."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="any Host may ask memcalc ui",
        file="ui/server.py",
        right='self.headers.get_all("Host", []) not in [[host] for host in own]',
        wrong='not self.headers.get_all("Host", [])',
    ),
    Fault(
        name="another site may ask memcalc ui",
        file="ui/server.py",
        right=' not in ("none", "same-origin") and not link:',
        wrong=" is None:",
    ),
    Fault(
        name="an address may name a module whose code is run",
        file="ui/words.py",
        right='CLOSED = ("module", "sample", "wrap", "module_timeout")',
        wrong='CLOSED = ("sample", "wrap", "module_timeout")',
    ),
    Fault(
        name="an address may name a file as its model",
        file="ui/words.py",
        right="model = [MODELS[value].name]",
        wrong="model = [value]",
    ),
    Fault(
        name="memcalc ui draws a moment without its first instant",
        file="ui/answers.py",
        right=" if live[here].max() >= before[here[0]] else int(here[0]) - 1",
        wrong="",
    ),
    Fault(
        name="a recommended plan that is taken loses its flags",
        file="ui/words.py",
        right="        if value is not None and (value != usual[name]",
        wrong="        if value is not None and not isinstance(value, bool) and (value != usual[name]",
    ),
    Fault(
        name="memcalc ui takes a model of any micro batch as played",
        file="ui/answers.py",
        right="played=_played(replace(plan, micro_batch=min(plan.micro_batch, 1)))",
        wrong="played=_played(replace(plan, accumulation=1, micro_batch=min(plan.micro_batch, 1)))",
    ),
    Fault(
        name="no card is ever too full for what the allocator would keep",
        file="reserved.py",
        right="allocated <= capacity < point",
        wrong="capacity < 0",
    ),
    Fault(
        name="a mistake in a link names no control",
        file="ui/server.py",
        right="[*typed, *quoted, *words]",
        wrong="typed",
    ),
]
