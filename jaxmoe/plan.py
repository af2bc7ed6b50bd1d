"""`python -m jaxmoe.plan --config X [--devices N]`: what a config needs on N devices, without having one.

Traces the training step on an abstract mesh. Prints parameters (all, and those that a token passes), bytes on each
device, every collective of a step with how often it runs, and the bytes that each device sends over each axis.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence

from jaxmoe.config.check import MESH_AXES
from jaxmoe.config.errors import UserError, fail_on_user_error
from jaxmoe.config.load import check_once, load_config
from jaxmoe.runtime.arguments import MOST_DEVICES, whole_number


@fail_on_user_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Plan; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxmoe.plan", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; its data is not read")
    parser.add_argument(
        "--devices",
        type=whole_number(1, MOST_DEVICES),
        help="how many; by default what the sizes in parallel multiply to",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    arguments = parser.parse_intermixed_args(argv)
    check_once(arguments.overrides)
    config = load_config(arguments.config, arguments.overrides)
    devices = arguments.devices
    if devices is None:
        if config.parallel.dp == -1:
            raise UserError("parallel.dp=-1: is what the devices leave; say how many there are: --devices 256")
        devices = math.prod(getattr(config.parallel, axis) for axis in MESH_AXES)

    from jaxmoe.runtime.planning import as_tree, make_plan, show

    plan = make_plan(config, devices)
    print(json.dumps(as_tree(plan), indent=1) if arguments.json else show(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
