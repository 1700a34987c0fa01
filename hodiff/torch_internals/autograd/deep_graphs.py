"""Freeing of deep autograd graphs, which torch does by recursion once Python has seen their nodes."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

# Number of nodes from which a graph may be deep. A chain of 32,000 can be freed on a stack of 8 MiB, one of 48,000 not.
DEEP = 20_000
# Seconds between attempts to free nodes, and the number of attempts without success before all nodes are tried.
_PAUSE = 0.02
_ATTEMPTS = 500


class _Kept:
    """Nodes that are freed one by one, each when no other code holds it.

    Nodes that Python has seen free the nodes that they lead to within their own destructors, so that the destructors of
    a chain fill the stack. Nodes in a list stay.
    """

    def __init__(self) -> None:
        # In each list, nodes come after those they lead to.
        self.lists: list[list[Any]] = []
        self.members: set[Any] = set()
        self.lock = threading.RLock()
        self.runs = False

    def add(self, nodes: Iterable[Any]) -> None:
        with self.lock:
            new = _children_first([each for each in nodes if each is not None and each not in self.members])
            if not new:
                return
            self.members.update(new)
            self.lists.append(new)
            if not self.runs:
                self.runs = True
                _thread.start_new_thread(self.free_until_empty, ())

    def free_until_empty(self) -> None:
        idle = 0
        while True:
            time.sleep(_PAUSE)
            with self.lock:
                idle = 0 if self.free_last() else idle + 1
                if idle == _ATTEMPTS:
                    # Unseen nodes, such as those of saved tensors, may hold nodes whose place is later.
                    self.free_any()
                    idle = 0
                if not self.lists:
                    self.runs = False
                    return

    def free_last(self) -> bool:
        """Free the last nodes of the lists, and return whether any was freed."""
        freed = False
        for nodes in list(self.lists):
            # A node is held by its list, the set, and the argument.
            while nodes and sys.getrefcount(nodes[-1]) <= 3:
                self.members.discard(nodes[-1])
                nodes.pop()
                freed = True
        self.lists = [nodes for nodes in self.lists if nodes]
        return freed

    def free_any(self) -> None:
        """Free nodes at any place that no other code holds."""
        for nodes in self.lists:
            for i, node in enumerate(nodes):
                if sys.getrefcount(node) <= 4:  # and the variable
                    self.members.discard(node)
                    nodes[i] = None
        self.lists = [[each for each in nodes if each is not None] for nodes in self.lists]


def _children_first(nodes: list[Any]) -> list[Any]:
    """Sort nodes such that each comes after those that it leads to."""
    left, order = set(nodes), []
    # A node is pushed before the nodes that it leads to, and once more, in a tuple, to be taken after them.
    stack: list[Any] = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            order.append(node[0])
        elif node in left:
            left.remove(node)
            stack.append((node,))
            stack.extend(parent for parent, _ in node.next_functions)
    return order


_kept = _Kept()


def free_one_by_one(nodes: Iterable[Any]) -> None:
    """Hold the nodes of a graph as long as other code does, and free each before those it leads to."""
    _kept.add(nodes)


def _start_afresh() -> None:
    """Give a forked process, where the thread does not exist, nodes and a lock of its own; leave the others."""
    global _kept
    _leave_to_the_system()
    _kept = _Kept()


@atexit.register
def _leave_to_the_system() -> None:
    """Keep nodes forever that are left when the interpreter ends, where their order would be lost."""
    if _kept.lists:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
