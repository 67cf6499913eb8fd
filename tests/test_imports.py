"""The direction of the imports, and that the torch-free half works without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lowest first: a module imports from its own row or from rows above it, never from a row below.
LAYERS = [
    ["errors", "units", "files", "records", "extensions", "collector"],
    ["catalog", "palette", "plain_pickle", "rates", "hyperparameters", "snapshot_fields"],
    ["coefficient_table"],
    ["coefficients"],
    ["precision", "quantised", "hardware", "timeline", "snapshot", "spec", "allocator_options", "allocator_blocks"],
    ["machine", "allocator"],
    ["replay", "allocator_history", "snapshot_origin", "snapshot_timeline", "snapshot_summary"],
    ["recorder", "kernels"],
    ["groups", "schedules", "engines"],
    ["layout"],
    ["graph"],
    ["autograd"],
    ["tape"],
    [
        "ops",
        "norms",
        "positions",
        "context_parallel",
        "softmaxes",
        "fused_attention",
        "attention",
        "convolution",
        "experts",
    ],
    ["stacked_experts"],
    ["tensor_parallel", "vocab_parallel", "megatron", "cross_entropy"],
    ["models"],
    ["hf"],
    [
        "optimizers",
        "strategies",
        "implementation",
        "adapters",
        "fsdp",
        "frozen",
        "deepspeed",
        "offload",
        "checkpointing",
        "loss",
        "startup",
        "update",
        "compute",
    ],
    ["sound"],
    ["plan"],
    ["named_code", "images"],
    ["data", "checkpoints"],
    ["sharding", "stages"],
    ["host"],
    ["parallel", "pipeline", "adapted"],
    ["batch"],
    ["step", "alike"],
    ["ledger", "streams", "passes"],
    ["peaks"],
    ["climb"],
    ["reserved"],
    ["outside"],
    ["hints"],
    ["assumptions"],
    ["estimate"],
    [
        "work",
        "traffic",
        "rank_hardware",
        "links",
        "rank_time",
        "throughput",
        "strategy_table",
        "open_choices",
        "search",
        "structures",
        "fitting",
        "closest",
        "choosing",
        "reasons",
        "recommend",
        "remedies",
        "solve",
        "gate",
        "measurement",
        "doctor",
        "doctor_facts",
        "doctor_system",
        "meters",
        "bench",
        "calibrate",
        "compare",
        "supervise",
        "training",
        "foreign",
        "run_folder",
        "runnable",
        "failure",
        "launch",
        "module",
        "validate",
        "rehearsal",
        "confirmation",
    ],
    ["configs"],
    ["tables"],
    ["pictures"],
    ["cli"],
    ["ui"],
    ["__main__"],
]
ALLOWED = {
    "memcalc": {"click", "tabulate", "numpy", "memcalc"},
    "trainers": {"click", "numpy", "torch", "memcalc", "trainers"},
}
OPTIONAL = {
    "trainers": {"PIL", "accelerate", "deepspeed", "safetensors", "tokenizers", "transformers"},
    "memcalc": {"PIL", "matplotlib", "tokenizers", "yaml"},
}  # imported inside the function that needs them

FILES = sorted([*(ROOT / "memcalc").rglob("*.py"), *(ROOT / "trainers").rglob("*.py")])


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, *, lazy: bool) -> Iterator[str]:
    """Absolute names a file imports when it is loaded; with ``lazy``, those inside functions too.

    What stands under ``if TYPE_CHECKING`` never runs and does not count.
    """
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if is_module(name) else str(node.module) for name in names)
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def layer(module: str) -> int | None:
    """Row of a memcalc module; a row that names a package holds for all modules in it."""
    name = module.removeprefix("memcalc.")
    ranked = [(len(row), i) for i, names in enumerate(LAYERS) for row in names if f"{name}.".startswith(f"{row}.")]
    return max(ranked)[1] if ranked else None


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_imports_point_one_way(path: Path) -> None:
    package = dotted(path).split(".")[0]
    for name in imported(path, lazy=True):
        top = name.split(".")[0]
        known = ALLOWED[package] | OPTIONAL.get(package, set()) | sys.stdlib_module_names
        assert top in known, f"{dotted(path)} imports {name}"
    if package == "memcalc" and dotted(path) != "memcalc":
        mine = layer(dotted(path))
        assert mine is not None, f"{dotted(path)} stands in no row of LAYERS"
        for name in imported(path, lazy=False):
            if name.startswith("memcalc."):
                theirs = layer(name)
                assert theirs is not None and theirs <= mine, f"{dotted(path)} imports {name}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_optional_packages_are_imported_where_they_are_used(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path, lazy=False)}
    assert not tops & (OPTIONAL["trainers"] | OPTIONAL["memcalc"])


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_modules_say_what_they_are_and_offer(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not tree.body:
        return  # an empty __init__.py
    assert ast.get_docstring(tree), f"{dotted(path)} has no docstring"
    if path.name == "__main__.py":
        return
    offered = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    public = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"]
    assert offered or not public, f"{dotted(path)} has no __all__"  # ruff holds that it is sorted and true


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "trainers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.mark.parametrize("arguments", [["--help"], ["estimate", "gpt2", "--micro-batch", "1"]], ids=" ".join)
def test_commands_work_without_torch(arguments: list[str]) -> None:
    code = "sys.argv[0] = 'memcalc'\nimport runpy\nrunpy.run_module('memcalc', run_name='__main__')"
    done = run(code, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) > 3


def test_importing_memcalc_is_light() -> None:
    code = "import memcalc\nprint(sorted({'torch', 'numpy', 'click', 'tabulate'} & set(sys.modules)))"
    done = run(code)
    assert done.stdout == "[]\n", done.stderr


def in_cycles(paths: dict[str, Path]) -> list[str]:
    """Modules that need themselves to be imported: what a package's own module imports needs the package."""
    needed: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = {module, *imported(path, lazy=False)}
        packages = {name.rsplit(".", up)[0] for name in names for up in range(1, name.count(".") + 1)}
        needed[module] = ((names | packages) & set(paths)) - {module}
    found = []
    for module in paths:
        seen, waiting = set(), [module]
        while waiting:
            new = needed[waiting.pop()] - seen
            seen |= new
            waiting += new
        found += [module] * (module in seen)
    return found


def test_any_module_can_be_imported_first() -> None:
    """Each of a cycle may be the one that is asked for first; all others only ever come upon one of these."""
    paths = {
        dotted(path): path for path in FILES if path.is_relative_to(ROOT / "memcalc") and path.name != "__main__.py"
    }
    cycles = in_cycles(paths)
    assert {"memcalc.models", "memcalc.models.named"} <= set(cycles) and "memcalc.tape" not in cycles
    code = """
from importlib import import_module
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] == "memcalc"]:
        del sys.modules[name]
    import_module(module)
"""
    done = run(code, *cycles)
    assert done.returncode == 0, done.stderr
    done = run("from importlib import import_module\nfor module in sys.argv[1:]:\n    import_module(module)", *paths)
    assert done.returncode == 0, done.stderr
