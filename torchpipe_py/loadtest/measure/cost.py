"""What the load tester itself took, and whether that was the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchpipe_py.loadtest.ledger import Outcome
from torchpipe_py.loadtest.measure.cpu import CpuUse
from torchpipe_py.loadtest.report.summary import Rows, format_cpu

CLIENT_LIMIT = 0.9  # of a core, for one client process
MACHINE_LIMIT = 0.95  # of all cores: saturated
TESTER_SHARE_LIMIT = 0.5  # of the CPU time a saturated machine spent


@dataclass(frozen=True)
class TesterCost:
    """What the load tester itself took: `cpu` in seconds, `busiest` client of one core, `share` of all CPU time spent.

    `others` is what processes that are neither server nor tester took, of one core; None where that is not known.
    """

    cpu: float
    us_per_call: float | None
    busiest: float
    share: float | None
    machine_busy: float | None
    others: float | None

    @property
    def limits(self) -> list[str]:
        """The reasons why this run measured the tester and not the server; empty for a valid run."""
        reasons = []
        if self.busiest > CLIENT_LIMIT:
            reasons.append(f"a client process used {self.busiest:.0%} of a core")
        if self.machine_busy is not None and self.share is not None:
            saturated = self.machine_busy > MACHINE_LIMIT
            if saturated and self.share > TESTER_SHARE_LIMIT:
                reasons.append(f"the machine's CPU is saturated and the tester took {self.share:.0%} of it")
        return reasons


def tester_cost(outcome: Outcome, use: CpuUse) -> TesterCost:
    """Adds up the CPU time of clients and parent during the run."""
    ledgers = outcome.ledgers
    clients = sum(ledger.cpu_ns for ledger in ledgers) / 1e9
    calls = sum(ledger.calls_done for ledger in ledgers)
    cpu = clients + use.parent
    return TesterCost(
        cpu=cpu,
        us_per_call=clients * 1e6 / calls if calls else None,
        busiest=max((ledger.cpu_ns / ledger.wall_ns for ledger in ledgers if ledger.wall_ns), default=0.0),
        share=min(1.0, cpu / use.machine) if use.machine else None,
        machine_busy=use.machine_busy,
        others=None if use.server is None else use.others(use.server + cpu),
    )


def cpu_fields(cost: TesterCost, use: CpuUse) -> dict[str, Any]:
    """The report's part about CPU time, in percent of one core."""
    return {
        "server_cpu_percent": None if use.server is None else 100 * use.server / use.wall,
        "tester_cpu_percent": 100 * cost.cpu / use.wall,
        "tester_cpu_us_per_call": cost.us_per_call,
        "tester_busiest_client_percent": 100 * cost.busiest,
        "tester_share_of_cpu": cost.share,
        "other_cpu_percent": None if cost.others is None else 100 * cost.others,
        "machine_busy": cost.machine_busy,
        "tester_limited": bool(cost.limits),
    }


def cpu_rows(report: dict[str, Any]) -> Rows:
    """The table's part about CPU time."""
    busiest = format_cpu(report["tester_busiest_client_percent"])
    cost = f"{format_cpu(report['tester_cpu_percent'])}, busiest client {busiest}"
    if report["tester_cpu_us_per_call"] is not None:
        cost += f", {report['tester_cpu_us_per_call']:.1f} µs per call"
    rows = [("server CPU", format_cpu(report["server_cpu_percent"])), ("tester CPU", cost)]
    if report["host_is_local"] and report["tester_share_of_cpu"] is not None:
        share = f"{report['tester_share_of_cpu']:.0%} of the CPU time spent on this machine"
        rows.append(("tester share", f"{share}, whose cores server and tester share"))
    return rows
