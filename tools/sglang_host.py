"""CPU seconds of SGLang's processes around its scheduler, for a request and for a token.

    python -m tools.sglang_host --tokenizer FOLDER --out FILE.csv [--rounds 3]

The HTTP server with its tokenizer manager, and the detokenizer, are the package's (0.5.23). A
stand-in receives for the scheduler and answers by SGLang's own output streamer: a token of each
request at once, the next ones in steps. A row of the file is a load over HTTP (`/v1/completions`,
streamed): what it was, its seconds, the median to a first token, and the seconds of CPU of each
process. Needs the environment of `make test-sglang`, and a folder with a tokenizer.json.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import logging
import multiprocessing
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp
import psutil

from tools.recordings import require
from tools.sglang_loads import VERSION, stand_in

PORT = 18_231
PROCESSES = {"sglang::detokenizer": "detokenizer", "sglang::scheduler": "scheduler"}
PROMPTS = (16, 256, 1024, 4096)
"""Tokens of prompts that are answered by one token, 1 and 8 at a time."""
STREAMS = ((8, 1), (64, 1), (256, 1), (64, 10), (256, 10), (256, 30))
"""Requests of `TOKENS` tokens at a time, and the interval at which they are streamed."""
TOKENS = 120
STEP_S, ROW_S = 0.01, 0.0004
"""What the stand-in waits between two tokens, and more for each request."""
FIELDS = (
    *("round", "prompt", "streams", "interval", "requests", "tokens", "wall_s", "latency_s"),
    *("server_s", "detokenizer_s", "scheduler_s"),
)

if __name__ == "__mp_main__":
    stand_in()  # before a process reads what it was sent, which is SGLang's


class StandIn:
    """Answers in place of the scheduler: made-up tokens, as many as each request asks for."""

    def __init__(self, server_args: Any, port_args: Any) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(server_args.model_path)
        self._random = random.Random(0)
        self._running: list[Any] = []
        sockets = SchedulerIpcChannels.create(
            port_args=port_args,
            is_rank_zero=True,
            skip_tokenizer_init=False,
            metrics_enabled=False,
            enable_scripted_runtime=False,
        )
        self._received = sockets.recv_from_tokenizer
        self._streamer = SchedulerOutputStreamer(
            send_to_detokenizer=sockets.send_to_detokenizer,
            tree_cache=None,
            server_args=server_args,
            is_generation=True,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )

    def serve(self) -> None:
        """Answer for ever."""
        while True:
            self._receive()
            self._answer()
            if self._running:
                time.sleep(STEP_S + ROW_S * len(self._running))

    def _receive(self) -> None:
        """Take all requests that came; wait for one if there is none."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, sock_recv
        from sglang.srt.managers.schedule_batch import Req

        while self._received.poll(0 if self._running else None):
            got = sock_recv(self._received)
            if isinstance(got, TokenizedGenerateReqInput):
                asked = got.rid, got.input_text, got.input_ids, got.sampling_params
                sizes = {"stream": got.stream, "vocab_size": len(self._tokenizer)}
                req = Req(*asked, **sizes, time_stats=got.time_stats)
                req.tokenizer = self._tokenizer
                self._running.append(req)

    def _answer(self) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        for req in self._running:
            req.output_ids.append(self._random.randrange(1000, 100_000))
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        self._streamer.stream_output(self._running, False)
        self._running = [req for req in self._running if not req.finished()]


def scheduler(server_args: Any, port_args: Any, *placed: Any) -> None:
    """Run the stand-in, in the process of SGLang's scheduler."""
    import setproctitle
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    setproctitle.setproctitle("sglang::scheduler")
    running = StandIn(server_args, port_args)
    sizes = {"max_total_num_tokens": 1 << 30, "max_req_input_len": 1 << 20}
    placed[-1].send({"status": "ready", "startup_time": 0.0, **sizes})
    running.serve()


def serve(model: str, interval: int) -> None:
    """Run SGLang's HTTP server, tokenizer manager and detokenizer over the stand-in."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=model,
        load_format="dummy",
        device="cpu",
        attention_backend="torch_native",
        port=PORT,
        stream_interval=interval,
        log_level="error",
        skip_server_warmup=True,
    )
    launch_server(args, run_scheduler_process_func=scheduler)


class Server:
    """A server that runs, and the CPU seconds of its processes."""

    def __init__(self, model: str, interval: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(model, interval))
        self._process.start()
        self._root = psutil.Process(self._process.pid)

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    def seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each process so far."""
        found = {"server": _cpu_s(self._root)}
        for child in self._root.children(recursive=True):
            name = PROCESSES.get(" ".join(child.cmdline()).strip())
            if name:
                found[name] = _cpu_s(child)
        return found

    def stop(self) -> None:
        """End all its processes."""
        with suppress(psutil.NoSuchProcess):
            for each in [*self._root.children(recursive=True), self._root]:
                each.kill()
        self._process.join()


def _cpu_s(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def ask(session: aiohttp.ClientSession, prompt: str, tokens: int) -> float:
    """Stream a completion to its end; return the seconds to its first token."""
    asked = {"model": "any", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    began_s, first_s = time.perf_counter(), 0.0
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    async with session.post(url, json={**asked, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            first_s = first_s or (time.perf_counter() - began_s if line.strip() else 0.0)
    return first_s


async def ready(server: Server, session: aiohttp.ClientSession) -> None:
    """Wait until the server answers."""
    while server.runs:
        with suppress(OSError, aiohttp.ClientError):
            await ask(session, "a", 1)
            return
        await asyncio.sleep(0.5)
    raise SystemExit("error: the server ended")


async def spent(
    server: Server, prompts: Sequence[str], streams: int, tokens: int
) -> dict[str, Any]:
    """Send prompts, `streams` at a time; return what it took."""
    limit = asyncio.Semaphore(streams)
    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(prompt: str) -> float:
            async with limit:
                return await ask(session, prompt, tokens)

        await ready(server, session)
        before, began_s = server.seconds(), time.perf_counter()
        latencies_s = await asyncio.gather(*map(one, prompts))
        wall_s, after = time.perf_counter() - began_s, server.seconds()
    cpu_s = {f"{name}_s": round(after[name] - before[name], 4) for name in after}
    return {**cpu_s, "wall_s": round(wall_s, 3), "latency_s": round(median(latencies_s), 5)}


class Loads:
    """Loads of random prompts for a server of one stream interval."""

    def __init__(self, model: Path, server: Server, interval: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._server, self._interval = server, interval
        self._random = random.Random(interval)

    def round(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each load."""
        if self._interval == 1:
            for prompt in PROMPTS:
                yield self._row(prompt, 1, 60, 1)
                yield self._row(prompt, 8, 240, 1)
        for streams, interval in STREAMS:
            if interval == self._interval:
                yield self._row(16, streams, max(streams, 8), TOKENS)

    def _row(self, prompt: int, streams: int, requests: int, tokens: int) -> dict[str, Any]:
        drawn = [
            [self._random.randrange(1000, 100_000) for _ in range(prompt)] for _ in range(requests)
        ]
        texts = self._tokenizer.batch_decode(drawn)
        return {
            "prompt": round(mean(map(len, self._tokenizer(texts)["input_ids"]))),
            "streams": streams,
            "interval": self._interval,
            "requests": requests,
            "tokens": tokens * requests,
            **asyncio.run(spent(self._server, texts, streams, tokens)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    require("sglang", VERSION, "test-sglang")
    stand_in()
    from tools.sglang_settings import MODEL

    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name, given.out.open("w", newline="") as file:
        model = Path(name) / "model"
        shutil.copytree(given.tokenizer, model)
        (model / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 128_256}))
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for interval in sorted({each for _, each in STREAMS}):
            server = Server(str(model), interval)
            try:
                loads = Loads(model, server, interval)
                for number in range(given.rounds):
                    writer.writerows({"round": number, **row} for row in loads.round())
                    file.flush()
            finally:
                server.stop()


if __name__ == "__main__":
    main()
