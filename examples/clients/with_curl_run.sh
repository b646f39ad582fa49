#!/bin/sh
# curl, bound to a run by its URL, which is the base URL for any client.
set -eu
tuneloop=${TUNELOOP_URL:-http://localhost:8010}
model=${TUNELOOP_MODEL:-tiny}

token=$(printf '{"task_id": "task-1", "run_id": "run-1"}' | base64 | tr -d '=\n' | tr '+/' '-_')
base_url=$tuneloop/run/$token/v1

curl -sS --fail "$base_url/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "'"$model"'",
  "messages": [{"role": "user", "content": "3+4="}],
  "max_tokens": 12
}'
curl -sS --fail "$tuneloop/feedback" -H 'Content-Type: application/json' \
  -d '{"task_id": "task-1", "run_id": "run-1", "reward": 1.0}'
