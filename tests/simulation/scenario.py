"""Scenarios: the cluster, the requests and the faults of a seed, all drawn before the run."""

from dataclasses import dataclass, field
from random import Random

from engine.hash_model import expected_tokens
from scheduler.geometry import UNIFORM, Group
from shared.failpoints import SITES

VOCABULARY = 97
NODE_SITES = tuple(site for site in SITES if not site.startswith("router."))
HANDOFF_SITES = tuple(site for site in NODE_SITES if site.startswith(("prefill.", "decode.")))
NODE_FAULTS = (
    "kill", "kill at site", "kill at site", "vanish", "vanish at site", "freeze at site", "freeze", "freeze at site",
    "hang", "slow", "cut", "cut one way", "reset", "drain", "role", "raise",
)  # fmt: skip
FLEET_FAULTS = ("registry down", "registry hangs", "registry flushed", "registry wrong", "clock jumps", "reset")
OUTAGE = {"prefill": "freeze all prefill nodes", "decode": "freeze all decode nodes"}  # an outage has both faults
OUTAGE_EVERY = 10  # one seed in 10 has an outage and no other fault
STALL = "stall"  # stalls the existing connections between a prefill node and a decode node
STALL_EVERY = 10  # one seed in 10 has stalls and no other fault
HARMLESS = {"slow", "clock jumps", "registry down", "registry hangs", "registry flushed", "registry wrong"}


@dataclass(slots=True)
class RequestPlan:
    """The request of one client and the behaviour of the client."""

    id: str
    prompt: list[int]
    max_tokens: int
    expected: list[int]
    arrives_s: float
    n: int = 1
    salt: bytes = b""
    priority: int = 0
    stop_tokens: frozenset[int] = frozenset()
    row: list[int] = field(default_factory=list)  # the prompt and its longest answer
    cancels_at: int | None = None  # number of deltas after which the client disconnects
    cancels_after_s: float | None = None
    reads_slowly_s: float = 0.0
    deadline_s: float | None = None


@dataclass(slots=True)
class Fault:
    kind: str
    at_s: float
    for_s: float
    site: str = ""
    passing: int = 0  # n: the fault occurs when the site is reached for the n-th time


@dataclass(slots=True)
class Scenario:
    seed: int
    num_prefill: int
    num_decode: int
    registry: str  # "embedded" | "redis"
    channels: tuple[str, ...]
    num_blocks: dict[str, int]
    block_tokens: int
    budget_tokens: int
    max_num_seqs: int
    policy: str
    disaggregate: str
    ahead: bool
    row_s: float
    iteration_s: float  # duration of an iteration of an engine's loop
    kv_faults: int
    plans: list[RequestPlan]
    faults: list[Fault] = field(default_factory=list)
    groups: tuple[Group, ...] = UNIFORM
    num_guesses: int = 0  # maximum number of guessed tokens per step; 0: no speculative decoding

    @property
    def is_outage(self) -> bool:
        return any(fault.kind in OUTAGE.values() for fault in self.faults)

    @property
    def is_lossless(self) -> bool:
        """Return whether every request must succeed: at most one fault is harmful and another decode node remains, or
        all nodes freeze and some of them continue before the router stops waiting."""
        if self.is_outage:
            return True
        harm = [fault for fault in self.faults if fault.kind not in HARMLESS]
        return len(harm) <= 1 and self.kv_faults <= 2 and self.num_decode >= 2 and not self.kills_router

    @property
    def kills_router(self) -> bool:
        return any(fault.kind == "kill router" for fault in self.faults)

    @property
    def raises(self) -> bool:
        return any(fault.kind == "raise" for fault in self.faults)


GROUPS = (
    (Group("window", 1, 5),),
    (Group("full"), Group("window", 2, 9)),
    (Group("full", 2), Group("window", 1, 2), Group("window", 1, 17)),
    (Group("full"), Group("state", 2)),
    (Group("full"), Group("window", 1, 6), Group("state", 1)),
)


def draw(seed: int) -> Scenario:
    """Draw the scenario of a seed."""
    random = Random(f"scenario {seed}")
    block_tokens = random.choice((2, 4, 8))
    groups = _groups(seed)
    plans = _plans(random, block_tokens, groups)
    largest = max(-(-(len(plan.prompt) + plan.max_tokens) // block_tokens) for plan in plans)
    is_tiny = random.random() < 0.5
    decode_blocks = 2 + (largest + random.randrange(1 + largest // 2) if is_tiny else 6 * largest)
    prefill_blocks = 2 + (largest + random.randrange(1 + largest // 2) if random.random() < 0.4 else 5 * largest)
    num_decode = random.choice((1, 2, 2, 2, 3))
    num_prefill = random.choice((0, 1, 1, 2, 2, 3))
    scenario = Scenario(
        seed,
        num_prefill,
        num_decode,
        random.choice(("embedded", "embedded", "redis")),
        random.choice((("tcp",), ("shm",), ("shm", "tcp"))),
        {"prefill": prefill_blocks, "decode": decode_blocks},
        block_tokens,
        random.choice((8, 16, 64)),
        random.choice((2, 4, 16)),
        random.choice(("stall_free", "stall_free", "stall_free", "prefill_first", "decode_maximal")),
        random.choice(("always", "always", "auto")),
        random.random() < 0.4,
        random.choice((0.0002, 0.01, 0.15)),
        random.choice((0.0005, 0.01, 0.03)),
        random.choice((0, 0, 1, 2, 4, 8)),
        plans,
    )
    scenario.faults, scenario.groups = _faults(random), groups
    if not any(group.kind == "state" for group in groups):
        scenario.num_guesses = Random(f"guesses {seed}").choice((0, 0, 2, 5))
    if seed % OUTAGE_EVERY == OUTAGE_EVERY - 1:
        _freeze_all(scenario)
    if seed % STALL_EVERY == STALL_EVERY // 2:
        _stall(scenario)
    return scenario


def _groups(seed: int) -> tuple[Group, ...]:
    """Return the groups of the model. The seeds that detect mutations have a model with one group."""
    has_several = seed % 7 == 6 or (seed > 64 and seed % 2 == 1)
    return Random(f"groups {seed}").choice(GROUPS) if has_several else UNIFORM


def _stall(scenario: Scenario) -> None:
    """Stall connections during handoffs over shared memory. Blocks that a prefill node may still write into stay in
    quarantine. A separate random generator leaves the scenarios of other seeds unchanged."""
    random = Random(f"stall {scenario.seed}")
    scenario.num_prefill, scenario.num_decode, scenario.kv_faults = *random.choices((1, 2), k=2), 0
    scenario.channels, scenario.disaggregate = ("shm",), "always"
    times = sorted(random.choice(scenario.plans).arrives_s + 0.02 * random.random() for _ in range(3))
    scenario.faults = [Fault(STALL, at_s, 3.0 + 5.0 * random.random()) for at_s in times]


def _freeze_all(scenario: Scenario) -> None:
    """Freeze all nodes. The nodes of one role resume long before the router stops waiting for them. The other nodes
    resume a second later, or only after the router has stopped waiting for them. Blocks that a frozen node
    may still write into stay in quarantine, so each pool has room for every request twice. A separate random generator
    leaves the scenarios of other seeds unchanged."""
    random = Random(f"outage {scenario.seed}")
    scenario.num_prefill, scenario.num_decode, scenario.kv_faults = *random.choices((1, 2), (3, 1), k=2), 0
    blocks = sum(plan.n * -(-(len(plan.prompt) + plan.max_tokens) // scenario.block_tokens) for plan in scenario.plans)
    scenario.num_blocks = {"prefill": 2 + 2 * blocks, "decode": 2 + 2 * blocks}
    at_s = random.choice(scenario.plans).arrives_s + 0.02 * random.random()
    first, second = random.sample(sorted(OUTAGE), 2)
    first_s = 3.0 + 5.0 * random.random()
    second_s = first_s + random.choice((1.0, 40.0, 40.0))
    scenario.faults = [Fault(OUTAGE[first], at_s, first_s), Fault(OUTAGE[second], at_s, second_s)]


def _plans(random: Random, block_tokens: int, groups: tuple[Group, ...]) -> list[RequestPlan]:
    roots = [[random.randrange(VOCABULARY) for _ in range(random.randrange(4, 40))] for _ in range(3)]
    plans = []
    at_s = 0.3
    spread_s = random.choice((0.02, 0.2, 0.8, 4.0))
    for number in range(random.randrange(4, 11)):
        prompt = list(random.choice(roots)) if random.random() < 0.6 else []
        prompt += [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 24))]
        max_tokens = random.choice((1, 2, 5, 12, 30))
        salt = random.choice((b"", b"", b"one", b"two"))
        expected = expected_tokens(prompt, max_tokens, VOCABULARY, salt, groups=groups)
        stop_tokens: frozenset[int] = frozenset()
        row = prompt + expected
        if random.random() < 0.2:
            stop_tokens = frozenset({random.choice(expected)})
            expected = expected[: 1 + next(at for at, token in enumerate(expected) if token in stop_tokens)]
        at_s += spread_s * random.random() ** 2
        plan = RequestPlan(
            f"r{number}", prompt, max_tokens, expected, at_s, 1, salt, random.choice((0, 0, 0, 5)), stop_tokens, row
        )
        _behave(random, plan)
        plans.append(plan)
    return plans


def _behave(random: Random, plan: RequestPlan) -> None:
    what = random.random()
    if what < 0.08:
        plan.cancels_at = random.randrange(len(plan.expected))
    elif what < 0.16:
        plan.cancels_after_s = random.random() ** 3
    elif what < 0.22:
        plan.reads_slowly_s = 0.3
    elif what < 0.27:
        plan.deadline_s = random.random() * 2.0
    elif what < 0.40:
        plan.n = random.choice((2, 3))


def _faults(random: Random) -> list[Fault]:
    """Draw the faults. Most seeds have one or two faults, some have none, and a few have more."""
    count = random.choice((0, 1, 1, 1, 1, 2, 2, 3, 5))
    faults = []
    for _ in range(count):
        kinds = NODE_FAULTS if random.random() < 0.85 else FLEET_FAULTS
        kind = "kill router" if random.random() < 0.04 else random.choice(kinds)
        for_s = random.choice((0.05, 0.5, 1.5, 4.0, 12.0)) * (0.5 + random.random())
        site = random.choice(HANDOFF_SITES if random.random() < 0.7 else NODE_SITES)
        passing = random.choice((1, 1, 2, 3, 5)) if not site.startswith("engine.") else random.randrange(1, 30)
        faults.append(Fault(kind, 0.25 + random.random() ** 2 * 2.0, for_s, site, passing))
    return sorted(faults, key=lambda fault: fault.at_s)
