"""A project of the echo engine whose report has every section: each prompt gives a column back as the answer."""

from typing import Any

from conftest import Project

LABELS = ("spam", "ham", "other")
PROMPTS = {
    "ask": "{{ question }}",
    "first": "{{ guess_1 }}",
    "second": "{{ guess_2 }}",
    "third": "{{ guess_3 }}",
    "talk": "{{ turn }}",
    "points": "{{ points }}",
    "sort": "{{ sort }}",
    "prefer": "{% if answer_a == reference %}A{% elif answer_b == reference %}E{% else %}C{% endif %}",
    "always": "A",
}


def rows() -> list[dict[str, Any]]:
    """Forty labelled rows: `guess_1` is right now and then, `guess_2` nearly always."""
    made = []
    for n in range(40):
        label = LABELS[n % 2]
        wrong = LABELS[(n + 1) % 2]
        guesses = [label if n % 3 == 0 else wrong, wrong if n % 13 == 1 else label]
        made.append(
            {
                "id": f"r{n:02}",
                "question": f"What is {n}?",
                "reference": label,
                "guess_1": guesses[0],
                "guess_2": guesses[1],
                "guess_3": label if n % 4 else "I cannot say",
                "points": "11" if n % 20 == 3 else str(n % 9 + 1),
                "sort": "R" if n % 3 else "K",
                "human": "" if n % 10 == 9 else "tie" if guesses[0] == guesses[1] else "first",
                "stars": n % 9 + 1 if n % 5 else 5,
                "team": f"team {n % 5}",
            }
        )
    return made


def config() -> dict[str, Any]:
    """Every part of the report, with judges that can be believed and two that cannot."""
    run = {"dataset": "mail", "model": "echo", "metrics": ["label", "exact_match"], "labels": list(LABELS)}
    pairs = {"kind": "pairwise", "model": "echo", "baseline": "one", "runs": ["two"]}
    strong = {"A": "much_first", "B": "first", "C": "tie", "D": "second", "E": "much_second"}
    alone = {"model": "echo", "runs": ["one"]}
    return {
        "datasets": {"mail": {"path": "rows.jsonl"}, "talks": {"path": "talks.jsonl"}},
        "models": {"echo": {"engine": "echo"}},
        "prompts": {
            **{name: {"file": f"{name}.jinja"} for name in PROMPTS},
            "talk": {"file": "talk.jinja", "turns": "turns"},
        },
        "runs": {
            "one": {**run, "prompt": "first", "slices": ["team"]},
            "two": {**run, "prompt": "second"},
            "likely": {**run, "prompt": "ask", "readout": "likelihood", "cluster": "team"},
            "often": {**run, "prompt": "third", "sampling": {"samples": 4, "temperature": 1.0}},
            "talk": {"dataset": "talks", "model": "echo", "prompt": "talk", "metrics": ["number"]},
        },
        "judges": {
            "scorer": {**alone, "kind": "score", "range": [1, 10], "prompt": "points", "human": "stars"},
            "sorter": {**alone, "kind": "classification", "labels": {"R": "refusal", "K": "kind"}, "prompt": "sort"},
            "arena": {**pairs, "prompt": "prefer", "labels": strong, "human": "human"},
            "chance": {**pairs, "prompt": "prefer", "readout": "likelihood"},
            "talker": {"kind": "pointwise", "model": "echo", "prompt": "always", "runs": ["talk"]},
        },
        "juries": {"mixed": {"judges": ["arena", "chance"]}},
        "rankings": {"baseline": "one"},
        "report": {"title": "Everything"},
    }


def write(project: Project) -> None:
    """The project's files, its config included."""
    project.write_rows(rows())
    project.write_rows(
        [{"id": f"t{n}", "turns": [f"Take {n}", f"Then {n + 1}"], "reference": [str(n), "7"]} for n in range(8)],
        "talks.jsonl",
    )
    for name, text in PROMPTS.items():
        project.write_prompt(f"{name}.jinja", text)
    project.write_config(config())
