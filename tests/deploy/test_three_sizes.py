"""The page's one configuration on a laptop, on 8 GPUs and on two machines of them: what is started, and what it takes."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.config.checks import check_ranks, layout_asked
from services.config.load import dump_settings, load_settings
from services.config.recipes import find_recipe
from services.config.settings import RunSettings
from services.host.run_folder import RunFolder
from services.policies.training.layout import Layout
from services.supervisor.launch_plan import MeshPorts, plan_launch
from tests.support import fake_slurm
from tests.support.command_lines import TorchrunAsks, after_shell, parse, torchrun_asks
from tests.support.manifests import ROOT

pytest.importorskip("torch")

from trainer.memory.options import Machine
from trainer.planning.plan import make_report

PAGE = (ROOT / "docs/parallel.md").read_text(encoding="utf-8").partition("## One configuration, three sizes")[2]
NUMBERS = ("servers", "trainer.parallel.data", "trainer.parallel.replicate")
SIZES = ("a laptop", "8 GPUs", "2 machines of 8 GPUs")
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def cells(name: str) -> list[str]:
    """A row of the page's table, less its name."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} ") or line.startswith(f"| `{name}` ")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def settings_of(size: str) -> RunSettings:
    column = SIZES.index(size)
    (recipe,) = re.findall(r"\[(\w+)\.toml\]\(\.\./recipes/\1\.toml\)", PAGE)
    return load_settings(find_recipe(recipe), [f"{name}={cells(name)[column]}" for name in NUMBERS])


def layout_of(settings: RunSettings) -> Layout:
    parallel = settings.trainer.parallel
    layout = layout_asked(parallel, parallel.least_ranks)
    check_ranks(settings, layout)
    return layout


def test_the_table_has_these_sizes_and_they_differ_in_three_numbers() -> None:
    (head,) = [line for line in PAGE.splitlines() if line.startswith("| |")]
    assert tuple(cell.strip() for cell in head.strip("|").split("|"))[1:] == SIZES
    trees = [settings_of(size).model_dump(mode="json") for size in SIZES]
    for tree in trees:
        del tree["servers"]
        del tree["trainer"]["parallel"]
    assert trees[0] == trees[1] == trees[2]
    layouts = [layout_of(settings_of(size)) for size in SIZES]
    assert layouts == [Layout(), Layout(data=4), Layout(replicate=2, data=8)]


@pytest.mark.parametrize("size", SIZES)
def test_what_a_rank_takes_is_what_the_page_says(size: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    settings = settings_of(size)
    machine = Machine(layout_of(settings).ranks, None if size == SIZES[0] else 80 << 30)
    report = make_report(tmp_path, settings, machine, fit=False, quick=True)
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| GiB a rank")]
    said = [cell.strip() for cell in row.strip("|").split("|")][1 + SIZES.index(size)]
    assert f"{report.formula_bytes / (1 << 30):.1f}" == said
    assert report.layout == str(layout_of(settings)) and report.fits is not False


def test_on_a_laptop_up_starts_one_trainer_and_one_server(tmp_path: Path) -> None:
    settings = settings_of(SIZES[0])
    ports = MeshPorts(redis=1, bus=2, gateway=3, rewards=4, servers=(5,), teacher=6, dashboard=7)
    settings = settings.model_copy(update={"engine": "torch"}).with_threads(2, tiny=False)
    plan = plan_launch(settings, RunFolder(tmp_path), "r", ports)
    assert len(plan.servers) == settings.servers == 1
    name, chosen = parse(["rollmesh", *plan.trainer.command[plan.trainer.command.index("services") + 1 :]])
    assert name == "train" and chosen["run_dir"] == tmp_path


@dataclass(frozen=True)
class Started:
    """What the Slurm script started. `servers`: by node; `trainer`: its nodes, and what torchrun was asked for."""

    servers: dict[str, int]
    trainer: list[str]
    asked: TorchrunAsks


def submitted(size: str, folder: Path) -> tuple[int, Started]:
    """Run the page's `sbatch` line with stand-ins for all that it starts: the GPUs of a node, and what was started."""
    line = next(line for line in PAGE.splitlines() if line.startswith("$ sbatch") and wanted(size) in f"{line} ")
    words = shlex.split(line.removeprefix("$ sbatch "))
    flags = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
    script, *overrides = [word for word in words if not word.startswith("--")]
    nodes = [f"127.0.0.{number}" for number in range(1, int(flags["nodes"]) + 1)]
    run = folder / "home/slurm-7"
    run.mkdir(parents=True)
    config = re.search(r"^\$ export ROLLMESH_CONFIG=(\S+)$", PAGE, re.MULTILINE)
    assert config is not None
    (run / "config.toml").write_text(dump_settings(load_settings(ROOT / config[1], overrides)))
    fake_slurm.install(folder / "bin")
    environ = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "FAKE_SLURM_LOG": str(folder / "steps"),
        "FAKE_SLURM_DRY": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_GPUS_ON_NODE": flags["gpus-per-node"],
        "SLURM_SUBMIT_DIR": str(ROOT),
        "ROLLMESH_VENV": sys.prefix,
        "ROLLMESH_HOME": str(folder / "home"),
        "ROLLMESH_PORT_OFFSET": str(random.randrange(1000, 5000)),
    }
    done = subprocess.run(
        ["bash", str(ROOT / script)], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = {step.flags["job-name"]: step for step in fake_slurm.steps(folder / "steps")}
    servers: dict[str, int] = {}
    for name, step in steps.items():
        if name.startswith("rollout"):
            servers[step.flags["nodelist"]] = servers.get(step.flags["nodelist"], 0) + 1
    trainer = steps["trainer"]
    asked = torchrun_asks(after_shell(trainer.command))
    assert int(trainer.flags["gpus-per-node"]) == asked.ranks_a_node
    return int(flags["gpus-per-node"]), Started(servers, trainer.flags["nodelist"].split(","), asked)


def wanted(size: str) -> str:
    """What tells its `sbatch` line from the others."""
    return f" servers={cells('servers')[SIZES.index(size)]} "


@pytest.mark.parametrize("size", SIZES[1:])
def test_slurm_starts_what_the_numbers_say_and_torchrun_takes_it(size: str, tmp_path: Path) -> None:
    settings = settings_of(size)
    gpus, started = submitted(size, tmp_path)
    layout = layout_of(settings)
    assert started.asked.ranks == layout.ranks and started.asked.nodes == len(started.trainer) == layout.replicate
    name, chosen = parse(["rollmesh", *started.asked.command])
    assert name == "train"
    # What the trainer reads, and what torchrun has started, are of one layout.
    read = load_settings(chosen["config"], [])
    assert layout_asked(read.trainer.parallel, started.asked.ranks) == layout
    assert sum(started.servers.values()) == read.servers == settings.servers
    on_node = dict(started.servers)
    for node in started.trainer:
        on_node[node] = on_node.get(node, 0) + started.asked.ranks_a_node
    assert max(on_node.values()) <= gpus, "a GPU each"
