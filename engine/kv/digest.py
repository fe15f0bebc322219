"""Names for blocks that outlive the process: what a block holds, and after what, decides its digest.

A digest covers the model, the block format, the namespace and every token up to the block's end. Two blocks have one digest
exactly when one may stand for the other, at any time, in any process. Knows no bytes of K or V and no files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.kv.block import PrefixNode
from engine.kv.prefix import public_namespace
from engine.request import Namespace

DIGEST_BYTES = 32


def root_digest(fingerprint: bytes, namespace: Namespace, above: bytes = b"") -> bytes:
    """Where a namespace begins. ``above`` is the digest of the node that its root hangs below, if it is a branch."""
    return hashlib.sha256(b"octavo root\0" + fingerprint + above + repr(namespace).encode()).digest()


def child_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The block of ``tokens`` behind everything that ``parent`` stands for."""
    return hashlib.sha256(b"octavo block\0" + parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class Link(NamedTuple):
    """A block's digest, and where it stands: ``above`` is the digest of the block before it, whoever's it is, or of the root.

    ``branch`` is empty but for the first block behind public ones: there it is the digest of the branch that it begins.
    """

    digest: bytes
    above: bytes
    branch: bytes = b""


class Digester:
    """Digests of tree nodes, computed when first asked for and kept on the node. ``fingerprint`` names model and format."""

    def __init__(self, fingerprint: bytes) -> None:
        assert len(fingerprint) == DIGEST_BYTES
        self.fingerprint = fingerprint

    def of_root(self, namespace: Namespace, above: bytes = b"") -> bytes:
        return root_digest(self.fingerprint, namespace, above)

    def link(self, node: PrefixNode) -> Link:
        """Of a node that holds a full block and hangs in the tree."""
        parent = node.parent
        assert parent is not None
        if parent.namespace is not None and parent.parent is not None:
            return Link(self.of(node), self.of(parent.parent), self.of(parent))
        return Link(self.of(node), self.of(parent))

    def links(
        self,
        namespace: Namespace,
        token_ids: Sequence[int],
        num_public_blocks: int,
        block_size: int,
        nodes: Sequence[PrefixNode] = (),
    ) -> Iterator[Link]:
        """The full blocks of the tokens behind ``nodes``, the first of them. The first ``num_public_blocks`` belong to no salt."""
        above = self.of(nodes[-1]) if nodes else self.of_root(public_namespace(namespace) if num_public_blocks else namespace)
        for index in range(len(nodes), len(token_ids) // block_size):
            is_first = index == num_public_blocks and index > 0
            branch = self.of_root(namespace, above) if is_first else b""
            tokens = token_ids[index * block_size : (index + 1) * block_size]
            link = Link(child_digest(branch or above, tokens), above, branch)
            yield link
            above = link.digest

    def of(self, node: PrefixNode) -> bytes:
        """The node's digest. Not recursive: a long prompt is thousands of nodes deep."""
        path: list[PrefixNode] = []
        above: PrefixNode | None = node
        while above is not None and above.digest is None:
            path.append(above)
            above = above.parent
        digest = above.digest if above is not None and above.digest is not None else b""
        for step in reversed(path):
            if step.namespace is not None:
                digest = root_digest(self.fingerprint, step.namespace, digest)
            else:
                digest = child_digest(digest, step.tokens)
            step.digest = digest
        return digest
