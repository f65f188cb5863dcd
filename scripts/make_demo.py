"""Makes the demo model. Run by hand after a change of qwen38_3090/demo: `python scripts/make_demo.py`."""

import argparse
from dataclasses import replace
from pathlib import Path

from qwen38_3090.demo import MODEL_DIR
from qwen38_3090.demo.build import CONTEXTUAL, DemoSpec, build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=MODEL_DIR, help="where to write (default: the shipped model)"
    )
    parser.add_argument(
        "--acceptance", type=float, default=DemoSpec.acceptance, help="share of right drafts (%(default)s)"
    )
    parser.add_argument(
        "--context-scale",
        type=float,
        help=f"make an unsharp model whose layers weigh this much: {CONTEXTUAL.context_scale} suits tests of state",
    )
    arguments = parser.parse_args()
    spec = DemoSpec()
    if arguments.context_scale is not None:
        spec = replace(CONTEXTUAL, context_scale=arguments.context_scale)
    build(arguments.folder, replace(spec, acceptance=arguments.acceptance))
    for file in sorted(arguments.folder.iterdir()):
        print(f"{file.stat().st_size / 1e6:8.3f} MB  {file.name}")


if __name__ == "__main__":
    main()
