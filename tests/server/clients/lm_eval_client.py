"""lm-eval 0.4: a task that generates, by completions and by chats, with more stop strings than OpenAI takes."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: generate_until
test_split: test
doc_to_text: "Q: What is the capital of {{country}}?\\nA:"
doc_to_target: "{{capital}}"
generation_kwargs:
  {until: ["\\n\\n", "Q:", "\\nclass", "\\ndef", "\\nif", "\\nprint"], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [{"country": "France", "capital": "Paris"}, {"country": "Italy", "capital": "Rome"}]

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "capitals.jsonl")
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    Path(folder, "capitals.yaml").write_text(TASK % data)
    for kind, path in (("local-completions", "completions"), ("local-chat-completions", "chat/completions")):
        found = lm_eval.simple_evaluate(
            model=kind,
            model_args={
                "model": "smollm2-135m",
                "base_url": f"{sys.argv[1]}/v1/{path}",
                "tokenizer_backend": None,
                "tokenized_requests": False,
                "eos_string": "<|im_end|>",
                "max_retries": 1,
            },
            tasks=["capitals"],
            task_manager=TaskManager(include_path=folder),
            apply_chat_template="chat" in kind,
        )
        answers = [sample["filtered_resps"][0] for sample in found["samples"]["capitals"]]
        print(kind, answers)
        assert len(answers) == len(QUESTIONS) and all(answers)
