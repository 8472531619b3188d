"""JSON that is deep, long, huge, not JSON, or means more than it says."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

from stagewright.api.http.examples import example_graph, example_profile

from .attack import ARCHIVE, JSON, REFUSED, Attack, Target, posting

DEEP = 100_000
EXPRESSION = "__import__('os').system('touch ran')"
SAMPLE = {"inputs": {"input": {"shape": [1, 64]}}}


def attacks() -> Iterator[Attack]:
    yield from _no_json()
    yield from _numbers()
    yield from _bounds()
    yield from _graphs()
    yield from _texts()
    yield from _kinds()
    yield from _code()
    yield from _heavy()


def _no_json() -> Iterator[Attack]:
    for name, body in {
        "100,000 arrays deep": b"[" * DEEP + b"]" * DEEP,
        "100,000 objects deep": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "201 deep": b'{"cluster": ' + b"[" * 201 + b"]" * 201 + b"}",
        "100,000 open brackets": b"[" * DEEP,
        "NaN": b'{"cluster": NaN}',
        "Infinity": b'{"cluster": -Infinity}',
        "UTF-16": '{"cluster": "2xcpu"}'.encode("utf-16"),
        "a lone surrogate": b'{"cluster": "\\ud800"}',
        "overlong UTF-8": b'{"cluster": "\xc0\xaf\xc0\xae"}',
        "half a character": b'{"cluster": "\xe2\x82"}',
        "a byte order mark": b'\xef\xbb\xbf{"cluster": "2xcpu"}',
        "a raw NUL": b'{"cluster": "\x00"}',
        "YAML": b"!!python/object/apply:os.system ['touch ran']",
        "300,000 wrong layers": b'{"profile": {"layers": [' + b"{}," * 300_000 + b"{}]}}",
        "300,000 wrong devices": b'{"cluster": {"devices": [' + b"{}," * 300_000 + b"{}]}}",
        "300,000 wrong operations": b'{"graph": {"operations": [' + b"{}," * 300_000 + b"{}]}}",
        "17 MiB": b'{"cluster": "' + b"x" * (17 * 2**20) + b'"}',
    }.items():
        yield Attack("json", name, posting("/v1/plans", body))


def _numbers() -> Iterator[Attack]:
    for literal in ("1e999", "-1e999", "9" * 5000, "-1", "1e-400", "0.1", "true", '"1"'):
        body = _with(_plan(), ["profile", "layers", 0, "saved_activation_bytes"], literal)
        statuses = frozenset({201, *REFUSED}) if literal in ("1e-400",) else REFUSED
        yield Attack("number", f"{literal[:12]} bytes", posting("/v1/plans", body), statuses)
    for literal in ("1e999", "-5", "9" * 400):
        body = _with(_plan(), ["options", "num_microbatches"], literal)
        yield Attack("number", f"{literal[:12]} micro-batches", posting("/v1/plans", body))
    many = {**_plan(), "cluster": "99999999xH100"}
    yield Attack("number", "99,999,999 devices", posting("/v1/plans", _json(many)))


def _bounds() -> Iterator[Attack]:
    """Yield names and lists that are as long as a body allows, and numbers beyond their use."""

    def changed(name: str, change: Callable[[dict[str, Any]], Any]) -> Attack:
        body = _plan()
        change(body)
        return Attack("bounds", name, posting("/v1/plans", _json(body)))

    long, deep = "m" * 2**20, "a." * 20_000 + "a"
    layer = example_profile()["layers"][0]["layer"]["name"]
    devices = [{"name": "a"}, {"name": "b"}]
    yield changed("a model's name of 1 MiB", lambda b: b["profile"].update(model=long))
    for key in ("name", "module_type", "cost_class", "opaque"):
        yield changed(
            f"a layer's {key} of 1 MiB",
            lambda b, key=key: b["profile"]["layers"][0]["layer"].update({key: long}),  # type: ignore[misc]
        )
    yield changed(
        "a layer 20,000 deep", lambda b: b["profile"]["layers"][0]["layer"].update(name=deep)
    )
    yield changed("a note of 1 MiB", lambda b: b["profile"].update(notes=[long]))
    yield changed("20,000 notes", lambda b: b["profile"].update(notes=["n"] * 20_000))
    yield changed(
        "5 MiB of module paths",
        lambda b: b["profile"]["layers"][0]["layer"].update(
            module_fqns=[f"{'m' * 400}{number}" for number in range(13_000)]
        ),
    )
    for name, levels in (
        ("5,000 levels of 2^i", [{"group_size": 2**power} for power in range(1, 5000)]),
        ("a group of 10^30", [{"group_size": 10**30}]),
        ("a link's name of 1 MiB", [{"group_size": 2, "name": long}]),
    ):
        yield changed(
            name,
            lambda b, levels=levels: b.update(cluster={"devices": devices, "levels": levels}),  # type: ignore[misc]
        )
    yield changed("a kind of 60 digits", lambda b: b.update(cluster=f"9x{'0' * 60}24GB"))
    yield changed("65,536 devices in 9 characters", lambda b: b.update(cluster="65536xcpu"))
    for name, option in {
        "300,000 pins": {"pins": [{"layer": layer, "stage": 0}] * 300_000},
        "a pin to stage 10^30": {"pins": [{"layer": layer, "stage": 10**30}]},
        "300,000 pairs": {"together": [[layer, layer]] * 300_000},
        "300,000 forbidden cuts": {"no_cut_after": [layer] * 300_000},
        "10^30 stages at most": {"max_stages": 10**30},
        "10^30 replicas at most": {"max_replicas": 10**30},
    }.items():
        yield changed(name, lambda b, option=option: b.update(options=option))  # type: ignore[misc]


def _graphs() -> Iterator[Attack]:
    def changed(name: str, change: Callable[[dict[str, Any]], Any], words: str = "") -> Attack:
        graph = copy.deepcopy(example_graph())
        change(graph)
        body = _json({"graph": graph, "cluster": "2xH100"})
        return Attack("graph", name, posting("/v1/plans", body), words=words)

    def layers(graph: dict[str, Any]) -> None:
        graph["layers"] = graph["layers"] * 10_001
        graph["boundaries"] = [{"after": after} for after in range(20_001)]

    def operations(graph: dict[str, Any]) -> None:
        graph["operations"] = graph["operations"] * 25_001

    yield changed("20,002 layers", layers, "at most 20000")
    yield changed("50,002 operations", operations)
    yield changed("a tensor of 2^62 elements", lambda g: _shape(g, [2**31, 2**31]))
    yield changed("a tensor of 2^41", lambda g: _shape(g, [2**41]))
    yield changed("a negative size", lambda g: _shape(g, [-1, 64]))
    yield changed("an expression as a size", lambda g: _shape(g, [EXPRESSION]))
    yield changed("a billion nodes declared", lambda g: g.update(num_operations=10**9))
    for target in (
        "aten.set_.source_Tensor", "aten.from_file.default", "os.system", "builtins.eval",
        "prims.device_put.default", "higher_order.cond", "aten.linear.default\u0000",
        "\u0430ten.linear.default", "torch.ops.aten.linear.default",
    ):  # fmt: skip
        yield changed(
            f"the operator {target!r}",
            lambda g, target=target: g["operations"][1].update(target=target),  # type: ignore[misc]
        )
    yield changed("an argument that is code", lambda g: _argument(g, {"code": EXPRESSION}))
    yield changed("an argument that is an expression", lambda g: _argument(g, {"expr": EXPRESSION}))
    yield changed("an argument of nothing", lambda g: _argument(g, {"node": "__class__"}))
    yield changed(
        "a cycle", lambda g: g["operations"][0]["arguments"].insert(0, {"node": "second"})
    )
    yield changed("state from a pickle", lambda g: g["state"][0].update(fill={"kind": "pickle"}))
    yield changed("state from a file", lambda g: g["state"][0].update(path="/etc/passwd"))


def _texts() -> Iterator[Attack]:
    for name, path in {
        "a bidirectional override": "/v1/plans/plan_%E2%80%AE000000000000000000000001",
        "a homoglyph": "/v1/plans/pl%D0%B0n_000000000000000000000001",
        "a NUL": "/v1/plans/plan_%00",
        "a lone surrogate": "/v1/plans/%ED%A0%80",
        "overlong dots": "/v1/plans/%C0%AE%C0%AE/%C0%AE%C0%AE/etc/passwd",
        "dots and slashes": "/v1/plans/..%2F..%2F..%2Fetc%2Fpasswd",
        "a line break": "/v1/plans/x%0D%0ASet-Cookie:%20a=b",
        "SQL": "/v1/plans/'%20OR%201=1%20--",
        "8,000 characters": "/v1/plans/" + "x" * 8000,
        "static files above": "/static/..%2f..%2f..%2fetc%2fpasswd",
    }.items():
        yield Attack("text", f"{name} as id", lambda target, path=path: target.ask("GET", path))  # type: ignore[misc]
    for name, text in {
        "overrides": "\u202e\u2066H100\u2069", "a NUL": "2xcpu\u0000", "full width": "\uff12xcpu",
        "100,000 characters": "x" * 100_000,
    }.items():  # fmt: skip
        body = _json({**_plan(), "cluster": text})
        yield Attack("text", f"{name} as cluster", posting("/v1/plans", body))
    for name, cursor in {
        "no cursor": "x",
        "base64 of a pickle": "gASVCwAAAAAAAACMB29zLnN5c3RlbZQu",
    }.items():
        path = f"/v1/plans?cursor={cursor}"
        yield Attack("text", f"{name} as cursor", lambda target, path=path: target.ask("GET", path))  # type: ignore[misc]


def _kinds() -> Iterator[Attack]:
    body = _json(_plan())
    zipped = gzip.compress(b'{"cluster": "' + b"x" * 2**26 + b'"}')
    yield Attack("kind", "gzip", posting("/v1/plans", zipped, Content_Encoding="gzip"))
    for kind in (
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
        "application/octet-stream", "application/python-pickle", "application/xml",
    ):  # fmt: skip
        yield Attack("kind", kind, posting("/v1/plans", body, kind))
    yield Attack("kind", "JSON as an archive", posting("/v1/graphs", body, ARCHIVE))
    yield Attack("kind", "an archive as JSON", posting("/v1/graphs", b"PK\x05\x06", JSON))


def _code() -> Iterator[Attack]:
    source = "import os\nos.system('touch ran')\ndef build(): pass"
    for name, body in {
        "code": {"code": {"source": source}},
        "a factory": {"factory": {"name": "os.system", "arguments": {"command": "touch ran"}}},
        "a factory with a path": {"factory": {"name": "x", "import": "os:system"}},
        "a dotted path": {"model": {"family": "os.system", "config": {}}},
        "code from a hub": {
            "model": {"family": "gpt2", "config": {"auto_map": {"AutoModel": "evil.Model"}}}
        },
        "trust_remote_code": {"model": {"family": "gpt2", "config": {"trust_remote_code": True}}},
        "a path": {"model": {"path": "/etc/passwd"}},
        "an address": {"model": {"url": "http://169.254.169.254/latest/meta-data"}},
    }.items():
        yield Attack(
            "code",
            name,
            posting("/v1/plans", _json({"cluster": "2xcpu", "sample": SAMPLE, **body})),
        )
        yield Attack(
            "code",
            f"{name}, as a job",
            posting("/v1/profile-jobs", _json({"sample": SAMPLE, **body})),
        )


def _heavy() -> Iterator[Attack]:
    """Yield what only the child finds out, and at its own cost."""
    huge = {"hidden_size": 2**16, "num_layers": 64, "input_size": 64}
    model, on_cpu = {"family": "mlp", "config": huge}, {"device": "cpu"}
    body = {"model": model, "sample": SAMPLE, "profiling": on_cpu, "cluster": "2xcpu"}
    yield Attack(
        "child", "a model of a terabyte, measured", posting("/v1/plans", _json(body)), is_heavy=True
    )

    def many(target: Target) -> Any:
        graph = copy.deepcopy(example_graph())
        for operation in graph["operations"]:
            operation["arguments"] = [operation["arguments"][0]] * 3
        return target.post("/v1/plans", {"graph": graph, "cluster": "2xH100"})

    yield Attack("child", "arguments that operators do not take", many, is_heavy=True)

    def lstm(target: Target) -> Any:
        graph = copy.deepcopy(example_graph())
        graph["operations"][0]["outputs"][0]["shape"] = [2**20, 2**20]
        body = {"graph": graph, "profiling": on_cpu, "cluster": "2xcpu"}
        return target.post("/v1/plans", body)

    yield Attack("child", "a graph that contradicts itself, measured", lstm, is_heavy=True)


def _plan() -> dict[str, Any]:
    return {"profile": example_profile(), "cluster": "2x24GB", "options": {}}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _with(request: dict[str, Any], path: list[str | int], literal: str) -> bytes:
    """Return the request as JSON, one value replaced by a literal that ``json`` might not write."""
    here: Any = request
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = "REPLACE ME"
    return _json(request).replace(b'"REPLACE ME"', literal.encode())


def _shape(graph: dict[str, Any], shape: list[Any]) -> None:
    graph["operations"][0]["outputs"][0]["shape"] = shape


def _argument(graph: dict[str, Any], argument: dict[str, Any]) -> None:
    graph["operations"][1]["arguments"][0] = argument
