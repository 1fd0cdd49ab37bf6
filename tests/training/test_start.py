"""What keeps the start of a run short, as far as it can be told without a clock (benchmarks/bench_start.py has one)."""

import json
import subprocess
import sys

CHILD = """
import json, subprocess, sys
from pyggtrain.cli import main

begun = []
popen = subprocess.Popen

class Popen(popen):
    def __init__(self, command, *args, **kwargs):
        if "GraphSource" in str(command):
            begun.append("torch" in sys.modules)
        super().__init__(command, *args, **kwargs)

subprocess.Popen = Popen
code = main(sys.argv[1:])
unwanted = sorted({"torch._dynamo", "torch._inductor", "sympy", "pandas"} & sys.modules.keys())
print(json.dumps({"code": code, "begun": begun, "unwanted": unwanted}))
"""


def test_a_run_imports_no_compiler_and_reads_the_header_while_torch_is_imported(smollm2_path, tmp_path):
    turns = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello."}]
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": turns}) + "\n")
    command = ["train", smollm2_path, data, "-o", tmp_path / "adapter.gguf", "--max-steps", "2", "--no-verify"]
    settings = ["--per-device-train-batch-size", "1", "--gradient-accumulation-steps", "1", "--r", "2"]
    # Two threads that wait for each other on a busy machine take ten times as long.
    settings += ["--num-threads", "1"]
    done = subprocess.run([sys.executable, "-c", CHILD, *command, *settings], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"code": 0, "begun": [False], "unwanted": []}
    assert "memory  " in done.stdout and "at most" in done.stdout
