"""A call from arrival to delivery: joined if it is a retry, planned, generated, recorded, then handed over."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

import xxhash

from gyre.config import SamplingConfig, ServingConfig
from gyre.gateway.conversation import Plan, opening_of, plan_aside, prompt_thinking
from gyre.gateway.dialect import PLAIN, Dialect, Hint
from gyre.gateway.engine import EngineBroken, EngineClient, EngineRefused
from gyre.gateway.errors import GatewayError, context_overflow
from gyre.gateway.generation import Answer, Ask, generate
from gyre.gateway.messages import Request
from gyre.gateway.metrics import Metrics
from gyre.gateway.nodes import Node
from gyre.gateway.placing import Sampled, place
from gyre.gateway.policy import Policy
from gyre.gateway.recorder import Recorder, storable
from gyre.gateway.result import Result
from gyre.gateway.routing import Router
from gyre.gateway.session import OPEN_STATES, Session, load_session, reply_to_json
from gyre.gateway.sharding import ALONE, Shard
from gyre.gateway.tree import Turn
from gyre.store.gateway_queries import CallWrite, RolloutFacts, rollouts_by_token

log = logging.getLogger(__name__)

# Seconds that a call goes on after its last client left, so that a quick retry can join it.
JOIN_GRACE_S = 0.5


class LiveCall:
    """A call that runs, or is done and not delivered. Several connections may wait for it."""

    def __init__(self, session: Session, request_hash: str, work: Callable[[LiveCall], Awaitable[Result]]) -> None:
        self.session = session
        self.request_hash = request_hash
        self.committing = False
        """Set once the answer is complete: from then on it is recorded whatever happens to the clients."""
        self.task: asyncio.Task[Result] = asyncio.ensure_future(work(self))
        self.task.add_done_callback(_retrieve)
        self._waiting = 0

    def attach(self) -> None:
        """A connection begins to wait."""
        self._waiting += 1

    def detach(self) -> None:
        """A connection is gone, without an answer. After the last, generation is aborted unless a retry comes."""
        self._waiting -= 1
        if self._waiting == 0 and not self.task.done():
            closing = asyncio.create_task(self._abandon())
            self.session.closing.add(closing)
            closing.add_done_callback(self.session.closing.discard)

    def cancel(self) -> None:
        """Abort what is being generated. An answer that is already complete is still recorded."""
        if not self.committing:
            self.task.cancel()

    def delivered(self) -> None:
        """The answer is with a client: the same request is from now on a new sample."""
        self._waiting -= 1
        if self.session.live.get(self.request_hash) is self:
            del self.session.live[self.request_hash]

    async def _abandon(self) -> None:
        await asyncio.sleep(JOIN_GRACE_S)
        if self._waiting == 0 and not self.task.done():
            if not self.committing and self.session.live.get(self.request_hash) is self:
                del self.session.live[self.request_hash]
            self.cancel()


def _retrieve(task: asyncio.Task[Result]) -> None:
    if not task.cancelled():
        task.exception()  # nobody may be left to ask for it


class Calls:
    """All rollouts of one run, and the calls that they make."""

    def __init__(
        self,
        run_id: str,
        policy: Policy,
        sampling: SamplingConfig,
        serving: ServingConfig,
        router: Router,
        recorder: Recorder,
        metrics: Metrics,
        dialect: Dialect = PLAIN,
        shard: Shard = ALONE,
    ) -> None:
        self.dialect = dialect
        self._shard = shard
        self.run_id = run_id
        self.policy = policy
        self.router = router
        self.metrics = metrics
        self.engines = EngineClient(serving.request_timeout_s)
        self._sampling = sampling
        self._recorder = recorder
        self.sessions: dict[str, Session] = {}
        """Live rollouts by token."""
        self._loading: dict[str, asyncio.Lock] = {}

    async def session(self, token: str) -> Session:
        """The session of the rollout with this token. Raises GatewayError where it is unknown or over."""
        now = asyncio.get_running_loop().time()
        session = self.sessions.get(token)
        if session is not None and session.fresh(now):
            return session
        async with self._loading.setdefault(token, asyncio.Lock()):
            session = self.sessions.get(token)
            if session is not None and session.fresh(now):
                return session
            found = await self._recorder.retried(lambda: rollouts_by_token(self._recorder.engine, [token]))
            facts = self._check(found.get(token), token)
            if session is None:
                session = await self._load(facts)
                self.sessions[token] = session
            elif session.stale:
                async with session.recording:
                    await self._renew(session)
            session.facts, session.checked_at = facts, now
            return session

    async def _load(self, facts: RolloutFacts, begun: Collection[int] = ()) -> Session:
        now, engine = asyncio.get_running_loop().time(), self._recorder.engine
        return await self._recorder.retried(lambda: load_session(engine, facts, now, self.dialect, list(begun)))

    async def _renew(self, session: Session) -> None:
        """Read a rollout's tree anew, where a commit may or may not have happened. Under its `recording` lock."""
        if session.stale:
            session.renew(await self._load(session.facts, session.begun))

    def _check(self, facts: RolloutFacts | None, token: str) -> RolloutFacts:
        if facts is None:
            self._loading.pop(token, None)
            raise GatewayError("unauthorized", "No rollout has this token: check the base URL or API key.")
        if facts.run_id != self.run_id:
            self._loading.pop(token, None)
            raise GatewayError(
                "forbidden", f"This rollout belongs to run {facts.run_id}; this gateway serves {self.run_id}."
            )
        self._shard.check(token)
        if facts.state not in OPEN_STATES:
            self._forget(token)
            raise GatewayError("forbidden", f"Rollout {facts.id} is over ({facts.state}): it takes no more calls.")
        return facts

    def _forget(self, token: str) -> None:
        self._loading.pop(token, None)
        session = self.sessions.pop(token, None)
        for call in [] if session is None else list(session.live.values()):
            call.cancel()

    async def sweep(self) -> None:
        """Read all live rollouts anew, so that their calls need not; drop those that are over, with what they run."""
        if not self.sessions:
            return
        now = asyncio.get_running_loop().time()
        tokens = list(self.sessions)
        found = await rollouts_by_token(self._recorder.engine, tokens)
        for token in tokens:
            facts = found.get(token)
            if facts is None or facts.state not in OPEN_STATES:
                self._forget(token)
            elif (session := self.sessions.get(token)) is not None:
                session.facts, session.checked_at = facts, now

    def submit(self, session: Session, request: Request, body: bytes, hint: Hint) -> LiveCall:
        """The call for `request`: a new one, or one with the same bytes that is not delivered yet. Comes attached."""
        # Two agents that say the same at the same time are two calls.
        key = hash_of(body, hint.agent)
        call = session.live.get(key)
        if call is not None and not _failed(call.task):
            self.metrics.joined.inc()
        else:
            call = LiveCall(session, key, lambda live: self._work(live, request, hint))
            session.live[key] = call
        call.attach()
        return call

    async def _work(self, live: LiveCall, request: Request, hint: Hint) -> Result:
        session, key = live.session, live.request_hash
        if (turn := session.undelivered.pop(key, None)) is not None:
            self.metrics.joined.inc()
            return Result.of(turn)
        started, clock = _now(), time.perf_counter()
        seq, session.next_seq = session.next_seq, session.next_seq + 1
        self.metrics.running.inc()
        status = "failed"
        call_id: int | None = None
        try:
            call_id = await self._recorder.new_id("calls")
            planned = await plan_aside(lambda: session.tree, self.policy, request, hint, lambda: session.kinds)
            begin = self._begin(session, request, key, seq, call_id, planned, started)
            result = await self._answer(live, request, planned, begin, clock)
            status = "complete"
            return result
        except asyncio.CancelledError:
            status = "incomplete"
            raise
        except GatewayError as error:
            status = "refused" if error.status < 500 else "failed"
            raise
        except (EngineRefused, EngineBroken) as error:
            log.error("call %d of %s failed: %s", seq, session.facts.id, error)
            raise GatewayError("internal", f"The engine's answer cannot be used: {error}") from error
        finally:
            if call_id is not None:
                session.begun.pop(call_id, None)
                if status != "complete":
                    session.kinds.drop(call_id)
            self.metrics.running.dec()
            self.metrics.calls.labels(request.api, status).inc()

    async def _answer(
        self, live: LiveCall, request: Request, planned: Plan, begin: dict[str, Any], clock: float
    ) -> Result:
        session = live.session
        call_id: int = begin["id"]
        room = self.policy.context - planned.prompt_length
        if room < 1:
            end = {"status": "refused", "finish_reason": "context_overflow", "cells": [], "ended_at": _now()}
            await self._recorder.write(CallWrite(call_id, begin, [], end))
            raise context_overflow(planned.prompt_length, self.policy.context)
        began = self._recorder.post(CallWrite(call_id, begin))
        if planned.fork_reason is not None:
            self.metrics.forks.labels(planned.fork_reason).inc()
        self.metrics.kinds.labels(planned.kind).inc()
        ask = Ask(
            rollout_id=session.facts.id,
            min_version=session.facts.min_version,
            prompt=session.texts.of(planned),
            prompt_tokens=planned.prompt_length,
            max_tokens=min(room, self._sampling.max_tokens, request.max_tokens or room),
            temperature=session.facts.temperature,
            top_p=self._sampling.top_p,
            stop_ids=self.policy.stop_ids,
            stopped=self.policy.stopped(request.stop),
            preferred=session.last_cell if planned.turn is None else planned.turn.cell,
        )
        answer = Answer()
        try:
            await generate(ask, answer, self.router, self.engines, self.metrics)
        except BaseException:
            # What was sampled is kept, marked so that it is never trained.
            await asyncio.shield(self._record(session, planned, begin, began, answer, {"status": "incomplete"}))
            raise
        live.committing = True
        assert answer.finish is not None
        tail = planned.new_ids if planned.twin is None else self.policy.tail_of(planned.twin.prompt)
        reply = self.policy.reply(tail, answer.ids, request.tools, request.parse_tool_calls, request.stop)
        stop_string = self.policy.stop_string(answer.ids, request.stop)
        said = {"status": "complete", "response": storable(reply_to_json(reply, stop_string))}
        prompt, leaf = await self._record(session, planned, begin, began, answer, said)
        assert leaf is not None
        parent = None if planned.turn is None else session.tree.by_call[planned.turn.call_id]
        turn = Turn(
            call_id=call_id,
            seq=begin["seq"],
            parent=parent,
            messages=tuple(replace(m, raw=None) for m in planned.messages),
            reply=reply,
            tools_key=request.tools_key if parent is None else parent.tools_key,
            prompt=prompt,
            generated=leaf,
            prompt_thinking=prompt_thinking(parent, planned.messages, prompt),
            kind=begin["kind"],
            cell=answer.cells[-1],
            request_hash=begin["request_hash"],
            finish_reason=answer.finish,
            new_tokens=planned.tokenised,
            cached_tokens=answer.cached_tokens or 0,
            created=int(begin["started_at"].timestamp()),
            agent=planned.agent,
            told=planned.verdict.told,
            stop_string=stop_string,
        )
        session.tree.add(turn)
        session.last_cell = turn.cell
        session.texts.keep(call_id, ask.prompt, answer.ids, None if planned.anchor is None else planned.anchor.call_id)
        if parent is not None:  # what a turn goes on from was delivered
            session.undelivered.pop(parent.request_hash, None)
        self._count(planned, answer, time.perf_counter() - clock)
        return Result.of(turn)

    def _begin(
        self, session: Session, request: Request, key: str, seq: int, call_id: int, planned: Plan, started: dt.datetime
    ) -> dict[str, Any]:
        record: dict[str, Any] = {
            "base": planned.base,
            "messages": [m.raw for m in planned.messages],
            "options": request.options,
        }
        if planned.turn is None:
            record |= {"tools": list(request.tools), "tools_key": request.tools_key}
            session.kinds.add(opening_of(call_id, planned, request))
        if planned.verdict.told:
            record["told"] = True
        session.begun[call_id] = begin = {
            "id": call_id,
            "rollout_id": session.facts.id,
            "seq": seq,
            "api": request.api,
            "status": "running",
            "kind": planned.kind,
            "agent": planned.agent,
            "parent_call_id": None if planned.turn is None else planned.turn.call_id,
            "fork_reason": planned.fork_reason,
            "request_hash": key,
            "request": storable(record),
            "prompt_tokens": planned.prompt_length,
            "new_tokens": planned.tokenised,
            "started_at": started,
        }
        return begin

    async def _record(
        self, session: Session, planned: Plan, begin: dict[str, Any], began: asyncio.Future[None], answer: Answer,
        end: dict[str, Any],
    ) -> tuple[Node, Node | None]:  # fmt: skip
        """Commit a call's end with its nodes, then change the tree. Returns the prompt's and the generated node."""
        ids = [await self._recorder.new_id("nodes") for _ in range(3)]
        common = {"rollout_id": begin["rollout_id"], "call_id": begin["id"]}
        if len(answer.ids) != len(answer.logprobs) or not _cover(answer.spans, len(answer.ids)):
            raise GatewayError(
                "internal",
                f"{len(answer.ids)} ids with {len(answer.logprobs)} log-probs and version spans {answer.spans}",
            )
        async with session.recording:
            await self._renew(session)
            sampled = Sampled(answer.ids, answer.logprobs, answer.spans)
            placing = place(session.tree, planned, sampled, ids, common)
            write = CallWrite(begin["id"], None, placing.rows, {"leaf_id": placing.leaf_id, **end, **_facts(answer)})
            write.splits = placing.splits
            if not (began.done() and began.exception() is None):  # it is not in Postgres for certain
                write.begin = begin
            if end["status"] == "complete":
                parent = None if planned.turn is None else session.tree.by_call[planned.turn.call_id]
                verdict = planned.verdict
                write.kinds = session.kinds.concluded(begin["id"], begin["kind"], verdict, parent, session.tree)
            try:
                await self._recorder.write(write)
            except BaseException:
                session.stale = True
                raise
            session.change_kinds(write.kinds)
            for kind in write.kinds.values():
                self.metrics.relabelled.labels(kind).inc()
            self.metrics.splits.inc(len(placing.splits))
            return placing.apply(complete=end["status"] == "complete")

    def _count(self, planned: Plan, answer: Answer, total: float) -> None:
        tokens, seconds = self.metrics.tokens, self.metrics.seconds
        tokens.labels("prompt").inc(planned.prompt_length)
        tokens.labels("new").inc(planned.tokenised)
        tokens.labels("cached").inc(answer.cached_tokens or 0)
        tokens.labels("generated").inc(len(answer.ids))
        seconds.labels("total").observe(total)
        seconds.labels("waiting").observe(answer.waited)
        seconds.labels("engine").observe(answer.generating)
        seconds.labels("overhead").observe(total - answer.waited - answer.generating)

    async def close(self) -> None:
        """End what runs; each call is recorded as incomplete."""
        calls = [c for s in self.sessions.values() for c in s.live.values() if not c.task.done()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*(c.task for c in calls), return_exceptions=True)
        await self.engines.close()


def hash_of(body: bytes, agent: str) -> str:
    """What `calls.request_hash` has of a request's bytes and of the agent that sent them.

    It tells a rollout's own requests apart and nothing else, so it is a fast hash: SHA-256 of a megabyte was a tenth of
    what the gateway does for a call.
    """
    digest = xxhash.xxh3_128(agent.encode() + b"\0" if agent else b"")
    digest.update(body)
    return str(digest.hexdigest())


def _failed(task: asyncio.Task[Result]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _facts(answer: Answer) -> dict[str, Any]:
    return {
        "finish_reason": answer.finish,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": len(answer.ids),
        "cells": answer.cells,
        "routed_at": answer.routed_at,
        "first_token_at": answer.first_token_at,
        "ended_at": _now(),
    }


def _cover(spans: list[list[int]], length: int) -> bool:
    at = 0
    for _, start, end in spans:
        if start != at or end <= start:
            return False
        at = end
    return at == length


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
