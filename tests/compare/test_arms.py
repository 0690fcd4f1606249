import pytest

from compare.arms import Arm, cores_of, parse_arm, parse_arms
from compare.run.deployments import LaunchOptions
from shared.errors import ConfigError


def test_an_arm_is_parsed_with_the_common_settings_below_its_own():
    """A disaggregated arm disaggregates every request, unless its settings state otherwise."""
    assert parse_arm("colocated:2") == Arm("colocated:2", 0, 2, {})
    arm = parse_arm("disaggregated:1p3d@prefill_first,max-num-seqs=8")
    assert (arm.prefill, arm.decode, arm.devices, arm.mode, arm.policy) == (1, 3, 4, "disaggregated", "prefill_first")
    assert arm.settings == {"disaggregate": "always", "policy": "prefill_first", "max_num_seqs": "8"}
    assert parse_arm("disaggregated:1p1d@disaggregate=auto").settings["disaggregate"] == "auto"
    one, other = parse_arms(["colocated:2", "colocated:2@max_num_seqs=4"], ["max_num_seqs=8", "runner=hash"])
    assert one.settings == {"max_num_seqs": "8", "runner": "hash"}
    assert other.settings == {"max_num_seqs": "4", "runner": "hash"}


@pytest.mark.parametrize(
    ("arms", "complaint"),
    [
        (["colocated", "colocated:2"], "'colocated' is not an arm; write colocated:N or disaggregated:XpYd"),
        (["colocated:2", "dissagregated:1p1d"], "is not an arm"),
        (["colocated:0", "colocated:2"], "needs at least one device for each role"),
        (["colocated:2", "disaggregated:0p2d"], "needs at least one device for each role"),
        (["colocated:2", "colocated:2@prefil_first"], "policy 'prefil_first': must be 'stall_free', "),
        (["colocated:2", "colocated:2@budget=3"], "budget is not a setting"),
        (["colocated:2", "colocated:2@max_num_seqs=none"], "must be a whole number, as in 16384, 16k"),
        (["colocated:2", "colocated:2@port=80"], "port is set by the comparison"),
        (["colocated:2", "colocated:2@max_num_seqs=1,max_num_seqs=2"], "max_num_seqs is given twice"),
        (["colocated:2", "colocated:2"], "is given twice; to compare an arm with itself, use --control"),
        (["colocated:2"], "needs two arms or more"),
        (["colocated:2", "disaggregated:1p2d"], "give all arms the same number, or add --unequal"),
    ],
)
def test_an_invalid_arm_is_refused_with_one_line(arms: list[str], complaint: str):
    with pytest.raises(ConfigError) as caught:
        parse_arms(arms)
    assert str(caught.value).startswith("--arms")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_in_common_settings_name_their_flag():
    with pytest.raises(ConfigError, match=r"--set: .*runner 'bash'"):
        parse_arms(["colocated:2", "colocated:1"], ["runner=bash"])
    for setting in ("prefill_first", "foo"):
        with pytest.raises(ConfigError, match="write SETTING=VALUE"):
            parse_arms(["colocated:2", "colocated:1"], [setting])


def test_one_arm_is_compared_with_its_control():
    assert [arm.name for arm in parse_arms(["colocated:2"], has_control=True)] == ["colocated:2"]


def test_a_device_has_the_same_number_of_cores_in_every_arm():
    arms = parse_arms(["colocated:1", "disaggregated:1p1d"], unequal=True)
    assert cores_of(arms, [0, 1, 2, 3, 4]) == {"colocated:1": (0, 1), "disaggregated:1p1d": (0, 1, 2, 3)}


def test_the_command_line_of_an_arm_is_complete():
    arm = parse_arm("disaggregated:1p2d@prefill_first,enable_prefix_caching=false,enforce_eager=y")
    command = LaunchOptions("/models/m", (0, 1, 2), "fast").command(arm)
    assert command[3:5] == ["baton", "up"]
    for part in ("--mode disaggregated", "--prefill 1", "--decode 2", "--policy prefill_first", "--cpus 0,1,2"):
        assert part in " ".join(command)
    assert {"--no-enable-prefix-caching", "--enforce-eager"} <= set(command)
    assert "--emulate" in command


@pytest.mark.parametrize(
    ("arm", "devices"),
    [
        ("disaggregated:1p1d", "cuda:0,cuda:1"),
        ("colocated:1", "cuda:0"),
        ("disaggregated:2p2d", "cuda:0,cuda:1,cuda:2"),
        ("disaggregated:1p1d@kv_channel=pool", "cuda:0"),
        ("colocated:2@device=cpu", None),
        ("colocated:2@device=cuda:1", None),
        ("colocated:2@runner=hash", None),
    ],
)
def test_each_node_of_an_arm_gets_a_gpu_until_none_is_left(arm: str, devices: str | None):
    command = LaunchOptions("/models/m", gpus=3).command(parse_arm(arm))
    assert (command[command.index("--devices") + 1] if "--devices" in command else None) == devices
    assert "--devices" not in LaunchOptions("/models/m").command(parse_arm(arm))
