"""The recipes for KubeRay and SLURM, as far as they can be tried without a cluster."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.runtime_env import RuntimeEnv

from traceml_ray.launchers import arguments, torchrun
from traceml_ray.launchers.arguments import read as read_nodes
from traceml_ray.settings import Settings

RECIPES = Path(__file__).parents[2] / "launchers/recipes"
SBATCH = sorted(RECIPES.glob("*.sbatch"))

# --- KubeRay ------------------------------------------------------------------------------------------

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}


def closed(required: str, **fields: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "minLength": 1}
NAMES = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"}
METADATA = closed("name", name=NAMES)
CONTAINER = closed(
    "name image resources",
    name=NAMES,
    image=TEXT,
    ports={"type": "array", "items": closed("containerPort", containerPort=COUNT, name=NAMES)},
    resources=closed("requests limits", requests=STRINGS, limits=STRINGS),
    volumeMounts={"type": "array", "items": closed("name mountPath", name=NAMES, mountPath=TEXT)},
)
POD = closed(
    "spec",
    spec=closed(
        "containers",
        securityContext=closed("", fsGroup=COUNT),
        containers={"type": "array", "minItems": 1, "items": CONTAINER},
        volumes={
            "type": "array",
            "items": closed(
                "name",
                name=NAMES,
                configMap=closed("name", name=NAMES),
                persistentVolumeClaim=closed("claimName", claimName=NAMES),
            ),
        },
    ),
)
HEAD = closed("rayStartParams template", rayStartParams=STRINGS, template=POD)
WORKERS = closed(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=NAMES,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=STRINGS,
    template=POD,
)
CLUSTER = closed(
    "headGroupSpec",
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    authOptions=closed("", mode={"enum": ["disabled", "token"]}),
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
JOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=METADATA,
    spec=closed(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        activeDeadlineSeconds=COUNT,
        rayClusterSpec=CLUSTER,
    ),
)
"""What the recipe uses of KubeRay's fields (ray.io/v1), with what is required of them."""


@pytest.fixture
def documents() -> dict[str, Any]:
    loaded = list(yaml.safe_load_all((RECIPES / "kuberay-rayjob.yaml").read_text()))
    assert len(loaded) == 3
    return {document["kind"]: document for document in loaded}


@pytest.fixture
def job(documents: dict[str, Any]) -> Any:
    return documents["RayJob"]


@pytest.fixture
def driver(documents: dict[str, Any]) -> ast.Module:
    return ast.parse(documents["ConfigMap"]["data"]["train.py"], "train.py")


def test_rayjob_has_the_fields_that_kuberay_knows(job):
    jsonschema.validate(job, JOB)


def misspell(job: Any) -> None:
    job["spec"]["shutDownAfterJobFinishes"] = True


def unquote(job: Any) -> None:
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def no_limits(job: Any) -> None:
    del job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]


@pytest.mark.parametrize("spoil", [misspell, unquote, no_limits])
def test_rayjob_that_kuberay_would_refuse_fails_the_schema(job, spoil: Callable[[Any], None]):
    spoiled = copy.deepcopy(job)
    spoil(spoiled)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoiled, JOB)


def test_pod_references_are_all_defined(documents, job, driver):
    spec = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert volumes["app"]["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]
    claim = documents["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["sessions"]["persistentVolumeClaim"]["claimName"] == claim
    _, script = job["spec"]["entrypoint"].split()
    assert Path(script).parent == Path(mounted["app"])
    assert Path(script).name in documents["ConfigMap"]["data"]
    assert keyword(calls(driver, "traceml_ray.start")[0], "out") == mounted["sessions"]


def test_ranks_take_every_cpu_of_the_workers_and_the_monitor_none(job, driver):
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    offered = workers["replicas"] * int(container["resources"]["requests"]["cpu"])
    (scaling,) = calls(driver, "ScalingConfig")
    assert keyword(scaling, "num_workers") * keyword(scaling, "resources_per_worker")["CPU"] == offered
    assert container["image"] == cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]


def test_recipe_driver_uses_existing_imports_and_keywords(driver):
    for node in ast.walk(driver):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)
    (start,) = calls(driver, "traceml_ray.start")
    Settings.load({}, **{word.arg: ast.literal_eval(word.value) for word in start.keywords})
    order = [ast.unparse(call.func) for call in ast.walk(driver) if isinstance(call, ast.Call)]
    assert order.index("ray.init") < order.index("traceml_ray.start")


def test_runtime_environment_is_valid(job):
    text = job["spec"]["runtimeEnvYAML"]
    env = yaml.safe_load(text)
    assert RuntimeEnv(**env).to_dict() == env
    Settings.load(env["env_vars"])
    with_pip = yaml.safe_load(text.replace("# pip", "pip"))
    assert RuntimeEnv(**with_pip)["pip"]["packages"]


def calls(module: ast.Module, name: str) -> list[ast.Call]:
    all_calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    return [call for call in all_calls if ast.unparse(call.func) == name]


def keyword(call: ast.Call, name: str) -> Any:
    return next(ast.literal_eval(word.value) for word in call.keywords if word.arg == name)


# --- SLURM --------------------------------------------------------------------------------------------

STAND_IN = '''
"""srun, scontrol, ray and python of a SLURM cluster whose nodes are all this machine."""
import json, os, re, signal, subprocess, sys, time

name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]
place = os.environ["STAND_IN"]
hosts = [f"node{i + 1}" for i in range(int(os.environ["SLURM_NNODES"]))]
here = os.environ.get("SLURMD_NODENAME", hosts[0])

def note(**more):
    line = {"name": name, "argv": argv, "host": here, "env": dict(os.environ), **more}
    with open(f"{place}/notes", "a") as file:
        file.write(json.dumps(line) + chr(10))

def end(number, frame):
    note(signal=number)
    raise SystemExit(143)

def srun():
    options = []
    while argv and argv[0].startswith("--"):
        options.append(argv.pop(0))
    given = dict(option[2:].split("=", 1) for option in options)
    assert given.pop("export") == "ALL" and set(given) <= KNOWN, given
    nodes = given["nodelist"].split(",") if "nodelist" in given else hosts
    nodes = [host for host in nodes if host != given.get("exclude")]
    assert len(nodes) == int(given["nodes"]), (nodes, given)
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
    tasks = [
        subprocess.Popen(argv, env=os.environ | {"SLURMD_NODENAME": host, "SLURM_NODEID": str(i)})
        for i, host in enumerate(nodes)
    ]
    raise SystemExit(max(task.wait() for task in tasks))

KNOWN = {"nodes", "ntasks", "ntasks-per-node", "nodelist", "exclude", "kill-on-bad-exit", "wait"}
note()
if name == "srun":
    srun()
elif name == "scontrol":
    assert argv == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    print(*hosts, sep=chr(10))
elif name == "ray":
    signal.signal(signal.SIGTERM, end)
    if "RAY_FAILS" in os.environ:
        raise SystemExit(1)
    open(f"{place}/up-{here}", "w").close()
    while True:
        signal.pause()
elif argv[:2] == ["-m", "traceml_ray.launch"]:
    raise SystemExit(int(os.environ.get(f"EXIT_{here}", 0)))
else:  # python of the batch script: the script on stdin, or the driver
    os.execv(sys.executable, [sys.executable, *argv])
'''
RAY_MODULE = """
import os
from pathlib import Path

place = Path(os.environ["STAND_IN"])

def init(**_):
    if not (place / "up-node1").exists():
        raise ConnectionError(os.environ["RAY_ADDRESS"])

def nodes():
    return [{"Alive": True} for _ in place.glob("up-*")]
"""


class Slurm:
    """Runs a recipe as SLURM's first node would, and remembers who was called with what."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = folder / "bin"
        tools.mkdir()
        for name in ("srun", "scontrol", "ray", "python"):
            (tools / name).write_text(f"#!{sys.executable}\n{STAND_IN}")
            (tools / name).chmod(0o755)
        (folder / "modules").mkdir()
        (folder / "modules/ray.py").write_text(RAY_MODULE)

    def start(self, recipe: str, *argv: str, nodes: int = 3, job: int = 4711, **more: str) -> Any:
        environ = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(self.folder / "modules"),
            "HOME": str(self.folder),
            "STAND_IN": str(self.folder),
            "SLURM_JOB_ID": str(job),
            "SLURM_NNODES": str(nodes),
            "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_PER_TASK": "8",
            "SLURM_CPUS_ON_NODE": "16",
        }
        return subprocess.Popen(
            ["bash", str(RECIPES / recipe), *argv],
            cwd=self.folder,
            env=environ | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, recipe: str, *argv: str, **how: Any) -> tuple[int, str]:
        """Return the exit code and stderr."""
        process = self.start(recipe, *argv, **how)
        _, errors = process.communicate(timeout=240)
        return process.returncode, errors

    def notes(self, name: str, *, signalled: bool = False) -> list[dict[str, Any]]:
        """Return the calls of a tool, in order; with `signalled`, the signals that it was ended with."""
        path = self.folder / "notes"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["name"] == name and ("signal" in line) == signalled]

    def launches(self) -> list[dict[str, Any]]:
        launches = [note for note in self.notes("python") if note["argv"][0] == "-m"]
        return sorted(launches, key=lambda note: note["host"])

    def check_the_secret(self) -> None:
        """Everything that was started has the same token, and nobody finds it in an argument."""
        notes = [note for name in ("srun", "ray", "python") for note in self.notes(name)]
        (token,) = {note["env"]["RAY_AUTH_TOKEN"] for note in notes}
        assert len(token) == 64 and int(token, 16)
        everybody = [*notes, *self.notes("scontrol")]
        assert not any(token in argument for note in everybody for argument in note["argv"])


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


@pytest.fixture
def train(slurm: Slurm) -> str:
    """A driver that says what it was given, then exits with 3; told to end, it exits with 5."""
    (slurm.folder / "train.py").write_text(
        "import json, os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "given = {'argv': sys.argv[1:], 'env': dict(os.environ)}\n"
        "pathlib.Path('driver').write_text(json.dumps(given))\n"
        "time.sleep(float(sys.argv[1]))\n"
        "sys.exit(3)\n"
    )
    return "train.py"


@pytest.mark.parametrize("recipe", SBATCH, ids=lambda path: path.name)
def test_scripts_are_valid_bash(recipe: Path):
    done = subprocess.run(["bash", "-n", recipe], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    lines = recipe.read_text().splitlines()
    commands = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives and max(directives) < commands, "sbatch reads no directive after the first command"
    # Slurm takes the rest of a directive's line as options.
    assert not any("#" in lines[i][1:] for i in directives)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("recipe", SBATCH, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(recipe: Path):
    command = ["shellcheck", "--severity=warning", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout


def test_torchrun_recipe_starts_one_launcher_on_each_node(slurm, monkeypatch):
    (slurm.folder / "train.py").touch()
    code, errors = slurm.run("slurm-torchrun.sbatch", "train.py", "--lr", "3e-4", "--session", "its own")
    assert (code, errors) == (0, "")
    slurm.check_the_secret()
    monkeypatch.chdir(slurm.folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for rank, launch in enumerate(slurm.launches()):
        args = torchrun._parse(launch["argv"][2:])
        assert args.training_script_args == ["--lr", "3e-4", "--session", "its own"]
        assert (args.nproc_per_node, args.master_addr, args.master_port) == ("4", "node1", 21422)
        given = read_nodes(args, None)
        assert (given.count, given.rank, given.first, given.head) == (3, rank, rank == 0, "node1:21423")
        torchrun._check(args, given)
        settings = arguments.settings_of(args)
        assert (settings.session, settings.out) == ("slurm-4711-0", str(slurm.folder / "traceml-sessions"))
    assert all(launch["env"]["SRUN_CPUS_PER_TASK"] == "8" for launch in slurm.launches())


def test_torchrun_exit_code_is_the_worst_of_the_nodes(slurm):
    code, _ = slurm.run("slurm-torchrun.sbatch", "train.py", EXIT_node2="3")
    assert code == 3


@pytest.mark.parametrize("job", [0, 3999, 4000, 2**31])
def test_ports_stay_clear_of_ray_and_of_outgoing_connections(slurm, job):
    slurm.run("slurm-torchrun.sbatch", "train.py", job=job, nodes=1)
    (launch,) = slurm.launches()
    args = torchrun._parse(launch["argv"][2:])
    assert 20_000 <= args.master_port < int(args.traceml_port) < 32_768


def test_requeued_job_is_a_new_session(slurm):
    slurm.run("slurm-torchrun.sbatch", "train.py", nodes=1, SLURM_RESTART_COUNT="2", TRACEML_OUT="/shared")
    (launch,) = slurm.launches()
    args = torchrun._parse(launch["argv"][2:])
    assert (args.setting_session, args.setting_out) == ("slurm-4711-2", "/shared")


def test_ray_head_is_on_the_first_node_and_workers_on_the_others(slurm, train):
    code, errors = slurm.run("slurm-ray-train.sbatch", train, "0", "--lr", "3e-4")
    assert code == 3, errors
    slurm.check_the_secret()
    head, *workers = slurm.notes("ray")
    assert head["host"] == "node1"
    assert sorted(worker["host"] for worker in workers) == ["node2", "node3"]
    assert {"--head", "--block", "--port=21422", "--num-cpus=8", "--num-gpus=4"} < set(head["argv"])
    for worker in workers:
        assert {"--address=node1:21422", "--block", "--num-cpus=8", "--num-gpus=4"} < set(worker["argv"])
        assert "--head" not in worker["argv"]
    assert {note["env"]["RAY_AUTH_MODE"] for note in (head, *workers)} == {"token"}
    given = json.loads((slurm.folder / "driver").read_text())
    assert given["argv"] == ["0", "--lr", "3e-4"]
    assert given["env"]["RAY_ADDRESS"] == "node1:21422"
    settings = Settings.load(given["env"])
    assert (settings.session, settings.out) == ("slurm-4711-0", str(slurm.folder / "traceml-sessions"))


def test_ray_teardown_ends_what_the_script_started_and_nothing_else(slurm, train, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    bystander = subprocess.Popen(
        [slurm.folder / "bin/ray", "start", "--head", "--block"],
        env=os.environ | {"STAND_IN": str(other), "SLURM_NNODES": "1"},
    )
    try:
        assert slurm.run("slurm-ray-train.sbatch", train, "0")[0] == 3
        ended = slurm.notes("ray", signalled=True)
        assert {note["signal"] for note in ended} == {signal.SIGTERM}
        order = [note["host"] for note in ended]
        assert (sorted(order[:2]), order[2]) == (["node2", "node3"], "node1"), "the head is not the last"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_ray_script_on_sigterm_ends_the_driver_first(slurm, train):
    process = slurm.start("slurm-ray-train.sbatch", train, "50", nodes=2)
    wait_for(slurm.folder / "driver")
    process.terminate()
    assert process.wait(timeout=240) == 5
    assert len(slurm.notes("ray", signalled=True)) == 2


def test_ray_script_keeps_the_exit_code_of_a_driver_that_ended_early(slurm, train):
    """A signal ends bash's `wait` with a code of its own; the driver may have ended by then."""
    quick = 'kill() { builtin kill "$@"; [[ $1 == -TERM ]] && sleep 1; }; export -f kill'
    (slurm.folder / "env").write_text(quick)
    process = slurm.start("slurm-ray-train.sbatch", train, "50", nodes=1, BASH_ENV=str(slurm.folder / "env"))
    wait_for(slurm.folder / "driver")
    process.terminate()
    assert process.wait(timeout=240) == 5


def test_ray_script_on_sigterm_while_starting_leaves_nothing(slurm, train):
    process = slurm.start("slurm-ray-train.sbatch", train, "50", nodes=2)
    wait_for(slurm.folder / "up-node1")
    process.terminate()
    assert process.wait(timeout=240) == 143
    assert len(slurm.notes("ray", signalled=True)) == len(slurm.notes("ray"))
    assert not (slurm.folder / "driver").exists()


def test_ray_that_does_not_come_up_ends_the_job(slurm, train):
    code, errors = slurm.run("slurm-ray-train.sbatch", train, "0", RAY_FAILS="1")
    assert code == 1
    assert "Ray did not come up on 1 of 3 nodes" in errors
    assert not (slurm.folder / "driver").exists()


def test_ray_on_one_node_has_no_workers(slurm, train):
    assert slurm.run("slurm-ray-train.sbatch", train, "0", nodes=1)[0] == 3
    assert len(slurm.notes("ray")) == len(slurm.notes("srun")) == 1


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
