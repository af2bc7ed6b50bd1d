"""Which layouts are compared."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NoReturn

from jaxmoe.config.check import check, check_devices
from jaxmoe.config.errors import ConfigError, Problem
from jaxmoe.config.load import config_from_dict, config_to_dict
from jaxmoe.config.schema import Config, Parallel
from jaxmoe.config.yaml_io import parse_yaml
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
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or name not in Parallel.model_fields:
            _refuse(item, f"must be name=value with a field of parallel: {', '.join(Parallel.model_fields)}")
        if name in layout:
            _refuse(text, f"has {name} twice")
        layout[name] = parse_yaml(value, f"--layouts {item}")
    sizes = {name: value for name, value in layout.items() if name in AXES}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            _refuse(text, f"{name} must be a whole number from 1")
    total = math.prod(value for value in sizes.values() if isinstance(value, int))
    if total > devices:
        _refuse(text, f"takes {total} devices, and --devices is {devices}")
    if "dp" not in sizes and devices % total:
        _refuse(text, f"takes {total} devices, which must divide --devices={devices} where no dp is given")
    layout.setdefault("dp", devices // total)
    return layout


def _refuse(text: str, rule: str) -> NoReturn:
    raise ConfigError([Problem("--layouts", text, rule, "write for example tp=2,sp=2;pp=4")])


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
    chosen = DEFAULT_FOR_8 if text is None else [item for item in text.split(";") if item.strip()]
    if not chosen:
        _refuse(str(text), "names no layout")
    return [_parse(item, devices) for item in chosen]


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
