"""Verifiers against right and wrong answers as models write them, and solutions that cannot be compared with."""

# ruff: noqa: E501

from __future__ import annotations

import json
from typing import Any

import pytest

from services.config.rewards import RewardComponent
from services.rewards.verifiers import choice, code, json_schema, math, tags
from services.rewards.verifiers.text import fenced, without_thoughts

MATH: list[tuple[str, str, bool]] = [
    # Numbers as they are said.
    ("18", "18", True),
    ("The answer is 18.", "18", True),
    ("So Janet makes 9 * 2 = $18 every day.\n#### 18", "#### 18", True),
    ("#### 18", "18", True),
    ("#### $18", "18", True),
    ("#### 1,234", "1234", True),
    ("Total: 1,234 dollars", "1234", True),
    ("**Answer: 42**", "42", True),
    ("Therefore, the result is -7.", "-7", True),
    ("The answer is 0.5", "1/2", True),
    ("The answer is 1/2", "0.5", True),
    ("x = 5", "5", True),
    ("The answer is $x = 5$.", "5", True),
    ("3.0", "3", True),
    ("1e3", "1000", False),
    ("The answer is 19.", "18", False),
    ("The answer is -18.", "18", False),
    ("18 is wrong, the answer is 20.", "18", False),
    ("#### 17", "18", False),
    ("I don't know.", "18", False),
    ("", "18", False),
    ("eighteen", "18", False),
    ("The answer is 1.8", "18", False),
    ("The answer is 180", "18", False),
    ("The answer is 2/3", "3/2", False),
    # LaTeX.
    (r"The final answer is $\boxed{18}$.", "18", True),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", True),
    (r"\boxed{\dfrac{3}{4}}", "0.75", True),
    (r"$\boxed{2\sqrt{3}}$", r"2\sqrt{3}", True),
    (r"$\boxed{\sqrt{12}}$", r"2\sqrt{3}", True),
    (r"$$x = \boxed{7}$$", "7", True),
    (r"\[ \boxed{x^2 + 2x + 1} \]", r"$(x+1)^2$", True),
    (r"\boxed{\pi/2}", r"$\frac{\pi}{2}$", True),
    (r"\boxed{2\pi r}", r"$2 \pi r$", True),
    (r"\boxed{50\%}", r"$50\%$", True),
    (r"\boxed{(1, 2)}", r"$(1,2)$", True),
    (r"\boxed{\{1, 2, 3\}}", r"$\{3, 2, 1\}$", True),
    (r"\boxed{[0, 1)}", r"$[0,1)$", True),
    (r"\boxed{x \in [0, 1]}", r"$[0,1]$", True),
    (r"We get $a = 3$ and $b = 4$, so $a + b = \boxed{7}$.", "7", True),
    (r"First \boxed{3}, no: \boxed{4}", "4", True),
    (r"\boxed{x = 3}", r"$3$", True),
    (r"\boxed{10^3}", "1000", True),
    (r"\boxed{\text{18}}", "18", True),
    (r"$\boxed{-\frac{5}{3}}$", r"$-\frac{5}{3}$", True),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", False),
    (r"\boxed{2\sqrt{2}}", r"2\sqrt{3}", False),
    (r"\boxed{x^2 + 1}", r"$(x+1)^2$", False),
    (r"\boxed{(2, 1)}", r"$(1,2)$", False),
    (r"\boxed{\{1, 2\}}", r"$\{1, 2, 3\}$", False),
    (r"\boxed{(0, 1)}", r"$[0,1]$", False),
    (r"\boxed{-7}", "7", False),
    (r"\boxed{}", "7", False),
    (r"$\boxed{\pi}$", "3", False),
    (r"We think 18, but \boxed{19}", "18", False),
    # Thoughts are no answers.
    ("<think>Is it 3? Or 18?</think>The answer is 18.", "18", True),
    ("<think>It must be 18.</think>The answer is 3.", "18", False),
    ("It must be 3.</think>18", "18", True),
    ("<think>18", "18", False),
    ("<thinking>9 * 2</thinking>\n\n**18**", "18", True),
    ("<reasoning>no</reasoning> $\\boxed{18}$", "18", True),
    ("Let me compute: 2 + 2 = 4, 4 + 14 = 18. The answer: 18", "18", True),
    ("The cost is €18.", "18", True),
    ("18 apples", "18", True),
]

CHOICE: list[tuple[str, str, bool]] = [
    *[(said, "B", True) for said in (
        "B", "b", "(B)", "B.", "B)", "**B**", "`B`", "[B]", '"B"', " B \n", "(b)", "$B$",
        "B) Paris", "B. Paris", "(B) Paris", "B: Paris", "**B)** Paris is the capital.",
        "The answer is B", "The answer is B.", "The answer is (B).", "The answer is **B**.", "the answer is: B",
        "Answer: B", "**Answer:** B", "Answer: (B) Paris", "ANSWER: B", "Final answer: B", "The final answer is B.",
        "The correct answer is B.", "The correct answer is option B.", "The correct option is B.", "The correct choice is (B).",
        "The correct answer is: **B) Paris**", "I choose option B.", "So the answer must be B.", "The answer would be B.",
        "The answer is B because Paris is the capital.", "The answer is B, since it is.", "The answer is B - Paris",
        r"\boxed{B}", r"The answer is $\boxed{B}$.", r"\boxed{\text{B}}", r"\boxed{(B)}", r"\boxed{\text{(B)}}", r"\boxed{B.}",
        "Paris is the capital of France.\n\nB", "Paris is the capital of France.\n**B**",
        "At first A looks right. The answer is A. Wait, no. The answer is B.",
        "<think>The answer is A.</think>The answer is B.", "A? no.</think>B", "Option B is right.\nAnswer: B",
        "Let's see:\nA) London: no\nB) Paris: yes\nThe answer is B",
    )],
    *[(said, "B", False) for said in (
        "A", "(C)", "The answer is C.", "Answer: D", r"\boxed{A}", "A) London", "", "Paris", "I am not sure.", "A or B",
        "The answer is Paris.", "Both are right.", "The answer is A good one.", "<think>B</think>A", "<think>The answer is B.",
        "The answer is B. Wait, no. The answer is C.", "BB", "AB", "Answer: none of them", "\\boxed{}", "2", "E",
        "Bananas are yellow.", "It could be B, or C.\nAnswer: C",
    )],
]  # fmt: skip

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "tags": {"type": "array"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GOOD, BAD = '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": "36"}'
JSON: list[tuple[str, bool]] = [
    *[(said, True) for said in (
        GOOD, f" {GOOD}\n", f"```json\n{GOOD}\n```", f"```\n{GOOD}\n```", f"```JSON\n{GOOD}\n```", f"~~~json\n{GOOD}\n~~~",
        f"Here is the JSON:\n\n```json\n{GOOD}\n```\n\nLet me know!", f"Here it is: {GOOD}", f"{GOOD} is my answer.",
        f"Sure! {GOOD}", f"<think>{BAD}</think>{GOOD}", f"Hm.</think>\n```json\n{GOOD}\n```",
        f"First try:\n```json\n{BAD}\n```\nBetter:\n```json\n{GOOD}\n```", f"I had {BAD}, now {GOOD}",
        '{"name": "Ada", "age": 0}', '{"name": "", "age": 1}', '{"age": 1, "name": "x"}', '{"name": "Ada", "age": 36.0}',
        '{"name": "Ada", "age": 36, "tags": []}', '{"name": "Ada", "age": 36, "tags": [1, {"a": 2}]}',
        '{\n  "name": "Ada",\n  "age": 36\n}', '{"name":"Ada","age":36}', '{"name": "\\u00e9", "age": 3}',
        '{"name": "a } b", "age": 3}', '{"name": "a \\" b", "age": 3}', "```json\n" + GOOD, f"```jsonc\n{GOOD}\n```",
        f"[see below]\n{GOOD}", f"Set {{x}}: {GOOD}", f"````json\n{GOOD}\n````", f"   ```json\n{GOOD}\n   ```",
        '{"name": "Äda ☃", "age": 12345678901234567890}',
    )],
    *[(said, False) for said in (
        BAD, "", "none", "null", "3", '"Ada"', "[]", "[1, 2]", "{}", '{"name": "Ada"}', '{"age": 36}', '{"name": "Ada", "age": -1}',
        '{"name": "Ada", "age": 36.5}', '{"name": 3, "age": 36}', '{"name": null, "age": 36}',
        '{"name": "Ada", "age": 36, "more": 1}', "{'name': 'Ada', 'age': 36}", '{"name": "Ada", "age": 36', '"name": "Ada", "age": 36',
        '{"name": "Ada", "age": NaN}', '{"name": "Ada", "age": Infinity}', '{"name": "Ada", "age": 36,}', '{name: "Ada", age: 36}',
        f"```json\n{BAD}\n```", f"{GOOD}\n```json\n{BAD}\n```", f"<think>{GOOD}</think>", f"<think>{GOOD}", f"[{GOOD}]",
        f'{{"answer": {GOOD}}}', f"first {GOOD}, then {BAD}", '{"name": "Ada", "age": true}', '{"name": "Ada", "age": "x"} text',
        "```python\nprint(1)\n```", '{"name": "Ada", "age": 36, "tags": "x"}', "[" * 5000, "{" * 300 + "}" * 300,
    )],
]  # fmt: skip

TAGS: list[tuple[str, bool]] = [
    *[(said, True) for said in (
        "<think>a</think><answer>b</answer>", "<think>a</think>\n<answer>b</answer>", "  <think>a</think> <answer>b</answer>\n",
        "<think>\na\nb\n</think>\n\n<answer>\nc\n</answer>", "<think>1 < 2 and 3 > 2</think><answer>yes</answer>",
        "<think>a <b>bold</b></think><answer><i>x</i></answer>", "<think>…</think><answer>18</answer>",
        "<think>a & b</think><answer>x = {1}</answer>", "<think>```py\nx\n```</think><answer>y</answer>",
        "<think>" + "word " * 500 + "</think><answer>b</answer>", "<think>a</think>\t<answer>b</answer>",
        "<think>\\boxed{3}</think><answer>3</answer>", "<think>thinking</think><answer>answering</answer>",
        "<think>a.</think><answer>b.</answer>", "<think>é</think><answer>ü</answer>", "\n\n<think>a</think><answer>b</answer>",
        "<think>a</think>\r\n<answer>b</answer>", "<think> a </think><answer> b </answer>", "<think>0</think><answer>0</answer>",
        "<think>a</think ><answer>b</answer>".replace("</think >", "</think>"), "<think>?</think><answer>!</answer>",
        "<think>a < b</think><answer>c</answer>", "<think>x</x></think><answer>c</answer>", "<think>-</think><answer>-</answer>",
        "<think>line\n\nline</think>\n\n\n<answer>b</answer>", "<think>\ta</think><answer>\tb</answer>",
        "<think>a</think><answer>b\n</answer>", "<think>a\n</think><answer>\nb</answer>", "<think>a,b</think><answer>c,d</answer>",
        "<think>[a]</think><answer>(b)</answer>", '<think>"a"</think><answer>"b"</answer>',
    )],
    *[(said, False) for said in (
        "", "b", "<answer>b</answer>", "<think>a</think>", "<think>a</think>b", "<think>a</think><answer>b",
        "<think>a<answer>b</answer>", "<answer>b</answer><think>a</think>", "x<think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer>x", "<think>a</think>x<answer>b</answer>", "<think></think><answer>b</answer>",
        "<think>a</think><answer></answer>", "<think> </think><answer>b</answer>", "<think>a</think><answer>\n</answer>",
        "<think>a</think><think>a</think><answer>b</answer>", "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a<think>b</think></think><answer>c</answer>", "<think>a</think><answer>b<answer>c</answer></answer>",
        "<think>a<answer>x</answer></think><answer>b</answer>", "<Think>a</Think><Answer>b</Answer>",
        "<thinking>a</thinking><answer>b</answer>", "< think>a</think><answer>b</answer>", "think a answer b",
        "<think>a</think><answer>b</answer", "<think/><answer>b</answer>", "<think>a</think>&lt;answer&gt;b&lt;/answer&gt;",
        "[think]a[/think][answer]b[/answer]", "<think>a</answer><answer>b</think>", "```\n<think>a</think><answer>b</answer>\n```",
        "<think>a</think><answer>b</answer><think>c</think>",
    )],
]  # fmt: skip


ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
CODE: list[tuple[str, bool]] = [
    *[(said, True) for said in (
        ADD, f"```python\n{ADD}```", f"```py\n{ADD}```", f"```\n{ADD}```", f"```Python\n{ADD}\n```", f"~~~python\n{ADD}~~~",
        f"Here is the code:\n\n```python\n{ADD}```\n\nIt reads two numbers.", f"```python\n{ADD}", f"<think>{ADD[:20]}</think>\n{ADD}",
        f"First:\n```python\nprint(0)\n```\nBetter:\n```python\n{ADD}```", f"```python\n{ADD}```\n```text\n7\n```",
        f"```bash\npip install x\n```\n```python\n{ADD}```", f"```\n3 4\n```\n```python\n{ADD}```",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))", "print(sum(int(x) for x in input().split()))",
        "def main():\n    a, b = input().split()\n    print(int(a) + int(b))\n\nif __name__ == '__main__':\n    main()",
        "a,b=map(int,input().split());print(a+b)", "x = input().split()\nprint(int(x[0]) + int(x[1]), end='')",
        "n = list(map(int, input().split()))\nprint(n[0] + n[1])\nprint()", "print(eval(input().replace(' ', '+')))",
        "from operator import add\nprint(add(*map(int, input().split())))", "import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.readline().split()))) + '\\n')",
        "a, b = map(int, input().split())\nprint(f'{a + b}')", "a, b = map(int, input().split())\nprint(a + b, '')",
        "import math\na, b = map(int, input().split())\nprint(math.floor(a + b))", "class S:\n    pass\na, b = map(int, input().split())\nprint(a - -b)",
        "a, b = map(int, input().split())\nimport sys\nprint('debug', file=sys.stderr)\nprint(a + b)", "a, b = map(int, input().split())\nprint(a + b)\nexit()",
        "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(0)", "try:\n    a, b = map(int, input().split())\nfinally:\n    pass\nprint(a + b)",
        "a, b = map(int, input().split())\nwhile b:\n    a, b = a + 1, b - 1\nprint(a)", "ä, b = map(int, input().split())\nprint(ä + b)",
    )],
    *[(said, False) for said in (
        "", "I cannot write that.", "```python\n```", "print(7)", "print(0)", "a, b = map(int, input().split())\nprint(a - b)",
        "a, b = map(int, input().split())\nprint(a * b)", "a, b = input().split()\nprint(a + b)", "print(input())", "print(a + b)",
        f"```python\n{ADD}```\n```python\nprint(0)\n```", f"```java\n{ADD}```", f"<think>{ADD}", f"<think>```python\n{ADD}```</think>print(1)",
        "a, b = map(int, input().split())\nprint('The sum is', a + b)", "a, b = map(int, input().split())\nprint(a + b + 0.0)",
        "a, b = map(int, input().split())\nprint(a + b)\nprint('done')", "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)",
        "a, b = map(int, input().split())\nprint(a + b)\nassert False", "a, b = map(int, input().split()\nprint(a + b)", " a = 1\nprint(a)",
        "import no_such_module\n" + ADD, "def add(a, b):\n    return a + b", "while True:\n    pass", "import time\ntime.sleep(60)",
        "while True:\n    print('x' * 100000)", "import os\nos.kill(os.getpid(), 9)", "import sys\nsys.exit('7')", "print('7\\n' * 3)",
        "a = input()\nb = input()\nprint(int(a) + int(b))", "def f(): f()\nf()", "raise MemoryError",
    )],
]  # fmt: skip


@pytest.mark.parametrize(("answer", "solution", "right"), MATH)
def test_math(answer: str, solution: str, right: bool) -> None:
    assert math.judge(answer, solution) == float(right)


@pytest.mark.parametrize(("answer", "solution", "right"), CHOICE)
def test_choice(answer: str, solution: str, right: bool) -> None:
    assert choice.judge(answer, solution) == float(right)


@pytest.mark.parametrize(("answer", "right"), JSON)
def test_json_schema(answer: str, right: bool) -> None:
    assert json_schema.judge(answer, SCHEMA) == json_schema.judge(answer, json.dumps(SCHEMA)) == float(right)


@pytest.mark.parametrize(("answer", "right"), CODE)
def test_code(answer: str, right: bool) -> None:
    cases = [{"input": "3 4", "output": "7"}, {"input": "-1 1\n", "output": "0\n"}]
    assert code.judge(answer, cases, case_limit_s=0.5) == float(right)


def test_code_is_tested_by_asserts_and_in_part() -> None:
    right, wrong = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"
    tests = "assert add(3, 4) == 7\nassert add(0, 0) == 0"
    assert code.judge(right, tests=tests) == 1.0
    assert code.judge(wrong, tests=tests) == 0.0
    assert code.judge("import sys\nsys.exit(0)", tests=tests) == 0.0, "it has not come to the tests' end"
    cases = [{"output": "1"}, {"output": "2"}]
    assert code.judge("print(1)", cases) == 0.0
    assert code.judge("print(1)", cases, partial=True) == 0.5


@pytest.mark.parametrize(("answer", "right"), TAGS)
def test_tags(answer: str, right: bool) -> None:
    assert tags.judge(answer) == float(right)


def test_each_table_has_sixty_answers() -> None:
    for table in (MATH, CHOICE, JSON, TAGS, CODE):
        assert len(table) >= 60
        rights = [row[-1] for row in table]
        assert min(rights.count(True), rights.count(False)) >= 20


def test_an_answer_that_was_cut_has_no_form() -> None:
    assert tags.judge("<think>a</think><answer>b</answer>", complete=False) == 0.0
    assert tags.judge("<plan>a</plan>", tags="plan") == 1.0


@pytest.mark.parametrize(
    ("verifier", "metadata"),
    [
        (math, {"solution": "no value at all"}),
        (math, {"solution": ""}),
        (choice, {"solution": "Paris"}),
        (choice, {"solution": "E", "choices": ["a", "b", "c", "d"]}),
        (json_schema, {"schema": {"type": "no such type"}}),
        (json_schema, {"schema": "{"}),
        (tags, {"tags": "<a>"}),
        (code, {}),
        (code, {"cases": [{"input": "1"}]}),
    ],
)
def test_what_cannot_be_judged_is_an_error_and_no_zero(verifier: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(Exception):  # noqa: B017 - each library has its own
        verifier.judge("18", **metadata)


def test_texts_are_read_as_models_write_them() -> None:
    assert without_thoughts("<think>a</think>b<think>c</think>d") == "bd"
    assert without_thoughts("a</think>b") == "b"
    assert fenced("x\n```python\na\n```\n~~~\nb\n~~~\n```js\nc") == [("python", "a\n"), ("", "b\n"), ("js", "c")]


def test_a_component_names_one_kind() -> None:
    assert RewardComponent(name="a", verifier="json-schema").called == "services.rewards.verifiers.json_schema:judge"
    assert RewardComponent(name="a", verifier="code").starts_processes
    assert not RewardComponent(name="a", verifier="math").starts_processes
    with pytest.raises(ValueError, match="exactly one of verifier, function and model"):
        RewardComponent(name="a", verifier="math", function="m:f")
    with pytest.raises(ValueError, match="holds no value"):
        RewardComponent(name="a", verifier="math", clip=(1.0, 0.0))
