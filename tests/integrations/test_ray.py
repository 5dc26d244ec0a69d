"""examples/clusters/train_ray.py on a local Ray, compared with training in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from layerzero.checkpoint.whole_model_files import export_model

if find_spec("ray") is None:
    pytest.skip("needs ray: pip install --no-deps -r requirements-loops.txt", allow_module_level=True)

ROOT = Path(__file__).parents[2]

# Train on four workers, continue on two, and train the same steps in one process. Ray has four CPUs on any machine.
PROGRAM = """
import sys
import ray, torch, train_ray
import torch.nn.functional as F
from safetensors.torch import save_file

storage, saved = sys.argv[1:]
ray.init(num_cpus=4, include_dashboard=False)
train_ray.main(["--steps", "6", "--workers", "4", "--zero3-size", "2", "--save-every", "3", "--storage", storage])
train_ray.main(["--steps", "8", "--workers", "2", "--save-every", "2", "--storage", storage])
ray.shutdown()

model = train_ray.make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    ranks = 4 if step < 6 else 2
    for rank in range(ranks):
        x, target = train_ray.make_batch(step, rank)
        (F.mse_loss(model(x), target) / ranks).backward()
    optimizer.step()
    optimizer.zero_grad()
    save_file(model.state_dict(), f"{saved}/{step + 1}.safetensors")
"""


@pytest.mark.exhaustive
def test_workers_train_like_one_process_and_their_number_may_change(tmp_path: Path) -> None:
    path = f"{ROOT}:{ROOT / 'examples' / 'clusters'}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # Send no statistics, and listen on 127.0.0.1 only, as Ray does by default on other systems than Linux.
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "ray"), str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for step, topology in {
        6: {"data_parallel": 4, "zero3_size": 2},
        8: {"data_parallel": 2, "zero3_size": 2},  # by default: all workers of the node
    }.items():
        folder = tmp_path / "ray" / "checkpoints" / f"step-{step:06d}"
        assert json.loads((folder / "contents.json").read_text())["topology"] == topology
        export_model(folder, tmp_path / f"ours-{step}.safetensors")
        ours, theirs = load_file(tmp_path / f"ours-{step}.safetensors"), load_file(tmp_path / f"{step}.safetensors")
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
