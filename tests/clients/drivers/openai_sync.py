"""openai-python, synchronous."""

import sys
from typing import Any

import openai
from serve import ASKED, HURRY_S, TOOLS, refusal, serve


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def _ask(self, **but: Any) -> Any:
        asked = {"model": self._model, "messages": ASKED, "max_tokens": 12}
        return self._client.chat.completions.create(**asked | but)

    def whole(self) -> dict[str, Any]:
        reply = self._ask()
        return {"id": reply.id, "text": reply.choices[0].message.content}

    def streamed(self) -> dict[str, Any]:
        pieces = list(self._ask(stream=True))
        return {"id": pieces[-1].id, "text": "".join(each.choices[0].delta.content or "" for each in pieces)}

    def called(self) -> dict[str, Any]:
        reply = self._ask(tools=TOOLS, max_tokens=99)
        [call] = reply.choices[0].message.tool_calls
        return {"id": reply.id, "name": call.function.name, "arguments": call.function.arguments}

    def called_in_stream(self) -> dict[str, Any]:
        with self._client.chat.completions.stream(
            model=self._model, messages=ASKED, tools=TOOLS, max_tokens=99
        ) as stream:
            reply = stream.get_final_completion()
        [call] = reply.choices[0].message.tool_calls
        return {"id": reply.id, "name": call.function.name, "arguments": call.function.arguments}

    def unknown_model(self) -> dict[str, Any]:
        try:
            self._ask(model="nope")
        except openai.NotFoundError as error:
            return refusal(error, error.request_id)
        raise AssertionError

    def hurried(self) -> dict[str, Any]:
        try:
            self._client.with_options(timeout=HURRY_S, max_retries=0).chat.completions.create(
                model=self._model, messages=ASKED
            )
        except openai.APITimeoutError as error:
            return refusal(error, None)
        raise AssertionError

    def streams(self, count: int, until: str) -> list[str]:
        return [self._read(until) for _ in range(count)]

    def _read(self, until: str) -> str:
        with self._ask(stream=True) as stream:
            for piece in stream:
                [choice] = piece.choices
                if (until == "middle" and choice.delta.content) or (until == "finish" and choice.finish_reason):
                    break
        return piece.id

    def fine_tune(self, file: str) -> dict[str, Any]:
        jobs = self._client.fine_tuning.jobs
        method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": "auto"}}}
        job = jobs.create(
            model=self._model, training_file=file, suffix="own", seed=1, method=method, metadata={"a": "b"}
        )
        return {"id": job.id, "status": job.status, "beta": job.method.dpo.hyperparameters.beta}

    def act(self, job: str, verb: str) -> str:
        return str(getattr(self._client.fine_tuning.jobs, verb)(job).status)

    def fine_tuned(self, job: str) -> dict[str, Any]:
        jobs = self._client.fine_tuning.jobs
        done = jobs.retrieve(job)
        model = done.fine_tuned_model
        steps = [each.step_number for each in jobs.checkpoints.list(job, limit=1)]
        events = [each.id for each in jobs.list_events(job, limit=2)]
        listed = job in [each.id for each in jobs.list(limit=1)]
        known = model in [each.id for each in self._client.models.list()] and self._client.models.retrieve(model).id
        text = self._ask(model=model).choices[0].message.content
        deleted = self._client.models.delete(model).deleted
        try:
            self._ask(model=model)
        except openai.NotFoundError as error:
            gone = refusal(error, error.request_id)
        told = {"model": model, "steps": steps, "events": len({*events}), "listed": listed, "known": known == model}
        return told | {"status": done.status, "text": text, "deleted": deleted, "gone": gone["message"]}


serve(Client(*sys.argv[1:]))
