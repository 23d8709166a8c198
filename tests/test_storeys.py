"""Who may import whom, and what must work without the packages that only kernels need."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "reference": {"reference"},
    "optimized": {"optimized", "reference"},
    "parity": {"parity", "optimized", "reference"},
    "workbench": {"parity", "optimized", "reference"},
}
OURS = {*ALLOWED, "tests"}
OPTIONAL = {"triton", "fla", "flash_mla"}
TOP = {
    "reference", "optimized", "parity", "tests", "results", "workbench.py", "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile",
}  # fmt: skip
LONGEST_FILE = 400
TYPED_TOLERANCE = re.compile(r"\b(rtol|atol|rel|abs|tol\w*)\s*=\s*[0-9.]")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in [*(ROOT / folder).rglob("*.py"), ROOT / f"{folder}.py"] if path.is_file())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def nodes(tree: ast.AST, into_functions: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if into_functions or not isinstance(node, ast.FunctionDef):
            yield from nodes(node, into_functions)


def imports(path: Path, lazy: bool = True) -> Iterator[str]:
    """Every module that a file names in an import, with `lazy` inside functions too; `from a import b` gives a and a.b."""
    for node in nodes(ast.parse(path.read_text(encoding="utf-8")), lazy):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path).split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def first(name: str) -> str:
    return name.partition(".")[0]


def kernel_modules() -> set[str]:
    """Modules that can't be imported without an optional package."""
    return {module_name(path) for path in sources(*ALLOWED) if OPTIONAL & {first(name) for name in imports(path, lazy=False)}}


@pytest.mark.parametrize("storey", ALLOWED)
def test_a_storey_imports_only_what_is_below_it(storey: str) -> None:
    seen = sources(storey)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}" for path in seen for name in imports(path)
        if first(name) in OURS - ALLOWED[storey]
    ]  # fmt: skip
    assert seen and not wrong, "; ".join(wrong)


def test_kernel_modules_are_imported_by_name_or_inside_a_function() -> None:
    kernels = kernel_modules()
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}" for path in sources(*ALLOWED) if module_name(path) not in kernels
        for name in imports(path, lazy=False) if name in kernels
    ]  # fmt: skip
    assert "optimized.kda_decode" in kernels and not wrong, "; ".join(wrong)


def python(code: str) -> str:
    """Standard output of a fresh process that runs `code` at the root."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# As if they weren't installed: every finder answers None for them.
BLOCK = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in {sorted(OPTIONAL)} else self.finder.find_spec(name, *rest)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.mark.parametrize("prelude", [BLOCK, ""], ids=["not installed", "installed"])
def test_all_but_kernels_imports_without_the_optional_packages(prelude: str) -> None:
    modules = [name for path in sources("reference", "parity", "optimized") if (name := module_name(path)) not in kernel_modules()]
    code = f"import importlib, json, sys\nfor name in {[*modules, 'workbench']}: importlib.import_module(name)\n"
    loaded = json.loads(python(prelude + code + "print(json.dumps(sorted(sys.modules)))"))
    assert set(modules) <= set(loaded) and not OPTIONAL & set(loaded)


COMMANDS = {
    "help": ["--help"],
    "dispatch": ["dispatch"],
    "list": ["sweep", "--list"],
    "sweep": "sweep kda.decode --device cpu --model tiny --steps 2 --regime slow --state-dtype fp32 --impl triton,torch".split(),
}


@pytest.fixture(scope="module")
def without() -> dict[str, tuple[int, str]]:
    """Exit code and standard output of each command where no optional package is installed."""
    code = f"""
import contextlib, io, json, workbench
done = {{}}
for name, arguments in {COMMANDS!r}.items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            workbench.main(arguments)
        except SystemExit as stopped:
            code = stopped.code or 0
    done[name] = code, out.getvalue()
print(json.dumps(done))
"""
    return {name: (code, out) for name, (code, out) in json.loads(python(BLOCK + code)).items()}


@pytest.mark.parametrize(("name", "says"), [("help", "sweep"), ("dispatch", "sm90"), ("list", "kda.decode"), ("sweep", "kda.decode")])
def test_the_command_works_without_the_optional_packages(without: dict[str, tuple[int, str]], name: str, says: str) -> None:
    code, out = without[name]
    assert code == 0 and says in out


def test_a_sweep_without_triton_skips_it_with_its_reason_and_judges_torch(without: dict[str, tuple[int, str]]) -> None:
    _, out = without["sweep"]
    assert out.startswith("PASS  kda.decode: 1 PASS, 1 SKIPPED")
    assert "SKIPPED triton: triton is not installed (1 row)" in out
    assert next(line for line in out.splitlines() if line.split()[:1] == ["torch"]).split()[-1] == "PASS"


def test_no_tolerance_is_typed_outside_the_limits() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for path in sources("tests", "parity") if path.name != "limits.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if TYPED_TOLERANCE.search(line)
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_no_file_is_longer_than_a_reader_bears() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*OURS)}
    assert len(lengths) > 20 and not {name: length for name, length in lengths.items() if length > LONGEST_FILE}


def test_the_top_level_holds_the_agreed_entries() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert {path.partition("/")[0] for path in listed if path and not path.startswith(".")} == TOP
