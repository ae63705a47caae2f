#!/usr/bin/env bash
# The command `llm` (https://llm.datasette.io) with a tool. The server is started with --served-model-name local:
#     bash examples/clients/llm_tools.sh http://127.0.0.1:8000/v1
set -euo pipefail
export LLM_USER_PATH=$(mktemp -d)
trap 'rm -r "$LLM_USER_PATH"' EXIT
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- model_id: local
  model_name: local
  api_base: $1
  api_key_name: none
  supports_tools: true
YAML
llm keys set none --value none
llm -m local -o temperature 0 -o max_tokens 60 "What is the capital of France?"
llm -m local -o temperature 0 -o max_tokens 60 --no-stream --tools-debug \
    --functions 'def multiply(x: int, y: int) -> int: return x * y' "What is 34 times 12?"
