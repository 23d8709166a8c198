"""How the repair attaches to Triton: what it patches, when it refuses, and that it leaves a process without it alone."""

import sys
from types import SimpleNamespace

import pytest

from optimized import interpreter
from tests.optimized.test_interpreter import child

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def repaired() -> None:
    interpreter.repair()


pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")


@pytest.mark.parametrize("path", ["_convert_float", "InterpreterBuilder.create_dot", "GridExecutor.__call__"])
def test_a_missing_patch_point_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *owner, name = path.split(".")
    module = triton.runtime.interpreter
    monkeypatch.setattr(interpreter._lane, "repaired", False)
    monkeypatch.setattr(interpreter, "_REPAIRS", {path: interpreter._REPAIRS[path]})
    monkeypatch.delattr(getattr(module, owner[0]) if owner else module, name)
    with pytest.raises(RuntimeError, match=rf"Triton {triton.__version__}.*{path} (is missing|takes)"):
        interpreter.repair()


def test_a_patch_point_with_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter._lane, "repaired", False)
    monkeypatch.setattr(triton.runtime.interpreter, "_convert_float", lambda input, output_dtype: input)
    with pytest.raises(RuntimeError, match="_convert_float takes"):
        interpreter.repair()


def test_repairing_twice_changes_nothing() -> None:
    before = triton.runtime.interpreter.GridExecutor.__call__
    interpreter.repair()
    assert triton.runtime.interpreter.GridExecutor.__call__ is before


def test_reversed_order_is_refused_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=runtime))
    assert not interpreter.active()
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), interpreter.program_order(True):
        pass


@pytest.mark.parametrize(("variable", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_environment_decides_before_triton_is_imported(variable: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", variable)
    assert interpreter.active() is expected


def test_without_triton_the_module_imports_and_does_nothing() -> None:
    code = "import sys; sys.modules['triton'] = None; from optimized import interpreter as i; i.repair(); print(i.active())"
    assert child("-c", code, TRITON_INTERPRET="1").strip() == "False"


@pytest.mark.parametrize("version", ["3.9.0", "3.10.1+git123", "4.0"])
def test_versions_from_3_9_on_are_supported(version: str) -> None:
    assert interpreter.unsupported(version) is None


@pytest.mark.parametrize("version", ["3.6.0", "3.8.9", "2.11", "main"])
def test_older_and_unreadable_versions_get_a_reason_that_names_them(version: str) -> None:
    assert version in str(interpreter.unsupported(version))
