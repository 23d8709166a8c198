"""What an implementation is made of: its source files and the versions of its packages. Imports nothing to find them."""

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

OURS = Path(__file__).resolve().parents[1]


def version(package: str) -> str | None:
    """Of an installed package; None for one that isn't."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sources(module_name: str, root: Path | None = None, seen: set[str] | None = None) -> set[Path]:
    """The module's file, and those of its project (the folder that its top package lies in) and ours that it imports, to any depth."""
    seen = set() if seen is None else seen
    path = _file(module_name)
    if module_name in seen or path is None:
        return set()
    seen.add(module_name)
    root = root or path.parents[module_name.count(".") + (path.name == "__init__.py")]
    installed = "site-packages" in path.parts and root.name != "site-packages"  # a virtual environment inside the project
    if installed or not (path.is_relative_to(root) or path.is_relative_to(OURS)):
        return set()
    found = {path}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            package = module_name.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            found |= sources(name, root, seen)
    return found


def _file(module_name: str) -> Path | None:
    """Where a module's source is; None for what has none, or doesn't exist. Imports nothing: a package may do anything then."""
    top, *inside = module_name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if not inside:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    folders = [Path(location, *inside) for location in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in (folder.with_name(f"{folder.name}.py"), folder / "__init__.py")]
    return next(filter(Path.is_file, files), None)
