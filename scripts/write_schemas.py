"""Write the JSON Schema of every document to docs/schemas/; run after changing one."""

from __future__ import annotations

import json
from pathlib import Path

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.document import Document
from stagewright.core.graph.graph import Graph
from stagewright.core.plan.plan import Plan
from stagewright.core.plan.schedule import Schedule
from stagewright.core.plan.timeline import Timeline
from stagewright.core.profile.profile import Profile

DOCUMENTS: dict[str, type[Document]] = {
    "cluster": Cluster,
    "graph": Graph,
    "plan": Plan,
    "profile": Profile,
    "schedule": Schedule,
    "timeline": Timeline,
}

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"


def schema_text(document: type[Document]) -> str:
    """Return the schema of the document's JSON form, keys sorted."""
    schema = document.model_json_schema(mode="serialization")
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, document in DOCUMENTS.items():
        (FOLDER / f"{name}.json").write_text(schema_text(document), encoding="utf-8")


if __name__ == "__main__":
    main()
