"""The files of examples/clusters: scripts run with two launchers on this machine, and manifests fit their APIs.

Slurm's commands are replaced by small programs that run the tasks of both nodes here.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pytest
import train_gpt
import yaml
from torch.distributed.run import get_args_parser

from tests.support.loops import launched
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
TINY = ["--model", "tiny", "--seq-len", "16", "--validation-windows", "16", "--device", "cpu", "--no-sample"]
SECONDS = 240  # for a launch and some steps, on a busy machine


def _program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment for scripts of examples/clusters, with two ranks per machine and a free port."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    _program(bin_folder, "torchrun", f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    mine = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **mine, "RANKS": "2", "PORT": str(port), "PET_LOCAL_ADDR": "127.0.0.1"}


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[str]:
    with log.open("a") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, text=True)


def _end(processes: list[subprocess.Popen[str]], *logs: Path) -> list[int]:
    """Return the exit codes. A process that does not end in time is killed."""
    try:
        return [process.wait(SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise AssertionError("\n".join(log.read_text() for log in logs)) from None


def _wait_for(folder: Path, process: subprocess.Popen[str], log: Path) -> None:
    """Wait for the first checkpoint in a folder."""
    deadline = time.monotonic() + SECONDS
    while not list(folder.glob("step-*")):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _saved(folder: Path) -> dict[str, bytes]:
    """Return the contents of a checkpoint's files; the manifest has a random token."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def _topology(folder: Path) -> dict[str, int]:
    return json.loads((folder / "contents.json").read_text())["topology"]


def _train(rank: int, arguments: list[str]) -> str:
    printed = io.StringIO()
    with launched(), redirect_stdout(printed), redirect_stderr(io.StringIO()):
        train_gpt.main(arguments)
    return printed.getvalue()


def _train_on_one_machine(steps: int, folder: Path) -> str:
    """Train on four ranks of the tests, as on one machine; return what rank 0 prints."""
    arguments = [*TINY, "--zero3-size", "2", "--steps", str(steps), "--checkpoints", str(folder)]
    return run_ranks(_train, arguments, world_size=4, shared_memory=None)[0]


def _machines(arguments: list[str], environment: dict[str, str], folder: Path) -> list[subprocess.Popen[str]]:
    """Start torchrun.sh twice, as on two machines; the first one serves the rendezvous."""
    script = ["bash", str(CLUSTERS / "torchrun.sh"), "localhost", *arguments]
    machines = [_start(script, environment, folder / "0.log")]
    while True:
        try:
            socket.create_connection(("localhost", int(environment["PORT"])), timeout=1).close()
            break
        except OSError:
            assert machines[0].poll() is None, (folder / "0.log").read_text()
            time.sleep(0.1)
    return [*machines, _start(script, environment, folder / "1.log")]


def test_two_machines_train_like_one(tmp_path: Path, environment: dict[str, str]) -> None:
    arguments = [*TINY, "--steps", "4", "--checkpoints", str(tmp_path / "two")]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    assert _end(_machines(arguments, environment, tmp_path), *logs) == [0, 0], [log.read_text() for log in logs]
    printed = _train_on_one_machine(4, tmp_path / "one")
    last = "step-000004"
    assert _topology(tmp_path / "two" / last) == {"data_parallel": 4, "zero3_size": 2}
    assert _saved(tmp_path / "two" / last) == _saved(tmp_path / "one" / last)
    losses = re.compile(r"validation loss [\d.]+ -> [\d.]+")
    (loss,) = losses.findall(printed)
    assert [losses.findall(log.read_text()) for log in logs].count([loss]) == 1, "rank 0 prints it"


@pytest.mark.exhaustive
def test_training_goes_on_without_a_machine_that_leaves(tmp_path: Path, environment: dict[str, str]) -> None:
    runs = tmp_path / "runs"
    arguments = [*TINY, "--steps", "300", "--save-every", "100", "--checkpoints", str(runs)]
    elastic = {**environment, "NODES": "1:2", "PET_RDZV_CONF": "last_call_timeout=3"}
    first, second = _machines(arguments, elastic, tmp_path)
    log = tmp_path / "0.log"
    _wait_for(runs, first, log)
    assert _topology(next(runs.glob("step-*"))) == {"data_parallel": 4, "zero3_size": 2}
    second.send_signal(signal.SIGTERM)
    codes = _end([first, second], log, tmp_path / "1.log")
    assert codes == [0, 1], log.read_text()
    (resumed,) = re.findall(r"resumed from step (\d+)", log.read_text())
    assert 100 <= int(resumed) < 300 and int(resumed) % 100, "the ranks saved when the signal arrived"
    assert _topology(runs / "step-000300") == {"data_parallel": 2, "zero3_size": 2}


SRUN = f"""#!{sys.executable}
import signal, subprocess, sys
command = sys.argv[sys.argv.index("torchrun"):]
tasks = [subprocess.Popen(command) for _ in range(2)]
signal.signal(signal.SIGUSR1, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max([task.wait() for task in tasks]))
"""
SCONTROL = """#!/bin/bash
case "$*" in
"show hostnames $SLURM_JOB_NODELIST") printf '%s\\n' localhost localhost ;;
"show job $SLURM_JOB_ID") echo "JobId=$SLURM_JOB_ID PreemptTime=$PREEMPTED" ;;
"requeue $SLURM_JOB_ID") touch "$REQUEUED" ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def job(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a Slurm job on two nodes with two GPUs each."""
    _program(tmp_path / "bin", "srun", SRUN)
    _program(tmp_path / "bin", "scontrol", SCONTROL)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "gpt", "SLURM_JOB_NODELIST": "node[1-2]"}
    slurm |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "8"}
    return {**environment, **slurm, "PREEMPTED": "None", "REQUEUED": str(tmp_path / "requeued")}


BATCH = CLUSTERS / "slurm.sbatch"


@pytest.mark.exhaustive
def test_a_job_saves_before_its_time_limit_and_continues_in_the_queue(tmp_path: Path, job: dict[str, str]) -> None:
    runs, requeued, log = tmp_path / "runs", tmp_path / "requeued", tmp_path / "job.log"
    arguments = [*TINY, "--steps", "150", "--save-every", "50", "--checkpoints", str(runs)]
    command = ["bash", str(BATCH), *arguments]
    script = _start(command, job, log)
    _wait_for(runs, script, log)
    script.send_signal(signal.SIGUSR1)
    assert _end([script], log) == [1], log.read_text()
    assert requeued.exists(), log.read_text()
    requeued.unlink()
    assert "resumed from" not in log.read_text()

    again = _start(command, {**job, "SLURM_RESTART_COUNT": "1"}, log)
    assert _end([again], log) == [0], log.read_text()
    (resumed,) = re.findall(r"resumed from step (\d+)", log.read_text())
    assert 50 <= int(resumed) < 150 and int(resumed) % 50, "the ranks saved when the signal arrived"
    assert not requeued.exists()
    _train_on_one_machine(150, tmp_path / "one")
    assert _saved(runs / "step-000150") == _saved(tmp_path / "one" / "step-000150")


@pytest.mark.parametrize(("preempted", "requeued"), [("None", False), ("2026-11-26T04:41:32", True)])
def test_a_job_whose_ranks_fail_is_requeued_only_after_a_preemption(
    tmp_path: Path, job: dict[str, str], preempted: str, requeued: bool
) -> None:
    _program(tmp_path / "bin", "torchrun", "#!/bin/bash\nexit 3\n")
    log = tmp_path / "job.log"
    assert _end([_start(["bash", str(BATCH)], {**job, "PREEMPTED": preempted}, log)], log) == [3], log.read_text()
    assert (tmp_path / "requeued").exists() == requeued


# Long options of sbatch 22.05, from its manual page.
SBATCH = """account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
    contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
    distribution error exclude exclusive export export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep
    licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue
    nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output
    overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot requeue
    reservation signal sockets-per-node spread-job switches test-only thread-spec threads-per-core time time-min tmp uid
    use-min-nodes verbose wait wait-all-nodes wckey wrap"""


def test_options_of_the_batch_script_are_sbatchs() -> None:
    text = BATCH.read_text()
    head, body = text.split("\nset -euo pipefail\n")
    lines = re.findall(r"^#SBATCH (.*)$", head, re.MULTILINE)
    assert text.count("#SBATCH") == len(lines) > 5
    options = dict(re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", line).groups() for line in lines)
    assert set(options) - set(SBATCH.split()) == set()
    flags = {name for name, value in options.items() if value is None}
    assert flags == {"exclusive", "requeue"}
    assert options["open-mode"] == "append" and re.fullmatch(r"\d\d:\d\d:\d\d", options["time"])
    (seconds,) = re.fullmatch(r"B:USR1@(\d+)", options["signal"]).groups()
    assert int(seconds) > int(re.findall(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", body)[0])


@pytest.mark.parametrize("path", [*CLUSTERS.glob("*.sh"), BATCH], ids=lambda path: path.name)
def test_scripts_have_no_syntax_errors(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


# Fields of the manifests and the types of their values, after the schemas of JobSet v1alpha2, PyTorchJob v1, the pods
# in both, and SkyPilot's tasks.
POD = """
    containers[].args[]:str containers[].command[]:str containers[].env[].name:str containers[].env[].value:str
    containers[].image:str containers[].name:str containers[].resources.limits.nvidia.com/gpu:int
    containers[].securityContext.capabilities.add[]:str containers[].volumeMounts[].mountPath:str
    containers[].volumeMounts[].name:str containers[].workingDir:str terminationGracePeriodSeconds:int
    volumes[].emptyDir.medium:str volumes[].emptyDir.sizeLimit:str volumes[].name:str
    volumes[].persistentVolumeClaim.claimName:str
"""
JOB_POD = "spec.replicatedJobs[].template.spec.template.spec"
FIELDS = {  # place of the pod in a manifest, and the other fields
    "jobset.yaml": (
        JOB_POD,
        f"""
        apiVersion:str kind:str metadata.name:str spec.failurePolicy.maxRestarts:int
        spec.network.enableDNSHostnames:bool spec.network.publishNotReadyAddresses:bool
        spec.replicatedJobs[].name:str spec.replicatedJobs[].replicas:int
        spec.replicatedJobs[].template.spec.backoffLimit:int spec.replicatedJobs[].template.spec.completionMode:str
        spec.replicatedJobs[].template.spec.completions:int spec.replicatedJobs[].template.spec.parallelism:int
        {JOB_POD}.containers[].ports[].containerPort:int {JOB_POD}.restartPolicy:str
        """,
    ),
    "pytorchjob.yaml": (
        "spec.pytorchReplicaSpecs.Worker.template.spec",
        """
        apiVersion:str kind:str metadata.name:str spec.elasticPolicy.maxReplicas:int spec.elasticPolicy.maxRestarts:int
        spec.elasticPolicy.minReplicas:int spec.elasticPolicy.rdzvBackend:str spec.elasticPolicy.rdzvId:str
        spec.nprocPerNode:str spec.pytorchReplicaSpecs.Worker.replicas:int
        spec.pytorchReplicaSpecs.Worker.restartPolicy:str
        """,
    ),
    "skypilot.yaml": (
        "",
        """
        envs.NFS:NoneType name:str num_nodes:int resources.accelerators:str resources.infra:str
        resources.job_recovery.max_restarts_on_errors:int resources.job_recovery.strategy:str resources.use_spot:bool
        run:str setup:str workdir:str
        """,
    ),
}


def fields_of(value: Any, place: str = "") -> set[str]:
    """Return the fields of a manifest by their place, with the types of their values."""
    if isinstance(value, list):
        return {field for each in value for field in fields_of(each, f"{place}[]")}
    if isinstance(value, dict):
        return {field for name, each in value.items() for field in fields_of(each, f"{place}.{name}")}
    return {f"{place.removeprefix('.')}:{type(value).__name__}"}


def _manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTERS / name).read_text())


def test_fields_of_manifests_are_those_of_their_apis() -> None:
    assert {path.name for path in CLUSTERS.glob("*.yaml")} == set(FIELDS)
    for name, (pod, others) in FIELDS.items():
        expected = {*others.split(), *(f"{pod}.{field}" for field in POD.split() if pod)}
        assert fields_of(_manifest(name)) == expected, name


def _pod(name: str) -> dict[str, Any]:
    spec = _manifest(name)["spec"]
    if name == "jobset.yaml":
        return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_pods_run_train_gpt_and_have_time_to_save(name: str) -> None:
    pod = _pod(name)
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    launch = get_args_parser().parse_args(container["args"])
    assert (ROOT / launch.training_script).is_file()
    trained = train_gpt.parse_args(launch.training_script_args)
    assert trained.stop_on == ["SIGTERM"] and trained.zero3_size == container["resources"]["limits"]["nvidia.com/gpu"]

    environment = {each["name"]: each["value"] for each in container["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounted["/" + Path(trained.checkpoints).parts[1]]


def test_the_rendezvous_of_the_jobset_is_its_first_pod() -> None:
    manifest = _manifest("jobset.yaml")
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    launch = get_args_parser().parse_args(_pod("jobset.yaml")["containers"][0]["args"])
    name = manifest["metadata"]["name"]
    assert launch.rdzv_endpoint.split(":")[0] == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(launch.nnodes) == job["parallelism"] == job["completions"]


def test_the_elastic_pytorchjob_is_one_that_the_operator_accepts() -> None:
    spec = _manifest("pytorchjob.yaml")["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert worker["template"]["spec"]["containers"][0]["name"] == "pytorch"
    elastic = spec["elasticPolicy"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    environment = {each["name"]: each["value"] for each in worker["template"]["spec"]["containers"][0]["env"]}
    assert elastic["maxRestarts"] == 0 or environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")


def test_the_page_names_every_file_and_its_commands_have_existing_options() -> None:
    assert {path.name for path in CLUSTERS.iterdir() if path.is_file()} == set(
        re.findall(r"\(\.\./examples/clusters/([\w.]+)\)", PAGE)
    )
    commands = [shlex.split(line) for line in re.findall(r"^(?:bash|sbatch) examples/clusters/.*", PAGE, re.MULTILINE)]
    assert [command[:2] for command in commands] == [
        ["bash", "examples/clusters/torchrun.sh"],
        ["sbatch", "examples/clusters/slurm.sbatch"],
    ]
    for command in commands:
        train_gpt.parse_args(command[2:] if command[0] == "sbatch" else command[3:])


def test_spot_machines_run_torchrun_with_skypilots_variables(tmp_path: Path) -> None:
    task = _manifest("skypilot.yaml")
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-17"}
    given |= {"SKYPILOT_NODE_IPS": "10.0.0.3\n10.0.0.4\n"}
    _program(tmp_path, "torchrun", '#!/bin/bash\nprintf "%q " "$@"\n')
    environment = {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", "-euc", task["run"]], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    launch = get_args_parser().parse_args(shlex.split(ran.stdout))
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_endpoint) == ("2", "8", "10.0.0.3:29500")
    trained = train_gpt.parse_args(launch.training_script_args)
    assert (trained.zero3_size, trained.checkpoints) == (8, "/runs/sky-17")
    assert "/runs" in task["setup"]
