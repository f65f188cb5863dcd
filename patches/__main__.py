"""python -m qwen38_3090.patches: apply the patches in this process and print what became of each."""

import sys

from qwen38_3090.patches import apply_all, installed_platform, report
from qwen38_3090.patches.patch import PatchRefused, installed_vllm


def main() -> None:
    """Print the table of patches. Exit status 1 when one refuses."""
    refusal = None
    try:
        apply_all()
    except PatchRefused as error:
        refusal = str(error)
    print(f"vLLM {installed_vllm()}, platform {installed_platform()}\n")
    rows = [("patch", "state", "switch", "upstream", "retires when")]
    for state in report():
        patch = state.patch
        rows.append((patch.name, state.state, patch.switch, patch.upstream, patch.retires_when))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), *row[3:]]))
    if refusal:
        sys.exit(f"\n{refusal}")


if __name__ == "__main__":
    main()
