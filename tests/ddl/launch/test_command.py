import subprocess
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ddl.launch import command, door
from ddl.launch.command import Launch, build
from ddl.launch.decide import Found, Job
from ddl.launch.errors import UsageError
from ddl.launch.hosts import Allocation, Host
from ddl.launch.machine import Machine, Nic
from ddl.launch.mpi import Mpi
from ddl.launch.network import Network
from ddl.launch.options import Export
from ddl.launch.rankfile import place

FOLDER = Path("/log")
NETWORK = Network(("10.0.0.0/24",), ("eth0",), (), "")

Builder = Callable[..., Launch]


@pytest.fixture
def built(mpis: Mapping[str, Mpi], machine: Callable[..., Machine]) -> Builder:
    """The command line of two hosts with two ranks each, for one kind of mpirun, with changes."""

    def build_one(kind: str, order: str = "ranks", **changes: object) -> Launch:
        machines = {"a": machine("a", number=1), "b": machine("b", number=2)}
        found = Found(
            mpi=mpis[kind],
            allocation=Allocation((Host("a"), Host("b")), "-H"),
            machines=machines,
            addresses={},
            environ={},
            program=("python", "train.py"),
        )
        of_found = {field.name for field in fields(Found)}
        job = Job(
            replace(found, **{name: value for name, value in changes.items() if name in of_found}),  # type: ignore[arg-type]
            places=place(["a", "b"], [2, 2], machines, order=order),
            network=NETWORK,
            exports=(Export("PATH"), Export("DDL_OPTIONS", "-mode p:2x2x1x1")),
        )
        return build(replace(job, **{name: value for name, value in changes.items() if name not in of_found}), FOLDER)  # type: ignore[arg-type]

    return build_one


def words(launch: Launch) -> str:
    """The line up to the wrapper around the program, which has its own tests."""
    line = " ".join(launch.argv)
    assert line.endswith("exit $_s ddlrun python train.py")
    return line.partition(" /bin/sh -c ")[0]


def test_open_mpi_5(built: Builder) -> None:
    launch = built("openmpi5")
    assert words(launch) == (
        "/mpi/bin/mpirun --hostfile /log/hostfile -np 4 --map-by rankfile:file=/log/rankfile:oversubscribe"
        " --bind-to :overload-allowed --prtemca prte_if_include 10.0.0.0/24 --mca btl_tcp_if_include 10.0.0.0/24"
        " --mca pml ob1 --mca btl self,sm,tcp -x PATH -x DDL_OPTIONS=-mode p:2x2x1x1"
    )
    assert launch.files == {
        "rankfile": "rank 0=a slot=0:*\nrank 1=a slot=1:*\nrank 2=b slot=0:*\nrank 3=b slot=1:*\n",
        "hostfile": "a slots=2\nb slots=2\n",
    }
    assert launch.environment == {}


def test_open_mpi_4(built: Builder) -> None:
    assert words(built("openmpi4")) == (
        "/mpi/bin/mpirun --hostfile /log/hostfile -np 4 --rankfile /log/rankfile"
        " --mca oob_tcp_if_include 10.0.0.0/24 --mca btl_tcp_if_include 10.0.0.0/24"
        " --mca pml ob1 --mca btl self,vader,tcp -x PATH -x DDL_OPTIONS=-mode p:2x2x1x1"
    )


def test_hydra(built: Builder) -> None:
    launch = built("hydra")
    assert words(launch) == (
        "/mpi/bin/mpirun -f /log/hostfile -n 4 -bind-to user:0+1+2+3,4+5+6+7 -iface eth0"
        " -genv DDL_OPTIONS -mode p:2x2x1x1"
    )
    assert launch.files["hostfile"] == "a:2\nb:2\n"


def test_hydra_maps_ranks_that_go_round_the_hosts(built: Builder) -> None:
    assert " -rankmap 0,1,0,1 " in words(built("hydra", order="hosts"))


def test_hydra_is_told_no_interface_that_another_host_calls_otherwise(
    built: Builder, machine: Callable[..., Machine]
) -> None:
    other = machine("b", number=2)
    other = replace(other, nics=tuple(replace(nic, name=f"x{nic.name}") for nic in other.nics))
    assert "-iface" not in words(built("hydra", machines={"a": machine("a"), "b": other}))


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("openmpi5", {"yield_when_idle": True}, " --mca mpi_yield_when_idle 1 "),
        ("openmpi4", {"yield_when_idle": True}, " --mca mpi_yield_when_idle 1 "),
        ("openmpi5", {"rank_prefix": True}, " --output rank "),
        ("openmpi4", {"rank_prefix": True}, " --tag-output "),
        ("hydra", {"rank_prefix": True}, " -prepend-rank "),
        ("openmpi5", {"bind": False}, " --bind-to none "),
        ("openmpi4", {"bind": False}, " --bind-to none "),
    ],
)
def test_each_mpirun_says_it_in_its_own_way(
    built: Builder, kind: str, changes: dict[str, object], expected: str
) -> None:
    assert expected not in words(built(kind)) + " "
    assert expected in words(built(kind, **changes)) + " "


KEEPER = Path("/ddl/libddl_doorkeeper.so")


@pytest.mark.parametrize(("kind", "transports"), [("openmpi5", "self,sm"), ("openmpi4", "self,vader"), ("hydra", "")])
def test_on_one_host_mpi_listens_to_no_other(
    built: Builder, machine: Callable[..., Machine], kind: str, transports: str
) -> None:
    alone = {
        "network": Network((), (), (), "", "127.0.0.1"),
        "places": place(["a"], [2], {"a": machine("a")}),
        "fabric": True,  # which nobody needs here
        "here": frozenset({"a"}),
        "doorkeeper": KEEPER,
    }
    launch = built(kind, **alone)
    assert launch.environment["LD_PRELOAD"] == str(KEEPER)
    assert launch.environment["DDL_DOOR"] == "127.0.0.0/8,::1/128"
    if transports:
        assert f" --mca pml ob1 --mca btl {transports} " in words(launch)
    else:
        assert launch.environment["UCX_NET_DEVICES"] == "lo"
    theirs = built(kind, **alone, environ={"LD_PRELOAD": "/theirs.so"})
    assert theirs.environment["LD_PRELOAD"] == f"/theirs.so:{KEEPER}"  # AddressSanitizer must come first


@pytest.mark.parametrize(("theirs", "found"), [("", "unset"), ("/theirs.so", "/theirs.so")])
def test_on_one_host_ranks_find_what_the_user_has_preloaded_and_no_more(theirs: str, found: str) -> None:
    loaded = door.variables(KEEPER, door.LOOPBACK, {"LD_PRELOAD": theirs} if theirs else {})
    script = door.removal(KEEPER) + 'echo "${LD_PRELOAD-unset} ${DDL_DOOR-unset}"'
    # A shell that is started with them would try to load them.
    setting = "; ".join(f"export {name}={value}" for name, value in loaded.items())
    done = subprocess.run(
        ["/bin/sh", "-c", f"{setting}; {script}"], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout == f"{found} unset\n"


def test_on_several_hosts_mpi_listens_in_their_networks(built: Builder) -> None:
    launch = built("openmpi5", doorkeeper=KEEPER)
    assert launch.environment == {"LD_PRELOAD": str(KEEPER), "DDL_DOOR": "10.0.0.0/24"}
    assert f" --prtemca prte_launch_agent env LD_PRELOAD={KEEPER} DDL_DOOR=10.0.0.0/24 prted" in words(launch)
    assert words(launch).endswith(" -x LD_PRELOAD -x DDL_DOOR")
    assert "orte_launch_agent" in words(built("openmpi4", doorkeeper=KEEPER))
    own = (Export("LD_PRELOAD", "/theirs.so"),)
    assert words(built("openmpi5", doorkeeper=KEEPER, exports=own)).endswith("-x LD_PRELOAD=/theirs.so -x DDL_DOOR")


def test_where_the_networks_are_not_known_nothing_is_kept_off(built: Builder) -> None:
    launch = built("openmpi5", doorkeeper=KEEPER, network=Network((), (), (), ""))
    assert launch.environment == {}


def test_the_user_s_own_arguments_come_last(built: Builder) -> None:
    line = words(built("openmpi5", more=("--display", "map", "--mca", "btl", "self,sm")))
    assert line.endswith(" --display map --mca btl self,sm")
    assert line.count(" btl ") == 1  # 5 refuses a line on which a parameter stands twice
    assert " --mca pml ob1 " in line


@pytest.mark.parametrize(("mpi", "option"), [("openmpi5", "--prtemca"), ("openmpi4", "--mca")])
@pytest.mark.parametrize("other", ["10.9.0.0/24", "ib0"])
def test_a_network_of_the_user_s_choice_is_let_in(
    built: Builder, machine: Callable[..., Machine], mpi: str, option: str, other: str
) -> None:
    host = replace(machine("a", number=1), nics=(Nic("ib0", "10.9.0.7", 24, True, ""),))
    daemons = "prte_if_include" if mpi == "openmpi5" else "oob_tcp_if_include"
    for more in (("--mca", "btl_tcp_if_include", other), (option, daemons, other)):
        launch = built(mpi, doorkeeper=KEEPER, more=more, machines={"a": host})
        line = words(launch)
        assert line.count(f"{more[1]} ") == 1
        assert f"{option} {more[1]} 10.0.0.0/24" not in line
        assert " DDL_DOOR=10.0.0.0/24,10.9.0.0/24 " in line
        assert launch.environment["DDL_DOOR"] == "10.0.0.0/24,10.9.0.0/24"


def test_a_fabric_leaves_mpi_its_choice(built: Builder) -> None:
    assert "pml" not in words(built("openmpi5", fabric=True))


def test_without_a_network_mpi_chooses_interfaces(built: Builder) -> None:
    line = words(built("openmpi5", network=Network((), (), (), "")))
    assert "if_include" not in line


def test_ranks_on_hosts_that_nothing_is_known_of_are_not_bound(built: Builder) -> None:
    places = place(["a", "b"], [1, 1], {})
    assert " --bind-to none" in words(built("openmpi5", places=places))
    assert "-bind-to" not in words(built("hydra", places=places))


def test_root_gets_the_rights_that_open_mpi_wants(built: Builder) -> None:
    rights = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert built("openmpi5", root=True).environment == rights
    assert built("openmpi4", root=True).environment == rights
    assert built("hydra", root=True).environment == {}


@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        ("openmpi5", "PRTE_MCA_plm_ssh_agent"),
        ("openmpi4", "OMPI_MCA_plm_rsh_agent"),
        ("hydra", "HYDRA_LAUNCHER_EXEC"),
    ],
)
def test_a_launch_agent_is_given_under_the_name_that_each_mpirun_reads(
    built: Builder, kind: str, variable: str
) -> None:
    assert built(kind, agent=command.agent({"OMPI_MCA_plm_rsh_agent": "/agent"})).environment == {variable: "/agent"}
    assert command.agent({}) == ""


def test_the_command_can_be_copied_into_a_shell(built: Builder) -> None:
    assert "-x 'DDL_OPTIONS=-mode p:2x2x1x1'" in str(built("openmpi5"))


@pytest.mark.parametrize(("mpi", "name"), [("openmpi5", "prte_launch_agent"), ("openmpi4", "orte_launch_agent")])
def test_the_agent_that_loads_the_port_filter_cannot_be_replaced(built: Builder, mpi: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"ddlrun sets {name} itself"):
        built(mpi, doorkeeper=KEEPER, more=("--prtemca" if mpi == "openmpi5" else "--mca", name, "mine"))


def let_in(built: Builder, parameter: str, value: str, *nics: Nic) -> str:
    """The networks that ports are open to, if the user gives a parameter."""
    host = Machine("a", (), nics=nics)
    launch = built("openmpi5", doorkeeper=KEEPER, more=("--mca", parameter, value), machines={"a": host})
    return launch.environment["DDL_DOOR"]


@pytest.mark.parametrize(
    ("value", "opened"),
    [
        ("10.9/16", "10.9.0.0/16"),
        ("10.9.1.7/255.255.0.0", "10.9.0.0/16"),
        ("10.9", "10.9.0.0/16"),
        ("fd00::7/64", "fd00::/64"),
    ],
)
def test_a_network_is_let_in_however_open_mpi_lets_it_be_written(built: Builder, value: str, opened: str) -> None:
    assert let_in(built, "btl_tcp_if_include", value) == f"10.0.0.0/24,{opened}"


def test_a_network_that_cannot_be_read_is_named(built: Builder) -> None:
    with pytest.raises(
        UsageError, match=r"--mpiarg: btl_tcp_if_include: '10.9/x' is not a network; expected interfaces"
    ):
        let_in(built, "btl_tcp_if_include", "10.9/x")


LO = Nic("lo", "127.0.0.1", 8, False, "loopback")
DOCKER = Nic("docker0", "172.17.0.1", 16, False, "a bridge without a network card, for this host's own containers")
OTHER = Nic("eth1", "10.1.0.1", 24, True, "it is up")


@pytest.mark.parametrize(
    ("parameter", "value", "words"),
    [
        ("btl_tcp_if_include", "lo,eth1", "the loopback leads to no other host; leave it out"),
        ("prte_if_include", "127.0/8", "the loopback leads to no other host; leave it out"),
        ("btl_tcp_if_exclude", "docker0", "it takes the place of Open MPI's own list, and the loopback leads to no "),
    ],
)
def test_nobody_is_looked_for_on_the_loopback(built: Builder, parameter: str, value: str, words: str) -> None:
    # Open MPI would find itself there, and the job would hang.
    with pytest.raises(UsageError, match=f"--mpiarg: {parameter}: {words}"):
        let_in(built, parameter, value, LO, OTHER)


@pytest.mark.parametrize("excluded", ["lo,ib0", "127.0.0.0/8,10.2/16", "lo,10.2.0.0/15"])
def test_what_is_excluded_leaves_every_other_network_that_leads_to_hosts(built: Builder, excluded: str) -> None:
    nics = (LO, DOCKER, OTHER, Nic("ib0", "10.2.0.1", 16, True, "it is up"))
    assert let_in(built, "btl_tcp_if_exclude", excluded, *nics) == "10.0.0.0/24,10.1.0.0/24"


@pytest.mark.parametrize(("kind", "daemons"), [("openmpi5", "prte"), ("openmpi4", "oob_tcp")])
def test_nothing_is_included_beside_what_the_user_excludes(built: Builder, kind: str, daemons: str) -> None:
    line = words(built(kind, more=("--mca", "btl_tcp_if_exclude", "ib0", "--mca", f"{daemons}_if_exclude", "ib0")))
    assert "_if_include" not in line  # Open MPI ends with an error if it has both


def test_more_networks_than_the_port_filter_reads_are_joined_to_wider_ones(built: Builder) -> None:
    networks = [f"10.{at}.0.0/24" for at in range(14)] + ["10.20.0.0/24", "10.20.1.0/24", "fd00::/64"]
    opened = let_in(built, "btl_tcp_if_include", ",".join(networks)).split(",")
    assert len(opened) == door.MOST == 16
    assert "10.20.0.0/23" in opened
    assert {"fd00::/64", "10.13.0.0/24"} < set(opened)
