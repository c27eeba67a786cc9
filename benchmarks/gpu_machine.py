"""The sections of `gpu.py` about the machine: NVML, driver memory, which device is whose, demo, Ray Train."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_env import Real, figure, unseen

from traceml_ray.signals.nodes.sampler import MIG, NodeSampler
from traceml_ray.wire.messages import NOT_MEASURED

ROOT = Path(__file__).parents[1]
LOAD_S = 12
GIB = 1 << 30
WRONG_UUID = "GPU-00000000-0000-0000-0000-000000000000"


def _missing(sampler: NodeSampler) -> str:
    missing = [name.removeprefix(NOT_MEASURED) for name in sampler.errors if name.startswith(NOT_MEASURED)]
    return "; ".join(missing) or "nothing"


def launched(*arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """
    Run Python with these arguments in the root of the repository. RuntimeError unless the exit code is
    `code`.
    """
    ran = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRACEML_DEVICE_CLOCK": "1", **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != code:
        raise RuntimeError(f"exit code {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-300:]}")
    return ran


def nvml(env: Any) -> None:
    """What the node's sampler reports about the device while the device works."""
    sampler = NodeSampler()
    for _ in range(20):
        env.kernel(50)
    sampler.sample(0)
    gpus = sampler.sample(1_000_000_000).gpus or []
    env.sync()
    if not gpus:
        unseen("devices", f"NVML shows none: {dict(sampler.errors)}")
        return
    lacks = _missing(sampler)
    fields = ("util_pct", "mem_used_bytes", "power_w", "power_limit_w", "temperature_c", "sm_mhz", "throttle")
    for name in ("name", *fields):
        value = getattr(gpus[0], name)
        if value is None:
            unseen(name, f"without: {lacks}")
        else:
            figure(name, str(value), "known")
    failed = {name: n for name, n in sampler.errors.items() if "nvml" in name and NOT_MEASURED not in name}
    figure("calls that failed", str(failed or "none"), "none", not failed)
    figure("not measured here", lacks)


def mig(env: Any) -> None:
    """Whether the device is partitioned by MIG, and whether the sampler reports that."""
    del env
    import pynvml

    sampler = NodeSampler()
    gpus = sampler.sample(0).gpus or []
    if not gpus:
        unseen("MIG", "NVML shows no device")
        return
    try:
        on = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(gpus[0].index))[0]
        what = "on" if on else "off"
    except pynvml.NVMLError as error:
        on, what = 0, f"this card has none ({error})"
    is_mig = (gpus[0].name or "").endswith("(MIG)") and NOT_MEASURED + MIG in sampler.errors
    figure("MIG", what)
    figure("the sampler says it is on", str(is_mig), str(bool(on)), is_mig == bool(on))


def driver(env: Any) -> None:
    """Device memory of this process according to the driver: more than its tensors, found by pid."""
    held = env.hold(GIB)
    sampler = NodeSampler()
    gpus = sampler.sample(0).gpus or []
    processes = [p for gpu in gpus for p in gpu.processes or () if p.pid == os.getpid()]
    del held
    if not processes or processes[0].mem_bytes is None:
        unseen("driver memory of this process", f"its pid is not shown; without: {_missing(sampler)}")
        return
    more = processes[0].mem_bytes - GIB
    held_mib = f"{processes[0].mem_bytes >> 20} MiB"
    figure("driver memory of a process with 1 GiB in tensors", held_mib, ">= 1024 MiB", more >= 0)
    figure("of that, context and libraries", f"{more >> 20} MiB", "<= 2048 MiB", more <= 2 * GIB)


def load(env: Any) -> None:
    """Power and clocks over time under load: they change, and throttle reasons have names."""
    sampler = NodeSampler()
    before, samples = (sampler.sample(0).gpus or [None])[0], []
    if before is None:
        unseen("power and clocks", "NVML shows no device")
        return
    for second in range(1, env.seconds(LOAD_S) + 1):
        end = time.monotonic() + env.seconds(LOAD_S) / LOAD_S
        while time.monotonic() < end:
            env.heat()
        [gpu, *_] = sampler.sample(second * 1_000_000_000).gpus or [before]
        samples.append(gpu)
    for name, unit in (("power_w", "W"), ("sm_mhz", "MHz"), ("temperature_c", "°C"), ("util_pct", "%")):
        idle = getattr(before, name)
        values = [getattr(gpu, name) for gpu in samples]
        if None in (idle, *values):
            unseen(name, f"without: {_missing(sampler)}")
            continue
        rises = name != "power_w" or max(values) > idle or env.name != "cuda"
        shown = f"{idle:.0f}: {' '.join(f'{value:.0f}' for value in values)} {unit}"
        figure(f"{name} before, then each second", shown, "rises" if name == "power_w" else "", rises)
    reasons = sorted({reason for gpu in samples for reason in gpu.throttle or ()})
    named = not any(reason.startswith("0x") for reason in reasons)
    figure("why clocks are not higher", ", ".join(reasons) or "no reason", "all have names", named)


def visible(env: Any) -> None:
    """
    CUDA_VISIBLE_DEVICES by UUID, by index, and wrong: NVML shows the pid on the device that the
    process uses.
    """
    uuid = env.uuid()
    played = ["--played"] * (env.name != "cuda")
    for name, value, count in (
        ("by UUID", f"GPU-{uuid}", 1),
        ("by index", "0", 1),
        ("an index that is not there", "77", 0),
        ("a UUID that is not there", WRONG_UUID, 0),
        ("none", "", 0),
    ):
        ran = launched(str(ROOT / "benchmarks/gpu_machine.py"), *played, CUDA_VISIBLE_DEVICES=value)
        answer = json.loads(ran.stdout.splitlines()[-1])
        what = f"devices that torch sees, {name}"
        figure(
            what, str(answer["count"]), "" if count is None else str(count), count in (None, answer["count"])
        )
        if not answer["count"]:
            continue
        if answer["nvml"] is None:
            unseen(f"NVML's device of the process, {name}", f"its pid is not shown; {answer['missing']}")
        else:
            figure(f"NVML's device of the process, {name}", answer["nvml"], uuid, answer["nvml"] == uuid)


def _whose(env: Any) -> dict[str, Any]:
    """
    Return the number of devices this process sees, and the UUID of the device on which NVML has
    its pid.
    """
    count = env.visible()
    if not count:
        return {"count": 0}
    import pynvml

    held = env.hold(1 << 20)
    sampler = NodeSampler()
    gpus = sampler.sample(0).gpus or []
    del held
    mine = [gpu.index for gpu in gpus if any(p.pid == os.getpid() for p in gpu.processes or ())]
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(mine[0])) if mine else None
    uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
    return {"count": count, "nvml": uuid and uuid.removeprefix("GPU-"), "missing": _missing(sampler)}


def demo(env: Any) -> None:
    """The example alone, and `make demo` as a person runs it: the late rank is named."""
    steps, ranks = ("120", "4") if env.name == "cuda" else ("60", "3")
    example, where = str(ROOT / "examples/train_gpt.py"), ("--device", env.name)
    with tempfile.TemporaryDirectory() as folder:
        losses = [f"{folder}/alone", f"{folder}/watched"]
        alone = launched(example, "--steps", "20", *where, "--loss-log", losses[0])
        figure("example alone", (alone.stdout.splitlines() or ["?"])[-1])
        launch = ("-m", "traceml_ray.launch", "--out", folder)
        launched(*launch, "--session", "one", "--nproc-per-node", "1", example, "--steps", "20", *where,
                  "--loss-log", losses[1])  # fmt: skip
        first, second = (Path(name).read_text().split() for name in losses)
        pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(first[2::3], second[2::3], strict=True)]
        off = max(abs(a - b) for a, b in pairs)
        figure("losses watched against alone", f"at most {off:g} apart", "<= 0.01", off <= 0.01)
        ran = launched(*launch, "--session", "demo", "--nproc-per-node", ranks, example, "--steps", steps,
                        *where, "--slow", "data:2:40")  # fmt: skip
        verdict = json.loads(Path(folder, "demo", "summary.json").read_text())["verdict"]
    where_to = [line for line in ran.stdout.splitlines() if "CUDA devices" in line]
    figure(
        "where the demo trains", where_to[0] if where_to else "on the CPU", "", bool(where_to) or not env.cuda
    )
    named = verdict["label"], verdict["stage"], verdict["ranks"]
    figure("rank 2 of the demo, 40 ms late", ", ".join(map(str, named)), "straggler, data, [2]",
           named == ("straggler", "data", [2]))  # fmt: skip


def ray_train(env: Any) -> None:
    """`TorchTrainer` with `use_gpu=True`: its late worker is named."""
    if importlib.util.find_spec("ray") is None:
        unseen("Ray Train", "Ray is not installed")
        return
    gpus = ["--gpus"] * (env.name == "cuda")
    ran = launched(
        str(ROOT / "examples/ray_train.py"), "--workers", "2", "--slow", "data:1:40", *gpus,
        RAY_DEDUP_LOGS="0", RAY_TRAIN_V2_ENABLED="1",
    )  # fmt: skip
    shown = [line for line in ran.stdout.splitlines() if line.startswith(("straggler", "accounting_only"))]
    shown = shown or ["no verdict printed"]
    good = shown[0].startswith("straggler: rank 1 ") and "`data`" in shown[0]
    figure("worker 1 of 2, 40 ms late", shown[0][:160], "straggler: rank 1 … `data`", good)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    from gpu_env import Played

    print(json.dumps(_whose(Played() if "--played" in sys.argv else Real(lazy=True))))
