"""Names for blocks that outlive the process: what a block holds, and after what, decides its digest.

A digest covers the model, the block format, the namespace and every token up to the block's end. Two blocks have one digest
exactly when one may stand for the other, at any time, in any process. Knows no bytes of K or V and no files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from engine.kv.block import PrefixNode
from engine.request import Namespace

DIGEST_BYTES = 32


def root_digest(fingerprint: bytes, namespace: Namespace, above: bytes = b"") -> bytes:
    """Where a namespace begins. ``above`` is the digest of the node that its root hangs below, if it is a branch."""
    return hashlib.sha256(b"octavo root\0" + fingerprint + above + repr(namespace).encode()).digest()


def child_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The block of ``tokens`` behind everything that ``parent`` stands for."""
    return hashlib.sha256(b"octavo block\0" + parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class Digester:
    """Digests of tree nodes, computed when first asked for and kept on the node. ``fingerprint`` names model and format."""

    def __init__(self, fingerprint: bytes) -> None:
        assert len(fingerprint) == DIGEST_BYTES
        self.fingerprint = fingerprint

    def of_root(self, namespace: Namespace, above: bytes = b"") -> bytes:
        return root_digest(self.fingerprint, namespace, above)

    def above(self, node: PrefixNode) -> bytes:
        """The digest of the block before, whoever's it is; of the root for the first block."""
        parent = node.parent
        assert parent is not None
        is_branch = parent.namespace is not None and parent.parent is not None
        return self.of(parent.parent if is_branch and parent.parent is not None else parent)

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
