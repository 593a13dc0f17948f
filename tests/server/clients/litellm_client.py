"""litellm 1.110: an answer, and an overflow that is recognised."""

import sys

import litellm

options = {"model": "openai/smollm2-135m", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_tokens": 8}
assert litellm.completion(messages=[{"role": "user", "content": "Hi"}], **options).choices[0].message.content
try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 20000}], **options)
    raise SystemExit("an overflow went through")
except litellm.ContextWindowExceededError:
    pass
