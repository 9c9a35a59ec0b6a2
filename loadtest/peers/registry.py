"""All peers, in the order in which they take turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.peers.base import Peer, known_names
from loadtest.peers.llama import LlamaPeer
from loadtest.peers.mlx_lm import MLXLMPeer
from loadtest.peers.quire import QuirePeer
from loadtest.peers.vllm import VLLMPeer


def all_peers(cache: Path) -> list[Peer]:
    """Every known peer, its environment below `cache`."""
    return [
        QuirePeer(haproxy=True),
        QuirePeer(haproxy=False),
        VLLMPeer(cache),
        *(LlamaPeer(cache, kind) for kind in ("q4_1", "bf16", "f32")),
        MLXLMPeer(cache, openblas=False),
        MLXLMPeer(cache, openblas=True),
    ]


def chosen(peers: Sequence[Peer], names: Sequence[str] | None) -> list[Peer]:
    """The peers of these names, in their own order; all without names. Raises ValueError for an unknown name."""
    if names is None:
        return list(peers)
    known = {peer.spec.name for peer in peers}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no peer is called {', '.join(map(repr, unknown))}; there are: {known_names(peers)}")
    return [peer for peer in peers if peer.spec.name in names]
