"""What may be asked for in the middle of a crash: a rewind, a restore, an undo or a fork, chosen at random, and what it
means in the model of threads (``talks``). Asks nothing by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cogfs.client import Client
from tests.support.accounts import of_world
from tests.support.talks import Talk, World
from tests.support.tree import Node, Tree, describe


@dataclass(frozen=True)
class Operation:
    """Something that takes threads or files back, or forks them."""

    kind: str
    call: Callable[[Client], object]
    #: What it means.
    apply: Callable[[World[Tree]], None]
    #: The thread and the workspace that runs are looked for in.
    talk: str = ""
    place: int = -1
    of_runs: bool = True
    #: The directory of a workspace that is made.
    into: Path | None = None

    @property
    def fork(self) -> bool:
        return self.kind.startswith("fork")


class Operations:
    """Those that can be asked for as things are in ``world``. ``name`` gives new ids and names, below ``base``."""

    def __init__(
        self,
        world: World[Tree],
        roots: Sequence[Path],
        base: Path,
        dice: random.Random,
        name: Callable[[str], str],
    ) -> None:
        self._world = world
        self._roots = roots
        self._base = base
        self._dice = dice
        self._name = name

    def any(self) -> Operation:
        """One that changes something."""
        kinds = (self._rewind, self._restore, self._undo, self._fork)
        while True:
            found = self._dice.choices(kinds, (5, 2, 2, 5))[0]()
            if found is None:
                continue
            after = self._world.copy()
            found.apply(after)
            roots = [*self._roots, found.into] if found.into is not None else self._roots
            if after.files != self._world.files or of_world(after, roots) != of_world(self._world, self._roots):
                return found

    def _talk(self) -> Talk[Tree]:
        talks = list(self._world.talks.values())
        return self._dice.choice([talks[0], talks[0], *talks])

    def _rewind(self) -> Operation | None:
        talk, dice = self._talk(), self._dice
        if not talk.leaf:
            return None
        point = dice.choice(talk.ids()[-8:])
        before = talk.said[point].kind == "user" and dice.random() < 0.2
        files, memory = dice.choice(((True, True), (True, True), (True, True), (False, True), (True, False)))
        found = self._world.found(talk, point, before=before) if files else None
        if files and (found is None or found[0].pruned):
            return None
        place = found[0].place if found is not None else -1
        force = self._world.in_the_way(talk.id, place).anything
        return Operation(
            "rewind" if files and memory else "rewind of the conversation" if memory else "rewind of the files",
            lambda cog: cog.thread(talk.id).rewind(point, files=files, memory=memory, before=before, force=force),
            lambda world: world.rewind(talk.id, point, files=files, memory=memory, before=before),
            talk.id,
            place,
        )

    def _restore(self) -> Operation | None:
        known = [kept for kept in self._world.kept if kept.id and not kept.pruned]
        kept = self._dice.choice(known)

        def apply(world: World[Tree]) -> None:
            world.restore(next(one for one in world.kept if one.id == kept.id))

        return Operation("restore", lambda cog: cog.snapshot(kept.id).restore(), apply, "", kept.place, of_runs=False)

    def _undo(self) -> Operation | None:
        place = self._dice.choice([number for number, way in enumerate(self._world.ways) if way is not None] or [-1])
        if place < 0:
            return None
        talk = self._world.to_undo(place)
        talk_id = talk.id if talk is not None else ""
        force = self._world.in_the_way(talk_id, place, of_runs=bool(talk_id)).anything
        root = self._roots[place]
        return Operation(
            "undo of a rewind" if talk_id else "undo of the files",
            lambda cog: cog.workspace(root).undo(force=force),
            lambda world: world.undo(place),
            talk_id,
            place,
            of_runs=bool(talk_id),
        )

    def _fork(self) -> Operation | None:
        talk, dice = self._talk(), self._dice
        point = dice.choice(list(talk.said)[-8:])
        where = dice.choice(("without files", "same", "another", "new", "new", "empty"))
        found = talk.at(point)
        new = self._name("t")
        if where == "without files":
            force = self._world.in_the_way(talk.id, -1).anything
            return Operation(
                "fork without files",
                lambda cog: cog.thread(talk.id).fork(point, id=new, force=force),
                lambda world: world.fork(talk.id, point, new, None),
                talk.id,
            )
        if found is None or found[0].pruned:
            return None
        if where in ("new", "empty"):
            root = self._base / self._name("d")
            nothing: Tree = {b"": Node("directory", 0o755)}
            if where == "empty":
                root.mkdir()
                nothing = describe(root)

            def apply(world: World[Tree]) -> None:
                world.fork(talk.id, point, new, world.add_place(nothing))

            force = self._world.in_the_way(talk.id, -1).anything
            return Operation(
                f"fork into {'a new' if where == 'new' else 'an empty'} directory",
                lambda cog: cog.thread(talk.id).fork(point, id=new, files=True, into=root, force=force),
                apply,
                talk.id,
                into=root,
            )
        source = found[0].place
        others = [place for place in range(len(self._roots)) if place != source]
        place = source if where == "same" else dice.choice(others)
        force = self._world.in_the_way(talk.id, place).anything
        return Operation(
            f"fork into {'its' if where == 'same' else 'another'} workspace",
            lambda cog: cog.thread(talk.id).fork(
                point, id=new, files=True, workspace=cog.workspace(self._roots[place]), force=force
            ),
            lambda world: world.fork(talk.id, point, new, place),
            talk.id,
            place,
        )
