"""The record: one JSON document that every table, file and README number is rendered from (schema 1)."""

import json
import os
import platform
import subprocess
import tempfile
from datetime import UTC, datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from optimized import arch, interpreter

SCHEMA = 1
ROW_KEYS = frozenset(
    "case op impl reference model arch heads batch tokens dtype state_dtype regime steps seed impl_hash contract verdict reason "
    "path output state drift first_divergence invariants".split()
)
PLANNED_KEYS = ("case", "impl", "reference")
Row = dict[str, Any]
Record = dict[str, Any]


class Verdict(StrEnum):
    """What a row says. FAIL > INCONCLUSIVE > VACUOUS > PASS; a skip is never a pass."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"  # no proof of what ran, the reference itself is over 10 % wrong, or a planned row is missing
    SKIPPED = "SKIPPED"  # with its reason
    VACUOUS = "VACUOUS"  # nothing was compared


def new(device: str, command: list[str]) -> Record:
    """A record with no rows, of this machine."""
    return {"schema": SCHEMA, "environment": environment(device), "command": command, "rows": [], "bench": [], "summary": summary([])}


def environment(device: str) -> dict[str, Any]:
    """Where the rows were made, and when that began (UTC)."""
    cuda = device.startswith("cuda")
    commit, dirty = _commit()
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "arch": arch.of_device(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fla-core": _version("fla-core"),
        "python": platform.python_version(),
        "driver": _driver() if cuda else None,
        "commit": commit,
        "dirty": dirty,
        "interpreter": interpreter.active(),
    }


def summary(rows: list[Row]) -> dict[str, int]:
    """Rows by verdict."""
    return {verdict.value: sum(row["verdict"] == verdict for row in rows) for verdict in Verdict}


def worst(rows: list[Row]) -> Verdict:
    """The verdict of rows: any FAIL, else any INCONCLUSIVE or VACUOUS, else PASS when a row passed, else VACUOUS."""
    verdicts = {row["verdict"] for row in rows}
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.VACUOUS, Verdict.PASS):
        if verdict in verdicts:
            return verdict
    return Verdict.VACUOUS


def overall(record: Record) -> Verdict:
    """The verdict of a record: that of its rows, and INCONCLUSIVE without a FAIL where a planned row is missing."""
    found = worst(record["rows"])
    return Verdict.INCONCLUSIVE if found != Verdict.FAIL and missing(record) else found


def exit_code(record: Record) -> int:
    """0 all PASS or SKIPPED with at least one PASS; 1 any FAIL; 3 INCONCLUSIVE or VACUOUS, a row is missing, or nothing ran."""
    return {Verdict.PASS: 0, Verdict.FAIL: 1}.get(overall(record), 3)


def missing(record: Record) -> list[Row]:
    """The planned rows, `{"case", "impl", "reference"}` each, that the record lacks: its sweep was stopped before them."""
    there = {identity(record, row) for row in record["rows"]}
    return [plan for plan in record.get("planned") or [] if identity(record, plan) not in there]


def identity(record: Record, row: Row) -> tuple[str, ...]:
    """What a row, or a planned one, is the measurement of: case, implementation, reference, device."""
    return (*(str(row[key]) for key in PLANNED_KEYS), str(environment_of(record, row).get("device")))


def environment_of(record: Record, row: Row) -> dict[str, Any]:
    """Where a row was made: in a record merged of several parts, the environment of its own."""
    found: dict[str, Any] = record["parts"][row["part"]]["environment"] if "part" in row else record["environment"]
    return found


def check_writable(path: Path) -> None:
    """ValueError when a record could not be written there, before any work is done."""
    if path.is_dir():
        raise ValueError(f"out: {path} is a folder; name a file, such as {path / 'record.json'}")
    if path.exists() and not path.is_file():
        raise ValueError(f"out: {path} is no ordinary file; name one, such as record.json")
    if not path.parent.is_dir():
        raise ValueError(f"out: there is no folder {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"out: {path} can't be written; choose another file")


def write(path: Path, text: str) -> None:
    """Write, then rename: a killed run leaves the old file or the new one, never half of one."""
    path = path.resolve()  # through a link, to the file it names
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def save(record: Record, path: Path) -> None:
    """Write the record. Non-finite numbers become strings, which JSON can hold."""
    write(path, dumps(record))


def dumps(record: Record) -> str:
    """The record as JSON."""
    return json.dumps(plain(record | {"summary": summary(record["rows"])}), indent=1, allow_nan=False) + "\n"


def load(path: Path) -> Record:
    """Read a record. ValueError when the file is missing, not JSON, or of another schema."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"record: can't read {path}: {error.strerror}; sweep writes one with --out FILE.json") from error
    except ValueError as error:
        raise ValueError(f"record: {path} is not JSON ({error}); sweep writes one with --out FILE.json") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or not isinstance(record.get("rows"), list):
        raise ValueError(f"record: {path} is not a record of schema {SCHEMA}; sweep writes one with --out FILE.json")
    verdicts = [verdict.value for verdict in Verdict]
    complete = all(isinstance(row, dict) and row.keys() >= ROW_KEYS and row["verdict"] in verdicts for row in record["rows"])
    if not complete or not isinstance(record.get("environment"), dict):
        raise ValueError(f"record: {path} lacks its environment or keys of its rows; sweep writes one with --out FILE.json")
    if fault := _wrong_parts(record):
        raise ValueError(f"record: {path} is damaged: {fault}; make it anew with report A B --out FILE.json")
    numbers: Record = _numbers(record)
    return numbers


def _wrong_parts(record: Record) -> str:
    """What is wrong with the optional lists of a record: planned rows, parts it was merged of, and bench rows."""
    planned, parts, timed = (record.get(name, []) for name in ("planned", "parts", "bench"))
    for name, entries in (("planned", planned), ("parts", parts), ("bench", timed)):
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            return f"{name} is no list of objects"
    if any(not isinstance(plan.get(key), str) for plan in planned for key in PLANNED_KEYS):
        return f"a planned row lacks one of {', '.join(PLANNED_KEYS)}"
    if not all(isinstance(part.get("environment"), dict) and isinstance(part.get("command"), list) for part in parts):
        return "a part lacks its environment or its command"
    named = [row["part"] for row in [*record["rows"], *planned, *timed] if "part" in row]
    return "" if all(type(part) is int and 0 <= part < len(parts) for part in named) else "a row names a part that isn't there"


_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def plain(value: Any) -> Any:
    """The value with strings for the numbers that JSON can't hold."""
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _commit() -> tuple[str | None, bool | None]:
    """The commit of the tree that this file belongs to, and whether it has changes."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None
