"""Kernels are interpreted unless GPU tests are asked for (`-m gpu`): the choice holds for the process, before Triton is imported."""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # the tensors are small, and threads wait for each other
    if not _wants_gpu(config):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_report_header(config: pytest.Config) -> str:
    return "kernels: on the GPU" if _wants_gpu(config) else "kernels: Triton's interpreter, on the CPU"


def _wants_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr == "gpu" and torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _wants_gpu(config):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: pytest -m gpu on a machine that has one"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The GPU tests that did not run, by name: a skip is never a pass."""
    skipped = [report.nodeid for report in terminalreporter.stats.get("skipped", []) if "needs a GPU" in str(report.longrepr)]
    if skipped:
        terminalreporter.section(f"{len(skipped)} GPU tests did not run here")
        terminalreporter.write_line("\n".join(skipped))
