"""The walls and budgets of docs/structure.md."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "millstream"

# lowest first; a module may import from its own group's packages only itself, and anything lower
LAYERS: list[set[str]] = [
    {"errors", "log"},
    {"config"},
    {"request"},
    {"messages"},
    {"hub"},
    {"tokenizer"},
    {"kernels", "parallel"},
    {"weights", "layers"},
    {"models"},
    {"worker"},
    {"executor"},
    {"sched"},
    {"engine"},
    {"server", "bench", "chat", "check"},
    {"sim"},
    {"cli"},
]
CORE = {"config", "errors", "log", "request", "messages", "sched", "engine", "executor", "parallel", "worker", "cli"}
TORCH_FREE = (
    "sched",
    "engine",
    "server",
    "bench",
    "hub",
    "tokenizer",
    "request",
    "messages",
    "config",
    "chat",
    "sim",
    "cli",
)
# the one lazy step from the engine to the workers
LAZY_EXCEPTION = "millstream.executor.base"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def is_deferred(node: ast.AST) -> bool:
    """Whether what a node holds does not run when its module is imported."""
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


def imports(path: Path, *, at_import_time: bool) -> Iterator[str]:
    """Full names of what a file imports; `at_import_time` leaves out functions' bodies and TYPE_CHECKING blocks."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield full if full in MODULES else child.module
            elif at_import_time and is_deferred(child):
                continue
            else:
                yield from walk(child)

    yield from walk(ast.parse(path.read_text()))


def test_imports_run_down_only() -> None:
    level = {name: i for i, group in enumerate(LAYERS) for name in group}
    wrong = []
    for module, path in MODULES.items():
        package = package_of(module)
        if package == "__init__":
            continue
        for imported in imports(path, at_import_time=False):
            if not imported.startswith("millstream.") or imported == "millstream.__init__":
                continue
            target = package_of(imported)
            if target != package and level[target] >= level[package]:
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_sched_and_worker_meet_only_in_messages() -> None:
    for module, path in MODULES.items():
        targets = {package_of(i) for i in imports(path, at_import_time=False) if i.startswith("millstream.")}
        if package_of(module) == "sched":
            assert targets <= {"sched", "messages", "request", "errors", "config"}, module
        if package_of(module) == "worker":
            assert "sched" not in targets, module


def test_kernels_import_nothing_above_them() -> None:
    for module, path in MODULES.items():
        if package_of(module) == "kernels":
            targets = {package_of(i) for i in imports(path, at_import_time=False) if i.startswith("millstream.")}
            assert targets <= {"kernels", "errors", "log"}, module


def test_models_and_layers_know_no_requests_and_no_settings() -> None:
    for module, path in MODULES.items():
        if package_of(module) in {"models", "layers"}:
            targets = {package_of(i) for i in imports(path, at_import_time=False) if i.startswith("millstream.")}
            assert not targets & {"config", "request", "messages"}, module


def test_torch_free_packages_reach_no_torch() -> None:
    """Transitively, over all imports that run when a module is imported."""
    reached: dict[str, set[str]] = {}

    def reach(module: str) -> set[str]:
        if module not in reached:
            reached[module] = set()
            for imported in imports(MODULES[module], at_import_time=True):
                reached[module].add(imported.split(".")[0] if not imported.startswith("millstream") else imported)
                if imported in MODULES:
                    reached[module] |= reach(imported)
        return reached[module]

    for module in MODULES:
        if package_of(module) in TORCH_FREE or module == "millstream.models.arch":
            assert "torch" not in reach(module), module


@pytest.mark.parametrize("module", ["millstream.engine.async_llm", "millstream.server.app", "millstream.bench.serve"])
def test_importing_the_front_end_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_executor_factory_imports_workers_lazily() -> None:
    for module, path in MODULES.items():
        if package_of(module) in {"sched", "engine", "server", "bench"}:
            assert not any("worker" in i.split(".") for i in imports(path, at_import_time=False)), module


def test_only_three_modules_read_the_environment() -> None:
    allowed = {"millstream.cli", "millstream.log", "millstream.parallel.context"}
    for module, path in MODULES.items():
        if "os.environ" in path.read_text() or "os.getenv" in path.read_text():
            assert module in allowed, module


def test_nothing_unpickles() -> None:
    for module, path in MODULES.items():
        names = {name for i in imports(path, at_import_time=False) for name in i.split(".")}
        assert not names & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, module
        for word in ("recv_pyobj", "send_pyobj", "torch.load(", "eval(", "exec("):
            text = path.read_text().replace(".eval(", "").replace("create_subprocess_exec(", "")
            assert word not in text, f"{module}: {word}"


def test_budgets() -> None:
    for module, path in MODULES.items():
        text = path.read_text()
        assert len(text.splitlines()) <= 500, f"{module} has more than 500 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 80, f"{module}.{node.name} has more than 80 lines"
            if isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
                assert len(methods) <= 25, f"{module}.{node.name} has more than 25 methods"
                assert "Mixin" not in node.name


def test_the_core_stays_small() -> None:
    lines = sum(lines_of_code(p) for m, p in MODULES.items() if package_of(m) in CORE)
    assert lines <= 5000, f"the core has {lines} lines of code"


def lines_of_code(path: Path) -> int:
    """Lines that hold code: comments and docstrings are free, lest the budget be met by leaving them out."""
    text = path.read_text()
    code: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            docs.update(range(node.lineno, node.end_lineno + 1))
    return len(code - docs)
