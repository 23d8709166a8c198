"""How wide a row of ids must be for the kernel that reads it: one function, and each kernel's rule as data.

Source: spec of the model, section 6.7 (FlashMLA; vLLM 53969, where 2112 columns met the SM90 kernel).
"""

from dataclasses import dataclass

from reference.validate import _fail


@dataclass(frozen=True)
class Rule:
    """What a sparse attention kernel takes: columns in multiples of `multiple`; head counts, to the next of which others are padded."""

    kernel: str
    multiple: int
    heads: tuple[int, ...]
    reason: str


NATIVE = tuple(range(1, 129))
RULES = {
    rule.kernel: rule
    for rule in (
        Rule("reference", 1, tuple(range(1, 4097)), "any width"),
        Rule("triton", 1, NATIVE, "the last tile is masked"),
        Rule("flash_mla_sm90", 128, (64, 128), "two blocks of 64 rows in an iteration"),
        Rule("flash_mla_sm100_h128", 128, (128,), "blocks of 128 rows"),
        Rule("flash_mla_sm100_h64", 128, (64,), "blocks of 64 rows: 64 would do, 128 is used everywhere"),
    )
}


def rule(kernel: str) -> Rule:
    """The rule of `kernel`. ValueError when there is none."""
    if kernel not in RULES:
        _fail("kernel", f"one of {', '.join(RULES)}", repr(kernel), "add its rule to reference/widths.py")
    return RULES[kernel]


def align_width(rows: int, kernel: str) -> int:
    """The least width that holds `rows` ids and that the kernel takes: 2051 is 2176 for FlashMLA, 2051 for Triton."""
    multiple = rule(kernel).multiple
    return (rows + multiple - 1) // multiple * multiple


def check_width(width: int, kernel: str, name: str = "ids") -> None:
    """ValueError for a width that the kernel refuses: 2112 on SM90."""
    found = rule(kernel)
    if width % found.multiple:
        hint = f"allocate align_width(rows, {kernel!r}), {align_width(width, kernel)} here"
        _fail(name, f"a width that is a multiple of {found.multiple} for {kernel} ({found.reason})", width, hint)


def padded_heads(heads: int, kernel: str, name: str = "q") -> int:
    """The head count that the kernel runs for `heads`. ValueError when it serves none as large."""
    found = rule(kernel)
    if heads < 1 or heads > found.heads[-1]:
        _fail(name, f"1 to {found.heads[-1]} heads for {kernel}", heads, "shard the heads over ranks, or choose another kernel")
    return next(count for count in found.heads if count >= heads)
