"""How tests read pages: `pytest tests/unit/docs/test_pages.py`."""

import pytest

from tests.support.pages import Block, anchors, blocks, fences, links, missing_lines
from tests.support.shell_words import commands, logical_lines

PAGE = """# A page

```sh
echo one
```

```text
one
```

Words between.

```sh cluster
kubectl get pods
```

Prose keeps these two apart.

```text
not expected
```

1. In a list:

   ```sh
   echo two
   ```

````markdown
```sh
echo quoted
```
````
"""


def test_blocks_carry_their_mark_and_what_they_print() -> None:
    """A text block right behind belongs to the commands; one behind prose does not; a quoted fence is no block."""
    assert blocks(PAGE) == [
        Block(3, "", "echo one\n", ("one",)),
        Block(13, "cluster", "kubectl get pods\n", ()),
        Block(25, "", "echo two\n", ()),
    ]


def test_a_fence_or_a_quote_left_open_is_refused() -> None:
    """Else the rest of the page would be taken for commands, and the shell would wait for ever."""
    with pytest.raises(ValueError, match="line 2"):
        fences("words\n```sh\necho\n")
    with pytest.raises(ValueError, match="wait for more"):
        logical_lines("echo 'one\n")


@pytest.mark.parametrize(
    ("expected", "missing"),
    [
        (("one 1", "..."), []),
        (("two", "one"), ["one"]),
        (("one ... two",), ["one ... two"]),
        (("t.o",), ["t.o"]),
    ],
)
def test_expected_lines_are_found_in_order(expected: tuple[str, ...], missing: list[str]) -> None:
    """Each behind the one before; `...` is any text within a line, and nothing else is a pattern."""
    assert missing_lines(expected, "zero\none   1\ntwo\n") == missing


def test_links_in_code_are_none() -> None:
    """Neither in a fence nor between backticks."""
    page = "[a](a.md#top) `[b](b.md)` ![c](c.png)\n```sh\n[d](d.md)\n```\n"

    assert links(page) == ["a.md#top", "c.png"]


def test_anchors_are_named_as_github_names_them() -> None:
    """Lower case, spaces to dashes, other signs dropped, repeats numbered; ids count too."""
    page = '# The `cli.py` door, 2nd\n## Same\n## Same\n<a id="here"></a>\n```sh\n# no heading\n```\n'

    assert anchors(page) == {"the-clipy-door-2nd", "same", "same-1", "here"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# a comment\nA=1 B='2 3' tailrace status    # why\n", [("tailrace", "status")]),
        ("a x | b y && c; d &\n", [("a", "x"), ("b", "y"), ("c",), ("d",)]),
        ("curl -s \\\n  localhost\n", [("curl", "-s", "localhost")]),
        ("a > out 2>&1 < in\n", [("a",)]),
        ("cat > f <<'EOF'\nnot a 'command\nEOF\nb\n", [("cat",), ("b",)]),
        ("for x in 1 2; do a $x; done\n", [("a", "$x")]),
    ],
)
def test_commands_of_shell_text(text: str, words: list[tuple[str, ...]]) -> None:
    """Programs and their arguments, without comments, assignments, redirections and keywords."""
    assert [command.words for command in commands(text)] == words
