"""Determines a model's groups of layers, and where the layers store KV and recurrent states in the pool."""

from dataclasses import dataclass, replace

from engine.models.spec import AttentionSpec, ModelConfig, state_units, unit_places
from scheduler.geometry import UNIFORM, Group

TYPICAL_TOKENS = 8192  # length of the typical request for which `_row_layers` computes the wasted memory
MOST_PADDING = 0.05  # largest accepted waste, as a share of the memory that the typical request needs
STATE_BYTES = 4  # bytes of a number in a recurrent state


@dataclass(frozen=True, slots=True)
class KVPlaces:
    """The places of layers in the pool.

    A row (see `scheduler.geometry`) has places for the KV of `row_layers` layers. The i-th layer with KV uses block
    table number tables[i], and the place places[i] in a row. If the blocks of a group have several rows, the
    group has one table for each row of a block. If t is the group's first table, table t + r has row r of each block.
    `units` has, for each unit of a state, the unit's row and its offset in the row (see `unit_places`)."""

    row_layers: int
    groups: tuple[Group, ...] = UNIFORM
    tables: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    units: tuple[tuple[int, int], ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.places)

    @property
    def num_tables(self) -> int:
        return max(self.tables) + 1

    @property
    def state_rows(self) -> int:
        """The number of rows of a state, or 0 if the model has no states."""
        return sum(group.rows for group in self.groups if group.kind == "state")


def all_in_one_row(layers: int) -> KVPlaces:
    """Return the places of layers that form one group: a row has the KV of one block for all layers."""
    return KVPlaces(layers, UNIFORM, (0,) * layers, tuple(range(layers)))


def kv_places(config: ModelConfig, row_bytes: int = 0) -> KVPlaces:
    """Return where the KV of each layer lies in a pool. If `row_bytes` (a row's size) is given, add the model's states.

    Layers with the same window form a group. The layers of a draft head come last, and have no window. If there are
    several groups, some places may be unused: a row has places for as many layers as possible, but unused places take
    at most MOST_PADDING of a typical request's memory. Raises ValueError if a unit of a state is larger than a row.
    """
    windows = [spec.window if isinstance(spec, AttentionSpec) else 0 for spec in config.attention]
    windows += [0] * config.draft_layers
    sizes = sorted(set(windows))
    found = all_in_one_row(len(windows))
    if sizes != [0]:
        counts = {size: windows.count(size) for size in sizes}
        row_layers = _row_layers(counts)
        groups: list[Group] = []
        tables, places = [0] * len(windows), [0] * len(windows)
        for size in sizes:
            first = sum(group.rows for group in groups)
            groups.append(Group("window" if size else "full", -(-counts[size] // row_layers), size))
            for number, layer in enumerate(layer for layer, window in enumerate(windows) if window == size):
                tables[layer], places[layer] = first + number // row_layers, number % row_layers
        found = KVPlaces(row_layers, tuple(groups), tuple(tables), tuple(places))
    return with_states(found, config, row_bytes) if row_bytes else found


def with_states(places: KVPlaces, config: ModelConfig, row_bytes: int) -> KVPlaces:
    """Return `places`. If the model has recurrent states, add a group for them, with rows of `row_bytes` bytes."""
    if not (sizes := state_units(config)):
        return places
    units = tuple(unit_places(sizes, row_bytes // STATE_BYTES))
    return replace(places, groups=(*places.groups, Group("state", units[-1][0] + 1)), units=units)


def _row_layers(counts: dict[int, int]) -> int:
    """Return the number of layers in a row. `counts` maps each window to the number of layers that have it."""
    tokens = {size: min(size or TYPICAL_TOKENS, TYPICAL_TOKENS) for size in counts}
    needed = sum(count * tokens[size] for size, count in counts.items())

    def wasted(layers: int) -> int:
        return sum(-count % layers * tokens[size] for size, count in counts.items())

    return max(layers for layers in range(1, max(counts.values()) + 1) if wasted(layers) <= MOST_PADDING * needed)
