#!/bin/sh
# curl.
set -eu
tuneloop=${TUNELOOP_URL:-http://localhost:8010}
model=${TUNELOOP_MODEL:-tiny}

reply=$(curl -sS --fail --retry 5 "$tuneloop/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "'"$model"'",
  "messages": [{"role": "user", "content": "3+4="}],
  "max_tokens": 12,
  "metadata": {"task_id": "task-1", "run_id": "0"}
}')
printf '%s\n' "$reply"

msg_id=$(printf '%s' "$reply" | sed 's/^{"id":"\([^"]*\)".*/\1/')
curl -sS --fail "$tuneloop/feedback" -H 'Content-Type: application/json' -d '{"msg_ids": ["'"$msg_id"'"], "reward": 1.0}'
