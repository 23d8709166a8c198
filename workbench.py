"""GLM Workbench on the command line: parse, call `parity`, render."""

import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

INTERRUPTED = 130
T = TypeVar("T")
EXIT_CODES = (
    "Exit codes: 0 all PASS or SKIPPED with at least one PASS; 1 any FAIL; 2 usage; 3 INCONCLUSIVE or VACUOUS, a row is missing, "
    "or nothing ran."
)

app = typer.Typer(
    help=f"Parity of optimized kernels with FP32 references, step by step. {EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Format(StrEnum):
    """Renderings of a record."""

    text = "text"
    json = "json"
    junit = "junit"
    markdown = "markdown"
    html = "html"


Operators = Annotated[
    list[str] | None, typer.Argument(metavar="[OP|CASE]...", help="Operators or cases (op:key=value,...); all when left out.")
]
Device = Annotated[str | None, typer.Option(help="cpu (Triton's interpreter), cuda or cuda:N. Default: cuda when there is one.")]
Out = Annotated[Path | None, typer.Option(help="Write the record here, as JSON, after every row.")]
As = Annotated[Format, typer.Option("--format", help="What to print.")]
ReportAs = Annotated[Format | None, typer.Option("--format", help="What to print. Default: what --out ends in, else text.")]
ReportOut = Annotated[Path | None, typer.Option(help="Write here instead of printing.")]


def _many(what: str) -> Any:
    return typer.Option(help=f"{what} Comma separated.")


@app.command(epilog=EXIT_CODES)
def sweep(
    op: Operators = None,
    model: Annotated[str | None, _many("Presets.")] = None,
    heads: Annotated[str | None, _many("Heads on this rank.")] = None,
    batch: Annotated[str | None, _many("Sequences.")] = None,
    drafts: Annotated[str | None, _many("Drafts of a verify, 1 to 7.")] = None,
    tokens: Annotated[str | None, _many("Tokens of a prefill's step, in all sequences.")] = None,
    dtype: Annotated[str | None, _many("Activations: bf16, fp16, fp32.")] = None,
    state_dtype: Annotated[str | None, _many("State pool: fp32, bf16.")] = None,
    regime: Annotated[str | None, _many("Input regimes.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps from the shared state.")] = None,
    impl: Annotated[str | None, _many("Implementations, or package.module:function of your own.")] = None,
    reference: Annotated[str | None, typer.Option(help="Drift against this implementation instead of the FP32 reference.")] = None,
    seed: Annotated[str | None, typer.Option(help="Instead of the one derived from the case. Comma separated.")] = None,
    device: Device = None,
    preset: Annotated[str | None, typer.Option(help="source: the cases of the source PRs, instead of operators and lists.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of these options; the command line wins.")] = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Keep rows of this record whose inputs, contract and sources are unchanged.")] = None,
    format: As = Format.text,
    fail_fast: Annotated[bool, typer.Option(help="Stop at the first FAIL.")] = False,
    list: Annotated[bool, typer.Option("--list", help="List operators, implementations and regimes; run nothing.")] = False,
    signatures: Annotated[bool, typer.Option("--signatures", help="With --list: signatures, for an implementation of your own.")] = False,
) -> None:
    """Parity over operators x heads x batch x dtype x state dtype x regime x implementation."""
    given = dict(
        op=op or None, model=model, heads=heads, batch=batch, drafts=drafts, tokens=tokens, dtype=dtype, state_dtype=state_dtype,
        regime=regime, steps=steps, impl=impl, reference=reference, seed=seed, device=device, preset=preset,
    )  # fmt: skip
    options = _options(config, given)
    from parity import catalog, record, render, sweep

    if list or signatures:
        typer.echo(catalog.listing(signatures))
        return
    before = record.load(resume) if resume else None
    if out is not None:
        record.check_writable(out)
    work = sweep.tasks(options)
    made = record.new(options.device, _command_line())
    if before is not None:
        typer.echo(f"keeping {sweep.kept(work, before, made['environment'])} of {len(work)} rows from {resume}", err=True)
    with _progress() as progress:
        bar = progress.add_task("", total=len(work))
        sweep.run(
            work, made, out=out, resume=before, fail_fast=fail_fast,
            started=lambda task: progress.update(bar, description=f"{task.impl.name} {task.problem}"),
            finished=lambda row: _advance(progress, bar, row),
        )  # fmt: skip
    _print(made, format, render)
    raise typer.Exit(record.exit_code(made))


@app.command()
def bench(
    op: Operators = None,
    model: Annotated[str | None, _many("Presets.")] = None,
    heads: Annotated[str | None, _many("Heads on this rank. Default: the operator's own list, as for the others.")] = None,
    batch: Annotated[str | None, _many("Sequences.")] = None,
    drafts: Annotated[str | None, _many("Drafts of a verify, 1 to 7.")] = None,
    tokens: Annotated[str | None, _many("Tokens of a prefill, in all sequences.")] = None,
    dtype: Annotated[str | None, _many("Activations: bf16, fp16, fp32.")] = None,
    state_dtype: Annotated[str | None, _many("State pool: fp32, bf16.")] = None,
    device: Device = None,
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Ours at every tile that was considered, instead of ours beside the peers.")
    ] = False,
    out: Out = None,
    format: As = Format.text,
) -> None:
    """Speed beside the peers and the device's ceilings, in one run. Needs a GPU: exit code 3 without."""
    given = dict(
        op=op or None, model=model, heads=heads, batch=batch, drafts=drafts, tokens=tokens, dtype=dtype, state_dtype=state_dtype,
        device=device,
    )  # fmt: skip
    options = _options(None, given)
    from parity import bench, record, render

    if out is not None:
        record.check_writable(out)
    problems = bench.problems(options.device, given)
    if not options.device.startswith("cuda"):
        typer.echo("nothing was timed: no GPU here, and the interpreter gives no timing. On a GPU this would measure:")
        typer.echo("\n".join(str(problem) for problem in problems))
        raise typer.Exit(3)
    made = record.new(options.device, _command_line())
    made["bench"] = bench.device_ceilings(options.device)
    with _progress() as progress:
        bar = progress.add_task("", total=len(problems))
        for problem in problems:
            progress.update(bar, description=str(problem))
            made["bench"] += bench.measure(problem, tiles)
            if out is not None:
                record.save(made, out)
            progress.advance(bar)
    _print(made, format, render)


@app.command()
def dispatch(
    op: Annotated[str, typer.Argument(help="Operator.")] = "kda.decode",
    model: Annotated[str, typer.Option(help="Preset.")] = "glm-5.3-flash",
    heads: Annotated[int, typer.Option(help="Heads on this rank.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 16,
    dtype: Annotated[str, typer.Option(help="Activations: bf16, fp16, fp32.")] = "bf16",
    state_dtype: Annotated[str, typer.Option(help="State pool: fp32, bf16.")] = "fp32",
    arch: Annotated[str | None, typer.Option(help="One architecture, such as sm90; all when left out.")] = None,
    without: Annotated[str, typer.Option(help="Implementations to switch off, comma separated.")] = "",
) -> None:
    """What would run where, and why: for every SM version, with or without a GPU."""
    _interpret("cpu")
    from dataclasses import replace

    from optimized import dispatch
    from parity.problem import Problem
    from parity.render import tables

    work = Problem(op, model, heads, batch, dtype, state_dtype).workload()
    off = [name.strip() for name in without.split(",") if name.strip()]
    choices = {arch: dispatch.choose(replace(work, arch=arch), off)} if arch is not None else dispatch.matrix(work, off)
    title = f"{op} {model}, {heads} heads, batch {batch}, {dtype} activations, {state_dtype} state"
    Console(width=None if Console().is_terminal else 200).print(tables.dispatch(title, choices))


@app.command()
def doctor(device: Device = None) -> None:
    """This machine: versions, what can run, known compiler faults. Exit code 1 when something is wrong."""
    device = _device(device)
    from parity import doctor
    from parity.render import tables

    findings = doctor.examine(device)
    Console(width=None if Console().is_terminal else 160).print(tables.doctor(findings))
    raise typer.Exit(int(any(finding.ok is False for finding in findings)))


@app.command(epilog=EXIT_CODES)
def report(
    files: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Records that sweep and bench wrote; several are merged.")],
    format: ReportAs = None,
    out: ReportOut = None,
) -> None:
    """Render a record: text, JSON, JUnit, Markdown or HTML. Of several, the newest row of each case, every part's device kept."""
    from parity import merge, record, render

    if out is not None:
        record.check_writable(out)
    found = [record.load(file) for file in files]
    made = found[0] if len(found) == 1 else merge.merge(found, _command_line())
    names = " ".join(map(str, files))
    _deliver(_intact(f"record: {names}", lambda: _rendered(made, _format(format, out), render, out)), out)
    raise typer.Exit(record.exit_code(made))


@app.command(epilog="Exit codes: 0 nothing got worse; 1 something did, or is missing; 2 usage; 3 nothing is in both records.")
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A record that sweep or bench wrote.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A later one.")],
    format: ReportAs = None,
    out: ReportOut = None,
) -> None:
    """What changed between two records: verdicts, errors beyond noise, times beyond their spread, rows that are missing."""
    from parity import compare, record, render
    from parity.render import changes

    if out is not None:
        record.check_writable(out)
    before, after = record.load(old), record.load(new)
    chosen = _of_page(_format(format, out))

    def told() -> tuple[str, int]:
        found = compare.compare(before, after)
        text = changes.dumps(found) if chosen is Format.json else _laid(changes.of(found, before, after), chosen, render, out)
        return text, found.exit_code()

    text, code = _intact(f"record: {old} or {new}", told)
    _deliver(text, out)
    raise typer.Exit(code)


@app.command(epilog="Exit codes: 0 B is not shown to be worse; 1 B is significantly worse; 2 usage; 3 no questions.")
def accuracy(
    a: Annotated[Path, typer.Argument(metavar="A", help="Answers of one run: .jsonl or .csv, one row a question.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Answers of the other to the same questions.")],
    id: Annotated[str, typer.Option(help="What the files call a question.")] = "id",
    correct: Annotated[str, typer.Option(help="What they call whether it was answered right: true, false, 1 or 0.")] = "correct",
    task: Annotated[str, typer.Option(help="What they call its task, where they have several.")] = "task",
    format: ReportAs = None,
    out: ReportOut = None,
) -> None:
    """Did B answer worse than A? Exact McNemar test, interval of the difference, the smallest one that could be shown."""
    from parity import accuracy, record, render
    from parity.render import answers

    if out is not None:
        record.check_writable(out)
    chosen, columns, names = _of_page(_format(format, out)), accuracy.Columns(id, correct, task), (str(a), str(b))
    found = accuracy.compare(accuracy.load(a, columns), accuracy.load(b, columns), names)
    text = answers.dumps(found) if chosen is Format.json else _laid(answers.of(found, names), chosen, render, out)
    _deliver(text, out)
    raise typer.Exit(accuracy.exit_code(found))


def _options(config: Path | None, given: dict[str, Any]) -> Any:
    """The options of a sweep, with the interpreter chosen for their device before Triton is imported."""
    from parity import problem, sweep

    options = sweep.layered(_default_device(), config, given)
    problem.check_device(options.device)
    sweep.interpret(options.device)
    return options


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(device: str | None) -> str:
    from parity import problem

    chosen = _default_device() if device is None else device
    problem.check_device(chosen)
    _interpret(chosen)
    return chosen


def _interpret(device: str) -> None:
    from parity import sweep

    sweep.interpret(device)


def _command_line() -> list[str]:
    """What was asked, without the folders of this machine."""
    return ["workbench", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _advance(progress: Progress, bar: TaskID, row: dict[str, Any]) -> None:
    """Move the bar; where there is no terminal to draw it on, a line a row."""
    progress.advance(bar)
    if not progress.console.is_terminal:
        task = progress.tasks[bar]
        typer.echo(f"{task.completed:.0f}/{task.total:.0f} {row['verdict']} {row['impl']} {row['case']} {row['seconds']} s", err=True)


def _rendered(made: dict[str, Any], format: Format, render: Any, out: Path | None = None) -> str:
    """The record as it is printed."""
    return str(render.render(made, format) if format is not Format.text else _laid(render.page.of(made), format, render, out))


def _laid(blocks: Any, format: Format, render: Any, out: Path | None) -> str:
    """The page as it is printed: text as wide as the terminal."""
    console = Console()
    if format is Format.text:
        return str(render.text.lay(blocks, width=max(console.width, 100), color=console.is_terminal and out is None))
    return str(render.lay(blocks, format))


def _format(asked: Format | None, out: Path | None) -> Format:
    from parity import render

    return asked or Format(render.SUFFIXES.get(out.suffix if out else "", "text"))


def _of_page(format: Format) -> Format:
    if format is Format.junit:
        raise ValueError("format: expected one of text, json, markdown, html, got 'junit', which is a record's; use report for it")
    return format


def _intact(what: str, work: Callable[[], T]) -> T:
    """What `work` makes of a record; ValueError where the record's values are not what its keys promise."""
    try:
        return work()
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is damaged ({type(error).__name__}: {error}); make it anew with sweep --out") from error


def _deliver(text: str, out: Path | None) -> None:
    from parity import record

    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        record.write(out, text)


def _print(made: dict[str, Any], format: Format, render: Any) -> None:
    _deliver(_rendered(made, format, render), None)


def _refuse(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `workbench` command; `arguments` instead of those of the process. What a user can mend is one line and exit code 2."""
    sys.path.append(os.getcwd())  # where `--impl module:function` is looked for
    try:
        app(arguments)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            typer.echo("interrupted: with --out, the rows finished before are in the record, and --resume goes on from them", err=True)
        raise
    except (ValueError, TypeError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename or 'file'}: {error.strerror or error}")


if __name__ == "__main__":
    main()
