"""Plants one fault after the other in a run, and holds what must be true after each: the rows of the fault matrix."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.cluster.failures import CONTROLLER, FailureJudge, FailureLog, Noticed, failure_log
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.causes import root_cause
from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryStore
from ray_ulysses.run.requests import request_stop
from ray_ulysses.run_names import JOURNAL_FOLDER, journal_file_name
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.journal_files import attempt_numbers
from tests.distributed.faulty_launcher import plant, struck_at
from tests.distributed.supervised import SupervisedRun, children, training_child
from tests.polling import wait_until
from tests.result_table import ResultTable

TIMEOUT_S = 240.0


@dataclass
class Seen:
    """The newest attempt, as its journal shows it now."""

    number: int = 0
    started: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    """When each step was completed."""
    committed: list[int] = field(default_factory=list)


def judge_of(run: SupervisedRun, of_command: FailureLog) -> Callable[[reform.Judge, reform.Group], bool]:
    judges = FailureJudge(replace(of_command, writer=CONTROLLER))

    def judge(question: reform.Judge, group: reform.Group) -> bool:
        silent_s = max((error.silent_s for error in question.errors), default=0.0)
        noticed = Noticed(memory_step=newest_in_memory(run), silent_s=silent_s)
        return judges.judge(root_cause(question.errors, is_final=question.is_final), noticed)

    return judge


def newest_in_memory(run: SupervisedRun) -> int | None:
    gone = run.lost_nodes()
    agents = {node: agent.address for node, agent in run.agents.items() if agent.is_alive and node not in gone}
    if not agents:
        return None
    store = PeerMemoryStore(AgentAddresses(agents=agents, node=next(iter(agents)), partner=None, token="token"))
    try:
        manifest = newest_committed(store, "sizes").manifest
    except OSError:
        return None
    finally:
        store.close()
    return None if manifest is None else manifest.step


class FaultRows:
    """Strikes a run, row by row, and notes each row in a table."""

    def __init__(self, run: SupervisedRun, table: ResultTable) -> None:
        self.run, self.table, self.number, self.made = run, table, 0, 0
        run.judge = judge_of(run, failure_log(run.config, run.session))

    def newest(self) -> Seen:
        run_dir = self.run.config.run_dir
        numbers = attempt_numbers(run_dir)
        return self._read(run_dir, numbers[-1]) if numbers else Seen()

    def _read(self, run_dir: Path, number: int) -> Seen:
        seen = Seen(number=number)
        file = run_dir / JOURNAL_FOLDER / journal_file_name(number)
        # The last line may be half written.
        for line in file.read_text().split("\n")[:-1] if file.exists() else []:
            event = json.loads(line)
            if event["event"] == "attempt_started":
                seen.started = event
            elif event["event"] == "step":
                seen.steps[event["step"]] = event["time"]
            elif event["event"] == "checkpoint_committed":
                seen.committed.append(event["step"])
        return seen

    def wait_until_steady(self) -> Seen:
        """Wait until the newest attempt has committed a checkpoint, and has trained on after that."""

        def is_steady() -> bool:
            seen = self.newest()
            return bool(seen.committed) and max(seen.steps, default=0) > seen.committed[0]

        wait_until(is_steady, "training goes on", timeout_s=TIMEOUT_S, every_s=0.1, said=self.run.logs)
        return self.newest()

    def strike(
        self,
        fault: str,
        place: str,
        *,
        kind: str,
        rank: int = 0,
        world: int,
        cause: str | None,
        goes_on: bool = False,
        from_storage: bool = False,
        from_memory: bool = False,
        most_lost: int = 1,
        do: Callable[[], object] | None = None,
        **needs: Any,
    ) -> Seen:
        """Let a fault happen, wait until training goes on, and return the attempt that does."""
        before, run = self.wait_until_steady(), self.run
        judged = len(run.judged)
        at = self._struck(fault, place, do, {"kind": kind, "rank": rank, **needs})

        def trains() -> bool:
            seen = self.newest()
            is_there = seen.started.get("world_size") == world and (goes_on or seen.started["time"] > at)
            return is_there and sum(time > at for time in seen.steps.values()) >= 2

        wait_until(
            trains, f"training after {fault} in {place}", timeout_s=TIMEOUT_S, every_s=0.05,
            said=lambda: f"{run.coordinator.group}\n{run.judged[-3:]}\n{run.logs()}",
        )  # fmt: skip
        after = self.newest()
        trained = [self._read(run.config.run_dir, one).steps for one in range(before.number, after.number)]
        lost = max(0, max((step for steps in trained for step in steps), default=0) - after.started["resumed_step"])
        came_from = "memory" if "peer memory" in str(after.started["resumed_from"]) else "storage"
        seconds = min(time for time in after.steps.values() if time > at) - at
        self.table.add(
            {
                "fault": fault, "while": place, "workers": f"{before.started['world_size']} to {world}",
                "then": "went on" if goes_on else f"from {came_from}", "steps lost": str(lost),
                "seconds to the next step": f"{seconds:.1f}",
            }
        )  # fmt: skip
        print(self.table.rows[-1], flush=True)
        self._check(after, world)
        told = [root_cause(one.errors).reason for one in run.judged[judged:]]
        assert len(told) == (place in ("start", "load")) + (cause is not None), told
        assert cause is None or re.search(cause, told[-1]), told
        assert lost <= most_lost and (not from_storage or came_from == "storage"), after.started
        assert not from_memory or came_from == "memory", after.started
        return after

    def strike_to_the_end(self, fault: str, place: str, *, cause: str, **needs: Any) -> None:
        """Let a fault happen that re-forming does not survive, and wait until it is left to Ray Train."""
        before, run = self.wait_until_steady(), self.run
        at = self._struck(fault, place, None, {"rank": 0, **needs})
        wait_until(
            lambda: run.coordinator.group is not None and run.coordinator.group.phase == "ended", "the end",
            timeout_s=TIMEOUT_S, said=run.logs,
        )  # fmt: skip
        seconds, reason = time.time() - at, root_cause(run.judged[-1].errors).reason
        assert re.search(cause, reason), reason
        self.table.add(
            {
                "fault": fault, "while": place, "workers": f"{before.started['world_size']} to 0",
                "then": "left to Ray Train", "steps lost": "0", "seconds to the next step": f"ended in {seconds:.1f}",
            }
        )  # fmt: skip

    def _struck(self, fault: str, place: str, do: Callable[[], object] | None, needs: dict[str, Any]) -> Any:
        """Plant a fault, and return when it struck."""
        run, self.number = self.run, self.number + 1
        plant(run.folder, {"number": self.number, "where": place, **needs})
        if place in ("start", "load"):
            # Ends a generation, so that another one starts.
            group: Any = run.coordinator.group
            child: Any = training_child(run.processes[group.members[-1]].pid)
            os.kill(child, signal.SIGKILL)
        wait_until(
            lambda: struck_at(run.folder, self.number), f"{fault} in {place}", timeout_s=TIMEOUT_S, said=run.logs
        )
        if do is not None:
            do()
            (run.folder / f"done-{self.number}").touch()
        return struck_at(run.folder, self.number)

    def begin(self, nodes: int) -> None:
        """Lose the driver, start another on the nodes left and new ones, so many in all, and wait until it trains."""
        run, number = self.run, self.newest().number
        run.lose_driver()
        run.wait_until_ended(well=False, timeout_s=TIMEOUT_S)
        left = [
            node for node in dict.fromkeys(run.nodes.values()) if node not in run.draining and run.agents[node].is_alive
        ]
        self.made += 1
        names = (left + [f"{chr(ord('a') + number)}{self.made}" for number in range(nodes)])[:nodes]
        for node in run.agents.keys() - set(names):
            run.agents.pop(node).kill()
        run.draining.clear()
        session = f"session-{self.made}"
        per_node = len(run.nodes) // len(set(run.nodes.values()))
        run.judge = judge_of(run, failure_log(run.config, session))
        run.begin({worker: names[worker // per_node] for worker in range(nodes * per_node)}, session)
        wait_until(
            lambda: self.newest().number > number and self.newest().steps, "training goes on", timeout_s=TIMEOUT_S,
            every_s=0.1, said=run.logs,
        )  # fmt: skip

    def group(self) -> Any:
        """Return the group of workers, once it trains steadily."""
        self.wait_until_steady()
        return self.run.coordinator.group

    def members(self) -> list[tuple[int, str]]:
        return [(worker, self.run.nodes[worker]) for worker in self.group().members]

    def nodes(self) -> list[str]:
        return list(dict.fromkeys(node for _, node in self.members()))

    def _check(self, seen: Seen, world: int) -> None:
        """Check that whole groups train, each on one node that is there, and that nothing else runs."""
        run, started = self.run, seen.started
        sp_size = run.config.parallel.sp_size
        nodes = started["rank_nodes"]
        assert started["world_size"] == world == len(nodes) and world % sp_size == 0, started
        assert all(len(set(nodes[at : at + sp_size])) == 1 for at in range(0, world, sp_size)), nodes
        assert not set(nodes) & (run.lost_nodes() | run.draining), nodes

        def is_tidy() -> bool:
            alive = [one.pid for one in run.processes.values() if one.poll() is None]
            agents = sum(agent.is_alive for agent in run.agents.values())
            launchers = sum(len(children(one)) for one in alive)
            return launchers == len(alive) and len(run.own_processes()) == 2 * len(alive) + world + agents

        def processes() -> str:
            named = [(one.pid, one.ppid(), one.cmdline()[1:4], one.create_time()) for one in run.own_processes()]
            return f"{world} workers on {nodes}, all on {run.nodes}:\n" + "\n".join(map(str, sorted(named)))

        wait_until(is_tidy, "only what trains runs", timeout_s=30.0, every_s=0.2, said=processes)

    def finish(self) -> RunHistory:
        """Stop the run in order, and check that nothing is left of it."""
        run = self.run
        self.wait_until_steady()
        alive = [worker for worker, process in run.processes.items() if process.poll() is None]
        request_stop(run.config.run_dir, run.session)
        run.wait_until_ended(alive, timeout_s=TIMEOUT_S)
        # Agents are all that is left, whose contents are theirs alone.
        for agent in run.agents.values():
            if agent.is_alive:
                agent.kill()
        wait_until(
            lambda: not run.own_processes(), "no process left", timeout_s=20.0, said=lambda: str(run.own_processes())
        )
        history = read_history(run.config.run_dir)
        assert history.status == "stopped"
        return history
