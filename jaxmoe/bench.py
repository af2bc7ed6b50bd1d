"""`python -m jaxmoe.bench --config X [--json]`: speed of the training step beside the ceiling of the machine.

Prints tokens/s, model GFLOP/s, the matrix-product ceiling measured in the same process, their ratio, peak memory and
compile time. The batch is random tokens in full rows; routing is the model's own.

`--attention chart.png` instead measures one layer of the config's sparse attention beside the same layer with attention
to all keys, against the length of a row, and draws both.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxmoe.config.errors import fail_on_user_error
from jaxmoe.config.load import check_once, load_config
from jaxmoe.runtime.arguments import new_picture, refuse_idle, whole_number, whole_numbers
from jaxmoe.runtime.environment import restart_with_huge_pages

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


@fail_on_user_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxmoe.bench", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; its data is not read")
    parser.add_argument("--steps", type=whole_number(1), help="measured steps (default 3), after two that are not")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument(
        "--attention", type=new_picture, metavar="PNG", help="measure attention against row length, draw it there"
    )
    parser.add_argument("--lengths", type=whole_numbers, help="of --attention (default 512,1024,...,16384)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.attention is None:
        refuse_idle(parser, {"--lengths": arguments.lengths}, "without --attention")
    else:
        refuse_idle(parser, {"--steps": arguments.steps}, "with --attention")
    check_once(arguments.overrides)
    config = load_config(arguments.config, arguments.overrides)

    if arguments.attention:
        from jaxmoe.runtime.attention_speed import draw_attention, measure_attention, show_attention

        points = measure_attention(config, arguments.lengths or _LENGTHS)
        print(show_attention(points, as_json=arguments.json))
        draw_attention(points, config, arguments.attention)
        return 0

    from jaxmoe.runtime.speed import measure, show

    print(show(measure(config, arguments.steps or 3), as_json=arguments.json))
    return 0


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(main())
