"""A run on simulated nodes: the coordinator's reducer among supervisors, messages and a restarting Ray, by a clock.

Everything but `elastic.reform.reduce` and the choice of a state is played: supervisors that obey and report, children
that step together, messages that are late, doubled or overtake one another, nodes that die, are drained or are cut off,
and a Ray Train that restarts the workers when the reducer gives up. A seed draws one history.

What is held at every moment: a generation steps only while all of its members do, so that one trains at a time; only
the newest attempt commits; a state is loaded only when it is committed, or sealed in the memory of two nodes of which
one is left; and every step of the run is trained by the lineage of attempts exactly once.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray_ulysses.elastic import reform
from ray_ulysses.elastic.causes import RankError
from ray_ulysses.elastic.placement import WorkerRange, place_workers

TICK_S = 0.25
SILENCE_S = 5.0
CUT_S = 10.0
"""A supervisor that does not hear the coordinator for this long ends its child and itself."""
LAST_STEP = 120
REPLAYED = [(275, 2, 2, 2), (73, 2, 2, 2), (77, 4, 1, 1), (275, 4, 1, 1), (114, 4, 1, 1)]
"""Histories that are replayed on real processes: seed, nodes, workers per node, and sp_size."""
FAULTS = ("child", "child", "bug", "hang", "worker", "node", "drain", "cut", "back", "two nodes")


@dataclass
class Node:
    """A node: dead for good, draining, or cut off from the others until a time."""

    name: str
    alive: bool = True
    draining: bool = False
    cut_until: float = -1.0
    memory: dict[int, int] = field(default_factory=dict)
    """Number of nodes that keep the state of a step together, by step."""
    partner: Node | None = None
    """Node that keeps a copy of this node's part."""


@dataclass
class Child:
    generation: tuple[int, int]
    rank: int
    attempt: int | None = None
    hung: bool = False


@dataclass
class Worker:
    number: int
    node: Node
    child: Child | None = None
    alive: bool = True
    heard_at: float = 0.0
    known_at: float = 0.0
    """When the coordinator last heard of the worker."""
    ended: set[tuple[int, int]] = field(default_factory=set)
    """Generations whose end the worker has reported."""

    def end(self) -> None:
        self.alive, self.child = False, None


@dataclass
class Attempt:
    number: int
    start: int
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Happened:
    what: str
    node: str = ""
    worker: int | None = None
    before: tuple[tuple[int, int], tuple[str, ...]] | None = None
    """Who trained since the event before this one: the group and the generation, and the node of each rank."""


class StuckError(AssertionError):
    """The run neither trains nor ends."""


class Simulation:
    """One history of a run, drawn from a seed."""

    def __init__(
        self, seed: int, *, nodes: int, per_node: int, sp_size: int, faults: int, least: int = 0, replaces: bool = False
    ) -> None:
        self.draw = random.Random(seed)
        # Of its own: the histories without replacements stay as they are.
        self.draw_joining = random.Random(seed) if replaces else None
        self.num_joining = self.replaced = self.count = self.group_number = 0
        self.restarts = self.reforms = self.loads_from_memory = 0
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.nodes = [Node(name=f"node-{number:04d}") for number in range(nodes)]
        self.per_node, self.sp_size = per_node, sp_size
        most = nodes * per_node // sp_size * sp_size
        self.wanted = WorkerRange(least=least or sp_size, most=most, sp_size=sp_size)
        self.group: reform.Group | None = None
        self.workers: dict[int, Worker] = {}
        self.attempts: list[Attempt] = []
        self.committed = 0
        """Newest step on storage."""
        self.status: str | None = None
        self.faults_left = faults
        self.happened: list[Happened] = []
        self.training: tuple[tuple[int, int], tuple[str, ...]] | None = None
        self.start_group()
        self.at(TICK_S, self.tick)
        for _ in range(faults):
            self.at(self.draw.uniform(1.0, 60.0), self.fault)

    # Time and messages.

    def at(self, delay_s: float, do: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.count, do))

    def run(self, limit_s: float = 3600.0) -> None:
        """Play until the run has ended; raise `StuckError` if it has not after the limit."""
        while self.status is None:
            self.now, _, do = heapq.heappop(self.queue)
            if self.now > limit_s:
                raise StuckError(f"at step {self.trained()}: {self.group}")
            do()
        self.note("end")

    def note(self, what: str, node: str = "", worker: int | None = None) -> None:
        self.happened.append(Happened(what=what, node=node, worker=worker, before=self.training))
        self.training = None

    def send(self, node: Node, deliver: Callable[[], None]) -> None:
        """Deliver a message to or from a node: at once or late, once or twice; a cut holds it back."""
        for _ in range(2 if self.draw.random() < 0.05 else 1):
            late = self.draw.random() < 0.05
            delay_s = self.draw.uniform(0.2, 2.0) if late else self.draw.uniform(0.0, 0.02)
            self.at(max(delay_s, node.cut_until - self.now + 0.01), deliver)

    # Ray Train.

    def start_group(self) -> None:
        """Start workers where there is room, or look again later."""
        self.group = None
        room = {node.name: self.per_node for node in self.nodes if self.usable(node)}
        placed = place_workers(room, self.wanted)
        if placed is None:
            self.at(5.0, self.start_group)
            return
        self.group_number += 1
        by_name = {node.name: node for node in self.nodes}
        places = [by_name[name] for name, count in placed.items() for _ in range(count)]
        self.workers = {
            number: Worker(number=number, node=node, heard_at=self.now, known_at=self.now)
            for number, node in enumerate(places)
        }
        self.group = reform.Group(wanted=self.wanted, workers={number: reform.Supervised() for number in self.workers})
        for worker in self.workers.values():
            self.at(self.draw.uniform(0.5, 8.0), self.join(worker, self.group_number))

    def join(self, worker: Worker, group: int) -> Callable[[], None]:
        place = reform.Place(node=worker.node.name, host=worker.node.name, port=1)

        def do() -> None:
            if worker.alive:
                worker.known_at = worker.heard_at = self.now
                self.send(worker.node, lambda: self.see(group, reform.Joined(worker=worker.number, place=place)))

        return do

    def restart(self) -> None:
        """End all workers, and start others after a while, as Ray Train does."""
        self.restarts += 1
        for worker in self.workers.values():
            worker.end()
        self.group, self.num_joining = None, 0
        self.at(self.draw.uniform(2.0, 30.0), self.start_group)

    # The coordinator.

    def see(self, group: int, event: reform.Event) -> None:
        if group != self.group_number or self.group is None:
            return
        if isinstance(event, reform.ChildEnded | reform.Joined):
            self.workers[event.worker].known_at = self.now
        self.group, actions = reform.reduce(self.group, event, self.now)
        for action in actions:
            self.act(action)

    def act(self, action: reform.Action) -> None:
        group = self.group_number
        match action:
            case reform.Start():
                assert len(action.members) % self.sp_size == 0
                self.reforms += action.generation > 1
                for rank, member in enumerate(action.members):
                    worker = self.workers[member]
                    self.send(worker.node, self.order(worker, (group, action.generation), rank, len(action.members)))
            case reform.Stop():
                for worker in self.workers.values():
                    self.send(worker.node, self.stop(worker, (group, action.generation)))
            case reform.Judge():
                unusable = frozenset(node.name for node in self.nodes if not self.usable(node))

                def judge() -> None:
                    self.see(group, reform.NodesUnusable(nodes=unusable))
                    self.see(group, reform.Judged(generation=action.generation, may_continue=True))

                self.at(self.draw.uniform(0.01, 1.0), judge)
            case reform.Finish():
                if action.status == "finished":
                    self.status = action.status
                else:
                    self.restart()
            case reform.GiveUp():
                self.restart()

    def tick(self) -> None:
        """Beat, notice who is silent, and let children step."""
        for worker in self.workers.values():
            if worker.alive and worker.node.cut_until < self.now:
                worker.known_at = worker.heard_at = self.now
            elif worker.alive and self.now - worker.heard_at > CUT_S:
                worker.end()
        for worker in self.workers.values() if self.group is not None else ():
            gone = not worker.alive and self.now - worker.known_at > TICK_S
            silent = gone or self.now - worker.known_at > SILENCE_S
            if self.group is not None and worker.number in self.group.workers and silent:
                self.see(self.group_number, reform.WorkerLost(worker=worker.number, what="silent"))
        self.see(self.group_number, reform.Tick())
        self.end_forgotten()
        if self.group is not None and self.group.phase == "short" and not self.num_joining:
            self.fill()
        self.move_away()
        self.step_all()
        self.at(TICK_S, self.tick)

    def fill(self) -> None:
        """Start workers where others were lost, or say that none can be started; some never join."""
        assert self.group is not None
        lost = [self.workers[number] for number, worker in self.group.workers.items() if worker.is_lost]
        places = [worker.node for worker in lost if self.usable(worker.node)]
        if self.draw_joining is None or not places or self.draw_joining.random() < 0.2:
            self.see(self.group_number, reform.NoReplacement())
            return
        self.num_joining = len(places)
        for number, node in enumerate(places, len(self.workers)):
            self.at(self.draw_joining.uniform(0.5, 15.0), self.replace(Worker(number=number, node=node)))

    def replace(self, worker: Worker) -> Callable[[], None]:
        group = self.group_number

        def do() -> None:
            if group != self.group_number or self.group is None:
                return
            self.num_joining -= 1
            if self.usable(worker.node):
                self.replaced += 1
                self.workers[worker.number] = worker
                self.join(worker, group)()

        return do

    def end_forgotten(self) -> None:
        """End workers whose connection was closed; Ray restarts all if that happens before the first generation."""
        group = self.group
        if group is None:
            return
        for number, worker in self.workers.items():
            if number in group.workers and group.workers[number].is_lost and worker.node.cut_until < self.now:
                worker.end()
        if group.phase == "gathering" and not all(worker.alive for worker in self.workers.values()):
            self.restart()

    def move_away(self) -> None:
        """Ask the members to leave nodes that are draining."""
        group = self.group
        if group is None or group.phase != "training" or group.moves:
            return
        unusable = frozenset(node.name for node in self.nodes if not self.usable(node))
        if unusable & group.num_placed.keys() and all(self.workers[one].child for one in group.members):
            self.see(self.group_number, reform.NodesUnusable(nodes=unusable))
            self.see(self.group_number, reform.MoveAsked())

    # The supervisors.

    def order(self, worker: Worker, generation: tuple[int, int], rank: int, world: int) -> Callable[[], None]:
        def do() -> None:
            newer = worker.child is not None and worker.child.generation >= generation
            if worker.alive and not newer and generation not in worker.ended:
                worker.child = Child(generation=generation, rank=rank)

        return do

    def stop(self, worker: Worker, generation: tuple[int, int]) -> Callable[[], None]:
        def do() -> None:
            if worker.alive and generation not in worker.ended:
                # The order may not have come yet: it is not obeyed any more.
                self.report(worker, generation)

        return do

    def report(self, worker: Worker, generation: tuple[int, int], **report: Any) -> None:
        """End a worker's child, if it is of this generation, and say so."""
        worker.ended.add(generation)
        stepped = worker.child is not None and worker.child.attempt is not None
        if worker.child is not None and worker.child.generation == generation:
            worker.child = None
        event = reform.ChildEnded(
            worker=worker.number, generation=generation[1], port=1, report=reform.Report(stepped=stepped, **report)
        )
        self.send(worker.node, lambda: self.see(generation[0], event))

    # Training.

    def step_all(self) -> None:
        """Let each generation whose children are all there train a step; older cut-off generations may exist."""
        by_generation: dict[tuple[int, int], list[Worker]] = {}
        for worker in self.workers.values():
            if worker.alive and worker.child is not None:
                by_generation.setdefault(worker.child.generation, []).append(worker)
        for generation, workers in by_generation.items():
            self.step(generation, workers)

    def step(self, generation: tuple[int, int], workers: list[Worker]) -> None:
        group = self.group
        if group is None or generation != (self.group_number, group.generation) or len(workers) < len(group.members):
            return
        children = [worker.child for worker in workers if worker.child is not None]
        # Members wait for one another where one hangs or a cut runs between them.
        cut_off = {worker.node.cut_until > self.now and worker.node.name for worker in workers}
        if any(child.hung for child in children) or len(cut_off) > 1:
            return
        nodes = {worker.node.name: worker.node for worker in workers}
        if children[0].attempt is None:
            start = self.choose([node for node in self.nodes if node.alive])
            self.attempts.append(Attempt(number=len(self.attempts) + 1, start=start))
            for child in children:
                child.attempt = len(self.attempts)
        attempt = self.attempts[-1]
        assert all(child.attempt == attempt.number for child in children), "an attempt that was overtaken trains"
        step = attempt.start + len(attempt.steps)
        if group.moves or step == LAST_STEP:
            self.committed = step
            for worker in workers:
                self.report(worker, generation, status="finished" if step == LAST_STEP else "resized")
            return
        attempt.steps.append(step + 1)
        self.training = generation, tuple(self.workers[member].node.name for member in group.members)
        self.keep(step + 1, [*nodes.values()])
        if (step + 1) % 10 == 0:
            self.committed = step + 1

    def keep(self, step: int, nodes: list[Node]) -> None:
        """Seal a state in memory: each node keeps its part and that of the node before it, unless a copy is torn."""
        if self.draw.random() < 0.1:
            return
        for node in self.nodes:
            node.memory = {step: len(nodes)} if node in nodes else {}
        for node, partner in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            node.partner = partner

    def choose(self, alive: list[Node]) -> int:
        """Return the newest complete state: one copy of each node's part is left."""
        for step in sorted({step for node in self.nodes for step in node.memory}, reverse=True):
            holders = [node for node in self.nodes if step in node.memory]
            if step > self.committed and all(node in alive or node.partner in alive for node in holders):
                self.loads_from_memory += 1
                return step
        return self.committed

    # Faults.

    def usable(self, node: Node) -> bool:
        return node.alive and not node.draining and node.cut_until < self.now

    def fault(self) -> None:
        self.faults_left -= 1
        workers = [worker for worker in self.workers.values() if worker.alive]
        kind = self.draw.choice(FAULTS)
        node = self.draw.choice(self.nodes)
        if kind in ("child", "bug", "hang", "worker") and workers:
            self.fail(self.draw.choice(workers), kind)
        elif kind in ("node", "two nodes"):
            # Somebody brings the last nodes back, sooner or later.
            for lost in self.draw.sample(self.nodes, min(len(self.nodes), 2 if kind == "two nodes" else 1)):
                self.kill(lost)
        elif kind == "drain":
            node.draining = True
            self.note(kind, node.name)
            self.at(self.draw.uniform(1.0, 60.0), lambda: self.kill(node))
        elif kind == "cut":
            node.cut_until = self.now + self.draw.uniform(0.5, 30.0)
            self.note(kind, node.name)
            self.at(node.cut_until - self.now, lambda: self.note("heals", node.name))
        elif kind == "back":
            self.bring_back(node)

    def fail(self, worker: Worker, kind: str) -> None:
        child = worker.child
        if kind == "worker" or child is not None:
            self.note(kind, worker.node.name, worker.number)
        if kind == "worker":
            worker.end()
        elif child is not None and kind == "hang":
            child.hung = True
            group = self.group_number
            event = reform.RanksHung(generation=child.generation[1], ranks=(child.rank,), what="not moved")
            self.at(20.0, lambda: self.see(group, event))
        elif child is not None:
            error = RankError(rank=0, kind="raised" if kind == "bug" else "lost", what=kind)
            self.report(worker, child.generation, error=error, step=self.draw.randrange(1000))

    def kill(self, node: Node) -> None:
        if not node.alive:
            node.draining = False
            return
        self.note("node", node.name)
        node.alive, node.draining, node.memory = False, False, {}
        for worker in self.workers.values():
            if worker.node is node:
                worker.end()
        self.at(self.draw.uniform(30.0, 90.0), lambda: self.bring_back(node))

    def bring_back(self, node: Node) -> None:
        if not node.alive:
            self.note("back", node.name)
            node.alive = True

    # What must hold.

    def trained(self) -> list[int]:
        """Return the steps of the lineage: of each attempt what the next one did not begin before."""
        steps: list[int] = []
        for attempt in self.attempts:
            steps = [step for step in steps if step <= attempt.start] + attempt.steps
        return steps
