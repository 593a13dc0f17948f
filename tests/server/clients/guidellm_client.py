"""GuideLLM 0.8: a benchmark of four requests, all of which succeed with their token counts."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

COUNT = 4

with tempfile.TemporaryDirectory() as folder:
    data, found = Path(folder, "prompts.jsonl"), Path(folder, "found.json")
    rows = [{"prompt": f"Tell me fact {number} about the moon.", "output_tokens_count": 12} for number in range(COUNT)]
    data.write_text("\n".join(map(json.dumps, rows)))
    words = [sys.executable, "-m", "guidellm", "run", "--disable-console-interactive"]
    words += ["--backend", f"kind=openai_http,target={sys.argv[1]}", "--profile", "kind=synchronous"]
    words += ["--constraint", f"kind=max_requests,count={COUNT}", "--data", f"kind=json_file,path={data}"]
    subprocess.run([*words, "--output", f"kind=json,path={found}"], check=True)
    (benchmark,) = json.loads(found.read_text())["benchmarks"]
assert benchmark["metrics"]["request_totals"]["successful"] == COUNT, benchmark["metrics"]["request_totals"]
assert all(0 < each["output_tokens"] <= 12 for each in benchmark["requests"]["successful"])
