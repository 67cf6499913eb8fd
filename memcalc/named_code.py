"""Code of the user's own that a plan names: it runs only where whoever runs the plan names it, too.

A plan is a file, which may come from anywhere. Every field of it that leads to code is in ``_CODE``; whatever reads a
plan to run it asks ``confirm_code`` first, the ranks of a run as well.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from memcalc.errors import InputError, shorten
from memcalc.plan import Plan

__all__ = ["check_name", "code_options", "confirm_code"]

_NAME = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.json")
_ABSOLUTE = re.compile(r"(.+\.(?:py|json))(:.*)?")
_CODE = {"--module": "factory", "--sample": "sample"}
"""By option: the field of a plan's module that names code."""


def check_name(text: str, option: str = "--module") -> str:
    """A factory's name with an absolute path where it is one of a file. Raises InputError.

    >>> check_name("package.models:tiny")
    'package.models:tiny'
    """
    if not _NAME.fullmatch(text) or "\0" in text:
        raise InputError(
            f"{option} {shorten(text)} cannot be read; write it like package.file:name or path/file.py:name"
        )
    found = _ABSOLUTE.fullmatch(text)
    return f"{Path(found[1]).absolute()}{found[2] or ''}" if found else text


def code_options(plan: Plan) -> list[str]:
    """The options that name all code a plan runs: none for one that runs none. A ``.json`` holds no code.

    >>> from memcalc.models import MODELS
    >>> code_options(Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1))
    []
    """
    said = [(option, getattr(plan.model.module, field)) for option, field in _CODE.items()]
    return [word for option, name in said if name and not name.endswith(".json") for word in (option, name)]


def confirm_code(plan: Plan, module: str | None, sample: str | None, command: str) -> None:
    """Raises InputError unless the user has named all code that the plan would run, as ``--module`` and ``--sample``.

    ``command`` is what the user would write before them.
    """
    wanted = code_options(plan)
    for (option, field), named in zip(_CODE.items(), (module, sample), strict=True):
        code = getattr(plan.model.module, field)
        if not code and named is not None:
            raise InputError(
                f"{option} {named}: the plan is of {plan.model.name}, which runs no such code of yours; leave it out"
            )
        if named is None and option in wanted:
            runs = " and ".join(dict.fromkeys(wanted[1::2]))
            raise InputError(
                f"the plan runs the code of {runs}; say that it shall: {f'{command} '.lstrip()}{shlex.join(wanted)}"
            )
        if named is not None and check_name(named, option) not in (code, _as_file(code)):
            raise InputError(f"{option} {named} is not what the plan runs, which is {code}")


def _as_file(factory: str) -> str:
    """The name of a factory by its file, where a module of that name lies in the folder it is started in."""
    module, _, name = factory.partition(":")
    path = Path(*module.split(".")).with_suffix(".py").absolute() if "/" not in module else Path()
    return f"{path}:{name}" if path.is_file() else factory
