"""Checkpoints that do not know the mesh: saved under one layout, loaded straight into the pieces of another.

    checkpoints/<step>/arrays   every array of the state with its global shape, layers in the order of the model
    checkpoints/<step>/about    JSON: model, data state, mesh (`about.py`)

Written by orbax in the background under a temporary name, renamed when complete.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from jaxmoe.checkpoint.about import About
from jaxmoe.checkpoint.folder import saved_steps
from jaxmoe.checkpoint.layers import TRUNK, LayerOrder, from_natural, to_natural
from jaxmoe.config.errors import UserError, refuse_full_disk

Tree = Any
Named = dict[str, Any]
_SEPARATOR = "/"


class Checkpoints:
    """The checkpoints of one run. A context manager: leaving it waits until everything is on disk.

    All processes of a run call the same methods in the same order.
    """

    def __init__(self, folder: Path, *, keep: int | None = None, asynchronous: bool = True) -> None:
        """`keep` is how many of the newest stay; None removes none and clears nothing away, for reading alone."""
        self.folder = folder.resolve()
        writes = keep is not None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=asynchronous and writes,
            cleanup_tmp_directories=writes,
            create=writes,
        )
        handlers = {"arrays": ocp.PyTreeCheckpointHandler(), "about": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return saved_steps(self.folder)

    def save(self, step: int, state: Tree, order: tuple[int, ...], about: About) -> None:
        """Starts to save; the arrays may be donated or changed as soon as it returns.

        Args:
            state: pytree of global arrays; below a key "trunk" the first dim is the stacked one.
            order: the repeat at each place of that dim; -1 is padding.
        """
        arrays = _nested(_in_natural_order(_named(state), LayerOrder(order)))
        args = ocp.args.Composite(arrays=ocp.args.PyTreeSave(arrays), about=ocp.args.JsonSave(about.to_json()))
        with self._writing():
            self._manager.save(step, args=args)

    def about(self, step: int) -> About:
        """What checkpoint `step` says about itself.

        Raises: UserError when it is not readable.
        """
        found = self._read(step, ocp.args.Composite(about=ocp.args.JsonRestore()))
        return About.from_json(found["about"], str(self.folder / str(step)))

    def restore(self, step: int, like: Tree, order: tuple[int, ...]) -> Tree:
        """The state of checkpoint `step`, each process reading what its own devices hold.

        Args:
            like: pytree of `jax.ShapeDtypeStruct` with shardings. It may hold a part of what was saved.
            order: as in `save`, of the layout of `like`.

        Raises: UserError when the checkpoint is damaged.
        """
        targets, layer_order = _named(like), LayerOrder(order)
        stacked = [] if layer_order.is_natural else [name for name in targets if _is_stacked(name)]
        stored = targets | {name: layer_order.natural_struct(targets[name]) for name in stacked}
        args = ocp.args.PyTreeRestore(
            item=_nested(stored),
            restore_args=ocp.checkpoint_utils.construct_restore_args(_nested(stored)),
            partial_restore=True,
        )
        found = _flat(self._read(step, ocp.args.Composite(arrays=args))["arrays"])
        if stacked:
            shardings = [targets[name].sharding for name in stacked]
            spread = from_natural([found[name] for name in stacked], layer_order, shardings)
            found |= dict(zip(stacked, spread, strict=True))
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in targets])

    def _read(self, step: int, args: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=args)
        except (ValueError, OSError, KeyError) as error:
            if isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error):
                raise UserError(
                    f"{self.folder / str(step)}: this checkpoint may not be read (Permission denied); "
                    "get access to all files in it"
                ) from error
            older = [number for number in self.steps() if number < step]
            go_on = f"continue from step {older[-1]}" if older else "start again (there is no older one)"
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"{self.folder / str(step)}: this checkpoint cannot be read ({type(error).__name__}: {reason}); "
                f"remove that folder to {go_on}"
            ) from error

    def wait(self) -> None:
        """Returns when everything is on disk. Raises what went wrong in the background."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        with self._writing():
            self._manager.close()

    def _writing(self) -> AbstractContextManager[None]:
        """Around what writes, or reports what was written in the background."""
        step = max(self.steps(), default=None)
        rest = "no checkpoint is complete yet" if step is None else f"step {step} is complete"
        return refuse_full_disk(str(self.folder), f"make room and give the same command again; {rest}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _named(tree: Tree) -> Named:
    """Leaves by path, in the order of the tree: `opt_state/0/mu/trunk/0/...`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=_SEPARATOR): leaf for path, leaf in leaves}


def _is_stacked(name: str) -> bool:
    return TRUNK in name.split(_SEPARATOR)


def _in_natural_order(arrays: Named, order: LayerOrder) -> Named:
    if order.is_natural:
        return arrays
    stacked = [name for name in arrays if _is_stacked(name)]
    return arrays | dict(zip(stacked, to_natural([arrays[name] for name in stacked], order), strict=True))


def _nested(named: Named) -> Tree:
    tree: Tree = {}
    for name, leaf in named.items():
        *parents, last = name.split(_SEPARATOR)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _flat(tree: Tree, parent: str = "") -> Named:
    found: Named = {}
    for key, value in tree.items():
        name = f"{parent}{_SEPARATOR}{key}" if parent else key
        found |= _flat(value, name) if isinstance(value, dict) else {name: value}
    return found
