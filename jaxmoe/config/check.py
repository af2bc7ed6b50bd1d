"""Rules between fields, and between the mesh and the devices. A rule looks and returns problems; it changes nothing.

`check` needs the config alone, `check_files` this machine's disk, `check_devices` the number of devices.
"""

from collections.abc import Iterator, Sequence

from jaxmoe.config.check_files import FILE_RULES
from jaxmoe.config.check_latent import LATENT_RULES
from jaxmoe.config.check_layout import LAYOUT_RULES
from jaxmoe.config.check_model import MODEL_RULES, Rule
from jaxmoe.config.check_run import RUN_RULES
from jaxmoe.config.errors import ConfigError, Problem
from jaxmoe.config.numbers import divisors, next_multiple
from jaxmoe.config.partial import UnreadableFieldError
from jaxmoe.config.schema import Config

#: Slowest to fastest, as the mesh has them.
MESH_AXES = ("pp", "dp", "ep", "sp", "tp")
_MOST_MESHES = 3
_MOST_TRIES = 400


def check(config: Config) -> list[Problem]:
    """What is wrong between the fields; empty when the config is fine."""
    return _apply((*MODEL_RULES, *LATENT_RULES, *LAYOUT_RULES, *RUN_RULES), config)


def check_files(config: Config) -> list[Problem]:
    """What is wrong with the files and folders that the config names, as training needs them."""
    return _apply(FILE_RULES, config)


def _apply(rules: Sequence[Rule], config: Config) -> list[Problem]:
    problems: list[Problem] = []
    for rule in rules:
        try:
            for problem in rule(config):
                problems.append(problem)
        except UnreadableFieldError:
            continue  # that field's own problem is reported; the rule cannot be judged
    return problems


def check_devices(config: Config, num_devices: int) -> list[Problem]:
    """What is wrong between the mesh, the batch and this many devices; empty when the config runs on them."""
    parallel = config.parallel
    fixed = parallel.pp * parallel.ep * parallel.sp * parallel.tp
    sizes = ", ".join(f"{axis}={getattr(parallel, axis)}" for axis in MESH_AXES)
    problem = None
    if parallel.dp == -1 and num_devices % fixed:
        rule = f"pp*ep*sp*tp={fixed} ({sizes}) must divide the {num_devices} devices"
        problem = Problem("parallel.dp", -1, rule, _mesh_fix(config, num_devices))
    elif parallel.dp != -1 and parallel.dp * fixed != num_devices:
        rule = f"pp*dp*ep*sp*tp={parallel.dp * fixed} ({sizes}) must equal the {num_devices} devices"
        fix = _mesh_fix(config, num_devices)
        problem = Problem("parallel.dp", parallel.dp, rule, fix)
    if problem:
        return [problem]
    dp = num_devices // fixed
    if parallel.dp == -1:
        return [_from_devices(found, dp, num_devices) for found in check(_with_mesh(config, {"dp": dp}))]
    return []


def mesh_shape(config: Config, num_devices: int) -> dict[str, int]:
    """Size of each mesh axis, in the order pp, dp, ep, sp, tp; their product is `num_devices`.

    Raises: ConfigError when the config does not run on this many devices.
    """
    problems = check_devices(config, num_devices)
    if problems:
        raise ConfigError(problems)
    sizes = {axis: getattr(config.parallel, axis) for axis in MESH_AXES}
    fixed = sizes["pp"] * sizes["ep"] * sizes["sp"] * sizes["tp"]
    return {**sizes, "dp": num_devices // fixed}


def _with_mesh(config: Config, sizes: dict[str, int]) -> Config:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=sizes)})


def _from_devices(problem: Problem, dp: int, num_devices: int) -> Problem:
    rule = f"{problem.rule} (parallel.dp is what {num_devices} devices leave: {dp})"
    return Problem(problem.path, problem.value, rule, problem.fix)


def _mesh_fix(config: Config, num_devices: int) -> str:
    """The meshes nearest to the asked one that this config runs on."""
    asked = {axis: max(getattr(config.parallel, axis), 1) for axis in MESH_AXES}

    def distance(sizes: dict[str, int]) -> tuple[int, float]:
        # Whatever changes fewest axes other than dp is nearest.
        changed = [axis for axis in MESH_AXES if axis != "dp" and sizes[axis] != asked[axis]]
        return len(changed), sum(max(sizes[axis], asked[axis]) / min(sizes[axis], asked[axis]) for axis in changed)

    candidates = sorted(_factorisations(num_devices, MESH_AXES), key=distance)[:_MOST_TRIES]
    fitting: list[str] = []
    for sizes in candidates:
        if not check(_with_mesh(config, sizes)):
            fitting.append(" ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "all sizes 1")
        if len(fitting) == _MOST_MESHES:
            break
    if not fitting:
        # Data parallelism fits every model; the batch alone may be in the way.
        rows = next_multiple(config.batch.global_batch_size, config.batch.num_microbatches * num_devices)
        return f"no mesh of {num_devices} devices fits; use dp={num_devices} with batch.global_batch_size={rows}"
    return f"use {' or '.join(fitting)}"


def _factorisations(number: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    if len(axes) == 1:
        yield {axes[0]: number}
        return
    for size in divisors(number):
        for rest in _factorisations(number // size, axes[1:]):
            yield {axes[0]: size, **rest}
