"""`moonbus load soak-transfer`: many small pushes for a long time, and what they leave behind.

Every ``phase_s`` all grants are released and made anew, as those of requests are. Between two phases nothing is in
flight, so what a process holds then is what it keeps: the first such moment, once all connections are made, is compared
with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from load.bench.histogram import Histogram
from load.bench.mesh import Mesh
from load.bench.processes import Footprint
from shared.transfer import TransferSettings
from shared.units import format_seconds

STARVATION = 20.0
"""A p99 beyond so many times the p50 means that some pushes wait while others pass."""
PHASE_S = 10.0
_WARM_UPS = 8
ALLOWED = Footprint(descriptors=16, threads=8, rss_bytes=24 << 20)
"""What a process may hold more at the end than at the start: lanes opened late, heaps that settle. A leak of one
descriptor a grant passes it within seconds."""


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """What `moonbus load soak-transfer` was asked to do."""

    duration_s: float
    path: str = "shm"
    processes: int = 8
    in_flight: int = 1000
    nbytes: int = 16 << 10
    phase_s: float = PHASE_S
    warm_up_s: float = 2.0
    """Of each run before the first look; there are several."""
    report_s: float = 60.0
    """Durations of this long are shown together."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One report: from the start of the soak to ``until_s``."""

    until_s: float
    pushes: int
    p50_s: float
    p99_s: float


@dataclass(slots=True)
class SoakResult:
    """What came out."""

    stretches: list[Stretch] = field(default_factory=list)
    everything: Histogram = field(default_factory=Histogram)
    failed: int = 0
    error: str = ""
    """Of the first push that failed."""
    footprints: dict[int, tuple[Footprint, Footprint]] = field(default_factory=dict)
    """{process: at the start, at the end}"""

    @property
    def leaks(self) -> list[str]:
        """Each process that grew beyond :data:`ALLOWED`."""
        return [f"process {pid} {growth}" for pid, (start, end) in self.footprints.items()
                if (growth := excess(start, end))]

    @property
    def is_starving(self) -> bool:
        """Over the whole time."""
        histogram = self.everything
        return histogram.total > 0 and histogram.percentile_s(99) > STARVATION * histogram.percentile_s(50)

    def problems(self) -> list[str]:
        """Why it is no success, a line each; empty when it is one."""
        found = [f"leak: {leak}" for leak in self.leaks]
        if self.failed:
            found.append(f"{self.failed:,} pushes failed, the first one so: {self.error}")
        if not self.everything.total:
            found.append("no push succeeded")
        if self.is_starving:
            p50_s, p99_s = self.everything.percentile_s(50), self.everything.percentile_s(99)
            found.append(f"starvation: p99 is {format_seconds(p99_s)}, over {STARVATION:g} times the p50 of "
                         f"{format_seconds(p50_s)}")
        return found


def excess(start: Footprint, end: Footprint) -> str:
    """What grew beyond :data:`ALLOWED`, in words; empty when nothing did."""
    grown = [
        ("descriptors", start.descriptors, end.descriptors, ALLOWED.descriptors),
        ("threads", start.threads, end.threads, ALLOWED.threads),
        ("MiB of memory", start.rss_bytes >> 20, end.rss_bytes >> 20, ALLOWED.rss_bytes >> 20),
    ]
    return ", ".join(f"went from {before} to {after} {what}" for what, before, after, allowed in grown
                     if after - before > allowed)


async def soak(options: SoakOptions, report: Callable[[Stretch], None]) -> SoakResult:
    """Pushes until ``duration_s`` are over; ``report`` hears each stretch. Raises :class:`ChildLost`."""
    result = SoakResult()
    settings = TransferSettings(paths=(options.path,))
    async with Mesh.start(settings, processes=options.processes, in_flight=options.in_flight,
                          nbytes=options.nbytes) as mesh:
        before = await _settle(mesh, options.warm_up_s)
        stretch, elapsed_s, shown_s = Histogram(), 0.0, 0.0
        while elapsed_s < options.duration_s:
            seconds = min(options.phase_s, options.duration_s - elapsed_s)
            ran = await mesh.run(seconds)
            elapsed_s += seconds
            stretch.merge(ran.seconds)
            result.everything.merge(ran.seconds)
            result.failed += ran.failed
            result.error = result.error or ran.error
            if stretch.total and (elapsed_s - shown_s >= options.report_s or elapsed_s >= options.duration_s):
                result.stretches.append(Stretch(elapsed_s, stretch.total, stretch.percentile_s(50),
                                                stretch.percentile_s(99)))
                report(result.stretches[-1])
                stretch, shown_s = Histogram(), elapsed_s
        after = _look(mesh)
        result.footprints = {pid: (before[pid], after[pid]) for pid in mesh.pids}
    return result


async def _settle(mesh: Mesh, seconds: float) -> Mapping[int, Footprint]:
    """Runs the mesh until two runs in a row opened nothing new: further lanes to a peer are made when they are needed.

    What still grows after ``_WARM_UPS`` runs is left for the soak to judge.
    """
    looks: list[Mapping[int, Footprint]] = []
    for _ in range(_WARM_UPS):
        await mesh.run(seconds)
        looks.append(_look(mesh))
        if len(looks) > 2 and _opened(looks[-3]) == _opened(looks[-2]) == _opened(looks[-1]):
            break
    return looks[-1]


def _opened(look: Mapping[int, Footprint]) -> list[tuple[int, int]]:
    return [(held.descriptors, held.threads) for held in look.values()]


def _look(mesh: Mesh) -> Mapping[int, Footprint]:
    return {pid: Footprint.of(pid) for pid in mesh.pids}
