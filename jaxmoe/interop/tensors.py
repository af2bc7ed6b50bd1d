"""Every tensor of a checkpoint as a piece of a parameter, and the parameters' values in either direction."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from jaxmoe.config.errors import UserError
from jaxmoe.interop.names import Names, Row

Tree = Any
#: First and last but one index of a dim.
Range = tuple[int, int]


@dataclass(frozen=True)
class Stacking:
    """How layers lie in the tree of parameters: `lead` one by one, the trunk stacked by position of its period."""

    num_lead: int
    period: int
    order: tuple[int, ...]
    """The repeat at each place of the stacked dim; -1 is padding."""

    @property
    def num_layers(self) -> int:
        """Decoder layers; multi-token-prediction modules are numbered on."""
        return self.num_lead + self.period * (max(self.order) + 1)

    def layers(self, path: tuple[Any, ...]) -> list[tuple[int | None, int | None]]:
        """(place in the stacked dim, layer of the model) of everything a parameter holds; None where it has none."""
        if path[0] == "lead":
            return [(None, int(path[1]))]
        if path[0] == "trunk":
            first = self.num_lead + int(path[1])
            return [(place, first + r * self.period) for place, r in enumerate(self.order) if r >= 0]
        if path[0] == "mtp":
            return [(None, self.num_layers + int(path[1]))]
        return [(None, None)]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    row: Row
    path: tuple[Any, ...]
    """Of the parameter in the tree."""
    place: int | None
    """In the stacked dim."""
    layer: int | None
    at: Mapping[str, int] = field(hash=False)
    """The index that it holds of some dims of the parameter."""
    sizes: Mapping[str, int] = field(hash=False)
    """Size of each dim of the parameter, the stacked one left out."""
    is_copy: bool = False
    """Another tensor holds the same parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape on disk."""
        return tuple(math.prod(self.sizes[letter] for letter in word) for word in self.row.words)

    @property
    def _free(self) -> str:
        return "".join(letter for letter in self.row.letters if letter not in self.at)

    def from_parameter(self, value: np.ndarray) -> np.ndarray:
        """The tensor's values, from the parameter of one layer."""
        index = tuple(self.at.get(letter, slice(None)) for letter in self.row.letters)
        stored = "".join(self.row.words)
        axes = [self._free.index(letter) for letter in stored]
        return np.ascontiguousarray(value[index].transpose(axes)).reshape(self.shape)

    def fill(self, piece: np.ndarray, ranges: Mapping[str, Range], read: Any) -> None:
        """Writes what this tensor holds of a piece of the parameter of one layer.

        Args:
            piece: array of the ranges' sizes, in the order of the row's letters.
            ranges: of each letter, which part of the dim the piece holds.
            read: function of a tuple of slices -> that piece of the tensor.
        """
        if any(not ranges[letter][0] <= place < ranges[letter][1] for letter, place in self.at.items()):
            return
        index, shape, inner = [], [], []
        for word in self.row.words:
            if not word:
                index.append(slice(0, 1))
                continue
            start, stop = ranges[word[0]]
            step = math.prod(self.sizes[letter] for letter in word[1:])
            index.append(slice(start * step, stop * step))
            shape += [stop - start, *(self.sizes[letter] for letter in word[1:])]
            inner += [slice(None), *(slice(*ranges[letter]) for letter in word[1:])]
        value = read(tuple(index)).reshape(shape)[tuple(inner)]
        stored = "".join(self.row.words)
        axes = [stored.index(letter) for letter in self._free]
        target = tuple(
            self.at[letter] - ranges[letter][0] if letter in self.at else slice(None) for letter in self.row.letters
        )
        piece[target] = value.transpose(axes)


def flat_parameters(tree: Tree, parent: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Leaves of nested dicts by path."""
    found: dict[tuple[Any, ...], Any] = {}
    for key, value in tree.items():
        path = (*parent, key)
        found |= flat_parameters(value, path) if isinstance(value, Mapping) else {path: value}
    return found


def nested_parameters(leaves: Mapping[tuple[Any, ...], Any]) -> Tree:
    """The inverse of `flat_parameters`."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def list_tensors(shapes: Mapping[tuple[Any, ...], tuple[int, ...]], names: Names, stacking: Stacking) -> list[Tensor]:
    """The tensors of a checkpoint with parameters of these shapes (by path), layer by layer, as the table has them.

    Raises: UserError for parameters that the family's checkpoints do not hold.
    """
    unknown = [".".join(map(str, path)) for path in shapes if not _rows(path, names)]
    if unknown:
        raise UserError(
            f"checkpoints of this family have no tensor for the model's {', '.join(unknown)}; "
            f"leave out the overrides of `model` that add them"
        )
    found = [tensor for path, shape in shapes.items() for tensor in _tensors(path, shape, names, stacking)]
    depths = sorted({path[1] for path in shapes if path[0] == "mtp"})
    for depth, row in product(depths, names.copies):
        path = tuple(row.leaf.split("."))
        if path in shapes:
            layer = stacking.num_layers + depth
            sizes = dict(zip(row.letters, shapes[path], strict=True))
            name = names.prefix.format(layer=layer) + row.name
            found.append(Tensor(name, row, path, None, layer, {}, sizes, is_copy=True))
    rank = {row: number for number, row in enumerate((*names.top, *names.copies, *names.mtp, *names.layer))}

    def key(tensor: Tensor) -> tuple:
        # Embedding first, final norm and head last, as checkpoints have them.
        if tensor.layer is None:
            return 0 if tensor.path[0] == "embedding" else 2, -1, *_order_in_layer(tensor, rank)
        return 1, tensor.layer, *_order_in_layer(tensor, rank)

    return sorted(found, key=key)


def _order_in_layer(tensor: Tensor, rank: Mapping[Row, int]) -> tuple[int, int, int]:
    # The tensors of one expert stand together.
    spread = tensor.row.spread
    return (10**6, tensor.at[spread], rank[tensor.row]) if spread else (0, 0, rank[tensor.row])


def _rows(path: tuple[Any, ...], names: Names) -> list[Row]:
    rows, leaf = names.top, path
    if path[0] in ("lead", "trunk"):
        rows, leaf = names.layer, path[2:]
    elif path[0] == "mtp":
        in_layer = path[2] == "layer"
        rows, leaf = (names.layer, path[3:]) if in_layer else (names.mtp, path[2:])
    dotted = ".".join(map(str, leaf))
    return [row for row in rows if row.leaf == dotted]


def _tensors(path: tuple[Any, ...], shape: tuple[int, ...], names: Names, stacking: Stacking) -> Iterator[Tensor]:
    for row, (place, layer) in product(_rows(path, names), stacking.layers(path)):
        own = shape if place is None else shape[1:]
        assert len(own) == len(row.letters), f"{path} has shape {shape}, and its name says {row.letters}"
        sizes = dict(zip(row.letters, own, strict=True))
        prefix = "" if layer is None else names.prefix.format(layer=layer)
        for index in range(sizes[row.spread]) if row.spread else (None,):
            at = row.fixed | ({} if index is None else {row.spread: index})
            name = prefix + row.name.format(**{row.spread: index} if row.spread else {})
            yield Tensor(name, row, path, place, layer, at, sizes)


def by_parameter(tensors: Iterable[Tensor]) -> dict[tuple[Any, ...], list[Tensor]]:
    """Tensors by the path of their parameter."""
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.path, []).append(tensor)
    return found
