"""`python -m jaxmoe.verify --config X`: proof that the mesh does not change the mathematics of a config.

Shrinks the config, keeps its structure, and compares layouts with one device on virtual CPU devices. Exit code 0:
all equal; 1: a difference; 2: a config that cannot be verified.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxmoe.config.errors import fail_on_user_error
from jaxmoe.config.load import check_once, load_config
from jaxmoe.runtime.arguments import MOST_DEVICES, new_file, new_picture, refuse_idle, whole_number


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxmoe.verify", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; its data is not read")
    parser.add_argument("--layouts", help='"all", or for example "tp=2,sp=2;pp=4"; a covering set by default')
    parser.add_argument(
        "--devices", type=whole_number(1, MOST_DEVICES), default=8, help="virtual CPU devices (default 8)"
    )
    parser.add_argument(
        "--dtype", choices=["float64", "float32", "bfloat16"], help="default float64; float32 for --curves"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the result there")
    parser.add_argument(
        "--curves", type=new_picture, metavar="PNG", help="instead: train the whole config on layouts, plot the losses"
    )
    parser.add_argument("--steps", type=whole_number(1), help="of --curves (default 50)")
    parser.add_argument("--seed", type=whole_number(0), help="of the batch (default 0)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.curves is None:
        refuse_idle(parser, {"--steps": arguments.steps}, "without --curves")
    else:
        refuse_idle(parser, {"--json": arguments.json, "--seed": arguments.seed}, "with --curves")
    return arguments


@fail_on_user_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Verify; returns the exit code."""
    arguments = _arguments(argv)
    check_once(arguments.overrides)
    config = load_config(arguments.config, arguments.overrides, require_files=arguments.curves is not None)

    from jaxmoe.runtime.proof.command import curves, verify

    if arguments.curves:
        return curves(
            config,
            arguments.curves,
            layouts=arguments.layouts,
            devices=arguments.devices,
            dtype=arguments.dtype or "float32",
            steps=arguments.steps or 50,
        )
    return verify(
        config,
        layouts=arguments.layouts,
        devices=arguments.devices,
        dtype=arguments.dtype or "float64",
        json_path=arguments.json,
        seed=arguments.seed or 0,
    )


if __name__ == "__main__":
    sys.exit(main())
