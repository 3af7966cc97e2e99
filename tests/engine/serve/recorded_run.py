#!/usr/bin/env python3
"""recorded_run.py FOLDER TP DP PP [EP]: writes the files of a made-up run of that layout, as `tandem train`
does: 120 of 200 steps, one rank slow, a lost rank. For tests and pictures of the pages."""
import json
import math
import os
import random
import struct
import sys

PHASES = 11
FORWARD, BACKWARD, UPDATE, TP_WAIT, EP_WAIT, PP_WAIT, DP_WAIT, STEP_WAIT = 1, 2, 4, 5, 6, 7, 8, 9


def pack_ms(ms):
    us, exponent = round(ms * 1e3), 0
    mantissa = us
    while mantissa > 2047:
        exponent += 1
        mantissa = round(us / 2 ** exponent)
    return exponent << 11 | mantissa


class Run:
    """Files of a made-up run on tp x dp x pp ranks; rank `slow` is slower in its backward passes."""

    def __init__(self, folder, tp, dp, pp, slow, began=1, begin=0, ep=1):
        self.folder, self.tp, self.dp, self.pp, self.ep, self.slow = folder, tp, dp, pp, ep, slow
        self.ranks = tp * dp * pp
        os.makedirs(folder + "/ranks", exist_ok=True)
        self.files = []
        for rank in range(self.ranks):
            t, d, p = self.coordinates(rank)
            head = struct.pack("<8sqq6i64s", b"tdmrank1", begin, began, rank, self.ranks, t, d, p, 0, self.host(rank).encode())
            self.files.append(f"{folder}/ranks/{rank}.from-{begin}.records")
            with open(self.files[-1], "wb") as file:
                file.write(head)
        experts = f"experts = {4 * ep}\ntop_k = 2\nexpert_ffn = 64\n" if ep > 1 else ""
        with open(folder + "/config.toml", "w") as file:
            file.write(f"[model]\nlayers = {4 * pp}\nheads = {4 * tp}\nkv_heads = {4 * tp}\n{experts}[train]\nsteps = 200\nbatch = {16 * dp}\n"
                       f"microbatch = 1\n[parallel]\ntp = {tp}\ndp = {dp}\npp = {pp}\nep = {ep}\n[data]\npaths = [\"x\"]\n")

    def coordinates(self, rank):
        return rank % self.tp, rank // self.tp % self.dp, rank // self.tp // self.dp

    def host(self, rank):
        return f"node{rank // 8}"

    def frame(self, rank, step):
        noise = (step * 31 + rank * 17) % 7 / 10
        phases = [0.0] * PHASES
        phases[FORWARD], phases[BACKWARD], phases[UPDATE] = 30 + noise, 60 + noise, 5
        phases[TP_WAIT] = 8
        if rank == self.slow:
            phases[BACKWARD] += 15
        else:
            phases[STEP_WAIT] = 15
        return phases

    def metrics(self, step):
        return {"step": step, "loss": 5 / step ** 0.3, "lr": 1e-3, "grad_norm": 0.5, "tokens": 4096,
                "tokens_per_s": 32000.0 + step, "step_ms": 125.0, "mfu": 0.41, "memory_bytes": 3 << 30,
                "saved_step": step // 50 * 50}

    def add(self, first, last):
        for rank, path in enumerate(self.files):
            with open(path, "ab") as file:
                file.write(b"".join(struct.pack("<IHH11H", step, 1, pack_ms(125), *map(pack_ms, self.frame(rank, step)))
                                    for step in range(first, last + 1)))
        with open(self.folder + "/metrics.jsonl", "a") as file:
            for step in range(first, last + 1):
                file.write(json.dumps(self.metrics(step)) + "\n")

    def write_check(self):
        terms = {"step": 125.0, "compute": 91.0, "TP waits": 8.0, "PP waits": 15.0, "update": 5.0, "other": 6.0}
        with open(self.folder + "/self_check.json", "w") as file:
            json.dump({"first": 3, "last": 22, "predicted_ms": {**terms, "PP waits": 0.5, "step": 110.5},
                       "measured_ms": terms}, file)

    def add_event(self, rank=1, cause="<img src=x onerror=alert(1)>", step=90):
        with open(self.folder + "/events.jsonl", "a") as file:
            file.write(json.dumps({"event": "lost", "rank": rank, "step": step, "cause": cause, "noticed_ms": 120.5,
                                   "recovered_ms": 2400.0, "process": 1, "replacement": 4}) + "\n")


class RecordedRun(Run):
    """A run like a real one: times vary by step and by host, `slow`'s backward passes take 12 % longer, and the
    ranks of host `far` wait longer for other replicas."""

    def __init__(self, folder, tp, dp, pp, ep=1, seed=7):
        super().__init__(folder, tp, dp, pp, slow=tp * dp * pp * 21 // 32 + 1, ep=ep)
        self.random = random.Random(seed)
        self.far = self.host(self.ranks // 4)
        self.host_noise = {}

    def frame(self, rank, step):
        t, d, p = self.coordinates(rank)
        key = (self.host(rank), step)
        if key not in self.host_noise:
            self.host_noise[key] = self.random.gauss(0, 0.006)
        noise = self.host_noise[key] + self.random.gauss(0, 0.003) + 0.004 * math.sin(step / 9)
        phases = [0.0] * PHASES
        phases[FORWARD], phases[BACKWARD], phases[UPDATE] = 28 * (1 + noise), 55 * (1 + noise) * (1.12 if rank == self.slow else 1), 4 * (1 + noise)
        phases[TP_WAIT] = 6 + self.random.random() if self.tp > 1 else 0
        phases[EP_WAIT] = 5 + 2 * self.random.random() if self.ep > 1 else 0
        phases[PP_WAIT] = 3 + 1.5 * p + self.random.random() if self.pp > 1 else 0
        phases[DP_WAIT] = (9 if self.host(rank) == self.far else 3) + self.random.random() if self.dp > 1 else 0
        phases[STEP_WAIT] = max(0, 124 - sum(phases) - self.random.random())
        return phases

    def metrics(self, step):
        noise = self.random.gauss(0, 0.02)
        return super().metrics(step) | {"loss": 1.9 + 7 * step ** -0.6 + noise, "lr": 3e-4 * min(1, step / 20), "grad_norm": 0.4 + 2 / step + abs(noise),
                                        "tokens_per_s": 4096 * self.dp * 8 * (1 + noise / 4), "tokens": 4096 * self.dp} | self.sent()

    def sent(self):
        """Bytes of all ranks in a step, along axes of several ranks."""
        sent = {"tp_bytes": 480e6 * (self.tp > 1), "expert_bytes": 210e6 * (self.ep > 1), "gradient_bytes": 220e6 * (self.dp > 1),
                "weight_bytes": 110e6 * (self.dp > 1), "stage_bytes": 64e6 * (self.pp - 1) / self.pp}
        return {key: round(self.ranks * value) for key, value in sent.items() if value}


def write_recorded(folder, tp, dp, pp, ep=1):
    run = RecordedRun(folder, tp, dp, pp, ep)
    last = 120 if run.ranks < 1000 else 24
    run.add(1, last)
    run.write_check()
    run.add_event(run.slow, "signal 9", last // 2)
    return run


if __name__ == "__main__":
    write_recorded(sys.argv[1], *map(int, sys.argv[2:]))
