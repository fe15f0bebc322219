"""Stop strings on a text that grows. Knows nothing of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text given in pieces, and lets the rest of the text through.

    First means: reads the text character by character and stops as soon as it ends in a stop string; the longest one
    if several end there. So the result does not depend on how the text was cut into pieces. Held back is exactly the
    longest suffix that is a proper prefix of a stop string. Cost is linear in the text (Aho-Corasick).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.matched: str | None = None
        self._automaton = _Automaton(stop)
        self._state = 0
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop string. Nothing may follow a match."""
        assert self.matched is None, "text after a stop string"
        for end, char in enumerate(text, 1):
            self._state = self._automaton.step(self._state, char)
            self.matched = self._automaton.matches[self._state]
            if self.matched is not None:
                seen = self._held + text[:end]
                return seen[: len(seen) - len(self.matched)]
        seen = self._held + text
        certain = len(seen) - self._automaton.depths[self._state]
        self._held = seen[certain:]
        return seen[:certain]

    def finish(self) -> str:
        """The text that was held back in vain; "" after a match."""
        return "" if self.matched is not None else self._held


class _Automaton:
    """A trie of the stop strings whose nodes know their longest proper suffix in the trie. Node 0 is the root.

    ``depths[n]`` is the length of node n's string, ``matches[n]`` the longest stop string that it ends in.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.depths = [0]
        self.matches: list[str | None] = [None]
        self._children: list[dict[str, int]] = [{}]
        self._fails = [0]
        for string in stop:
            assert string, "an empty stop string was let in"
            self.matches[self._add(string)] = string
        self._link()

    def step(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._fails[node]
        return self._children[node].get(char, 0)

    def _add(self, string: str) -> int:
        node = 0
        for char in string:
            if char not in self._children[node]:
                self._children[node][char] = len(self.depths)
                self.depths.append(self.depths[node] + 1)
                self.matches.append(None)
                self._children.append({})
                self._fails.append(0)
            node = self._children[node][char]
        return node

    def _link(self) -> None:
        """Breadth first, so that a node's suffixes, being shorter, are linked before it."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            if self.matches[node] is None:
                self.matches[node] = self.matches[self._fails[node]]
            for char, child in self._children[node].items():
                self._fails[child] = self.step(self._fails[node], char)
                queue.append(child)
