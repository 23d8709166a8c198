"""What an implementation is: callable, contract, declared kernels, what it can run, and the identity of its sources."""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimized import contracts
from reference.points import Contract

OURS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Workload:
    """What an implementation is asked to run, and where: `arch` is `sm90`, ... or `cpu`."""

    op: str
    arch: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    heads: int
    batch: int
    key_dim: int
    value_dim: int
    lower_bound: float | None = None  # of the gate; None: softplus
    hidden: int = 0  # of a mixer
    contexts: int = 0  # sequences of a mixer that are prefilled, before the others
    rows: int = 0  # of the activations
    drafts: int = 0  # of a verify

    @property
    def projected(self) -> int:
        """Elements of a mixer's [q|k|v|f_a|g_a|b], whose gates have a rank of K."""
        return self.hidden * (self.heads * (2 * self.key_dim + self.value_dim + 1) + 2 * self.key_dim)


Supports = Callable[[Workload], tuple[bool, str]]


@dataclass(frozen=True)
class Implementation:
    """One implementation. kernels: what it declares to launch; names with `aten::` are torch operators."""

    op: str
    name: str
    target: str  # package.module:function
    contract: Contract | None  # None: none declared, judged against exact gold
    kernels: tuple[str, ...]
    supports: Supports
    packages: tuple[str, ...] = ()  # whose versions are part of its identity
    capturable: bool = True  # in a CUDA graph
    patient: bool = False  # takes a minute a row in Triton's interpreter: swept there when it is named
    function: Callable[..., Any] | None = None  # given as such, not by name
    prepare: str = ""  # module:function that makes a layer's weights what the callable takes, once
    contexts: Contract | None = None  # of a mixer's context rows, where it isn't that of the others
    also: Callable[[Workload], tuple[str, ...]] = lambda work: ()  # kernels that only some workloads launch

    def __post_init__(self) -> None:
        if self.contract is not None:
            contracts.check(self.op, self.contract)
        if self.contexts is not None:
            contracts.check(self.op, self.contexts)

    def load(self) -> Callable[..., Any]:
        """The callable. ImportError when a package is missing; ValueError when the target does not exist."""
        function = self.function or resolve(self.target)
        return Prepared(function, resolve(self.prepare)) if self.prepare else function

    def declared(self, work: Workload) -> tuple[str, ...]:
        """The kernels it declares to launch for `work`."""
        return (*self.kernels, *self.also(work))

    def source_hash(self, versions: Mapping[str, str | None] | None = None) -> str:
        """Identity of what runs: its sources, those of its project it imports, its contract, and its packages' versions.

        versions: of packages on another machine, instead of those installed here.
        """
        digest = hashlib.sha256()
        sources = sorted(_sources(self.target.partition(":")[0]))
        for path in sources:
            digest.update(path.read_bytes())
        if not sources and self.function is not None and hasattr(self.function, "__code__"):  # typed into a session
            digest.update(self.function.__code__.co_code)
        digest.update(repr((self.target, self.contract)).encode())
        for package in self.packages:
            known = versions[package] if versions and package in versions else version(package)
            digest.update(f"{package}={(known or 'None').partition('+')[0]}".encode())  # 2.11.0+cu130 is 2.11.0
        return digest.hexdigest()[:16]


class Prepared:
    """A mixer whose weights are made ready when it first meets a layer, as an engine does at load."""

    def __init__(self, function: Callable[..., Any], prepare: Callable[[Any], Any]) -> None:
        self.function, self.prepare = function, prepare
        self.given: Any = None
        self.ready: Any = None

    def __call__(self, hidden: Any, weights: Any, **arguments: Any) -> Any:
        if self.given is not weights:
            self.given, self.ready = weights, self.prepare(weights)
        return self.function(hidden, self.ready, **arguments)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def resolve(target: str) -> Callable[..., Any]:
    module_name, _, function_name = target.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"impl: {module_name} has no function {function_name!r}")
    return function


def _sources(module_name: str, root: Path | None = None, seen: set[str] | None = None) -> set[Path]:
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
            found |= _sources(name, root, seen)
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
