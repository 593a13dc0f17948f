"""Records tests/data/smollm2_reference.json.gz: greedy ids and sample logits of transformers on the same GGUF file.

python tests/data/record_reference.py PATH_TO_GGUF
"""

import gzip
import json
import sys
from pathlib import Path

import torch
import transformers

NEW_TOKENS = 64
LOGIT_STRIDE = 192  # every 192nd entry of the vocabulary is recorded: 256 numbers per prompt

CHAT = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about autumn leaves.",
    "List three uses of a paper clip.",
    "Write a Python function that reverses a string.",
    "Translate 'good morning' to Spanish and German.",
    "Summarise: The cat sat on the mat. The dog barked at the cat. The cat ran away.",
    "If a train travels 60 km in 45 minutes, how fast does it go?",
    "Who wrote Pride and Prejudice, and when?",
    "Give me a short recipe for pancakes.",
    "What is the difference between a list and a tuple in Python?",
    "Réponds en français : quelle heure est-il ?",
]
RAW = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three states of matter are",
    "import numpy as np\n\nclass Matrix:\n",
    "Q: What is 12 times 12?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
]


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    runs = []
    for kind, text in [*(("chat", t) for t in CHAT), *(("raw", t) for t in RAW)]:
        rendered = text
        if kind == "chat":
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        prompt = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        ids, cache, margins, first = list(prompt), None, [], None
        step = torch.tensor([ids])
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                out = model(step, past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, out.logits[0, -1]
                first = logits if first is None else first
                top = logits.topk(2)
                margins.append(round(float(top.values[0] - top.values[1]), 6))
                ids.append(int(top.indices[0]))
                step = torch.tensor([[ids[-1]]])
        runs.append(
            {
                "kind": kind,
                "text": text,
                "prompt_ids": prompt,
                "output_ids": ids[len(prompt) :],
                "margins": margins,
                "logits": [round(x, 5) for x in first[::LOGIT_STRIDE].tolist()],
                "highest_logit": float(first.abs().max()),
            }
        )
        print(len(runs), text[:40], file=sys.stderr)
    record = {
        "model": "SmolLM2-135M-Instruct Q4_1 GGUF, dequantised to float32, greedy, EOS ignored",
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "logit_stride": LOGIT_STRIDE,
        "runs": runs,
    }
    text = json.dumps(record, indent=None) + "\n"
    Path(__file__).with_name("smollm2_reference.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
