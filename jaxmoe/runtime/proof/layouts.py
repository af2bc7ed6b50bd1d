"""Which layouts are compared."""

from collections.abc import Iterator, Sequence
from itertools import product

import yaml

from jaxmoe.config.check import check, check_devices
from jaxmoe.config.errors import ConfigError, Problem
from jaxmoe.config.load import config_from_dict, config_to_dict
from jaxmoe.config.schema import Config, Parallel
from jaxmoe.spmd.axes import AXES

#: Every axis above one somewhere, most of them in threes, and every switch of `parallel` turned once.
DEFAULT_FOR_8 = (
    "dp=2,ep=2,tp=2",
    "dp=2,sp=2,tp=2,zero=3,sp_attention=ulysses",
    "pp=2,ep=2,tp=2,zero=0",
    "pp=2,dp=2,sp=2,zero=3,pipeline_schedule=circular,pipeline_chunks=2",
    "ep=2,sp=2,tp=2,experts_over=ep,remat=none",
    "pp=4,ep=2,remat=dots",
    "sp=4,tp=2,sp_placement=zigzag",
    "tp=8",
    "dp=8",
)
MICROBATCHES = (1, 2, 4)

Layout = dict[str, int | str]


def _parse(text: str, devices: int) -> Layout:
    layout: Layout = {}
    for item in text.split(","):
        name, separator, value = item.strip().partition("=")
        if not separator or name not in Parallel.model_fields:
            raise ConfigError(
                [
                    Problem(
                        "--layouts",
                        item,
                        f"must be name=value with a field of parallel: {', '.join(Parallel.model_fields)}",
                        "write for example tp=2,sp=2;pp=4",
                    )
                ]
            )
        layout[name] = yaml.safe_load(value)
    sizes = [value for name, value in layout.items() if name in AXES and isinstance(value, int)]
    if "dp" not in layout:
        rest = devices
        for size in sizes:
            rest //= max(size, 1)
        layout["dp"] = max(rest, 1)
    return layout


def _factorizations(devices: int) -> Iterator[Layout]:
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in product(divisors, repeat=len(AXES)):
        total = 1
        for size in sizes:
            total *= size
        if total == devices:
            yield dict(zip(AXES, sizes, strict=True))


def chosen_layouts(text: str | None, devices: int) -> list[Layout]:
    """`None`: a covering set; "all": every way to spread the devices over the axes; else "tp=2,sp=2;pp=4"."""
    if text == "all":
        return list(_factorizations(devices))
    if text is None and devices != 8:
        axes = [axis for axis in AXES if axis != "dp"]
        return [_parse(f"{axis}={devices}", devices) for axis in axes] + [_parse(f"dp={devices}", devices)]
    return [_parse(item, devices) for item in (text.split(";") if text else DEFAULT_FOR_8) if item.strip()]


def variant(config: Config, layout: Layout, num_microbatches: int) -> Config | Sequence[Problem]:
    """`config` under a layout, or why it cannot be."""
    data = config_to_dict(config)
    data["parallel"] = {**data["parallel"], **dict.fromkeys(AXES, 1), **layout}
    data["batch"]["num_microbatches"] = num_microbatches
    try:
        config = config_from_dict(data)
    except ConfigError as error:
        return error.problems
    devices = 1
    for axis in AXES:
        devices *= getattr(config.parallel, axis)
    return check(config) or check_devices(config, devices) or config


def name_of(layout: Layout) -> str:
    """A layout in the words of `--layouts`, axes of size one left out."""
    return ",".join(f"{k}={v}" for k, v in layout.items() if not (k in AXES and v == 1)) or "one device"
