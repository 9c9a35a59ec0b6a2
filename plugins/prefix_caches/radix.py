"""A radix tree over whole blocks: each edge is a run of blocks, split only where sequences diverge.

    root(model, adapter, salt)
     └─ [system prompt: blocks 1 2 3]           refs 2: both requests pin it
         ├─ [question A: blocks 4 5]            refs 1
         │   └─ [A's answer, so far: block 9]   refs 1: grows in place while A alone pins it
         └─ [question B: block 6]               refs 1

A holder pins its whole path from the root, so refs(parent) >= refs(child), and whatever nobody pins is evictable
from the leaves up. An edge is split where a holder's prefix ends, even if nothing diverges there: a node is then
pinned as a whole or not at all. Splits are not undone: they mark how far a prefix was last used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.errors import IntegrityError
from mlx_engine.interfaces import PrefixCache
from mlx_engine.types import CacheKey, PrefixMatch

_BlockTokens = tuple[int, ...]


class _Node:
    """An edge of the tree and the node at its end: a run of blocks, `tokens[i]` stored in `block_ids[i]`."""

    __slots__ = ("block_ids", "children", "key", "parent", "refs", "tokens")

    def __init__(
        self, key: CacheKey, parent: _Node | None, tokens: list[_BlockTokens], block_ids: list[int], refs: int
    ) -> None:
        self.key = key
        self.parent = parent  # None for a root, which has no blocks
        self.tokens = tokens
        self.block_ids = block_ids
        self.refs = refs  # holders that pin this node
        self.children: dict[_BlockTokens, _Node] = {}  # by the tokens of their first block


@dataclass(slots=True)
class _Pin:
    """What one holder pins: the path from the root to the end of `node`."""

    node: _Node
    num_blocks: int


class RadixPrefixCache(PrefixCache):
    """Prefix cache over a path-compressed tree. insert_prefix looks only at blocks the holder doesn't pin yet."""

    interface_version: ClassVar[int] = 1

    def __init__(self, *, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[CacheKey, _Node] = {}
        self._pins: dict[str, _Pin] = {}
        self._owned: set[int] = set()
        self._num_evictable = 0
        # Every unpinned node, in the order to evict. A release appends its path from the end up to the root, so a
        # child always comes before its parent and the first node is always a leaf: no heap, no search.
        self._lru: OrderedDict[_Node, None] = OrderedDict()

    def match_prefix(self, key: CacheKey, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix, at most len(token_ids) - 1 tokens. Pure; O(prefix)."""
        stop = (len(token_ids) - 1) // self.block_size
        node = self._roots.get(key)
        block_ids: list[int] = []
        while node is not None and len(block_ids) < stop:
            child = node.children.get(self._block(token_ids, len(block_ids)))
            if child is None:
                break
            shared = self._num_shared(child, token_ids, len(block_ids), stop)
            block_ids += child.block_ids[:shared]
            node = child if shared == len(child.block_ids) else None
        return PrefixMatch(tuple(block_ids), len(block_ids) * self.block_size)

    def acquire(self, holder: str, key: CacheKey, token_ids: Sequence[int], match: PrefixMatch) -> None:
        """Pins the match. Raises IntegrityError if the holder pins something, or the match is no longer cached."""
        if holder in self._pins:
            raise IntegrityError(f"{holder!r} acquires a prefix while it pins one")
        if not match.block_ids:
            return
        pin = self._new_pin(holder, key)
        self._pin_cached(pin, token_ids, len(match.block_ids))
        if self._path_block_ids(pin) != match.block_ids:
            self.release(holder)
            raise IntegrityError(f"the prefix matched for {holder!r} is no longer cached")

    def release(self, holder: str) -> None:
        """Unpins the holder's path; what nobody pins now is the last to be evicted."""
        pin = self._pins.pop(holder, None)
        node = pin.node if pin else None
        while node is not None:
            node.refs -= 1
            if node.refs == 0:
                if node.parent is None:
                    self._drop_empty_root(node)
                else:
                    self._num_evictable += len(node.block_ids)
                    self._lru[node] = None
            node = node.parent

    def insert_prefix(
        self, holder: str, key: CacheKey, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """Adds and pins the whole blocks of token_ids; O(blocks that the holder doesn't pin yet).

        Raises IntegrityError if block_ids is too short, holds a block that the cache owns elsewhere, or the holder
        changes its key.
        """
        stop = len(token_ids) // self.block_size
        pin = self._pins.get(holder)
        if pin is None:
            if stop == 0:
                return ()
            pin = self._new_pin(holder, key)
        elif pin.node.key != key:
            raise IntegrityError(f"{holder!r} inserts under {key}, but pins {pin.node.key}")
        self._pin_cached(pin, token_ids, stop)
        start = pin.num_blocks
        if start >= stop:
            return ()
        adopted = list(block_ids[start:stop])
        if len(adopted) != stop - start or not self._owned.isdisjoint(adopted):
            raise IntegrityError(f"{holder!r} offers {stop - start} blocks, but brings {adopted}: missing or owned")
        self._append(pin, [self._block(token_ids, index) for index in range(start, stop)], adopted)
        return tuple(adopted)

    def evict(self, num_blocks: int) -> tuple[int, ...]:
        """Gives back up to num_blocks blocks: least recently used leaves first, each from its tail; O(blocks)."""
        evicted: list[int] = []
        while self._lru and len(evicted) < num_blocks:
            node = next(iter(self._lru))
            if node.children or node.refs:
                raise IntegrityError("the next node to evict is pinned or has children")
            take = min(num_blocks - len(evicted), len(node.block_ids))
            evicted += reversed(node.block_ids[-take:])
            first = node.tokens[0]
            del node.block_ids[-take:], node.tokens[-take:]
            if not node.block_ids:
                self._remove(node, first)
        self._num_evictable -= len(evicted)
        self._owned.difference_update(evicted)
        return tuple(evicted)

    def reset(self) -> tuple[int, ...]:
        """Gives back every block that no holder pins."""
        return self.evict(self._num_evictable)

    def cached_block_ids(self) -> frozenset[int]:
        """Every block in the tree."""
        return frozenset(self._owned)

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree."""
        return len(self._owned)

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that no holder pins."""
        return self._num_evictable

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, pins, links and the eviction order agree. Walks the whole tree."""
        refs: dict[_Node, int] = {}
        for holder, pin in self._pins.items():
            if len(self._path_block_ids(pin)) != pin.num_blocks:
                raise IntegrityError(f"{holder!r} pins {pin.num_blocks} blocks, but its path is longer or shorter")
            for node in _path(pin.node):
                refs[node] = refs.get(node, 0) + 1
        nodes = list(self._nodes())
        for node in nodes:
            if node.refs != refs.get(node, 0):
                raise IntegrityError(
                    f"node of blocks {node.block_ids} counts {node.refs} pins, not {refs.get(node, 0)}"
                )
            if (node in self._lru) != (node.parent is not None and node.refs == 0):
                raise IntegrityError(f"node of blocks {node.block_ids} is wrongly in or out of the eviction order")
            if len(node.block_ids) != len(node.tokens) or not (node.block_ids or node.parent is None):
                raise IntegrityError(f"node of blocks {node.block_ids} is empty or has lost tokens")
            for first, child in node.children.items():
                if child.parent is not node or child.tokens[0] != first or child.key != node.key:
                    raise IntegrityError(f"node of blocks {child.block_ids} is wrongly linked to its parent")
        block_ids = [block_id for node in nodes for block_id in node.block_ids]
        if len(block_ids) != len(self._owned) or set(block_ids) != self._owned:
            raise IntegrityError("the blocks in the tree are not those that the cache owns")
        if len(self._lru) != sum(node.refs == 0 and node.parent is not None for node in nodes):
            raise IntegrityError("the eviction order holds nodes that are not in the tree")
        if self._num_evictable != sum(len(node.block_ids) for node in nodes if node.refs == 0):
            raise IntegrityError(f"num_evictable_blocks is {self._num_evictable}, but the tree says otherwise")

    def _block(self, token_ids: Sequence[int], index: int) -> _BlockTokens:
        start = index * self.block_size
        return tuple(token_ids[start : start + self.block_size])

    def _num_shared(self, node: _Node, token_ids: Sequence[int], start: int, stop: int) -> int:
        """Leading blocks of the node's edge that equal the blocks of token_ids from `start` on, below `stop`."""
        length = min(len(node.tokens), stop - start)
        for index in range(length):
            if node.tokens[index] != self._block(token_ids, start + index):
                return index
        return length

    def _new_pin(self, holder: str, key: CacheKey) -> _Pin:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = _Node(key, None, [], [], 0)
        root.refs += 1
        pin = self._pins[holder] = _Pin(root, 0)
        return pin

    def _pin_cached(self, pin: _Pin, token_ids: Sequence[int], stop: int) -> None:
        """Moves a pin down over the blocks of token_ids below `stop` that are cached."""
        while pin.num_blocks < stop:
            child = pin.node.children.get(self._block(token_ids, pin.num_blocks))
            if child is None:
                return
            shared = self._num_shared(child, token_ids, pin.num_blocks, stop)
            if shared < len(child.block_ids):
                child = self._split(child, shared)
            self._pin_node(child)
            pin.node = child
            pin.num_blocks += shared

    def _pin_node(self, node: _Node) -> None:
        if node.refs == 0:
            self._num_evictable -= len(node.block_ids)
            self._lru.pop(node, None)
        node.refs += 1

    def _split(self, node: _Node, length: int) -> _Node:
        """Cuts a node after `length` blocks; returns the upper part, which the caller must pin at once.

        The lower part stays the same object, so pins that end there, and its place in the eviction order, hold.
        """
        parent = node.parent
        assert parent is not None
        upper = _Node(node.key, parent, node.tokens[:length], node.block_ids[:length], node.refs)
        parent.children[upper.tokens[0]] = upper
        node.parent, node.tokens, node.block_ids = upper, node.tokens[length:], node.block_ids[length:]
        upper.children[node.tokens[0]] = node
        return upper

    def _append(self, pin: _Pin, tokens: list[_BlockTokens], block_ids: list[int]) -> None:
        """Adds blocks below the end of a pin's path, pinned by it."""
        node = pin.node
        # A leaf that this holder alone pins grows in place: a generating request stays one edge.
        if node.parent is not None and node.refs == 1 and not node.children:
            node.tokens += tokens
            node.block_ids += block_ids
        else:
            pin.node = node.children[tokens[0]] = _Node(node.key, node, tokens, block_ids, 1)
        pin.num_blocks += len(block_ids)
        self._owned.update(block_ids)

    def _remove(self, node: _Node, first: _BlockTokens) -> None:
        parent = node.parent
        assert parent is not None
        del self._lru[node], parent.children[first]
        if parent.parent is None and parent.refs == 0:
            self._drop_empty_root(parent)

    def _drop_empty_root(self, root: _Node) -> None:
        # Salts are as many as users: an empty root must not stay behind.
        if not root.children:
            del self._roots[root.key]

    def _path_block_ids(self, pin: _Pin) -> tuple[int, ...]:
        return tuple(block_id for node in reversed(list(_path(pin.node))) for block_id in node.block_ids)

    def _nodes(self) -> Iterator[_Node]:
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node


def _path(node: _Node | None) -> Iterator[_Node]:
    """The nodes from this one up to its root."""
    while node is not None:
        yield node
        node = node.parent
