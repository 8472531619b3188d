"""Clients that submit jobs while things are killed, and clients that read meanwhile."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from stagewright.api.http.examples import measure_example
from stagewright.core.service.documents import StoredPlan

from .server import TOKEN

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
FINAL = ("succeeded", "failed", "cancelled")


class Gone(Exception):
    """There was no answer, or one that says to come again."""


def ask(
    url: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of one request.

    Raises:
        Gone: See there.
    """
    sent = {"Authorization": f"Bearer {TOKEN}", **(headers or {})}
    if body is not None:
        sent["Content-Type"] = "application/json"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, sent, method="POST" if data else "GET")
    try:
        with DIRECT.open(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            content = json.loads(error.read() or b"{}")
        if error.code in (409, 503):
            raise Gone(content) from None
        return error.code, content
    except (OSError, HTTPException, ValueError) as error:
        raise Gone(str(error)) from None


def accepted(url: str, seed: int, deadline: float) -> str:
    """Hand in one job, again and again until it is accepted; its id."""
    body = measure_example()
    body["sample"]["seed"] = seed
    headers = {"Prefer": "wait=0", "Idempotency-Key": f"chaos-{seed}"}
    path = "/v1/plans"
    if seed % 3 == 0:
        path = "/v1/profile-jobs"
        del body["cluster"]
    while True:
        try:
            status, answer = ask(url, path, body, headers)
        except Gone:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
            continue
        if status not in (200, 202):
            raise AssertionError(f"job {seed} was answered {status}: {answer}")
        return str(answer["id"])


class Reader(threading.Thread):
    """Reads lists and plans all the time, and takes note of what is not whole."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.faults: list[str] = []
        self.num_plans = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(random.uniform(0.1, 0.4)):
            try:
                _, listed = ask(self.url, "/v1/plans?limit=5")
                for summary in listed["plans"]:
                    self._read(summary["id"])
                status, answer = ask(self.url, "/v1/jobs?limit=20")
            except Gone:
                continue
            if status != 200:
                self.faults.append(f"the list of jobs is answered {status}: {answer}")
                continue
            for job in answer["jobs"]:
                self._check(job)

    def _read(self, plan_id: str) -> None:
        status, answer = ask(self.url, f"/v1/plans/{plan_id}")
        self.num_plans += 1
        if status != 200:
            self.faults.append(f"plan {plan_id}, which is listed, is answered {status}")
            return
        plan = StoredPlan.model_validate_json(json.dumps(answer))
        status, _ = ask(self.url, f"/v1/profiles/{plan.profile_id}")
        if status != 200 or plan.plan is None:
            self.faults.append(f"plan {plan_id} is there, and not its profile: {status}")

    def _check(self, job: dict[str, Any]) -> None:
        if (job["state"] == "succeeded") != (job["result"] is not None):
            self.faults.append(f"{job['id']} is {job['state']} with result {job['result']}")
