"""Files that are not documents are refused in words that say what to do."""

import pytest

from stagewright.cli.support.read_documents import read_document
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import Plan


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not JSON: it is empty; write it again"),
        (b'{"a": 1', "is not JSON: it ends too early, in line 1; write it again"),
        (b'{"a": "b', "is not JSON: it ends too early, in line 1; write it again"),
        (b'{"a" 1}', "is not JSON: line 1, column 6 cannot be read; correct it"),
        (b"\xff\xfe\x00", "is not JSON: it is not text, or nested too deeply; name another file"),
    ],
)
def test_what_is_not_json_is_described_without_the_words_of_python(tmp_path, content, expected):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as refused:
        read_document(path, Plan)
    assert str(refused.value) == f"{path} {expected}"
