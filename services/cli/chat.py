"""``moonbus chat``: a conversation with the gateway, on a terminal or through a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from services.cli.find import gateway_url
from services.cli.output import console, notes
from shared.errors import UserError

CONNECT_S = 5.0
SILENCE_S = 120.0
"""Longest wait for the next piece of an answer."""

Messages = list[dict[str, str]]


def chat(*, url: str | None, data_dir: str | None, model: str | None, system: str, max_tokens: int,
         temperature: float) -> None:
    """Asks and prints until /exit, the end of the input, or Ctrl-C between answers."""
    base = gateway_url(url, data_dir)
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (its presence gives the prompt line editing and history)
    with httpx.Client(base_url=base, timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S)) as http:
        model = model or first_model(http, base)
        if interactive:
            notes.print(f"[dim]{model} at {base}; /clear forgets, /exit ends[/]")
        for question in _questions(interactive):
            if question == "/exit":
                return
            if question == "/clear":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": question})
            answer = ""
            try:
                for piece in stream(http, {"model": model, "messages": messages, "max_tokens": max_tokens,
                                           "temperature": temperature}):
                    answer += piece
                    console.out(piece, end="", highlight=False)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                if not interactive:
                    raise  # a pipe's Ctrl-C ends the command; a person's ends the answer
                notes.print(" [dim](stopped)[/]", end="")
            console.out("")
            messages.append({"role": "assistant", "content": answer})


def first_model(http: httpx.Client, base: str) -> str:
    """The first model the gateway offers."""
    try:
        entries = http.get("/v1/models").raise_for_status().json()["data"]
    except httpx.HTTPError as error:
        raise UserError(f"the gateway at {base} does not answer ({error}); is the stack running?") from error
    if not entries:
        raise UserError(f"the gateway at {base} offers no model: no worker is alive; see `moonbus workers`")
    return str(entries[0]["id"])


def stream(http: httpx.Client, request: dict[str, Any]) -> Iterator[str]:
    """The answer's text, piece by piece; an error of the gateway becomes a :class:`UserError`."""
    try:
        with http.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                raise UserError(f"the gateway answered {response.status_code}: {_reason(response.text)}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise UserError(f"the gateway gave up: {event['error']['message']}")
                for choice in event.get("choices", []):
                    yield choice["delta"].get("content") or ""
    except httpx.HTTPError as error:
        raise UserError(f"the gateway at {http.base_url} broke off ({error}); is the stack running?") from error


def _questions(interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = console.input("[bold cyan]you>[/] ") if interactive else sys.stdin.readline()
        except EOFError:
            return
        if not line and not interactive:
            return
        if line.strip():
            yield line.strip()


def _reason(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()[:200] or "no reason given"
